package session

// A run in a bash session.
//
// Invariants
//   - The run's output is one stream that includes stderr. Each event is one line without its terminator. The output
//     never contains the state.
//   - When its client leaves, the command is ended. Time-out and interrupt signal the whole process group.
//   - A stream has exactly one terminal event. The state is kept before that event is sent.

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

// Run is a command to run in a session, with its options.
type Run struct {
	Command   string
	directory string // working directory at the start; "": that of the session
	Limit     time.Duration

	// The following fields are set for runs of isolated sessions only.
	Envs    map[string]*string
	ID      string         // of the run; "": the session's id is sent
	Asking  syscall.Signal // sent first at the time limit (0: SIGKILL) and when the client left (0: SIGTERM)
	Failure string         // name of the error at the time limit; "": commandFailure
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

// exports returns text for bash that sets the run's own variables, so that they take precedence over the session's.
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

// activeRun is one run that has been started.
type activeRun struct {
	given   map[string]string // environment before the changes of the session
	process *process.Process
	pipe    *stream.Pipe
	result  *os.File // memory file into which the driver writes the new state
	parse   func(text []byte, given map[string]string) (shellState, bool)
}

// Serve executes a run and sends its events. The caller has the turn.
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
		panic(http.ErrAbortHandler) // break the transfer: a stream without a terminal event must not look complete
	}
}

// sendStatus sends the terminal event of a run that ended within its time limit.
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

// driver chooses the shell: bash, or sh if the image has no bash.
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
	for name, value := range run.Envs { // they take precedence over the session's variables
		if value != nil {
			env[name] = *value
		}
	}
	spec.Env = environ.List(env)
	return spec, parseSh, shInput(run.Command), nil
}

// fork starts the process with one pipe for stdout and stderr.
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

// Detach starts a run without a time limit. The caller has the turn, and owns output, the read end of the run's pipe.
// The caller must call ended once after the end of the process, to release the run's place among the running commands.
func (s *Sessions) Detach(in *Session, spec *Run) (child *process.Process, output *os.File, ended func(), err error) {
	run, err := s.start(in, spec)
	if err != nil {
		return nil, nil, nil, err
	}
	run.result.Close()
	return run.process, run.pipe.File, s.launcher.Slots.Release, nil
}

// supervise waits for the end of the leader. It ends the process group at the time limit, or when the client leaves.
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

// keepResult stores the new state in the session, if the shell wrote one.
func (s *Sessions) keepResult(in *Session, run *activeRun) error {
	text, err := readState(run.result)
	if err != nil || len(text) == 0 {
		return err
	}
	state, whole := run.parse(text, run.given)
	if !whole {
		return nil // the shell was ended before it had written the whole state
	}
	return s.keep(in, state)
}
