"""The control plane: OpenSandbox's lifecycle, egress and vault API over our own daemons.

It composes the other packages. `serve` runs as a user of its own without the Docker socket, without the master key and
without namespaces of others: everything that needs those is a call to hostd or vaultd.
"""
