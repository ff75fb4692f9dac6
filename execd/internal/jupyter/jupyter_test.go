package jupyter

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/stream"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

type fixture struct {
	*testkit.Client
	contexts *Contexts
}

// server.newFixture has no Jupyter server.
func newFixture(t *testing.T) *fixture {
	t.Helper()
	return fixtureWith(t, "")
}

func fixtureWith(t *testing.T, host string) *fixture {
	t.Helper()
	jupyter, err := NewJupyter(host, "")
	if err != nil {
		t.Fatal(err)
	}
	launcher, _ := testhost.Launcher(t)
	contexts := New(jupyter, launcher, nil)
	interrupt := httpx.Route{Method: "DELETE", Path: "/code", Handler: httpx.Always(func(w http.ResponseWriter, r *http.Request) {
		if !contexts.Interrupt(w, r) {
			httpx.NotFound(w)
		}
	})}
	return &fixture{testkit.NewClient(t, testhost.Handle(append(contexts.Routes(), interrupt)...)), contexts}
}

func TestResultsAreStringsAndPlainTextHasBothNames(t *testing.T) {
	var data map[string]json.RawMessage
	if err := json.Unmarshal([]byte(`{"text/plain":["4","2"],"application/json":{"a":[1]},"image/png":"iVBO"}`), &data); err != nil {
		t.Fatal(err)
	}
	testkit.Equal(t, map[string]string{
		"text/plain": "42", "text": "42", "application/json": `{"a":[1]}`, "image/png": "iVBO",
	}, results(data))
}

// followed runs a script of messages as one run with the id "run"; a line without a header is passed as it is.
func followed(t *testing.T, script ...string) (kinds []string, err error) {
	t.Helper()
	recorder := httptest.NewRecorder()
	events := stream.New(recorder)
	err = follow("run", events, newCodeRun(nil), func() ([]byte, error) {
		if len(script) == 0 {
			return nil, io.EOF
		}
		line := script[0]
		script = script[1:]
		if kind, content, ok := strings.Cut(line, " "); ok && !strings.HasPrefix(line, "{") {
			line = `{"header":{"msg_type":"` + kind + `"},"parent_header":{"msg_id":"run"},"content":` + content + `}`
		}
		return []byte(line), nil
	})
	_ = events.Complete(0)
	for frame := range strings.SplitSeq(strings.TrimSpace(recorder.Body.String()), "\n\n") {
		var event struct {
			Type    string
			Text    string
			Results map[string]string
			Error   *struct {
				Ename, Evalue string
				Traceback     []string
			}
		}
		if err := json.Unmarshal([]byte(frame), &event); err != nil {
			t.Fatal(err)
		}
		kind := event.Type + " " + event.Text
		if event.Type == "error" {
			kind = strings.Join(append([]string{"error", event.Error.Ename, event.Error.Evalue}, event.Error.Traceback...), " ")
		}
		kinds = append(kinds, kind)
	}
	return kinds, err
}

const (
	replyOfRun = `execute_reply {"status":"ok"}`
	idleAfter  = `status {"execution_state":"idle"}`
)

func TestCodeEventsCarryWhatAKernelSaid(t *testing.T) {
	kinds, err := followed(t,
		`stream {"name":"stdout","text":"a\nb\n"}`,
		`stream {"name":"stderr","text":"é"}`,
		`execute_result {"execution_count":3,"data":{"text/plain":"4"}}`,
		`display_data {"data":{"text/html":"<b>"}}`,
		`error {"ename":"E","evalue":"v","traceback":["one"]}`,
		`comm_open {}`,
		`execute_reply {"status":"error","ename":"E","evalue":"v","traceback":["one"]}`,
		idleAfter,
	)
	testkit.Equal(t, nil, err)
	testkit.Equal(t, []string{"stdout a\nb\n", "stderr é", "execution_count ", "result ", "result ", "error E v one", "execution_complete "}, kinds)
}

func TestAFailureThatOnlyTheReplyTellsIsAnError(t *testing.T) {
	for reply, expected := range map[string]string{
		`{"status":"error","ename":"E","evalue":"v","traceback":["one"]}`: "error E v one",
		`{"status":"error"}`:   "error Error the code has failed",
		`{"status":"abort"}`:   "error Aborted the run was given up",
		`{"status":"aborted"}`: "error Aborted the run was given up",
	} {
		kinds, err := followed(t, idleAfter, "execute_reply "+reply)
		testkit.Equal(t, nil, err)
		testkit.Equal(t, []string{expected, "execution_complete "}, kinds)
	}
}

