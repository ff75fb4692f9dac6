package process

// Outputs that are still open after their command has ended, because processes that it left behind hold them.
//
// Invariants
//   - Such a process is not ended by a write: its output is read, and kept or dropped, as long as
//     there is room for its pipe.
//   - The number of pipes is bounded. Above it the pipe that was silent for longest is closed.
//   - A silent pipe needs a descriptor and a goroutine without a buffer. A pipe that is written
//     to without end is read slowly.

import (
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	leftoverPipes  = 512
	leftoverPause  = 5 * time.Millisecond // between two reads of one pipe
	leftoverBuffer = 32 << 10
)

// Leftovers reads the outputs that programs left open.
type Leftovers struct {
	Limit int
	pause time.Duration

	mutex   sync.Mutex
	open    map[*leftover]struct{}
	buffers sync.Pool
}

type leftover struct {
	pipe  *os.File
	heard time.Time // guarded by the mutex of leftovers
}

// NewLeftovers has room for the number of pipes that a daemon keeps.
func NewLeftovers() *Leftovers {
	return &Leftovers{
		Limit: leftoverPipes, pause: leftoverPause, open: map[*leftover]struct{}{},
		buffers: sync.Pool{New: func() any { return new([leftoverBuffer]byte) }},
	}
}

// Keep reads a pipe to its end, and passes its output to take. Keep owns the pipe from then on.
func (l *Leftovers) Keep(pipe *os.File, take func(data []byte)) {
	kept := &leftover{pipe: pipe, heard: time.Now()}
	_ = pipe.SetReadDeadline(time.Time{})
	if silent := l.add(kept); silent != nil {
		silent.pipe.Close()
	}
	go l.read(kept, take)
}

// add returns the pipe that must make room, nil if none must.
func (l *Leftovers) add(added *leftover) (silent *leftover) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if len(l.open) >= l.Limit {
		for other := range l.open {
			if silent == nil || other.heard.Before(silent.heard) {
				silent = other
			}
		}
		delete(l.open, silent)
	}
	l.open[added] = struct{}{}
	return silent
}

// Count returns the number of open pipes.
func (l *Leftovers) Count() int {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return len(l.open)
}

func (l *Leftovers) read(from *leftover, take func(data []byte)) {
	defer func() {
		l.mutex.Lock()
		defer l.mutex.Unlock()
		delete(l.open, from)
		from.pipe.Close()
	}()
	raw, err := from.pipe.SyscallConn()
	if err != nil {
		return
	}
	for open := true; open; {
		err = raw.Read(func(fd uintptr) (ready bool) {
			open, ready = l.readOnce(int(fd), take)
			return ready
		})
		if err != nil {
			return
		}
		l.mutex.Lock()
		from.heard = time.Now()
		l.mutex.Unlock()
		if open {
			time.Sleep(l.pause)
		}
	}
}

// readOnce reads the available bytes; ready is false if there are none yet.
func (l *Leftovers) readOnce(fd int, take func(data []byte)) (open, ready bool) {
	buffer := l.buffers.Get().(*[leftoverBuffer]byte)
	defer l.buffers.Put(buffer)
	n, err := syscall.Read(fd, buffer[:])
	for err == syscall.EINTR {
		n, err = syscall.Read(fd, buffer[:])
	}
	if err == syscall.EAGAIN {
		return true, false
	}
	if err != nil || n <= 0 {
		return false, true
	}
	take(buffer[:n])
	return true, true
}

// DropOutput is for output that is not kept.
func DropOutput([]byte) {}
