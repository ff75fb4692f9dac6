// Package discover replaces the module that finds the peers of a Raft cluster. Its clients of fourteen clouds take a
// quarter of the time to compile Vault. A Vault of the tests has no peers: this package refuses each search.
package discover

import (
	"errors"
	"log"
)

// ErrNone is the error of each search.
var ErrNone = errors.New("discover: this build of Vault has no auto_join")

// Provider is a cloud.
type Provider interface {
	Addrs(args map[string]string, l *log.Logger) ([]string, error)
	Help() string
}

// Providers is empty.
var Providers = map[string]Provider{}

// Discover refuses each search.
type Discover struct{}

// Option has no effect.
type Option func(*Discover) error

// Config holds the parameters of a search. Parse makes none.
type Config map[string]string

// New returns a Discover.
func New(...Option) (*Discover, error) { return &Discover{}, nil }

// WithProviders has no effect.
func WithProviders(map[string]Provider) Option { return nil }

// Parse refuses the parameters of a search.
func Parse(string) (Config, error) { return nil, ErrNone }

// String returns an empty string.
func (Config) String() string { return "" }

// Addrs refuses a search.
func (*Discover) Addrs(string, *log.Logger) ([]string, error) { return nil, ErrNone }
