// Package sys has raw system calls that the standard library does not wrap, and what
// is near to them. Each is optional hardening or has a fallback: gVisor and old kernels
// may answer ENOSYS.
package sys

import (
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"
)

const (
	// PrSetDumpable says whether others may look into this process.
	PrSetDumpable = 4
	prCapBSetRead = 23
	prCapBSetDrop = 24
	// PrSetChildSubreaper makes this process the one that adopts orphans.
	PrSetChildSubreaper = 36
	prSetNoNewPrivs     = 38
	sigSetmask          = 2
	sysCloseRange       = 436
	closeRangeCloexec   = 4
	// AtFdcwd is AT_FDCWD: relative paths begin at the working directory.
	AtFdcwd         = -100
	renameNoReplace = 1
	fionread        = 0x541B
	// OpenPath is O_PATH.
	OpenPath           = 0x200000
	sysPidfdSendSignal = 424
	sysPidfdOpen       = 434
	pidfdProcessGroup  = 4 // PIDFD_SIGNAL_PROCESS_GROUP
	pidfsMagic         = 0x50494446
)

// Numbers of capabilities: mounting needs CAP_SYS_ADMIN, and to take that out of a thread's
// bounding set needs CAP_SETPCAP.
const (
	capSetPCap  = 8
	capSysAdmin = 21
)

type capHeader struct {
	version uint32
	pid     int32
}

type capSets struct{ effective, permitted, inheritable uint32 }

const capVersion3 = 0x20080522

// threadCapabilities reads those of the calling thread.
func threadCapabilities() (header capHeader, sets [2]capSets, err error) {
	header.version = capVersion3
	_, _, errno := syscall.RawSyscall(syscall.SYS_CAPGET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&sets[0])), 0)
	return header, sets, ErrnoOrNil(errno)
}

// HasAdmin reports whether the calling thread has CAP_SYS_ADMIN.
func HasAdmin() bool {
	_, sets, err := threadCapabilities()
	return err == nil && sets[0].effective&(1<<capSysAdmin) != 0
}

// DropMounting takes CAP_SYS_ADMIN, and CAP_SETPCAP with it, from the calling thread and from
// what it will start, for good.
func DropMounting() error {
	return dropCapabilities(func(call, first, second uintptr) error {
		_, _, errno := syscall.RawSyscall(call, first, second, 0)
		return ErrnoOrNil(errno)
	})
}

// DropMountingEverywhere does so for every thread of this process, of which it is the last
// privileged act. A build with cgo cannot.
func DropMountingEverywhere() error {
	return dropCapabilities(func(call, first, second uintptr) error {
		_, _, errno := syscall.AllThreadsSyscall(call, first, second, 0)
		return ErrnoOrNil(errno)
	})
}

func dropCapabilities(on func(call, first, second uintptr) error) error {
	for _, capability := range []uintptr{capSysAdmin, capSetPCap} {
		held, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prCapBSetRead, capability, 0)
		if errno == 0 && held == 0 {
			continue
		}
		err := on(syscall.SYS_PRCTL, prCapBSetDrop, capability)
		if err == syscall.EPERM { // without CAP_SETPCAP the set stays: then no execve may gain from it
			err = on(syscall.SYS_PRCTL, prSetNoNewPrivs, 1)
		}
		if err != nil {
			return os.NewSyscallError("prctl", err)
		}
	}
	header, sets, err := threadCapabilities()
	if err != nil {
		return os.NewSyscallError("capget", err)
	}
	const dropped = 1<<capSysAdmin | 1<<capSetPCap
	sets[0].effective &^= dropped
	sets[0].permitted &^= dropped
	sets[0].inheritable &^= dropped
	// On the heap, where nothing is moved: each thread reads them.
	arguments := &struct {
		header capHeader
		sets   [2]capSets
	}{header, sets}
	var pinned runtime.Pinner
	pinned.Pin(arguments)
	defer pinned.Unpin()
	err = on(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(&arguments.header)), uintptr(unsafe.Pointer(&arguments.sets)))
	return os.NewSyscallError("capset", err)
}

// NoNewPrivileges concerns every thread of this process.
func NoNewPrivileges() error {
	_, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, prSetNoNewPrivs, 1, 0)
	return os.NewSyscallError("prctl", ErrnoOrNil(errno))
}

