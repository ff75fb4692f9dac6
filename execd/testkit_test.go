package main

// What tests of this program compare and wait with, and a client of what it serves.

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// testToken is the access token of servers in tests.
const testToken = "a token for tests"

// client is one of a handler, which httptest serves.
type client struct {
	t       *testing.T
	url     string
	header  http.Header // of each request, unless it says otherwise
	handler http.Handler
	server  *httptest.Server
}

func newClient(t *testing.T, handler http.Handler) *client {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return &client{t: t, url: server.URL, header: http.Header{}, handler: handler, server: server}
}

func (c *client) do(method, path string, body io.Reader, header ...string) *http.Response {
	c.t.Helper()
	request, err := http.NewRequest(method, c.url+path, body)
	if err != nil {
		c.t.Fatal(err)
	}
	for name, values := range c.header {
		request.Header[name] = values
	}
	for i := 0; i+1 < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { response.Body.Close() })
	return response
}

// call returns status and body.
func (c *client) call(method, path, body string, header ...string) (int, string) {
	c.t.Helper()
	var reader io.Reader
	if body != "" {
		reader = strings.NewReader(body)
	}
	response := c.do(method, path, reader, header...)
	data, err := io.ReadAll(response.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return response.StatusCode, string(data)
}

// testEvent is one event of a stream.
type testEvent struct {
	Type      string
	Text      string
	Timestamp int64
	Error     *struct {
		Ename, Evalue string
		Traceback     []string
	}
}

// testRun is a stream that was read to its end.
type testRun struct {
	id             string
	stdout, stderr []string
	last           testEvent
	raw            []byte
}

// run executes a foreground command to its end.
func (c *client) run(request any) testRun {
	c.t.Helper()
	return c.runAt("/command", request)
}

// runAt reads the stream of a route to its end.
func (c *client) runAt(path string, request any) testRun {
	c.t.Helper()
	body, err := json.Marshal(request)
	if err != nil {
		c.t.Fatal(err)
	}
	response := c.do("POST", path, bytes.NewReader(body))
	if response.StatusCode != 200 {
		text, _ := io.ReadAll(response.Body)
		c.t.Fatalf("status %d: %s", response.StatusCode, text)
	}
	var result testRun
	if result.raw, err = io.ReadAll(response.Body); err != nil {
		c.t.Fatal(err)
	}
	for frame := range strings.SplitSeq(strings.TrimSuffix(string(result.raw), "\n\n"), "\n\n") {
		var event testEvent
		if err := json.Unmarshal([]byte(frame), &event); err != nil {
			c.t.Fatalf("%v: %q", err, frame)
		}
		switch event.Type {
		case "init":
			result.id = event.Text
		case "stdout":
			result.stdout = append(result.stdout, event.Text)
		case "stderr":
			result.stderr = append(result.stderr, event.Text)
		}
		result.last = event
	}
	return result
}

// begin starts a command and returns its id and the rest of the stream.
func (c *client) begin(request any) (string, *bufio.Reader, *http.Response) {
	c.t.Helper()
	body, _ := json.Marshal(request)
	response := c.do("POST", "/command", bytes.NewReader(body))
	reader := bufio.NewReader(response.Body)
	var event testEvent
	line, err := reader.ReadBytes('\n')
	if err != nil || json.Unmarshal(line, &event) != nil {
		c.t.Fatalf("no first event: %v %q", err, line)
	}
	return event.Text, reader, response
}

// testStatus is what the status of a command says.
type testStatus struct {
	Running       bool  `json:"running"`
	ExitCode      *int  `json:"exit_code"`
	OutputDropped int64 `json:"output_dropped"`
}

// ended waits for the end of a command, and returns its status.
func (c *client) ended(id string) (found testStatus) {
	c.t.Helper()
	eventually(c.t, "the end of "+id, func() bool {
		found = testStatus{}
		_, body := c.call("GET", "/command/status/"+id, "")
		return json.Unmarshal([]byte(body), &found) == nil && !found.Running
	})
	return found
}

// newSession makes a bash session and returns its id.
func (c *client) newSession(body string) string {
	c.t.Helper()
	status, answer := c.call("POST", "/session", body)
	var made struct {
		ID string `json:"session_id"`
	}
	if err := json.Unmarshal([]byte(answer), &made); status != 200 || err != nil || made.ID == "" {
		c.t.Fatalf("no session: %d %s", status, answer)
	}
	return made.ID
}

// in runs a command in a bash session.
func (c *client) in(session, command string, more ...object) testRun {
	c.t.Helper()
	request := object{"command": command}
	for _, fields := range more {
		maps.Copy(request, fields)
	}
	return c.runAt("/session/"+session+"/run", request)
}

// isolate makes an isolated session and returns its path and its id.
func (c *client) isolate(request object) (path, id string) {
	c.t.Helper()
	body, _ := json.Marshal(request)
	status, answer := c.call("POST", "/v1/isolated/session", string(body))
	var made struct {
		ID string `json:"session_id"`
	}
	if err := json.Unmarshal([]byte(answer), &made); status != 201 || err != nil || made.ID == "" {
		c.t.Fatalf("no session: %d %s", status, answer)
	}
	path = "/v1/isolated/session/" + made.ID
	c.t.Cleanup(func() { c.call("DELETE", path, "") })
	return path, made.ID
}

// code runs code in the context "session", and returns the events after the first one, once that is there.
func (c *client) code() (rest func() []string) {
	c.t.Helper()
	response := c.do("POST", "/code", strings.NewReader(`{"code":"x","context":{"id":"session"}}`))
	reader := bufio.NewReader(response.Body)
	line, err := reader.ReadString('\n')
	if err != nil || !strings.Contains(line, `"init"`) {
		c.t.Fatalf("no init: %v %q", err, line)
	}
	return func() (events []string) {
		for {
			line, err := reader.ReadBytes('\n')
			if err != nil {
				return events
			}
			var event testEvent
			if json.Unmarshal(line, &event) != nil || event.Type == "ping" {
				continue
			}
			text := event.Type
			if event.Error != nil {
				text += " " + event.Error.Ename
			}
			events = append(events, text)
		}
	}
}

// leavingCall sends a request, leaves when the function returns, and returns when the handler
// has noticed that.
func (c *client) leavingCall(path, body string, until func()) {
	c.t.Helper()
	served := make(chan context.Context, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served <- r.Context()
		c.handler.ServeHTTP(w, r)
	}))
	c.t.Cleanup(server.Close)
	ctx, leave := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, "POST", server.URL+path, strings.NewReader(body))
	if err != nil {
		c.t.Fatal(err)
	}
	request.Header = c.header.Clone()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if response, err := http.DefaultTransport.RoundTrip(request); err == nil {
			response.Body.Close()
		}
	}()
	until()
	leave()
	<-gone
	<-(<-served).Done()
}

