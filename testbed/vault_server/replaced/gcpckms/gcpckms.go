// Package gcpckms replaces the seal with a key of Google Cloud. This build of Vault refuses that seal: the client of the
// cloud takes long to compile.
package gcpckms

import (
	"context"
	"errors"

	wrapping "github.com/hashicorp/go-kms-wrapping/v2"
)

// ErrNone is the error of each configuration.
var ErrNone = errors.New("gcpckms: this build of Vault has no seal with a key of Google Cloud")

// The variables of the environment that name the key.
const (
	EnvGcpCkmsWrapperCredsPath   = "GOOGLE_CREDENTIALS"
	EnvGcpCkmsWrapperProject     = "GOOGLE_PROJECT"
	EnvGcpCkmsWrapperLocation    = "GOOGLE_REGION"
	EnvGcpCkmsWrapperKeyRing     = "GCPCKMS_WRAPPER_KEY_RING"
	EnvVaultGcpCkmsSealKeyRing   = "VAULT_GCPCKMS_SEAL_KEY_RING"
	EnvGcpCkmsWrapperCryptoKey   = "GCPCKMS_WRAPPER_CRYPTO_KEY"
	EnvVaultGcpCkmsSealCryptoKey = "VAULT_GCPCKMS_SEAL_CRYPTO_KEY"
)

// Wrapper cannot be configured, and is not used without that.
type Wrapper struct{ wrapping.Wrapper }

// NewWrapper returns a Wrapper.
func NewWrapper() *Wrapper { return &Wrapper{} }

// SetConfig refuses each configuration.
func (*Wrapper) SetConfig(context.Context, ...wrapping.Option) (*wrapping.WrapperConfig, error) {
	return nil, ErrNone
}
