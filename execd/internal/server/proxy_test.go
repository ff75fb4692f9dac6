package server

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/testkit"
)

// rawService starts a service that serves each connection with a function, and returns its port.
func rawService(t *testing.T, serve func(net.Conn, *bufio.Reader)) string {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer connection.Close()
				_ = connection.SetDeadline(time.Now().Add(30 * time.Second))
				serve(connection, bufio.NewReader(connection))
			}()
		}
	}()
	return strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)
}

// readHead returns the lines of a head as they were received.
func readHead(reader *bufio.Reader) (string, error) {
	var head strings.Builder
	for {
		line, err := reader.ReadString('\n')
		head.WriteString(line)
		if err != nil || line == "\r\n" {
			return head.String(), err
		}
	}
}

// readBody reads a body with the framing that the head declares. It returns an error if the transfer is broken.
func readBody(head string, reader *bufio.Reader, piece func(n int)) ([]byte, error) {
	var body []byte
	take := func(size int) error {
		part := make([]byte, size)
		n, err := io.ReadFull(reader, part)
		body = append(body, part[:n]...)
		piece(len(body))
		return err
	}
	if _, after, ok := strings.Cut(head, "Content-Length: "); ok {
		text, _, _ := strings.Cut(after, "\r\n")
		size, err := strconv.Atoi(text)
		for err == nil && len(body) < size {
			err = take(min(1000, size-len(body)))
		}
		return body, err
	}
	for {
		line, err := reader.ReadString('\n')
		if err != nil {
			return body, err
		}
		size, err := strconv.ParseInt(strings.TrimSpace(line), 16, 32)
		if err != nil {
			return body, err
		}
		if size > 0 {
			if err := take(int(size)); err != nil {
				return body, err
			}
		}
		if end, err := reader.ReadString('\n'); err != nil || end != "\r\n" {
			return body, errors.Join(err, fmt.Errorf("end of a chunk: %q", end))
		}
		if size == 0 {
			return body, nil
		}
	}
}

type received struct {
	body string
	err  error
}

func postHead(port, framing string) string {
	return "POST /proxy/" + port + "/ HTTP/1.1\r\nHost: x\r\n" + httpx.TokenHeader + ": " + testkit.Token + "\r\n" + framing + "\r\n\r\n"
}

// A service that sends its whole answer or a part of it at once, and then continues to read, receives every piece.
func TestABodyArrivesWholeBehindAnEarlyAnswer(t *testing.T) {
	f := newFixture(t)
	dial := f.serve()
	var waiting sync.WaitGroup
	for name, answer := range map[string]string{
		"head only": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
		"all of it": "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly",
		"no body":   "HTTP/1.1 204 No Content\r\n\r\n",
		"and close": "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nearly",
		"refusal":   "HTTP/1.1 403 Forbidden\r\nContent-Length: 5\r\n\r\nearly",
	} {
		for _, framing := range []string{"Transfer-Encoding: chunked", "Content-Length: 12"} {
			connection := dial()
			waiting.Go(func() { answeredEarly(t, connection, name, answer, framing) })
		}
	}
	waiting.Wait()
}

