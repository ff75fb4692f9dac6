package server

// The access token: one header, checked against a SHA-256.
//
// Invariants
//   - The daemon keeps the hash only, and compares it in constant time.
//   - Without a hash the daemon does not start, unless the operator gives --insecure-no-token, or --runtime-init: then
//     an init sets the hash.

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"net/http"

	"sallyport.dev/execd/internal/httpx"
)

// Auth decides whether a request is allowed. The zero value refuses every request.
type Auth struct {
	hash [sha256.Size]byte
	set  bool
	open bool // operator switch --insecure-no-token
}

var errNoToken = errors.New("no access token: give --access-token-sha256, or --insecure-no-token to serve every client")

// NewAuth makes an Auth from a hash in hexadecimal digits. An empty hash is an error unless insecure is set; then the
// Auth allows every request.
func NewAuth(hashHex string, insecure bool) (Auth, error) {
	if hashHex == "" {
		if insecure {
			return Auth{open: true}, nil
		}
		return Auth{}, errNoToken
	}
	raw, err := hex.DecodeString(hashHex)
	if err != nil || len(raw) != sha256.Size {
		return Auth{}, errors.New("--access-token-sha256 must be 64 hexadecimal digits")
	}
	return Auth{hash: [sha256.Size]byte(raw), set: true}, nil
}

// HashToken returns the hexadecimal SHA-256 of a token.
func HashToken(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// Allows reports whether the request carries the token exactly once.
func (a Auth) Allows(r *http.Request) bool {
	if !a.set {
		return a.open
	}
	values := r.Header[httpx.TokenHeader]
	if len(values) != 1 {
		return false
	}
	sum := sha256.Sum256([]byte(values[0]))
	return subtle.ConstantTimeCompare(sum[:], a.hash[:]) == 1
}

var unauthorized = httpx.NewProblem(
	http.StatusUnauthorized, httpx.CodeUnauthorized, "Unauthorized: invalid or missing header X-EXECD-ACCESS-TOKEN",
)
