"""The operator's part of a launch: everything that a worker enforces and a caller cannot set.

- The compiler makes a policy from the operator's file and the sandbox's selection. Nothing of a selection is read
  here, and of a compiled policy only its form and its digest: the worker validates it.
- Trust roots, resolvers, address exceptions, fixed addresses and limits come from hostd's own configuration. They are
  equal for all workers: the zygote gets them once.
- Maxima are checked here, independently of earlier checks.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import wire
from runtimes.daemons import Daemons
from runtimes.net.plan import PLAN
from runtimes.spec import HostConfig
from wire.api.compiler import Compile
from wire.api.hostd import Launch
from wire.api.provided import Provided
from wire.api.zygote import Prepare

type Policy = dict[str, Any]
"""A compiled policy, in its JSON form."""

_DIGEST = re.compile(r"[0-9a-f]{64}")

MAX_ROOTS = 1024 * 1024
COMPILE_SECONDS = 10.0
_PATIENCE_SECONDS = 5.0


def worker_constants(config: HostConfig) -> Prepare:
    """Return the part of the configuration that all workers have in common; the trust roots are read now.

    Raises:
        OSError: they cannot be read.
        ValueError: they are too large.
    """
    with Path(config.upstream_roots).open("rb") as file:
        roots = file.read(MAX_ROOTS + 1)
    if len(roots) > MAX_ROOTS:
        raise ValueError(f"{config.upstream_roots} is larger than {MAX_ROOTS} bytes")
    return Prepare(
        upstream_roots=roots.decode("utf-8", "ignore"),
        dns_upstreams=tuple(config.dns_upstreams),
        inside=str(PLAN.inside),
        allowed_addresses=tuple(config.allowed_addresses),
        host_addresses={name: tuple(addresses) for name, addresses in config.host_addresses.items()},
        limits=config.gateway_limits,
    )


class Operator:
    """The operator's configuration and policy file, as applied to launches; made once, at hostd's start."""

    def __init__(self, config: HostConfig, daemons: Daemons, roots: str) -> None:
        """Store the configuration, the daemons and the operator's trust roots (PEM)."""
        self._config = config
        self._daemons = daemons
        self._roots = roots

    async def compile(self, selection: str, seed: str) -> tuple[Policy, Provided]:
        """Return the policy of a selection (JSON text) under the operator's document as it is now, and what it
        provides.

        Args:
            seed: of the sandbox's placeholders.

        Raises:
            wire.RequestError: there is none: `invalid`, `too_large`, or `unavailable` if the compiler does not
                answer.
        """
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._daemons.reachable("compiler")
            client = self._daemons.client("compiler")
            answer = await client.ask(Compile(selection, seed), timeout=COMPILE_SECONDS)
            policy = json.loads(answer.policy)
        except wire.FrameError:
            raise wire.RequestError(wire.Code.TOO_LARGE, "the policy is too large for the compiler") from None
        except wire.RemoteError as error:
            code = error.code if error.code in (wire.Code.INVALID, wire.Code.TOO_LARGE) else wire.Code.UNAVAILABLE
            raise wire.RequestError(code, error.message[:300]) from None
        except (ValueError, RecursionError):
            policy = None
        except OSError as error:  # ConnectionError and TimeoutError are OSErrors
            raise wire.RequestError(
                wire.Code.UNAVAILABLE, f"no policy is compiled now: {type(error).__name__}"
            ) from None
        if not isinstance(policy, dict):
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the compiler's answer is no policy")
        return policy, answer.provided

    def ca_bundle(self, root: str) -> str:
        """Return the trust anchors of the programs in a sandbox: the operator's roots, and the sandbox's own."""
        return f"{self._roots.rstrip()}\n{root}"

    def judge(self, spec: Launch, others: int) -> None:
        """Check a launch, while `others` other sandboxes exist.

        Raises:
            wire.RequestError: it exceeds what the operator allows.
        """
        config, maxima = self._config, self._config.maxima
        if spec.runtime not in config.runtimes:
            raise wire.RequestError(wire.Code.INVALID, f"runtime: {spec.runtime} is not allowed on this host")
        if spec.disk_bytes is None and (config.disk_limits or maxima.disk_bytes is not None):
            raise wire.RequestError(wire.Code.INVALID, "disk_bytes: this host gives no sandbox an unlimited disk")
        for name in ("cpu_nanos", "memory_bytes", "pids", "disk_bytes"):
            asked, most = getattr(spec, name), getattr(maxima, name)
            if asked is not None and most is not None and asked > most:
                raise wire.RequestError(wire.Code.INVALID, f"{name}: {asked} is more than the {most} of this host")
        if others >= maxima.sandboxes:
            raise wire.RequestError(wire.Code.FULL, f"there are {maxima.sandboxes} sandboxes already")


def policy_digest(policy: Policy) -> str:
    """Return the digest in a compiled policy, empty if it has no valid one."""
    digest = policy.get("digest")
    return digest if isinstance(digest, str) and _DIGEST.fullmatch(digest) else ""
