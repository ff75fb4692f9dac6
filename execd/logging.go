package main

// Log lines: stderr, or the file named by EXECD_LOG_FILE with one old generation.
//
// Invariants
//   - No line contains command text, output, environment values or tokens.
//   - A log that cannot be written never stops the daemon.

import (
	"errors"
	"log"
	"os"
	"sync"
	"syscall"
)

const logFileLimit = 10 << 20

// newLogger falls back to stderr, and says why.
func newLogger(path string) *log.Logger {
	logger := log.New(os.Stderr, "execd: ", log.LstdFlags|log.LUTC|log.Lmsgprefix)
	if path == "" {
		return logger
	}
	file, err := openLog(path)
	if err != nil {
		logger.Printf("EXECD_LOG_FILE cannot be written: %v", err)
		return logger
	}
	logger.SetOutput(file)
	return logger
}

type rotatingFile struct {
	mutex sync.Mutex
	path  string
	file  *os.File
	size  int64
}

// openLog never waits for the other end of a FIFO.
func openLog(path string) (*rotatingFile, error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NONBLOCK, 0o640)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("not a regular file: " + path)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return &rotatingFile{path: path, file: file, size: info.Size()}, nil
}

func (f *rotatingFile) Write(line []byte) (int, error) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if f.size > logFileLimit {
		f.rotate()
	}
	n, err := f.file.Write(line)
	f.size += int64(n)
	return n, err
}

// rotate begins anew: with another file, or where that cannot be, as with a file that
// is a mount, with this one.
func (f *rotatingFile) rotate() {
	if os.Rename(f.path, f.path+".1") == nil {
		if next, err := openLog(f.path); err == nil {
			f.file.Close()
			f.file, f.size = next.file, next.size
			return
		}
	}
	_ = f.file.Truncate(0)
	f.size = 0
}
