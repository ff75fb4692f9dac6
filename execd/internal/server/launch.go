package server

// Which start of a container this is: a small file that the host mounts for each.
//
// A process that was checkpointed does not see its restore. This file is how it is told:
// its content belongs to one container, so that a restored daemon finds another one than
// before, from its first instruction on.
//
// Invariants
//   - The content is the SHA-256 of the secret with which the host may initialise a daemon
//     that was restored here. Whoever reads it, and everybody inside may, learns nothing.
//   - The file is opened once: what happens to its name later does not matter.
//   - A file that cannot be read, or has another form, is an error: nobody is served then.

import (
	"fmt"
	"os"
)

// Launch is the open file.
type Launch struct {
	file *os.File
}

// OpenLaunch opens it.
func OpenLaunch(path string) (*Launch, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &Launch{file}, nil
}

// Read returns who may initialise now, which is different after each restore.
func (l *Launch) Read() (Auth, error) {
	var text [65]byte // the hash and a newline
	if n, err := l.file.ReadAt(text[:], 0); n != len(text) || text[64] != '\n' {
		return Auth{}, fmt.Errorf("launch file: not a hash and a newline (%v)", err)
	}
	return NewAuth(string(text[:64]), false)
}
