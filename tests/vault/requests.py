"""A sandbox, a secret, and each request of vaultd's socket."""

from typing import Any

from vault.grants import Grant, SecretBinding
from vault.limits import ReferenceLimit
from wire.api import vaultd
from wire.operations import Request

CANARY = "canary-e15c77d2"
SANDBOX = "sbx-000000000000000000000001"
BINDING = SecretBinding.make(["api.good.test"])
GRANT = Grant.make("token", "api.good.test", 443, "https")
ASK = ("token", "api.good.test", 443, "https")

ADMINISTRATION: dict[str, Request[Any]] = {
    "put": vaultd.Put("token", vaultd.Value(CANARY), BINDING.form),
    "rotate": vaultd.Rotate("token", vaultd.Value(CANARY)),
    "delete": vaultd.Delete("token"),
    "list": vaultd.List(),
    "reset": vaultd.Reset("token"),
    "limit": vaultd.Limit(ReferenceLimit.make("env://*", ["api.good.test"]).form),
    "unlimit": vaultd.Unlimit("env://*"),
    "revoke_all": vaultd.RevokeAll(),
    "freeze_secrets": vaultd.FreezeSecrets(),
    "unfreeze_secrets": vaultd.UnfreezeSecrets(),
    "rekey": vaultd.Rekey(),
    "attach": vaultd.Attach(SANDBOX, 1),
    "refer": vaultd.Refer((Grant.make("env://TOKEN", "api.good.test", 443, "https").form,)),
    "check_reference": vaultd.CheckReference("env://TOKEN"),
    "probe_reference": vaultd.ProbeReference("env://TOKEN"),
    "list_backends": vaultd.ListBackends(),
    "write_login": vaultd.WriteLogin("token", "good.test", 443),
}
SANDBOXES: dict[str, Request[Any]] = {
    "open_sandbox": vaultd.OpenSandbox(SANDBOX, "lin-1", (GRANT.form,), {"inline:a": vaultd.Value("x")}, None, ("*",)),
    "regrant": vaultd.Regrant(SANDBOX, (), {}, (), (), ()),
    "narrow": vaultd.Narrow(SANDBOX, (), (), ()),
    "close_sandbox": vaultd.CloseSandbox(SANDBOX),
}
