package server

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/testkit"
)

// internals matches names of system calls and of the standard library, which a message to a client must not contain.
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
		for _, request := range []testkit.Object{{"argv": []string{program}}, {"argv": []string{program}, "background": true}} {
			run := f.RunAt("/command", request)
			text := strings.Join(run.Stderr, "")
			if run.Last.Error != nil {
				text += run.Last.Error.Evalue + strings.Join(run.Last.Error.Traceback, "")
				testkit.Equal(t, true, strings.Contains(text, program))
			}
			testkit.Equal(t, "", internals.FindString(text))
		}
	}
	run := f.RunAt("/command", testkit.Object{"command": "true " + strings.Repeat("x", 200000)})
	testkit.Equal(t, "argument list too long", run.Last.Error.Evalue[strings.LastIndex(run.Last.Error.Evalue, ": ")+2:])
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
		status, body := f.Call(c[0], c[1], c[2])
		testkit.Equal(t, true, status >= 400)
		testkit.Equal(t, "", internals.FindString(body))
	}
}