func TestMalformedMessagesOfAKernelAreSkippedAndARunStillEnds(t *testing.T) {
	kinds, err := followed(t,
		`{`, `{}`, `{"header":7}`, `{"header":{"msg_type":"stream"},"parent_header":{"msg_id":"run"},"content":[]}`,
		`{"header":{"msg_type":"stream"},"parent_header":{"msg_id":"another"},"content":{"text":"foreign"}}`,
		`{"header":{"msg_type":"status"},"parent_header":{"msg_id":"another"},"content":{"execution_state":"idle"}}`,
		`stream {"text":7}`, `stream {"text":""}`, `error {"ename":{},"evalue":1}`, `execute_result {"data":"x"}`,
		`status "idle"`, `stream {"name":"stdout","text":"still here"}`, `execute_reply {"status":["ok"]}`, idleAfter,
	)
	testkit.Equal(t, nil, err)
	testkit.Equal(t, []string{"stdout still here", "execution_complete "}, kinds)
}

func TestTheDeathOfAKernelEndsARunForEachReporter(t *testing.T) {
	for _, last := range []string{
		`{"header":{"msg_type":"status"},"parent_header":{},"content":{"execution_state":"dead"}}`,
		`{"header":{"msg_type":"status"},"parent_header":{},"content":{"execution_state":"restarting"}}`,
		replyOfRun, // and then the connection ends
	} {
		_, err := followed(t, last)
		testkit.Equal(t, errKernelLost, err)
	}
}

func FuzzARunEndsWithWhateverAKernelSends(f *testing.F) {
	f.Add([]byte(`{"header":{"msg_type":"execute_result"},"parent_header":{"msg_id":"run"},"content":{"data":{"text/plain":["a"]}}}`))
	f.Fuzz(func(t *testing.T, message []byte) {
		_, err := followed(t, string(message), replyOfRun, idleAfter)
		testkit.Equal(t, true, err == nil || err == errKernelLost)
	})
}

func TestKernelIsChosenByLanguageAndNotTheGenericOne(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Token secret" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		_, _ = w.Write([]byte(`{"kernelspecs":{"python3":{"spec":{"language":"python"}},"py-b":{"spec":{"language":"Python"}},
			"py-a":{"spec":{"language":"python"}},"bash":{"spec":{"language":"bash"}}}}`))
	}))
	defer server.Close()
	jupyter, err := NewJupyter(server.URL, "secret")
	if err != nil {
		t.Fatal(err)
	}
	for language, expected := range map[string]string{"python": "py-a", "bash": "bash"} {
		name, _, err := jupyter.kernel(t.Context(), language)
		testkit.Equal(t, expected, name)
		testkit.Equal(t, nil, err)
	}
	_, _, err = jupyter.kernel(t.Context(), "java")
	testkit.Equal(t, true, err == errNoKernel)
	_, err = NewJupyter("127.0.0.1:44771", "")
	testkit.Equal(t, true, err != nil)
}

func TestCodeThatCannotRunIsRefusedBeforeTheFirstEvent(t *testing.T) {
	f := newFixture(t)
	for body, expected := range map[string]int{
		`{"code":""}`: 400, `{"code":"1","context":{"language":"cobol"}}`: 400, `{"code":"1","context":{"id":"none"}}`: 500,
		`{"code":"1","context":{"language":"python"}}`: 500, `{`: 400,
	} {
		status, answer := f.Call("POST", "/code", body)
		testkit.Equal(t, expected, status)
		testkit.Equal(t, true, strings.Contains(answer, `"message"`))
	}
	status, _ := f.Call("POST", "/code/context", `{"language":"cobol"}`)
	testkit.Equal(t, 400, status)
	status, answer := f.Call("POST", "/code/context", `{"language":"python"}`)
	testkit.Equal(t, true, status == 500 && strings.Contains(answer, "JUPYTER_HOST"))
	status, answer = f.Call("GET", "/code/contexts", "")
	testkit.Equal(t, true, status == 200 && answer == "[]")
	status, _ = f.Call("GET", "/code/contexts?language=sql", "")
	testkit.Equal(t, 500, status)
	status, _ = f.Call("GET", "/code/contexts/none", "")
	testkit.Equal(t, 404, status)
	status, _ = f.Call("DELETE", "/code/contexts", "")
	testkit.Equal(t, 400, status)
	status, _ = f.Call("DELETE", "/code/contexts?language=cobol", "")
	testkit.Equal(t, 200, status)
}

func TestABusyContextSaysSoInTheWordsClientsLookFor(t *testing.T) {
	f := newFixture(t)
	f.contexts.byID["some"] = &kernelContext{ID: "some", Language: "python", running: newCodeRun(nil)}
	status, answer := f.Call("POST", "/code", `{"code":"1","context":{"id":"some"}}`)
	testkit.Equal(t, true, status == 500 && strings.Contains(answer, "session is busy"))
}
