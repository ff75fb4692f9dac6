package files

// File routes with a chosen identity: /v1/filesystem/{uid}/{gid}/….
//
// The daemon forwards such a request to a helper. The helper is this program in another process (helper/start.go). It
// sets that identity and serves the ordinary file routes on the connections that it receives (helper.go). So the kernel
// checks the permissions of each system call.
//
// Invariants
//   - If the identity cannot be set, the request fails. It never runs with the daemon's identity instead.
//   - A helper has only the groups of the account. It has no variables of the daemon's environment and no token. It can
//     be reached only through descriptors that this process passes to it.
//   - The number of helpers is bounded. An idle helper is ended; each helper has one timer for that.
//   - The start of one helper does not delay requests with another identity.

import (
	"errors"
	"log"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/account"
	"sallyport.dev/execd/internal/helper"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
)

const (
	helperLimit = 16
	helperIdle  = 5 * time.Minute
	highestID   = 1<<32 - 2
)

// Identities serves the routes with an identity in their path.
type Identities struct {
	reaper   *process.Reaper
	accounts func() account.Accounts
	log      *log.Logger
	program  *process.Program
	idle     time.Duration // idle time after which a helper is ended

	mutex   sync.Mutex
	helpers map[identity]*identityHelper
}

type identity struct{ uid, gid uint32 }

// identityHelper is the helper of one identity. The embedded Helper and failed are set before started is closed. The
// mutex of Identities guards the later fields.
type identityHelper struct {
	*helper.Helper
	failed  error
	started chan struct{}

	active int
	used   time.Time
	clock  *time.Timer // fires when the helper can be idle too long; set when a request ends for the first time
}

// NewIdentities returns an Identities without helpers.
func NewIdentities(reaper *process.Reaper, accounts func() account.Accounts, logger *log.Logger, program *process.Program) *Identities {
	return &Identities{
		reaper: reaper, accounts: accounts, log: logger, program: program, idle: helperIdle, helpers: map[identity]*identityHelper{},
	}
}

// splitIdentity splits "/uid/gid/route", the part of a path after the prefix. ok is false if the path does not have
// this form. err is set if an id is invalid.
func splitIdentity(rest string) (chosen identity, route string, ok bool, err error) {
	parts := strings.SplitN(rest, "/", 4) // "", uid, gid, route
	if len(parts) != 4 || parts[0] != "" {
		return chosen, "", false, nil
	}
	uid, first := parseIdentityNumber(parts[1])
	gid, second := parseIdentityNumber(parts[2])
	if !first || !second {
		return chosen, "/" + parts[3], true, httpx.BadRequest("uid and gid must be numbers from 0 to 4294967294")
	}
	return identity{uid, gid}, "/" + parts[3], true, nil
}

func parseIdentityNumber(text string) (uint32, bool) {
	value, err := strconv.ParseUint(text, 10, 32)
	return uint32(value), err == nil && value <= highestID && text[0] != '+'
}

// Route returns the handler of a file route after "/uid/gid", or nil if there is none.
func (i *Identities) Route(method, rest string) http.HandlerFunc {
	chosen, route, ok, err := splitIdentity(rest)
	if !ok || !IsFileRoute(method, route) {
		return nil
	}
	return func(w http.ResponseWriter, r *http.Request) {
		if err != nil {
			httpx.WriteError(w, err)
			return
		}
		i.serve(w, r, chosen, route)
	}
}

// serve answers a request for an ordinary file route.
func (i *Identities) serve(w http.ResponseWriter, r *http.Request, chosen identity, route string) {
	taken, err := i.take(chosen)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	defer i.giveBack(chosen, taken)
	taken.Forward(w, r, route)
}

// take returns a running helper. Each successful take needs a giveBack.
func (i *Identities) take(chosen identity) (*identityHelper, error) {
	taken, first, err := i.reserve(chosen)
	if err != nil {
		return nil, err
	}
	if first {
		taken.Helper, taken.failed = i.start(chosen)
		close(taken.started)
	}
	<-taken.started
	if taken.failed == nil {
		return taken, nil
	}
	if first {
		i.log.Printf("no helper for an identity: %v", taken.failed)
	}
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if i.helpers[chosen] == taken {
		delete(i.helpers, chosen)
	}
	return nil, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "cannot act as this identity: "+sys.Reason(taken.failed))
}

