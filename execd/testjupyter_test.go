package main

// Jupyter servers for tests.

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/coder/websocket"
)

// scripted is a Jupyter server with one kernel, which does what a test says.
type scripted struct {
	url  string
	mode string // how its kernel is interrupted

	starting    chan struct{}                      // its end is the end of the kernel's start
	requests    chan string                        // ids of the execute requests that came
	interrupted chan struct{}                      // calls to interrupt that came
	answering   chan struct{}                      // each lets one such call return
	say         func(parent, kind, content string) // sends a message of the kernel
}

func newScriptedServer(t *testing.T, mode string) *scripted {
	t.Helper()
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
			var request struct {
				Header struct {
					ID string `json:"msg_id"`
				}
			}
			if json.Unmarshal(data, &request) == nil {
				s.requests <- request.Header.ID
			}
		}
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections)
	s.url = server.URL
	return s
}

// executed plays a whole run.
func (s *scripted) executed(request, reply string) {
	s.say(request, "status", `{"execution_state":"busy"}`)
	s.say(request, "execute_input", `{}`)
	s.say(request, "execute_reply", reply)
	s.say(request, "status", `{"execution_state":"idle"}`)
}

// kernels is a Jupyter server that says how many sessions it has; it finishes each start,
// whatever becomes of the client, as the real one does.
type kernels struct {
	url     string
	entered chan struct{} // starts that came
	leave   chan struct{} // each lets one start go on; closed: all
	lose    bool          // the answer to a start is lost

	mutex sync.Mutex
	paths map[string]string // by session
	most  int
	made  int
}

func newKernelsServer(t *testing.T) *kernels {
	t.Helper()
	k := &kernels{entered: make(chan struct{}, 1024), leave: make(chan struct{}), paths: map[string]string{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/kernelspecs", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"kernelspecs":{"p":{"spec":{"language":"python"}},"b":{"spec":{"language":"bash"}},
			"j":{"spec":{"language":"javascript"}}}}`))
	})
	mux.HandleFunc("POST /api/sessions", func(w http.ResponseWriter, r *http.Request) {
		var request struct{ Path string }
		_ = json.NewDecoder(r.Body).Decode(&request)
		k.entered <- struct{}{}
		<-k.leave
		k.mutex.Lock()
		k.made++
		id := "session-" + strconv.Itoa(k.made)
		k.paths[id] = request.Path
		k.most = max(k.most, len(k.paths))
		k.mutex.Unlock()
		if k.lose {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprintf(w, `{"id":%q,"path":%q,"kernel":{"id":"kernel-%s"}}`, id, request.Path, id)
	})
	mux.HandleFunc("GET /api/sessions", func(w http.ResponseWriter, _ *http.Request) {
		k.mutex.Lock()
		defer k.mutex.Unlock()
		all := []map[string]any{}
		for id, path := range k.paths {
			all = append(all, map[string]any{"id": id, "path": path, "kernel": map[string]string{"id": "kernel-" + id}})
		}
		_ = json.NewEncoder(w).Encode(all)
	})
	mux.HandleFunc("GET /api/kernels", func(w http.ResponseWriter, _ *http.Request) {
		k.mutex.Lock()
		defer k.mutex.Unlock()
		all := []map[string]any{}
		for id := range k.paths {
			all = append(all, map[string]any{"id": "kernel-" + id})
		}
		_ = json.NewEncoder(w).Encode(all)
	})
	remove := func(w http.ResponseWriter, r *http.Request) {
		k.mutex.Lock()
		defer k.mutex.Unlock()
		delete(k.paths, strings.TrimPrefix(r.PathValue("id"), "kernel-"))
		w.WriteHeader(http.StatusNoContent)
	}
	mux.HandleFunc("DELETE /api/sessions/{id}", remove)
	mux.HandleFunc("DELETE /api/kernels/{id}", remove)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	k.url = server.URL
	return k
}

func (k *kernels) count() int {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return len(k.paths)
}
