package process

// OS threads: some in reserve, and some that fork.
//
// A workload may use up the sandbox's limit of processes, threads included. The Go
// runtime ends a program that needs a thread and cannot have one, and as PID 1 its
// end is the sandbox's; it keeps every thread it ever had. So the ones that requests
// need while others block are made at the start.
//
// A thread that gives up a capability can serve nothing else afterwards. One such thread
// therefore forks every child that must not have it, for as long as the daemon runs.

import (
	"os"
	"runtime"
	"sync"
	"syscall"

	"sallyport.dev/execd/internal/sys"
)

const spareThreads = 24

// ReserveThreads makes the runtime own that many threads.
func ReserveThreads() {
	var all, held sync.WaitGroup
	held.Add(spareThreads)
	release := make(chan struct{})
	for range spareThreads {
		all.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			held.Done()
			<-release
		})
	}
	held.Wait()
	close(release)
	all.Wait()
}

// forker is a thread that forks. It has a working directory of its own and, where it is
// without, no capability to mount. Its zero value makes the thread when it is first needed.
type forker struct {
	without bool

	once   sync.Once
	work   chan func()
	home   int  // descriptor of the daemon's working directory
	shared bool // the working directory is the daemon's
	err    error
}

// fork starts a child on the thread.
func (f *forker) fork(spec *Spec) (pid int, err error) {
	f.once.Do(f.begin)
	if f.err != nil {
		return 0, f.err
	}
	done := make(chan struct{})
	f.work <- func() {
		defer close(done)
		pid, err = f.forkHere(spec)
	}
	<-done
	return pid, err
}

func (f *forker) forkHere(spec *Spec) (pid int, err error) {
	path, at := spec.Path, f.home
	if spec.Again != nil {
		path, at = spec.Again.name, spec.Again.proc
	}
	if f.shared {
		if spec.Again != nil {
			path = "/proc/" + path
		}
		return spec.fork(path)
	}
	if err := syscall.Fchdir(at); err != nil {
		return 0, os.NewSyscallError("fchdir", err)
	}
	return spec.fork(path)
}

// begin returns when the thread can fork, or err says why it cannot.
func (f *forker) begin() {
	f.work = make(chan func())
	prepared := make(chan error)
	go f.run(prepared)
	f.err = <-prepared
}

func (f *forker) run(prepared chan<- error) {
	runtime.LockOSThread() // for good: a thread that fails ends
	if syscall.Gettid() == os.Getpid() {
		// The first thread stands for the process in /proc: another one has to do it.
		begun := make(chan error)
		go f.run(begun)
		prepared <- <-begun
		runtime.UnlockOSThread()
		return
	}
	err := f.prepare()
	prepared <- err
	if err != nil {
		return
	}
	for work := range f.work {
		work()
	}
}

func (f *forker) prepare() (err error) {
	err = syscall.Unshare(syscall.CLONE_FS)
	if err == syscall.EPERM && !sys.HasAdmin() {
		// A seccomp filter, which all processes of the container have: none of them can make a
		// mount namespace, and without one /proc cannot be moved away. Nor has this process a
		// right here that root in the sandbox does not have.
		f.shared = true
		return nil
	}
	if err != nil {
		return os.NewSyscallError("unshare", err)
	}
	f.home, err = syscall.Open(".", sys.OpenPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return sys.PathError("open", ".", err)
	}
	if !f.without {
		return nil
	}
	return sys.DropMounting()
}