// reserve returns the helper of an identity. first reports whether the caller must start it.
func (i *Identities) reserve(chosen identity) (found *identityHelper, first bool, err error) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	found = i.helpers[chosen]
	// killed, for example by a process of the same user or for lack of memory
	if found != nil && found.ended() {
		i.drop(chosen, found)
		found = nil
	}
	if found != nil {
		found.active++
		return found, false, nil
	}
	if len(i.helpers) >= helperLimit && !i.makeRoom() {
		return nil, false, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many identities at once")
	}
	found = &identityHelper{started: make(chan struct{}), active: 1}
	i.helpers[chosen] = found
	return found, true, nil
}

// ended reports whether the helper was started and its process has ended.
func (h *identityHelper) ended() bool {
	select {
	case <-h.started:
	default:
		return false
	}
	if h.failed != nil {
		return false // take removes it
	}
	select {
	case <-h.Process.Done:
		return true
	default:
		return false
	}
}

func (i *Identities) giveBack(chosen identity, taken *identityHelper) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	taken.active--
	taken.used = time.Now()
	if taken.clock == nil && i.helpers[chosen] == taken {
		taken.clock = time.AfterFunc(i.idle, func() { i.expire(chosen, taken) })
	}
}

// expire ends a helper that was idle for the limit. Otherwise it restarts the helper's timer.
func (i *Identities) expire(chosen identity, watched *identityHelper) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if i.helpers[chosen] != watched {
		return
	}
	left := i.idle - time.Since(watched.used)
	if watched.active > 0 {
		left = i.idle
	}
	if left > 0 {
		watched.clock.Reset(left)
		return
	}
	i.drop(chosen, watched)
}

// makeRoom ends the helper that has been idle for longest. It returns false if no helper is idle. The caller holds the
// mutex.
func (i *Identities) makeRoom() bool {
	var oldest identity
	var found *identityHelper
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

// drop removes a helper and ends it by closing its control connection. The caller holds the mutex.
func (i *Identities) drop(chosen identity, dropped *identityHelper) {
	delete(i.helpers, chosen)
	if dropped.clock != nil {
		dropped.clock.Stop()
	}
	dropped.Control.Close()
	dropped.Idle.CloseIdleConnections()
	if dropped.active == 0 {
		dropped.Process.SignalGroup(syscall.SIGKILL)
	}
}

// EndAll ends every helper. No later request is forwarded to one of them.
func (i *Identities) EndAll() {
	i.mutex.Lock()
	ending := i.helpers
	i.helpers = map[identity]*identityHelper{}
	for _, each := range ending {
		if each.clock != nil {
			each.clock.Stop()
		}
	}
	i.mutex.Unlock()
	for _, each := range ending {
		if <-each.started; each.failed == nil {
			each.End()
		}
	}
}

var errGroups = errors.New("not permitted to change groups")

// identityPlan is the plan that the daemon sends to a helper.
type identityPlan struct {
	UID, GID uint32
	Groups   []uint32
	Switch   bool // whether the helper must set this identity; otherwise it has it already
}

// start starts a helper for an identity.
func (i *Identities) start(chosen identity) (*helper.Helper, error) {
	credential, err := i.accounts().Identity(chosen.uid, &chosen.gid)
	if err != nil {
		return nil, err
	}
	plan := identityPlan{UID: credential.Uid, GID: credential.Gid, Groups: credential.Groups, Switch: os.Geteuid() == 0}
	if !plan.Switch && !alreadyIs(credential) {
		return nil, errGroups
	}
	return helper.Start(i.reaper, i.program, helper.Spec{Flag: HelperFlag, Plan: plan, UID: plan.UID, GID: plan.GID}, i.log)
}

// alreadyIs reports whether this process, which cannot change its identity, already has the wanted one.
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
