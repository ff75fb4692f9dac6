"""The master key, wrapped by a key that does not leave a PKCS#11 token or the transit engine of HashiCorp Vault.

- Pure: `sources`. A process of its own, `unwrapper`, speaks to the token (`pkcs11_token`) or to Vault (`transit`), and
  ends at once. vaultd and the command line start it with `asking`. No other process loads the module of a token.
"""
