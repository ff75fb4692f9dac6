package terminal

// The WebSocket of a terminal.
//
// Invariants
//   - One client holds a terminal; a second one is refused before the upgrade, or
//     takes it over. Viewers only look.
//   - Frames from a client are bounded in size; a client that neither reads nor
//     answers pings is dropped.
//   - A client that goes away leaves the shell running.

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coder/websocket"

	"sallyport.dev/execd/internal/httpx"
)

const (
	viewerLimit           = 16
	viewerOffences        = 5
	socketFrameLimit      = 1 << 20
	socketChunk           = 32 << 10
	socketPing            = 30 * time.Second
	socketWrite           = 10 * time.Second
	statusTakenOver       = websocket.StatusCode(4001)
	codeConnected         = "ALREADY_CONNECTED"
	inputTag         byte = 0x00
)

// attachment is a client of a terminal.
type attachment struct {
	terminal *terminal
	socket   *websocket.Conn
	viewer   bool
	offset   int64 // of the next byte to send
	taken    bool  // guarded by the mutex of the terminal, as is left
	left     bool
}

func (t *Terminals) attach(id string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		found, err := t.find(id)
		if err != nil {
			httpx.WriteError(w, err)
			return
		}
		query := r.URL.Query()
		since, err := strconv.ParseInt(query.Get("since"), 10, 64)
		if err != nil || since < 0 {
			since = 0
		}
		a := &attachment{terminal: found, viewer: query.Get("mode") == "viewer", offset: since}
		takeover := query.Get("takeover") == "1" && strings.EqualFold(r.Header.Get("Upgrade"), "websocket")
		if err := a.enter(takeover); err != nil {
			httpx.WriteError(w, err)
			return
		}
		defer a.leave()
		a.socket, err = websocket.Accept(w, r, &websocket.AcceptOptions{
			InsecureSkipVerify: true, // any Origin: the token is what counts
			CompressionMode:    websocket.CompressionDisabled,
		})
		if err != nil {
			return
		}
		a.socket.SetReadLimit(socketFrameLimit)
		a.serve(r.Context(), query.Get("pty") == "0")
	}
}

// enter makes this client the holder, or one of the viewers.
func (a *attachment) enter(takeover bool) error {
	t := a.terminal
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if a.viewer {
		if !t.started || t.exited {
			return httpx.NewProblem(http.StatusConflict, httpx.CodeInvalidBody, "nothing runs that could be viewed")
		}
		if t.viewers >= viewerLimit {
			return httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "too many viewers")
		}
		t.viewers++
		return nil
	}
	if t.holder != nil {
		if !takeover {
			return httpx.NewProblem(http.StatusConflict, codeConnected, "another client is connected")
		}
		t.holder.taken = true
		t.changed.Broadcast()
	}
	t.holder = a
	return nil
}

// leave returns the place that enter gave. Later calls do nothing.
func (a *attachment) leave() {
	t := a.terminal
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if a.left {
		return
	}
	a.left = true
	t.used = time.Now()
	if a.viewer {
		t.viewers--
	} else if t.holder == a {
		t.holder = nil
	}
}

// serve exchanges frames with the client until either side ends the connection.
func (a *attachment) serve(parent context.Context, pipes bool) {
	defer a.socket.CloseNow()
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	if !a.viewer {
		if err := a.terminal.begin(pipes); err != nil {
			_ = a.send(ctx, map[string]any{"type": "error", "error": err.Error(), "code": "START_FAILED"})
			_ = a.socket.Close(websocket.StatusInternalError, "start failed")
			return
		}
	}
	if a.greet(ctx) != nil {
		return
	}
	go func() {
		defer cancel()
		a.read(ctx)
	}()
	go func() {
		defer cancel()
		a.keepAlive(ctx)
	}()
	stop := context.AfterFunc(ctx, a.terminal.changed.Broadcast)
	defer stop()
	a.write(ctx)
}

// greet sends the earlier output, and the notice that the client is connected.
func (a *attachment) greet(ctx context.Context) error {
	t := a.terminal
	t.mutex.Lock()
	a.offset = max(a.offset, t.output.first())
	var replay []byte
	if a.offset < t.output.total {
		replay = t.output.appendSince(replayHead(a.offset, int(t.output.total-a.offset)), a.offset)
	}
	a.offset = t.output.total
	mode := "pty"
	if t.pipes {
		mode = "pipe"
	}
	t.mutex.Unlock()
	if replay != nil {
		if err := a.sendBinary(ctx, replay); err != nil {
			return err
		}
	}
	role := "holder"
	if a.viewer {
		role = "viewer"
	}
	return a.send(ctx, map[string]any{"type": "connected", "session_id": t.id, "mode": mode, "role": role})
}

// replayHead returns the beginning of a replay frame, with room for n bytes.
func replayHead(offset int64, n int) []byte {
	const size = 1 + 8
	return binary.BigEndian.AppendUint64(append(make([]byte, 0, size+n), kindReplay), uint64(offset))
}

