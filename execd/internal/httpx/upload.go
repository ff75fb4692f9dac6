package httpx

// Forwarding a request with a body: the carrier sends the body to the service while it receives the answer.
//
// http.Transport is not sufficient for that. It ends an upload 50 ms after a complete answer, and it loses an answer if
// the service closes the connection during the upload.
//
// Invariants
//   - A service receives the whole body, or its connection is reset before the end of the body.
//   - Headers, pieces of the body and the answer are forwarded as soon as they arrive. An answer does not end the
//     upload. A pause of the upload after a complete answer ends it.
//   - A connection to a service is reused only after a complete request and a complete answer.
//   - A connection of a client is reused only after the end of the body was read.

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
	// AnswerHeadLimit is the largest size of the head of an answer, in bytes.
	AnswerHeadLimit = 1 << 20
	interimLimit    = 16       // informational answers to one request, at most
	restLimit       = 64 << 10 // bytes of a body that are read although the service did not read them
	settleAgain     = 10 * time.Millisecond
)

// UploadTimes are the time limits of uploads.
type UploadTimes struct {
	Expect time.Duration // wait for 100 Continue before the body is sent anyway
	Answer time.Duration // wait for the answer of a service that stopped reading the body
	Pause  time.Duration // time without progress after which an upload with a complete answer ends
	Rest   time.Duration // wait for the rest of a body that the service did not read
}

func defaultUploadTimes() UploadTimes {
	return UploadTimes{Expect: time.Second, Answer: 5 * time.Second, Pause: 5 * time.Second, Rest: time.Second}
}

// Carrier forwards requests to services, over connections that it keeps open for reuse.
type Carrier struct {
	plain *http.Transport // for requests without a body
	Times UploadTimes

	mutex sync.Mutex
	idle  []*serviceConn // oldest first
}

// NewCarrier returns a Carrier. The transport handles requests without a body, and its dial function makes the
// connections for all requests.
func NewCarrier(plain *http.Transport) *Carrier {
	return &Carrier{plain: plain, Times: defaultUploadTimes()}
}

// Pass forwards a request with a reverse proxy, and reads its body from body.
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

// RoundTrip forwards a request without a body.
func (c *Carrier) RoundTrip(r *http.Request) (*http.Response, error) { return c.plain.RoundTrip(r) }

// CloseIdleConnections closes all idle connections.
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
	head    *io.LimitedReader // the source of reader; limits the head of an answer
	reader  *bufio.Reader
	expiry  *time.Timer // closes the connection when it was idle too long; set only while it is idle
}

// take returns an idle connection to an address, or a new connection if none is usable.
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

// takeIdle removes and returns the idle connection to an address that was used last. It returns nil if there is none.
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

// keep adds a connection to the idle ones. It closes the oldest idle connection if there are too many.
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

// silent reports whether an idle connection is open and has received no data. Data that arrives without a request would
// be read as the answer to the next request.
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

// reset closes a connection with a TCP reset, so that the service cannot interpret the close as the end of a body.
func (s *serviceConn) reset() {
	if tcp, ok := s.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	s.Close()
}

// pieceWriter makes bufio.Writer forward each piece of a body at once, instead of waiting until its buffer is full.
type pieceWriter struct{ net.Conn }

func (p pieceWriter) ReadFrom(source io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{p.Conn}, source)
}

var (
	// ErrBrokenBody is the error for a request whose body is incomplete or malformed.
	ErrBrokenBody = BadRequest("the request's body broke off or is malformed")
	errNotWanted  = errors.New("the service answered instead of asking for the body")
)

// upload is one request with a body. It is the http.RoundTripper for that request only.
type upload struct {
	carrier    *Carrier
	w          http.ResponseWriter
	controller *http.ResponseController
	body       io.Reader
	rest       io.Reader // the same body, without the time limit for each read

	conn     *serviceConn // nil if the service was not reached
	unhook   func() bool  // cancels the hook that resets conn at the end of the request's context
	expected bool         // the client waits for 100 Continue
	answered bool         // the answer is complete
	reusable bool         // the service keeps the connection open after the complete answer

	proceed chan struct{} // closed when the body is to be sent
	refused chan struct{} // closed when the body is not to be sent
	started bool          // proceed or refused is closed
	moved   atomic.Int64  // number of pieces read
	broken  atomic.Bool   // reading the body failed

	sent    chan struct{} // closed when the sender has ended; until then the sender owns the fields below
	ended   bool          // the whole body was read
	written bool          // the whole request was written
}

// RoundTrip sends the request and returns the head of the answer. Sending the body and receiving the answer continue
// afterwards.
func (u *upload) RoundTrip(r *http.Request) (*http.Response, error) {
	conn, err := u.carrier.take(r.Context(), r.URL.Host)
	if err != nil {
		return nil, err
	}
	u.conn = conn
	u.unhook = context.AfterFunc(r.Context(), conn.reset)
	r.Header.Del("Connection") // a request with a body cannot switch the protocol
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

// start decides, once, whether the body is sent: it closes proceed or refused.
func (u *upload) start(decision chan struct{}) {
	if !u.started {
		u.started = true
		close(decision)
	}
}

// send writes the request to the service.
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
	default: // the data that the service has sent can still be read
		_ = u.conn.SetReadDeadline(time.Now().Add(u.carrier.Times.Answer))
	}
}

// uploadBody is the body for the sender. Its first read waits for the decision whether the body is sent.
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

// receive reads the head of the answer. It gives the heads of informational answers to the trace of the request.
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
			// Before the decision about the body, forward 100 Continue only: the sender's first read of the body can
			// make the server write 100 Continue at the same time as another informational answer.
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

// answerBody records the end of the answer.
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

// Close does not close the connection, because finish decides whether it is reused.
func (b *answerBody) Close() error { return nil }

// stop resets the connection to the service, which also ends the sender.
func (u *upload) stop() {
	u.conn.reset()
	u.start(u.refused)
}

// settle waits until the sender has ended. After the time limit Rest it interrupts a read that still waits for data of
// the client. After an interrupted read the client's connection cannot be reused.
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
		// repeated, because a new read of the body can set a later deadline
		_ = u.controller.SetReadDeadline(time.Now())
		select {
		case <-u.sent:
			return
		case <-again.C:
		}
	}
}

// linger lets the upload continue after the answer while it makes progress.
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

// finish ends the upload, and decides whether the connections to the service and to the client are reused.
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

// restRead reads the rest of a body and returns whether it reached the end. It stops after restLimit bytes or at the
// read deadline, up to which the server then continues reading. It does not read if the client still waits for 100
// Continue, because a read would request the body.
func (u *upload) restRead() bool {
	_ = u.controller.Flush()
	_ = u.controller.SetReadDeadline(time.Now().Add(u.carrier.Times.Rest))
	if u.broken.Load() || u.expected && u.moved.Load() == 0 {
		return false
	}
	_, err := io.CopyN(io.Discard, u.rest, restLimit)
	return errors.Is(err, io.EOF)
}

// CloseAfter makes the server close a connection after the answer, in the same way as http.MaxBytesReader. In
// full-duplex mode the server itself does not close a connection if reading the rest of a body fails. It would then
// parse later bytes of the body as a request.
func CloseAfter(w http.ResponseWriter) {
	_, _ = http.MaxBytesReader(w, io.NopCloser(strings.NewReader("x")), 0).Read(make([]byte, 1))
}
