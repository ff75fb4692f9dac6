"""The modules of the daemons. A substitute imports this, and nothing that its daemon does not need."""

MAINS = {
    "host": "runtimes.hostd",
    "auditd": "audit.auditd",
    "vaultd": "vault.vaultd",
    "compiler": "policy.compiler",
    "zygote": "gateway.zygote",
    "serve": "lifecycle.serve",
}
"""The module of each daemon of the product, by the name of the daemon's configuration file."""
