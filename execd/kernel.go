package main

// Running code in a kernel, over its WebSocket (contract 8.3, message protocol 5.3).
//
// Invariants
//   - Only messages whose parent is this run's request belong to it.
//   - The death of a kernel and the loss of the connection end a run with an error.
//   - Every value of a result is a string.

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"strings"
	"time"

	"github.com/coder/websocket"
)

const (
	kernelMessage = 64 << 20 // one message of a kernel: a plot, say
	kernelConnect = 30 * time.Second
	kernelVersion = "5.3"
)

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
}

type kernelReply struct {
	Header  kernelHeader `json:"header"`
	Parent  kernelHeader `json:"parent_header"`
	Channel string       `json:"channel"`
	Content kernelContent
}

// runCode executes code in the kernel of a session; events of it go to the stream.
// An error of the code is an event; what is returned is why it could not be run.
func (j *Jupyter) runCode(ctx context.Context, session jupyterSession, code string, stream *eventStream) error {
	socket, err := j.connect(ctx, session)
	if err != nil {
		return err
	}
	defer socket.CloseNow()
	request := kernelHeader{
		ID: newUUID(), Type: "execute_request", Username: "execd", Session: session.ID, Version: kernelVersion,
		Date: time.Now().UTC().Format(time.RFC3339Nano),
	}
	text, err := json.Marshal(map[string]any{
		"channel": "shell", "header": request, "parent_header": struct{}{}, "metadata": struct{}{}, "buffers": []any{},
		"content": map[string]any{
			"code": code, "silent": false, "store_history": true, "user_expressions": struct{}{},
			"allow_stdin": false, "stop_on_error": true,
		},
	})
	if err == nil {
		err = socket.Write(ctx, websocket.MessageText, text)
	}
	if err != nil {
		return errKernelLost
	}
	replied, idle := false, false
	for !replied || !idle {
		_, data, err := socket.Read(ctx)
		if err != nil {
			return errKernelLost
		}
		var reply kernelReply
		if json.Unmarshal(data, &reply) != nil {
			continue
		}
		kind, content := reply.Header.Type, &reply.Content
		if kind == "status" && (content.State == "dead" || content.State == "restarting") {
			return errKernelLost
		}
		if reply.Parent.ID != request.ID {
			continue
		}
		switch kind {
		case "execute_reply":
			replied = true
		case "status":
			idle = idle || content.State == "idle"
		default:
			emit(stream, kind, content)
		}
	}
	return nil
}

// emit turns a message of a kernel into an event.
func emit(stream *eventStream, kind string, content *kernelContent) {
	switch kind {
	case "stream":
		name := "stdout"
		if content.Name == "stderr" {
			name = "stderr"
		}
		for text := content.Text; text != ""; {
			part := text[:min(len(text), maxText)]
			part = part[:len(part)-incompleteSuffix([]byte(part))]
			if part == "" {
				part = text
			}
			stream.text(name, []byte(part))
			text = text[len(part):]
		}
	case "execute_result":
		stream.count(content.Count)
		stream.result(results(content.Data))
	case "display_data":
		stream.result(results(content.Data))
	case "error":
		stream.codeError(content.Ename, content.Evalue, content.Traceback)
	}
	stream.flush()
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
