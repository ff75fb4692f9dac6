package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

func newKernels(t *testing.T) (*kernels, *codeFixture) {
	k := newKernelsServer(t)
	return k, codeFixtureWith(t, k.url)
}

func (f *codeFixture) pendingContexts() int {
	f.contexts.mutex.Lock()
	defer f.contexts.mutex.Unlock()
	return f.contexts.pending
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
		made, _ := f.contexts.defaultOf(context.Background(), "python")
		stays <- made
	}()
	<-k.entered
	waiting := func() int {
		f.contexts.mutex.Lock()
		defer f.contexts.mutex.Unlock()
		return f.contexts.standard["python"].waiting
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
		waiting.Go(func() { _, _ = f.contexts.defaultOf(context.Background(), language) })
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

func (f *codeFixture) someContext() string {
	f.contexts.mutex.Lock()
	defer f.contexts.mutex.Unlock()
	for id := range f.contexts.byID {
		return id
	}
	return ""
}

func TestAFailedCreationGivesItsPlaceBack(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_, _ = w.Write([]byte(`{"kernelspecs":{"p":{"spec":{"language":"python"}}}}`))
			return
		}
		w.WriteHeader(http.StatusInternalServerError)
	}))
	defer server.Close()
	f := codeFixtureWith(t, server.URL)
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
				if made := f.contexts.find(f.someContext()); made != nil {
					f.contexts.drop(made)
				}
			}
		}
	})
	for range 200 {
		_, err := f.contexts.defaultOf(context.Background(), "python")
		equal(t, nil, err)
	}
	close(stop)
	deleting.Wait()
	f.call("DELETE", "/code/contexts?language=python", "")
	made, err := f.contexts.defaultOf(context.Background(), "python")
	equal(t, nil, err)
	equal(t, made, f.contexts.find(made.ID))
	equal(t, 1, k.count())
}
