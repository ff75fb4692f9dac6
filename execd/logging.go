package main

// Log lines: stderr, or the file named by EXECD_LOG_FILE with one old generation.
//
// Invariants
//   - No line contains command text, output, environment values or tokens.
//   - A log that cannot be written never stops the daemon.

import (
	"io"
	"log"
	"os"
	"sync"
)

const logFileLimit = 10 << 20

// newLogger falls back to stderr.
func newLogger(path string) *log.Logger {
	var out io.Writer = os.Stderr
	if path != "" {
		file := &rotatingFile{path: path}
		if err := file.open(); err == nil {
			out = file
		}
	}
	return log.New(out, "execd: ", log.LstdFlags|log.LUTC|log.Lmsgprefix)
}

type rotatingFile struct {
	mutex sync.Mutex
	path  string
	file  *os.File
	size  int64
}

func (f *rotatingFile) open() error {
	file, err := os.OpenFile(f.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o640)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() {
		file.Close()
		return os.ErrInvalid
	}
	f.file, f.size = file, info.Size()
	return nil
}

func (f *rotatingFile) Write(line []byte) (int, error) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.size > logFileLimit {
		f.file.Close()
		_ = os.Rename(f.path, f.path+".1")
		if f.open() != nil {
			f.file, f.size = os.Stderr, 0
		}
	}
	n, err := f.file.Write(line)
	f.size += int64(n)
	return n, err
}
