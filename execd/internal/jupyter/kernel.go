package jupyter

// Running code in a kernel, over its WebSocket (message protocol 5.3).
//
// Invariants
//   - Only messages whose parent is this run's request belong to it.
//   - The death of a kernel and the loss of the connection end a run with an error.
//   - A run that failed or was given up says so once, whatever the kernel left out.
//   - What a kernel sends is read one message at a time; a malformed one is as if it
//     had not been sent, but for the reply, which ends the run all the same.
//   - Every value of a result is a string.

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/stream"
)

const (
	kernelMessage = 64 << 20 // one message of a kernel: a plot, say
	kernelConnect = 30 * time.Second
	kernelVersion = "5.3"
)

var errUnseen = errors.New("the kernel could not be prepared for the run")

var errKernelLost = errors.New("the kernel has ended or its connection is lost")

type kernelHeader struct {
	ID       string `json:"msg_id"`
	Type     string `json:"msg_type"`
	Username string `json:"username"`
	Session  string `json:"session"`
	Version  string `json:"version"`
	Date     string `json:"date"`
}

type kernelContent struct {
	// stream
	Name string `json:"name"`
	Text string `json:"text"`
	// results
	Count int                        `json:"execution_count"`
	Data  map[string]json.RawMessage `json:"data"`
	// error
	Ename     string   `json:"ename"`
	Evalue    string   `json:"evalue"`
	Traceback []string `json:"traceback"`
	// status
	State string `json:"execution_state"`
	// execute_reply
	Status string `json:"status"`

	malformed bool
}

type kernelReply struct {
	Header  kernelHeader `json:"header"`
	Parent  kernelHeader `json:"parent_header"`
	Content json.RawMessage
}

// kernelLink is the connection to the kernel of a context. It is begun with the
// context and kept: a new one for each run would cost most of a short run's time,
// and there are kernels that answer their first one only.
type kernelLink struct {
	stop  context.CancelFunc
	ready chan struct{} // closed when socket is set
	lost  chan struct{} // closed when nothing more will come; later than ready, or instead of it

	socket *websocket.Conn

	mutex    sync.Mutex
	listener *kernelListener // nil between runs
}

// kernelListener takes messages while a run lasts.
type kernelListener struct {
	messages chan []byte
	done     chan struct{}
}

// link begins to connect to the kernel of a session.
func (j *Jupyter) link(session jupyterSession) *kernelLink {
	ctx, stop := context.WithCancel(context.Background())
	link := &kernelLink{stop: stop, ready: make(chan struct{}), lost: make(chan struct{})}
	go func() {
		defer stop()
		defer close(link.lost)
		socket, err := j.connect(ctx, session)
		if err != nil {
			return
		}
		defer socket.CloseNow()
		link.socket = socket
		close(link.ready)
		link.read(ctx)
	}()
	return link
}

// read passes messages on until the connection or the kernel ends. Between runs
// they are thrown away.
func (l *kernelLink) read(ctx context.Context) {
	for {
		_, data, err := l.socket.Read(ctx)
		if err != nil {
			return
		}
		l.mutex.Lock()
		listener := l.listener
		l.mutex.Unlock()
		if listener == nil {
			if reply, content := parseReply(data); reply.Header.Type == "status" && kernelEnded(content) {
				return
			}
			continue
		}
		select {
		case listener.messages <- data:
		case <-listener.done:
		}
	}
}

// listen makes the messages from now on a run's, until release is called.
func (l *kernelLink) listen(ctx context.Context, run *codeRun) (next func() ([]byte, error), release func()) {
	listener := &kernelListener{messages: make(chan []byte), done: make(chan struct{})}
	l.mutex.Lock()
	l.listener = listener
	l.mutex.Unlock()
	next = func() ([]byte, error) {
		select {
		case data := <-listener.messages:
			return data, nil
		case <-run.unanswered.done:
			return nil, errUnanswered
		case <-l.lost:
		case <-ctx.Done():
		}
		return nil, errKernelLost
	}
	release = func() {
		l.mutex.Lock()
		l.listener = nil
		l.mutex.Unlock()
		close(listener.done)
	}
	return next, release
}

// runCode executes code in the kernel of a session; events of it go to the stream.
// An error of the code is an event; what is returned is why it could not be run.
// Without a stream the run is not shown, and its error is returned. A run that is
// interrupted before the kernel is ready for it is not sent.
func (l *kernelLink) runCode(ctx context.Context, session, code string, events *stream.Stream, run *codeRun) error {
	select {
	case <-l.ready:
	case <-run.asked.done:
	case <-l.lost:
		return errKernelLost
	case <-ctx.Done():
		return errKernelLost
	}
	if run.asked.happened() {
		return errInterrupted
	}
	request := kernelHeader{
		ID: httpx.UUID(), Type: "execute_request", Username: "execd", Session: session, Version: kernelVersion,
		Date: time.Now().UTC().Format(time.RFC3339Nano),
	}
	text, err := json.Marshal(map[string]any{
		"channel": "shell", "header": request, "parent_header": struct{}{}, "metadata": struct{}{}, "buffers": []any{},
		"content": map[string]any{
			"code": code, "silent": events == nil, "store_history": events != nil, "user_expressions": struct{}{},
			"allow_stdin": false, "stop_on_error": true,
		},
	})
	if err != nil {
		return err
	}
	next, release := l.listen(ctx, run)
	defer release()
	if l.socket.Write(ctx, websocket.MessageText, text) != nil {
		return errKernelLost
	}
	return follow(request.ID, events, run, next)
}