// Prctl sets a property of this process.
func Prctl(option, argument uintptr) error {
	_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, option, argument, 0)
	return ErrnoOrNil(errno)
}

// OpenGroup is a pidfd by which the group of a leader can be signalled after the leader was reaped,
// or -1. Linux 6.9 can do this and has pidfs since then. gVisor has pidfds, but they end with the leader.
func OpenGroup(leader int) int {
	number, _, errno := syscall.Syscall(sysPidfdOpen, uintptr(leader), 0, 0)
	if errno != 0 {
		return -1
	}
	fd := int(number)
	var system syscall.Statfs_t
	if err := syscall.Fstatfs(fd, &system); err != nil || system.Type != pidfsMagic || SignalGroupOf(fd, 0) != nil {
		syscall.Close(fd)
		return -1
	}
	return fd
}

// SignalGroupOf signals the group whose leader a pidfd names.
func SignalGroupOf(fd int, sig syscall.Signal) error {
	_, _, errno := syscall.Syscall6(sysPidfdSendSignal, uintptr(fd), uintptr(sig), 0, pidfdProcessGroup, 0, 0)
	return ErrnoOrNil(errno)
}

// EmptySignalMask unblocks every signal of the calling thread and returns the
// former mask. The caller holds runtime.LockOSThread.
func EmptySignalMask() (former uint64) {
	var empty uint64
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, sigSetmask,
		uintptr(unsafe.Pointer(&empty)), uintptr(unsafe.Pointer(&former)), 8, 0, 0)
	return former
}

// RestoreSignalMask undoes EmptySignalMask.
func RestoreSignalMask(mask uint64) {
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, sigSetmask,
		uintptr(unsafe.Pointer(&mask)), 0, 8, 0, 0)
}

// CloseInheritedOnExec marks every descriptor above stderr close-on-exec, so
// that whatever a container runtime leaked into us goes no further.
func CloseInheritedOnExec() {
	_, _, errno := syscall.RawSyscall(sysCloseRange, 3, uintptr(^uint32(0)), closeRangeCloexec)
	if errno == 0 {
		return
	}
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return
	}
	for _, entry := range entries {
		if fd, err := strconv.Atoi(entry.Name()); err == nil && fd > 2 {
			syscall.CloseOnExec(fd)
		}
	}
}

// RenameExclusive renames without replacing an existing destination. ENOSYS or EINVAL:
// the kernel or the file system cannot do this.
func RenameExclusive(from, to string) error {
	source, err := syscall.BytePtrFromString(from)
	if err != nil {
		return err
	}
	target, err := syscall.BytePtrFromString(to)
	if err != nil {
		return err
	}
	here := AtFdcwd
	_, _, errno := syscall.Syscall6(sysRenameat2, uintptr(here), uintptr(unsafe.Pointer(source)),
		uintptr(here), uintptr(unsafe.Pointer(target)), renameNoReplace, 0)
	return ErrnoOrNil(errno)
}

// BytesReadable is the number of bytes waiting in a pipe.
func BytesReadable(fd uintptr) int {
	var waiting int32
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, fionread, uintptr(unsafe.Pointer(&waiting)))
	if errno != 0 {
		return 64 << 10
	}
	return int(waiting)
}

// ForegroundGroup is the process group in the foreground of a terminal, 0 if unknown.
func ForegroundGroup(terminal *os.File) int {
	var group int32
	raw, err := terminal.SyscallConn()
	if err != nil {
		return 0
	}
	errno := syscall.EBADF
	_ = raw.Control(func(fd uintptr) {
		_, _, errno = syscall.Syscall(syscall.SYS_IOCTL, fd, syscall.TIOCGPGRP, uintptr(unsafe.Pointer(&group)))
	})
	if errno != 0 {
		return 0
	}
	return int(group)
}

// CurrentUmask reads the umask; only safe before other goroutines create files.
func CurrentUmask() os.FileMode {
	mask := syscall.Umask(0)
	syscall.Umask(mask)
	return os.FileMode(mask) & 0o777
}

// ErrnoOrNil is the error of a system call; nil where it succeeded.
func ErrnoOrNil(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}
