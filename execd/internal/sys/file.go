package sys

// Small files that are read whole.

import (
	"bytes"
	"io"
	"os"
	"syscall"
)

// FileText is the content of a file without white space around it; "" where it cannot be read.
func FileText(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(data))
}

// ReadRegular returns nil for anything but a readable regular file within limit.
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
