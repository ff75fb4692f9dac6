package supervise

// The work that the reference's start script does before the entrypoint. This program does it itself, because an image
// can be without a shell.
//
// Invariants
//   - EXECD_BOOTSTRAP_PRE_SCRIPT is sourced by the image's shell, in a process of its own. The entrypoint and every
//     command get the variables that it exports. Its exports are used even if its last command fails, or it exits. It
//     has a time limit.
//   - The shell starts this program, which writes out the shell's environment. So no program of the image is needed,
//     and redefinitions and redirections of the script have no effect on this step.
//   - BOOTSTRAP_CMD, or arguments that begin with -c, are text for a shell. Without them and without arguments the
//     shell itself is started. Other arguments are started as they are.

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
	exportsLimit    = 4 << 20         // bytes of the exported variables
	EnvironmentFlag = "--environment" // the only argument: write the environment to descriptor environResult
	// environResult is a descriptor that no shell chooses by itself; some scripts use 9.
	environResult = 250
)

// preScript is text for the shell: it sources %s, and then starts this program, whose path is $0. The trap does the
// same if the script ends the shell. The script can replace the trap, so the program is also started without it.
const preScript = `trap '[ "${__execd-}" ] || "$0" ` + EnvironmentFlag + `' EXIT
. %s
"$0" ` + EnvironmentFlag + `; __execd=1`

// WriteEnvironment implements EnvironmentFlag and returns the exit status. It replaces former content of the file.
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

// sourcePreScript runs the script with the entrypoint as its arguments, and replaces the environment with the exported
// variables. Errors are logged.
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
	for _, name := range []string{"_", "OLDPWD", "PWD", "SHLVL"} { // they describe the shell, which has ended
		delete(variables, name)
	}
	for name, value := range before { // a shell can drop variables whose names are not valid in it
		if _, kept := variables[name]; !kept && (!environ.IsName(name) || name == "PWD" || name == "OLDPWD" || name == "SHLVL") {
			variables[name] = value
		}
	}
	s.env.Replace(variables)
	s.env.PrepareFile()
}

// exportsOf runs the script and returns its exported variables, or nil if they are unknown. problem is text for the
// log, empty without an error.
func (s *Supervisor) exportsOf(script string, entrypoint []string) (variables map[string]string, problem string) {
	script, err := filepath.Abs(script) // the shell searches PATH for a name without a slash
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

// shell returns the path of the image's shell: bash, or else sh.
func (s *Supervisor) shell() (string, error) {
	for _, name := range []string{"bash", "sh"} {
		if path, err := s.lookup(name); err == nil {
			return path, nil
		}
	}
	return "", process.ErrNoShell
}

// commandLine returns the command line to start for an entrypoint.
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
