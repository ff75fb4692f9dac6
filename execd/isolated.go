package main

// Isolated sessions (contract 11): sessions with a file system view, processes and
// temporary files of their own, inside one sandbox: making and ending them.
// isolated_routes.go is what clients see of them, isolated_spec.go checks what is asked
// for, isolated_view.go makes it, isolated_serve.go runs inside.
//
// They need CAP_SYS_ADMIN over the sandbox's own mounts. Without it nothing is
// pretended: the capabilities say so and every other route answers 503.
//
// Invariants
//   - No session exists whose view, identity or network is not as asked for.
//   - Sessions are bounded in number and in what they write; a deleted one leaves
//     neither processes nor files.
//   - The server inside is spoken to with bounded answers; its end is the session's.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	isolatedLimit   = 64
	isolatedStart   = 15 * time.Second
	isolatedVersion = "1"
	isolatedAnswer  = 64 << 10
)

// Isolation is the table of isolated sessions.
type Isolation struct {
	commands *Commands
	program  string // ourselves
	root     string // below it is what sessions write
	pid1     bool   // init duties

	probe   sync.Once
	missing string // why there is no isolation; "": there is

	mutex    sync.Mutex
	byID     map[string]*isolated
	starting int
}

// isolated is one session; what follows helper is guarded by the mutex of Isolation.
type isolated struct {
	id      string
	request *isolatedRequest
	created time.Time
	scratch string
	helper  *helper

	used   time.Time // the last run's begin or end
	active int       // requests under way
	runs   map[string]time.Time
	timer  *time.Timer
}

// NewIsolation looks at nothing yet.
func NewIsolation(commands *Commands, program, root string, pid1 bool) *Isolation {
	return &Isolation{commands: commands, program: program, root: root, pid1: pid1, byID: map[string]*isolated{}}
}

// unavailable says why there is no isolation, by having tried it; "" if there is.
func (i *Isolation) unavailable() string {
	i.probe.Do(func() {
		if !i.commands.reaper.admin {
			i.missing = `isolated sessions are off in this sandbox: create it with the extensions "bootstrap.execd.isolation": "enable" and "sallyport.runtime": "runsc"`
			return
		}
		if err := i.prepare(); err != nil {
			i.missing = "isolated sessions do not work here: " + explained(err)
			return
		}
		scratch, err := os.MkdirTemp(i.root, "probe-")
		if err == nil {
			defer os.RemoveAll(scratch)
			plan := &viewPlan{Root: i.root, Scratch: scratch, PrivateTmp: true, Directory: "/", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
			var probe *helper
			request := isolatedRequest{}
			if probe, err = i.start(plan, request.namespaces()); err == nil {
				probe.end()
			}
		}
		if err != nil {
			i.missing = "isolated sessions do not work here: " + explained(err)
		}
	})
	return i.missing
}

// prepare makes the directory of sessions and removes what an earlier daemon left there.
func (i *Isolation) prepare() error {
	if err := os.MkdirAll(i.root, 0o711); err != nil {
		return err
	}
	entries, err := os.ReadDir(i.root)
	for _, entry := range entries {
		_ = os.RemoveAll(filepath.Join(i.root, entry.Name()))
	}
	return err
}

func (i *Isolation) make(request *isolatedRequest, plan *viewPlan) (*isolated, error) {
	i.mutex.Lock()
	full := len(i.byID)+i.starting >= isolatedLimit
	if !full {
		i.starting++
	}
	i.mutex.Unlock()
	if full {
		return nil, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many isolated sessions"}
	}
	defer func() {
		i.mutex.Lock()
		i.starting--
		i.mutex.Unlock()
	}()
	if slices.ContainsFunc(plan.Mounts, func(m viewMount) bool { return m.Kind == viewOverlay }) {
		if err := measureUppers(i.root); err != nil {
			return nil, err
		}
	}
	now := time.Now().UTC()
	made := &isolated{id: newUUID(), request: request, created: now, used: now, runs: map[string]time.Time{}}
	made.scratch = filepath.Join(i.root, made.id)
	plan.ID, plan.Scratch = made.id, made.scratch
	err := os.Mkdir(made.scratch, 0o711)
	if err == nil {
		made.helper, err = i.start(plan, request.namespaces())
	}
	if err != nil {
		os.RemoveAll(made.scratch)
		return nil, &problem{http.StatusServiceUnavailable, codeUnavailable, "the session cannot be made: " + explained(err)}
	}
	made.helper.proxy.ModifyResponse = func(response *http.Response) error { return i.note(made, response) }
	made.helper.proxy.ErrorHandler = made.broken
	i.mutex.Lock()
	i.byID[made.id] = made
	i.mutex.Unlock()
	i.watch(made)
	return made, nil
}

// start makes a view and the server in it.
func (i *Isolation) start(plan *viewPlan, namespaces uintptr) (*helper, error) {
	text, err := json.Marshal(plan)
	if err != nil {
		return nil, err
	}
	file, err := stateFile(text)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	control, err := unixConn(ours)
	if err != nil {
		theirs.Close()
		return nil, err
	}
	null, err := openNull()
	if err != nil {
		theirs.Close()
		control.Close()
		return nil, err
	}
	process, err := i.commands.reaper.Start(Spec{
		Path: i.program, Argv: []string{"execd", isolateFlag}, Dir: "/", Namespaces: namespaces,
		Files: [3]uintptr{null.Fd(), 2, 2}, Extra: map[int]uintptr{helperControl: theirs.Fd(), helperPlan: file.Fd()},
	})
	null.Close()
	theirs.Close()
	if err != nil {
		control.Close()
		return nil, err
	}
	started := newHelper(process, control, i.commands.log)
	_ = control.SetReadDeadline(time.Now().Add(isolatedStart))
	answer := make([]byte, 1024)
	n, err := control.Read(answer)
	if string(answer[:n]) != viewReady {
		started.end()
		if n > 0 {
			err = errors.New(string(bytes.ToValidUTF8(answer[:n], []byte("?"))))
		}
		if err == nil || errors.Is(err, io.EOF) {
			err = errors.New("its helper ended")
		}
		return nil, err
	}
	_ = control.SetReadDeadline(time.Time{})
	return started, nil
}

// end kills a helper; with the first process of a PID namespace go all others in it.
func (h *helper) end() {
	h.control.Close()
	h.process.SignalGroup(syscall.SIGKILL)
	<-h.process.Done
	h.idle.CloseIdleConnections()
}

func (s *isolated) dead() bool {
	select {
	case <-s.helper.process.Done:
		return true
	default:
		return false
	}
}

func (s *isolated) idleLimit() time.Duration {
	if s.request.IdleSeconds == nil {
		return 0
	}
	return time.Duration(*s.request.IdleSeconds) * time.Second
}

func (i *Isolation) find(id string) (*isolated, error) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if found := i.byID[id]; found != nil {
		return found, nil
	}
	return nil, sessionNotFound(id)
}

