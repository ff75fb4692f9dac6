// Package helper has the processes of this program that serve HTTP on connections which the
// daemon hands over to them. start.go starts one.
package helper

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"syscall"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/process"
	"sallyport.dev/execd/internal/sys"
)

const (
	connections   = 4 // idle ones kept to a helper
	handOverLimit = 5 * time.Second
)

// Helper is one running helper.
type Helper struct {
	Process *process.Process
	Control *net.UnixConn
	Proxy   *httputil.ReverseProxy
	Idle    *httpx.Carrier
}

// New speaks to a process that serves on connections handed over by control.
func New(child *process.Process, control *net.UnixConn, logger *log.Logger) *Helper {
	started := &Helper{Process: child, Control: control}
	started.Idle = httpx.NewCarrier(&http.Transport{
		DialContext:         func(context.Context, string, string) (net.Conn, error) { return handOver(control, handOverLimit) },
		MaxIdleConnsPerHost: connections,
		DisableCompression:  true,
	})
	started.Proxy = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.URL.RawQuery = "http", "helper", r.In.URL.RawQuery
			r.Out.Header.Del(httpx.TokenHeader)
		},
		Transport: started.Idle,
		ErrorLog:  logger,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) {
			httpx.WriteError(w, httpx.NewProblem(http.StatusServiceUnavailable, httpx.CodeUnavailable, "the helper of this identity ended"))
		},
	}
	return started
}

// Forward passes a request on, as one for another route.
func (h *Helper) Forward(w http.ResponseWriter, r *http.Request, route string) {
	forwarded := r.Clone(r.Context())
	forwarded.URL.Path, forwarded.URL.RawPath = route, ""
	h.Idle.Pass(h.Proxy, w, forwarded, httpx.RequestBody(w, r))
}

// handOver makes a connection and gives its other end to a helper.
func handOver(control *net.UnixConn, limit time.Duration) (net.Conn, error) {
	ours, theirs, err := sys.SocketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	_ = control.SetWriteDeadline(time.Now().Add(limit)) // its user may have stopped it
	if _, _, err := control.WriteMsgUnix([]byte{0}, syscall.UnixRights(int(theirs.Fd())), nil); err != nil {
		ours.Close()
		return nil, err
	}
	return sys.UnixConn(ours)
}

// Server never closes a connection. The daemon reuses connections, and a request that is
// sent on a closing one would be lost.
func Server(handler http.Handler) *http.Server {
	return &http.Server{Handler: handler, MaxHeaderBytes: httpx.HeaderBytesLimit, ErrorLog: log.New(io.Discard, "", 0)}
}

// Listener is a listener whose connections come from the daemon.
type Listener struct{ Control *net.UnixConn }

func (l Listener) Accept() (net.Conn, error) {
	oob := make([]byte, syscall.CmsgSpace(4))
	n, length, _, _, err := l.Control.ReadMsgUnix(make([]byte, 1), oob)
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
	return sys.UnixConn(os.NewFile(uintptr(fds[0]), "connection"))
}

func (l Listener) Close() error { return l.Control.Close() }

func (l Listener) Addr() net.Addr { return l.Control.LocalAddr() }

// End kills a helper; with the first process of a PID namespace go all others in it.
func (h *Helper) End() {
	h.Control.Close()
	h.Process.SignalGroup(syscall.SIGKILL)
	<-h.Process.Done
	h.Idle.CloseIdleConnections()
}
