package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
)

type terminalFixture struct {
	*client
	terminals *Terminals
}

func newTerminalFixture(t *testing.T) *terminalFixture {
	t.Helper()
	launcher, _ := testLauncher(t)
	terminals := NewTerminals(launcher)
	return &terminalFixture{newClient(t, handle(terminals.routes()...)), terminals}
}

// screen is a client of a terminal and everything it was sent.
type screen struct {
	t      *testing.T
	socket *websocket.Conn
	ctx    context.Context
	output string
	errors string
	texts  []map[string]any
	replay int64 // offset of the last replay frame, -1 if there was none
	closed error
}

func (f *terminalFixture) newTerminal(body string) string {
	f.t.Helper()
	status, answer := f.call("POST", "/pty", body)
	var made struct {
		ID string `json:"session_id"`
	}
	if err := json.Unmarshal([]byte(answer), &made); status != 201 || err != nil {
		f.t.Fatalf("no terminal: %d %s", status, answer)
	}
	return made.ID
}

func (f *terminalFixture) attach(id, query string) *screen {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	f.t.Cleanup(cancel)
	url := "ws" + strings.TrimPrefix(f.url, "http") + "/pty/" + id + "/ws?" + query
	socket, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { socket.CloseNow() })
	socket.SetReadLimit(2 << 20)
	return &screen{t: f.t, socket: socket, ctx: ctx, replay: -1}
}

// step takes one frame.
func (s *screen) step() bool {
	kind, data, err := s.socket.Read(s.ctx)
	if err != nil {
		s.closed = err
		return false
	}
	if kind == websocket.MessageText {
		var text map[string]any
		if err := json.Unmarshal(data, &text); err != nil {
			s.t.Fatal(err)
		}
		s.texts = append(s.texts, text)
		return true
	}
	switch data[0] {
	case kindOutput:
		s.output += string(data[1:])
	case kindError:
		s.errors += string(data[1:])
	case kindReplay:
		s.replay = int64(binary.BigEndian.Uint64(data[1:9]))
		s.output += string(data[9:])
	}
	return true
}

func (s *screen) until(what string, condition func() bool) {
	s.t.Helper()
	for !condition() {
		if !s.step() {
			s.t.Fatalf("%s: %v after %q %v", what, s.closed, s.output, s.texts)
		}
	}
}

func (s *screen) shows(text string) {
	s.t.Helper()
	s.until(text, func() bool { return strings.Contains(s.output, text) })
}

func (s *screen) typed(text string) {
	s.t.Helper()
	if err := s.socket.Write(s.ctx, websocket.MessageBinary, append([]byte{0}, text...)); err != nil {
		s.t.Fatal(err)
	}
}

func (s *screen) say(message object) {
	s.t.Helper()
	text, _ := json.Marshal(message)
	if err := s.socket.Write(s.ctx, websocket.MessageText, text); err != nil {
		s.t.Fatal(err)
	}
}

func (s *screen) last() map[string]any {
	if len(s.texts) == 0 {
		return nil
	}
	return s.texts[len(s.texts)-1]
}

func (s *screen) ends() {
	for s.step() {
	}
}

func TestTerminalRunsAShellOnATerminal(t *testing.T) {
	f := newTerminalFixture(t)
	directory := t.TempDir() + "/made"
	id := f.newTerminal(`{"cwd":"` + directory + `"}`)
	_, answer := f.call("GET", "/pty/"+id, "")
	equal(t, true, strings.Contains(answer, `"running":false`) && strings.Contains(answer, `"output_offset":0`))
	s := f.attach(id, "")
	s.until("connected", func() bool { return s.last() != nil })
	equal(t, object{"type": "connected", "session_id": id, "mode": "pty", "role": "holder"}, s.last())
	s.until("a prompt", func() bool { return s.output != "" }) // while it starts, readline writes back the size it has read
	s.say(object{"type": "resize", "cols": 133, "rows": 43})
	s.typed("tty >/dev/null && stty size; pwd; echo $TERM; echo $((20+22))-\n")
	s.shows("43 133")
	s.shows(directory)
	s.shows("xterm-256color")
	s.shows("42-")
	s.typed("sleep 60\n")
	s.shows("sleep 60")
	shell := f.terminals.byID[id]
	eventually(t, "sleep is in the foreground", func() bool {
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", foregroundGroup(shell.input)))
		return string(name) == "sleep\n" // before that it is a shell that may not heed the signal yet
	})
	s.say(object{"type": "signal", "signal": "SIGINT"})
	s.typed("echo again-$?\n")
	s.shows("again-130")
	s.typed("exit 7\n")
	s.ends()
	equal(t, object{"type": "exit", "exit_code": 7}, s.last())
	equal(t, websocket.StatusNormalClosure, websocket.CloseStatus(s.closed))
}

