"""Starts the unwrapper, for vaultd and for the command line.

- The unwrapper gets its order on standard input, and one descriptor: that of the PIN or of Vault's credential, which
  this process passes on unread. It gets an environment of its own.
- It has `SECONDS`. Then it is killed with its group.
"""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vault.wrapping.sources import (
    WRAPPING,
    KeySource,
    Pkcs11Token,
    TransitKey,
    WrappedKey,
    WrappingAnswer,
    WrappingConfig,
    WrappingError,
    WrappingOrder,
)
from wire import codec

SECONDS: Final = 25.0
REFUSED: Final = "pin-refused"
_ENVIRONMENT: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The configured sources, from a process that may use them.

    Attributes:
        directory: where a refused PIN is noted; the unwrapper's user can write there.
        credentials: descriptors, by source.
        user: the user of the unwrapper; None: this process's own.
    """

    config: WrappingConfig
    directory: Path
    credentials: Mapping[KeySource, int] = field(default_factory=dict)
    user: int | None = None

    @property
    def source(self) -> KeySource:
        """See `vault.wrapping.sources.Wraps`."""
        return self.config.source

    def wrap(self) -> WrappedKey:
        """See `vault.wrapping.sources.Wraps`. The key itself stays in the unwrapper."""
        answer = self._ask(self.config.source, ())
        if answer.wrapped is None or answer.wrapped.source != self.config.source:
            raise WrappingError("the unwrapper has no answer")
        return answer.wrapped

    def unwrap(self, keys: Sequence[WrappedKey]) -> list[bytes]:
        """See `vault.wrapping.sources.Wraps`. All keys of one source are unwrapped with one login."""
        found: dict[str, bytes] = {}
        for source in dict.fromkeys(each.source for each in keys):
            asked = tuple(each for each in keys if each.source == source)
            answer = self._ask(KeySource(source), asked)
            if len(answer.keys) != len(asked):
                raise WrappingError("the unwrapper has no answer")
            found |= {each.id: base64.b64decode(key) for each, key in zip(asked, answer.keys, strict=True)}
        return [found[each.id] for each in keys]

    def _ask(self, source: KeySource, keys: tuple[WrappedKey, ...]) -> WrappingAnswer:
        if source not in WRAPPING or not self.config.has(source):
            raise WrappingError(f"the settings have no sallyport.vault.{source}, which is needed for this key")
        token: Pkcs11Token | None = self.config.pkcs11 if source is KeySource.PKCS11 else None
        transit: TransitKey | None = self.config.transit if source is KeySource.TRANSIT else None
        credential = self.credentials.get(source, -1)
        order = WrappingOrder(
            token,
            transit,
            keys,
            credential,
            -1 if self.user is None else self.user,
            str(self.directory / REFUSED),
        )
        environment = _ENVIRONMENT | ({} if token is None else dict(token.environment))
        answer = _run(codec.canonical_json(codec.encode(order)), credential, environment)
        if answer.problem:
            raise WrappingError(answer.problem)
        return answer


def _run(order: bytes, credential: int, environment: Mapping[str, str]) -> WrappingAnswer:
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "vault.wrapping.unwrapper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=() if credential < 0 else (credential,),
            env=dict(environment),
            cwd=_ROOT,
            start_new_session=True,
        )
    except OSError as error:
        raise WrappingError(f"the unwrapper cannot be started: {error.strerror}") from None
    with process:
        try:
            said, _ = process.communicate(order, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise WrappingError(f"no answer within {SECONDS:.0f} s: look at the token, or at Vault") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    try:
        return codec.decode(WrappingAnswer, json.loads(said))
    except ValueError:
        raise WrappingError(f"the unwrapper ended without an answer (status {process.returncode})") from None