// closeConnections closes the connections to the handler.
func (c *client) closeConnections() { c.server.CloseClientConnections() }

// answersEarly answers with the first bytes of a body before it has read the rest.
func answersEarly(w http.ResponseWriter, r *http.Request) {
	http.NewResponseController(w).EnableFullDuplex()
	text := make([]byte, 4)
	io.ReadFull(r.Body, text)
	w.Write(text)
	http.NewResponseController(w).Flush()
	io.Copy(io.Discard, r.Body)
}

// hearsEarlyAnswers sends many bodies of unknown length to what passes them on to answersEarly.
func (c *client) hearsEarlyAnswers(path string) {
	c.t.Helper()
	for range 300 {
		response := c.do("POST", path, io.MultiReader(strings.NewReader("body")))
		answer, err := io.ReadAll(response.Body)
		if err != nil {
			c.t.Fatal(path, err)
		}
		equal(c.t, "body", string(answer))
	}
}

// shorten changes a limit until the test is over.
func shorten(t *testing.T, limit *time.Duration) {
	before := *limit
	*limit = 300 * time.Millisecond
	t.Cleanup(func() { *limit = before })
}

// object is a JSON object.
type object = map[string]any

// equal compares values as JSON.
func equal[T any](t *testing.T, expected, actual T) {
	t.Helper()
	want, _ := json.Marshal(expected)
	got, _ := json.Marshal(actual)
	if !bytes.Equal(want, got) {
		t.Fatalf("expected %s\nactual   %s", want, got)
	}
}

// eventually waits for a condition that another process brings about.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if condition() {
			return
		}
	}
	t.Fatal("did not happen: " + what)
}

// mustRead is the content of a file.
func mustRead(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// workspace is a directory outside /tmp with one file, for isolated sessions.
func workspace(t *testing.T) string {
	t.Helper()
	directory := outsideTmp(t)
	if err := os.WriteFile(directory+"/file", []byte("below"), 0o644); err != nil {
		t.Fatal(err)
	}
	return directory
}

// outsideTmp is a directory outside /tmp, of which isolated sessions have their own.
func outsideTmp(t *testing.T) string {
	t.Helper()
	directory, err := os.MkdirTemp("/var/tmp", "execd-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	return directory
}

// opened makes a directory that everybody may enter, unlike those of testing.
func opened(t *testing.T) string {
	t.Helper()
	directory, err := os.MkdirTemp("", "execd-identity-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	if err := os.Chmod(directory, 0o777); err != nil {
		t.Fatal(err)
	}
	return directory
}

// brokenAnswer is the answer to a client that has left.
type brokenAnswer struct{ *httptest.ResponseRecorder }

func (brokenAnswer) Write([]byte) (int, error) { return 0, syscall.EPIPE }

// abortedOnlyIfBroken expects a handler to abort the connection of a client that has left, and no other.
func abortedOnlyIfBroken(t *testing.T, name string, serve func(w http.ResponseWriter)) {
	t.Helper()
	cause := func(w http.ResponseWriter) (cause any) {
		defer func() { cause = recover() }()
		serve(w)
		return nil
	}
	if aborted := cause(httptest.NewRecorder()); aborted != nil {
		t.Errorf("%s: aborted with %v", name, aborted)
	}
	if aborted := cause(brokenAnswer{httptest.NewRecorder()}); aborted != http.ErrAbortHandler {
		t.Errorf("%s to a client that has left: aborted with %v", name, aborted)
	}
}
