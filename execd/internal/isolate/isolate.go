// Package isolate serves isolated sessions: sessions with a file system view,
// processes and temporary files of their own, inside one sandbox: making and ending them.
// routes.go is what clients see of them, spec.go checks what is asked for, view.go makes it,
// serve.go runs inside, runs.go has their runs in the background and says when a session is
// idle, reports.go is what the server inside reports to the daemon.
//
// They need CAP_SYS_ADMIN over the sandbox's own mounts. Without it,
// the capabilities report that isolation is not available and every other route answers 503.
//
// Invariants
//   - No session exists whose view, identity or network is not as asked for.
//   - Sessions are bounded in number and in what they write; a deleted one leaves
//     neither processes nor files.
//   - A session ends when the server inside ends.
package isolate

import (
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"sallyport.dev/execd/internal/helper"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
)

const (
	sessionLimit = 64
	version      = "1"
	retryAfter   = 30 * time.Second // between two attempts to find out whether there is isolation
)

// fileRoute reports whether a method and a path are a route of files.
type fileRoute = func(method, path string) bool

// Isolation is the table of isolated sessions.
type Isolation struct {
	launcher *process.Launcher
	files    fileRoute
	program  *process.Program
	root     string // below it is what sessions write
	pid1     bool   // init duties

	kept  kept
	retry time.Duration // between two attempts to find out whether there is isolation

	probe   sync.Mutex
	known   bool      // missing holds for good
	missing string    // why there is no isolation; "": there is
	tried   time.Time // when that was found out; zero: not yet

	mutex    sync.Mutex
	byID     map[string]*session
	starting int
}

// session is one session; the mutex of Isolation guards the fields after `told`.
type session struct {
	id      string
	request *request
	created time.Time
	scratch string
	helper  *helper.Helper
	told    chan struct{} // closed when its processes have ended and its runs have their final state

	used    time.Time                 // the last begin or end of a request or a run
	ran     time.Time                 // of a run
	active  int                       // requests under way
	running int                       // runs in the background
	runs    map[string]*backgroundRun // in the background, also those that have ended
	changed chan struct{}             // closed when there is another one
	ended   time.Time                 // of its processes; zero while they are there
	timer   *time.Timer               // until it is removed; nil: something holds it, or it may stay
}

// New does not check yet whether isolation is available.
func New(launcher *process.Launcher, files fileRoute, program *process.Program, root string, pid1 bool) *Isolation {
	return &Isolation{
		launcher: launcher, files: files, program: program, root: root, pid1: pid1, kept: newKept(), retry: retryAfter,
		byID: map[string]*session{},
	}
}

const noIsolation = `isolated sessions are off in this sandbox: create it with the extensions "bootstrap.execd.isolation": "enable" and "sallyport.runtime": "runsc"`

// unavailable creates a session as a test and returns why it failed, or "". Success and the missing capability are
// final. Any other failure can be temporary (memory, processes, time): it is tried again, at most once in an interval.
func (i *Isolation) unavailable() string {
	i.probe.Lock()
	defer i.probe.Unlock()
	if i.known || !i.tried.IsZero() && time.Since(i.tried) < i.retry {
		return i.missing
	}
	if !i.launcher.Reaper.IsAdmin() {
		i.known, i.missing = true, noIsolation
		return i.missing
	}
	err := i.try()
	i.tried = time.Now()
	if err != nil {
		i.missing = "isolated sessions do not work here: " + sys.Explain(err)
		return i.missing
	}
	i.known, i.missing = true, ""
	return ""
}

// try creates a session and ends it.
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
	request := request{}
	probe, err := i.start(plan, request.namespaces())
	if err != nil {
		return err
	}
	probe.End()
	return nil
}

// prepare creates the directory of sessions and removes what an earlier daemon left there.
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

func (i *Isolation) begin(request *request, plan *viewPlan) (*session, error) {
	if !i.reserve() && (!i.makeRoom() || !i.reserve()) {
		return nil, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many isolated sessions")
	}
	defer func() {
		i.mutex.Lock()
		i.starting--
		i.mutex.Unlock()
	}()
	if slices.ContainsFunc(plan.Mounts, func(m viewMount) bool { return m.Kind == viewOverlay }) {
		for err := measureUppers(i.root); err != nil; err = measureUppers(i.root) {
			if !i.makeRoom() {
				return nil, err
			}
		}
	}
	now := time.Now()
	made := &session{
		id: httpx.UUID(), request: request, created: now.UTC(), told: make(chan struct{}), used: now, ran: now,
		runs: map[string]*backgroundRun{}, changed: make(chan struct{}),
	}
	made.scratch = filepath.Join(i.root, made.id)
	plan.ID, plan.Scratch = made.id, made.scratch
	err := os.Mkdir(made.scratch, 0o711)
	if err == nil {
		made.helper, err = i.start(plan, request.namespaces())
	}
	if err != nil {
		os.RemoveAll(made.scratch)
		return nil, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "the session cannot be made: "+sys.Explain(err))
	}
	made.helper.Proxy.ModifyResponse = func(response *http.Response) error { return i.awaitReported(made, response) }
	made.helper.Proxy.ErrorHandler = made.broken
	i.mutex.Lock()
	i.byID[made.id] = made
	i.rest(made)
	i.mutex.Unlock()
	go i.follow(made)
	return made, nil
}

// reserve takes a place for a session that is about to be created.
func (i *Isolation) reserve() bool {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if len(i.byID)+i.starting >= sessionLimit {
		return false
	}
	i.starting++
	return true
}

// start creates a view and the server in it.
func (i *Isolation) start(plan *viewPlan, namespaces uintptr) (*helper.Helper, error) {
	spec := helper.Spec{Flag: Flag, Plan: plan, Namespaces: namespaces, UID: plan.UID, GID: plan.GID}
	return helper.Start(i.launcher.Reaper, i.program, spec, i.launcher.Log)
}

func (s *session) dead() bool {
	select {
	case <-s.helper.Process.Done:
		return true
	default:
		return false
	}
}

func (s *session) idleLimit() time.Duration {
	if s.request.IdleSeconds == nil {
		return 0
	}
	return time.Duration(*s.request.IdleSeconds) * time.Second
}

func (i *Isolation) find(id string) (*session, error) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if found := i.byID[id]; found != nil {
		return found, nil
	}
	return nil, sessionNotFound(id)
}

// remove ends a session and deletes what it wrote.
func (i *Isolation) remove(id string) bool {
	i.mutex.Lock()
	removed := i.byID[id]
	delete(i.byID, id)
	i.mutex.Unlock()
	if removed == nil {
		return false
	}
	i.discard(removed)
	return true
}

// discard is remove for a session that cannot be found any more.
func (i *Isolation) discard(discarded *session) {
	discarded.helper.End()
	<-discarded.told
	i.mutex.Lock()
	i.rest(discarded)
	for _, run := range discarded.runs {
		run.output.Close()
	}
	i.mutex.Unlock()
	if err := os.RemoveAll(discarded.scratch); err != nil {
		i.launcher.Log.Printf("an isolated session left files: %v", sys.Reason(err))
	}
}

// EndAll removes every session.
func (i *Isolation) EndAll() {
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
