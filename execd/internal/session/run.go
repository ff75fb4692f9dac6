package session

// A run in a bash session.
//
// Invariants
//   - The run's output is one stream, stderr in it, a line per event without its
//     terminator; the state never travels with it.
//   - A client that leaves ends its command; time-out and interrupt concern the
//     whole process group.
//   - Exactly one terminal event; the state is kept before it is sent.

import (
	"cmp"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/stream"
	"sallyport.dev/execd/internal/sys"
)

type runRequest struct {
	Command *string `json:"command"`
	Cwd     *string `json:"cwd"`
	Timeout *int64  `json:"timeout"`
}

// Run says what to run in a session, and how.
type Run struct {
	Command   string
	directory string // to begin in; "": where the session is
	Limit     time.Duration

	// What a run of an isolated session has besides.
	Envs    map[string]*string
	ID      string         // of the run; else the session's
	Asking  syscall.Signal // sent first at the time limit (else SIGKILL) and when the client left (else SIGTERM)
	Failure string         // name of the error at the time limit; else that of any failure
}

const commandFailure = "CommandExecError"

func (s *Sessions) run(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var request runRequest
		if err := httpx.DecodeJSON(w, r, httpx.CommandBodyLimit, &request); err != nil {
			httpx.WriteError(w, err)
			return
		}
		spec, err := request.check()
		if err != nil {
			httpx.WriteError(w, err)
			return
		}
		found := s.find(id)
		if found == nil {
			httpx.WriteError(w, httpx.ContextNotFound(id))
			return
		}
		if err := s.Enter(r, found); err != nil {
			httpx.WriteError(w, err)
			return
		}
		defer s.Leave(found)
		s.Serve(w, r, found, spec)
	}
}

// exports is text for bash that gives the run's own variables precedence over the session's.
func (r *Run) exports() string {
	var text strings.Builder
	for name, value := range r.Envs {
		if value != nil {
			text.WriteString(`\builtin export ` + name + `='` + strings.ReplaceAll(*value, `'`, `'\''`) + "'\n")
		}
	}
	return text.String()
}

func (r *runRequest) check() (*Run, error) {
	if r.Command == nil || strings.TrimSpace(*r.Command) == "" || strings.IndexByte(*r.Command, 0) >= 0 {
		return nil, httpx.BadRequest("command must be a non-blank text without NUL")
	}
	limit, err := httpx.TimeLimit("timeout", r.Timeout, time.Millisecond)
	if err != nil {
		return nil, err
	}
	spec := &Run{Command: *r.Command, Limit: cmp.Or(limit, runTime)}
	if r.Cwd != nil {
		spec.directory = *r.Cwd
	}
	return spec, nil
}

// activeRun is one run under way.
type activeRun struct {
	given   map[string]string // environment without what the session made of it
	process *process.Process
	pipe    *stream.Pipe
	result  *os.File // where the driver leaves the new state
	parse   func(text []byte, given map[string]string) (shellState, bool)
}

// Serve carries out a run; the caller has the turn.
func (s *Sessions) Serve(w http.ResponseWriter, r *http.Request, in *Session, spec *Run) {
	run, err := s.start(in, spec)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	defer s.launcher.Slots.Release()
	defer run.result.Close()
	s.begun(in, run.process)
	began := time.Now()
	events := stream.New(w)
	if spec.ID != "" {
		events.Begin(spec.ID)
	} else {
		events.Begin(in.id)
	}

	lines := &stream.Lines{Bare: true, Emit: func(text []byte) { events.Text("stdout", text) }}
	drained := make(chan struct{})
	go func() {
		run.pipe.CopyTo(lines, events.Flush, s.launcher.Leftovers)
		close(drained)
	}()
	timedOut := s.supervise(r, run.process, spec, events)
	run.pipe.LeaderGone(s.launcher.Tail)
	events.PingUntil(drained)

	status := run.process.Status
	if !status.Signaled() && !timedOut {
		if err := s.keepResult(in, run); err != nil {
			events.Text("stdout", []byte("execd: "+err.Error()))
		}
	}
	if timedOut {
		err = events.Fail(cmp.Or(spec.Failure, commandFailure), "-1", []string{"timeout after " + spec.Limit.String()})
	} else {
		err = sendStatus(events, status, time.Since(began))
	}
	if err != nil {
		panic(http.ErrAbortHandler) // a transfer that is cut off, not a stream without its end
	}
}

// sendStatus sends the terminal event of a run that ended within its time.
func sendStatus(events *stream.Stream, status syscall.WaitStatus, elapsed time.Duration) error {
	if status.Signaled() {
		return events.Fail(commandFailure, "-1", []string{"signal: " + status.Signal().String()})
	}
	if status.ExitStatus() != 0 {
		code := strconv.Itoa(status.ExitStatus())
		return events.Fail(commandFailure, code, []string{"exit status " + code})
	}
	return events.Complete(elapsed)
}