func TestPipesKeepStreamsApartAndAllOutputComesBeforeTheExit(t *testing.T) {
	f := newTerminalFixture(t)
	id := f.newTerminal(`{"command":"cat; echo oops >&2; seq 30000; exit 3"}`)
	s := f.attach(id, "pty=0")
	s.say(object{"type": "stdin", "data": "typed\n"})
	s.shows("typed")
	equal(t, "pipe", s.texts[0]["mode"].(string))
	s.say(object{"type": "ping"})
	s.until("pong", func() bool { return s.last()["type"] == "pong" })
	s.say(object{"type": "signal", "signal": "SIGWINCH"})
	s.until("refusal", func() bool { return s.last()["code"] == "INVALID_FRAME" })
	equal(t, 409, func() int { status, _ := f.call("GET", "/pty/"+id+"/ws", ""); return status }())
	f.terminals.byID[id].input.Close() // end of input
	s.ends()
	equal(t, "oops\n", s.errors)
	equal(t, true, strings.HasSuffix(s.output, "29999\n30000\n"))
	equal(t, object{"type": "exit", "exit_code": 3}, s.last())

	again := f.attach(id, "")
	again.ends() // not run again: what was, and how it ended
	equal(t, true, strings.HasSuffix(again.output, "30000\n"))
	equal(t, object{"type": "exit", "exit_code": 3}, again.last())
}

func TestWhoHeardOfTheEndMayComeAgainAtOnce(t *testing.T) {
	f := newTerminalFixture(t)
	id := f.newTerminal(`{"command":"exit 3"}`)
	first := f.attach(id, "pty=0")
	first.until("exit", func() bool { return first.last()["type"] == "exit" })
	again := f.attach(id, "") // the first one has not even answered the close frame
	again.until("exit", func() bool { return again.last()["type"] == "exit" })

	id = f.newTerminal(`{}`)
	holder := f.attach(id, "")
	holder.typed("echo here-$((1))\n")
	holder.shows("here-1")
	viewer := f.attach(id, "mode=viewer")
	viewer.shows("here-1")
	holder.typed("exit\n")
	viewer.ends()
	holder.ends()
	eventually(t, "nobody is counted twice", func() bool {
		shell := f.terminals.byID[id]
		shell.mutex.Lock()
		defer shell.mutex.Unlock()
		return shell.viewers == 0 && shell.holder == nil
	})
}

func TestTheHolderIsReplacedOnlyByTakeover(t *testing.T) {
	f := newTerminalFixture(t)
	id := f.newTerminal("{}")
	first := f.attach(id, "")
	first.typed("echo one-$((1))\n")
	first.shows("one-1")
	status, answer := f.call("GET", "/pty/"+id+"/ws", "")
	equal(t, true, status == 409 && strings.Contains(answer, "ALREADY_CONNECTED"))
	status, _ = f.call("GET", "/pty/"+id+"/ws?takeover=1", "") // of which no WebSocket would come
	equal(t, 409, status)
	second := f.attach(id, "takeover=1&since=0")
	second.shows("one-1")
	equal(t, int64(0), second.replay)
	first.ends()
	equal(t, statusTakenOver, websocket.CloseStatus(first.closed))
	second.typed("echo two-$((1+1))\n")
	second.shows("two-2")
	second.socket.CloseNow()
	eventually(t, "free again", func() bool {
		status, _ := f.call("GET", "/pty/"+id+"/ws", "")
		return status != 409
	})
	third := f.attach(id, "since=999999")
	third.typed("echo three-$((1+2))\n")
	third.shows("three-3")
	equal(t, false, strings.Contains(third.output, "two-2"))
}

