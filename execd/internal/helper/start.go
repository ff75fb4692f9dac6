package helper

// The start of a helper: this program runs again, for an identity (files/identity.go) or for an isolated session
// (isolate/isolate.go).
//
// No path reliably names the program. Root in the sandbox can rename a directory above the file and put another file
// there, and can do the same with /proc in its own mount namespace.
//
// Invariants
//   - The executed file is the one that this process runs. The kernel finds it through self/exe in the process file
//     system that this process opened and checked at its start.
//   - A helper has the daemon's identity until no other process can trace it. Only then does it set its final identity.
//   - The first answer of a helper is read from a socket that only the helper was given. The kernel reports the process
//     and the identity that sent the answer.

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
	controlDescriptor = 3 // descriptor on which a helper receives its connections
	planDescriptor    = 4 // descriptor from which a helper reads its plan
	planLimit         = 4 << 20
	startLimit        = 15 * time.Second
	readyAnswer       = "+"
	errorLimit        = 1024
)

// Spec describes a helper: its command line, plan and new namespaces. UID and GID are those that it must have when it
// answers.
type Spec struct {
	Flag       string
	Plan       any // sent to the helper as JSON
	Namespaces uintptr
	UID, GID   uint32
}

// Start starts a helper. It returns after the helper has answered that it is ready.
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
	// Set this before the helper sends, because the kernel adds no sender to an earlier message.
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
	theirs.Close() // otherwise the helper's end would not close the connection
	started := New(child, control, logger)
	if err := await(control, syscall.Ucred{Pid: int32(child.Pid), Uid: spec.UID, Gid: spec.GID}); err != nil {
		started.End()
		return nil, err
	}
	return started, nil
}

// await reads the first answer of a helper, and checks the process and the identity that sent it.
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

// senderOf returns the sender of a message, from the one control message that the kernel adds.
func senderOf(ancillary []byte) (*syscall.Ucred, error) {
	messages, err := syscall.ParseSocketControlMessage(ancillary)
	if err != nil || len(messages) != 1 {
		return nil, errors.New("an answer without a sender")
	}
	return syscall.ParseUnixCredentials(&messages[0])
}

// Begin is the first call in a helper. It makes the process impossible to trace, reads the plan and returns the control
// connection.
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
	return control, syscall.Chdir("/") // a helper starts in the process file system
}

// Answer sends the daemon the helper's success or its error. It reports whether the helper can continue.
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
