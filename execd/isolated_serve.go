package main

// The server of one isolated session: it runs inside the view, as the first process
// of the session's PID namespace, and serves the daemon alone.
//
// Invariants
//   - One way in: connections that arrive on its control descriptor. When that ends,
//     it ends, and everything in the session with it.
//   - Runs are those of a bash session: serialised, the state kept exactly. A background
//     run begins with the state of the moment and leaves it alone.
//   - The daemon is told of the begin and the end of each background run, and has its output.
//   - Files are served from the view with the session's identity.

import (
	"cmp"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	isolatedRunning = 64
	isolatedRunTime = 24 * time.Hour
	isolatedFailure = "IsolatedError"
)

// isolatedParts makes what an isolated session consists of.
type isolatedParts func(isolatedPlace) (isolatedShell, isolatedFiles)

// isolatedShell is the bash session of an isolated session. Its runs come one after the other.
type isolatedShell interface {
	// enter waits for the turn of a run, and leave gives it to the next one.
	enter(r *http.Request) error
	leave()
	// serve carries a run out and answers with its events.
	serve(w http.ResponseWriter, r *http.Request, run *isolatedRun)
	// detach starts a run whose output, the read end of a pipe, is the caller's. ended is to be
	// called once, after the end of the process.
	detach(run *isolatedRun) (process *Process, output *os.File, ended func(), err error)
}

// isolatedFiles are the routes of files.
type isolatedFiles interface {
	route(method, path string) http.HandlerFunc
}

// isolatedPlace is where an isolated session begins, and what it may do there.
type isolatedPlace struct {
	id        string
	directory string
	env       []string
	running   int // programs at a time
}

// isolatedRun is one run of an isolated session.
type isolatedRun struct {
	id    string
	code  string
	envs  map[string]*string // of this run alone
	limit time.Duration
}

// isolatedServer answers for one session.
type isolatedServer struct {
	id       string
	shell    isolatedShell
	files    isolatedFiles
	writable bool // there may be background runs

	mutex   sync.Mutex
	begun   int           // background runs
	control *net.UnixConn // to the daemon
}

// serveIsolated is the second half of a helper's life.
func serveIsolated(plan *viewPlan, control *net.UnixConn, parts isolatedParts) int {
	served := &isolatedServer{id: plan.ID, writable: plan.Logs, control: control}
	served.shell, served.files = parts(isolatedPlace{id: plan.ID, directory: plan.Directory, env: plan.Env, running: isolatedRunning})
	server := helperServer(http.HandlerFunc(served.handle))
	if !answerHelper(control, nil) {
		return 2
	}
	_ = server.Serve(handedOver{control})
	return 0
}

func (i *isolatedServer) handle(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost && r.URL.Path == "/run" {
		i.run(w, r)
		return
	}
	handler := i.files.route(r.Method, r.URL.Path)
	if handler == nil {
		notFound(w)
		return
	}
	if r.URL.Path == "/files/replace" { // clients expect the counts without asking
		query := r.URL.Query()
		query.Set("verbose", "true")
		r.URL.RawQuery = query.Encode()
	}
	handler(w, r)
}

type isolatedRunRequest struct {
	Code       *string            `json:"code"`
	Envs       map[string]*string `json:"envs"`
	Timeout    *int64             `json:"timeout_seconds"`
	Background *bool              `json:"background"`
}

// check turns it into a run.
func (r *isolatedRunRequest) check() (*isolatedRun, error) {
	for name, value := range r.Envs {
		if !isVariableName(name) || (value != nil && strings.IndexByte(*value, 0) >= 0) {
			return nil, badRequest("envs has an invalid name or value")
		}
	}
	limit, err := timeLimit("timeout_seconds", r.Timeout, time.Second)
	if err != nil {
		return nil, err
	}
	if r.Code == nil || strings.TrimSpace(*r.Code) == "" || strings.IndexByte(*r.Code, 0) >= 0 {
		return nil, badRequest("command must be a non-blank text without NUL")
	}
	return &isolatedRun{id: newUUID(), code: *r.Code, envs: r.Envs, limit: cmp.Or(limit, isolatedRunTime)}, nil
}

func (i *isolatedServer) run(w http.ResponseWriter, r *http.Request) {
	var request isolatedRunRequest
	err := decodeJSON(w, r, commandBodyLimit, &request)
	var run *isolatedRun
	if err == nil {
		run, err = request.check()
	}
	if err == nil {
		err = i.shell.enter(r)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	if request.Background != nil && *request.Background {
		i.background(w, run)
		return
	}
	defer i.shell.leave()
	i.shell.serve(w, r, run)
}

// background starts a run that nobody waits for; the caller has the turn, which ends here.
func (i *isolatedServer) background(w http.ResponseWriter, run *isolatedRun) {
	started, err := i.startBackground(run)
	i.shell.leave()
	if err != nil {
		writeError(w, err)
		return
	}
	w.Header().Set(isolatedRunID, run.id)
	writeJSON(w, http.StatusAccepted, map[string]any{
		"session_id": i.id, "run_id": run.id, "started_at": started.UTC(),
	})
}

func (i *isolatedServer) startBackground(run *isolatedRun) (at time.Time, err error) {
	if !i.writable {
		return at, badRequest("background runs need a first overlay that is written to a file system")
	}
	if i.begun >= isolatedRuns {
		return at, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many background runs in this session"}
	}
	process, output, ended, err := i.shell.detach(run)
	if err != nil {
		return at, err
	}
	defer output.Close() // it is the daemon's
	at = time.Now()
	i.begun++ // only a run that has the turn comes here
	err = i.report(runReport{kind: reportBegun, run: run.id, at: at}, output)
	go i.follow(run.id, process, ended)
	if err != nil { // the daemon is gone, and what is not reported does not run
		process.SignalGroup(syscall.SIGKILL)
		return at, runtimeError(err)
	}
	return at, nil
}

// report tells the daemon of a run.
func (i *isolatedServer) report(report runReport, pipe *os.File) error {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if pipe == nil {
		return report.send(i.control, nil)
	}
	return report.sendWith(i.control, pipe)
}

// follow waits for the end of a background run and reports it.
func (i *isolatedServer) follow(id string, process *Process, ended func()) {
	<-process.Done
	ended()
	_ = i.report(runReport{kind: reportEnded, run: id, status: process.Status, at: time.Now()}, nil)
}
