// Package command serves commands. command.go validates a request, run.go runs its command, query.go answers later
// requests about the command, and records.go holds the results.
//
// Invariants
//   - A request is validated completely before a command is started or an answer is sent.
//   - Only absolute entries of a PATH are searched, so that no program is found in the working directory by accident.
package command

import (
	"net/http"
	"strings"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
)

// Commands serves the routes for commands, and holds their records.
type Commands struct {
	*process.Launcher
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
	shell      string // text for the shell, if isArgv is false
	argv       []string
	isArgv     bool
	directory  string
	background bool
	timeout    time.Duration
	identity   *syscall.Credential
	env        map[string]string
}

// New makes a Commands without records.
func New(launcher *process.Launcher) *Commands {
	return &Commands{Launcher: launcher, records: NewRecords()}
}

// Routes returns the contract's routes that this package serves, except the interrupt.
func (c *Commands) Routes() []httpx.Route {
	return []httpx.Route{
		{Method: "POST", Path: "/command", Handler: httpx.Always(c.run)},
		{Method: "GET", Path: "/command/status/{}", Handler: c.statusOf},
		{Method: "GET", Path: "/command/{}/logs", Handler: c.logsOf},
	}
}

func (c *Commands) run(w http.ResponseWriter, r *http.Request) {
	var request commandRequest
	if err := httpx.DecodeJSON(w, r, httpx.CommandBodyLimit, &request); err != nil {
		httpx.WriteError(w, err)
		return
	}
	c.carryOut(w, r, &request)
}

// RunShell runs a text with the shell and answers like POST /command.
func (c *Commands) RunShell(w http.ResponseWriter, r *http.Request, command string, background bool) {
	c.carryOut(w, r, &commandRequest{Command: &command, Background: &background})
}

// carryOut validates a request and runs its command. It aborts the answer if the terminal event is not delivered.
func (c *Commands) carryOut(w http.ResponseWriter, r *http.Request, request *commandRequest) {
	p, err := c.validate(request)
	if err != nil {
		httpx.WriteError(w, err)
		return
	}
	if !c.Slots.Reserve() {
		w.Header().Set("Retry-After", "1")
		httpx.WriteError(w, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many running commands"))
		return
	}
	if err := c.answer(w, p); err != nil {
		panic(http.ErrAbortHandler) // so that the client does not take the stream for a complete one
	}
}

// answer runs a plan; the caller has reserved a slot for it. It returns an error if the terminal event of the answer is
// not delivered.
func (c *Commands) answer(w http.ResponseWriter, p *plan) error {
	if p.background {
		return c.background(w, p)
	}
	return c.foreground(w, p)
}

func (c *Commands) validate(request *commandRequest) (*plan, error) {
	p := &plan{background: request.Background != nil && *request.Background, directory: c.Directory}
	switch {
	case (request.Command == nil) == (request.Argv == nil):
		return nil, httpx.BadRequest("exactly one of command and argv is required")
	case request.Command != nil:
		p.shell = *request.Command
		if p.shell == "" || strings.IndexByte(p.shell, 0) >= 0 {
			return nil, httpx.BadRequest("command must be a non-empty text without NUL")
		}
	default:
		p.isArgv = true
		for _, element := range *request.Argv {
			if element == nil || strings.IndexByte(*element, 0) >= 0 {
				return nil, httpx.BadRequest("argv elements must be texts without NUL")
			}
			p.argv = append(p.argv, *element)
		}
		if len(p.argv) == 0 || p.argv[0] == "" {
			return nil, httpx.BadRequest("argv needs a program")
		}
	}
	var err error
	if p.timeout, err = httpx.TimeLimit("timeout", request.Timeout, time.Millisecond); err != nil {
		return nil, err
	}
	if p.identity, err = c.Identity(request.UID, request.GID); err != nil {
		return nil, httpx.BadRequest(err.Error())
	}
	for key, value := range request.Envs {
		if key == "" || strings.ContainsAny(key, "=\x00") || (value != nil && strings.IndexByte(*value, 0) >= 0) {
			return nil, httpx.BadRequest("envs has an invalid name or value")
		}
	}
	p.env = c.Env.ForCommand(request.Envs)
	if request.Cwd != nil && *request.Cwd != "" {
		if p.directory, err = c.WorkingDirectory(*request.Cwd, p.env, c.Directory); err != nil {
			return nil, httpx.BadRequest(err.Error())
		}
	}
	return p, nil
}

// spec finds the program of a plan and returns the parameters of its process.
func (c *Commands) spec(p *plan) (process.Spec, error) {
	spec := process.Spec{Dir: p.directory, Env: environ.List(p.env), Identity: p.identity}
	if p.isArgv {
		path, err := process.LookProgram(p.argv[0], p.env["PATH"])
		spec.Path, spec.Argv = path, p.argv
		return spec, err
	}
	search, _ := c.Env.Lookup("PATH")
	for _, shell := range []string{"bash", "sh"} {
		if path, err := process.LookProgram(shell, search); err == nil {
			spec.Path, spec.Argv = path, []string{shell, "-c", p.shell}
			return spec, nil
		}
	}
	return spec, process.ErrNoShell
}
