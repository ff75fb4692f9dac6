package main

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// internals are names of calls and of the standard library, which tell a client nothing.
var internals = regexp.MustCompile(`(?i)fork/exec|\bexec: |\b(l?stat|open|openat|mkdirat?|readlink|remove|unlinkat|rename|chdir|chown|lchown|chmod|prctl|pipe2|unmarshal|errno)\b [^a-z ]|\$PATH|CAP_|json:|strconv`)

func TestAMessageNamesWhatFailedAndNoCall(t *testing.T) {
	f := newFixture(t)
	directory := t.TempDir()
	for name, content := range map[string]string{"bad": "#!/no/such\n", "garbage": "\x01\x02", "plain": "x"} {
		mode := os.FileMode(0o755)
		if name == "plain" {
			mode = 0o644
		}
		if err := os.WriteFile(directory+"/"+name, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	long := strings.Repeat("x", 300)
	for _, program := range []string{"/etc/passwd", "/usr", directory + "/bad", directory + "/garbage", directory + "/plain", "missing", long, "/" + long} {
		for _, request := range []object{{"argv": []string{program}}, {"argv": []string{program}, "background": true}} {
			run := f.runAt("/command", request)
			text := strings.Join(run.stderr, "")
			if run.last.Error != nil {
				text += run.last.Error.Evalue + strings.Join(run.last.Error.Traceback, "")
				equal(t, true, strings.Contains(text, program))
			}
			equal(t, "", internals.FindString(text))
		}
	}
	run := f.runAt("/command", object{"command": "true " + strings.Repeat("x", 200000)})
	equal(t, "argument list too long", run.last.Error.Evalue[strings.LastIndex(run.last.Error.Evalue, ": ")+2:])
	for _, c := range [][3]string{
		{"GET", "/files/info?path=/proc/self/missing", ""}, {"GET", "/files/info?path=/" + long, ""}, {"GET", "/files/download?path=/missing", ""},
		{"GET", "/files/download?path=/usr", ""}, {"POST", "/directories", `{"/etc/passwd/x":{}}`}, {"POST", "/directories", `{"/proc/x":{}}`},
		{"POST", "/files/mv", `[{"src":"/missing","dest":"/tmp/x"}]`}, {"POST", "/files/mv", `[{"src":"/proc/1/cmdline","dest":"/tmp/x"}]`},
		{"POST", "/files/permissions", `{"/missing":{"mode":755}}`}, {"POST", "/files/replace", `{"/missing":{"old":"a","new":"b"}}`},
		{"DELETE", "/files?path=/proc/1/cmdline", ""}, {"DELETE", "/directories?path=/proc/1", ""}, {"GET", "/files/search?path=/missing&pattern=*", ""},
		{"GET", "/directories/list?path=/missing", ""}, {"POST", "/session", `{"cwd":"/proc/x"}`}, {"POST", "/command", `{"command":"true","cwd":"/missing"}`},
		{"POST", "/command", `{`}, {"POST", "/command", `{"command":1}`}, {"POST", "/command", `{"command":"true","uid":-5}`}, {"POST", "/pty", `{"cwd":"/proc/x"}`},
		{"POST", "/v1/isolated/session", `{"workspace":{"path":"/missing"}}`}, {"POST", "/v1/isolated/session", `{`},
	} {
		status, body := f.call(c[0], c[1], c[2])
		equal(t, true, status >= 400)
		equal(t, "", internals.FindString(body))
	}
}
