// Package httpx reads requests, writes answers, matches routes and forwards requests to services.
//
// Invariants
//   - Every error answer is JSON with the string keys code and message, and neither is empty.
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
	// CommandBodyLimit is the largest size of the body of a request that runs code, in bytes.
	CommandBodyLimit = 4 << 20
	// FileBodyLimit is the largest size of the body of a request that names files, in bytes.
	FileBodyLimit = 32 << 20
)

// DefaultBodyLimit is the time limit for one read of a body on a connection without a limit of its own.
const DefaultBodyLimit = time.Minute

// Problem is an error with the HTTP answer that reports it.
type Problem struct {
	Status  int
	Code    string
	Message string
}

// NewProblem returns an error with its HTTP answer.
func NewProblem(status int, code, message string) *Problem {
	return &Problem{Status: status, Code: code, Message: message}
}

func (p *Problem) Error() string { return p.Message }

// BadRequest returns the error for an invalid request.
func BadRequest(message string) *Problem {
	return NewProblem(http.StatusBadRequest, CodeInvalidBody, message)
}

// ErrEmptyBody is the error for a request whose body contains no JSON value.
var ErrEmptyBody = BadRequest("request body is empty")

// MissingQuery returns the error for a request without a required query parameter.
func MissingQuery(name string) *Problem {
	return NewProblem(http.StatusBadRequest, codeMissingQuery, "missing query parameter '"+name+"'")
}

// RuntimeError returns the error for a failure of the daemon or of the operating system.
func RuntimeError(err error) *Problem {
	return NewProblem(http.StatusInternalServerError, CodeRuntime, sys.Explain(err))
}

// WriteError answers with a problem. Any other error becomes a RUNTIME_ERROR.
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

// NotFound answers a request that matches no route.
func NotFound(w http.ResponseWriter) {
	header := w.Header()
	header.Set("Content-Type", "text/plain")
	header.Set("Content-Length", "18")
	w.WriteHeader(http.StatusNotFound)
	_, _ = io.WriteString(w, "404 page not found")
}

// BoundBody starts the time limit of a body. The limit also applies to a body that no handler reads, because the server
// waits for the rest of such a body before it sends an answer.
func BoundBody(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyLimit(r)))
	}
}

// bodyLimitKey is the key of the body's time limit in a request's context.
type bodyLimitKey struct{}

// WithBodyLimit returns a context for the requests of a connection that has its own time limit for one read of a body.
func WithBodyLimit(ctx context.Context, limit time.Duration) context.Context {
	return context.WithValue(ctx, bodyLimitKey{}, limit)
}

// bodyLimit returns the time limit for one read of a request's body.
func bodyLimit(r *http.Request) time.Duration {
	limit, ok := r.Context().Value(bodyLimitKey{}).(time.Duration)
	if !ok {
		return DefaultBodyLimit
	}
	return limit
}

// idleBody sets the read deadline of the connection again before each read. It removes the deadline at the end of the
// body, because after that only the end of the connection is expected.
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

// RequestBody returns the body of a request, with the time limit for each read.
func RequestBody(w http.ResponseWriter, r *http.Request) io.Reader {
	return idleBody{body: r.Body, controller: http.NewResponseController(w), limit: bodyLimit(r)}
}

// DecodeJSON reads the first JSON value of a body. It ignores unknown fields and all data after the value.
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
	// Read to the end of the body, because only then can the server detect that the client disconnects.
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

// TimeLimit converts a number of units in a request to a time limit; 0 means no limit. It accepts every number that a
// Duration can hold (up to 292 years).
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
	// HeaderBytesLimit is the largest size of a request's header, in bytes.
	HeaderBytesLimit = 64 << 10
)

var (
	// ErrLeft is the error of a wait that ended because its client has disconnected.
	ErrLeft = errors.New("the client left")
)

// ContextNotFound returns the error for a session or code context that does not exist.
func ContextNotFound(id string) *Problem {
	return NewProblem(http.StatusInternalServerError, CodeRuntime, "context not found: "+id)
}
