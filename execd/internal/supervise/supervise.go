// Package supervise is init mode: PID 1 of a sandbox.
//
// Invariants
//   - The entrypoint is a child like any other, in its own session and group, with an empty stdin. The daemon ends with
//     the entrypoint's status (128+n for a signal).
//   - TERM, INT, HUP, QUIT, USR1, USR2 and WINCH are forwarded to the entrypoint's group. TERM, INT and QUIT also begin
//     the shutdown: processes that have not stopped after the grace period are killed.
//   - The entrypoint starts after the start script has run and preStart has succeeded. It starts again when an init
//     requests that and the shutdown has not begun.
//   - If the API is lost permanently, the entrypoint is ended as after TERM, and the daemon ends with ExitUnserved.
//   - Only as PID 1 the daemon signals all processes; otherwise it signals only the groups that it started.
package supervise

import (
	"errors"
	"fmt"
	"io/fs"
	"log"
	"maps"
	"os"
	"slices"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/process"
)

const (
	exitNotFound   = 127
	exitNotAllowed = 126
	leftoverGrace  = 3 * time.Second
	leftoverLook   = 10 * time.Millisecond
)

// ForwardedSignals are the signals that are forwarded to the entrypoint's group.
var ForwardedSignals = []os.Signal{
	syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH,
}

// idleEntrypoint is the default entrypoint of the SDKs. Its only purpose is to wait. If the image has no tail, the
// daemon waits itself, so that an empty image can also be a sandbox.
var idleEntrypoint = []string{"tail", "-f", "/dev/null"}

// Supervisor runs the entrypoint.
type Supervisor struct {
	reaper  *process.Reaper
	env     *environ.Environment
	log     *log.Logger
	grace   time.Duration
	signals <-chan os.Signal
	again   chan struct{}   // a value requests a restart of the entrypoint
	lost    <-chan struct{} // closed when the API is lost permanently

	program     string        // path of this program
	scriptLimit time.Duration // time limit of the start script
}

// NewSupervisor makes a Supervisor; it starts nothing. The supervisor acts on the values of signals. The caller closes
// lost when the API is lost permanently. program is the path by which a shell starts this program.
func NewSupervisor(
	reaper *process.Reaper, env *environ.Environment, log *log.Logger, grace time.Duration, signals <-chan os.Signal, lost <-chan struct{}, program string,
) *Supervisor {
	return &Supervisor{
		reaper: reaper, env: env, log: log, grace: grace, signals: signals, again: make(chan struct{}, 1), lost: lost,
		program: program, scriptLimit: preScriptLimit,
	}
}

// Restart requests that the entrypoint is ended and started again. It does not wait.
func (s *Supervisor) Restart() {
	select {
	case s.again <- struct{}{}:
	default: // already requested
	}
}

// Prepare runs the start script and the preStart hook, and starts the periodic hooks.
func (s *Supervisor) Prepare(hooks *Hooks, lifecycle Lifecycle, entrypoint []string) error {
	s.sourcePreScript(entrypoint)
	return hooks.Begin(lifecycle)
}

// Await waits until Prepare has ended, the API is lost, or a signal ends this process. If it returns an error, status
// is the exit status for this process.
func (s *Supervisor) Await(prepared <-chan error) (status int, err error) {
	for {
		select {
		case err := <-prepared:
			return 1, err
		case <-s.lost:
			return ExitUnserved, errors.New("the API is gone")
		case sig := <-s.signals:
			if Ends(sig) {
				return 128 + int(sig.(syscall.Signal)), fmt.Errorf("signal: %s", sig)
			}
		}
	}
}

// Run starts the entrypoint and returns the exit status for this process. It calls started after each start.
func (s *Supervisor) Run(entrypoint []string, started func()) int {
	for {
		status, again := s.runOnce(entrypoint, started)
		if !again {
			return status
		}
	}
}

