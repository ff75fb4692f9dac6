// Package okta replaces the client of Okta, which takes an eighth of the time to compile Vault. No test logs in with a
// second factor of Okta: this package refuses each configuration, and Vault uses no client without one.
package okta

import (
	"context"
	"errors"
)

// ErrNone is the error of each configuration.
var ErrNone = errors.New("okta: this build of Vault has no second factor of Okta")

// Configuration cannot be made.
type Configuration struct {
	Context context.Context
}

// ConfigSetter has no effect.
type ConfigSetter func(*Configuration)

// WithToken has no effect.
func WithToken(string) ConfigSetter { return nil }

// WithOrgUrl has no effect.
func WithOrgUrl(string) ConfigSetter { return nil }

// WithCache has no effect.
func WithCache(bool) ConfigSetter { return nil }

// NewConfiguration refuses each configuration.
func NewConfiguration(...ConfigSetter) (*Configuration, error) { return nil, ErrNone }

// Request is a request that is refused; a filter has no effect.
type Request[Result any] struct{}

// Filter returns the request.
func (request Request[Result]) Filter(string) Request[Result] { return request }

// Execute refuses the request.
func (Request[Result]) Execute() (result Result, response any, err error) { return result, nil, ErrNone }

// User is a user.
type User struct{}

// GetId returns an empty string.
func (*User) GetId() string { return "" }

// UserFactorPush is a second factor.
type UserFactorPush struct{}

// GetId returns an empty string.
func (*UserFactorPush) GetId() string { return "" }

// Factor is one of a user's factors.
type Factor struct {
	UserFactorPush *UserFactorPush
}

// Verification is the begin of a verification.
type Verification struct {
	Links map[string]any
}

// GetFactorResult returns an empty string.
func (*Verification) GetFactorResult() string { return "" }

// Transaction is the state of a verification.
type Transaction struct {
	UserFactorPushTransactionWaiting  *struct{}
	UserFactorPushTransaction         *struct{}
	UserFactorPushTransactionRejected *struct{}
	UserFactorPushTransactionTimeout  *struct{}
}

// UserAPI has the requests for users.
type UserAPI struct{}

// ListUsers returns a refused request.
func (UserAPI) ListUsers(context.Context) Request[[]User] { return Request[[]User]{} }

// UserFactorAPI has the requests for factors.
type UserFactorAPI struct{}

// ListFactors returns a refused request.
func (UserFactorAPI) ListFactors(context.Context, string) Request[[]Factor] { return Request[[]Factor]{} }

// VerifyFactor returns a refused request.
func (UserFactorAPI) VerifyFactor(context.Context, string, string) Request[*Verification] {
	return Request[*Verification]{}
}

// GetFactorTransactionStatus returns a refused request.
func (UserFactorAPI) GetFactorTransactionStatus(context.Context, string, string, string) Request[*Transaction] {
	return Request[*Transaction]{}
}

// APIClient is a client without a configuration.
type APIClient struct {
	UserAPI       UserAPI
	UserFactorAPI UserFactorAPI
}

// NewAPIClient returns a client.
func NewAPIClient(*Configuration) *APIClient { return &APIClient{} }

// GetConfig returns a configuration without a context.
func (*APIClient) GetConfig() *Configuration { return &Configuration{Context: context.Background()} }
