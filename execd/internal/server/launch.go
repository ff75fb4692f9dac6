package server

// The launch file: a small file that the host mounts into each container.
//
// A process cannot see that it was restored from a checkpoint. The launch file shows it:
// its content is different in each container, so a restored daemon reads another content
// than before, from its first instruction on.
//
// Invariants
//   - The content is the SHA-256 of the secret with which the host may initialise a daemon
//     that was restored here. Every process inside may read the hash; it does not reveal the secret.
//   - The file is opened once. A later change of its name has no effect.
//   - A file that cannot be read or has another form is an error; the daemon then serves no request.

import (
	"fmt"
	"os"
)

// Launch is the open file.
type Launch struct {
	file *os.File
}

// OpenLaunch opens the launch file at a path.
func OpenLaunch(path string) (*Launch, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &Launch{file}, nil
}

// Read returns the credential that permits an init now; it changes with each restore.
func (l *Launch) Read() (Auth, error) {
	var text [65]byte // the hash and a newline
	if n, err := l.file.ReadAt(text[:], 0); n != len(text) || text[64] != '\n' {
		return Auth{}, fmt.Errorf("launch file: not a hash and a newline (%v)", err)
	}
	return NewAuth(string(text[:64]), false)
}
