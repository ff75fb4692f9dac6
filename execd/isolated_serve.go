package main

// The server of one isolated session: it runs inside the view, as the first process
// of the session's PID namespace, and serves the daemon alone.
//
// Invariants
//   - One way in: connections that arrive on its control descriptor. When that ends,
//     it ends, and everything in the session with it.
//   - Runs are those of a bash session: serialised, the state kept exactly. A background
//     run begins with the state of the moment and leaves it alone.
//   - Files are served from the view with the session's identity.

import (
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	isolatedRuns    = 256 // background runs of a session, finished ones too
	isolatedRunning = 64
	isolatedLogMax  = 16 << 20
	isolatedTail    = "EXECD-ISOLATED-TAIL-"
)

// isolatedServer answers for one session.
type isolatedServer struct {
	sessions *Sessions
	session  *session
	files    *Files
	logs     string // directory for the output of background runs; "": there is none

	mutex sync.Mutex
	runs  map[string]*record // in the background
}

// serveIsolated is the second half of a helper's life.
func serveIsolated(plan *viewPlan, control *net.UnixConn) int {
	served := newIsolatedServer(plan, NewReaper())
	server := helperServer(http.HandlerFunc(served.handle))
	if !answerHelper(control, nil) {
		return 2
	}
	_ = server.Serve(handedOver{control})
	return 0
}

func newIsolatedServer(plan *viewPlan, reaper *Reaper) *isolatedServer {
	env := &Environment{own: environMap(plan.Env)}
	env.publish()
	accounts := func() Accounts { return LoadAccounts("") }
	commands := &Commands{
		reaper: reaper, records: NewRecords(isolatedRunning), leftovers: newLeftovers(), env: env, accounts: accounts,
		directory: plan.Directory, tail: defaultTail, log: log.New(io.Discard, "", 0),
	}
	commands.records.outputs.each = isolatedLogMax
	served := &isolatedServer{
		sessions: NewSessions(commands),
		files:    NewFiles(env, accounts, plan.Directory, currentUmask()),
		runs:     map[string]*record{},
	}
	if plan.Logs {
		served.logs = plan.Directory
	}
	served.session = newSession(plan.Directory)
	served.session.id = plan.ID
	served.sessions.add(served.session)
	return served
}

func (i *isolatedServer) handle(w http.ResponseWriter, r *http.Request) {
	switch parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/"), "/"); {
	case r.Method == http.MethodPost && r.URL.Path == "/run":
		i.run(w, r)
	case r.Method == http.MethodGet && r.URL.Path == "/busy":
		writeJSON(w, http.StatusOK, map[string]bool{"busy": i.busy()})
	case r.Method == http.MethodGet && parts[0] == "runs" && len(parts) == 2:
		i.status(w, parts[1])
	case r.Method == http.MethodGet && parts[0] == "runs" && len(parts) == 3 && parts[2] == "logs":
		i.output(w, r, parts[1])
	default:
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
}

type isolatedRunRequest struct {
	Code       *string            `json:"code"`
	Envs       map[string]*string `json:"envs"`
	Timeout    *int64             `json:"timeout_seconds"`
	Background *bool              `json:"background"`
}

// check turns it into a run of a session.
func (r *isolatedRunRequest) check() (*sessionRunRequest, time.Duration, error) {
	for name, value := range r.Envs {
		if !isVariableName(name) || (value != nil && strings.IndexByte(*value, 0) >= 0) {
			return nil, 0, badRequest("envs has an invalid name or value")
		}
	}
	run := &sessionRunRequest{Command: r.Code, envs: r.Envs, id: newUUID(), asking: syscall.SIGINT, failure: "IsolatedError"}
	seconds, err := timeLimit("timeout_seconds", r.Timeout, time.Second)
	if err != nil {
		return nil, 0, err
	}
	milliseconds := seconds.Milliseconds()
	run.Timeout = &milliseconds
	limit, err := run.check()
	return run, limit, err
}

