package terminal

import (
	"encoding/json"
	"strings"
	"testing"
)

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
