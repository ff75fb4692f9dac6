package sys

// Files in memory.

import (
	"errors"
	"io"
	"os"
	"syscall"
	"unsafe"
)

// MemoryFileOf makes a file in memory with the given content. Its offset is at the beginning.
func MemoryFileOf(content []byte) (*os.File, error) {
	file, err := MemoryFile()
	if err != nil {
		return nil, err
	}
	if _, err = file.Write(content); err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// ReadBounded reads a file from its beginning. A file larger than limit bytes is an error.
func ReadBounded(file *os.File, limit int64) ([]byte, error) {
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > limit {
		return nil, errors.New("the file is too large")
	}
	return io.ReadAll(io.NewSectionReader(file, 0, limit))
}

// MemoryFile makes an anonymous file in memory.
func MemoryFile() (*os.File, error) {
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