func (i *isolatedServer) run(w http.ResponseWriter, r *http.Request) {
	var request isolatedRunRequest
	err := decodeJSON(w, r, commandBodyLimit, &request)
	var run *sessionRunRequest
	var limit time.Duration
	if err == nil {
		run, limit, err = request.check()
	}
	if err == nil {
		err = i.sessions.enter(r, i.session)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	if request.Background != nil && *request.Background {
		i.background(w, run)
		return
	}
	defer i.sessions.leave(i.session)
	i.sessions.serve(w, r, i.session, run, limit)
}

// background starts a run that nobody waits for; the caller has the turn, which ends here.
func (i *isolatedServer) background(w http.ResponseWriter, request *sessionRunRequest) {
	started, err := i.startBackground(request)
	i.sessions.leave(i.session)
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusAccepted, map[string]any{
		"session_id": i.session.id, "run_id": started.id, "started_at": started.started.UTC(),
	})
}

func (i *isolatedServer) startBackground(request *sessionRunRequest) (*record, error) {
	if i.logs == "" {
		return nil, badRequest("background runs need a first overlay that is written to a file system")
	}
	i.mutex.Lock()
	full := len(i.runs) >= isolatedRuns
	i.mutex.Unlock()
	if full {
		return nil, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many background runs in this session"}
	}
	started, err := i.sessions.start(i.session, request)
	if err != nil {
		return nil, err
	}
	started.result.Close()
	commands := i.sessions.commands
	rec := &record{
		id: request.id, background: true, started: time.Now(), process: started.process, done: make(chan struct{}),
		output: commands.records.outputs.open(func() (*os.File, int64, error) {
			file, err := namelessFile(i.logs)
			return file, 1, err
		}),
	}
	settle := started.pipe.keepIn(rec.output, commands.leftovers)
	i.mutex.Lock()
	i.runs[rec.id] = rec
	i.mutex.Unlock()
	go i.follow(rec, settle)
	return rec, nil
}

// follow waits for the end of a background run.
func (i *isolatedServer) follow(rec *record, settle func()) {
	<-rec.process.Done
	settle()
	result := outcomeOf(rec.process.Status)
	rec.mutex.Lock()
	rec.finished, rec.exitCode, rec.failure = time.Now(), result.exitCode, result.failure
	rec.mutex.Unlock()
	close(rec.done)
	i.sessions.commands.records.release()
}

func (i *isolatedServer) find(id string) (*record, error) {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if found := i.runs[id]; found != nil {
		return found, nil
	}
	return nil, &problem{http.StatusNotFound, "RUN_NOT_FOUND", "run " + id + " not found"}
}

type isolatedRunStatus struct {
	SessionID  string     `json:"session_id"`
	RunID      string     `json:"run_id"`
	Running    bool       `json:"running"`
	ExitCode   *int       `json:"exit_code,omitempty"`
	Error      string     `json:"error,omitempty"`
	StartedAt  time.Time  `json:"started_at"`
	FinishedAt *time.Time `json:"finished_at,omitempty"`

	OutputDropped int64 `json:"output_dropped,omitempty"` // bytes
}

func (i *isolatedServer) status(w http.ResponseWriter, id string) {
	rec, err := i.find(id)
	if err != nil {
		writeError(w, err)
		return
	}
	status := rec.status()
	writeJSON(w, http.StatusOK, isolatedRunStatus{
		i.session.id, rec.id, status.Running, status.ExitCode, status.Error, status.StartedAt, status.FinishedAt, status.OutputDropped,
	})
}

func (i *isolatedServer) output(w http.ResponseWriter, r *http.Request, id string) {
	rec, err := i.find(id)
	if err != nil {
		writeError(w, err)
		return
	}
	writeLog(w, r, rec, isolatedTail)
}

func (i *isolatedServer) busy() bool {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	for _, rec := range i.runs {
		if rec.running() {
			return true
		}
	}
	return false
}
