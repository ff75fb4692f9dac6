package httpx

// Passing on a request with a body: the body goes to the service while the answer comes back.
//
// http.Transport is not enough for that: it ends an upload 50 ms after a complete answer, and
// loses an answer if the service closes the connection during the upload.
//
// Invariants
//   - A service receives the whole body, or its connection is reset before the end of it.
//   - Headers, pieces of the body and the answer are passed on when they arrive. An answer
//     does not end the upload; a pause after a complete answer does.
//   - A connection to a service is used again only after a complete request and a complete answer.
//   - A connection of a client is used again only after the end of the body was read.

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	carrierIdle     = 64 // idle connections of one carrier
	carrierIdleTime = 90 * time.Second
	// AnswerHeadLimit is the size of the head of an answer.
	AnswerHeadLimit = 1 << 20
	interimLimit    = 16       // informational answers to one request
	restLimit       = 64 << 10 // of a body that the service did not read
	settleAgain     = 10 * time.Millisecond
)

// UploadTimes are the time limits of uploads.
type UploadTimes struct {
	Expect time.Duration // how long a service may take for 100 Continue before it gets the body
	Answer time.Duration // for the answer of a service that does not read on
	Pause  time.Duration // without progress of an upload after the complete answer
	Rest   time.Duration // for the rest of a body that the service did not read
}

func defaultUploadTimes() UploadTimes {
	return UploadTimes{Expect: time.Second, Answer: 5 * time.Second, Pause: 5 * time.Second, Rest: time.Second}
}

// Carrier passes requests on to services, over connections that it keeps.
type Carrier struct {
	plain *http.Transport // for requests without a body
	Times UploadTimes

	mutex sync.Mutex
	idle  []*serviceConn // oldest first
}

// NewCarrier takes the transport for requests without a body, which also says how to dial.
func NewCarrier(plain *http.Transport) *Carrier {
	return &Carrier{plain: plain, Times: defaultUploadTimes()}
}

// Pass serves a request with a reverse proxy, and reads its body from body.
func (c *Carrier) Pass(reverse *httputil.ReverseProxy, w http.ResponseWriter, r *http.Request, body io.Reader) {
	if r.ContentLength == 0 {
		r.Body = http.NoBody
		reverse.ServeHTTP(w, r)
		return
	}
	controller := http.NewResponseController(w)
	if err := controller.EnableFullDuplex(); err != nil {
		WriteError(w, RuntimeError(err))
		return
	}
	passed := &upload{
		carrier: c, w: w, controller: controller, body: body, rest: r.Body,
		proceed: make(chan struct{}), refused: make(chan struct{}), sent: make(chan struct{}),
	}
	own := *reverse
	own.Transport = passed
	defer passed.finish()
	own.ServeHTTP(w, r)
}

// RoundTrip is for requests without a body.
func (c *Carrier) RoundTrip(r *http.Request) (*http.Response, error) { return c.plain.RoundTrip(r) }

// CloseIdleConnections closes what is kept.
func (c *Carrier) CloseIdleConnections() {
	c.plain.CloseIdleConnections()
	c.mutex.Lock()
	idle := c.idle
	c.idle = nil
	c.mutex.Unlock()
	for _, conn := range idle {
		conn.Close()
	}
}

// serviceConn is a connection to a service.
type serviceConn struct {
	net.Conn
	address string
	head    *io.LimitedReader // below reader
	reader  *bufio.Reader
	expiry  *time.Timer // while it is idle
}

// take returns an idle connection, or a new one.
func (c *Carrier) take(ctx context.Context, address string) (*serviceConn, error) {
	for {
		conn := c.takeIdle(address)
		if conn == nil {
			break
		}
		if conn.silent() {
			return conn, nil
		}
		conn.Close()
	}
	made, err := c.plain.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	head := &io.LimitedReader{R: made}
	return &serviceConn{Conn: made, address: address, head: head, reader: bufio.NewReader(head)}, nil
}

// takeIdle takes the youngest idle connection to an address, nil if there is none.
func (c *Carrier) takeIdle(address string) *serviceConn {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for i := len(c.idle) - 1; i >= 0; i-- {
		if conn := c.idle[i]; conn.address == address {
			c.idle = slices.Delete(c.idle, i, i+1)
			conn.expiry.Stop()
			return conn
		}
	}
	return nil
}

