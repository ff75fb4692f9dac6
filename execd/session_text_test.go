package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// argumentLists are the command lines of all processes that this one can see.
func argumentLists(t *testing.T) map[string]string {
	t.Helper()
	lists := map[string]string{}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil { // else it has ended
			lists[file] = string(text)
		}
	}
	return lists
}

// untilReleased is text for a shell without programs: it ends when a FIFO is opened.
const untilReleased = `: %s; read x <%s`

func TestTextOfASessionIsInNoArgumentList(t *testing.T) {
	for _, shell := range []string{"bash", "sh"} {
		f := newFixture(t)
		place := workspace(t)
		if shell == "sh" {
			f.server.commands.env.Bind(map[string]string{"PATH": withoutBash(t, place)})
		}
		fifo := place + "/fifo"
		if err := syscall.Mkfifo(fifo, 0o666); err != nil {
			t.Fatal(err)
		}
		isolated, _ := f.isolate(object{"workspace": object{"path": place, "mode": "rw"}})
		for name, run := range map[string]struct {
			path    string
			request object
		}{
			"session":    {"/session/" + f.newSession("{}") + "/run", object{}},
			"isolated":   {isolated + "/run", object{"envs": object{"GIVEN": "secret-value"}}},
			"background": {isolated + "/run", object{"background": true, "envs": object{"GIVEN": "secret-value"}}},
		} {
			code := fmt.Sprintf(untilReleased, "secret-text", fifo)
			run.request["command"], run.request["code"] = code, code
			body, _ := json.Marshal(run.request)
			response := f.do("POST", run.path, bytes.NewReader(body))
			// The write end opens once the run reads: its text is where it is going to be.
			release, err := os.OpenFile(fifo, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			for place, list := range argumentLists(t) {
				if strings.Contains(list, "secret-") {
					t.Errorf("%s, %s: %s has %q", shell, name, place, list)
				}
			}
			release.Close()
			_, _ = io.Copy(io.Discard, response.Body)
		}
	}
}

func TestARunOfShHasNoDescriptorOfItsText(t *testing.T) {
	f := newFixture(t)
	f.server.commands.env.Bind(map[string]string{"PATH": withoutBash(t, t.TempDir())})
	session := f.newSession("{}")
	equal(t, []string{"0", "1", "2"}, f.in(session, "/bin/ls /proc/self/fd | /bin/sed '/3/d'").stdout) // 3 is the directory
	equal(t, []string{"0", "1", "2"}, f.in(session, "exec 3>/dev/null; (exec 3>&-; /bin/ls /proc/self/fd | /bin/sed '/3/d')").stdout)
}

func TestATextMayBeLongerThanAnArgument(t *testing.T) {
	f := newFixture(t)
	f.server.commands.env.Bind(map[string]string{"PATH": withoutBash(t, t.TempDir())})
	session := f.newSession("{}")
	long := strings.Repeat("#", 1<<20) + "\n"
	equal(t, "sh: 2: missing: not found", messages(f.in(session, long+"missing")))
}
