"""The vault: sealed secrets, grants, the sandboxes' certificate authorities, and the process vaultd.

- vaultd sends a value only to the worker with its grant, after the record of the release is on disk.
- Pure: `secret`, `envelope`, `grants`. On disk: `keyring`, `stores`. State: `custody`. Process: `vaultd` with
  `operations` and `channels`. Other components use `client` (gateway, lifecycle) and `cli`.

The gateway ensures that a value is sent only to the verified server of its binding.
"""
