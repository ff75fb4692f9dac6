package sys

// Texts of errors for clients and logs.

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// Explain returns the text of an error for clients: the path, if there is one, and the reason. It omits the name of the
// call that failed.
func Explain(err error) string {
	switch e := err.(type) {
	case *fs.PathError:
		return e.Path + ": " + Reason(e.Err)
	case *os.LinkError:
		return e.Old + ": " + Reason(e.Err)
	case *os.SyscallError:
		return Reason(e.Err)
	}
	return err.Error()
}

// Reason returns the operating system's text of an error, or the whole text if no system call failed.
func Reason(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// PathError adds an operation and a path to an error. It returns nil if err is nil.
func PathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: path, Err: err}
}
