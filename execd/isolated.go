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
	"context"
	"encoding/json"
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
	isolatedLimit    = 64
	isolatedVersion  = "1"
	isolatedAnswer   = 64 << 10
	isolatedPatience = 5 * time.Second  // for an answer of a session's server about itself
	isolatedRetry    = 30 * time.Second // between two attempts to find out whether there is isolation
)

// Isolation is the table of isolated sessions.
type Isolation struct {
	commands *Commands
	program  *Program
	root     string // below it is what sessions write
	pid1     bool   // init duties

	patience time.Duration // for an answer of a session's server about itself
	retry    time.Duration // between two attempts to find out whether there is isolation

	probe   sync.Mutex
	known   bool      // missing holds for good
	missing string    // why there is no isolation; "": there is
	tried   time.Time // when that was found out; zero: not yet

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
func NewIsolation(commands *Commands, program *Program, root string, pid1 bool) *Isolation {
	return &Isolation{
		commands: commands, program: program, root: root, pid1: pid1, patience: isolatedPatience, retry: isolatedRetry,
		byID: map[string]*isolated{},
	}
}

const noIsolation = `isolated sessions are off in this sandbox: create it with the extensions "bootstrap.execd.isolation": "enable" and "sallyport.runtime": "runsc"`

// unavailable says why there is no isolation, by having tried it; "" if there is. Success and
// the want of the capability are final. Any other failure may be of the moment (memory,
// processes, time) and is tried again, at most once in a while.
func (i *Isolation) unavailable() string {
	i.probe.Lock()
	defer i.probe.Unlock()
	if i.known || !i.tried.IsZero() && time.Since(i.tried) < i.retry {
		return i.missing
	}
	if !i.commands.reaper.admin {
		i.known, i.missing = true, noIsolation
		return i.missing
	}
	err := i.try()
	i.tried = time.Now()
	if err != nil {
		i.missing = "isolated sessions do not work here: " + explained(err)
		return i.missing
	}
	i.known, i.missing = true, ""
	return ""
}

// try makes a session and ends it.
func (i *Isolation) try() error {
	if err := i.prepare(); err != nil {
		return err
	}
	scratch, err := os.MkdirTemp(i.root, "probe-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	plan := &viewPlan{Root: i.root, Scratch: scratch, PrivateTmp: true, Directory: "/", UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	request := isolatedRequest{}
	probe, err := i.start(plan, request.namespaces())
	if err != nil {
		return err
	}
	probe.end()
	return nil
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
	spec := helperSpec{flag: isolateFlag, plan: plan, namespaces: namespaces, uid: plan.UID, gid: plan.GID}
	return startHelper(i.commands.reaper, i.program, spec, i.commands.log)
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
	return i.removeIf(id, func() bool { return true })
}

// removeIf removes a session if a condition holds, which is looked at with the mutex held.
func (i *Isolation) removeIf(id string, condition func() bool) bool {
	i.mutex.Lock()
	removed := i.byID[id]
	if removed == nil || !condition() {
		i.mutex.Unlock()
		return false
	}
	delete(i.byID, id)
	if removed.timer != nil {
		removed.timer.Stop()
	}
	i.mutex.Unlock()
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
	go i.expire(watched, watched.used)
}

// expire removes a session in which nothing has run since it was used. A server that does not
// answer may be slow, and then what runs in it goes on: only its end is the session's.
func (i *Isolation) expire(watched *isolated, used time.Time) {
	busy, err := watched.busy(i.patience)
	switch {
	case err != nil && !watched.dead():
		i.mutex.Lock()
		defer i.mutex.Unlock()
		if i.byID[watched.id] == watched {
			watched.timer = time.AfterFunc(i.patience, func() { i.watch(watched) })
		}
	case err == nil && busy:
		i.touch(watched, 0)
		i.watch(watched)
	case !i.removeIf(watched.id, func() bool { return watched.active == 0 && watched.used.Equal(used) }):
		i.watch(watched)
	}
}

// busy asks the server inside whether a background run goes on.
func (s *isolated) busy(patience time.Duration) (bool, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://helper/busy", nil)
	if err != nil {
		return false, err
	}
	response, err := s.helper.idle.RoundTrip(request)
	if err != nil {
		return false, err
	}
	defer response.Body.Close()
	var answer struct{ Busy bool }
	err = json.NewDecoder(io.LimitReader(response.Body, isolatedAnswer)).Decode(&answer)
	return answer.Busy, err
}

// touch notes use, and a change of the number of requests under way.
func (i *Isolation) touch(touched *isolated, change int) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	touched.used = time.Now().UTC()
	touched.active += change
}