func answeredEarly(t *testing.T, connection net.Conn, name, answer, framing string) {
	fail := func(format string, values ...any) {
		t.Errorf("%s, %s: "+format, append([]any{name, framing}, values...)...)
	}
	got := make(chan received, 1)
	port := rawService(t, func(connection net.Conn, reader *bufio.Reader) {
		head, _ := readHead(reader)
		io.WriteString(connection, answer)
		body, err := readBody(head, reader, func(int) {})
		got <- received{string(body), err}
		if name == "head only" {
			io.WriteString(connection, "5\r\nearly\r\n0\r\n\r\n")
		}
	})
	began, sent := time.Now(), make(chan struct{})
	go func() {
		defer close(sent)
		io.WriteString(connection, postHead(port, framing))
		for i := range 6 {
			time.Sleep(250 * time.Millisecond) // a slow client
			if framing == "Content-Length: 12" {
				fmt.Fprintf(connection, "p%d", i)
			} else {
				fmt.Fprintf(connection, "2\r\np%d\r\n", i)
			}
		}
		if framing != "Content-Length: 12" {
			io.WriteString(connection, "0\r\n\r\n")
		}
	}()
	_ = connection.SetReadDeadline(time.Now().Add(10 * time.Second))
	reader := bufio.NewReader(connection)
	response, err := http.ReadResponse(reader, nil)
	if err != nil {
		fail("%v", err)
		return
	}
	if late := time.Since(began); late > time.Second {
		fail("the answer came after %s", late)
	}
	if at := <-got; at.body != "p0p1p2p3p4p5" || at.err != nil {
		fail("the service received %q, %v", at.body, at.err)
	}
	text, err := io.ReadAll(response.Body)
	if err != nil || (name == "no body") == (string(text) == "early") {
		fail("the client received %q, %v", text, err)
	}
	<-sent
	io.WriteString(connection, "GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
	if response, err = http.ReadResponse(reader, nil); err != nil || response.StatusCode != http.StatusOK {
		fail("the next request was answered %v, %v", response, err)
	}
}

// drawnExchange is a random sequence of actions of client and service during one request.
type drawnExchange struct {
	chunked     bool
	pieces      []int // sizes of the pieces of the body
	leaves      int   // index of the piece before which the client closes; -1: it does not close
	answerAfter int   // number of bytes of the body after which the service answers; -1: after the whole body
	form        int   // framing of the answer
	endsAfter   int   // number of bytes after which the service closes; -1: it does not close
	seed        uint64
}

const smuggled = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"

func drawExchange(random *rand.Rand) drawnExchange {
	drawn := drawnExchange{chunked: random.IntN(2) == 0, leaves: -1, answerAfter: -1, form: random.IntN(3), endsAfter: -1, seed: random.Uint64()}
	total := 0
	for range 1 + random.IntN(6) {
		size := []int{1, 7, 100, 4096, 30000, 150000}[random.IntN(6)]
		drawn.pieces = append(drawn.pieces, size)
		total += size
	}
	if random.IntN(3) > 0 {
		drawn.answerAfter = random.IntN(total + 1)
	}
	switch random.IntN(4) {
	case 0:
		drawn.leaves = random.IntN(len(drawn.pieces))
	case 1:
		drawn.endsAfter = random.IntN(total + 1)
	}
	return drawn
}

func (d *drawnExchange) body() []byte {
	total := 0
	for _, size := range d.pieces {
		total += size
	}
	return bytes.Repeat([]byte(smuggled), total/len(smuggled)+1)[:total]
}

func (d *drawnExchange) answer() string {
	switch d.form {
	case 0:
		return "HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\ndone"
	case 1:
		return "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\ndo\r\n2\r\nne\r\n0\r\n\r\n"
	}
	return "HTTP/1.1 201 Created\r\nConnection: close\r\nContent-Length: 4\r\n\r\ndone"
}

// serve reads the body of a request as the service, and answers or closes as drawn.
func (d *drawnExchange) serve(connection net.Conn, reader *bufio.Reader, head string) ([]byte, error) {
	answered := false
	var ended error
	look := func(read int) {
		if !answered && d.answerAfter >= 0 && read >= d.answerAfter {
			answered = true
			io.WriteString(connection, d.answer())
		}
		if d.endsAfter >= 0 && read >= d.endsAfter && ended == nil {
			ended = errors.New("ended here")
			connection.Close()
		}
	}
	look(0)
	body, err := readBody(head, reader, look)
	if err == nil && ended == nil && !answered {
		io.WriteString(connection, d.answer())
	}
	return body, errors.Join(err, ended)
}

// For every order in which both sides send, wait and leave: the service receives the bytes that were sent, a partial
// body is never received as complete, an answer arrives unchanged, and no byte of a body is read as a request on either
// side.
func TestDrawnExchangesPassWholeOrBroken(t *testing.T) {
	f := newFixture(t)
	dial := f.serve()
	random := rand.New(rand.NewPCG(14, 3))
	var waiting sync.WaitGroup
	slots := make(chan struct{}, 16)
	for range 400 {
		drawn := drawExchange(random)
		slots <- struct{}{}
		waiting.Go(func() {
			defer func() { <-slots }()
			carryOutDrawn(t, f, dial, drawn)
		})
	}
	waiting.Wait()
}

func carryOutDrawn(t *testing.T, f *fixture, dial func() net.Conn, drawn drawnExchange) {
	fail := func(format string, values ...any) { t.Errorf("%+v: "+format, append([]any{drawn}, values...)...) }
	got := make(chan received, 1)
	port := rawService(t, func(connection net.Conn, reader *bufio.Reader) {
		for {
			head, err := readHead(reader)
			if err != nil {
				return
			}
			switch line, _, _ := strings.Cut(head, "\r\n"); line {
			case "POST / HTTP/1.1":
				body, err := drawn.serve(connection, reader, head)
				got <- received{string(body), err}
				if err != nil || drawn.form == 2 {
					return
				}
			case "GET /next HTTP/1.1":
				io.WriteString(connection, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnext")
			default:
				fail("the service was sent the request %q", line)
				return
			}
		}
	})
	connection := dial()
	defer connection.Close()
	_ = connection.SetDeadline(time.Now().Add(30 * time.Second))
	body, pause, written := drawn.body(), rand.New(rand.NewPCG(drawn.seed, 0)), make(chan struct{})
	go func() {
		defer close(written)
		framing := "Content-Length: " + strconv.Itoa(len(body))
		if drawn.chunked {
			framing = "Transfer-Encoding: chunked"
		}
		io.WriteString(connection, postHead(port, framing))
		rest := body
		for i, size := range drawn.pieces {
			time.Sleep(time.Duration(pause.IntN(3)) * 5 * time.Millisecond) // a slow client
			if i == drawn.leaves {
				connection.Close()
				return
			}
			piece := string(rest[:size])
			if drawn.chunked {
				piece = fmt.Sprintf("%x\r\n%s\r\n", size, piece)
			}
			io.WriteString(connection, piece)
			rest = rest[size:]
		}
		if drawn.chunked {
			io.WriteString(connection, "0\r\n\r\n")
		}
	}()
	reader := bufio.NewReader(connection)
	response, err := http.ReadResponse(reader, nil)
	var text []byte
	if err == nil {
		text, err = io.ReadAll(response.Body)
	}
	if drawn.leaves >= 0 {
		select {
		case at := <-got:
			if at.err == nil || !strings.HasPrefix(string(body), at.body) {
				fail("the service was sent %d bytes and %v", len(at.body), at.err)
			}
		case <-time.After(20 * time.Second):
			fail("the service still waits")
		}
		return
	}
	at := <-got
	switch whole := drawn.endsAfter < 0; {
	case !strings.HasPrefix(string(body), at.body):
		fail("the service received something else")
	case whole && (at.err != nil || len(at.body) != len(body)):
		fail("the service received %d of %d bytes, %v", len(at.body), len(body), at.err)
	case whole && (err != nil || response.StatusCode != 201 || string(text) != "done"):
		fail("the client received %v %q %v", response, text, err)
	case !whole && err == nil && response.StatusCode == 201 && string(text) != "done":
		fail("the client received a part, %q", text)
	case !whole && drawn.answerAfter >= 0 && drawn.answerAfter <= drawn.endsAfter &&
		(err != nil || response.StatusCode != 201) && drawn.endsAfter-drawn.answerAfter > 0:
		fail("the answer is lost: %v %v", response, err)
	}
	// The next bytes on the connection are read as a request, or the connection ends.
	<-written
	fmt.Fprintf(connection, "GET /proxy/%s/next HTTP/1.1\r\nHost: x\r\n%s: %s\r\n\r\n", port, httpx.TokenHeader, testkit.Token)
	response, err = http.ReadResponse(reader, nil)
	if err != nil {
		if whole := drawn.endsAfter < 0; whole {
			fail("the connection ended after a complete exchange: %v", err)
		}
		return
	}
	if text, err = io.ReadAll(response.Body); err != nil || string(text) != "next" {
		fail("the next request was answered %v %q %v", response, text, err)
	}
}

// Bytes that a client sends after the answer belong to the body that it has announced.
func TestTheRestOfABodyIsNeverARequest(t *testing.T) {
	f := newFixture(t)
	dial := f.serve()
	port := rawService(t, func(connection net.Conn, reader *bufio.Reader) {
		_, _ = readHead(reader)
		io.WriteString(connection, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
	})
	f.server.proxy.services.Times = httpx.UploadTimes{Expect: time.Second, Answer: time.Second, Pause: 50 * time.Millisecond, Rest: 50 * time.Millisecond}
	for _, sent := range []string{
		postHead(port, "Content-Length: 4000"), postHead(port, "Content-Length: 4000") + "begun", postHead(port, "Transfer-Encoding: chunked"),
		postHead(port, "Transfer-Encoding: chunked") + "5\r\nbe", postHead(port, "Transfer-Encoding: chunked") + "5\r\nbegun\r\n0\r\n",
		postHead(port, "Content-Length: 4000\r\nExpect: 100-continue"), postHead("1", "Content-Length: 4000"),
		postHead(port, "Transfer-Encoding: chunked") + "x\r\n",
		"POST /ping HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n",
		"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n",
	} {
		connection := dial()
		_ = connection.SetDeadline(time.Now().Add(10 * time.Second))
		io.WriteString(connection, sent)
		reader := bufio.NewReader(connection)
		response, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatal(sent, err)
		}
		_, _ = io.Copy(io.Discard, response.Body)
		for range 20 {
			time.Sleep(10 * time.Millisecond) // while both sides decide about the connection
			io.WriteString(connection, "GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
		}
		if rest, _ := io.ReadAll(reader); len(rest) > 0 {
			t.Errorf("%q, and then what was taken for a request: %q", sent, rest)
		}
	}
}

func TestAClientIsAskedForABodyWhenTheServiceWantsIt(t *testing.T) {
	f := newFixture(t)
	dial := f.serve()
	for name, c := range map[string]struct{ interim, final, expected string }{
		"asked for":  {"HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "HTTP/1.1 100 Continue\r\n"},
		"not at all": {"", "HTTP/1.1 417 Expectation Failed\r\nContent-Length: 2\r\n\r\nno", "HTTP/1.1 417 Expectation Failed\r\n"},
	} {
		got := make(chan received, 1)
		port := rawService(t, func(connection net.Conn, reader *bufio.Reader) {
			head, _ := readHead(reader)
			io.WriteString(connection, c.interim)
			if c.interim == "" {
				io.WriteString(connection, c.final)
			}
			body, err := readBody(head, reader, func(int) {})
			got <- received{string(body), err}
			io.WriteString(connection, c.final)
		})
		connection := dial()
		_ = connection.SetDeadline(time.Now().Add(10 * time.Second))
		io.WriteString(connection, postHead(port, "Content-Length: 4\r\nExpect: 100-continue"))
		reader := bufio.NewReader(connection)
		line, _ := reader.ReadString('\n')
		testkit.Equal(t, name+c.expected, name+line)
		if c.interim == "" {
			if at := <-got; at.body != "" || at.err == nil {
				t.Errorf("the service received %q %v", at.body, at.err)
			}
			continue
		}
		io.WriteString(connection, "body")
		_, _ = reader.ReadString('\n') // the end of the interim answer
		response, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatal(err)
		}
		testkit.Equal(t, 200, response.StatusCode)
		if at := <-got; at.body != "body" || at.err != nil {
			t.Errorf("the service received %q %v", at.body, at.err)
		}
	}
}

// Each side waits for the other's next line.
func TestABodyAndItsAnswerAlternate(t *testing.T) {
	f := newFixture(t)
	accepted := 0
	port := rawService(t, func(connection net.Conn, reader *bufio.Reader) {
		accepted++
		for {
			head, err := readHead(reader)
			if err != nil {
				return
			}
			io.WriteString(connection, "HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n")
			said := 0
			_, _ = readBody(head, reader, func(read int) {
				for ; said < read; said += 4 {
					io.WriteString(connection, "echo")
				}
			})
		}
	})
	connection := f.serve()()
	_ = connection.SetDeadline(time.Now().Add(20 * time.Second))
	reader := bufio.NewReader(connection)
	for range 3 {
		io.WriteString(connection, postHead(port, "Transfer-Encoding: chunked"))
		response, err := http.ReadResponse(reader, nil)
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			io.WriteString(connection, "4\r\nline\r\n")
			said := make([]byte, 4)
			if _, err := io.ReadFull(response.Body, said); err != nil {
				t.Fatal(err)
			}
			testkit.Equal(t, "echo", string(said))
		}
		io.WriteString(connection, "0\r\n\r\n")
		_, err = io.ReadAll(response.Body)
		testkit.Equal(t, nil, err)
	}
	testkit.Equal(t, 1, accepted) // one connection to the service served all requests
}

// If a client sends nothing more after a complete answer, its upload is ended after a short time.
func TestAnUploadBehindAnAnswerEndsWithItsProgress(t *testing.T) {
	f := newFixture(t)
	f.server.proxy.services.Times.Pause = 50 * time.Millisecond
	got := make(chan received, 1)
	port := rawService(t, func(connection net.Conn, reader *bufio.Reader) {
		head, _ := readHead(reader)
		io.WriteString(connection, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
		body, err := readBody(head, reader, func(int) {})
		got <- received{string(body), err}
	})
	connection := f.serve()()
	_ = connection.SetDeadline(time.Now().Add(10 * time.Second))
	io.WriteString(connection, postHead(port, "Transfer-Encoding: chunked")+"4\r\npart\r\n")
	response, err := http.ReadResponse(bufio.NewReader(connection), nil)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(response.Body)
	testkit.Equal(t, nil, err)
	testkit.Equal(t, "ok", string(text))
	if at := <-got; at.body != "part" || at.err == nil {
		t.Errorf("the service received %q %v", at.body, at.err)
	}
}

// An idle connection to a service is not used if the service closed it, or sent bytes on it.
func TestAConnectionWithSomethingUnaskedForIsNotUsed(t *testing.T) {
	f := newFixture(t)
	dial := f.serve()
	for _, after := range []string{"", "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"} {
		done := make(chan struct{}, 8)
		port := rawService(t, func(connection net.Conn, reader *bufio.Reader) {
			head, _ := readHead(reader)
			_, _ = readBody(head, reader, func(int) {})
			io.WriteString(connection, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
			time.Sleep(50 * time.Millisecond) // so that the bytes arrive between two requests
			io.WriteString(connection, after)
			if after == "" {
				connection.Close()
			}
			done <- struct{}{}
			_, _ = io.Copy(io.Discard, reader)
		})
		connection := dial()
		_ = connection.SetDeadline(time.Now().Add(10 * time.Second))
		reader := bufio.NewReader(connection)
		for range 3 {
			io.WriteString(connection, postHead(port, "Content-Length: 4")+"body")
			response, err := http.ReadResponse(reader, nil)
			if err != nil {
				t.Fatal(err)
			}
			text, _ := io.ReadAll(response.Body)
			testkit.Equal(t, "200 ok", fmt.Sprint(response.StatusCode, " ", string(text)))
			<-done
		}
	}
}
