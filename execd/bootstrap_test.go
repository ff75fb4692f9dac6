package main

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sallyport.dev/execd/internal/environ"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

// sourced runs a daemon with a start script and an entrypoint. It returns the entrypoint's variables and the daemon's
// log.
func sourced(t *testing.T, script string, env ...string) (variables map[string]string, log string) {
	t.Helper()
	directory := t.TempDir()
	path := filepath.Join(directory, "pre.sh")
	if err := os.WriteFile(path, []byte(script), 0o644); err != nil {
		t.Fatal(err)
	}
	env = append([]string{"EXECD_BOOTSTRAP_PRE_SCRIPT=" + path, "GONE=given", "odd.name=kept", "JUPYTER_TOKEN=former"}, env...)
	process, _, stderr := testhost.Daemon(t, env, append(testhost.HashArguments, "--init", "--", "/bin/cp", "/proc/self/environ", directory+"/out")...)
	if status := testhost.ExitOf(t, process); status != 0 {
		t.Fatal(status, stderr())
	}
	return environ.Map(strings.Split(testkit.MustRead(t, directory+"/out"), "\x00")), stderr()
}

func TestExportsOfAStartScriptReachTheEntrypointHoweverItEnds(t *testing.T) {
	posix := testhost.WithoutBash(t.TempDir())
	for name, c := range map[string]struct {
		script   string
		expected map[string]string
		says     string
		bash     bool
	}{
		"the last command fails":    {script: "export A=1; false", expected: map[string]string{"A": "1"}},
		"a conditional at the end":  {script: "export A=1\n[ -n \"$NONE\" ] && export B=2", expected: map[string]string{"A": "1"}},
		"exit":                      {script: "export A=1; exit 0; export A=2", expected: map[string]string{"A": "1"}},
		"exit with a status":        {script: "export A=1; exit 3", expected: map[string]string{"A": "1"}, says: "exit status 3"},
		"exit on failure":           {script: "set -e; export A=1; false; export A=2", expected: map[string]string{"A": "1"}, says: "exit status 1"},
		"set -e without failure":    {script: "set -eu; export A=1", expected: map[string]string{"A": "1"}},
		"an unset variable":         {script: "set -u; export A=1; echo $NONE; export A=2", expected: map[string]string{"A": "1"}, says: "exit status"},
		"return":                    {script: "export A=1; return 4; export A=2", expected: map[string]string{"A": "1"}},
		"unset":                     {script: "unset GONE; export A=1", expected: map[string]string{"A": "1", "GONE": "none"}},
		"not exported":              {script: "A=1; export B=2", expected: map[string]string{"A": "none", "B": "2"}},
		"lines":                     {script: "export A='one\ntwo\n\n' B='=x=\"'\\'", expected: map[string]string{"A": "one\ntwo\n\n", "B": "=x=\"'"}},
		"a trap of its own":         {script: "trap 'true' EXIT; export A=1", expected: map[string]string{"A": "1"}},
		"output closed":             {script: "exec >/dev/null 2>&1 3>&-; exec 9>/dev/null; export A=1", expected: map[string]string{"A": "1"}},
		"no PATH":                   {script: "export PATH=/nowhere A=1", expected: map[string]string{"PATH": "/nowhere", "A": "1"}},
		"functions":                 {script: "env() { :; }; printf() { :; }; export A=1", expected: map[string]string{"A": "1"}},
		"a token for the entry":     {script: "export JUPYTER_TOKEN=new EXECD_ACCESS_TOKEN=x", expected: map[string]string{"JUPYTER_TOKEN": "new", "EXECD_ACCESS_TOKEN": "none"}},
		"another directory":         {script: "cd /tmp; export A=1", expected: map[string]string{"A": "1", "PWD": "none", "OLDPWD": "none"}},
		"arguments":                 {script: `export A="$# $1"`, expected: map[string]string{"A": "3 /bin/cp"}},
		"something left running":    {script: "sleep 60 & export A=1", expected: map[string]string{"A": "1"}},
		"a lot of output":           {script: "export A=1; i=0; while [ $i -lt 30000 ]; do echo line $i; i=$((i+1)); done", expected: map[string]string{"A": "1"}},
		"the shell is replaced":     {script: "export A=1; exec /bin/sleep 0", expected: map[string]string{"A": "none"}, says: "exports are not known"},
		"killed":                    {script: "export A=1; kill -KILL $$", expected: map[string]string{"A": "none"}, says: "signal: killed"},
		"too large for an exec":     {script: "export A=1; export B=" + strings.Repeat("x", 131072), expected: map[string]string{"A": "none"}, says: "exports are not known"},
		"arrays and functions":      {script: "f() { echo hi; }; export -f f; declare -ax L=(1 2); export A=1", expected: map[string]string{"A": "1", "L": "none", "BASH_FUNC_f%%": "() {  echo hi\n}"}, bash: true},
		"a syntax error at the end": {script: "export A=1\nif", expected: map[string]string{"A": "1"}, says: "yntax error"},
	} {
		for _, shell := range []string{"bash", "sh"} {
			if c.bash && shell == "sh" {
				continue
			}
			t.Run(name+" in "+shell, func(t *testing.T) {
				t.Parallel()
				var env []string
				if shell == "sh" {
					env = []string{"PATH=" + posix}
				}
				variables, log := sourced(t, c.script, env...)
				got := map[string]string{}
				for key := range c.expected {
					got[key] = "none"
					if value, ok := variables[key]; ok {
						got[key] = value
					}
				}
				if !maps.Equal(c.expected, got) || variables["odd.name"] != "kept" || variables["SHLVL"] != "" {
					t.Errorf("%q\n%q\n%s", got, variables, log)
				}
				said := strings.Contains(log, "EXECD_BOOTSTRAP_PRE_SCRIPT: ")
				if (said && c.says == "") || !strings.Contains(log, c.says) {
					t.Error(log)
				}
			})
		}
	}
}

