package main

// Raw system calls that the standard library does not wrap. Each is optional
// hardening or has a fallback: gVisor and old kernels may answer ENOSYS.

import (
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"
)

const (
	prSetDumpable       = 4
	prCapBSetRead       = 23
	prCapBSetDrop       = 24
	prSetChildSubreaper = 36
	prSetNoNewPrivs     = 38
	sigSetmask          = 2
	sysCloseRange       = 436
	closeRangeCloexec   = 4
	atFdcwd             = -100
	renameNoReplace     = 1
	fionread            = 0x541B
	openPath            = 0x200000
	sysPidfdSendSignal  = 424
	sysPidfdOpen        = 434
	pidfdProcessGroup   = 4 // PIDFD_SIGNAL_PROCESS_GROUP
	pidfsMagic          = 0x50494446
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
	return header, sets, errnoOrNil(errno)
}

func hasAdmin() bool {
	_, sets, err := threadCapabilities()
	return err == nil && sets[0].effective&(1<<capSysAdmin) != 0
}

// dropMounting takes CAP_SYS_ADMIN, and CAP_SETPCAP with it, from the calling thread and from
// what it will start, for good.
func dropMounting() error {
	return dropCapabilities(func(call, first, second uintptr) error {
		_, _, errno := syscall.RawSyscall(call, first, second, 0)
		return errnoOrNil(errno)
	})
}

// dropMountingEverywhere does so for every thread of this process, of which it is the last
// privileged act. A build with cgo cannot.
func dropMountingEverywhere() error {
	return dropCapabilities(func(call, first, second uintptr) error {
		_, _, errno := syscall.AllThreadsSyscall(call, first, second, 0)
		return errnoOrNil(errno)
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

// noNewPrivileges concerns every thread of this process.
func noNewPrivileges() error {
	_, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, prSetNoNewPrivs, 1, 0)
	return os.NewSyscallError("prctl", errnoOrNil(errno))
}

func prctl(option, argument uintptr) error {
	_, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, option, argument, 0)
	return errnoOrNil(errno)
}

// openGroup is a pidfd by which the group of a leader can be signalled after the leader was reaped,
// or -1. Linux 6.9 can do this and has pidfs since then. gVisor has pidfds, but they end with the leader.
func openGroup(leader int) int {
	number, _, errno := syscall.Syscall(sysPidfdOpen, uintptr(leader), 0, 0)
	if errno != 0 {
		return -1
	}
	fd := int(number)
	var system syscall.Statfs_t
	if err := syscall.Fstatfs(fd, &system); err != nil || system.Type != pidfsMagic || signalGroupOf(fd, 0) != nil {
		syscall.Close(fd)
		return -1
	}
	return fd
}

// signalGroupOf signals the group whose leader a pidfd names.
func signalGroupOf(fd int, sig syscall.Signal) error {
	_, _, errno := syscall.Syscall6(sysPidfdSendSignal, uintptr(fd), uintptr(sig), 0, pidfdProcessGroup, 0, 0)
	return errnoOrNil(errno)
}

// emptySignalMask unblocks every signal of the calling thread and returns the
// former mask. The caller holds runtime.LockOSThread.
func emptySignalMask() (former uint64) {
	var empty uint64
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, sigSetmask,
		uintptr(unsafe.Pointer(&empty)), uintptr(unsafe.Pointer(&former)), 8, 0, 0)
	return former
}

func restoreSignalMask(mask uint64) {
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, sigSetmask,
		uintptr(unsafe.Pointer(&mask)), 0, 8, 0, 0)
}

// closeInheritedOnExec marks every descriptor above stderr close-on-exec, so
// that whatever a container runtime leaked into us goes no further.
func closeInheritedOnExec() {
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

// renameExclusive renames without replacing an existing destination. ENOSYS or EINVAL:
// the kernel or the file system cannot do this.
func renameExclusive(from, to string) error {
	source, err := syscall.BytePtrFromString(from)
	if err != nil {
		return err
	}
	target, err := syscall.BytePtrFromString(to)
	if err != nil {
		return err
	}
	here := atFdcwd
	_, _, errno := syscall.Syscall6(sysRenameat2, uintptr(here), uintptr(unsafe.Pointer(source)),
		uintptr(here), uintptr(unsafe.Pointer(target)), renameNoReplace, 0)
	return errnoOrNil(errno)
}

// bytesReadable is the number of bytes waiting in a pipe.
func bytesReadable(fd uintptr) int {
	var waiting int32
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, fionread, uintptr(unsafe.Pointer(&waiting)))
	if errno != 0 {
		return 64 << 10
	}
	return int(waiting)
}

// foregroundGroup is the process group in the foreground of a terminal, 0 if unknown.
func foregroundGroup(terminal *os.File) int {
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

// currentUmask reads the umask; only safe before other goroutines create files.
func currentUmask() os.FileMode {
	mask := syscall.Umask(0)
	syscall.Umask(mask)
	return os.FileMode(mask) & 0o777
}

func errnoOrNil(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

// memoryFile is an anonymous file in memory.
func memoryFile() (*os.File, error) {
	name, err := syscall.BytePtrFromString("execd-output")
	if err != nil {
		return nil, err
	}
	fd, _, errno := syscall.Syscall(sysMemfdCreate, uintptr(unsafe.Pointer(name)), 1, 0)
	if errno != 0 {
		return nil, os.NewSyscallError("memfd_create", errno)
	}
	return os.NewFile(fd, "execd-output"), nil
}
