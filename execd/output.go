package main

// Output of commands: pipes, and the files that keep what background commands write.
//
// Invariants
//   - A foreground response ends when the leader has ended and what was in the
//     pipes is drained; a descendant that keeps a pipe open delays it by the tail
//     window at most.
//   - A \r at the end of what was read is held for 100 ms at most.
//   - Background output is kept in a file without a name: nobody else can open or
//     delete it, and it goes with the daemon. Commands have a pipe, as what opens
//     /dev/stderr anew would truncate a file. When one has ended, its output is there.

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"
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

// copyTo feeds a splitter until the end; flush is called after each read.
func (p *outputPipe) copyTo(lines *lineSplitter, flush func()) {
	defer p.read.Close()
	defer func() {
		lines.flush()
		flush()
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

// keepIn appends all output to a file, until its last writer is gone. What the file
// does not take is lost; a writer never waits for it. settle returns when everything
// that is in the pipe at its call is in the file.
func (p *outputPipe) keepIn(file *os.File) (settle func()) {
	settled := make(chan struct{})
	settling := sync.OnceFunc(func() { close(settled) })
	keep := func(data []byte) { _, _ = file.Write(data) }
	go func() {
		defer p.read.Close()
		defer settling()
		for {
			n, err := p.read.Read(p.buffer[:])
			keep(p.buffer[:n])
			if errors.Is(err, os.ErrDeadlineExceeded) {
				p.drain(keep)
				_ = p.read.SetReadDeadline(time.Time{})
				settling()
			} else if err != nil {
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

// newOutputFile makes a nameless file in the first directory that allows it;
// without any it is a file in memory.
func newOutputFile() (*os.File, error) {
	for _, directory := range []string{os.TempDir(), "/tmp", "/var/tmp", "/dev/shm", "/"} {
		if file, err := namelessFile(directory); err == nil {
			return file, nil
		}
	}
	return memoryFile()
}

// namelessFile is on the file system of a directory, and in no directory.
func namelessFile(directory string) (*os.File, error) {
	file, err := os.CreateTemp(directory, ".opensandbox-execd-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file.Name()); err != nil {
		file.Close()
		return nil, err
	}
	// Appending: what comes after a log was cut follows what is left of it.
	if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, file.Fd(), syscall.F_SETFL, syscall.O_APPEND); errno != 0 {
		file.Close()
		return nil, errno
	}
	return file, nil
}

// pageEnd is where a page that begins at offset ends: at most limit bytes on, and
// before a UTF-8 sequence that more output may complete.
func pageEnd(file *os.File, offset, limit int64, running func() bool) (int64, error) {
	unfinished := running() // asked first: what is written after the last look belongs to the next page
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	if info.Size() <= offset {
		return offset, nil
	}
	end := offset + min(info.Size()-offset, limit)
	if end == info.Size() && !unfinished {
		return end, nil
	}
	tail := make([]byte, min(end-offset, utf8.UTFMax-1))
	if _, err := file.ReadAt(tail, end-int64(len(tail))); err != nil && err != io.EOF {
		return 0, err
	}
	return end - int64(incompleteSuffix(tail)), nil
}
