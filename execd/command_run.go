package main

// Carrying out commands (contract 5.2): foreground streams, background commands.
//
// Invariants
//   - Time-out and interrupt concern the whole process group; after the leader
//     has ended nothing it left behind is signalled.
//   - A client that leaves does not end its command.
//   - A record exists before the first event, and the terminal event says what it says.

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// newRecord is running until it is finished.
func newRecord(p *plan) *record {
	content := p.shell
	if p.isArgv {
		quoted := make([]string, len(p.argv))
		for i, argument := range p.argv {
			quoted[i] = shellQuote(argument)
		}
		content = strings.Join(quoted, " ")
	}
	return &record{
		id: newCommandID(), content: recordText(content), background: p.background, started: time.Now(), done: make(chan struct{}),
	}
}

func shellQuote(text string) string {
	plain := func(r rune) bool {
		return r < 0x80 && (isNameByte(byte(r)) || strings.ContainsRune("-./:=@%+,", r))
	}
	if text != "" && strings.IndexFunc(text, func(r rune) bool { return !plain(r) }) < 0 {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// start forks with stdin empty and the given outputs.
func (c *Commands) start(p *plan, stdout, stderr uintptr) (*Process, error) {
	spec, err := c.spec(p)
	if err != nil {
		return nil, err
	}
	null, err := openNull()
	if err != nil {
		return nil, err
	}
	defer null.Close()
	spec.Files = [3]uintptr{null.Fd(), stdout, stderr}
	if p.identity != nil { // whoever runs may open /dev/stdout
		for _, end := range [...]uintptr{stdout, stderr} {
			_ = syscall.Fchown(int(end), int(p.identity.Uid), -1)
		}
	}
	return c.reaper.Start(spec)
}

const noShellExit = 127 // what a shell says about a missing program

// startFailed finishes a record whose process never was.
func (c *Commands) startFailed(rec *record, err error) outcome {
	result := outcome{exitCode: 255, failure: recordFailure(explained(err))}
	if errors.Is(err, errNoShell) {
		result.exitCode = noShellExit
	}
	c.records.add(rec)
	c.finish(rec, result)
	return result
}

// finish ends a record and gives its place back.
func (c *Commands) finish(rec *record, result outcome) {
	c.records.finish(rec, result)
	c.slots.release()
}

// supervise waits for the leader, kills the group at the time limit and
// finishes the record; settle, if any, comes before that.
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
	result := outcomeOf(rec.process.Status)
	result.timedOut = timedOut
	c.finish(rec, result)
}

// outcomeOf says what a status means for a client.
func outcomeOf(status syscall.WaitStatus) outcome {
	result := outcome{exitCode: status.ExitStatus()}
	switch {
	case status.Signaled():
		result.exitCode = -1
		result.failure = "signal: " + status.Signal().String()
	case result.exitCode != 0:
		result.failure = "exit status " + strconv.Itoa(result.exitCode)
	}
	return result
}

// foreground streams the output of a command and waits for its end.
func (c *Commands) foreground(w http.ResponseWriter, p *plan) error {
	pipes, childEnds, err := outputPipes()
	if err != nil {
		c.slots.release()
		writeError(w, runtimeError(err))
		return nil
	}
	rec := newRecord(p)
	rec.process, err = c.start(p, uintptr(childEnds[0]), uintptr(childEnds[1]))
	syscall.Close(childEnds[0])
	syscall.Close(childEnds[1])
	stream := newEventStream(w)
	if err != nil {
		pipes[0].read.Close()
		pipes[1].read.Close()
		failure := c.startFailed(rec, err).failure
		stream.begin(rec.id)
		if errors.Is(err, errNoShell) {
			stream.text("stderr", []byte("execd: "+failure+"\n"))
			return stream.sendFailure("CommandExecError", strconv.Itoa(noShellExit), []string{"exit status " + strconv.Itoa(noShellExit)})
		}
		return stream.sendFailure("CommandExecError", failure, []string{failure})
	}
	c.records.add(rec)
	go c.supervise(rec, p.timeout, nil)
	stream.begin(rec.id)

	var pumps sync.WaitGroup
	for i, kind := range []string{"stdout", "stderr"} {
		lines := &lineSplitter{bare: !keepTerminators, emit: func(text []byte) { stream.text(kind, text) }}
		pumps.Go(func() { pipes[i].copyTo(lines, stream.flush, c.leftovers) })
	}
	stream.pingUntil(rec.done)
	for _, pipe := range pipes {
		pipe.leaderGone(c.tail)
	}
	drained := make(chan struct{})
	go func() {
		pumps.Wait()
		close(drained)
	}()
	stream.pingUntil(drained)

	if rec.exitCode == 0 {
		return stream.sendComplete(rec.finished.Sub(rec.started))
	}
	value, traceback := strconv.Itoa(rec.exitCode), []string{rec.failure}
	if rec.timedOut {
		traceback = append(traceback, "timeout after "+p.timeout.String())
	}
	return stream.sendFailure("CommandExecError", value, traceback)
}

func outputPipes() (pipes [2]*outputPipe, childEnds [2]int, err error) {
	if pipes[0], childEnds[0], err = newOutputPipe(); err != nil {
		return pipes, childEnds, err
	}
	if pipes[1], childEnds[1], err = newOutputPipe(); err != nil {
		pipes[0].read.Close()
		syscall.Close(childEnds[0])
	}
	return pipes, childEnds, err
}

// background answers at once and leaves the command running.
func (c *Commands) background(w http.ResponseWriter, p *plan) error {
	pipe, childEnd, err := newOutputPipe()
	if err != nil {
		c.slots.release()
		writeError(w, runtimeError(err))
		return nil
	}
	rec := newRecord(p)
	rec.output = c.records.outputs.open(newOutputFile)
	rec.process, err = c.start(p, uintptr(childEnd), uintptr(childEnd))
	syscall.Close(childEnd)
	settle := pipe.keepIn(rec.output, c.leftovers)
	stream := newEventStream(w)
	if err != nil {
		failure := c.startFailed(rec, err).failure
		stream.begin(rec.id)
		return stream.sendFailure("CommandExecError", failure, []string{failure})
	}
	c.records.add(rec)
	go c.supervise(rec, p.timeout, settle)
	stream.begin(rec.id)
	return stream.sendComplete(0)
}
