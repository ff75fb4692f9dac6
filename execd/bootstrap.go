package main

// What the reference's start script does before the entrypoint (contract 18.2),
// without a script: the file is a program, and images without a shell exist.
//
// Invariants
//   - EXECD_BOOTSTRAP_PRE_SCRIPT is sourced by the image's shell, in a process of its
//     own; what it exports reaches the entrypoint and every command.
//   - BOOTSTRAP_CMD, or arguments that begin with -c, are text for a shell; anything
//     else is started as it is.

import (
	"os"
	"strings"
	"syscall"
	"time"
)

const preScriptLimit = 5 * time.Minute

// preScript prints its environment to descriptor 9 when the script has been read.
const preScript = `. "$1" && env -0 >&9`

// sourcePreScript adds what the script exports. What goes wrong is a line in the log.
func (s *Supervisor) sourcePreScript() {
	script, _ := s.env.Lookup("EXECD_BOOTSTRAP_PRE_SCRIPT")
	if script == "" {
		return
	}
	variables, problem := s.exportsOf(script)
	if problem != "" {
		s.log.Print("EXECD_BOOTSTRAP_PRE_SCRIPT: " + problem)
		return
	}
	s.env.Replace(variables)
}

func (s *Supervisor) exportsOf(script string) (variables map[string]string, problem string) {
	if info, err := os.Stat(script); err != nil || !info.Mode().IsRegular() {
		return nil, "is not a readable file"
	}
	shell, err := s.shell()
	if err != nil {
		return nil, explained(err)
	}
	result, err := stateFile(nil)
	if err != nil {
		return nil, explained(err)
	}
	defer result.Close()
	null, err := openNull()
	if err != nil {
		return nil, explained(err)
	}
	process, err := s.reaper.Start(Spec{
		Path: shell, Argv: []string{shell, "-c", preScript, "sh", script}, Env: s.env.ForEntrypoint(),
		Files: [3]uintptr{null.Fd(), 1, 2}, Extra: map[int]uintptr{shResult: result.Fd()},
	})
	null.Close()
	if err != nil {
		return nil, reason(err)
	}
	select {
	case <-process.Done:
	case <-time.After(preScriptLimit):
		process.SignalGroup(syscall.SIGKILL)
		<-process.Done
	}
	text, err := readState(result)
	if err != nil || len(text) == 0 {
		return nil, "failed; its exports are not known"
	}
	variables = environMap(strings.Split(string(text), "\x00"))
	delete(variables, "_")
	delete(variables, "JUPYTER_TOKEN")
	return variables, ""
}

// shell is the image's.
func (s *Supervisor) shell() (string, error) {
	for _, name := range []string{"bash", "sh"} {
		if path, err := s.program(name); err == nil {
			return path, nil
		}
	}
	return "", errNoShell
}

// commandLine is what to start for an entrypoint.
func (s *Supervisor) commandLine(entrypoint []string) []string {
	text, _ := s.env.Lookup("BOOTSTRAP_CMD")
	if text == "" && len(entrypoint) > 1 && entrypoint[0] == "-c" {
		text = strings.Join(entrypoint[1:], " ")
	}
	if text == "" {
		return entrypoint
	}
	shell, _ := s.env.Lookup("BOOTSTRAP_SHELL")
	if shell == "" {
		var err error
		if shell, err = s.shell(); err != nil {
			shell = "sh" // which is then reported as missing
		}
	}
	return []string{shell, "-c", text}
}
