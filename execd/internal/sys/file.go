package sys

// Reading small files as a whole.

import (
	"bytes"
	"io"
	"os"
	"syscall"
)

// FileText returns the content of a file without leading and trailing white space, or "" if the file cannot be read.
func FileText(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(data))
}

// ReadRegular returns the content of a regular file. It returns nil if the file is not regular, cannot be read, or is
// larger than limit bytes.
func ReadRegular(path string, limit int64) []byte {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() > limit {
		return nil
	}
	data, err := io.ReadAll(io.LimitReader(file, limit))
	if err != nil {
		return nil
	}
	return data
}
