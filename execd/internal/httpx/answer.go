// Package httpx reads requests, writes answers, matches routes and passes requests on.
//
// Invariants
//   - Every error answer is JSON with the string keys code and message, neither empty.
//   - Request bodies are bounded in size and in the time between two reads.
package httpx

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"time"

	"sallyport.dev/execd/internal/sys"
)

// Error codes of the contract.
const (
	CodeInvalidBody     = "INVALID_REQUEST_BODY"
	codeMissingQuery    = "MISSING_QUERY"
	CodeRuntime         = "RUNTIME_ERROR"
	CodeInvalidFile     = "INVALID_FILE"
	CodeInvalidContent  = "INVALID_FILE_CONTENT"
	CodeInvalidMetadata = "INVALID_FILE_METADATA"
	CodeFileNotFound    = "FILE_NOT_FOUND"
	CodeUnknown         = "UNKNOWN"
	CodeUnauthorized    = "UNAUTHORIZED"
	CodeUnavailable     = "SERVICE_UNAVAILABLE"
	CodeContextNotFound = "CONTEXT_NOT_FOUND"
)

const (
	// CommandBodyLimit is the size of a body that says what to run.
	CommandBodyLimit = 4 << 20
	// FileBodyLimit is the size of a body that names files.
	FileBodyLimit = 32 << 20
)

// DefaultBodyLimit is how long one read of a body may take, unless its connection says otherwise.
const DefaultBodyLimit = time.Minute // between two reads of a body, where the connection has no limit of its own

// Problem is an error that knows its HTTP answer.
type Problem struct {
	Status  int
	Code    string
	Message string
}

// NewProblem is an error with its answer.
func NewProblem(status int, code, message string) *Problem {
	return &Problem{Status: status, Code: code, Message: message}
}

func (p *Problem) Error() string { return p.Message }

// BadRequest is the error for a request with a fault.
func BadRequest(message string) *Problem {
	return NewProblem(http.StatusBadRequest, CodeInvalidBody, message)
}

// ErrEmptyBody is a request whose body holds no value.
var ErrEmptyBody = BadRequest("request body is empty")

// MissingQuery is a request without a parameter that it needs.
func MissingQuery(name string) *Problem {
	return NewProblem(http.StatusBadRequest, codeMissingQuery, "missing query parameter '"+name+"'")
}

// RuntimeError is a failure of the daemon or of the system below it.
func RuntimeError(err error) *Problem {
	return NewProblem(http.StatusInternalServerError, CodeRuntime, sys.Explain(err))
}

// WriteError answers with a problem; any other error is a RUNTIME_ERROR.
func WriteError(w http.ResponseWriter, err error) {
	var p *Problem
	if !errors.As(err, &p) {
		p = RuntimeError(err)
	}
	message := p.Message
	if message == "" {
		message = http.StatusText(p.Status)
	}
	body := map[string]string{"code": p.Code, "message": message}
	if p.Status == http.StatusUnauthorized {
		body["error"] = message
	}
	w.Header().Set("X-Request-ID", ID())
	WriteJSON(w, p.Status, body)
}

// WriteJSON answers with a value as JSON.
func WriteJSON(w http.ResponseWriter, status int, value any) {
	body, err := json.Marshal(value)
	if err != nil {
		status, body = http.StatusInternalServerError, []byte(`{"code":"RUNTIME_ERROR","message":"cannot encode the answer"}`)
	}
	header := w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// WriteEmpty answers 200 without a body.
func WriteEmpty(w http.ResponseWriter) {
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(http.StatusOK)
}

// NotFound is the answer for an unassigned route.
func NotFound(w http.ResponseWriter) {
	header := w.Header()
	header.Set("Content-Type", "text/plain")
	header.Set("Content-Length", "18")
	w.WriteHeader(http.StatusNotFound)
	_, _ = io.WriteString(w, "404 page not found")
}

// BoundBody starts the time limit of a body, also of one that no handler reads: the server itself
// waits for the rest of it before it sends an answer.
func BoundBody(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyLimit(r)))
	}
}

// bodyLimitKey is the key of a request's context for its bodyLimit.
type bodyLimitKey struct{}

// WithBodyLimit is for the requests of a connection that has a limit of its own.
func WithBodyLimit(ctx context.Context, limit time.Duration) context.Context {
	return context.WithValue(ctx, bodyLimitKey{}, limit)
}

// bodyLimit is how long one read of the body of a request may take.
func bodyLimit(r *http.Request) time.Duration {
	limit, ok := r.Context().Value(bodyLimitKey{}).(time.Duration)
	if !ok {
		return DefaultBodyLimit
	}
	return limit
}

// idleBody moves the read deadline of the connection with each read. After the body,
// only the end of the connection can come; it has no deadline.
type idleBody struct {
	body       io.Reader
	controller *http.ResponseController
	limit      time.Duration // for one read
}

func (b idleBody) Read(buffer []byte) (int, error) {
	_ = b.controller.SetReadDeadline(time.Now().Add(b.limit))
	n, err := b.body.Read(buffer)
	if errors.Is(err, io.EOF) {
		_ = b.controller.SetReadDeadline(time.Time{})
	}
	return n, err
}

// RequestBody is the body of a request, read within its time.
func RequestBody(w http.ResponseWriter, r *http.Request) io.Reader {
	return idleBody{body: r.Body, controller: http.NewResponseController(w), limit: bodyLimit(r)}
}

// DecodeJSON reads the first JSON value of a body; unknown fields and what
// follows the value are ignored.
func DecodeJSON(w http.ResponseWriter, r *http.Request, limit int64, into any) error {
	body := &io.LimitedReader{R: RequestBody(w, r), N: limit}
	err := json.NewDecoder(body).Decode(into)
	if body.N <= 0 {
		return BadRequest("request body is larger than " + strconv.FormatInt(limit, 10) + " bytes")
	}
	if errors.Is(err, io.EOF) {
		return ErrEmptyBody
	}
	if err != nil {
		return BadRequest("error parsing request: " + JSONFault(err))
	}
	// Reading to the end lets the server notice when the client leaves.
	_, _ = io.Copy(io.Discard, body)
	return nil
}

// JSONFault describes a decoding error without quoting the body.
func JSONFault(err error) string {
	var wrongType *json.UnmarshalTypeError
	if errors.As(err, &wrongType) {
		field := wrongType.Field
		if field == "" {
			field = "body"
		}
		return "wrong type for " + field
	}
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return "invalid JSON at byte " + strconv.FormatInt(syntax.Offset, 10)
	}
	return "unreadable body"
}

// TokenHeader is the header that carries the access token.
const TokenHeader = "X-Execd-Access-Token"

// TimeLimit is a number of units as a request has it, 0 for none: any that a Duration can
// hold, which is 292 years.
func TimeLimit(name string, number *int64, unit time.Duration) (time.Duration, error) {
	if number == nil {
		return 0, nil
	}
	if most := int64(math.MaxInt64 / unit); *number < 0 || *number > most {
		return 0, BadRequest(fmt.Sprintf("%s must be from 0 to %d", name, most))
	}
	return time.Duration(*number) * unit, nil
}

const (
	// HeaderBytesLimit is the size of the header of a request.
	HeaderBytesLimit = 64 << 10
)

var (
	// ErrLeft ends a wait whose client has left.
	ErrLeft = errors.New("the client left")
)

// ContextNotFound is the answer about a session or a code context that is not there.
func ContextNotFound(id string) *Problem {
	return NewProblem(http.StatusInternalServerError, CodeRuntime, "context not found: "+id)
}