// start forks the shell of a run.
func (s *Sessions) start(in *Session, spec *Run) (run *activeRun, err error) {
	c := s.launcher
	given := c.Env.ForCommand(spec.Envs)
	env := in.state.apply(given)
	if spec.directory != "" {
		directory, err := c.WorkingDirectory(spec.directory, env, in.state.directory)
		if err != nil {
			return nil, httpx.BadRequest(err.Error())
		}
		in.state.directory = directory
		env["PWD"] = directory
	} else if err := process.CheckDirectory(in.state.directory); err != nil {
		return nil, httpx.BadRequest(err.Error())
	}
	if !c.Slots.Reserve() {
		return nil, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many running commands")
	}
	defer func() {
		if err != nil {
			c.Slots.Release()
		}
	}()
	driver, parse, input, err := s.driver(in, env, spec)
	if err != nil {
		return nil, httpx.RuntimeError(err)
	}
	source, err := sys.MemoryFileOf(input)
	if err != nil {
		return nil, httpx.RuntimeError(err)
	}
	defer source.Close()
	result, err := sys.MemoryFileOf(nil)
	if err != nil {
		return nil, httpx.RuntimeError(err)
	}
	run = &activeRun{given: given, result: result, parse: parse}
	if err = run.fork(c.Reaper, driver, source); err != nil {
		result.Close()
		return nil, httpx.RuntimeError(err)
	}
	return run, nil
}

const (
	shellInput = 3
	bashResult = 4
	shResult   = 9
)

// driver chooses the shell.
func (s *Sessions) driver(in *Session, env map[string]string, run *Run) (
	spec process.Spec, parse func([]byte, map[string]string) (shellState, bool), input []byte, err error,
) {
	search, _ := s.launcher.Env.Lookup("PATH")
	spec = process.Spec{Dir: in.state.directory, Env: environ.List(env)}
	if spec.Path, err = process.LookProgram("bash", search); err == nil {
		spec.Argv = []string{"bash", "--noprofile", "--norc", "-c", bashDriver, "bash"}
		return spec, parseBash, in.state.input(run.exports(), run.Command), nil
	}
	if spec.Path, err = process.LookProgram("sh", search); err != nil {
		return spec, nil, nil, process.ErrNoShell
	}
	spec.Argv = []string{"sh", "-c", shDriver, "sh"}
	for name, value := range run.Envs { // they come before what the session made of them
		if value != nil {
			env[name] = *value
		}
	}
	spec.Env = environ.List(env)
	return spec, parseSh, shInput(run.Command), nil
}

// fork starts the process with one destination for both outputs.
func (run *activeRun) fork(reaper *process.Reaper, spec process.Spec, source *os.File) error {
	null, err := process.OpenNull()
	if err != nil {
		return err
	}
	defer null.Close()
	pipe, output, err := stream.NewPipe()
	if err != nil {
		return err
	}
	defer syscall.Close(output)
	run.pipe = pipe
	spec.Files = [3]uintptr{null.Fd(), uintptr(output), uintptr(output)}
	spec.Extra = map[int]uintptr{shellInput: source.Fd()}
	if spec.Argv[0] == "sh" {
		spec.Extra[shResult] = run.result.Fd()
	} else {
		spec.Extra[bashResult] = run.result.Fd()
	}
	if run.process, err = reaper.Start(spec); err != nil {
		pipe.File.Close()
	}
	return err
}

// Detach starts a run whose output, the read end of a pipe, is the caller's, and which may last
// for as long as it likes; the caller has the turn. ended is to be called once, after the end of
// the process: it gives the place of the run back.
func (s *Sessions) Detach(in *Session, spec *Run) (child *process.Process, output *os.File, ended func(), err error) {
	run, err := s.start(in, spec)
	if err != nil {
		return nil, nil, nil, err
	}
	run.result.Close()
	return run.process, run.pipe.File, s.launcher.Slots.Release, nil
}

// supervise waits for the leader and ends it at the time limit, or when the client left.
func (s *Sessions) supervise(
	r *http.Request, child *process.Process, spec *Run, events *stream.Stream,
) (timedOut bool) {
	expired := time.NewTimer(spec.Limit)
	defer expired.Stop()
	ticker := time.NewTicker(stream.PingInterval)
	defer ticker.Stop()
	left := r.Context().Done()
	for {
		select {
		case <-child.Done:
			return timedOut
		case <-expired.C:
			if timedOut = true; spec.Asking != 0 {
				go child.EndWith(spec.Asking, process.InterruptGrace)
			} else {
				timedOut = child.SignalGroup(syscall.SIGKILL)
			}
		case <-left:
			left = nil
			go child.EndWith(cmp.Or(spec.Asking, syscall.SIGTERM), process.InterruptGrace)
		case <-ticker.C:
			events.Ping()
		}
	}
}

// keepResult takes the new state over, if the shell left one.
func (s *Sessions) keepResult(in *Session, run *activeRun) error {
	text, err := readState(run.result)
	if err != nil || len(text) == 0 {
		return err
	}
	state, whole := run.parse(text, run.given)
	if !whole {
		return nil // the shell was ended by its user on the way
	}
	return s.keep(in, state)
}
