package main

import (
	"strings"
	"testing"
	"time"
)

func newScripted(t *testing.T, mode string) (*scripted, *codeFixture) {
	s := newScriptedServer(t, mode)
	f := codeFixtureWith(t, s.url)
	t.Cleanup(func() { f.call("DELETE", "/code/contexts/session", "") })
	status, _ := f.call("POST", "/code/context", `{"language":"python"}`)
	equal(t, 200, status)
	return s, f
}

func (f *codeFixture) interruptRun() {
	f.t.Helper()
	status, answer := f.call("DELETE", "/code?id=session", "")
	equal(f.t, 200, status)
	equal(f.t, "", answer)
}

const interruptedReply = `{"status":"error","ename":"Stopped","evalue":""}`

func TestARunInterruptedWhileItsKernelStartsIsNotSentAndTheContextStays(t *testing.T) {
	s, f := newScripted(t, "signal")
	rest := f.code()
	f.interruptRun()
	equal(t, []string{"error KeyboardInterrupt", "execution_complete"}, rest())
	close(s.starting)

	rest = f.code()
	s.executed(<-s.requests, `{"status":"ok"}`)
	equal(t, []string{"execution_complete"}, rest())
	equal(t, 0, len(s.requests))
	equal(t, 0, len(s.interrupted))
}

func TestAnInterruptWaitsUntilTheKernelExecutesTheRun(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.starting)
	rest := f.code()
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
	rest = f.code()
	s.executed(<-s.requests, `{"status":"ok"}`)
	equal(t, []string{"execution_complete"}, rest())
	equal(t, 0, len(s.interrupted))
}

func TestANextRunDoesNotBeginWhileAnInterruptIsOnItsWay(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.starting)
	rest := f.code()
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
	rest = f.code()
	s.executed(<-s.requests, `{"status":"ok"}`)
	equal(t, []string{"execution_complete"}, rest())
}

func TestAKernelThatOwesTheReplyOfAnInterruptedRunEndsItAllTheSame(t *testing.T) {
	s, f := newScripted(t, "signal")
	close(s.starting)
	rest := f.code()
	request := <-s.requests
	f.interruptRun()
	s.say(request, "execute_input", `{}`)
	<-s.interrupted
	s.answering <- struct{}{}
	s.say(request, "status", `{"execution_state":"idle"}`)
	equal(t, []string{"error KeyboardInterrupt", "execution_complete"}, rest())

	rest = f.code()
	s.executed(<-s.requests, `{"status":"ok"}`)
	equal(t, []string{"execution_complete"}, rest())
}

func TestOnlyAMessageIsRepeatedUntilTheKernelHasTakenIt(t *testing.T) {
	for mode, expected := range map[string]int{"message": 3, "signal": 1} {
		s, f := newScripted(t, mode)
		close(s.starting)
		rest := f.code()
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
	rest := f.code()
	<-s.requests
	f.interruptRun()
	equal(t, []string{"error RUNTIME_ERROR"}, rest())
	status, _ := f.call("GET", "/code/contexts/session", "")
	equal(t, 404, status)
}
