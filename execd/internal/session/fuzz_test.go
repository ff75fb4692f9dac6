package session

import (
	"bytes"
	"strings"
	"testing"
)

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