func (s *Supervisor) runOnce(entrypoint []string, started func()) (status int, again bool) {
	command, err := s.commandLine(entrypoint)
	path := ""
	if err == nil {
		path, err = s.lookup(command[0])
	}
	if err != nil {
		if slices.Equal(command, idleEntrypoint) {
			started()
			return s.idle(), false
		}
		s.log.Printf("entrypoint: %v", err)
		return exitNotFound, false
	}
	null, err := process.OpenNull()
	if err != nil {
		s.log.Printf("entrypoint: %v", err)
		return exitNotAllowed, false
	}
	child, err := s.reaper.Start(process.Spec{
		Path: path, Argv: command, Env: s.env.ForEntrypoint(), Files: [3]uintptr{null.Fd(), 1, 2},
	})
	null.Close()
	if err != nil {
		s.log.Printf("entrypoint: %v", err)
		if errors.Is(err, fs.ErrNotExist) {
			return exitNotFound, false
		}
		return exitNotAllowed, false
	}
	started()
	if status, again = s.supervise(child); !again {
		s.EndEverything()
	}
	return status, again
}

func (s *Supervisor) lookup(name string) (string, error) {
	search, _ := s.env.Lookup("PATH")
	return process.LookProgram(name, search)
}

// idle waits in place of `tail -f /dev/null`, and returns the exit status for this process.
func (s *Supervisor) idle() int {
	for {
		select {
		case <-s.again: // there is nothing to start again
		case <-s.lost:
			s.EndEverything()
			return ExitUnserved
		case sig := <-s.signals:
			if sig != syscall.SIGWINCH {
				s.EndEverything()
				return 128 + int(sig.(syscall.Signal))
			}
		}
	}
}

// Ends reports whether a signal ends this process.
func Ends(sig os.Signal) bool {
	return sig == syscall.SIGTERM || sig == syscall.SIGINT || sig == syscall.SIGQUIT
}

// supervise waits until the entrypoint has ended; again reports whether it must be started again.
func (s *Supervisor) supervise(child *process.Process) (status int, again bool) {
	var kill <-chan time.Time // fires after the grace period, which begins with the first request to stop
	stopping := func() {
		if kill == nil {
			kill = time.After(s.grace)
		}
	}
	lost, unserved, ending := s.lost, false, false
	for {
		select {
		case <-child.Done:
			if unserved {
				return ExitUnserved, false
			}
			return process.ExitNumber(child.Status), again
		case <-s.again:
			if ending {
				continue
			}
			again = true
			child.SignalGroup(syscall.SIGTERM)
			stopping()
		case <-lost:
			lost, unserved, ending, again = nil, true, true, false
			child.SignalGroup(syscall.SIGTERM)
			stopping()
		case sig := <-s.signals:
			child.SignalGroup(sig.(syscall.Signal))
			if Ends(sig) {
				ending, again = true, false
				stopping()
			}
		case <-kill:
			s.log.Print("the entrypoint did not stop in time; killing it")
			child.SignalGroup(syscall.SIGKILL)
		}
	}
}

// EndEverything ends the processes that the entrypoint left: TERM, a short grace period, KILL. As PID 1 it ends all
// processes. Otherwise it ends the groups that this process started, including groups whose leader ends meanwhile and
// groups that are started meanwhile.
func (s *Supervisor) EndEverything() {
	asked := map[*process.Process]*process.Group{} // held, because their leaders can be reaped meanwhile
	defer func() {
		for _, held := range asked {
			held.Release()
		}
	}()
	remains := func(sig syscall.Signal) bool {
		if os.Getpid() == 1 {
			return syscall.Kill(-1, sig) == nil
		}
		for _, child := range s.reaper.Live() {
			if asked[child] != nil {
				continue
			}
			if held, ok := child.Hold(); ok {
				asked[child] = &held
				held.Signal(syscall.SIGTERM)
			}
		}
		if sig == syscall.SIGTERM {
			return len(asked) > 0
		}
		maps.DeleteFunc(asked, func(_ *process.Process, held *process.Group) bool {
			if held.Signal(sig) {
				return false
			}
			held.Release()
			return true
		})
		return len(asked) > 0
	}
	if !remains(syscall.SIGTERM) {
		return
	}
	for deadline := time.Now().Add(min(leftoverGrace, s.grace)); time.Now().Before(deadline); time.Sleep(leftoverLook) {
		s.reaper.Collect()
		if !remains(0) {
			return
		}
	}
	remains(syscall.SIGKILL)
}

// ExitUnserved is the exit status of a daemon whose API is lost permanently.
const ExitUnserved = 125
