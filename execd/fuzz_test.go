package main

// What a hostile image, client or session may hand to a parser. The seeds run with
// every `go test`; `./run test` also lets some of these look for more, for a moment.

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func FuzzAccounts(f *testing.F) {
	f.Add([]byte("root:x:0:0:root:/root:/bin/sh\nu:x:4294967295:1::/:\nu2:x:+1:1::/:\n+::::::\n"), []byte("g:x:5:root,u\nbad:x:-1:\n"), uint32(0))
	f.Fuzz(func(t *testing.T, passwd, group []byte, uid uint32) {
		accounts := Accounts{users: parsePasswd(passwd), groups: parseGroup(group)}
		for _, user := range accounts.users {
			if user.name == "" || strings.ContainsAny(user.name, ":\n\x00") || user.uid == 1<<32-1 || user.gid == 1<<32-1 {
				t.Fatalf("%+v", user)
			}
		}
		credential, err := accounts.Identity(uid, nil)
		if (err == nil) == (uid == 1<<32-1) {
			t.Fatal(err)
		}
		if err == nil && (credential.Uid != uid || len(credential.Groups) > groupCountLimit) {
			t.Fatalf("%+v for %d", credential, uid)
		}
		if _, known := accounts.userByID(uid); err == nil && !known && (credential.Gid != uid || len(credential.Groups) > 0) {
			t.Fatalf("an unknown account got %+v", credential)
		}
		if !filepath.IsAbs(accounts.Home(uid)) {
			t.Fatal("a home that is not absolute")
		}
	})
}

func FuzzUpload(f *testing.F) {
	good := "--B\r\nContent-Disposition: form-data; name=\"metadata\"; filename=\"metadata\"\r\n\r\n{\"path\":\"a\",\"mode\":644}\r\n" +
		"--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\ncontent\r\n--B--\r\n"
	f.Add([]byte(good), "multipart/form-data; boundary=B")
	f.Add([]byte(strings.Replace(good, `"a"`, `null`, 1)), "multipart/form-data; boundary=B")
	f.Add([]byte(good[:90]), "multipart/form-data; boundary=\"B\"")
	f.Fuzz(func(t *testing.T, body []byte, kind string) {
		request := httptest.NewRequest(http.MethodPost, "/files/upload", bytes.NewReader(body))
		request.Header.Set("Content-Type", kind)
		answer := httptest.NewRecorder()
		// A root that does not exist and cannot be made: what is parsed is not written anywhere.
		files := NewFiles(FixedEnvironment(nil), func() Accounts { return Accounts{} }, "/proc/nothing", 0o022)
		files.upload(confined{answer}, request)
		if answer.Code != 200 && !json.Valid(answer.Body.Bytes()) {
			t.Fatalf("%d %q", answer.Code, answer.Body)
		}
	})
}

// confined is a writer without deadlines, as the recorder is.
type confined struct{ *httptest.ResponseRecorder }