// write sends output when it arrives, and the result at its end.
func (a *attachment) write(ctx context.Context) {
	t := a.terminal
	buffer := make([]byte, socketChunk)
	for ctx.Err() == nil {
		t.mutex.Lock()
		for !a.taken && !t.removed && !t.exited && a.offset == t.output.total && ctx.Err() == nil {
			t.changed.Wait()
		}
		missed := a.offset < t.output.first()
		a.offset = max(a.offset, t.output.first())
		kind, n := t.output.read(a.offset, buffer)
		from := a.offset
		a.offset += int64(n)
		taken, exited, code := a.taken, t.exited, t.exitCode
		removed := t.removed
		t.mutex.Unlock()
		switch {
		case taken:
			_ = a.socket.Close(statusTakenOver, "TAKEN_OVER")
			return
		case n > 0:
			frame := append([]byte{kind}, buffer[:n]...)
			if missed || a.viewer {
				frame = append(replayHead(from, n), buffer[:n]...)
			}
			if a.sendBinary(ctx, frame) != nil {
				return
			}
		case exited:
			a.leave() // a client that sees the end may connect again at once
			if a.send(ctx, map[string]any{"type": "exit", "exit_code": code}) == nil {
				_ = a.socket.Close(websocket.StatusNormalClosure, "process exited")
			}
			return
		case removed:
			a.leave()
			_ = a.socket.Close(websocket.StatusNormalClosure, "removed")
			return
		}
	}
}

func (a *attachment) keepAlive(ctx context.Context) {
	ticker := time.NewTicker(socketPing)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			limited, cancel := context.WithTimeout(ctx, socketPing)
			err := a.socket.Ping(limited)
			cancel()
			if err != nil {
				return
			}
		}
	}
}

// clientFrame is a text frame of a client.
type clientFrame struct {
	Type   string `json:"type"`
	Data   string `json:"data"`
	Signal string `json:"signal"`
	Cols   int    `json:"cols"`
	Rows   int    `json:"rows"`
}

var clientSignals = map[string]syscall.Signal{
	"SIGINT": syscall.SIGINT, "SIGTERM": syscall.SIGTERM, "SIGKILL": syscall.SIGKILL,
	"SIGQUIT": syscall.SIGQUIT, "SIGHUP": syscall.SIGHUP,
}

// read handles the client's frames.
func (a *attachment) read(ctx context.Context) {
	offences := 0
	for {
		kind, data, err := a.socket.Read(ctx)
		if err != nil {
			return
		}
		var frame clientFrame
		switch {
		case kind == websocket.MessageBinary && len(data) > 0 && data[0] == inputTag:
			frame = clientFrame{Type: "stdin", Data: string(data[1:])}
		case kind == websocket.MessageBinary:
			continue
		case json.Unmarshal(data, &frame) != nil:
			continue
		}
		if a.viewer && frame.Type != "ping" {
			if offences++; offences >= viewerOffences {
				return
			}
			a.refuse(ctx, "READ_ONLY", "viewers only look")
			continue
		}
		a.obey(ctx, &frame)
	}
}

func (a *attachment) obey(ctx context.Context, frame *clientFrame) {
	t := a.terminal
	t.mutex.Lock()
	taken := a.taken
	t.mutex.Unlock()
	if taken {
		return
	}
	switch frame.Type {
	case "stdin":
		if err := t.write([]byte(frame.Data)); err != nil {
			a.refuse(ctx, "STDIN_WRITE_FAILED", err.Error())
		}
	case "signal":
		if sig, known := clientSignals[frame.Signal]; known {
			t.signal(sig)
		} else {
			a.refuse(ctx, "INVALID_FRAME", "unknown signal")
		}
	case "resize":
		const most = 1<<16 - 1
		if frame.Cols < 1 || frame.Rows < 1 || frame.Cols > most || frame.Rows > most {
			a.refuse(ctx, "INVALID_FRAME", "cols and rows must be from 1 to 65535")
		} else {
			t.resize(uint16(frame.Cols), uint16(frame.Rows))
		}
	case "ping":
		_ = a.send(ctx, map[string]any{"type": "pong"})
	default:
		a.refuse(ctx, "INVALID_FRAME", "unknown type")
	}
}

func (a *attachment) refuse(ctx context.Context, code, text string) {
	_ = a.send(ctx, map[string]any{"type": "error", "error": text, "code": code})
}

func (a *attachment) send(ctx context.Context, message map[string]any) error {
	text, err := json.Marshal(message)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, socketWrite)
	defer cancel()
	return a.socket.Write(limited, websocket.MessageText, text)
}

func (a *attachment) sendBinary(ctx context.Context, frame []byte) error {
	limited, cancel := context.WithTimeout(ctx, socketWrite)
	defer cancel()
	return a.socket.Write(limited, websocket.MessageBinary, frame)
}