func TestAStartScriptMayNameAnotherEnvFile(t *testing.T) {
	directory := t.TempDir()
	path := filepath.Join(directory, "pre.sh")
	if err := os.WriteFile(path, []byte("export EXECD_ENVS="+directory+"/new/env"), 0o644); err != nil {
		t.Fatal(err)
	}
	process, url, _ := testhost.Daemon(t, []string{"EXECD_BOOTSTRAP_PRE_SCRIPT=" + path}, append(testhost.HashArguments, "--init", "--", "sleep", "60")...)
	defer process.SignalGroup(syscall.SIGKILL)
	testkit.Eventually(t, "the file", func() bool { _, err := os.Stat(directory + "/new/env"); return err == nil })
	body := said(t, url, "echo A=1 >>$EXECD_ENVS")
	testkit.Equal(t, true, strings.Contains(body, "execution_complete"))
	testkit.Equal(t, true, strings.Contains(said(t, url, "echo $A."), `"1.\n"`))
}

func TestWithoutAnEntrypointAShellIs(t *testing.T) {
	directory := t.TempDir()
	note := filepath.Join(directory, "note")
	shell := filepath.Join(directory, "my-shell")
	if err := os.WriteFile(shell, []byte("#!/bin/sh\necho \"$# $*\" >"+note+"; cat; exit 5\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		env       []string
		arguments []string
		status    int
		note      string
		says      string
	}{
		"no arguments":          {status: 0},
		"no text":               {arguments: []string{"-c"}, status: 0},
		"a shell of one's own":  {env: []string{"BOOTSTRAP_SHELL=" + shell}, status: 5, note: "0 \n"},
		"by its name":           {env: []string{"BOOTSTRAP_SHELL=my-shell", "PATH=" + directory + ":" + os.Getenv("PATH")}, status: 5, note: "0 \n"},
		"with a text":           {env: []string{"BOOTSTRAP_SHELL=" + shell}, arguments: []string{"-c", "a", "b"}, status: 5, note: "2 -c a b\n"},
		"a missing shell":       {env: []string{"BOOTSTRAP_SHELL=/no/such"}, status: 127, says: "/no/such: no such file"},
		"an image with nothing": {env: []string{"PATH=/nowhere"}, status: 127, says: "neither bash nor sh is on PATH"},
		"a text for no shell":   {env: []string{"PATH=/nowhere", "BOOTSTRAP_CMD=true"}, status: 127, says: "neither bash nor sh is on PATH"},
		"not a shell":           {env: []string{"BOOTSTRAP_SHELL=/etc/passwd"}, status: 126, says: "permission denied"},
	} {
		t.Run(name, func(t *testing.T) {
			os.Remove(note)
			process, _, stderr := testhost.Daemon(t, c.env, append(append(testhost.HashArguments, "--init", "--"), c.arguments...)...)
			status := testhost.ExitOf(t, process)
			text, _ := os.ReadFile(note)
			if status != c.status || string(text) != c.note || !strings.Contains(stderr(), c.says) {
				t.Error(status, string(text), stderr())
			}
		})
	}
}
