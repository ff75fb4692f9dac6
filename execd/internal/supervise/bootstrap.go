package supervise

// What the reference's start script does before the entrypoint,
// without a script: the file is a program, and images without a shell exist.
//
// Invariants
//   - EXECD_BOOTSTRAP_PRE_SCRIPT is sourced by the image's shell, in a process of its
//     own; what it exports reaches the entrypoint and every command. What it had
//     exported counts also where its last command fails, or it exits. It has a time limit.
//   - The shell's variables are read by this program, started from the shell: nothing of
//     the image is needed, and nothing the script redefines or redirects is in the way.
//   - BOOTSTRAP_CMD, or arguments that begin with -c, are text for a shell; without
//     either and without arguments the shell itself is started; anything else is started
//     as it is.

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
)

const (
	preScriptLimit  = 5 * time.Minute
	exportsLimit    = 4 << 20         // bytes of what a script exports
	EnvironmentFlag = "--environment" // the whole command line of what writes its environment to environResult
	// environResult is a number that no shell chooses by itself; some scripts use 9.
	environResult = 250
)

// preScript sources %s and starts this program, its name, when that is over. The trap is for
// a script that ends the shell, and one may have a trap of its own in its place.
const preScript = `trap '[ "${__execd-}" ] || "$0" ` + EnvironmentFlag + `' EXIT
. %s
"$0" ` + EnvironmentFlag + `; __execd=1`

// WriteEnvironment is what EnvironmentFlag means. What was written before is replaced.
func WriteEnvironment() int {
	result := os.NewFile(environResult, "environment")
	if result.Truncate(0) != nil {
		return 1
	}
	if _, err := result.WriteAt([]byte(strings.Join(os.Environ(), "\x00")), 0); err != nil {
		return 1
	}
	return 0
}

// sourcePreScript adds what the script exports; it sees the entrypoint as its arguments.
// What goes wrong is a line in the log.
func (s *Supervisor) sourcePreScript(entrypoint []string) {
	script, _ := s.env.Lookup("EXECD_BOOTSTRAP_PRE_SCRIPT")
	if script == "" {
		return
	}
	before := environ.Map(s.env.ForEntrypoint())
	variables, problem := s.exportsOf(script, entrypoint)
	if problem != "" {
		s.log.Print("EXECD_BOOTSTRAP_PRE_SCRIPT: " + problem)
	}
	if variables == nil {
		return
	}
	for _, name := range []string{"_", "OLDPWD", "PWD", "SHLVL"} { // of the shell that has ended
		delete(variables, name)
	}
	for name, value := range before { // a shell may lose what has no name it knows
		if _, kept := variables[name]; !kept && (!environ.IsName(name) || name == "PWD" || name == "OLDPWD" || name == "SHLVL") {
			variables[name] = value
		}
	}
	s.env.Replace(variables)
	s.env.PrepareFile()
}

// exportsOf returns nil where the exports are not known.
func (s *Supervisor) exportsOf(script string, entrypoint []string) (variables map[string]string, problem string) {
	script, err := filepath.Abs(script) // else it is searched for on PATH
	if err != nil {
		return nil, sys.Explain(err)
	}
	if info, err := os.Stat(script); err != nil || !info.Mode().IsRegular() {
		return nil, "is not a readable file"
	}
	shell, err := s.shell()
	if err != nil {
		return nil, sys.Explain(err)
	}
	result, err := sys.MemoryFile()
	if err != nil {
		return nil, sys.Explain(err)
	}
	defer result.Close()
	null, err := process.OpenNull()
	if err != nil {
		return nil, sys.Explain(err)
	}
	text := fmt.Sprintf(preScript, process.ShellQuote(script))
	child, err := s.reaper.Start(process.Spec{
		Path: shell, Argv: append([]string{shell, "-c", text, s.program}, entrypoint...), Env: s.env.ForEntrypoint(),
		Files: [3]uintptr{null.Fd(), 1, 2}, Extra: map[int]uintptr{environResult: result.Fd()},
	})
	null.Close()
	if err != nil {
		return nil, sys.Reason(err)
	}
	limit := time.NewTimer(s.scriptLimit)
	defer limit.Stop()
	select {
	case <-child.Done:
		problem = process.OutcomeOf(child.Status).Failure
	case <-limit.C:
		problem = fmt.Sprintf("did not end within %s", s.scriptLimit)
		child.SignalGroup(syscall.SIGKILL)
		<-child.Done
	}
	content, err := sys.ReadBounded(result, exportsLimit)
	if err != nil || len(content) == 0 {
		return nil, strings.TrimPrefix(problem+"; its exports are not known", "; ")
	}
	if problem != "" {
		problem += "; what it had exported is used"
	}
	return environ.Map(strings.Split(string(content), "\x00")), problem
}

// shell is the image's.
func (s *Supervisor) shell() (string, error) {
	for _, name := range []string{"bash", "sh"} {
		if path, err := s.lookup(name); err == nil {
			return path, nil
		}
	}
	return "", process.ErrNoShell
}

// commandLine is what to start for an entrypoint.
func (s *Supervisor) commandLine(entrypoint []string) ([]string, error) {
	text, _ := s.env.Lookup("BOOTSTRAP_CMD")
	if text == "" && len(entrypoint) > 0 {
		if entrypoint[0] != "-c" {
			return entrypoint, nil
		}
		text = strings.Join(entrypoint[1:], " ")
	}
	shell, _ := s.env.Lookup("BOOTSTRAP_SHELL")
	if shell == "" {
		var err error
		if shell, err = s.shell(); err != nil {
			return nil, err
		}
	}
	if text == "" {
		return []string{shell}, nil
	}
	return []string{shell, "-c", text}, nil
}