// parseReply reads a message; what is malformed in it is as if it were not there.
func parseReply(data []byte) (reply kernelReply, content kernelContent) {
	if json.Unmarshal(data, &reply) != nil {
		return kernelReply{}, content
	}
	if json.Unmarshal(reply.Content, &content) != nil {
		content = kernelContent{malformed: true}
	}
	return reply, content
}

// kernelEnded says whether a status is that of a kernel that lives no more.
func kernelEnded(status kernelContent) bool {
	return status.State == "dead" || status.State == "restarting"
}

// follow turns the messages of one run into events until the kernel has replied and is idle.
// An interrupted kernel may be idle and owe the reply: then there is none.
func follow(request string, events *stream.Stream, run *codeRun, next func() ([]byte, error)) error {
	var outcome kernelContent
	replied, idle, failed := false, false, false
	for !replied || !idle {
		data, err := next()
		if errors.Is(err, errUnanswered) {
			outcome = kernelContent{Status: "error", Ename: interruptName}
			break
		}
		if err != nil {
			return errKernelLost
		}
		reply, content := parseReply(data)
		kind := reply.Header.Type
		if kind == "status" && kernelEnded(content) {
			return errKernelLost
		}
		switch {
		case reply.Parent.ID != request:
		case kind == "execute_reply":
			replied, outcome = true, content
		case content.malformed:
		case kind == "status":
			if content.State == "idle" && !idle {
				idle = true
				if !replied {
					run.idleWithoutReply()
				}
			}
		default: // execute_input is the first of them, just before the code
			run.begun.happen()
			failed = failed || kind == "error"
			if events != nil {
				emit(events, kind, &content)
			}
		}
	}
	if events == nil && (failed || outcome.Status != "ok") {
		return errUnseen
	}
	if events != nil && !failed {
		emitOutcome(events, &outcome)
	}
	return nil
}

// emitOutcome reports a failure that is only in the kernel's reply.
func emitOutcome(events *stream.Stream, outcome *kernelContent) {
	switch outcome.Status {
	case "error":
		name, value := outcome.Ename, outcome.Evalue
		if name == "" {
			name, value = "Error", "the code has failed"
		}
		events.CodeError(name, value, outcome.Traceback)
	case "abort", "aborted":
		events.CodeError("Aborted", "the run was given up", nil)
	}
}

// emit turns a message of a kernel into an event.
func emit(events *stream.Stream, kind string, content *kernelContent) {
	switch kind {
	case "stream":
		name := "stdout"
		if content.Name == "stderr" {
			name = "stderr"
		}
		for text := content.Text; text != ""; {
			part := text[:min(len(text), stream.MaxText)]
			part = part[:len(part)-stream.IncompleteSuffix([]byte(part))]
			if part == "" {
				part = text
			}
			events.Text(name, []byte(part))
			text = text[len(part):]
		}
	case "execute_result":
		events.Count(content.Count)
		events.Result(results(content.Data))
	case "display_data":
		events.Result(results(content.Data))
	case "error":
		events.CodeError(content.Ename, content.Evalue, content.Traceback)
	}
	events.Flush()
}

// results makes every value a string, and the plain text known by both its names.
func results(data map[string]json.RawMessage) map[string]string {
	made := make(map[string]string, len(data)+1)
	for kind, raw := range data {
		var text string
		var lines []string
		switch {
		case json.Unmarshal(raw, &text) == nil:
		case json.Unmarshal(raw, &lines) == nil:
			text = strings.Join(lines, "")
		default:
			text = string(raw)
		}
		made[kind] = text
	}
	if text, ok := made["text/plain"]; ok {
		made["text"] = text
	}
	return made
}

func (j *Jupyter) connect(ctx context.Context, session jupyterSession) (*websocket.Conn, error) {
	limited, cancel := context.WithTimeout(ctx, kernelConnect)
	defer cancel()
	address := j.at("/api/kernels/"+session.Kernel.ID+"/channels", url.Values{"token": {j.token}, "session_id": {session.ID}})
	socket, _, err := websocket.Dial(limited, address.String(), &websocket.DialOptions{
		HTTPClient: j.http, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		return nil, errKernelLost
	}
	socket.SetReadLimit(kernelMessage)
	return socket, nil
}
