package main

// Reading requests and writing answers (contract 2.3, 2.4).
//
// Invariants
//   - Every error answer is JSON with the string keys code and message, neither empty.
//   - Request bodies are bounded in size and in the time between two reads.

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strconv"
	"time"
)

// Error codes of the contract.
const (
	codeInvalidBody     = "INVALID_REQUEST_BODY"
	codeMissingQuery    = "MISSING_QUERY"
	codeRuntime         = "RUNTIME_ERROR"
	codeInvalidFile     = "INVALID_FILE"
	codeInvalidContent  = "INVALID_FILE_CONTENT"
	codeInvalidMetadata = "INVALID_FILE_METADATA"
	codeFileNotFound    = "FILE_NOT_FOUND"
	codeUnknown         = "UNKNOWN"
	codeUnauthorized    = "UNAUTHORIZED"
	codeUnavailable     = "SERVICE_UNAVAILABLE"
	codeContextNotFound = "CONTEXT_NOT_FOUND"
)

const (
	commandBodyLimit = 4 << 20
	fileBodyLimit    = 32 << 20
)

const defaultBodyLimit = time.Minute // between two reads of a body, where the connection has no limit of its own

// problem is an error that knows its HTTP answer.
type problem struct {
	status  int
	code    string
	message string
}

func newProblem(status int, code, message string) *problem {
	return &problem{status: status, code: code, message: message}
}

func (p *problem) Error() string { return p.message }

func badRequest(message string) *problem {
	return &problem{http.StatusBadRequest, codeInvalidBody, message}
}

var errEmptyBody = badRequest("request body is empty")

func missingQuery(name string) *problem {
	return &problem{http.StatusBadRequest, codeMissingQuery, "missing query parameter '" + name + "'"}
}

func runtimeError(err error) *problem {
	return &problem{http.StatusInternalServerError, codeRuntime, explained(err)}
}

// explained is an error as a client reads it: what it is about and the reason, without
// the name of the call that failed.
func explained(err error) string {
	switch e := err.(type) {
	case *fs.PathError:
		return e.Path + ": " + reason(e.Err)
	case *os.LinkError:
		return e.Old + ": " + reason(e.Err)
	case *os.SyscallError:
		return reason(e.Err)
	}
	return err.Error()
}

// writeError answers with a problem; any other error is a RUNTIME_ERROR.
func writeError(w http.ResponseWriter, err error) {
	var p *problem
	if !errors.As(err, &p) {
		p = runtimeError(err)
	}
	message := p.message
	if message == "" {
		message = http.StatusText(p.status)
	}
	body := map[string]string{"code": p.code, "message": message}
	if p.status == http.StatusUnauthorized {
		body["error"] = message
	}
	w.Header().Set("X-Request-ID", newCommandID())
	writeJSON(w, p.status, body)
}

func writeJSON(w http.ResponseWriter, status int, value any) {
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

func writeEmpty(w http.ResponseWriter) {
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(http.StatusOK)
}

// notFound is the answer for an unassigned route.
func notFound(w http.ResponseWriter) {
	header := w.Header()
	header.Set("Content-Type", "text/plain")
	header.Set("Content-Length", "18")
	w.WriteHeader(http.StatusNotFound)
	_, _ = io.WriteString(w, "404 page not found")
}

// boundBody begins the time of a body that nobody may ever read: the server itself
// waits for the rest of it before it sends an answer.
func boundBody(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyLimit(r)))
	}
}

// bodyLimitKey is the key of a request's context for its bodyLimit.
type bodyLimitKey struct{}

// withBodyLimit is for the requests of a connection that has a limit of its own.
func withBodyLimit(ctx context.Context, limit time.Duration) context.Context {
	return context.WithValue(ctx, bodyLimitKey{}, limit)
}

// bodyLimit is how long one read of the body of a request may take.
func bodyLimit(r *http.Request) time.Duration {
	limit, ok := r.Context().Value(bodyLimitKey{}).(time.Duration)
	if !ok {
		return defaultBodyLimit
	}
	return limit
}

// idleBody moves the read deadline of the connection with each read. After the body
// comes nothing but the end of the connection, for which there is no deadline.
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

func requestBody(w http.ResponseWriter, r *http.Request) io.Reader {
	return idleBody{body: r.Body, controller: http.NewResponseController(w), limit: bodyLimit(r)}
}

// decodeJSON reads the first JSON value of a body; unknown fields and what
// follows the value are ignored.
func decodeJSON(w http.ResponseWriter, r *http.Request, limit int64, into any) error {
	body := &io.LimitedReader{R: requestBody(w, r), N: limit}
	err := json.NewDecoder(body).Decode(into)
	if body.N <= 0 {
		return badRequest("request body is larger than " + strconv.FormatInt(limit, 10) + " bytes")
	}
	if errors.Is(err, io.EOF) {
		return errEmptyBody
	}
	if err != nil {
		return badRequest("error parsing request: " + jsonFault(err))
	}
	// Reading to the end lets the server notice when the client leaves.
	_, _ = io.Copy(io.Discard, body)
	return nil
}

// jsonFault describes a decoding error without quoting the body.
func jsonFault(err error) string {
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
