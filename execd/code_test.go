package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestResultsAreStringsAndPlainTextHasBothNames(t *testing.T) {
	var data map[string]json.RawMessage
	if err := json.Unmarshal([]byte(`{"text/plain":["4","2"],"application/json":{"a":[1]},"image/png":"iVBO"}`), &data); err != nil {
		t.Fatal(err)
	}
	equal(t, map[string]string{
		"text/plain": "42", "text": "42", "application/json": `{"a":[1]}`, "image/png": "iVBO",
	}, results(data))
}

func TestCodeEventsCarryWhatAKernelSaid(t *testing.T) {
	recorder := httptest.NewRecorder()
	stream := newEventStream(recorder)
	for _, message := range []string{
		`{"header":{"msg_type":"stream"},"content":{"name":"stdout","text":"a\nb\n"}}`,
		`{"header":{"msg_type":"stream"},"content":{"name":"stderr","text":"é"}}`,
		`{"header":{"msg_type":"execute_result"},"content":{"execution_count":3,"data":{"text/plain":"4"}}}`,
		`{"header":{"msg_type":"display_data"},"content":{"data":{"text/html":"<b>"}}}`,
		`{"header":{"msg_type":"error"},"content":{"ename":"E","evalue":"v","traceback":["one"]}}`,
		`{"header":{"msg_type":"comm_open"},"content":{}}`,
	} {
		var reply kernelReply
		if err := json.Unmarshal([]byte(message), &reply); err != nil {
			t.Fatal(err)
		}
		emit(stream, reply.Header.Type, &reply.Content)
	}
	stream.complete(0)
	var kinds []string
	for frame := range strings.SplitSeq(strings.TrimSpace(recorder.Body.String()), "\n\n") {
		var event struct {
			Type    string
			Text    string
			Results map[string]string
			Error   *struct{ Traceback []string }
		}
		if err := json.Unmarshal([]byte(frame), &event); err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, event.Type+" "+event.Text)
		if event.Type == "error" {
			equal(t, []string{"one"}, event.Error.Traceback)
		}
	}
	equal(t, []string{"stdout a\nb\n", "stderr é", "execution_count ", "result ", "result ", "error ", "execution_complete "}, kinds)
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
		name, err := jupyter.kernel(t.Context(), language)
		equal(t, expected, name)
		equal(t, nil, err)
	}
	_, err = jupyter.kernel(t.Context(), "java")
	equal(t, true, err == errNoKernel)
	_, err = NewJupyter("127.0.0.1:44771", "")
	equal(t, true, err != nil)
}

func TestCodeThatCannotRunIsRefusedBeforeTheFirstEvent(t *testing.T) {
	f := newFixture(t)
	for body, expected := range map[string]int{
		`{"code":""}`: 400, `{"code":"1","context":{"language":"cobol"}}`: 400, `{"code":"1","context":{"id":"none"}}`: 500,
		`{"code":"1","context":{"language":"python"}}`: 500, `{`: 400,
	} {
		status, answer := f.call("POST", "/code", body)
		equal(t, expected, status)
		equal(t, true, strings.Contains(answer, `"message"`))
	}
	status, _ := f.call("POST", "/code/context", `{"language":"cobol"}`)
	equal(t, 400, status)
	status, answer := f.call("POST", "/code/context", `{"language":"python"}`)
	equal(t, true, status == 500 && strings.Contains(answer, "JUPYTER_HOST"))
	status, answer = f.call("GET", "/code/contexts", "")
	equal(t, true, status == 200 && answer == "[]")
	status, _ = f.call("GET", "/code/contexts?language=sql", "")
	equal(t, 500, status)
	status, _ = f.call("GET", "/code/contexts/none", "")
	equal(t, 404, status)
	status, _ = f.call("DELETE", "/code/contexts", "")
	equal(t, 400, status)
	status, _ = f.call("DELETE", "/code/contexts?language=cobol", "")
	equal(t, 200, status)
}

func TestCodeWithoutALanguageIsACommand(t *testing.T) {
	f := newFixture(t)
	result := f.runAt("/code", object{"code": "echo $((6*7)); exit 3", "context": nil})
	equal(t, []string{"42\n"}, result.stdout)
	equal(t, "3", result.last.Error.Evalue)
	equal(t, 32, len(result.id))
}

func TestABusyContextSaysSoInTheWordsClientsLookFor(t *testing.T) {
	f := newFixture(t)
	f.server.code.byID["some"] = &codeContext{ID: "some", Language: "python", busy: true}
	status, answer := f.call("POST", "/code", `{"code":"1","context":{"id":"some"}}`)
	equal(t, true, status == 500 && strings.Contains(answer, "session is busy"))
}
