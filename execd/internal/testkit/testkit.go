// Package testkit has comparisons, waits and a client for the tests of this program.
package testkit

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

// Token is the access token of servers in tests.
const Token = "a token for tests"

// Client is a client of a handler that httptest serves.
type Client struct {
	T       *testing.T
	URL     string
	Header  http.Header // default headers of each request
	handler http.Handler
	server  *httptest.Server
}

// NewClient serves a handler until the test ends, and returns a client of it.
func NewClient(t *testing.T, handler http.Handler) *Client {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return &Client{T: t, URL: server.URL, Header: http.Header{}, handler: handler, server: server}
}

// Do sends a request and returns the response. header has names and values alternately.
func (c *Client) Do(method, path string, body io.Reader, header ...string) *http.Response {
	c.T.Helper()
	request, err := http.NewRequest(method, c.URL+path, body)
	if err != nil {
		c.T.Fatal(err)
	}
	for name, values := range c.Header {
		request.Header[name] = values
	}
	for i := 0; i+1 < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	response, err := http.DefaultTransport.RoundTrip(request)
	if err != nil {
		c.T.Fatal(err)
	}
	c.T.Cleanup(func() { response.Body.Close() })
	return response
}

// Call sends a request and returns status and body of the response.
func (c *Client) Call(method, path, body string, header ...string) (int, string) {
	c.T.Helper()
	var reader io.Reader
	if body != "" {
		reader = strings.NewReader(body)
	}
	response := c.Do(method, path, reader, header...)
	data, err := io.ReadAll(response.Body)
	if err != nil {
		c.T.Fatal(err)
	}
	return response.StatusCode, string(data)
}

// Event is one event of a stream.
type Event struct {
	Type      string
	Text      string
	Timestamp int64
	Error     *struct {
		Ename, Evalue string
		Traceback     []string
	}
}

// Result is the content of a stream that was read to its end.
type Result struct {
	ID             string
	Stdout, Stderr []string
	Last           Event
	Raw            []byte
}

// Run executes a foreground command to its end.
func (c *Client) Run(request any) Result {
	c.T.Helper()
	return c.RunAt("/command", request)
}

// RunAt sends a request to a route and reads the stream of events to its end.
func (c *Client) RunAt(path string, request any) Result {
	c.T.Helper()
	body, err := json.Marshal(request)
	if err != nil {
		c.T.Fatal(err)
	}
	response := c.Do("POST", path, bytes.NewReader(body))
	if response.StatusCode != 200 {
		text, _ := io.ReadAll(response.Body)
		c.T.Fatalf("status %d: %s", response.StatusCode, text)
	}
	var result Result
	if result.Raw, err = io.ReadAll(response.Body); err != nil {
		c.T.Fatal(err)
	}
	for frame := range strings.SplitSeq(strings.TrimSuffix(string(result.Raw), "\n\n"), "\n\n") {
		var event Event
		if err := json.Unmarshal([]byte(frame), &event); err != nil {
			c.T.Fatalf("%v: %q", err, frame)
		}
		switch event.Type {
		case "init":
			result.ID = event.Text
		case "stdout":
			result.Stdout = append(result.Stdout, event.Text)
		case "stderr":
			result.Stderr = append(result.Stderr, event.Text)
		}
		result.Last = event
	}
	return result
}

// Begin starts a command and returns its id and the rest of the stream.
func (c *Client) Begin(request any) (string, *bufio.Reader, *http.Response) {
	c.T.Helper()
	body, _ := json.Marshal(request)
	response := c.Do("POST", "/command", bytes.NewReader(body))
	reader := bufio.NewReader(response.Body)
	var event Event
	line, err := reader.ReadBytes('\n')
	if err != nil || json.Unmarshal(line, &event) != nil {
		c.T.Fatalf("no first event: %v %q", err, line)
	}
	return event.Text, reader, response
}

// testStatus is the status of a command.
type testStatus struct {
	Running       bool  `json:"running"`
	ExitCode      *int  `json:"exit_code"`
	OutputDropped int64 `json:"output_dropped"`
}

// Ended waits for the end of a command, and returns its status.
func (c *Client) Ended(id string) (found testStatus) {
	c.T.Helper()
	Eventually(c.T, "the end of "+id, func() bool {
		found = testStatus{}
		_, body := c.Call("GET", "/command/status/"+id, "")
		return json.Unmarshal([]byte(body), &found) == nil && !found.Running
	})
	return found
}

// NewSession makes a bash session and returns its id.
func (c *Client) NewSession(body string) string {
	c.T.Helper()
	status, answer := c.Call("POST", "/session", body)
	var made struct {
		ID string `json:"session_id"`
	}
	if err := json.Unmarshal([]byte(answer), &made); status != 200 || err != nil || made.ID == "" {
		c.T.Fatalf("no session: %d %s", status, answer)
	}
	return made.ID
}