func TestViewersSeeAndCannotAct(t *testing.T) {
	f := newTerminalFixture(t)
	id := f.newTerminal("{}")
	status, _ := f.call("GET", "/pty/"+id+"/ws?mode=viewer", "")
	equal(t, 409, status)
	holder := f.attach(id, "")
	holder.typed("echo seen-$((1))\n")
	holder.shows("seen-1")
	viewer := f.attach(id, "mode=viewer")
	viewer.shows("seen-1")
	holder.typed("echo live-$((2))\n")
	viewer.shows("live-2")
	for range viewerOffences {
		viewer.typed("touch /nowhere\n")
	}
	viewer.ends()
	equal(t, "READ_ONLY", viewer.last()["code"].(string))
	holder.typed("echo alive-$((3))\n")
	holder.shows("alive-3")
}

func TestAClientThatDoesNotReadHoldsNothingUpAndMissesTheMiddle(t *testing.T) {
	f := newTerminalFixture(t)
	id := f.newTerminal(`{"command":"head -c 30000000 /dev/zero | tr '\\0' x; echo; echo done-$((4)); sleep 30"}`)
	s := f.attach(id, "pty=0")
	eventually(t, "all is written", func() bool {
		_, offset := f.terminals.byID[id].state()
		return offset > 30000000
	})
	s.shows("done-4")
	equal(t, true, len(s.output) < 30000000)
	equal(t, true, s.replay > 0)
	status, _ := f.call("DELETE", "/pty/"+id, "")
	equal(t, 200, status)
}

func TestDeletedTerminalsAreKilledAndUnknownOnesAreNotFound(t *testing.T) {
	f := newTerminalFixture(t)
	id := f.newTerminal(`{"command":"sleep 60"}`)
	s := f.attach(id, "")
	s.until("connected", func() bool { return s.last() != nil })
	process := f.terminals.byID[id].process
	status, _ := f.call("DELETE", "/pty/"+id, "")
	equal(t, 200, status)
	<-process.Done
	s.ends()
	for _, call := range []string{"GET /pty/" + id, "DELETE /pty/" + id, "GET /pty/" + id + "/ws"} {
		method, path, _ := strings.Cut(call, " ")
		status, answer := f.call(method, path, "")
		equal(t, true, status == 404 && strings.Contains(answer, "pty session "+id+" not found"))
	}
}

func TestTerminalsAreBounded(t *testing.T) {
	f := newTerminalFixture(t)
	var last int
	for range terminalLimit + 1 {
		last, _ = f.call("POST", "/pty", "{}")
	}
	equal(t, 503, last)
	for _, item := range f.terminals.byID {
		item.used = time.Now().Add(-2 * terminalDormant)
		break
	}
	last, _ = f.call("POST", "/pty", "{}")
	equal(t, 201, last)
}

func TestAStormOfFramesLeavesATerminalAsTheLastOneSays(t *testing.T) {
	f := newTerminalFixture(t)
	s := f.attach(f.newTerminal("{}"), "")
	for i := range 20000 {
		s.say(object{"type": "resize", "cols": 1 + i%200, "rows": 1 + i%100})
		if i%500 == 0 {
			s.say(object{"type": "resize", "cols": -i, "rows": 1 << 40})
			s.say(object{"type": "ping"})
			s.typed("")
		}
	}
	status, _ := f.call("GET", "/ping", "")
	equal(t, 200, status)
	s.say(object{"type": "resize", "cols": 91, "rows": 31})
	s.typed("stty size\n")
	s.shows("31 91")
	refused := 0
	for _, text := range s.texts {
		if text["code"] == "INVALID_FRAME" {
			refused++
		}
	}
	equal(t, 40, refused)
}
