package files

// Content that is kept until a file can be written in place.
//
// Invariants
//   - Content up to a limit is kept in memory. Larger content goes to a file without a name, in the first of several
//     directories that permits it.
//   - If no directory permits such a file, the spool returns an error. It never uses more memory instead.

import (
	"bytes"
	"errors"
	"os"

	"sallyport.dev/execd/internal/sys"
)

// spool is written once and then read at any offset. Close releases its memory and its file.
type spool struct {
	places []string // directories for the file, in order of preference
	limit  int      // bytes in memory
	memory []byte
	file   *os.File
	size   int64
}

func (f *Files) newSpool() *spool {
	return &spool{places: f.limits.spoolPlaces, limit: f.limits.spoolMemory}
}

func (s *spool) Write(data []byte) (int, error) {
	if s.file == nil && len(s.memory)+len(data) > s.limit {
		if err := s.moveToFile(); err != nil {
			return 0, err
		}
	}
	if s.file == nil {
		s.memory = append(s.memory, data...)
		s.size += int64(len(data))
		return len(data), nil
	}
	n, err := s.file.WriteAt(data, s.size)
	s.size += int64(n)
	return n, spoolError(err)
}

func (s *spool) moveToFile() error {
	file, err := unnamedFile(s.places)
	if err != nil {
		return spoolError(err)
	}
	s.file = file
	if _, err := file.WriteAt(s.memory, 0); err != nil {
		return spoolError(err)
	}
	s.memory = nil
	return nil
}

func (s *spool) ReadAt(data []byte, offset int64) (int, error) {
	if s.file == nil {
		return bytes.NewReader(s.memory).ReadAt(data, offset)
	}
	return s.file.ReadAt(data, offset)
}

func (s *spool) length() int64 { return s.size }

func (s *spool) Close() error {
	s.memory = nil
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// unnamedFile makes a file in the first directory that permits it, and removes the file's name.
func unnamedFile(places []string) (*os.File, error) {
	failed := errors.New("no directory for temporary files")
	for _, directory := range places {
		file, err := os.CreateTemp(directory, ".execd-*")
		if err != nil {
			failed = err
			continue
		}
		if err := os.Remove(file.Name()); err != nil {
			file.Close()
			return nil, err
		}
		return file, nil
	}
	return nil, failed
}

// spoolError returns an error with the cause but without the name of the file, because no client knows that file.
func spoolError(err error) error {
	if err == nil {
		return nil
	}
	return errors.New("the new content cannot be kept until it is complete: " + sys.Reason(err))
}
