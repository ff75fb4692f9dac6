package testkit

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

// Scripted is a Jupyter server with one kernel, which a test controls.
type Scripted struct {
	URL  string
	mode string // how its kernel is interrupted

	Starting    chan struct{}                      // the test closes it to end the kernel's start
	Requests    chan string                        // ids of the received execute requests
	Interrupted chan struct{}                      // a value for each received interrupt request
	Answering   chan struct{}                      // each value lets one interrupt request return
	Say         func(parent, kind, content string) // sends a message of the kernel
}

// NewScripted makes a server with one kernel, whose start does not end until the test closes Starting.
func NewScripted(t *testing.T, mode string) *Scripted {
	t.Helper()
	s := &Scripted{
		mode: mode, Starting: make(chan struct{}), Requests: make(chan string, 8), Interrupted: make(chan struct{}, 64),
		Answering: make(chan struct{}, 64),
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
		s.Interrupted <- struct{}{}
		select {
		case <-s.Answering:
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("GET /api/kernels/kernel/channels", func(w http.ResponseWriter, r *http.Request) {
		<-s.Starting
		socket, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer socket.CloseNow()
		var sending sync.Mutex
		s.Say = func(parent, kind, content string) {
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
				s.Requests <- request.Header.ID
			}
		}
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections)
	s.URL = server.URL
	return s
}

// Executed sends the messages of a whole run.
func (s *Scripted) Executed(request, reply string) {
	s.Say(request, "status", `{"execution_state":"busy"}`)
	s.Say(request, "execute_input", `{}`)
	s.Say(request, "execute_reply", reply)
	s.Say(request, "status", `{"execution_state":"idle"}`)
}

// Kernels is a Jupyter server that counts its sessions. Like a real one it finishes each start, even if the client has
// left.
type Kernels struct {
	URL     string
	Entered chan struct{} // a value for each received start
	Leave   chan struct{} // each value lets one start continue; if closed, all starts continue
	Lose    bool          // the answer to a start is lost

	Mutex sync.Mutex
	Paths map[string]string // by session
	Most  int
	Made  int
}

// NewKernels makes a server without kernels.
func NewKernels(t *testing.T) *Kernels {
	t.Helper()
	k := &Kernels{Entered: make(chan struct{}, 1024), Leave: make(chan struct{}), Paths: map[string]string{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/kernelspecs", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"kernelspecs":{"p":{"spec":{"language":"python"}},"b":{"spec":{"language":"bash"}},
			"j":{"spec":{"language":"javascript"}}}}`))
	})
	mux.HandleFunc("POST /api/sessions", func(w http.ResponseWriter, r *http.Request) {
		var request struct{ Path string }
		_ = json.NewDecoder(r.Body).Decode(&request)
		k.Entered <- struct{}{}
		<-k.Leave
		k.Mutex.Lock()
		k.Made++
		id := "session-" + strconv.Itoa(k.Made)
		k.Paths[id] = request.Path
		k.Most = max(k.Most, len(k.Paths))
		k.Mutex.Unlock()
		if k.Lose {
			panic(http.ErrAbortHandler)
		}
		fmt.Fprintf(w, `{"id":%q,"path":%q,"kernel":{"id":"kernel-%s"}}`, id, request.Path, id)
	})
	mux.HandleFunc("GET /api/sessions", func(w http.ResponseWriter, _ *http.Request) {
		k.Mutex.Lock()
		defer k.Mutex.Unlock()
		all := []map[string]any{}
		for id, path := range k.Paths {
			all = append(all, map[string]any{"id": id, "path": path, "kernel": map[string]string{"id": "kernel-" + id}})
		}
		_ = json.NewEncoder(w).Encode(all)
	})
	mux.HandleFunc("GET /api/kernels", func(w http.ResponseWriter, _ *http.Request) {
		k.Mutex.Lock()
		defer k.Mutex.Unlock()
		all := []map[string]any{}
		for id := range k.Paths {
			all = append(all, map[string]any{"id": "kernel-" + id})
		}
		_ = json.NewEncoder(w).Encode(all)
	})
	remove := func(w http.ResponseWriter, r *http.Request) {
		k.Mutex.Lock()
		defer k.Mutex.Unlock()
		delete(k.Paths, strings.TrimPrefix(r.PathValue("id"), "kernel-"))
		w.WriteHeader(http.StatusNoContent)
	}
	mux.HandleFunc("DELETE /api/sessions/{id}", remove)
	mux.HandleFunc("DELETE /api/kernels/{id}", remove)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	k.URL = server.URL
	return k
}

// Count returns the number of kernels that run.
func (k *Kernels) Count() int {
	k.Mutex.Lock()
	defer k.Mutex.Unlock()
	return len(k.Paths)
}
