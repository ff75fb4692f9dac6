package helper

// Starting this program again: as the helper of an identity (files/identity.go) or of an isolated
// session (isolate/isolate.go).
//
// No path is certain to name the program. Root in the sandbox may rename a directory above the
// file and put another file there, and can do the same to /proc from a mount namespace of its own.
//
// Invariants
//   - What is executed is the file that this process runs, which the kernel finds by
//     self/exe in the process file system that was opened, and checked, at the start.
//   - A helper is an ordinary process of the daemon's identity until no other process can trace
//     it; only then it sets the identity that it is for.
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
	"syscall"
	"time"

	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
)

const (
	controlDescriptor = 3 // descriptor of a helper that brings its connections
	planDescriptor    = 4 // descriptor with what it is to be
	planLimit         = 4 << 20
	startLimit        = 15 * time.Second
	readyAnswer       = "+"
	errorLimit        = 1024
)

// Spec is what a helper is to be. UID and GID are those that it will have.
type Spec struct {
	Flag       string
	Plan       any // JSON for the helper
	Namespaces uintptr
	UID, GID   uint32
}

// Start returns a helper that serves.
func Start(reaper *process.Reaper, program *process.Program, spec Spec, logger *log.Logger) (*Helper, error) {
	if program == nil {
		return nil, errors.New("no process file system")
	}
	text, err := json.Marshal(spec.Plan)
	if err != nil {
		return nil, err
	}
	plan, err := sys.MemoryFileOf(text)
	if err != nil {
		return nil, err
	}
	defer plan.Close()
	null, err := process.OpenNull()
	if err != nil {
		return nil, err
	}
	defer null.Close()
	ours, theirs, err := sys.SocketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	// Set this before the first byte: an earlier message has no sender.
	err = syscall.SetsockoptInt(int(ours.Fd()), syscall.SOL_SOCKET, syscall.SO_PASSCRED, 1)
	if err != nil {
		ours.Close()
		return nil, os.NewSyscallError("setsockopt", err)
	}
	control, err := sys.UnixConn(ours)
	if err != nil {
		return nil, err
	}
	child, err := reaper.Start(process.Spec{
		Again: program, Argv: []string{"execd", spec.Flag}, Namespaces: spec.Namespaces,
		Files: [3]uintptr{null.Fd(), 2, 2}, Extra: map[int]uintptr{controlDescriptor: theirs.Fd(), planDescriptor: plan.Fd()},
	})
	if err != nil {
		control.Close()
		return nil, err
	}
	theirs.Close() // else its end would not be seen
	started := New(child, control, logger)
	if err := await(control, syscall.Ucred{Pid: int32(child.Pid), Uid: spec.UID, Gid: spec.GID}); err != nil {
		started.End()
		return nil, err
	}
	return started, nil
}

// await reads the answer of a helper that was just started.
func await(control *net.UnixConn, expected syscall.Ucred) error {
	_ = control.SetReadDeadline(time.Now().Add(startLimit))
	answer := make([]byte, errorLimit)
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
	if text := answer[:n]; string(text) != readyAnswer {
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

// Begin is the first thing a helper does: it shuts others out and reads what it is to be.
func Begin(plan any) (*net.UnixConn, error) {
	if err := sys.Prctl(sys.PrSetDumpable, 0); err != nil {
		return nil, os.NewSyscallError("prctl", err)
	}
	control, err := sys.UnixConn(os.NewFile(controlDescriptor, "control"))
	if err != nil {
		return nil, err
	}
	file := os.NewFile(planDescriptor, "plan")
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, planLimit))
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, plan); err != nil {
		return nil, err
	}
	sys.CloseInheritedOnExec()
	return control, syscall.Chdir("/") // it begins in the process file system
}

// Answer sends the daemon the helper's success or its error; it reports whether to go on.
func Answer(control *net.UnixConn, err error) bool {
	answer := readyAnswer
	if err != nil {
		answer = sys.Explain(err)
	}
	if len(answer) > errorLimit {
		answer = answer[:errorLimit]
	}
	_, failed := control.Write([]byte(answer))
	return err == nil && failed == nil
}
