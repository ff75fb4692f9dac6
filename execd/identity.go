package main

// Files as a chosen identity: /v1/filesystem/{uid}/{gid}/… (contract 10).
//
// A request is handed to a helper: this program again, started as that identity,
// serving the ordinary file routes on connections it is given (identity_helper.go).
// So every permission check is the kernel's, for every system call.
//
// Invariants
//   - An identity that cannot be taken on fails the request; nothing runs as the
//     daemon instead.
//   - A helper has the account's groups only, none of the daemon's environment and
//     no token; it can be reached through descriptors this process hands over, and
//     by nobody else.
//   - Helpers are bounded in number; one that is idle ends.

import (
	"context"
	"errors"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	helperLimit       = 16
	helperIdle        = 5 * time.Minute
	helperConnections = 4 // idle ones kept to a helper
	helperControl     = 3 // descriptor of the helper that brings its connections
	highestID         = 1<<32 - 2
)

var handOverLimit = 5 * time.Second // tests shorten it

// Identities serves the routes with an identity in their path.
type Identities struct {
	reaper   *Reaper
	accounts func() Accounts
	log      *log.Logger
	program  string // ourselves

	mutex   sync.Mutex
	helpers map[identity]*helper
}

type identity struct{ uid, gid uint32 }

// helper is one running helper; active and used are guarded by Identities.
type helper struct {
	process *Process
	control *net.UnixConn
	proxy   *httputil.ReverseProxy
	idle    *http.Transport
	active  int
	used    time.Time
}

// NewIdentities starts no helper yet. program is the file to start as one.
func NewIdentities(reaper *Reaper, accounts func() Accounts, log *log.Logger, program string) *Identities {
	return &Identities{reaper: reaper, accounts: accounts, log: log, program: program, helpers: map[identity]*helper{}}
}

// splitIdentity reads "/uid/gid/route" of a path behind the prefix; ok is false where that
// is no path of ours at all.
func splitIdentity(rest string) (chosen identity, route string, ok bool, err error) {
	parts := strings.SplitN(rest, "/", 4) // "", uid, gid, route
	if len(parts) != 4 || parts[0] != "" {
		return chosen, "", false, nil
	}
	uid, first := parseIdentityNumber(parts[1])
	gid, second := parseIdentityNumber(parts[2])
	if !first || !second {
		return chosen, "/" + parts[3], true, badRequest("uid and gid must be numbers from 0 to 4294967294")
	}
	return identity{uid, gid}, "/" + parts[3], true, nil
}

func parseIdentityNumber(text string) (uint32, bool) {
	value, err := strconv.ParseUint(text, 10, 32)
	return uint32(value), err == nil && value <= highestID && text[0] != '+'
}

// serve answers a request whose route is one of the ordinary file routes.
func (i *Identities) serve(w http.ResponseWriter, r *http.Request, chosen identity, route string) {
	taken, err := i.take(chosen)
	if err != nil {
		writeError(w, err)
		return
	}
	defer i.giveBack(chosen, taken)
	taken.forward(w, r, route)
}

// take returns a running helper; each take needs a giveBack.
func (i *Identities) take(chosen identity) (*helper, error) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	taken := i.helpers[chosen]
	if taken != nil {
		select {
		case <-taken.process.Done: // ended by its user, or for want of memory
			i.drop(chosen, taken)
			taken = nil
		default:
		}
	}
	if taken == nil {
		if len(i.helpers) >= helperLimit && !i.makeRoom() {
			return nil, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many identities at once"}
		}
		started, err := i.start(chosen)
		if err != nil {
			i.log.Printf("no helper for an identity: %v", err)
			return nil, &problem{http.StatusServiceUnavailable, codeUnavailable, "cannot act as this identity: " + reason(err)}
		}
		taken = started
		i.helpers[chosen] = taken
	}
	taken.active++
	return taken, nil
}

func (i *Identities) giveBack(chosen identity, taken *helper) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	taken.active--
	taken.used = time.Now()
	time.AfterFunc(helperIdle, func() {
		i.mutex.Lock()
		defer i.mutex.Unlock()
		if i.helpers[chosen] == taken && taken.active == 0 && time.Since(taken.used) >= helperIdle {
			i.drop(chosen, taken)
		}
	})
}

