// Package process has the child processes: one place that forks and one place that waits, and
// what everything that starts programs for clients has in common.
//
// Invariants
//   - Only Reaper.collect calls wait4, and it takes every status: commands,
//     the entrypoint and, as PID 1 or subreaper, orphans.
//   - A status never gets lost or stolen: starting holds the gate for reading
//     until the child is in the table, collecting holds it for writing.
//     (os/exec would wait on its own and race with the reaper of PID 1, hence
//     syscall.ForkExec here. Its internal wait4 for a child whose execve failed
//     happens under the same read lock.)
//   - No signal is sent to a process that was already reaped: signalling holds
//     the gate for reading and looks at the state first. What such a process leaves in its
//     group is signalled through a descriptor of the group, where the kernel has those.
//   - A child starts with default signal dispositions, no blocked signal, its own
//     session and no descriptor but 0, 1, 2 and what its Spec names.
//   - CAP_SYS_ADMIN, where the container has it, is for making isolated sessions: no
//     other child has it in any set, or can regain it.
//   - At a memory limit the kernel kills what was started here before this daemon:
//     as PID 1 its end would be the sandbox's.
package process

import (
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/sys"
)

// Reaper owns every child of this process. There is one per process.
type Reaper struct {
	gate     sync.RWMutex // read: start, signal; write: collect
	table    sync.Mutex   // guards children between concurrent starts
	children map[int]*Process
	orphans  int // reaped processes that were not started here; guarded by gate
	wake     chan os.Signal
	admin    bool // this process has CAP_SYS_ADMIN
	proc     int  // the root of the process file system; -1: there is none

	ordinary   forker // for all but isolated sessions
	privileged forker // for these
}

// Process is a child that leads its own session and process group.
type Process struct {
	Pid    int
	Done   chan struct{} // closed once reaped
	Status syscall.WaitStatus
	reaper *Reaper
	reaped bool // guarded by the gate
}

// Spec says what to start. Files are descriptors for 0, 1 and 2, Extra those for higher numbers.
type Spec struct {
	Path     string
	Again    *Program // in place of Path; Dir is its process file system
	Argv     []string
	Env      []string
	Dir      string
	Files    [3]uintptr
	Extra    map[int]uintptr
	Identity *syscall.Credential
	Terminal bool // descriptor 0 becomes the controlling terminal
	// New namespaces (CLONE_NEW*): only the helper of an isolated session has some, and only it
	// starts with CAP_SYS_ADMIN where this process has it.
	Namespaces uintptr
}

// NewReaper begins to collect children at once.
func NewReaper() *Reaper {
	r := &Reaper{children: map[int]*Process{}, wake: make(chan os.Signal, 1), admin: sys.HasAdmin(), proc: -1}
	r.ordinary.without = r.admin
	if proc, err := openProc("/proc"); err == nil {
		r.proc = proc
	}
	// A pending wake-up is never lost: the channel holds one and every
	// collection drains all children that have ended until then.
	signal.Notify(r.wake, syscall.SIGCHLD)
	go r.loop()
	return r
}

func (r *Reaper) loop() {
	r.Collect()
	for range r.wake {
		r.Collect()
	}
}

// Collect takes the status of every child that has ended.
func (r *Reaper) Collect() {
	r.gate.Lock()
	defer r.gate.Unlock()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		process := r.children[pid]
		if process == nil {
			r.orphans++
			continue
		}
		delete(r.children, pid)
		process.Status = status
		process.reaped = true
		close(process.Done)
	}
}

// Orphans is the number of adopted processes reaped so far.
func (r *Reaper) Orphans() int {
	r.gate.RLock()
	defer r.gate.RUnlock()
	return r.orphans
}

// Start forks and executes; it returns after a successful execve.
func (r *Reaper) Start(spec Spec) (*Process, error) {
	process, err := r.Adopt(func() (pid int, err error) { return r.fork(&spec) })
	if err != nil {
		return nil, &os.PathError{Op: "fork/exec", Path: spec.Path, Err: err}
	}
	return process, nil
}

// Adopt takes the child that start forks into the table; no status is collected meanwhile.
func (r *Reaper) Adopt(start func() (pid int, err error)) (*Process, error) {
	r.gate.RLock()
	defer r.gate.RUnlock()
	pid, err := start()
	if err != nil {
		return nil, err
	}
	return r.adopt(pid), nil
}

// IsAdmin reports whether this process has CAP_SYS_ADMIN.
func (r *Reaper) IsAdmin() bool { return r.admin }

// adopt takes a child that was just forked into the table; the gate is held.
func (r *Reaper) adopt(pid int) *Process {
	r.preferForKilling(pid)
	process := &Process{Pid: pid, Done: make(chan struct{}), reaper: r}
	r.table.Lock()
	r.children[pid] = process
	r.table.Unlock()
	return process
}

