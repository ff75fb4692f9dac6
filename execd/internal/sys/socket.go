package sys

// Unix sockets.

import (
	"net"
	"os"
	"syscall"
)

// SocketPair makes a connected pair of stream sockets.
func SocketPair() (ours, theirs *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs"), nil
}

// UnixConn makes a connection from the socket of a file, and closes the file.
func UnixConn(file *os.File) (*net.UnixConn, error) {
	defer file.Close()
	connection, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	unix, ok := connection.(*net.UnixConn)
	if !ok {
		connection.Close()
		return nil, net.ErrClosed
	}
	return unix, nil
}
