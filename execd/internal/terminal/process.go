package terminal

// The process of a terminal, and the output it can show again.
//
// Invariants
//   - Clients read from a ring of the last MiB (scrollback.go) at their own speed:
//     a slow client misses output, gets a notice of it, and never blocks the shell.
//   - Clients get the exit only after all output that came before it.
//   - A signal reaches the foreground group only while the shell has not been reaped.

import (
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/stream"
	"sallyport.dev/execd/internal/sys"
)

const (
	scrollbackLimit = 1 << 20
	firstColumns    = 80
	firstRows       = 24
	inputWriteLimit = 10 * time.Second
)

type terminal struct {
	id        string
	launcher  *process.Launcher
	directory string
	command   string

	mutex    sync.Mutex
	changed  *sync.Cond // output, exit, removal, a change of the holder
	pipes    bool       // fixed by the first client
	started  bool
	process  *process.Process
	input    *os.File // of the terminal, or the pipe to stdin
	output   scrollback
	exited   bool
	exitCode int
	removed  bool
	holder   *attachment
	viewers  int
	used     time.Time
}

func newTerminal(launcher *process.Launcher) *terminal {
	t := &terminal{
		id: httpx.UUID(), launcher: launcher, directory: launcher.Directory, used: time.Now(),
		output: scrollback{limit: scrollbackLimit},
	}
	t.changed = sync.NewCond(&t.mutex)
	return t
}

func (t *terminal) state() (running bool, offset int64) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return t.started && !t.exited, t.output.total
}

func (t *terminal) abandoned(now time.Time) bool {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.holder != nil || t.viewers > 0 {
		return false
	}
	limit := terminalIdle
	if !t.started || t.exited {
		limit = terminalDormant
	}
	return now.Sub(t.used) > limit
}

// add appends output.
func (t *terminal) add(kind byte, data []byte) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.output.add(kind, data)
	t.changed.Broadcast()
}

// begin starts the shell if it does not run. A shell without a command of its own
// is started again after its exit, and its output follows the earlier output.
func (t *terminal) begin(pipes bool) error {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.removed {
		return os.ErrClosed
	}
	if t.started && (!t.exited || t.command != "") {
		return nil
	}
	if !t.started {
		t.pipes = pipes
	}
	if err := t.start(); err != nil {
		return err
	}
	t.started, t.exited = true, false
	return nil
}

// start forks the shell. The mutex is held.
func (t *terminal) start() error {
	env := t.launcher.Env.ForCommand(nil)
	env["TERM"] = "xterm-256color"
	path, argv, err := t.shell()
	if err != nil {
		return err
	}
	spec := process.Spec{Path: path, Argv: argv, Dir: t.directory, Env: environ.List(env)}
	if t.pipes {
		return t.startPipes(spec)
	}
	return t.startTerminal(spec)
}

// shell returns the program of a terminal and its arguments: bash, or sh in an image without it.
func (t *terminal) shell() (path string, argv []string, err error) {
	search, _ := t.launcher.Env.Lookup("PATH")
	argv = []string{"bash", "--norc", "--noprofile"}
	if path, err = process.LookProgram("bash", search); err != nil {
		argv = []string{"sh"}
		path, err = process.LookProgram("sh", search)
	}
	if err != nil {
		return "", nil, process.ErrNoShell
	}
	if t.command != "" {
		argv = append(argv, "-c", t.command)
	}
	return path, argv, nil
}

func (t *terminal) startTerminal(spec process.Spec) error {
	master, slave, err := pty.Open()
	if err != nil {
		return err
	}
	defer slave.Close()
	_ = pty.Setsize(master, &pty.Winsize{Rows: firstRows, Cols: firstColumns})
	spec.Files = [3]uintptr{slave.Fd(), slave.Fd(), slave.Fd()}
	spec.Terminal = true
	child, err := t.launcher.Reaper.Start(spec)
	if err != nil {
		master.Close()
		return err
	}
	t.process, t.input = child, master
	go t.follow(child, master, map[byte]*os.File{kindOutput: master})
	return nil
}

func (t *terminal) startPipes(spec process.Spec) error {
	stdin, input, err := os.Pipe()
	if err != nil {
		return err
	}
	defer stdin.Close()
	pipes, childEnds, err := stream.Pipes()
	if err != nil {
		input.Close()
		return err
	}
	defer syscall.Close(childEnds[0])
	defer syscall.Close(childEnds[1])
	spec.Files = [3]uintptr{stdin.Fd(), uintptr(childEnds[0]), uintptr(childEnds[1])}
	child, err := t.launcher.Reaper.Start(spec)
	if err != nil {
		input.Close()
		pipes[0].File.Close()
		pipes[1].File.Close()
		return err
	}
	t.process, t.input = child, input
	go t.follow(child, input, map[byte]*os.File{kindOutput: pipes[0].File, kindError: pipes[1].File})
	return nil
}

// follow reads the output until the process has ended, and for a short time after it.
func (t *terminal) follow(child *process.Process, input *os.File, outputs map[byte]*os.File) {
	var pumps sync.WaitGroup
	for kind, file := range outputs {
		pumps.Go(func() {
			buffer := make([]byte, 32<<10)
			for {
				n, err := file.Read(buffer)
				if n > 0 {
					t.add(kind, buffer[:n])
				}
				if err != nil {
					return
				}
			}
		})
	}
	<-child.Done
	for _, file := range outputs {
		_ = file.SetReadDeadline(time.Now().Add(t.launcher.Tail))
	}
	pumps.Wait()
	code := child.Status.ExitStatus() // -1 for a signal
	t.mutex.Lock()
	t.exited, t.exitCode = true, code
	t.used = time.Now()
	t.mutex.Unlock()
	t.changed.Broadcast()
	input.Close()
	for _, file := range outputs {
		file.Close()
	}
}

// write passes input to the shell. A shell that does not read it for long is an error.
func (t *terminal) write(data []byte) error {
	t.mutex.Lock()
	input := t.input
	t.mutex.Unlock()
	if input == nil {
		return os.ErrClosed
	}
	_ = input.SetWriteDeadline(time.Now().Add(inputWriteLimit))
	_, err := input.Write(data)
	return err
}

func (t *terminal) resize(columns, rows uint16) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.started && !t.exited && !t.pipes {
		_ = pty.Setsize(t.input, &pty.Winsize{Rows: rows, Cols: columns})
	}
}

// signal reaches the processes in the foreground, and the shell itself if that is
// not enough to end it.
func (t *terminal) signal(sig syscall.Signal) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.process == nil || t.exited {
		return
	}
	foreground := 0
	if !t.pipes {
		foreground = sys.ForegroundGroup(t.input)
	}
	t.process.SignalWith(foreground, sig)
}
