package process

// The common parts of everything that starts programs for clients: the environment, accounts,
// the base of relative paths, and the limit of concurrent programs.
//
// Invariants
//   - A program runs as the account that a request names, or as the daemon; never as another one.
//   - The number of running programs of clients is bounded, for all purposes together.

import (
	"errors"
	"log"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/account"
	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/sys"
)

const (
	// DefaultTail is the longest wait for open outputs after a program has ended.
	DefaultTail     = 200 * time.Millisecond
	InterruptGrace  = 3 * time.Second // between the signal that asks a group to end and SIGKILL
	InterruptRepeat = time.Minute     // how long an interrupt that is repeated succeeds again
)

// Launcher starts programs for clients.
type Launcher struct {
	Reaper    *Reaper
	Env       *environ.Environment
	Accounts  func() account.Accounts
	Directory string        // the daemon's own
	Tail      time.Duration // longest wait for open outputs after a program has ended
	Slots     *Slots
	Leftovers *Leftovers
	Log       *log.Logger
}

// Slots bounds the number of concurrent programs of clients.
type Slots struct {
	mutex   sync.Mutex
	running int
	limit   int
}

// NewSlots has room for limit programs.
func NewSlots(limit int) *Slots { return &Slots{limit: limit} }

// Reserve takes a place for a program that is about to start.
func (s *Slots) Reserve() bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.running >= s.limit {
		return false
	}
	s.running++
	return true
}

// Release returns a place.
func (s *Slots) Release() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.running--
}

// InUse returns the number of places that are taken.
func (s *Slots) InUse() int {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.running
}

// Identity returns the credential for the uid and gid of a request; nil if no change is needed.
func (l *Launcher) Identity(uid, gid *int64) (*syscall.Credential, error) {
	if uid == nil {
		if gid != nil {
			return nil, errors.New("gid requires uid")
		}
		return nil, nil
	}
	if *uid < 0 || *uid >= 0xffffffff || (gid != nil && (*gid < 0 || *gid >= 0xffffffff)) {
		return nil, account.ErrBadIdentity
	}
	var group *uint32
	if gid != nil {
		number := uint32(*gid)
		group = &number
	}
	credential, err := l.Accounts().Identity(uint32(*uid), group)
	if err != nil {
		return nil, err
	}
	if self := os.Geteuid(); self != 0 && int(credential.Uid) == self && (group == nil || int(*group) == os.Getegid()) {
		return nil, nil // already so; without privilege setgroups would be refused
	}
	return credential, nil
}

// expandPath expands a path with the program's environment. The result can be relative.
func (l *Launcher) expandPath(text string, env map[string]string) (string, error) {
	missing, prefix, rest := false, "", text
	if after, ok := strings.CutPrefix(text, "~"); ok && (after == "" || after[0] == '/') {
		prefix, rest = l.home(), after
	}
	path := prefix + environ.Expand(rest, environ.LookupIn(env), func(reference string) string {
		missing = true
		return reference
	})
	if path == "" {
		path = "/"
	}
	if missing {
		return "", errors.New("cwd refers to an undefined variable")
	}
	if strings.IndexByte(path, 0) >= 0 {
		return "", errors.New("cwd contains NUL")
	}
	return path, nil
}

// expandDirectory is expandPath for a directory that need not exist. A relative one starts at base.
func (l *Launcher) expandDirectory(text string, env map[string]string, base string) (string, error) {
	path, err := l.expandPath(text, env)
	if err != nil {
		return "", err
	}
	if filepath.IsAbs(path) {
		return path, nil
	}
	return filepath.Join(base, path), nil
}

// NewDirectory is expandDirectory for the initial directory of a session. It creates the directory.
func (l *Launcher) NewDirectory(text string) (string, error) {
	path, err := l.expandDirectory(text, l.Env.ForCommand(nil), l.Directory)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(path, 0o777); err != nil {
		return "", errors.New("cwd cannot be made: " + path + ": " + sys.Reason(err))
	}
	return path, nil
}

// WorkingDirectory is expandDirectory for a directory that must exist.
func (l *Launcher) WorkingDirectory(text string, env map[string]string, base string) (string, error) {
	path, err := l.expandDirectory(text, env, base)
	if err != nil {
		return "", err
	}
	if err := CheckDirectory(path); err != nil {
		return "", err
	}
	return path, nil
}

// CheckDirectory returns the reason why a program cannot start in a directory.
func CheckDirectory(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return errors.New("cwd is not accessible: " + path + ": " + sys.Reason(err))
	}
	if !info.IsDir() {
		return errors.New("cwd is not a directory: " + path)
	}
	return nil
}

// home returns the home directory of the daemon's user.
func (l *Launcher) home() string { return l.Env.Home(l.Accounts) }
