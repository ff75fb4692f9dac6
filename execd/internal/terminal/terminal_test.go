package terminal

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

	"sallyport.dev/execd/internal/sys"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

type fixture struct {
	*testkit.Client
	terminals *Terminals
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	launcher, _ := testhost.Launcher(t)
	terminals := New(launcher)
	return &fixture{testkit.NewClient(t, testhost.Handle(terminals.Routes()...)), terminals}
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

func (f *fixture) newTerminal(body string) string {
	f.T.Helper()
	status, answer := f.Call("POST", "/pty", body)
	var made struct {
		ID string `json:"session_id"`
	}
	if err := json.Unmarshal([]byte(answer), &made); status != 201 || err != nil {
		f.T.Fatalf("no terminal: %d %s", status, answer)
	}
	return made.ID
}

func (f *fixture) attach(id, query string) *screen {
	f.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	f.T.Cleanup(cancel)
	url := "ws" + strings.TrimPrefix(f.URL, "http") + "/pty/" + id + "/ws?" + query
	socket, _, err := websocket.Dial(ctx, url, &websocket.DialOptions{})
	if err != nil {
		f.T.Fatal(err)
	}
	f.T.Cleanup(func() { socket.CloseNow() })
	socket.SetReadLimit(2 << 20)
	return &screen{t: f.T, socket: socket, ctx: ctx, replay: -1}
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

func (s *screen) say(message testkit.Object) {
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
	f := newFixture(t)
	directory := t.TempDir() + "/made"
	id := f.newTerminal(`{"cwd":"` + directory + `"}`)
	_, answer := f.Call("GET", "/pty/"+id, "")
	testkit.Equal(t, true, strings.Contains(answer, `"running":false`) && strings.Contains(answer, `"output_offset":0`))
	s := f.attach(id, "")
	s.until("connected", func() bool { return s.last() != nil })
	testkit.Equal(t, testkit.Object{"type": "connected", "session_id": id, "mode": "pty", "role": "holder"}, s.last())
	s.until("a prompt", func() bool { return s.output != "" }) // while it starts, readline writes back the size it has read
	s.say(testkit.Object{"type": "resize", "cols": 133, "rows": 43})
	s.typed("tty >/dev/null && stty size; pwd; echo $TERM; echo $((20+22))-\n")
	s.shows("43 133")
	s.shows(directory)
	s.shows("xterm-256color")
	s.shows("42-")
	s.typed("sleep 60\n")
	s.shows("sleep 60")
	shell := f.terminals.byID[id]
	testkit.Eventually(t, "sleep is in the foreground", func() bool {
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", sys.ForegroundGroup(shell.input)))
		return string(name) == "sleep\n" // before that it is a shell that may not heed the signal yet
	})
	s.say(testkit.Object{"type": "signal", "signal": "SIGINT"})
	s.typed("echo again-$?\n")
	s.shows("again-130")
	s.typed("exit 7\n")
	s.ends()
	testkit.Equal(t, testkit.Object{"type": "exit", "exit_code": 7}, s.last())
	testkit.Equal(t, websocket.StatusNormalClosure, websocket.CloseStatus(s.closed))
}

func TestPipesKeepStreamsApartAndAllOutputComesBeforeTheExit(t *testing.T) {
	f := newFixture(t)
	id := f.newTerminal(`{"command":"cat; echo oops >&2; seq 30000; exit 3"}`)
	s := f.attach(id, "pty=0")
	s.say(testkit.Object{"type": "stdin", "data": "typed\n"})
	s.shows("typed")
	testkit.Equal(t, "pipe", s.texts[0]["mode"].(string))
	s.say(testkit.Object{"type": "ping"})
	s.until("pong", func() bool { return s.last()["type"] == "pong" })
	s.say(testkit.Object{"type": "signal", "signal": "SIGWINCH"})
	s.until("refusal", func() bool { return s.last()["code"] == "INVALID_FRAME" })
	testkit.Equal(t, 409, func() int { status, _ := f.Call("GET", "/pty/"+id+"/ws", ""); return status }())
	f.terminals.byID[id].input.Close() // end of input
	s.ends()
	testkit.Equal(t, "oops\n", s.errors)
	testkit.Equal(t, true, strings.HasSuffix(s.output, "29999\n30000\n"))
	testkit.Equal(t, testkit.Object{"type": "exit", "exit_code": 3}, s.last())

	again := f.attach(id, "")
	again.ends() // the command is not run again; the replay has both streams, in the order in which execd read them
	testkit.Equal(t, true, strings.HasSuffix(strings.Replace(again.output, "oops\n", "", 1), "29999\n30000\n"))
	testkit.Equal(t, testkit.Object{"type": "exit", "exit_code": 3}, again.last())
}

func TestAClientThatReadTheEndMayComeAgainAtOnce(t *testing.T) {
	f := newFixture(t)
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
	testkit.Eventually(t, "each client is counted once", func() bool {
		shell := f.terminals.byID[id]
		shell.mutex.Lock()
		defer shell.mutex.Unlock()
		return shell.viewers == 0 && shell.holder == nil
	})
}

func TestTheHolderIsReplacedOnlyByTakeover(t *testing.T) {
	f := newFixture(t)
	id := f.newTerminal("{}")
	first := f.attach(id, "")
	first.typed("echo one-$((1))\n")
	first.shows("one-1")
	status, answer := f.Call("GET", "/pty/"+id+"/ws", "")
	testkit.Equal(t, true, status == 409 && strings.Contains(answer, "ALREADY_CONNECTED"))
	status, _ = f.Call("GET", "/pty/"+id+"/ws?takeover=1", "") // of which no WebSocket would come
	testkit.Equal(t, 409, status)
	second := f.attach(id, "takeover=1&since=0")
	second.shows("one-1")
	testkit.Equal(t, int64(0), second.replay)
	first.ends()
	testkit.Equal(t, statusTakenOver, websocket.CloseStatus(first.closed))
	second.typed("echo two-$((1+1))\n")
	second.shows("two-2")
	second.socket.CloseNow()
	testkit.Eventually(t, "free again", func() bool {
		status, _ := f.Call("GET", "/pty/"+id+"/ws", "")
		return status != 409
	})
	third := f.attach(id, "since=999999")
	third.typed("echo three-$((1+2))\n")
	third.shows("three-3")
	testkit.Equal(t, false, strings.Contains(third.output, "two-2"))
}

func TestViewersSeeAndCannotAct(t *testing.T) {
	f := newFixture(t)
	id := f.newTerminal("{}")
	status, _ := f.Call("GET", "/pty/"+id+"/ws?mode=viewer", "")
	testkit.Equal(t, 409, status)
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
	testkit.Equal(t, "READ_ONLY", viewer.last()["code"].(string))
	holder.typed("echo alive-$((3))\n")
	holder.shows("alive-3")
}

func TestAClientThatDoesNotReadHoldsNothingUpAndMissesTheMiddle(t *testing.T) {
	f := newFixture(t)
	id := f.newTerminal(`{"command":"head -c 30000000 /dev/zero | tr '\\0' x; echo; echo done-$((4)); sleep 30"}`)
	s := f.attach(id, "pty=0")
	testkit.Eventually(t, "all is written", func() bool {
		_, offset := f.terminals.byID[id].state()
		return offset > 30000000
	})
	s.shows("done-4")
	testkit.Equal(t, true, len(s.output) < 30000000)
	testkit.Equal(t, true, s.replay > 0)
	status, _ := f.Call("DELETE", "/pty/"+id, "")
	testkit.Equal(t, 200, status)
}

func TestDeletedTerminalsAreKilledAndUnknownOnesAreNotFound(t *testing.T) {
	f := newFixture(t)
	id := f.newTerminal(`{"command":"sleep 60"}`)
	s := f.attach(id, "")
	s.until("connected", func() bool { return s.last() != nil })
	process := f.terminals.byID[id].process
	status, _ := f.Call("DELETE", "/pty/"+id, "")
	testkit.Equal(t, 200, status)
	<-process.Done
	s.ends()
	for _, call := range []string{"GET /pty/" + id, "DELETE /pty/" + id, "GET /pty/" + id + "/ws"} {
		method, path, _ := strings.Cut(call, " ")
		status, answer := f.Call(method, path, "")
		testkit.Equal(t, true, status == 404 && strings.Contains(answer, "pty session "+id+" not found"))
	}
}

func TestTerminalsAreBounded(t *testing.T) {
	f := newFixture(t)
	var last int
	for range terminalLimit + 1 {
		last, _ = f.Call("POST", "/pty", "{}")
	}
	testkit.Equal(t, 503, last)
	for _, item := range f.terminals.byID {
		item.used = time.Now().Add(-2 * terminalDormant)
		break
	}
	last, _ = f.Call("POST", "/pty", "{}")
	testkit.Equal(t, 201, last)
}

func TestAStormOfFramesLeavesATerminalAsTheLastOneSays(t *testing.T) {
	f := newFixture(t)
	s := f.attach(f.newTerminal("{}"), "")
	for i := range 20000 {
		s.say(testkit.Object{"type": "resize", "cols": 1 + i%200, "rows": 1 + i%100})
		if i%500 == 0 {
			s.say(testkit.Object{"type": "resize", "cols": -i, "rows": 1 << 40})
			s.say(testkit.Object{"type": "ping"})
			s.typed("")
		}
	}
	status, _ := f.Call("GET", "/ping", "")
	testkit.Equal(t, 200, status)
	s.say(testkit.Object{"type": "resize", "cols": 91, "rows": 31})
	s.typed("stty size\n")
	s.shows("31 91")
	refused := 0
	for _, text := range s.texts {
		if text["code"] == "INVALID_FRAME" {
			refused++
		}
	}
	testkit.Equal(t, 40, refused)
}
