package stream

// The pipes for the output of commands.
//
// Invariants
//   - A foreground response ends when the leader has ended and the content of the pipes is drained. A descendant that
//     keeps a pipe open delays the end by the tail window at most.
//   - A \r at the end of a read is held for 100 ms at most.
//   - Processes that a command leaves behind can continue to write (process/leftovers.go).
//   - Background commands also write into a pipe, because a command that opens /dev/stderr again would truncate a file.
//     When a background command has ended, its output is in its log.

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
)

const carriageHold = 100 * time.Millisecond

// Pipe is the read end of a command's stdout or stderr.
type Pipe struct {
	File   *os.File
	mutex  sync.Mutex
	leave  time.Time // zero while the leader runs
	buffer [32 << 10]byte
}

// NewPipe makes a pipe. It returns the reader and the child's end, which is blocking.
func NewPipe() (*Pipe, int, error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return nil, -1, os.NewSyscallError("pipe2", err)
	}
	if err := syscall.SetNonblock(fds[0], true); err != nil {
		syscall.Close(fds[0])
		syscall.Close(fds[1])
		return nil, -1, os.NewSyscallError("fcntl", err)
	}
	return &Pipe{File: os.NewFile(uintptr(fds[0]), "|output")}, fds[1], nil
}

// LeaderGone is called when the leader has ended. It limits all further reading to the tail window.
func (p *Pipe) LeaderGone(tail time.Duration) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.leave = time.Now().Add(tail)
	_ = p.File.SetReadDeadline(p.leave)
}

// arm sets the next deadline and reports whether the leader's tail is over.
func (p *Pipe) arm(hold bool) (over bool) {
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
	_ = p.File.SetReadDeadline(deadline)
	return false
}

// CopyTo passes the output to lines until the end of the pipe or of the tail window, and calls flush after each read.
// A pipe that is still open after the tail window becomes a leftover.
func (p *Pipe) CopyTo(lines *Lines, flush func(), rest *process.Leftovers) {
	open := false
	defer func() {
		lines.flush()
		flush()
		if open {
			rest.Keep(p.File, process.DropOutput)
		} else {
			p.File.Close()
		}
	}()
	held := false
	for {
		n, err := p.File.Read(p.buffer[:])
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

// KeepIn appends all output to a log, until the last writer closes the pipe. settle returns when all bytes that were in
// the pipe at its call are in the log; from then on the pipe is a leftover.
func (p *Pipe) KeepIn(log *Log, rest *process.Leftovers) (settle func()) {
	settled := make(chan struct{})
	keep := func(data []byte) { _, _ = log.Write(data) }
	go func() {
		defer close(settled)
		for {
			n, err := p.File.Read(p.buffer[:])
			keep(p.buffer[:n])
			if errors.Is(err, os.ErrDeadlineExceeded) {
				p.drain(keep)
				rest.Keep(p.File, keep)
				return
			}
			if err != nil {
				p.File.Close()
				return
			}
		}
	}()
	return func() {
		p.LeaderGone(0)
		<-settled
	}
}

// drain reads the bytes that are in the pipe at the call, and no later ones.
func (p *Pipe) drain(take func(data []byte)) {
	raw, err := p.File.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		for left := sys.BytesReadable(fd); left > 0; {
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

// Pipes makes the pipes for stdout and stderr. It returns their readers and the ends for the child.
func Pipes() (pipes [2]*Pipe, childEnds [2]int, err error) {
	if pipes[0], childEnds[0], err = NewPipe(); err != nil {
		return pipes, childEnds, err
	}
	if pipes[1], childEnds[1], err = NewPipe(); err != nil {
		pipes[0].File.Close()
		syscall.Close(childEnds[0])
	}
	return pipes, childEnds, err
}