// In runs a command in a bash session.
func (c *Client) In(session, command string, more ...Object) Result {
	c.T.Helper()
	request := Object{"command": command}
	for _, fields := range more {
		maps.Copy(request, fields)
	}
	return c.RunAt("/session/"+session+"/run", request)
}

// Isolate makes an isolated session and returns its path and its id.
func (c *Client) Isolate(request Object) (path, id string) {
	c.T.Helper()
	body, _ := json.Marshal(request)
	status, answer := c.Call("POST", "/v1/isolated/session", string(body))
	var made struct {
		ID string `json:"session_id"`
	}
	if err := json.Unmarshal([]byte(answer), &made); status != 201 || err != nil || made.ID == "" {
		c.T.Fatalf("no session: %d %s", status, answer)
	}
	path = "/v1/isolated/session/" + made.ID
	c.T.Cleanup(func() { c.Call("DELETE", path, "") })
	return path, made.ID
}

// Code runs code in the context "session", and waits for the first event. rest returns the later events.
func (c *Client) Code() (rest func() []string) {
	c.T.Helper()
	response := c.Do("POST", "/code", strings.NewReader(`{"code":"x","context":{"id":"session"}}`))
	reader := bufio.NewReader(response.Body)
	line, err := reader.ReadString('\n')
	if err != nil || !strings.Contains(line, `"init"`) {
		c.T.Fatalf("no init: %v %q", err, line)
	}
	return func() (events []string) {
		for {
			line, err := reader.ReadBytes('\n')
			if err != nil {
				return events
			}
			var event Event
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

// LeavingCall sends a request and closes its connection when until returns. It waits until the handler has detected
// that the client has left.
func (c *Client) LeavingCall(path, body string, until func()) {
	c.T.Helper()
	served := make(chan context.Context, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served <- r.Context()
		c.handler.ServeHTTP(w, r)
	}))
	c.T.Cleanup(server.Close)
	ctx, leave := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, "POST", server.URL+path, strings.NewReader(body))
	if err != nil {
		c.T.Fatal(err)
	}
	request.Header = c.Header.Clone()
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

// CloseConnections closes the connections to the handler.
func (c *Client) CloseConnections() { c.server.CloseClientConnections() }

// AnswersEarly is a handler that answers with the first bytes of a body before it has read the rest.
func AnswersEarly(w http.ResponseWriter, r *http.Request) {
	http.NewResponseController(w).EnableFullDuplex()
	text := make([]byte, 4)
	io.ReadFull(r.Body, text)
	w.Write(text)
	http.NewResponseController(w).Flush()
	io.Copy(io.Discard, r.Body)
}

// HearsEarlyAnswers sends many bodies of unknown length to a route that passes them on to AnswersEarly, and compares
// the answers.
func (c *Client) HearsEarlyAnswers(path string) {
	c.T.Helper()
	for range 300 {
		response := c.Do("POST", path, io.MultiReader(strings.NewReader("body")))
		answer, err := io.ReadAll(response.Body)
		if err != nil {
			c.T.Fatal(path, err)
		}
		Equal(c.T, "body", string(answer))
	}
}

// Shorten sets a limit to one second until the test ends: longer than a busy machine stalls.
func Shorten(t *testing.T, limit *time.Duration) {
	before := *limit
	*limit = time.Second
	t.Cleanup(func() { *limit = before })
}

// Object is a JSON object.
type Object = map[string]any

// Equal compares values as JSON.
func Equal[T any](t *testing.T, expected, actual T) {
	t.Helper()
	want, _ := json.Marshal(expected)
	got, _ := json.Marshal(actual)
	if !bytes.Equal(want, got) {
		t.Fatalf("expected %s\nactual   %s", want, got)
	}
}

// Eventually waits up to 10 s until a condition is true. Otherwise the test fails with the text what.
func Eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if condition() {
			return
		}
	}
	t.Fatal("did not happen: " + what)
}

// MustRead returns the content of a file.
func MustRead(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Workspace makes a directory outside /tmp with one file, for isolated sessions.
func Workspace(t *testing.T) string {
	t.Helper()
	directory := OutsideTmp(t)
	if err := os.WriteFile(directory+"/file", []byte("below"), 0o644); err != nil {
		t.Fatal(err)
	}
	return directory
}

// OutsideTmp makes a directory outside /tmp, because each isolated session has a /tmp of its own.
func OutsideTmp(t *testing.T) string {
	t.Helper()
	directory, err := os.MkdirTemp("/var/tmp", "execd-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	return directory
}

// Opened makes a directory that every user may enter, unlike the directories of testing.T.TempDir.
func Opened(t *testing.T) string {
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

// brokenAnswer is a response to a client that has left: each write fails.
type brokenAnswer struct{ *httptest.ResponseRecorder }

func (brokenAnswer) Write([]byte) (int, error) { return 0, syscall.EPIPE }

// AbortedOnlyIfBroken fails the test unless a handler aborts the connection of a client that has left, and no other
// connection.
func AbortedOnlyIfBroken(t *testing.T, name string, serve func(w http.ResponseWriter)) {
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
