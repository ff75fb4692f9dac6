package main

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
)

// kernels is a Jupyter server that says how many sessions it has; it finishes each start,
// whatever becomes of the client, as the real one does.
type kernels struct {
	entered chan struct{} // starts that came
	leave   chan struct{} // each lets one start go on; closed: all
	lose    bool          // the answer to a start is lost

	mutex sync.Mutex
	paths map[string]string // by session
	most  int
	made  int
}

func newKernels(t *testing.T) (*kernels, *fixture) {
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
	f := newFixture(t)
	jupyter, err := NewJupyter(server.URL, "")
	equal(t, nil, err)
	f.server.code = NewCodeContexts(jupyter, f.server.commands.Launcher, f.server.commands)
	return k, f
}

func (k *kernels) count() int {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return len(k.paths)
}

// leavingCall sends a request, leaves when the function returns, and returns when the daemon
// has noticed that.
func (f *fixture) leavingCall(path, body string, until func()) {
	f.t.Helper()
	served := make(chan context.Context, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served <- r.Context()
		f.server.ServeHTTP(w, r)
	}))
	f.t.Cleanup(server.Close)
	ctx, leave := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, "POST", server.URL+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	request.Header.Set(tokenHeader, testToken)
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

func (f *fixture) pendingContexts() int {
	f.server.code.mutex.Lock()
	defer f.server.code.mutex.Unlock()
	return f.server.code.pending
}

func TestAClientThatLeavesDuringACreationLeavesNoKernel(t *testing.T) {
	for path, body := range map[string]string{
		"/code/context": `{"language":"python"}`, "/code": `{"code":"1","context":{"language":"python"}}`,
	} {
		for _, lose := range []bool{false, true} {
			k, f := newKernels(t)
			k.lose = lose
			f.leavingCall(path, body, func() { <-k.entered })
			close(k.leave)
			eventually(t, "the kernel is made", func() bool { k.mutex.Lock(); defer k.mutex.Unlock(); return k.made == 1 })
			eventually(t, "the kernel is gone and its place free", func() bool { return k.count() == 0 && f.pendingContexts() == 0 })
			_, all := f.call("GET", "/code/contexts", "")
			equal(t, "[]", all)
		}
	}
}

// One that leaves does not end what another one waits for.
func TestADefaultContextIsMadeForThoseThatStay(t *testing.T) {
	k, f := newKernels(t)
	body := `{"code":"1","context":{"language":"python"}}`
	stays := make(chan *codeContext, 1)
	go func() {
		made, _ := f.server.code.defaultOf(context.Background(), "python")
		stays <- made
	}()
	<-k.entered
	waiting := func() int {
		f.server.code.mutex.Lock()
		defer f.server.code.mutex.Unlock()
		return f.server.code.standard["python"].waiting
	}
	f.leavingCall("/code", body, func() { eventually(t, "both wait", func() bool { return waiting() == 2 }) })
	eventually(t, "one has left", func() bool { return waiting() == 1 })
	close(k.leave)
	equal(t, "session-1", (<-stays).ID)
	equal(t, 1, k.count())
	_, all := f.call("GET", "/code/contexts", "")
	equal(t, `[{"id":"session-1","language":"python"}]`, all)
}

func TestContextsStayWithinTheirLimitWhoeverMakesThem(t *testing.T) {
	k, f := newKernels(t)
	close(k.leave)
	var waiting sync.WaitGroup
	var mutex sync.Mutex
	made := map[int]int{}
	for range 3 * contextLimit {
		waiting.Go(func() {
			status, _ := f.call("POST", "/code/context", `{"language":"python"}`)
			mutex.Lock()
			defer mutex.Unlock()
			made[status]++
		})
	}
	for _, language := range []string{"python", "bash"} {
		waiting.Go(func() { _, _ = f.server.code.defaultOf(context.Background(), language) })
	}
	waiting.Wait()
	equal(t, contextLimit, k.count())
	for range 3 { // a place that is free again is for one
		status, _ := f.call("DELETE", "/code/contexts/"+f.someContext(), "")
		equal(t, 200, status)
		for _, expected := range []int{200, 503} {
			status, _ = f.call("POST", "/code/context", `{"language":"bash"}`)
			equal(t, expected, status)
		}
	}
	equal(t, contextLimit, k.most)
}

func (f *fixture) someContext() string {
	f.server.code.mutex.Lock()
	defer f.server.code.mutex.Unlock()
	for id := range f.server.code.byID {
		return id
	}
	return ""
}

func TestAFailedCreationGivesItsPlaceBack(t *testing.T) {
	f := newFixture(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_, _ = w.Write([]byte(`{"kernelspecs":{"p":{"spec":{"language":"python"}}}}`))
			return
		}
		w.WriteHeader(http.StatusInternalServerError)
	}))
	defer server.Close()
	jupyter, err := NewJupyter(server.URL, "")
	equal(t, nil, err)
	f.server.code = NewCodeContexts(jupyter, f.server.commands.Launcher, f.server.commands)
	for range contextLimit + 1 {
		status, _ := f.call("POST", "/code/context", `{"language":"python"}`)
		equal(t, 500, status)
	}
	equal(t, 0, f.pendingContexts())
}

// A default context that is deleted just when it was made is not the default one any more.
func TestADeletedDefaultContextIsReplaced(t *testing.T) {
	k, f := newKernels(t)
	close(k.leave)
	stop := make(chan struct{})
	var deleting sync.WaitGroup
	deleting.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if made := f.server.code.find(f.someContext()); made != nil {
					f.server.code.drop(made)
				}
			}
		}
	})
	for range 200 {
		_, err := f.server.code.defaultOf(context.Background(), "python")
		equal(t, nil, err)
	}
	close(stop)
	deleting.Wait()
	f.call("DELETE", "/code/contexts?language=python", "")
	made, err := f.server.code.defaultOf(context.Background(), "python")
	equal(t, nil, err)
	equal(t, made, f.server.code.find(made.ID))
	equal(t, 1, k.count())
}
