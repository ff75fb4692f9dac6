package main

import (
	"errors"
	"io"
	"log"
	"net/http"
	"os"
	"testing"
	"time"
)

// servedByHelper is a helper that this process itself is, and its control connection.
func servedByHelper(t *testing.T, handler http.HandlerFunc) *helper {
	t.Helper()
	ours, theirs, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	control, _ := unixConn(ours)
	far, _ := unixConn(theirs)
	t.Cleanup(func() { control.Close() })
	go helperServer(handler).Serve(handedOver{far})
	return newHelper(nil, control, log.New(io.Discard, "", 0))
}

func TestAHelperKeepsConnectionsThatItsDaemonMayNeedAgain(t *testing.T) {
	helper := servedByHelper(t, answersEarly)
	idle, err := handOver(helper.control, handOverLimit) // as the transport makes more than it uses
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Close()
	_ = idle.SetReadDeadline(time.Now().Add(time.Second))
	_, err = idle.Read(make([]byte, 1))
	equal(t, true, errors.Is(err, os.ErrDeadlineExceeded))
	equal(t, time.Duration(0), helperServer(nil).ReadHeaderTimeout+helperServer(nil).IdleTimeout)
}

func TestWhatIsPassedToAHelperMayBeAnsweredBeforeItsEndWasSeen(t *testing.T) {
	helper := servedByHelper(t, answersEarly)
	passing := newClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { helper.forward(w, r, "/") }))
	passing.hearsEarlyAnswers("/")
}

func TestNoHelperStartsWithoutAProgram(t *testing.T) {
	_, err := startHelper(testReaper, nil, helperSpec{}, nil)
	equal(t, true, err != nil)
}
