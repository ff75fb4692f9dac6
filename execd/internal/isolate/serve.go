package isolate

// The server of one isolated session: it runs inside the view, as the first process
// of the session's PID namespace, and serves the daemon alone.
//
// Invariants
//   - It accepts connections only from its control descriptor. When that closes, the
//     server ends, and every process of the session with it.
//   - Runs are those of a bash session: sequential, with exactly the state of the run before. A
//     background run starts with the current state and does not change it.
//   - The session reports the begin and the end of each background run to the daemon, which keeps its output.
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

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/helper"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
)

const (
	runningLimit = 64
	runTime      = 24 * time.Hour
	// Failure is the name of an error in events.
	Failure = "IsolatedError"
)

// Parts makes what an isolated session consists of.
type Parts func(Place) (Shell, Files)

// Shell is the bash session of an isolated session. Its runs come one after the other.
type Shell interface {
	// Enter waits for the turn of a run, and Leave gives it to the next one.
	Enter(r *http.Request) error
	Leave()
	// Serve carries a run out and answers with its events.
	Serve(w http.ResponseWriter, r *http.Request, run *Task)
	// Detach starts a run whose output, the read end of a pipe, is the caller's. ended is to be
	// called once, after the end of the process.
	Detach(run *Task) (child *process.Process, output *os.File, ended func(), err error)
}

// Files are the routes of files.
type Files interface {
	Route(method, path string) http.HandlerFunc
}

// Place is where an isolated session begins, and what it may do there.
type Place struct {
	ID        string
	Directory string
	Env       []string
	Running   int // programs at a time
}

// Task is one run of an isolated session.
type Task struct {
	ID    string
	Code  string
	Envs  map[string]*string // of this run alone
	Limit time.Duration
}

// inside answers for one session.
type inside struct {
	id       string
	shell    Shell
	files    Files
	writable bool // there may be background runs

	mutex   sync.Mutex
	begun   int           // background runs
	control *net.UnixConn // to the daemon
}

// serve is the second half of a helper's life.
func serve(plan *viewPlan, control *net.UnixConn, parts Parts) int {
	served := &inside{id: plan.ID, writable: plan.Logs, control: control}
	served.shell, served.files = parts(Place{ID: plan.ID, Directory: plan.Directory, Env: plan.Env, Running: runningLimit})
	server := helper.Server(http.HandlerFunc(served.handle))
	if !helper.Answer(control, nil) {
		return 2
	}
	_ = server.Serve(helper.Listener{Control: control})
	return 0
}

func (i *inside) handle(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost && r.URL.Path == "/run" {
		i.run(w, r)
		return
	}
	handler := i.files.Route(r.Method, r.URL.Path)
	if handler == nil {
		httpx.NotFound(w)
		return
	}
	if r.URL.Path == "/files/replace" { // clients expect the counts without asking
		query := r.URL.Query()
		query.Set("verbose", "true")
		r.URL.RawQuery = query.Encode()
	}
	handler(w, r)
}

type runRequest struct {
	Code       *string            `json:"code"`
	Envs       map[string]*string `json:"envs"`
	Timeout    *int64             `json:"timeout_seconds"`
	Background *bool              `json:"background"`
}

// check turns it into a run.
func (r *runRequest) check() (*Task, error) {
	for name, value := range r.Envs {
		if !environ.IsName(name) || (value != nil && strings.IndexByte(*value, 0) >= 0) {
			return nil, httpx.BadRequest("envs has an invalid name or value")
		}
	}
	limit, err := httpx.TimeLimit("timeout_seconds", r.Timeout, time.Second)
	if err != nil {
		return nil, err
	}
	if r.Code == nil || strings.TrimSpace(*r.Code) == "" || strings.IndexByte(*r.Code, 0) >= 0 {
		return nil, httpx.BadRequest("command must be a non-blank text without NUL")
	}
	return &Task{ID: httpx.UUID(), Code: *r.Code, Envs: r.Envs, Limit: cmp.Or(limit, runTime)}, nil
}

func (i *inside) run(w http.ResponseWriter, r *http.Request) {
	var request runRequest
	if err := httpx.DecodeJSON(w, r, httpx.CommandBodyLimit, &request); err != nil {
		httpx.WriteError(w, err)
		return
	}
	run, err := request.check()
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	if err := i.shell.Enter(r); err != nil {
		httpx.WriteError(w, err)
		return
	}
	if request.Background != nil && *request.Background {
		i.background(w, run)
		return
	}
	defer i.shell.Leave()
	i.shell.Serve(w, r, run)
}

// background starts a run without waiting for its end; the caller holds the turn and loses it here.
func (i *inside) background(w http.ResponseWriter, run *Task) {
	started, err := i.startBackground(run)
	i.shell.Leave()
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	w.Header().Set(runHeader, run.ID)
	httpx.WriteJSON(w, http.StatusAccepted, map[string]any{
		"session_id": i.id, "run_id": run.ID, "started_at": started.UTC(),
	})
}

func (i *inside) startBackground(run *Task) (at time.Time, err error) {
	if !i.writable {
		return at, httpx.BadRequest("background runs need a first overlay that is written to a file system")
	}
	if i.begun >= runLimit {
		return at, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many background runs in this session")
	}
	child, output, ended, err := i.shell.Detach(run)
	if err != nil {
		return at, err
	}
	defer output.Close() // it is the daemon's
	at = time.Now()
	i.begun++ // only a run that has the turn comes here
	err = i.report(runReport{kind: reportBegun, run: run.ID, at: at}, output)
	go i.follow(run.ID, child, ended)
	if err != nil { // the daemon is gone, and what is not reported does not run
		child.SignalGroup(syscall.SIGKILL)
		return at, httpx.RuntimeError(err)
	}
	return at, nil
}

// report sends the daemon the state of a run.
func (i *inside) report(report runReport, pipe *os.File) error {
	i.mutex.Lock()
	defer i.mutex.Unlock()
	if pipe == nil {
		return report.send(i.control, nil)
	}
	return report.sendWith(i.control, pipe)
}

// follow waits for the end of a background run and reports it.
func (i *inside) follow(id string, child *process.Process, ended func()) {
	<-child.Done
	ended()
	_ = i.report(runReport{kind: reportEnded, run: id, status: child.Status, at: time.Now()}, nil)
}
