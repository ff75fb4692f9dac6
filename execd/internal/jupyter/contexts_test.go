package jupyter

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"sallyport.dev/execd/internal/testkit"
)

func newKernels(t *testing.T) (*testkit.Kernels, *fixture) {
	k := testkit.NewKernels(t)
	return k, fixtureWith(t, k.URL)
}

func (f *fixture) pendingContexts() int {
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
			k.Lose = lose
			f.LeavingCall(path, body, func() { <-k.Entered })
			close(k.Leave)
			testkit.Eventually(t, "the kernel is made", func() bool { k.Mutex.Lock(); defer k.Mutex.Unlock(); return k.Made == 1 })
			testkit.Eventually(t, "the kernel is gone and its place free", func() bool { return k.Count() == 0 && f.pendingContexts() == 0 })
			_, all := f.Call("GET", "/code/contexts", "")
			testkit.Equal(t, "[]", all)
		}
	}
}

// One that leaves does not end what another one waits for.
func TestADefaultContextIsMadeForThoseThatStay(t *testing.T) {
	k, f := newKernels(t)
	body := `{"code":"1","context":{"language":"python"}}`
	stays := make(chan *kernelContext, 1)
	go func() {
		made, _ := f.contexts.defaultOf(context.Background(), "python")
		stays <- made
	}()
	<-k.Entered
	waiting := func() int {
		f.contexts.mutex.Lock()
		defer f.contexts.mutex.Unlock()
		return f.contexts.standard["python"].waiting
	}
	f.LeavingCall("/code", body, func() { testkit.Eventually(t, "both wait", func() bool { return waiting() == 2 }) })
	testkit.Eventually(t, "one has left", func() bool { return waiting() == 1 })
	close(k.Leave)
	testkit.Equal(t, "session-1", (<-stays).ID)
	testkit.Equal(t, 1, k.Count())
	_, all := f.Call("GET", "/code/contexts", "")
	testkit.Equal(t, `[{"id":"session-1","language":"python"}]`, all)
}

func TestContextsStayWithinTheirLimitForEachMaker(t *testing.T) {
	k, f := newKernels(t)
	close(k.Leave)
	var waiting sync.WaitGroup
	var mutex sync.Mutex
	made := map[int]int{}
	for range 3 * contextLimit {
		waiting.Go(func() {
			status, _ := f.Call("POST", "/code/context", `{"language":"python"}`)
			mutex.Lock()
			defer mutex.Unlock()
			made[status]++
		})
	}
	for _, language := range []string{"python", "bash"} {
		waiting.Go(func() { _, _ = f.contexts.defaultOf(context.Background(), language) })
	}
	waiting.Wait()
	testkit.Equal(t, contextLimit, k.Count())
	for range 3 { // a place that is free again is for one
		status, _ := f.Call("DELETE", "/code/contexts/"+f.someContext(), "")
		testkit.Equal(t, 200, status)
		for _, expected := range []int{200, 503} {
			status, _ = f.Call("POST", "/code/context", `{"language":"bash"}`)
			testkit.Equal(t, expected, status)
		}
	}
	testkit.Equal(t, contextLimit, k.Most)
}

func (f *fixture) someContext() string {
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
	f := fixtureWith(t, server.URL)
	for range contextLimit + 1 {
		status, _ := f.Call("POST", "/code/context", `{"language":"python"}`)
		testkit.Equal(t, 500, status)
	}
	testkit.Equal(t, 0, f.pendingContexts())
}

// A default context that is deleted just when it was made is not the default one any more.
func TestADeletedDefaultContextIsReplaced(t *testing.T) {
	k, f := newKernels(t)
	close(k.Leave)
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
		testkit.Equal(t, nil, err)
	}
	close(stop)
	deleting.Wait()
	f.Call("DELETE", "/code/contexts?language=python", "")
	made, err := f.contexts.defaultOf(context.Background(), "python")
	testkit.Equal(t, nil, err)
	testkit.Equal(t, made, f.contexts.find(made.ID))
	testkit.Equal(t, 1, k.Count())
}
