"""The unwrapper: a process that wraps or unwraps master keys once, and ends. `python -m vault.wrapping.unwrapper`

It reads a `WrappingOrder` from standard input and writes a `WrappingAnswer` to standard output, a pipe of its parent.

- It has no part of the vault: no sealed record, no grant, no socket. What it opens goes to its parent only.
- It hardens itself before it loads the module of a token or reads a credential: not dumpable, no core, no new
  privileges, locked memory; then bounded memory, time and descriptors. It ends with its parent.
- Standard output and error of a module go nowhere.
- Root can have it become vaultd's user; all of its code is imported before that.
"""

import base64
import ctypes
import json
import os
import resource
import secrets
import signal
import sys
from pathlib import Path
from typing import Final

from vault.hardening import harden
from vault.wrapping.sources import VERSION, KeySource, WrappedKey, WrappingAnswer, WrappingError, WrappingOrder
from wire import codec

_MOST_ORDER: Final = 64 * 1024
_KEY_BYTES: Final = 32
_LIMITS: Final = (
    (resource.RLIMIT_AS, 2 << 30),
    (resource.RLIMIT_CPU, 20),
    (resource.RLIMIT_NOFILE, 256),
)
_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Carry out the order of standard input; return the exit status."""
    parent = os.getppid()
    try:
        order = codec.decode(WrappingOrder, json.loads(sys.stdin.buffer.read(_MOST_ORDER)))
    except ValueError as error:
        print(f"unwrapper: {error}", file=sys.stderr)
        return 2
    out = os.dup(1)
    os.set_inheritable(out, False)
    answer = _answer(order, parent)
    with os.fdopen(out, "wb") as pipe:
        pipe.write(codec.canonical_json(codec.encode(answer)))
    os._exit(0)  # no code of a module runs any more


def _answer(order: WrappingOrder, parent: int) -> WrappingAnswer:
    try:
        if order.pkcs11 is not None:
            from vault.wrapping import pkcs11_token
        else:
            from vault.wrapping import transit
        _confine(order.user, parent)
        if order.pkcs11 is not None:
            note = Path(order.refused)
            if order.keys:
                return _opened(pkcs11_token.unwrap(order.pkcs11, order.credential, note, order.keys))
            wrapped = _new(KeySource.PKCS11)
            text = pkcs11_token.wrap(order.pkcs11, order.credential, note, _fresh(), wrapped.context)
        elif order.transit is not None:
            if order.keys:
                return _opened(transit.unwrap(order.transit, order.credential, order.keys))
            wrapped = _new(KeySource.TRANSIT)
            text = transit.wrap(order.transit, order.credential, _fresh(), wrapped.context)
        else:
            raise WrappingError("the order has no source")
        return WrappingAnswer(wrapped=WrappedKey(VERSION, wrapped.source, wrapped.id, text))
    except WrappingError as error:
        return WrappingAnswer(problem=str(error))
    except Exception as error:  # noqa: BLE001 - fails closed: no key, and no text that could contain one
        return WrappingAnswer(problem=f"the unwrapper failed: {type(error).__name__}")


def _confine(user: int, parent: int) -> None:
    if user >= 0 and user != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    harden()
    for limit, value in _LIMITS:
        hard = resource.getrlimit(limit)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (bound, bound))
    os.umask(0o077)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise WrappingError("the parent has ended")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


def _fresh() -> bytes:
    return secrets.token_bytes(_KEY_BYTES)


def _new(source: KeySource) -> WrappedKey:
    """Return a wrapped key with a new id, before there is a wrapped text."""
    return WrappedKey(VERSION, source.value, secrets.token_hex(16), "-")


def _opened(keys: list[bytes]) -> WrappingAnswer:
    if any(len(key) != _KEY_BYTES for key in keys):
        raise WrappingError(f"the unwrapped key is not {_KEY_BYTES} bytes")
    return WrappingAnswer(tuple(base64.b64encode(key).decode("ascii") for key in keys))


if __name__ == "__main__":
    raise SystemExit(main())
