"""The control plane: OpenSandbox's lifecycle, egress and vault API on top of the other daemons.

It composes the other packages. `serve` runs as a separate user without the Docker socket, the master key and other
namespaces. For operations that need those it calls hostd or vaultd.
"""
