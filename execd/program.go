package main

// Starting this program again: as the helper of an identity (identity.go) or of an isolated
// session (isolated.go).
//
// No path leads to the program for certain. Root in the sandbox may rename a directory above the
// file and put another file there, and can do the same to /proc from a mount namespace of its own.
//
// Invariants
//   - What is executed is the file that this process runs, which the kernel finds by
//     self/exe in the process file system that was opened, and checked, at the start.
//   - A helper is an ordinary process of the daemon's identity until no other process can trace
//     it; only then it takes on the identity that it is for.
//   - The first answer of a helper is read from a socket that it alone was given, with the
//     kernel's word for the process and the identity that sent it.

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"
)

const (
	helperControl    = 3 // descriptor of a helper that brings its connections
	helperPlan       = 4 // descriptor with what it is to be
	helperPlanLimit  = 4 << 20
	helperStart      = 15 * time.Second
	helperReady      = "+"
	helperErrorLimit = 1024
	procSuperMagic   = 0x9fa0
)

// Program is what to execute for a helper: a name in an open process file system.
type Program struct {
	proc int // descriptor of its root
	name string
	file int // descriptor of the program; -1: it is that of this process
}

// ThisProgram is the program of this process.
func ThisProgram() (*Program, error) {
	proc, err := openProc("/proc")
	if err != nil {
		return nil, err
	}
	return &Program{proc: proc, name: "self/exe", file: -1}, nil
}

// ProgramAt is the program of a file.
func ProgramAt(path string) (*Program, error) {
	program, err := ThisProgram()
	if err != nil {
		return nil, err
	}
	file, err := os.Open(path)
	if err != nil {
		program.Close()
		return nil, err
	}
	defer file.Close()
	const above = 32 // the descriptors of a child
	number, _, errno := syscall.Syscall(syscall.SYS_FCNTL, file.Fd(), syscall.F_DUPFD_CLOEXEC, above)
	if errno != 0 {
		program.Close()
		return nil, os.NewSyscallError("fcntl", errno)
	}
	program.file, program.name = int(number), "self/fd/"+strconv.Itoa(int(number))
	return program, nil
}

// Close makes the program impossible to start.
func (p *Program) Close() {
	syscall.Close(p.proc)
	if p.file >= 0 {
		syscall.Close(p.file)
	}
}

// openProc opens the root of a process file system, and nothing else.
func openProc(path string) (int, error) {
	fd, err := syscall.Open(path, openPath|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, syscallError("open", path, err)
	}
	var system syscall.Statfs_t
	if err := syscall.Fstatfs(fd, &system); err != nil || system.Type != procSuperMagic {
		syscall.Close(fd)
		return -1, errors.New("no process file system at " + path)
	}
	return fd, nil
}

// helperSpec is what a helper is to be. UID and GID are those that it will have.
type helperSpec struct {
	flag       string
	plan       any // JSON for the helper
	namespaces uintptr
	uid, gid   uint32
}

// startHelper returns a helper that serves.
func startHelper(reaper *Reaper, program *Program, spec helperSpec, log *log.Logger) (*helper, error) {
	if program == nil {
		return nil, errors.New("no process file system")
	}
	text, err := json.Marshal(spec.plan)
	if err != nil {
		return nil, err
	}
	plan, err := stateFile(text)
	if err != nil {
		return nil, err
	}
	defer plan.Close()
	null, err := openNull()
	if err != nil {
		return nil, err
	}
	defer null.Close()
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	// From the first byte on: what is sent earlier has no sender.
	err = syscall.SetsockoptInt(int(ours.Fd()), syscall.SOL_SOCKET, syscall.SO_PASSCRED, 1)
	if err != nil {
		ours.Close()
		return nil, os.NewSyscallError("setsockopt", err)
	}
	control, err := unixConn(ours)
	if err != nil {
		return nil, err
	}
	process, err := reaper.Start(Spec{
		Again: program, Argv: []string{"execd", spec.flag}, Namespaces: spec.namespaces,
		Files: [3]uintptr{null.Fd(), 2, 2}, Extra: map[int]uintptr{helperControl: theirs.Fd(), helperPlan: plan.Fd()},
	})
	if err != nil {
		control.Close()
		return nil, err
	}
	theirs.Close() // else its end would not be seen
	started := newHelper(process, control, log)
	if err := awaitHelper(control, syscall.Ucred{Pid: int32(process.Pid), Uid: spec.uid, Gid: spec.gid}); err != nil {
		started.end()
		return nil, err
	}
	return started, nil
}

// awaitHelper reads the answer of a helper that was just started.
func awaitHelper(control *net.UnixConn, expected syscall.Ucred) error {
	_ = control.SetReadDeadline(time.Now().Add(helperStart))
	answer := make([]byte, helperErrorLimit)
	ancillary := make([]byte, syscall.CmsgSpace(syscall.SizeofUcred))
	n, length, _, _, err := control.ReadMsgUnix(answer, ancillary)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if n <= 0 {
		return errors.New("its helper ended")
	}
	sender, err := senderOf(ancillary[:length])
	if err != nil {
		return err
	}
	if sender.Pid != expected.Pid {
		return errors.New("another process answered")
	}
	if text := answer[:n]; string(text) != helperReady {
		return errors.New(string(bytes.ToValidUTF8(text, []byte("?"))))
	}
	if *sender != expected {
		return errors.New("its helper has another identity")
	}
	_ = control.SetReadDeadline(time.Time{})
	return nil
}

// senderOf reads the one control message that the kernel adds.
func senderOf(ancillary []byte) (*syscall.Ucred, error) {
	messages, err := syscall.ParseSocketControlMessage(ancillary)
	if err != nil || len(messages) != 1 {
		return nil, errors.New("an answer without a sender")
	}
	return syscall.ParseUnixCredentials(&messages[0])
}

// beginHelper is the first thing a helper does: it shuts others out and reads what it is to be.
func beginHelper(plan any) (*net.UnixConn, error) {
	if err := prctl(prSetDumpable, 0); err != nil {
		return nil, os.NewSyscallError("prctl", err)
	}
	control, err := unixConn(os.NewFile(helperControl, "control"))
	if err != nil {
		return nil, err
	}
	file := os.NewFile(helperPlan, "plan")
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, helperPlanLimit))
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, plan); err != nil {
		return nil, err
	}
	closeInheritedOnExec()
	return control, syscall.Chdir("/") // it begins in the process file system
}

// answerHelper tells the daemon that all is as it asked for, or why not; it reports whether to go on.
func answerHelper(control *net.UnixConn, err error) bool {
	answer := helperReady
	if err != nil {
		answer = explained(err)
	}
	if len(answer) > helperErrorLimit {
		answer = answer[:helperErrorLimit]
	}
	_, failed := control.Write([]byte(answer))
	return err == nil && failed == nil
}

// takeIdentity changes every thread of this process.
func takeIdentity(uid, gid uint32, groups []uint32) error {
	list := make([]int, len(groups))
	for i, group := range groups {
		list[i] = int(group)
	}
	if err := syscall.Setgroups(list); err != nil {
		return os.NewSyscallError("setgroups", err)
	}
	if err := syscall.Setresgid(int(gid), int(gid), int(gid)); err != nil {
		return os.NewSyscallError("setresgid", err)
	}
	return os.NewSyscallError("setresuid", syscall.Setresuid(int(uid), int(uid), int(uid)))
}