func FuzzUploadMetadata(f *testing.F) {
	f.Add([]byte(`{"path":"/a","owner":null,"group":"g","mode":4755}`))
	f.Add([]byte(`{"path":"","mode":99999999999}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var form bytes.Buffer
		writer := multipart.NewWriter(&form)
		part, _ := writer.CreateFormFile("metadata", "metadata")
		_, _ = part.Write(text)
		writer.Close()
		read, err := multipart.NewReader(&form, writer.Boundary()).NextRawPart()
		if err != nil {
			t.Fatal(err) // a form that was written is read
		}
		metadata, err := readMetadata(read)
		if err == nil && (metadata.Path == nil || *metadata.Path == "") {
			t.Fatal("no path was accepted")
		}
		if err == nil && metadata.Mode != nil {
			if bits, ok := permissionBits(*metadata.Mode); ok && (bits > 0o7777 || permissionNumber(bits) != *metadata.Mode) {
				t.Fatalf("mode %d became %o", *metadata.Mode, bits)
			}
		}
	})
}

func FuzzRange(f *testing.F) {
	for _, header := range []string{"bytes=0-0", "bytes=5-", "bytes=-3", "bytes=9-1", "bytes=0-1,2-3", "bytes=-0", "lines=1-2", "bytes=99999999999999999999-"} {
		f.Add(header, int64(10))
	}
	f.Fuzz(func(t *testing.T, header string, size int64) {
		if size < 0 {
			return
		}
		single, ok := firstRange(header, size)
		if !ok {
			return
		}
		var begin, end int64
		if n, err := fmt.Sscanf(single, "bytes=%d-%d", &begin, &end); n != 2 || err != nil || begin < 0 || end < begin || end >= size {
			t.Fatalf("%q of %d became %q", header, size, single)
		}
	})
}

// sink is where a stream of events goes.
type sink struct {
	bytes.Buffer
	header http.Header
}

func (s *sink) Header() http.Header { return s.header }
func (s *sink) WriteHeader(int)     {}
func (s *sink) Flush()              {}

func FuzzStreamFraming(f *testing.F) {
	f.Add([]byte("a\r\n\rb\x00\u0085\u2028\xff\n"), uint8(3), "CommandExecError")
	f.Add([]byte("{\"type\":\"error\"}\n\ndata: x\n\n"), uint8(1), "\n\n")
	f.Fuzz(func(t *testing.T, output []byte, cut uint8, name string) {
		out := &sink{header: http.Header{}}
		stream := newEventStream(out)
		stream.begin("id")
		lines := &lineSplitter{emit: func(text []byte) { stream.text("stdout", text) }}
		for rest := output; len(rest) > 0; {
			n := min(len(rest), int(cut)+1)
			lines.feed(rest[:n])
			rest = rest[n:]
		}
		lines.flush()
		stream.result(map[string]string{name: string(output)})
		stream.fail(name, string(output), []string{name})
		stream.text("stdout", []byte("after the end"))
		stream.flush()
		var shown strings.Builder
		terminal := 0
		for frame := range strings.SplitSeq(strings.TrimSuffix(out.String(), "\n\n"), "\n\n") {
			var event testEvent
			if err := json.Unmarshal([]byte(frame), &event); err != nil {
				t.Fatalf("%v: %q", err, frame)
			}
			if strings.IndexFunc(frame, func(r rune) bool { return r < ' ' || r > '~' }) >= 0 {
				t.Fatalf("not printable ASCII: %q", frame)
			}
			if terminal > 0 {
				t.Fatal("an event after the end")
			}
			switch event.Type {
			case "stdout":
				shown.WriteString(event.Text)
			case "error":
				terminal++
			}
		}
		if utf8.Valid(output) && shown.String() != string(output) {
			t.Fatalf("%q became %q", output, shown.String())
		}
	})
}

func FuzzSessionState(f *testing.F) {
	given := map[string]string{"HOME": "/root", "KEEP": "1"}
	f.Add([]byte("/tmp\x00x:y\x00builtin () \n{ \n}\x00set +o x\n\x00shopt -u y\n\x00umask 0022\n\x00\x00\x00A\x001\x00declare -- A=\"1\"\n\x00()\x00f 7 main\n\x00f () \n{ \n    x\n}\n\x00end\x00"))
	f.Add([]byte("/\x00A=1\x00B\x00end\x00"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if state, ok := parseBash(text, given); ok {
			if state.size() > 4*len(text)+4096 {
				t.Fatalf("%d bytes from %d", state.size(), len(text))
			}
			for line := range bytes.Lines(state.options) {
				if !bytes.HasPrefix(line, []byte(`\builtin `)) {
					t.Fatalf("%q", line)
				}
			}
			if input := state.input("", "true"); bytes.Count(input, []byte{0}) != 2 {
				t.Fatal("a state that is read as another command")
			}
		}
		if state, ok := parseSh(text, given); ok {
			for name, value := range state.env {
				if name == "" || strings.ContainsAny(name, "=\x00") || (value != nil && strings.IndexByte(*value, 0) >= 0) {
					t.Fatalf("%q", name)
				}
			}
			state.apply(given)
		}
	})
}

func FuzzTerminalFrames(f *testing.F) {
	f.Add([]byte(`{"type":"resize","cols":70000,"rows":-1}`), []byte("output"), int64(3))
	f.Add([]byte(`{"type":"signal","signal":"SIGSTOP"}`), []byte{}, int64(-1))
	f.Fuzz(func(t *testing.T, text, output []byte, from int64) {
		var frame clientFrame
		if json.Unmarshal(text, &frame) == nil {
			if _, known := clientSignals[frame.Signal]; known && !strings.HasPrefix(frame.Signal, "SIG") {
				t.Fatal(frame.Signal)
			}
		}
		kept, model := scrollback{limit: 64}, plainScrollback{limit: 64}
		for n := 1; len(output) > 0; n++ {
			part := output[:min(n, len(output))]
			kept.add(byte(1+n%2), part)
			model.add(byte(1+n%2), part)
			output = output[len(part):]
		}
		checkOffset(t, "fuzzed", &kept, &model, max(0, min(from, kept.total)), make([]byte, 16))
	})
}

func FuzzKernelMessages(f *testing.F) {
	f.Add("stream", []byte(`{"name":"stderr","text":"x\u2028"}`))
	f.Add("execute_result", []byte(`{"execution_count":1,"data":{"text/plain":["a","b"],"application/json":{"k":[1]}}}`))
	f.Add("error", []byte(`{"ename":"E","evalue":"v","traceback":null}`))
	f.Fuzz(func(t *testing.T, kind string, text []byte) {
		var content kernelContent
		if json.Unmarshal(text, &content) != nil {
			return
		}
		out := httptest.NewRecorder()
		stream := newEventStream(out)
		emit(stream, kind, &content)
		for frame := range strings.SplitSeq(strings.TrimSuffix(out.Body.String(), "\n\n"), "\n\n") {
			if frame != "" && !json.Valid([]byte(frame)) {
				t.Fatalf("%q", frame)
			}
		}
	})
}

func FuzzToken(f *testing.F) {
	f.Add("secret", "secret", "x")
	f.Add("", "", "")
	f.Fuzz(func(t *testing.T, token, first, second string) {
		auth, err := NewAuth(hashToken(token), false)
		if err != nil {
			t.Fatal(err)
		}
		request := &http.Request{Header: http.Header{tokenHeader: {first}}}
		if auth.Allows(request) != (first == token) {
			t.Fatalf("%q for %q", first, token)
		}
		request.Header[tokenHeader] = []string{token, second}
		if auth.Allows(request) {
			t.Fatal("two tokens")
		}
		if made, err := NewAuth(first, false); err == nil && len(first) != 64 || made.open {
			t.Fatalf("%q is no hash", first)
		}
	})
}

func FuzzPaths(f *testing.F) {
	for _, path := range []string{"/proxy/44772/ping", "/v1/filesystem/0/+1/files", "/proxy/80/%2e%2e/x", "//ping", "/v1/isolated/session/../x/run", "/%zz", "/proxy/00080/"} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		if !strings.HasPrefix(path, "/") {
			return
		}
		launcher := &Launcher{env: FixedEnvironment(nil), log: log.New(io.Discard, "", 0), reaper: &Reaper{}}
		server := New(Options{Binding: &Binding{}, Port: testPort, Log: launcher.log, Launcher: launcher})
		request := &http.Request{Method: http.MethodGet, RequestURI: path, Header: http.Header{}}
		answer := httptest.NewRecorder()
		server.ServeHTTP(answer, request) // nobody has a token here
		if open := answer.Code == 200; open && strings.TrimRight(server.withoutOwnProxy(rawPath(request)), "") != "/ping" && answer.Body.Len() > 0 {
			t.Fatalf("%q answered %d", path, answer.Code)
		}
		if answer.Code < 200 || answer.Code >= 300 && answer.Code < 400 {
			t.Fatalf("%q answered %d", path, answer.Code)
		}
	})
}

func FuzzIdentityPaths(f *testing.F) {
	for _, path := range []string{"/0/+1/files", "/0/0/files/info", "//0/files", "/4294967295/0/x"} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		if chosen, route, ok, err := splitIdentity(path); ok && err == nil {
			if back := "/" + strconv.FormatUint(uint64(chosen.uid), 10); chosen.uid == 1<<32-1 || len(back) < 2 || route[0] != '/' {
				t.Fatalf("%q", path)
			}
		}
	})
}

func FuzzLifecycle(f *testing.F) {
	f.Add([]byte(`{"preStart":{"command":["a"]},"periodic":[{"name":"n","schedule":"*/5 1-3 * * 1,5","command":["b"]}]}`), "@every 5s")
	f.Fuzz(func(t *testing.T, text []byte, when string) {
		if parsed, err := parseLifecycle(text); err == nil {
			for _, each := range parsed.periodic {
				if each.limit <= 0 || each.limit > periodicLimit || len(each.command) == 0 {
					t.Fatalf("%+v", each)
				}
			}
		}
		if next, err := parseSchedule(when); err == nil {
			now := time.Date(2026, 3, 1, 4, 5, 6, 0, time.UTC)
			if tick := next(now); !tick.IsZero() && !tick.After(now) {
				t.Fatalf("%q ticks at %s", when, tick)
			}
		}
	})
}

func FuzzIsolatedRequest(f *testing.F) {
	f.Add([]byte(`{"workspace":{"path":"/usr"},"overlays":[{"path":"/usr/lib","mode":"ro"}],"binds":[{"source":"/data"}],"uid":5}`))
	f.Add([]byte(`{"overlays":[{"path":"/var/lib/execd/isolation"},{"path":"/../proc"}],"env_passthrough":{"mode":"x"}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var request isolatedRequest
		if json.Unmarshal(text, &request) != nil {
			return
		}
		plan, err := request.plan(defaultUpperRoot)
		if err != nil {
			return
		}
		for _, mount := range plan.Mounts {
			resolved, err := filepath.EvalSymlinks(mount.Target)
			if err != nil || resolved != mount.Target || within(mount.Target, "/proc") || within(defaultUpperRoot, mount.Target) {
				t.Fatalf("%+v", mount)
			}
		}
		_, _ = request.environment(map[string]string{"A": "1"})
	})
}

func FuzzRunReport(f *testing.F) {
	f.Add(runReport{reportBegun, newUUID(), 0, time.Unix(1, 2)}.encode())
	f.Add(runReport{reportEnded, newUUID(), 9, time.Unix(-1, 0)}.encode())
	f.Fuzz(func(t *testing.T, text []byte) {
		report, err := parseReport(text)
		if err == nil && !bytes.Equal(text, report.encode()) {
			t.Fatalf("%q has two meanings", text)
		}
	})
}

func FuzzMountInfo(f *testing.F) {
	table, _ := os.ReadFile("/proc/self/mountinfo")
	f.Add(table)
	f.Add([]byte("1 2 0:1 / /a\\040b\\134 rw,nosuid - tmpfs x y\n"))
	f.Fuzz(func(t *testing.T, table []byte) {
		for _, each := range parseMountInfo(table) {
			if each.place[0] != '/' || each.flags&^(1|2|4|8|1024|2048|1<<21) != 0 {
				t.Fatalf("%+v", each)
			}
		}
	})
}
