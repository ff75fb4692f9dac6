package process

// Programs: the PATH that they are found on, and this one, to be started again.

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/sys"
)

// ErrNoShell means that an image has neither bash nor sh.
var ErrNoShell = errors.New("neither bash nor sh is on PATH")

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// LookProgram searches the absolute entries of a PATH; a name with a slash is
// left to the kernel, relative to the working directory.
func LookProgram(name, search string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	if search == "" {
		search = defaultPath
	}
	for directory := range strings.SplitSeq(search, ":") {
		if !filepath.IsAbs(directory) {
			continue
		}
		candidate := filepath.Join(directory, name)
		if info, err := os.Stat(candidate); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return candidate, nil
		}
	}
	return "", fmt.Errorf("%s: no program of this name is on PATH", strconv.QuoteToASCII(name))
}

// ShellQuote is a text as one word of a shell.
func ShellQuote(text string) string {
	plain := func(r rune) bool {
		return r < 0x80 && (environ.IsNameByte(byte(r)) || strings.ContainsRune("-./:=@%+,", r))
	}
	if text != "" && strings.IndexFunc(text, func(r rune) bool { return !plain(r) }) < 0 {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

const (
	procSuperMagic = 0x9fa0
)

// Program is what to execute for a helper: a name in an open process file system.
type Program struct {
	proc int // descriptor of its root
	name string
	file int // descriptor of the program; -1: it is that of this process
}

// ThisProgram is the program of this process.
func ThisProgram() (*Program, error) {
	proc, err := openProc("/proc")
	if err != nil {
		return nil, err
	}
	return &Program{proc: proc, name: "self/exe", file: -1}, nil
}

// ProgramAt is the program of a file.
func ProgramAt(path string) (*Program, error) {
	program, err := ThisProgram()
	if err != nil {
		return nil, err
	}
	file, err := os.Open(path)
	if err != nil {
		program.Close()
		return nil, err
	}
	defer file.Close()
	const above = 32 // the descriptors of a child
	number, _, errno := syscall.Syscall(syscall.SYS_FCNTL, file.Fd(), syscall.F_DUPFD_CLOEXEC, above)
	if errno != 0 {
		program.Close()
		return nil, os.NewSyscallError("fcntl", errno)
	}
	program.file, program.name = int(number), "self/fd/"+strconv.Itoa(int(number))
	return program, nil
}

// Close makes the program impossible to start.
func (p *Program) Close() {
	syscall.Close(p.proc)
	if p.file >= 0 {
		syscall.Close(p.file)
	}
}

// openProc opens the root of a process file system, and nothing else.
func openProc(path string) (int, error) {
	fd, err := syscall.Open(path, sys.OpenPath|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, sys.PathError("open", path, err)
	}
	var system syscall.Statfs_t
	if err := syscall.Fstatfs(fd, &system); err != nil || system.Type != procSuperMagic {
		syscall.Close(fd)
		return -1, errors.New("no process file system at " + path)
	}
	return fd, nil
}
