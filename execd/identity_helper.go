package main

// The helper that serves file routes as another identity (identity.go).
//
// Invariants
//   - It has one way in: connections that arrive on its control descriptor. When
//     that ends it ends, with what it is doing.
//   - It serves only after it has its identity; a failure to take it on ends it.
//   - It looks at no environment; relative paths begin at /, ~ is its account's home.

import (
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"syscall"
)

// helperFlag is the whole command line of a helper.
const helperFlag = "--file-helper"

// runHelper serves until the control connection ends.
func runHelper() int {
	var plan identityPlan
	control, err := beginHelper(&plan)
	if control == nil {
		return 2
	}
	if err == nil && plan.Switch {
		err = takeIdentity(plan.UID, plan.GID, plan.Groups)
	}
	if !answerHelper(control, err) {
		return 2
	}
	accounts := func() Accounts { return LoadAccounts("") }
	files := NewFiles(NewEnvironment(nil), accounts, "/", currentUmask())
	_ = helperServer(helperHandler(files)).Serve(handedOver{control})
	return 0
}

// helperServer never ends a connection: the daemon keeps those that it may need again, and
// what is sent on one that is just ending is lost.
func helperServer(handler http.Handler) *http.Server {
	return &http.Server{Handler: handler, MaxHeaderBytes: headerBytesLimit, ErrorLog: log.New(io.Discard, "", 0)}
}

func helperHandler(files *Files) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if handler := files.route(r.Method, r.URL.Path); handler != nil {
			handler(w, r)
			return
		}
		notFound(w)
	}
}

// handedOver is a listener whose connections come from the daemon.
type handedOver struct{ control *net.UnixConn }

func (l handedOver) Accept() (net.Conn, error) {
	oob := make([]byte, syscall.CmsgSpace(4))
	n, length, _, _, err := l.control.ReadMsgUnix(make([]byte, 1), oob)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, io.EOF
	}
	messages, err := syscall.ParseSocketControlMessage(oob[:length])
	if err != nil || len(messages) != 1 {
		return nil, errors.New("no descriptor")
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, errors.New("not one descriptor")
	}
	syscall.CloseOnExec(fds[0])
	return unixConn(os.NewFile(uintptr(fds[0]), "connection"))
}

func (l handedOver) Close() error   { return l.control.Close() }
func (l handedOver) Addr() net.Addr { return l.control.LocalAddr() }
