package jupyter

import (
	"strings"
	"testing"
	"time"

	"sallyport.dev/execd/internal/testkit"
)

func newScripted(t *testing.T, mode string) (*testkit.Scripted, *fixture) {
	s := testkit.NewScripted(t, mode)
	f := fixtureWith(t, s.URL)
	t.Cleanup(func() { f.Call("DELETE", "/code/contexts/session", "") })
	status, _ := f.Call("POST", "/code/context", `{"language":"python"}`)
	testkit.Equal(t, 200, status)
	return s, f
}

func (f *fixture) interruptRun() {
	f.T.Helper()
	status, answer := f.Call("DELETE", "/code?id=session", "")
	testkit.Equal(f.T, 200, status)
	testkit.Equal(f.T, "", answer)
}

const interruptedReply = `{"status":"error","ename":"Stopped","evalue":""}`

func TestARunInterruptedWhileItsKernelStartsIsNotSentAndTheContextStays(t *testing.T) {
	s, f := newScripted(t, "signal")
	rest := f.Code()
	f.interruptRun()
	testkit.Equal(t, []string{"error KeyboardInterrupt", "execution_complete"}, rest())
	close(s.Starting)

	rest = f.Code()
	s.Executed(<-s.Requests, `{"status":"ok"}`)
	testkit.Equal(t, []string{"execution_complete"}, rest())
	testkit.Equal(t, 0, len(s.Requests))
	testkit.Equal(t, 0, len(s.Interrupted))
}

func TestAnInterruptWaitsUntilTheKernelExecutesTheRun(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.Starting)
	rest := f.Code()
	request := <-s.Requests
	f.interruptRun()
	s.Say(request, "status", `{"execution_state":"busy"}`)
	s.Say("another", "execute_input", `{}`)
	// What follows is a call through the same server: an interrupt sent too early would be there before.
	f.interruptRun()
	testkit.Equal(t, 0, len(s.Interrupted))

	s.Say(request, "execute_input", `{}`)
	<-s.Interrupted
	s.Answering <- struct{}{}
	s.Say(request, "execute_reply", interruptedReply)
	s.Say(request, "status", `{"execution_state":"idle"}`)
	testkit.Equal(t, []string{"error Stopped", "execution_complete"}, rest())
	testkit.Equal(t, 0, len(s.Interrupted)) // once, however often it was asked for

	f.interruptRun() // nothing runs: the kernel is left alone
	rest = f.Code()
	s.Executed(<-s.Requests, `{"status":"ok"}`)
	testkit.Equal(t, []string{"execution_complete"}, rest())
	testkit.Equal(t, 0, len(s.Interrupted))
}

func TestANextRunDoesNotBeginWhileAnInterruptIsOnItsWay(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.Starting)
	rest := f.Code()
	request := <-s.Requests
	f.interruptRun()
	s.Say(request, "execute_input", `{}`)
	<-s.Interrupted
	s.Say(request, "execute_reply", `{"status":"ok"}`) // it ended by itself
	s.Say(request, "status", `{"execution_state":"idle"}`)
	status, answer := f.Call("POST", "/code", `{"code":"x","context":{"id":"session"}}`)
	testkit.Equal(t, true, status == 500 && strings.Contains(answer, "session is busy"))
	s.Answering <- struct{}{}
	testkit.Equal(t, []string{"execution_complete"}, rest())
	rest = f.Code()
	s.Executed(<-s.Requests, `{"status":"ok"}`)
	testkit.Equal(t, []string{"execution_complete"}, rest())
}

func TestAKernelThatOwesTheReplyOfAnInterruptedRunEndsItAllTheSame(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.Starting)
	rest := f.Code()
	request := <-s.Requests
	f.interruptRun()
	s.Say(request, "execute_input", `{}`)
	<-s.Interrupted
	s.Answering <- struct{}{}
	s.Say(request, "status", `{"execution_state":"idle"}`)
	testkit.Equal(t, []string{"error KeyboardInterrupt", "execution_complete"}, rest())

	rest = f.Code()
	s.Executed(<-s.Requests, `{"status":"ok"}`)
	testkit.Equal(t, []string{"execution_complete"}, rest())
}

func TestOnlyAMessageIsRepeatedUntilTheKernelHasTakenIt(t *testing.T) {
	for mode, expected := range map[string]int{"message": 3, "signal": 1} {
		s, f := newScripted(t, mode)
		close(s.Starting)
		rest := f.Code()
		request := <-s.Requests
		f.interruptRun()
		s.Say(request, "execute_input", `{}`)
		for range expected {
			<-s.Interrupted
			s.Answering <- struct{}{}
		}
		if mode == "signal" {
			time.Sleep(2 * interruptAgain) // the span in which a message comes twice more
		}
		s.Say(request, "execute_reply", interruptedReply)
		s.Say(request, "status", `{"execution_state":"idle"}`)
		for range cap(s.Answering) - len(s.Answering) { // one more may be on its way
			s.Answering <- struct{}{}
		}
		testkit.Equal(t, []string{"error Stopped", "execution_complete"}, rest())
		testkit.Equal(t, true, mode == "message" || len(s.Interrupted) == 0)
	}
}

func TestAKernelThatNeverExecutesAnInterruptedRunIsEnded(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.Starting)
	rest := f.Code()
	<-s.Requests
	f.interruptRun()
	testkit.Equal(t, []string{"error RUNTIME_ERROR"}, rest())
	status, _ := f.Call("GET", "/code/contexts/session", "")
	testkit.Equal(t, 404, status)
}
