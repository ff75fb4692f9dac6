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

const isolatedRunning = 64

// isolatedServer answers for one session.
type isolatedServer struct {
	sessions *Sessions
	session  *session
	files    *Files
	writable bool // there may be background runs

	mutex   sync.Mutex
	begun   int           // background runs
	control *net.UnixConn // to the daemon
}

// serveIsolated is the second half of a helper's life.
func serveIsolated(plan *viewPlan, control *net.UnixConn) int {
	served := newIsolatedServer(plan, NewReaper(), control)
	server := helperServer(http.HandlerFunc(served.handle))
	if !answerHelper(control, nil) {
		return 2
	}
	_ = server.Serve(handedOver{control})
	return 0
}

func newIsolatedServer(plan *viewPlan, reaper *Reaper, control *net.UnixConn) *isolatedServer {
	env := &Environment{own: environMap(plan.Env)}
	env.publish()
	accounts := func() Accounts { return LoadAccounts("") }
	launcher := &Launcher{
		reaper: reaper, env: env, accounts: accounts, directory: plan.Directory, tail: defaultTail,
		slots: NewSlots(isolatedRunning), leftovers: newLeftovers(), log: log.New(io.Discard, "", 0),
	}
	served := &isolatedServer{
		sessions: NewSessions(launcher),
		files:    NewFiles(env, accounts, plan.Directory, currentUmask()),
		writable: plan.Logs,
		control:  control,
	}
	served.session = newSession(plan.Directory)
	served.session.id = plan.ID
	served.sessions.add(served.session)
	return served
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
	w.Header().Set(isolatedRunID, request.id)
	writeJSON(w, http.StatusAccepted, map[string]any{
		"session_id": i.session.id, "run_id": request.id, "started_at": started.UTC(),
	})
}

func (i *isolatedServer) startBackground(request *sessionRunRequest) (at time.Time, err error) {
	if !i.writable {
		return at, badRequest("background runs need a first overlay that is written to a file system")
	}
	if i.begun >= isolatedRuns {
		return at, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many background runs in this session"}
	}
	run, err := i.sessions.start(i.session, request)
	if err != nil {
		return at, err
	}
	run.result.Close()
	defer run.pipe.read.Close() // it is the daemon's
	at = time.Now()
	i.begun++ // only a run that has the turn comes here
	err = i.report(runReport{kind: reportBegun, run: request.id, at: at}, run.pipe.read)
	go i.follow(request.id, run.process)
	if err != nil { // the daemon is gone, and what is not reported does not run
		run.process.SignalGroup(syscall.SIGKILL)
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
func (i *isolatedServer) follow(id string, process *Process) {
	<-process.Done
	i.sessions.launcher.slots.release()
	_ = i.report(runReport{kind: reportEnded, run: id, status: process.Status, at: time.Now()}, nil)
}
