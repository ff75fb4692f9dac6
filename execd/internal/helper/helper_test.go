package helper

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"syscall"
	"testing"
	"time"

	"sallyport.dev/execd/internal/sys"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

// servedByHelper makes a helper that serves in this process.
func servedByHelper(t *testing.T, handler http.HandlerFunc) *Helper {
	t.Helper()
	ours, theirs, err := sys.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	control, _ := sys.UnixConn(ours)
	far, _ := sys.UnixConn(theirs)
	t.Cleanup(func() { control.Close() })
	go Server(handler).Serve(Listener{far})
	return New(nil, control, log.New(io.Discard, "", 0))
}

func TestAHelperKeepsConnectionsThatItsDaemonMayNeedAgain(t *testing.T) {
	helper := servedByHelper(t, testkit.AnswersEarly)
	idle, err := handOver(helper.Control, handOverLimit) // the transport can open connections that it does not use
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Close()
	_ = idle.SetReadDeadline(time.Now().Add(time.Second))
	_, err = idle.Read(make([]byte, 1))
	testkit.Equal(t, true, errors.Is(err, os.ErrDeadlineExceeded))
	testkit.Equal(t, time.Duration(0), Server(nil).ReadHeaderTimeout+Server(nil).IdleTimeout)
}

func TestWhatIsPassedToAHelperMayBeAnsweredBeforeItsEndWasSeen(t *testing.T) {
	helper := servedByHelper(t, testkit.AnswersEarly)
	passing := testkit.NewClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { helper.Forward(w, r, "/") }))
	passing.HearsEarlyAnswers("/")
}

func TestNoHelperStartsWithoutAProgram(t *testing.T) {
	_, err := Start(testhost.Reaper, nil, Spec{}, nil)
	testkit.Equal(t, true, err != nil)
}

func TestAStoppedHelperDelaysNoOther(t *testing.T) {
	ours, theirs, err := sys.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	control, _ := sys.UnixConn(ours)
	defer control.Close()
	defer theirs.Close() // the other end is never read
	for range 10000 {
		connection, err := handOver(control, 50*time.Millisecond)
		if err != nil {
			testkit.Equal(t, true, errors.Is(err, os.ErrDeadlineExceeded))
			return
		}
		connection.Close()
	}
	t.Error("it takes everything")
}

func TestAnAnswerIsTakenFromTheHelperAlone(t *testing.T) {
	own := syscall.Ucred{Pid: int32(os.Getpid()), Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())}
	for name, each := range map[string]struct {
		expected syscall.Ucred
		answer   string
		failure  string
	}{
		"its own":          {own, readyAnswer, ""},
		"a failure":        {own, "no such view", "no such view"},
		"more than ready":  {own, readyAnswer + "\n", readyAnswer + "\n"},
		"another process":  {syscall.Ucred{Pid: own.Pid + 1, Uid: own.Uid, Gid: own.Gid}, readyAnswer, "another process answered"},
		"another identity": {syscall.Ucred{Pid: own.Pid, Uid: own.Uid + 1, Gid: own.Gid}, readyAnswer, "its helper has another identity"},
		"none":             {own, "", "its helper ended"},
	} {
		ours, theirs, err := sys.SocketPair()
		if err == nil {
			err = syscall.SetsockoptInt(int(ours.Fd()), syscall.SOL_SOCKET, syscall.SO_PASSCRED, 1)
		}
		if err != nil {
			t.Fatal(err)
		}
		control, err := sys.UnixConn(ours)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = theirs.WriteString(each.answer)
		theirs.Close()
		err = await(control, each.expected)
		control.Close()
		if text := fmt.Sprint(err); text != each.failure && (err != nil || each.failure != "") {
			t.Errorf("%s: %s", name, text)
		}
	}
}
