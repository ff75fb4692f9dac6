// Package helper runs helpers: processes of this program that serve HTTP on connections which they receive from the
// daemon. start.go starts a helper.
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
	connections   = 4 // limit of idle connections to a helper, for requests without a body
	handOverLimit = 5 * time.Second
)

// Helper is the daemon's side of a running helper.
type Helper struct {
	Process *process.Process
	Control *net.UnixConn
	Proxy   *httputil.ReverseProxy
	Idle    *httpx.Carrier
}

// New makes the Helper of a process that receives its connections over control.
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

// Forward sends a request to the helper, with route as its path.
func (h *Helper) Forward(w http.ResponseWriter, r *http.Request, route string) {
	forwarded := r.Clone(r.Context())
	forwarded.URL.Path, forwarded.URL.RawPath = route, ""
	h.Idle.Pass(h.Proxy, w, forwarded, httpx.RequestBody(w, r))
}

// handOver makes a connection and sends its other end to a helper. limit bounds the time for sending.
func handOver(control *net.UnixConn, limit time.Duration) (net.Conn, error) {
	ours, theirs, err := sys.SocketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	_ = control.SetWriteDeadline(time.Now().Add(limit)) // a process with the helper's identity can stop the helper
	if _, _, err := control.WriteMsgUnix([]byte{0}, syscall.UnixRights(int(theirs.Fd())), nil); err != nil {
		ours.Close()
		return nil, err
	}
	return sys.UnixConn(ours)
}

// Server makes the server of a helper. It never closes an idle connection, because the daemon reuses connections and
// would lose a request that it sends on a closing one.
func Server(handler http.Handler) *http.Server {
	return &http.Server{Handler: handler, MaxHeaderBytes: httpx.HeaderBytesLimit, ErrorLog: log.New(io.Discard, "", 0)}
}

// Listener is a listener that receives its connections from the daemon.
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

// End kills a helper and waits for its end. If the helper is the first process of a PID namespace, the kernel kills all
// others in it.
func (h *Helper) End() {
	h.Control.Close()
	h.Process.SignalGroup(syscall.SIGKILL)
	<-h.Process.Done
	h.Idle.CloseIdleConnections()
}