// fork chooses the thread that starts the child.
func (r *Reaper) fork(spec *Spec) (pid int, err error) {
	if spec.Namespaces != 0 {
		if spec.Again == nil {
			return 0, syscall.EPERM
		}
		return r.privileged.fork(spec)
	}
	if r.admin || spec.Again != nil {
		return r.ordinary.fork(spec)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return spec.fork(spec.Path)
}

// fork starts the child; the caller is locked to its thread.
func (s *Spec) fork(path string) (pid int, err error) {
	mask := sys.EmptySignalMask()
	defer sys.RestoreSignalMask(mask)
	return syscall.ForkExec(path, s.Argv, &syscall.ProcAttr{
		Dir:   s.Dir,
		Env:   s.Env,
		Files: s.descriptors(),
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: s.Terminal, Credential: s.Identity, Cloneflags: s.Namespaces},
	})
}

// descriptors lists them by number; a gap is closed in the child.
func (s *Spec) descriptors() []uintptr {
	list := s.Files[:]
	for number, fd := range s.Extra {
		for len(list) <= number {
			list = append(list, ^uintptr(0))
		}
		list[number] = fd
	}
	return list
}

// preferForKilling makes a process, and what it will fork, the first to go when
// memory runs out. Where that cannot be said, everything still works.
func (r *Reaper) preferForKilling(pid int) {
	score, err := syscall.Openat(r.proc, strconv.Itoa(pid)+"/oom_score_adj", syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	_, _ = syscall.Write(score, []byte("500"))
	syscall.Close(score)
}

// SignalGroup signals the group while its leader is not yet reaped. It reports
// whether a signal was sent.
func (p *Process) SignalGroup(sig syscall.Signal) bool {
	p.reaper.gate.RLock()
	defer p.reaper.gate.RUnlock()
	return !p.reaped && syscall.Kill(-p.Pid, sig) == nil
}

// SignalWith signals the group and another one of its session (0: none) while the
// leader is not yet reaped: until then a terminal's foreground group is its own.
func (p *Process) SignalWith(foreground int, sig syscall.Signal) {
	p.reaper.gate.RLock()
	defer p.reaper.gate.RUnlock()
	if p.reaped {
		return
	}
	if foreground > 1 && foreground != p.Pid {
		_ = syscall.Kill(-foreground, sig)
		if sig == syscall.SIGINT || sig == syscall.SIGQUIT {
			return // as the keys of a terminal would
		}
	}
	_ = syscall.Kill(-p.Pid, sig)
}

// Group is the process group of a child: it can be signalled after the child was reaped.
type Group struct {
	leader *Process
	fd     int // pidfd of the leader that keeps the number of the group; -1: the kernel has none
}

// Hold keeps the id of a child that is not yet reaped; ok reports whether it was not reaped. Each needs a release.
func (p *Process) Hold() (held Group, ok bool) {
	p.reaper.gate.RLock()
	defer p.reaper.gate.RUnlock()
	if p.reaped {
		return Group{}, false
	}
	return Group{leader: p, fd: sys.OpenGroup(p.Pid)}, true
}

// Release gives the group up.
func (g *Group) Release() {
	if g.fd >= 0 {
		syscall.Close(g.fd)
	}
}

// Signal reports whether there was a process to signal. Without a descriptor it goes by the
// number. That is not given out again while the group has members, and EndWith looks often
// enough that a group seen alive a moment ago is still the same one.
func (g *Group) Signal(sig syscall.Signal) bool {
	if g.fd >= 0 {
		return sys.SignalGroupOf(g.fd, sig) == nil
	}
	p := g.leader
	p.reaper.gate.RLock()
	defer p.reaper.gate.RUnlock()
	if p.reaped {
		p.reaper.table.Lock()
		_, taken := p.reaper.children[p.Pid]
		p.reaper.table.Unlock()
		if taken {
			return false
		}
	}
	return syscall.Kill(-p.Pid, sig) == nil
}

// Terminate asks the group to end and kills what is left of it after the grace
// period. It returns when the group is gone or was killed.
func (p *Process) Terminate(grace time.Duration) { p.EndWith(syscall.SIGTERM, grace) }

// EndWith is Terminate with a choice of the signal that asks.
func (p *Process) EndWith(asking syscall.Signal, grace time.Duration) {
	held, ok := p.Hold()
	if !ok {
		return
	}
	defer held.Release()
	if !held.Signal(asking) {
		return
	}
	deadline := time.NewTimer(grace)
	defer deadline.Stop()
	look := time.NewTicker(50 * time.Millisecond)
	defer look.Stop()
	for {
		select {
		case <-deadline.C:
			held.Signal(syscall.SIGKILL)
			return
		case <-look.C:
			if !held.Signal(0) {
				return
			}
		}
	}
}

// Live is a snapshot of the children that were started here and still run. It waits for
// starts that are under way: their children may run and not be in the table yet.
func (r *Reaper) Live() []*Process {
	r.gate.Lock()
	defer r.gate.Unlock()
	live := make([]*Process, 0, len(r.children))
	for _, process := range r.children {
		live = append(live, process)
	}
	return live
}

// ExitNumber maps a status to what a shell would report: 128+n for signals.
func ExitNumber(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// OpenNull opens an empty standard input; an image without /dev/null gets the
// read end of a pipe without a writer.
func OpenNull() (*os.File, error) {
	null, err := os.OpenFile("/dev/null", os.O_RDONLY, 0)
	if err == nil {
		return null, nil
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	return read, write.Close()
}
