"""What must not leak: sealed secrets, who may have them, the sandboxes' certificate authorities, and vaultd over them.

- A value leaves vaultd only to the one worker it was granted to, after the log has it on disk.
- Pure: `secret`, `envelope`, `grants`. At rest: `keyring`, `sealed_directory`, `file_store`. State: `custody`.
  Process: `broker` with `operations` and `channels`. Others use `client` (gateway, lifecycle) and `cli`.

It does not know where a request goes; that a value is sent to its binding's verified peer only is the gateway's part.
"""
