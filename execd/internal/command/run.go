package command

// Running commands: foreground streams and background commands.
//
// Invariants
//   - A time-out and an interrupt signal the whole process group. After the leader has ended, no new signal is sent to
//     the processes that it left behind. An interrupt that began before still kills them after its grace period.
//   - A command continues if its client disconnects.
//   - A record exists before the first event. The terminal event of a foreground command has the record's result.

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/stream"
	"sallyport.dev/execd/internal/sys"
)

// newRecord makes a record of a running command.
func newRecord(p *plan) *record {
	content := p.shell
	if p.isArgv {
		quoted := make([]string, len(p.argv))
		for i, argument := range p.argv {
			quoted[i] = process.ShellQuote(argument)
		}
		content = strings.Join(quoted, " ")
	}
	return &record{
		id: httpx.ID(), content: recordText(content), background: p.background, started: time.Now(), done: make(chan struct{}),
	}
}

// start starts the command with /dev/null as stdin, and the given descriptors as stdout and stderr.
func (c *Commands) start(p *plan, stdout, stderr uintptr) (*process.Process, error) {
	spec, err := c.spec(p)
	if err != nil {
		return nil, err
	}
	null, err := process.OpenNull()
	if err != nil {
		return nil, err
	}
	defer null.Close()
	spec.Files = [3]uintptr{null.Fd(), stdout, stderr}
	if p.identity != nil { // so that the command can open /dev/stdout
		for _, end := range [...]uintptr{stdout, stderr} {
			_ = syscall.Fchown(int(end), int(p.identity.Uid), -1)
		}
	}
	return c.Reaper.Start(spec)
}

const noShellExit = 127 // exit code with which a shell reports a missing program

// startFailed adds and finishes the record of a command that could not be started.
func (c *Commands) startFailed(rec *record, err error) process.Outcome {
	result := process.Outcome{ExitCode: 255, Failure: recordFailure(sys.Explain(err))}
	if errors.Is(err, process.ErrNoShell) {
		result.ExitCode = noShellExit
	}
	c.records.add(rec)
	c.finish(rec, result)
	return result
}

// finish finishes a record and releases its slot.
func (c *Commands) finish(rec *record, result process.Outcome) {
	c.records.finish(rec, result)
	c.Slots.Release()
}

// supervise waits for the end of the leader, and kills the group at the time limit (0: none). Then it calls settle, if
// it is not nil, and finishes the record.
func (c *Commands) supervise(rec *record, timeout time.Duration, settle func()) {
	var expired <-chan time.Time
	if timeout > 0 {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		expired = timer.C
	}
	timedOut := false
	select {
	case <-rec.process.Done:
	case <-expired:
		timedOut = rec.process.SignalGroup(syscall.SIGKILL)
		<-rec.process.Done
	}
	if settle != nil {
		settle()
	}
	result := process.OutcomeOf(rec.process.Status)
	result.TimedOut = timedOut
	c.finish(rec, result)
}

// foreground runs a command, sends its output as events and waits for its end. It returns an error if the terminal
// event is not delivered.
func (c *Commands) foreground(w http.ResponseWriter, p *plan) error {
	pipes, childEnds, err := stream.Pipes()
	if err != nil {
		c.Slots.Release()
		httpx.WriteError(w, httpx.RuntimeError(err))
		return nil
	}
	rec := newRecord(p)
	rec.process, err = c.start(p, uintptr(childEnds[0]), uintptr(childEnds[1]))
	syscall.Close(childEnds[0])
	syscall.Close(childEnds[1])
	events := stream.New(w)
	if err != nil {
		pipes[0].File.Close()
		pipes[1].File.Close()
		failure := c.startFailed(rec, err).Failure
		events.Begin(rec.id)
		if errors.Is(err, process.ErrNoShell) {
			events.Text("stderr", []byte("execd: "+failure+"\n"))
			return events.Fail("CommandExecError", strconv.Itoa(noShellExit), []string{"exit status " + strconv.Itoa(noShellExit)})
		}
		return events.Fail("CommandExecError", failure, []string{failure})
	}
	c.records.add(rec)
	go c.supervise(rec, p.timeout, nil)
	events.Begin(rec.id)

	var pumps sync.WaitGroup
	for i, kind := range []string{"stdout", "stderr"} {
		lines := &stream.Lines{Bare: !stream.KeepTerminators, Emit: func(text []byte) { events.Text(kind, text) }}
		pumps.Go(func() { pipes[i].CopyTo(lines, events.Flush, c.Leftovers) })
	}
	events.PingUntil(rec.done)
	for _, pipe := range pipes {
		pipe.LeaderGone(c.Tail)
	}
	drained := make(chan struct{})
	go func() {
		pumps.Wait()
		close(drained)
	}()
	events.PingUntil(drained)

	if rec.exitCode == 0 {
		return events.Complete(rec.finished.Sub(rec.started))
	}
	value, traceback := strconv.Itoa(rec.exitCode), []string{rec.failure}
	if rec.timedOut {
		traceback = append(traceback, "timeout after "+p.timeout.String())
	}
	return events.Fail("CommandExecError", value, traceback)
}

// background starts a command and answers at once; the command continues. It returns an error if the terminal event is
// not delivered.
func (c *Commands) background(w http.ResponseWriter, p *plan) error {
	pipe, childEnd, err := stream.NewPipe()
	if err != nil {
		c.Slots.Release()
		httpx.WriteError(w, httpx.RuntimeError(err))
		return nil
	}
	rec := newRecord(p)
	rec.output = c.records.outputs.Open(stream.NewFile)
	rec.process, err = c.start(p, uintptr(childEnd), uintptr(childEnd))
	syscall.Close(childEnd)
	settle := pipe.KeepIn(rec.output, c.Leftovers)
	events := stream.New(w)
	if err != nil {
		failure := c.startFailed(rec, err).Failure
		events.Begin(rec.id)
		return events.Fail("CommandExecError", failure, []string{failure})
	}
	c.records.add(rec)
	go c.supervise(rec, p.timeout, settle)
	events.Begin(rec.id)
	return events.Complete(0)
}
