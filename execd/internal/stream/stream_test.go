package stream

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"sallyport.dev/execd/internal/testkit"
)

func FuzzSplitterLosesNothing(f *testing.F) {
	f.Add([]byte("a\r\nb\rc\n"), 3)
	f.Fuzz(func(t *testing.T, data []byte, chunk int) {
		var joined []byte
		lines := Lines{Emit: func(text []byte) {
			if len(text) == 0 || len(text) > MaxText {
				t.Fatal("a text of a wrong length")
			}
			joined = append(joined, text...)
		}}
		chunk = max(1, min(chunk, len(data)))
		for rest := data; len(rest) > 0; {
			n := min(chunk, len(rest))
			lines.feed(rest[:n])
			rest = rest[n:]
		}
		lines.flush()
		testkit.Equal(t, string(data), string(joined))
	})
}

func FuzzQuotedTextIsAsciiJSON(f *testing.F) {
	f.Add("a\"\\\x00\x7f\u2028😀\xff")
	f.Fuzz(func(t *testing.T, text string) {
		quoted := appendQuoted(nil, text)
		var back string
		if err := json.Unmarshal(quoted, &back); err != nil {
			t.Fatal(err)
		}
		testkit.Equal(t, string([]rune(text)), back)
		for _, c := range quoted {
			if c < ' ' || c > '~' {
				t.Fatal("not printable ASCII")
			}
		}
	})
}

// sink is a response writer that keeps a stream of events.
type sink struct {
	bytes.Buffer
	header http.Header
}

func (s *sink) Header() http.Header { return s.header }

func (s *sink) WriteHeader(int) {}

func (s *sink) Flush() {}

func FuzzStreamFraming(f *testing.F) {
	f.Add([]byte("a\r\n\rb\x00\u0085\u2028\xff\n"), uint8(3), "CommandExecError")
	f.Add([]byte("{\"type\":\"error\"}\n\ndata: x\n\n"), uint8(1), "\n\n")
	f.Fuzz(func(t *testing.T, output []byte, cut uint8, name string) {
		out := &sink{header: http.Header{}}
		stream := New(out)
		stream.Begin("id")
		lines := &Lines{Emit: func(text []byte) { stream.Text("stdout", text) }}
		for rest := output; len(rest) > 0; {
			n := min(len(rest), int(cut)+1)
			lines.feed(rest[:n])
			rest = rest[n:]
		}
		lines.flush()
		stream.Result(map[string]string{name: string(output)})
		_ = stream.Fail(name, string(output), []string{name})
		stream.Text("stdout", []byte("after the end"))
		stream.Flush()
		var shown strings.Builder
		terminal := 0
		for frame := range strings.SplitSeq(strings.TrimSuffix(out.String(), "\n\n"), "\n\n") {
			var event testkit.Event
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
