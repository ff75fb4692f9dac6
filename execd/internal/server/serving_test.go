package server

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"

	"sallyport.dev/execd/internal/testkit"
)

// failing is a listener whose accept fails with the given errors.
type failing struct {
	net.Listener
	errors chan error
}

func (f failing) Accept() (net.Conn, error) {
	err, more := <-f.errors
	if !more {
		return nil, net.ErrClosed
	}
	return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", err)}
}

func (f failing) Close() error { return nil }

func (f failing) Addr() net.Addr { return &net.TCPAddr{} }

func TestOnlyABrokenListenerEndsServing(t *testing.T) {
	for _, passing := range []syscall.Errno{
		syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.ENOSPC, syscall.EPERM, syscall.ECONNABORTED,
		syscall.EPROTO, syscall.ENETDOWN, syscall.ENETUNREACH, syscall.EHOSTUNREACH,
	} {
		given := failing{errors: make(chan error, 2)}
		given.errors <- passing
		given.errors <- syscall.EINVAL
		testkit.Equal(t, "EINVAL after "+passing.Error(), afterwards(newFixture(t).server.Serve(given), passing))
	}
}

func afterwards(err error, passing syscall.Errno) string {
	if errors.Is(err, syscall.EINVAL) {
		return "EINVAL after " + passing.Error()
	}
	return err.Error()
}
