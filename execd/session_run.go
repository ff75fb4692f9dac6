package main

// A run in a bash session (contract 7).
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
)

type sessionRunRequest struct {
	Command *string `json:"command"`
	Cwd     *string `json:"cwd"`
	Timeout *int64  `json:"timeout"`
}

// runSpec says what to run in a session, and how.
type runSpec struct {
	command   string
	directory string // to begin in; "": where the session is
	limit     time.Duration

	// What a run of an isolated session has besides.
	envs    map[string]*string
	id      string         // of the run; else the session's
	asking  syscall.Signal // sent first at the time limit (else SIGKILL) and when the client left (else SIGTERM)
	failure string         // name of the error at the time limit; else that of any failure
}

const commandFailure = "CommandExecError"

func (s *Sessions) run(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var request sessionRunRequest
		err := decodeJSON(w, r, commandBodyLimit, &request)
		var spec *runSpec
		if err == nil {
			spec, err = request.check()
		}
		found := s.find(id)
		if err == nil && found == nil {
			err = contextNotFound(id)
		}
		if err == nil {
			err = s.enter(r, found)
		}
		if err != nil {
			writeError(w, err)
			return
		}
		defer s.leave(found)
		s.serve(w, r, found, spec)
	}
}

// exports is text for bash that gives the run's own variables precedence over the session's.
func (r *runSpec) exports() string {
	var text strings.Builder
	for name, value := range r.envs {
		if value != nil {
			text.WriteString(`\builtin export ` + name + `='` + strings.ReplaceAll(*value, `'`, `'\''`) + "'\n")
		}
	}
	return text.String()
}

func (r *sessionRunRequest) check() (*runSpec, error) {
	if r.Command == nil || strings.TrimSpace(*r.Command) == "" || strings.IndexByte(*r.Command, 0) >= 0 {
		return nil, badRequest("command must be a non-blank text without NUL")
	}
	limit, err := timeLimit("timeout", r.Timeout, time.Millisecond)
	if err != nil {
		return nil, err
	}
	spec := &runSpec{command: *r.Command, limit: cmp.Or(limit, sessionRunTime)}
	if r.Cwd != nil {
		spec.directory = *r.Cwd
	}
	return spec, nil
}

// sessionRun is one run under way.
type sessionRun struct {
	given   map[string]string // environment without what the session made of it
	process *Process
	pipe    *outputPipe
	result  *os.File // where the driver leaves the new state
	parse   func(text []byte, given map[string]string) (shellState, bool)
}

// serve carries out a run; the caller has the turn.
func (s *Sessions) serve(w http.ResponseWriter, r *http.Request, in *session, spec *runSpec) {
	run, err := s.start(in, spec)
	if err != nil {
		writeError(w, err)
		return
	}
	defer s.launcher.slots.release()
	defer run.result.Close()
	s.begun(in, run.process)
	began := time.Now()
	stream := newEventStream(w)
	if spec.id != "" {
		stream.begin(spec.id)
	} else {
		stream.begin(in.id)
	}

	lines := &lineSplitter{bare: true, emit: func(text []byte) { stream.text("stdout", text) }}
	drained := make(chan struct{})
	go func() {
		run.pipe.copyTo(lines, stream.flush, s.launcher.leftovers)
		close(drained)
	}()
	timedOut := s.supervise(r, run.process, spec, stream)
	run.pipe.leaderGone(s.launcher.tail)
	stream.pingUntil(drained)

	status := run.process.Status
	if !status.Signaled() && !timedOut {
		if err := s.keepResult(in, run); err != nil {
			stream.text("stdout", []byte("execd: "+err.Error()))
		}
	}
	switch {
	case timedOut:
		stream.fail(cmp.Or(spec.failure, commandFailure), "-1", []string{"timeout after " + spec.limit.String()})
	case status.Signaled():
		stream.fail(commandFailure, "-1", []string{"signal: " + status.Signal().String()})
	case status.ExitStatus() != 0:
		code := strconv.Itoa(status.ExitStatus())
		stream.fail(commandFailure, code, []string{"exit status " + code})
	default:
		stream.complete(time.Since(began))
	}
}