// keep makes a connection idle.
func (c *Carrier) keep(conn *serviceConn) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if len(c.idle) >= carrierIdle {
		c.idle[0].expiry.Stop()
		c.idle[0].Close()
		c.idle = c.idle[1:]
	}
	conn.expiry = time.AfterFunc(carrierIdleTime, func() { c.expire(conn) })
	c.idle = append(c.idle, conn)
}

func (c *Carrier) expire(expired *serviceConn) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	for i, conn := range c.idle {
		if conn == expired {
			c.idle = slices.Delete(c.idle, i, i+1)
			conn.Close()
			return
		}
	}
}

// silent reports whether an idle connection is open and nothing has come that was not asked for.
func (s *serviceConn) silent() bool {
	system, ok := s.Conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := system.SyscallConn()
	if err != nil {
		return false
	}
	var peeked error
	err = raw.Read(func(fd uintptr) bool {
		_, _, peeked = syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		return true
	})
	return err == nil && errors.Is(peeked, syscall.EAGAIN)
}

// reset closes a connection such that the service does not take its end for the end of a body.
func (s *serviceConn) reset() {
	if tcp, ok := s.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	s.Close()
}

// pieceWriter makes bufio.Writer pass a body on piece by piece, instead of filling its buffer.
type pieceWriter struct{ net.Conn }

func (p pieceWriter) ReadFrom(source io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{p.Conn}, source)
}

var (
	// ErrBrokenBody is a request whose body is not all there, or not well-formed.
	ErrBrokenBody = BadRequest("the request's body broke off or is malformed")
	errNotWanted  = errors.New("the service answered instead of asking for the body")
)

// upload is one request with a body; it is the http.RoundTripper of that request only.
type upload struct {
	carrier    *Carrier
	w          http.ResponseWriter
	controller *http.ResponseController
	body       io.Reader
	rest       io.Reader // the same body, without a limit of its own between two reads

	conn     *serviceConn // nil: the service was not reached
	unhook   func() bool  // of the end of the request's context
	expected bool         // the client waits for 100 Continue
	answered bool         // the answer is complete
	reusable bool         // then: the service keeps the connection

	proceed chan struct{} // closed: send the body
	refused chan struct{} // closed: do not send it
	started bool          // of proceed and refused, one is closed
	moved   atomic.Int64  // number of pieces read
	broken  atomic.Bool   // reading the body failed

	sent    chan struct{} // closed when nothing more is sent; before that, the sender owns:
	ended   bool          // the whole body was read
	written bool          // the whole request was written
}

// RoundTrip sends the request and returns the head of the answer; the rest goes on.
func (u *upload) RoundTrip(r *http.Request) (*http.Response, error) {
	conn, err := u.carrier.take(r.Context(), r.URL.Host)
	if err != nil {
		return nil, err
	}
	u.conn = conn
	u.unhook = context.AfterFunc(r.Context(), conn.reset)
	r.Header.Del("Connection") // a request with a body does not change the protocol
	r.Header.Del("Upgrade")
	u.expected = strings.EqualFold(r.Header.Get("Expect"), "100-continue")
	if !u.expected {
		u.start(u.proceed)
	}
	go u.send(r)
	answer, err := u.receive(r)
	if err != nil {
		u.stop()
		if u.broken.Load() {
			return nil, ErrBrokenBody
		}
		return nil, err
	}
	u.start(u.refused)
	u.reusable = !answer.Close
	answer.Body = &answerBody{answer.Body, u}
	return answer, nil
}

// start decides once whether the body is sent.
func (u *upload) start(decision chan struct{}) {
	if !u.started {
		u.started = true
		close(decision)
	}
}

// send writes the request.
func (u *upload) send(r *http.Request) {
	defer close(u.sent)
	request := *r
	request.Body = io.NopCloser(uploadBody{u})
	writer := bufio.NewWriter(pieceWriter{u.conn.Conn})
	err := request.Write(writer)
	if err == nil {
		err = writer.Flush()
	}
	switch {
	case err == nil:
		u.written = true
	case u.broken.Load():
		u.conn.reset()
	default: // what the service has sent can still be read
		_ = u.conn.SetReadDeadline(time.Now().Add(u.carrier.Times.Answer))
	}
}

// uploadBody is the body as the sender reads it.
type uploadBody struct{ *upload }

