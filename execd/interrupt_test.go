package main

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// scripted is a Jupyter server with one kernel, which does what a test says.
type scripted struct {
	mode string // how its kernel is interrupted

	starting    chan struct{}                      // its end is the end of the kernel's start
	requests    chan string                        // ids of the execute requests that came
	interrupted chan struct{}                      // calls to interrupt that came
	answering   chan struct{}                      // each lets one such call return
	say         func(parent, kind, content string) // sends a message of the kernel
}

// newScripted returns the server and a fixture whose execd uses it.
func newScripted(t *testing.T, mode string) (*scripted, *fixture) {
	s := &scripted{
		mode: mode, starting: make(chan struct{}), requests: make(chan string, 8), interrupted: make(chan struct{}, 64),
		answering: make(chan struct{}, 64),
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/kernelspecs", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"kernelspecs":{"some":{"spec":{"language":"python","interrupt_mode":"` + s.mode + `"}}}}`))
	})
	mux.HandleFunc("POST /api/sessions", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"id":"session","kernel":{"id":"kernel"}}`))
	})
	mux.HandleFunc("GET /api/kernels", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("[]")) })
	mux.HandleFunc("DELETE /api/sessions/session", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /api/kernels/kernel/interrupt", func(_ http.ResponseWriter, r *http.Request) {
		s.interrupted <- struct{}{}
		select {
		case <-s.answering:
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("GET /api/kernels/kernel/channels", func(w http.ResponseWriter, r *http.Request) {
		<-s.starting
		socket, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer socket.CloseNow()
		var sending sync.Mutex
		s.say = func(parent, kind, content string) {
			sending.Lock()
			defer sending.Unlock()
			text := `{"header":{"msg_type":"` + kind + `"},"parent_header":{"msg_id":"` + parent + `"},"content":` + content + `}`
			_ = socket.Write(context.Background(), websocket.MessageText, []byte(text))
		}
		for {
			_, data, err := socket.Read(context.Background())
			if err != nil {
				return
			}
			var request struct{ Header kernelHeader }
			if json.Unmarshal(data, &request) == nil {
				s.requests <- request.Header.ID
			}
		}
	})
	server := httptest.NewServer(mux)
	f := newFixture(t)
	jupyter, err := NewJupyter(server.URL, "")
	equal(t, nil, err)
	f.server.code = NewCodeContexts(jupyter, f.server.commands.Launcher, f.server.commands)
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections)
	t.Cleanup(func() { f.call("DELETE", "/code/contexts/session", "") })
	status, _ := f.call("POST", "/code/context", `{"language":"python"}`)
	equal(t, 200, status)
	return s, f
}

// started runs code and returns the events after init, once init is there.
func started(f *fixture) (rest func() []string) {
	f.t.Helper()
	response := f.do("POST", "/code", strings.NewReader(`{"code":"x","context":{"id":"session"}}`))
	reader := bufio.NewReader(response.Body)
	line, err := reader.ReadString('\n')
	if err != nil || !strings.Contains(line, `"init"`) {
		f.t.Fatalf("no init: %v %q", err, line)
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

func (f *fixture) interruptRun() {
	f.t.Helper()
	status, answer := f.call("DELETE", "/code?id=session", "")
	equal(f.t, 200, status)
	equal(f.t, "", answer)
}

// executed plays a whole run.
func (s *scripted) executed(request, reply string) {
	s.say(request, "status", `{"execution_state":"busy"}`)
	s.say(request, "execute_input", `{}`)
	s.say(request, "execute_reply", reply)
	s.say(request, "status", `{"execution_state":"idle"}`)
}

const interruptedReply = `{"status":"error","ename":"Stopped","evalue":""}`

func TestARunInterruptedWhileItsKernelStartsIsNotSentAndTheContextStays(t *testing.T) {
	s, f := newScripted(t, "signal")
	rest := started(f)
	f.interruptRun()
	equal(t, []string{"error KeyboardInterrupt", "execution_complete"}, rest())
	close(s.starting)

	rest = started(f)
	s.executed(<-s.requests, `{"status":"ok"}`)
	equal(t, []string{"execution_complete"}, rest())
	equal(t, 0, len(s.requests))
	equal(t, 0, len(s.interrupted))
}

func TestAnInterruptWaitsUntilTheKernelExecutesTheRun(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.starting)
	rest := started(f)
	request := <-s.requests
	f.interruptRun()
	s.say(request, "status", `{"execution_state":"busy"}`)
	s.say("another", "execute_input", `{}`)
	// What follows is a call through the same server: an interrupt sent too early would be there before.
	f.interruptRun()
	equal(t, 0, len(s.interrupted))

	s.say(request, "execute_input", `{}`)
	<-s.interrupted
	s.answering <- struct{}{}
	s.say(request, "execute_reply", interruptedReply)
	s.say(request, "status", `{"execution_state":"idle"}`)
	equal(t, []string{"error Stopped", "execution_complete"}, rest())
	equal(t, 0, len(s.interrupted)) // once, however often it was asked for

	f.interruptRun() // nothing runs: the kernel is left alone
	rest = started(f)
	s.executed(<-s.requests, `{"status":"ok"}`)
	equal(t, []string{"execution_complete"}, rest())
	equal(t, 0, len(s.interrupted))
}

func TestANextRunDoesNotBeginWhileAnInterruptIsOnItsWay(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.starting)
	rest := started(f)
	request := <-s.requests
	f.interruptRun()
	s.say(request, "execute_input", `{}`)
	<-s.interrupted
	s.say(request, "execute_reply", `{"status":"ok"}`) // it ended by itself
	s.say(request, "status", `{"execution_state":"idle"}`)
	status, answer := f.call("POST", "/code", `{"code":"x","context":{"id":"session"}}`)
	equal(t, true, status == 500 && strings.Contains(answer, "session is busy"))
	s.answering <- struct{}{}
	equal(t, []string{"execution_complete"}, rest())
	rest = started(f)
	s.executed(<-s.requests, `{"status":"ok"}`)
	equal(t, []string{"execution_complete"}, rest())
}

func TestAKernelThatOwesTheReplyOfAnInterruptedRunEndsItAllTheSame(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.starting)
	rest := started(f)
	request := <-s.requests
	f.interruptRun()
	s.say(request, "execute_input", `{}`)
	<-s.interrupted
	s.answering <- struct{}{}
	s.say(request, "status", `{"execution_state":"idle"}`)
	equal(t, []string{"error KeyboardInterrupt", "execution_complete"}, rest())

	rest = started(f)
	s.executed(<-s.requests, `{"status":"ok"}`)
	equal(t, []string{"execution_complete"}, rest())
}

func TestOnlyAMessageIsRepeatedUntilTheKernelHasTakenIt(t *testing.T) {
	for mode, expected := range map[string]int{"message": 3, "signal": 1} {
		s, f := newScripted(t, mode)
		close(s.starting)
		rest := started(f)
		request := <-s.requests
		f.interruptRun()
		s.say(request, "execute_input", `{}`)
		for range expected {
			<-s.interrupted
			s.answering <- struct{}{}
		}
		if mode == "signal" {
			time.Sleep(2 * interruptAgain) // the span in which a message comes twice more
		}
		s.say(request, "execute_reply", interruptedReply)
		s.say(request, "status", `{"execution_state":"idle"}`)
		for range cap(s.answering) - len(s.answering) { // one more may be on its way
			s.answering <- struct{}{}
		}
		equal(t, []string{"error Stopped", "execution_complete"}, rest())
		equal(t, true, mode == "message" || len(s.interrupted) == 0)
	}
}

func TestAKernelThatNeverExecutesAnInterruptedRunIsEnded(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.starting)
	rest := started(f)
	<-s.requests
	f.interruptRun()
	equal(t, []string{"error RUNTIME_ERROR"}, rest())
	status, _ := f.call("GET", "/code/contexts/session", "")
	equal(t, 404, status)
}
