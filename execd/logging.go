package main

// Log lines. They go to stderr, or to the file that EXECD_LOG_FILE names. One older file is kept.
//
// Invariants
//   - No line contains a command's text, output, values of environment variables or tokens.
//   - A log that cannot be written never stops the daemon.

import (
	"errors"
	"log"
	"os"
	"sync"
	"syscall"
)

const logFileLimit = 10 << 20

// newLogger returns a logger for the file at path. It uses stderr if path is empty, or if the file cannot be written;
// it then logs the reason.
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

// openLog opens a log file. It never waits for the reader of a FIFO.
func openLog(path string) (*rotatingFile, error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NONBLOCK, 0o640)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err != nil {
		file.Close()
		return nil, err
	}
	if !info.Mode().IsRegular() {
		file.Close()
		return nil, errors.New("not a regular file: " + path)
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

// rotate continues in a new file. If the file cannot be renamed, for example because it is a mount, rotate truncates
// it.
func (f *rotatingFile) rotate() {
	next, err := f.next()
	if err != nil {
		_ = f.file.Truncate(0)
		f.size = 0
		return
	}
	f.file.Close()
	f.file, f.size = next.file, next.size
}

// next renames the file to the name of the older file, and opens a new one.
func (f *rotatingFile) next() (*rotatingFile, error) {
	if err := os.Rename(f.path, f.path+".1"); err != nil {
		return nil, err
	}
	return openLog(f.path)
}