// start forks the shell of a run.
func (s *Sessions) start(in *session, spec *runSpec) (run *sessionRun, err error) {
	c := s.launcher
	given := c.env.ForCommand(spec.envs)
	env := in.state.apply(given)
	if spec.directory != "" {
		directory, err := c.workingDirectory(spec.directory, env, in.state.directory)
		if err != nil {
			return nil, badRequest(err.Error())
		}
		in.state.directory = directory
		env["PWD"] = directory
	} else if err := checkDirectory(in.state.directory); err != nil {
		return nil, badRequest(err.Error())
	}
	if !c.slots.reserve() {
		return nil, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many running commands"}
	}
	defer func() {
		if err != nil {
			c.slots.release()
		}
	}()
	driver, parse, input, err := s.driver(in, env, spec)
	if err != nil {
		return nil, runtimeError(err)
	}
	source, err := stateFile(input)
	if err != nil {
		return nil, runtimeError(err)
	}
	defer source.Close()
	result, err := stateFile(nil)
	if err != nil {
		return nil, runtimeError(err)
	}
	run = &sessionRun{given: given, result: result, parse: parse}
	if err = run.fork(c.reaper, driver, source); err != nil {
		result.Close()
		return nil, runtimeError(err)
	}
	return run, nil
}

const (
	shellInput = 3
	bashResult = 4
	shResult   = 9
)

// driver chooses the shell.
func (s *Sessions) driver(in *session, env map[string]string, run *runSpec) (
	spec Spec, parse func([]byte, map[string]string) (shellState, bool), input []byte, err error,
) {
	search, _ := s.launcher.env.Lookup("PATH")
	spec = Spec{Dir: in.state.directory, Env: environList(env)}
	if spec.Path, err = lookProgram("bash", search); err == nil {
		spec.Argv = []string{"bash", "--noprofile", "--norc", "-c", bashDriver, "bash"}
		return spec, parseBash, in.state.input(run.exports(), run.command), nil
	}
	if spec.Path, err = lookProgram("sh", search); err != nil {
		return spec, nil, nil, errNoShell
	}
	spec.Argv = []string{"sh", "-c", shDriver, "sh"}
	for name, value := range run.envs { // they come before what the session made of them
		if value != nil {
			env[name] = *value
		}
	}
	spec.Env = environList(env)
	return spec, parseSh, shInput(run.command), nil
}

// fork starts the process with one destination for both outputs.
func (run *sessionRun) fork(reaper *Reaper, spec Spec, source *os.File) error {
	null, err := openNull()
	if err != nil {
		return err
	}
	defer null.Close()
	pipe, output, err := newOutputPipe()
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
		pipe.read.Close()
	}
	return err
}

// detach starts a run whose output, the read end of a pipe, is the caller's, and which may last
// for as long as it likes; the caller has the turn. ended is to be called once, after the end of
// the process: it gives the place of the run back.
func (s *Sessions) detach(in *session, spec *runSpec) (process *Process, output *os.File, ended func(), err error) {
	run, err := s.start(in, spec)
	if err != nil {
		return nil, nil, nil, err
	}
	run.result.Close()
	return run.process, run.pipe.read, s.launcher.slots.release, nil
}

// supervise waits for the leader and ends it at the time limit, or when the client left.
func (s *Sessions) supervise(
	r *http.Request, process *Process, spec *runSpec, stream *eventStream,
) (timedOut bool) {
	expired := time.NewTimer(spec.limit)
	defer expired.Stop()
	ticker := time.NewTicker(pingInterval)
	defer ticker.Stop()
	left := r.Context().Done()
	for {
		select {
		case <-process.Done:
			return timedOut
		case <-expired.C:
			if timedOut = true; spec.asking != 0 {
				go process.endWith(spec.asking, interruptGrace)
			} else {
				timedOut = process.SignalGroup(syscall.SIGKILL)
			}
		case <-left:
			left = nil
			go process.endWith(cmp.Or(spec.asking, syscall.SIGTERM), interruptGrace)
		case <-ticker.C:
			stream.ping()
		}
	}
}

// keepResult takes the new state over, if the shell left one.
func (s *Sessions) keepResult(in *session, run *sessionRun) error {
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