// remove ends a session and takes away what it wrote.
func (i *Isolation) remove(id string) bool {
	i.mutex.Lock()
	removed := i.byID[id]
	delete(i.byID, id)
	if removed != nil && removed.timer != nil {
		removed.timer.Stop()
	}
	i.mutex.Unlock()
	if removed == nil {
		return false
	}
	removed.helper.end()
	if err := os.RemoveAll(removed.scratch); err != nil {
		i.commands.log.Printf("an isolated session left files: %v", reason(err))
	}
	return true
}

// endAll removes every session.
func (i *Isolation) endAll() {
	i.mutex.Lock()
	ids := make([]string, 0, len(i.byID))
	for id := range i.byID {
		ids = append(ids, id)
	}
	i.mutex.Unlock()
	for _, id := range ids {
		i.remove(id)
	}
}

// watch removes a session that has been idle for as long as it may be.
func (i *Isolation) watch(watched *isolated) {
	limit := watched.idleLimit()
	if limit == 0 {
		return
	}
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if i.byID[watched.id] != watched {
		return
	}
	left := limit - time.Since(watched.used)
	if left <= 0 && watched.active > 0 {
		left = time.Second
	}
	if left > 0 {
		watched.timer = time.AfterFunc(left, func() { i.watch(watched) })
		return
	}
	go func() {
		if watched.busy() {
			i.touch(watched, 0)
			i.watch(watched)
			return
		}
		i.remove(watched.id)
	}()
}

// busy asks the server inside whether a background run goes on.
func (s *isolated) busy() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://helper/busy", nil)
	if err != nil {
		return false
	}
	response, err := s.helper.idle.RoundTrip(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	var answer struct{ Busy bool }
	return json.NewDecoder(io.LimitReader(response.Body, isolatedAnswer)).Decode(&answer) == nil && answer.Busy
}

// touch notes use, and a change of the number of requests under way.
func (i *Isolation) touch(touched *isolated, change int) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	touched.used = time.Now().UTC()
	touched.active += change
}