func (b uploadBody) Read(buffer []byte) (int, error) {
	select {
	case <-b.proceed:
	default:
		late := time.NewTimer(b.carrier.Times.Expect)
		defer late.Stop()
		select {
		case <-b.proceed:
		case <-b.refused:
			return 0, errNotWanted
		case <-late.C:
		}
	}
	n, err := b.body.Read(buffer)
	b.moved.Add(1)
	switch {
	case errors.Is(err, io.EOF):
		b.ended = true
	case err != nil:
		b.broken.Store(true)
	}
	return n, err
}

// receive reads the head of the answer; those of informational answers go to the trace.
func (u *upload) receive(r *http.Request) (*http.Response, error) {
	trace := httptrace.ContextClientTrace(r.Context())
	u.conn.head.N = AnswerHeadLimit
	for range interimLimit {
		answer, err := http.ReadResponse(u.conn.reader, r)
		switch {
		case err != nil:
			return nil, err
		case answer.StatusCode == http.StatusSwitchingProtocols:
			return nil, errors.New("the service changed the protocol")
		case answer.StatusCode >= http.StatusOK:
			u.conn.head.N = math.MaxInt64
			return answer, nil
		}
		wanted := answer.StatusCode == http.StatusContinue
		if trace != nil && trace.Got1xxResponse != nil && (wanted || u.started) {
			// Before that, reading the body may make the server write 100 Continue beside it.
			if err := trace.Got1xxResponse(answer.StatusCode, textproto.MIMEHeader(answer.Header)); err != nil {
				return nil, err
			}
		}
		if wanted {
			u.start(u.proceed)
		}
	}
	return nil, fmt.Errorf("more than %d informational answers", interimLimit)
}

// answerBody notes the end of the answer.
type answerBody struct {
	io.ReadCloser
	upload *upload
}

func (b *answerBody) Read(buffer []byte) (int, error) {
	n, err := b.ReadCloser.Read(buffer)
	if errors.Is(err, io.EOF) {
		b.upload.answered = true
	}
	return n, err
}

// Close leaves the connection alone: finish decides about it.
func (b *answerBody) Close() error { return nil }

// stop ends the connection to the service, and by that the sending.
func (u *upload) stop() {
	u.conn.reset()
	u.start(u.refused)
}

// settle waits until nothing more is sent. A client that sends nothing meanwhile is not
// waited for: an interrupted read is the last one of its connection.
func (u *upload) settle() {
	rest := time.NewTimer(u.carrier.Times.Rest)
	defer rest.Stop()
	select {
	case <-u.sent:
		return
	case <-rest.C:
	}
	again := time.NewTicker(settleAgain)
	defer again.Stop()
	for {
		_ = u.controller.SetReadDeadline(time.Now()) // the body may move it once more
		select {
		case <-u.sent:
			return
		case <-again.C:
		}
	}
}

// linger lets the sending go on after the answer while it makes progress.
func (u *upload) linger() {
	for {
		before := u.moved.Load()
		pause := time.NewTimer(u.carrier.Times.Pause)
		select {
		case <-u.sent:
			pause.Stop()
			return
		case <-pause.C:
			if u.moved.Load() == before {
				u.stop()
				return
			}
		}
	}
}

// finish ends the upload and decides about both connections.
func (u *upload) finish() {
	if u.conn != nil {
		_ = u.controller.Flush()
		if u.answered {
			u.linger()
		} else {
			u.stop()
		}
		u.settle()
		alive := u.unhook()
		switch {
		case !u.written:
			u.conn.reset()
		case alive && u.answered && u.reusable && u.conn.reader.Buffered() == 0:
			u.carrier.keep(u.conn)
		default:
			u.conn.Close()
		}
	}
	if !u.ended && !u.restRead() {
		CloseAfter(u.w)
	}
}

// restRead reads what is left of a body if it is short and on its way. A client that waits
// for 100 Continue is not asked for one. The server reads on after that, until the deadline.
func (u *upload) restRead() bool {
	_ = u.controller.Flush()
	_ = u.controller.SetReadDeadline(time.Now().Add(u.carrier.Times.Rest))
	if u.broken.Load() || u.expected && u.moved.Load() == 0 {
		return false
	}
	_, err := io.CopyN(io.Discard, u.rest, restLimit)
	return errors.Is(err, io.EOF)
}

// CloseAfter makes the server close a connection after the answer, as http.MaxBytesReader
// does. In full duplex it does not do so itself if reading the rest of a body fails, and would
// take what comes later of the body for a request.
func CloseAfter(w http.ResponseWriter) {
	_, _ = http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0).Read(make([]byte, 1))
}
