package main

// POST /command (contract 5.1): what a request asks for, checked and resolved.
// command_run.go carries it out, command_query.go answers about it later.
//
// Invariants
//   - A request is fully validated before anything is started or sent.
//   - Only absolute entries of a PATH are searched; nothing is taken from the
//     working directory by accident.

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Commands runs commands.
type Commands struct {
	*Launcher
	records *Records
}

type commandRequest struct {
	Command    *string            `json:"command"`
	Argv       *[]*string         `json:"argv"`
	Cwd        *string            `json:"cwd"`
	Background *bool              `json:"background"`
	Timeout    *int64             `json:"timeout"`
	UID        *int64             `json:"uid"`
	GID        *int64             `json:"gid"`
	Envs       map[string]*string `json:"envs"`
}

// plan is a validated request.
type plan struct {
	shell      string // text for the shell, or
	argv       []string
	isArgv     bool
	directory  string
	background bool
	timeout    time.Duration
	identity   *syscall.Credential
	env        map[string]string
}

// NewCommands has run nothing yet.
func NewCommands(launcher *Launcher) *Commands {
	return &Commands{Launcher: launcher, records: NewRecords()}
}

// routes are those of the contract that are answered here.
func (c *Commands) routes() []routeTo {
	return []routeTo{
		{"POST", "/command", always(c.run)},
		{"GET", "/command/status/{}", c.statusOf},
		{"GET", "/command/{}/logs", c.logsOf},
	}
}

func (c *Commands) run(w http.ResponseWriter, r *http.Request) {
	var request commandRequest
	if err := decodeJSON(w, r, commandBodyLimit, &request); err != nil {
		writeError(w, err)
		return
	}
	c.carryOut(w, r, &request)
}

// runShell runs a text for the shell, as POST /command would.
func (c *Commands) runShell(w http.ResponseWriter, r *http.Request, command string, background bool) {
	c.carryOut(w, r, &commandRequest{Command: &command, Background: &background})
}

// carryOut validates a request and runs it.
func (c *Commands) carryOut(w http.ResponseWriter, r *http.Request, request *commandRequest) {
	p, err := c.validate(request)
	if err != nil {
		writeError(w, err)
		return
	}
	if !c.slots.reserve() {
		w.Header().Set("Retry-After", "1")
		writeError(w, &problem{http.StatusServiceUnavailable, codeUnavailable, "too many running commands"})
		return
	}
	if err := c.answer(w, p); err != nil {
		panic(http.ErrAbortHandler) // a transfer that is cut off, not a stream without its end
	}
}

// answer runs a plan, whose place was reserved. It returns an error if the terminal event
// of the answer is not delivered.
func (c *Commands) answer(w http.ResponseWriter, p *plan) error {
	if p.background {
		return c.background(w, p)
	}
	return c.foreground(w, p)
}

func (c *Commands) validate(request *commandRequest) (*plan, error) {
	p := &plan{background: request.Background != nil && *request.Background, directory: c.directory}
	switch {
	case (request.Command == nil) == (request.Argv == nil):
		return nil, badRequest("exactly one of command and argv is required")
	case request.Command != nil:
		p.shell = *request.Command
		if p.shell == "" || strings.IndexByte(p.shell, 0) >= 0 {
			return nil, badRequest("command must be a non-empty text without NUL")
		}
	default:
		p.isArgv = true
		for _, element := range *request.Argv {
			if element == nil || strings.IndexByte(*element, 0) >= 0 {
				return nil, badRequest("argv elements must be texts without NUL")
			}
			p.argv = append(p.argv, *element)
		}
		if len(p.argv) == 0 || p.argv[0] == "" {
			return nil, badRequest("argv needs a program")
		}
	}
	var err error
	if p.timeout, err = timeLimit("timeout", request.Timeout, time.Millisecond); err != nil {
		return nil, err
	}
	if p.identity, err = c.identity(request.UID, request.GID); err != nil {
		return nil, badRequest(err.Error())
	}
	for key, value := range request.Envs {
		if key == "" || strings.ContainsAny(key, "=\x00") || (value != nil && strings.IndexByte(*value, 0) >= 0) {
			return nil, badRequest("envs has an invalid name or value")
		}
	}
	p.env = c.env.ForCommand(request.Envs)
	if request.Cwd != nil && *request.Cwd != "" {
		if p.directory, err = c.workingDirectory(*request.Cwd, p.env, c.directory); err != nil {
			return nil, badRequest(err.Error())
		}
	}
	return p, nil
}

// timeLimit is a number of units as a request has it, 0 for none: any that a Duration can
// hold, which is 292 years.
func timeLimit(name string, number *int64, unit time.Duration) (time.Duration, error) {
	if number == nil {
		return 0, nil
	}
	if most := int64(math.MaxInt64 / unit); *number < 0 || *number > most {
		return 0, badRequest(fmt.Sprintf("%s must be from 0 to %d", name, most))
	}
	return time.Duration(*number) * unit, nil
}

// reason is the operating system's part of an error.
func reason(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

var errNoShell = errors.New("neither bash nor sh is on PATH")

// spec resolves the program of a plan.
func (c *Commands) spec(p *plan) (Spec, error) {
	spec := Spec{Dir: p.directory, Env: environList(p.env), Identity: p.identity}
	if p.isArgv {
		path, err := lookProgram(p.argv[0], p.env["PATH"])
		spec.Path, spec.Argv = path, p.argv
		return spec, err
	}
	search, _ := c.env.Lookup("PATH")
	for _, shell := range []string{"bash", "sh"} {
		if path, err := lookProgram(shell, search); err == nil {
			spec.Path, spec.Argv = path, []string{shell, "-c", p.shell}
			return spec, nil
		}
	}
	return spec, errNoShell
}

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// lookProgram searches the absolute entries of a PATH; a name with a slash is
// left to the kernel, relative to the working directory.
func lookProgram(name, search string) (string, error) {
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
