package jupyter

import (
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/stream"
)

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
		events := stream.New(out)
		emit(events, kind, &content)
		for frame := range strings.SplitSeq(strings.TrimSuffix(out.Body.String(), "\n\n"), "\n\n") {
			if frame != "" && !json.Valid([]byte(frame)) {
				t.Fatalf("%q", frame)
			}
		}
	})
}
