package isolate

// Reports that the server of an isolated session sends to the daemon without a request: the start
// of each background run, with the pipe of its output, and its end. They use the control connection.
//
// So the daemon knows the runs without a request to that server, and has the output after the
// server has ended.
//
// Invariants
//   - A report has one size and one form; any other message ends the connection.
//   - The report of a run's start has a pipe; the report of its end has none.

import (
	"cmp"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

const (
	reportBegun = 'b'
	reportEnded = 'e'

	uuidLength  = 36
	reportSize  = 1 + uuidLength + 4 + 8
	reportFiles = 4 // room for more than one, to close them
)

var errBadReport = errors.New("not a report of a run")

// runReport is one report; at is in whole nanoseconds.
type runReport struct {
	kind   byte
	run    string
	status syscall.WaitStatus // of a run that has ended
	at     time.Time
}

func (r runReport) encode() []byte {
	text := make([]byte, 0, reportSize)
	text = append(append(text, r.kind), r.run...)
	text = binary.BigEndian.AppendUint32(text, uint32(r.status))
	return binary.BigEndian.AppendUint64(text, uint64(r.at.UnixNano()))
}

// parseReport reads what encode wrote.
func parseReport(text []byte) (report runReport, err error) {
	if len(text) != reportSize || (text[0] != reportBegun && text[0] != reportEnded) || !isUUID(text[1:1+uuidLength]) {
		return report, errBadReport
	}
	rest := text[1+uuidLength:]
	return runReport{
		kind: text[0], run: string(text[1 : 1+uuidLength]), status: syscall.WaitStatus(binary.BigEndian.Uint32(rest)),
		at: time.Unix(0, int64(binary.BigEndian.Uint64(rest[4:]))),
	}, nil
}

// isUUID recognises the text of httpx.UUID.
func isUUID(text []byte) bool {
	if len(text) != uuidLength {
		return false
	}
	for i, b := range text {
		dash := i == 8 || i == 13 || i == 18 || i == 23
		if dash != (b == '-') || !dash && (b < '0' || b > '9') && (b < 'a' || b > 'f') {
			return false
		}
	}
	return true
}

// send writes a report; only one goroutine may do so at a time. It waits for the daemon.
func (r runReport) send(control *net.UnixConn, rights []byte) error {
	text := r.encode()
	n, _, err := control.WriteMsgUnix(text, rights, nil)
	if err == nil && n < len(text) {
		_, err = control.Write(text[n:])
	}
	return err
}

// sendWith sends a file along.
func (r runReport) sendWith(control *net.UnixConn, file *os.File) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Control(func(fd uintptr) { sent = r.send(control, syscall.UnixRights(int(fd))) })
	return cmp.Or(err, sent)
}

// receiveReport waits for a report. A pipe that comes with it is the caller's, also with an error.
func receiveReport(control *net.UnixConn) (report runReport, pipe *os.File, err error) {
	text := make([]byte, reportSize)
	ancillary := make([]byte, syscall.CmsgSpace(4*reportFiles)+syscall.CmsgSpace(syscall.SizeofUcred))
	for have := 0; have < len(text); {
		n, length, _, _, err := control.ReadMsgUnix(text[have:], ancillary)
		files := receivedFiles(ancillary[:length])
		if pipe == nil && len(files) == 1 {
			pipe, files = files[0], nil
		}
		for _, file := range files {
			file.Close()
		}
		switch {
		case err != nil:
			return report, pipe, err
		case n == 0:
			return report, pipe, io.EOF
		case len(files) > 0:
			return report, pipe, errBadReport
		}
		have += n
	}
	if report, err = parseReport(text); err != nil {
		return report, pipe, err
	}
	if (report.kind == reportBegun) != isPipe(pipe) {
		return report, pipe, errBadReport
	}
	return report, pipe, nil
}

// receivedFiles takes the descriptors of a message; what else the kernel adds is left out.
func receivedFiles(ancillary []byte) []*os.File {
	messages, err := syscall.ParseSocketControlMessage(ancillary)
	if err != nil {
		return nil
	}
	var files []*os.File
	for i := range messages {
		fds, err := syscall.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			_ = syscall.SetNonblock(fd, true) // for deadlines; it was made so
			files = append(files, os.NewFile(uintptr(fd), "|output"))
		}
	}
	return files
}

func isPipe(file *os.File) bool {
	if file == nil {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode().Type() == os.ModeNamedPipe
}
