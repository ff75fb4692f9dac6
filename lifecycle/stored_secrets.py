"""What is known of the secrets of a policy: for `sallyport policy check` and `explain`.

- The settings say which references can be configured at all. That needs no server.
- The vault of the running server says what it has and limits. Only root gets an answer. Otherwise nothing is known of
  the vault, and the reason is said.
- Each reference is probed at its backend: KV, variables and files are read; no lease and no token is made, and no
  command is run.
- Names and bindings are asked for, never a value.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache

import wire
from lifecycle.config import launch
from lifecycle.config.settings import Settings, SettingsError
from policy.compile import SecretUse
from policy.references import BackendKind, SecretReference, is_reference
from vault.client import AdminClient
from vault.conditions import Selectors
from vault.fetcher_config import FetcherConfig
from vault.freeze import Extent
from vault.grants import Grant, SecretBinding, check, missing
from vault.limits import ReferenceLimit
from vault.stores.port import SecretInfo
from wire import codec
from wire.api.vaultd import Listed, Used

_SECONDS = 5.0
PROBES_SECONDS = 30.0
"""The time in which probes are begun: each reference of a backend that hangs takes some seconds."""

type Said = Callable[[str], str]
"""Says what is wrong with a reference; empty if nothing that is known is."""


def _nothing(_reference: str) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class StoredSecrets:
    """What is known. `unknown` says why nothing is known of the vault, empty if it is known.

    Attributes:
        limits: the limits of references.
        used: how often limited secrets were used, and in how many bytes.
        unconfigured: what the settings say of a reference.
        probe: what its backend says.
    """

    secrets: Mapping[str, SecretInfo]
    frozen: tuple[Extent, ...] = ()
    unknown: str = ""
    limits: tuple[ReferenceLimit, ...] = ()
    used: Mapping[str, Used] = field(default_factory=dict)
    unconfigured: Said = _nothing
    probe: Said = _nothing

    def remark(self, use: SecretUse, uses: Iterable[SecretUse] = ()) -> str:
        """Say what keeps a secret from being released for a use; empty if nothing that is known here does.

        Args:
            uses: every use of the policy.
        """
        if use.host.startswith("*.") or (":" in use.secret and not is_reference(use.secret)):
            return ""
        wanted = Grant(use.secret, use.host, use.port, use.scheme)
        if is_reference(use.secret):
            bindings = [limit.binding(wanted) for limit in self.limits if limit.matches(use.secret)]
            lacks = self.unconfigured(use.secret) or self._refused(wanted, bindings, ": `sallyport vault list`")
            return lacks or self.probe(use.secret) or _only_for(bindings)
        if self.unknown:
            return ""
        info = self.secrets.get(use.secret)
        if info is None:
            return missing(wanted, (Grant(one.secret, one.host, one.port, one.scheme) for one in uses))
        return self._refused(wanted, [info.binding], "") or _only_for([info.binding])

    def _refused(self, wanted: Grant, bindings: list[SecretBinding], source: str) -> str:
        for binding in bindings:
            if (refused := check(binding, wanted, datetime.now(UTC))) is not None:
                return f"{refused.reason}{source}"
            used = self.used.get(wanted.secret, Used(0, 0))
            if _reached(used.uses, binding.limits.uses) or _reached(used.sent, binding.limits.sent):
                return f"the secret was used as often as its limits allow: sallyport vault reset {wanted.secret!r}"
        covered = any(extent.sandbox is None and extent.covers(None, wanted.secret) for extent in self.frozen)
        return "the secret is frozen: sallyport vault unfreeze" if covered else ""


def _reached(number: int, most: int | None) -> bool:
    return most is not None and number >= most


def _only_for(bindings: list[SecretBinding]) -> str:
    """Say which sandboxes alone may have a secret; empty if every one may."""
    chosen: list[Selectors] = [binding.selectors for binding in bindings]
    said = [f"metadata {key}={value}" for one in chosen for key, value in one.metadata]
    said += [f"image {' or '.join(sorted(one.images))}" for one in chosen if one.images]
    return f"only for sandboxes with {', '.join(said)}" if said else ""


def read(configured: Settings | None) -> StoredSecrets:
    """Read the settings, and ask the vault of the server with them."""
    if configured is None:
        return StoredSecrets({}, unknown="there are no settings of a server")
    settings = configured

    def lacks(reference: str) -> str:
        return unconfigured(settings, SecretReference.parse(reference))

    try:
        listed = asyncio.run(_listed(settings))
    except (FileNotFoundError, ConnectionRefusedError):
        return StoredSecrets({}, unknown="the server does not run", unconfigured=lacks)
    except (OSError, wire.RemoteError):  # it answers root only, and hangs up on others
        unknown = "the vault answers root only, or does not answer"
        return StoredSecrets({}, unknown=unknown, unconfigured=lacks)
    until = time.monotonic() + PROBES_SECONDS

    def probe(reference: str) -> str:
        if time.monotonic() > until:
            return "its backend is not asked: those before it took too long"
        return asyncio.run(_probed(settings, reference))

    infos = map(SecretInfo.of, listed.secrets)
    return StoredSecrets(
        {info.name: info for info in infos},
        tuple(Extent(one.sandbox, one.secret) for one in listed.frozen),
        limits=tuple(map(ReferenceLimit.of, listed.limits)),
        used=listed.used,
        unconfigured=lacks,
        probe=cache(probe),
    )


def unconfigured(settings: Settings, reference: SecretReference) -> str:
    """Say what the settings lack for a reference, and where to add it; empty if nothing."""
    try:
        config = codec.decode(FetcherConfig, launch.fetcher_config(settings))
    except SettingsError as error:
        return str(error)
    name, place = reference.path, "sallyport.vault"
    match reference.backend:
        case BackendKind.ENV:
            known = name in settings.get(f"{place}.environment")
            return "" if known else f"{place}.environment does not have {name}: add it, and restart the server"
        case BackendKind.FILE:
            return "" if config.file_directories else f"{place}.file_directories is empty: add the directory of {name}"
        case BackendKind.COMMAND:
            return "" if name in config.commands else f"{place}.commands has no command {name}: add it"
        case BackendKind.TOKEN:
            return "" if name in config.tokens else f"{place}.tokens has no token {name}: add it"
        case BackendKind.VAULT if config.hashicorp is None:
            return f"{place}.hashicorp.address is not set: docs/guides/connect-a-vault.md"
        case BackendKind.VAULT:
            return "" if config.hashicorp.permits(name) else f"{place}.hashicorp.allowed does not have {name}: add it"


async def _probed(configured: Settings, reference: str) -> str:
    """Return the problem of a reference at its backend; empty if there is none."""
    try:
        client = await AdminClient.connect(configured.run_dir / "vault.sock", launch.uids(configured)["vaultd"])
        try:
            await client.probe(reference)
        finally:
            await client.close()
    except wire.RemoteError as error:
        return error.message
    except OSError:
        return "its backend is not asked: the server does not answer"
    return ""


async def _listed(configured: Settings) -> Listed:
    async with asyncio.timeout(_SECONDS):
        client = await AdminClient.connect(configured.run_dir / "vault.sock", launch.uids(configured)["vaultd"])
        try:
            return await client.listed()
        finally:
            await client.close()
