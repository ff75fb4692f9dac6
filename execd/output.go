package main

// Output of commands: the pipes it comes through.
//
// Invariants
//   - A foreground response ends when the leader has ended and what was in the
//     pipes is drained; a descendant that keeps a pipe open delays it by the tail
//     window at most.
//   - A \r at the end of what was read is held for 100 ms at most.
//   - What it leaves behind may go on writing (leftovers.go).
//   - Background commands have a pipe, as what opens /dev/stderr anew would truncate a file.
//     When one has ended, its output is in its log.

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"
)

const carriageHold = 100 * time.Millisecond

// outputPipe is the read end of a command's stdout or stderr.
type outputPipe struct {
	read   *os.File
	mutex  sync.Mutex
	leave  time.Time // zero while the leader runs
	buffer [32 << 10]byte
}

// newOutputPipe returns the reader and the child's end, which is blocking.
func newOutputPipe() (*outputPipe, int, error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return nil, -1, os.NewSyscallError("pipe2", err)
	}
	if err := syscall.SetNonblock(fds[0], true); err != nil {
		syscall.Close(fds[0])
		syscall.Close(fds[1])
		return nil, -1, os.NewSyscallError("fcntl", err)
	}
	return &outputPipe{read: os.NewFile(uintptr(fds[0]), "|output")}, fds[1], nil
}

// leaderGone bounds all further reading.
func (p *outputPipe) leaderGone(tail time.Duration) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.leave = time.Now().Add(tail)
	_ = p.read.SetReadDeadline(p.leave)
}

// arm sets the next deadline and reports whether the leader's tail is over.
func (p *outputPipe) arm(hold bool) (over bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	now := time.Now()
	if !p.leave.IsZero() && !now.Before(p.leave) {
		return true
	}
	deadline := p.leave
	if hold {
		if release := now.Add(carriageHold); deadline.IsZero() || release.Before(deadline) {
			deadline = release
		}
	}
	_ = p.read.SetReadDeadline(deadline)
	return false
}

// copyTo feeds a splitter until the end; flush is called after each read. A pipe that is
// still open then is a leftover.
func (p *outputPipe) copyTo(lines *lineSplitter, flush func(), rest *leftovers) {
	open := false
	defer func() {
		lines.flush()
		flush()
		if open {
			rest.keep(p.read, dropOutput)
		} else {
			p.read.Close()
		}
	}()
	held := false
	for {
		n, err := p.read.Read(p.buffer[:])
		if n > 0 {
			lines.feed(p.buffer[:n])
			flush()
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			if p.arm(false) {
				p.drain(lines.feed)
				open = true
				return
			}
			if held {
				lines.flush()
				flush()
				held = false
			}
			continue
		}
		if err != nil {
			return
		}
		if held != lines.held {
			held = lines.held
			p.arm(held)
		}
	}
}

// keepIn appends all output to a log, until its last writer is gone. settle returns when
// everything that is in the pipe at its call is in the log; from then on the pipe is a leftover.
func (p *outputPipe) keepIn(log *outputLog, rest *leftovers) (settle func()) {
	settled := make(chan struct{})
	keep := func(data []byte) { _, _ = log.Write(data) }
	go func() {
		defer close(settled)
		for {
			n, err := p.read.Read(p.buffer[:])
			keep(p.buffer[:n])
			if errors.Is(err, os.ErrDeadlineExceeded) {
				p.drain(keep)
				rest.keep(p.read, keep)
				return
			}
			if err != nil {
				p.read.Close()
				return
			}
		}
	}()
	return func() {
		p.leaderGone(0)
		<-settled
	}
}

// drain takes what is in the pipe now and no more.
func (p *outputPipe) drain(take func(data []byte)) {
	raw, err := p.read.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		for left := bytesReadable(fd); left > 0; {
			n, err := syscall.Read(int(fd), p.buffer[:min(left, len(p.buffer))])
			if err == syscall.EINTR {
				continue
			}
			if err != nil || n <= 0 {
				return
			}
			take(p.buffer[:n])
			left -= n
		}
	})
}
