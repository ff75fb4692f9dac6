// Package sys has raw system calls that the standard library does not wrap, and related functions. Each call is
// optional hardening or has a fallback, because gVisor and old kernels can return ENOSYS.
package sys

import (
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"
)

const (
	// PrSetDumpable sets whether other processes may trace this process.
	PrSetDumpable = 4
	prCapBSetRead = 23
	prCapBSetDrop = 24
	// PrSetChildSubreaper makes this process the parent of orphaned descendants.
	PrSetChildSubreaper = 36
	prSetNoNewPrivs     = 38
	sigSetmask          = 2
	sysCloseRange       = 436
	closeRangeCloexec   = 4
	// AtFdcwd is AT_FDCWD: paths are relative to the working directory.
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

// Numbers of capabilities. Mounting needs CAP_SYS_ADMIN. To remove a capability from a thread's bounding set needs
// CAP_SETPCAP.
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

// threadCapabilities reads the capabilities of the calling thread.
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

// DropMounting removes CAP_SYS_ADMIN and CAP_SETPCAP permanently from the calling thread and from the threads and
// processes that it will start.
func DropMounting() error {
	return dropCapabilities(func(call, first, second uintptr) error {
		_, _, errno := syscall.RawSyscall(call, first, second, 0)
		return ErrnoOrNil(errno)
	})
}

// DropMountingEverywhere does the same for every thread of this process. It is the last privileged operation of the
// process. It does not work in a build with cgo.
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
		if err == syscall.EPERM { // without CAP_SETPCAP the set cannot change: forbid that an execve gains from it
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
	// Pinned on the heap, so that every thread can read them at the same address.
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

// NoNewPrivileges sets no_new_privs for every thread of this process.
func NoNewPrivileges() error {
	_, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, prSetNoNewPrivs, 1, 0)
	return os.NewSyscallError("prctl", ErrnoOrNil(errno))
}

// Prctl calls prctl(2) with one argument.
func Prctl(option, argument uintptr) error {
	_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, option, argument, 0)
	return ErrnoOrNil(errno)
}

// OpenGroup returns a pidfd by which the group of a leader can be signalled after the leader was reaped, or -1. This
// needs Linux 6.9, the first version with pidfs. The pidfds of gVisor become invalid when the leader is reaped.
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

// EmptySignalMask unblocks every signal of the calling thread and returns the former mask. The caller holds
// runtime.LockOSThread.
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

// CloseInheritedOnExec marks every descriptor above stderr close-on-exec, so that children do not inherit descriptors
// that a container runtime leaked into this process.
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

// RenameExclusive renames without replacing an existing destination. It returns ENOSYS or EINVAL if the kernel or the
// file system does not support this.
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

// BytesReadable returns the number of bytes that wait in a pipe, or 64 KiB if the number is unknown.
func BytesReadable(fd uintptr) int {
	var waiting int32
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, fionread, uintptr(unsafe.Pointer(&waiting)))
	if errno != 0 {
		return 64 << 10
	}
	return int(waiting)
}

// ForegroundGroup returns the process group in the foreground of a terminal, or 0 if it is unknown.
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

// CurrentUmask returns the umask. It sets the umask to 0 for a moment, so it is only safe before other goroutines
// create files.
func CurrentUmask() os.FileMode {
	mask := syscall.Umask(0)
	syscall.Umask(mask)
	return os.FileMode(mask) & 0o777
}

// ErrnoOrNil returns the error of a system call, or nil if the call succeeded.
func ErrnoOrNil(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}