// makeRoom ends the helper that has been idle the longest; mutex held.
func (i *Identities) makeRoom() bool {
	var oldest identity
	var found *helper
	for chosen, candidate := range i.helpers {
		if candidate.active == 0 && (found == nil || candidate.used.Before(found.used)) {
			oldest, found = chosen, candidate
		}
	}
	if found == nil {
		return false
	}
	i.drop(oldest, found)
	return true
}

// drop ends a helper: it leaves when its control connection closes; mutex held.
func (i *Identities) drop(chosen identity, dropped *helper) {
	delete(i.helpers, chosen)
	dropped.control.Close()
	dropped.idle.CloseIdleConnections()
	if dropped.active == 0 {
		dropped.process.SignalGroup(syscall.SIGKILL)
	}
}

var errGroups = errors.New("not permitted to change groups")

// start forks a helper as an identity.
func (i *Identities) start(chosen identity) (*helper, error) {
	credential, err := i.accounts().Identity(chosen.uid, &chosen.gid)
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		if !alreadyIs(credential) {
			return nil, errGroups
		}
		credential = nil
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	null, err := openNull()
	if err != nil {
		ours.Close()
		return nil, err
	}
	defer null.Close()
	process, err := i.reaper.Start(Spec{
		Path: i.program, Argv: []string{"execd", helperFlag}, Dir: "/", Identity: credential,
		Files: [3]uintptr{null.Fd(), 2, 2}, Extra: map[int]uintptr{helperControl: theirs.Fd()},
	})
	if err != nil {
		ours.Close()
		return nil, err
	}
	control, err := unixConn(ours)
	if err != nil {
		process.SignalGroup(syscall.SIGKILL)
		return nil, err
	}
	return newHelper(process, control, i.log), nil
}

// newHelper speaks to a process that serves on connections handed over by control.
func newHelper(process *Process, control *net.UnixConn, log *log.Logger) *helper {
	started := &helper{process: process, control: control}
	started.idle = &http.Transport{
		DialContext:         func(context.Context, string, string) (net.Conn, error) { return handOver(control) },
		MaxIdleConnsPerHost: helperConnections,
		DisableCompression:  true,
	}
	started.proxy = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.URL.RawQuery = "http", "helper", r.In.URL.RawQuery
			r.Out.Header.Del(tokenHeader)
		},
		Transport: started.idle,
		ErrorLog:  log,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) {
			writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, "the helper of this identity ended"})
		},
	}
	return started
}

// forward passes a request on, as one for another route.
func (h *helper) forward(w http.ResponseWriter, r *http.Request, route string) {
	forwarded := r.Clone(r.Context())
	forwarded.URL.Path, forwarded.URL.RawPath = route, ""
	w, forwarded.Body = passOn(w, r, requestBody(w, r))
	h.proxy.ServeHTTP(w, forwarded)
}

// alreadyIs tells whether this process, which may not change, has an identity already.
func alreadyIs(wanted *syscall.Credential) bool {
	groups, err := os.Getgroups()
	if err != nil || int(wanted.Uid) != os.Geteuid() || int(wanted.Gid) != os.Getegid() {
		return false
	}
	var have, want []uint32
	for _, group := range groups {
		have = append(have, uint32(group))
	}
	own := func(group uint32) bool { return group == wanted.Gid }
	want = slices.DeleteFunc(slices.Clone(wanted.Groups), own)
	have = slices.DeleteFunc(have, own)
	slices.Sort(have)
	slices.Sort(want)
	return slices.Equal(slices.Compact(have), slices.Compact(want))
}

// socketPair is a connected pair of stream sockets.
func socketPair() (ours, theirs *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs"), nil
}

// unixConn takes a socket over; the file is closed.
func unixConn(file *os.File) (*net.UnixConn, error) {
	defer file.Close()
	connection, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	unix, ok := connection.(*net.UnixConn)
	if !ok {
		connection.Close()
		return nil, net.ErrClosed
	}
	return unix, nil
}

// handOver makes a connection and gives its other end to a helper.
func handOver(control *net.UnixConn) (net.Conn, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	_ = control.SetWriteDeadline(time.Now().Add(handOverLimit)) // its user may have stopped it
	if _, _, err := control.WriteMsgUnix([]byte{0}, syscall.UnixRights(int(theirs.Fd())), nil); err != nil {
		ours.Close()
		return nil, err
	}
	return unixConn(ours)
}
