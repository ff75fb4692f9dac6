package sys

// Errors as clients and logs have them.

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// Explain is an error as a client reads it: what it is about and the reason, without
// the name of the call that failed.
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

// Reason is the operating system's part of an error.
func Reason(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// PathError is an error with the path it is about; nil for none.
func PathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: path, Err: err}
}
