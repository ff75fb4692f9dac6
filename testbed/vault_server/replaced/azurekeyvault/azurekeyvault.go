// Package azurekeyvault replaces the seal with a key of Azure. This build of Vault refuses that seal: its client is in a
// module of 69 MB, which takes long to download and to unpack.
package azurekeyvault

import (
	"context"
	"errors"

	wrapping "github.com/hashicorp/go-kms-wrapping/v2"
)

// ErrNone is the error of each configuration.
var ErrNone = errors.New("azurekeyvault: this build of Vault has no seal with a key of Azure")

// The variables of the environment that name the key.
const (
	EnvAzureKeyVaultWrapperVaultName = "AZUREKEYVAULT_WRAPPER_VAULT_NAME"
	EnvVaultAzureKeyVaultVaultName   = "VAULT_AZUREKEYVAULT_VAULT_NAME"
	EnvAzureKeyVaultWrapperKeyName   = "AZUREKEYVAULT_WRAPPER_KEY_NAME"
	EnvVaultAzureKeyVaultKeyName     = "VAULT_AZUREKEYVAULT_KEY_NAME"
)

// WithDisallowEnvVars has no effect.
func WithDisallowEnvVars(bool) wrapping.Option { return nil }

// Wrapper cannot be configured, and is not used without that.
type Wrapper struct{ wrapping.Wrapper }

// NewWrapper returns a Wrapper.
func NewWrapper() *Wrapper { return &Wrapper{} }

// SetConfig refuses each configuration.
func (*Wrapper) SetConfig(context.Context, ...wrapping.Option) (*wrapping.WrapperConfig, error) {
	return nil, ErrNone
}
