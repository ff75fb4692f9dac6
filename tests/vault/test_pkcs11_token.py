"""`vault.wrapping.pkcs11_token` in the unwrapper, with SoftHSM: each fault has its reason, no PIN is tried twice."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pkcs11
import pytest
from pkcs11 import TokenFlag

from tests.vault.key_sources import Token
from tests.vault.tokens import MODULE, PIN, TOKEN, SoftToken
from vault.keyring import MasterKeyError
from vault.wrapping import pkcs11_token
from vault.wrapping.sources import KeySource, Pkcs11Token, WrappingConfig, WrappingError

pytestmark = pytest.mark.slow

ANOTHER_PIN = "905317"
_CHANGE = "import pkcs11, sys; t = pkcs11.lib(sys.argv[1]).get_token(token_label=sys.argv[2])\n"
_CHANGE += "with t.open(rw=True, user_pin=sys.argv[3]) as session: session.set_pin(sys.argv[3], sys.argv[4])"


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Token]:
    made = Token(tmp_path)
    made.make()
    yield made
    made.close()


def change_pin(token: SoftToken, former: str, new: str) -> None:
    command = [sys.executable, "-c", _CHANGE, MODULE, TOKEN, former, new]
    subprocess.run(command, env=os.environ | token.environment, check=True)


def with_place(source: Token, **changes: str) -> None:
    place = source.token.place
    changed = Pkcs11Token(
        changes.get("module", place.module),
        changes.get("token", place.token),
        changes.get("key", place.key),
        place.pin_file,
        place.environment,
    )
    source.config = WrappingConfig(KeySource.PKCS11, changed)


def remake(source: Token, **options: Any) -> None:
    source.token.destroy()
    source.token.make(**options)


FAULTS: dict[str, tuple[Callable[[Token], object], str]] = {
    "no module": (lambda source: with_place(source, module="/nonexistent.so"), "there is no such file"),
    "no shared object": (lambda source: with_place(source, module="/etc/hosts"), "no usable PKCS#11 module"),
    "another library": (
        lambda source: with_place(source, module="/lib/x86_64-linux-gnu/libz.so.1"),
        "no usable PKCS#11 module",
    ),
    "no token": (lambda source: with_place(source, token="other"), "no initialised token other"),
    "token not initialised": (lambda source: source.token.remove(), "1 of its slots have a token that is not init"),
    "two tokens": (lambda source: source.token.initialise(), "has 2 tokens"),
    "no key": (lambda source: source.token.destroy(), "has no secret key master"),
    "two keys": (lambda source: source.token.make(), "has 2 secret keys master"),
    "short key": (lambda source: remake(source, bits=128), "no AES key of 256 bits"),
    "extractable key": (lambda source: remake(source, extractable=True), "can leave the token"),
    "key without PIN": (lambda source: remake(source, private=False), "can be used without the PIN"),
    "another key": (lambda source: remake(source), "another key wrapped it"),
    "wrong PIN": (lambda source: source.token.write_pin(ANOTHER_PIN), "refuses the PIN"),
    "short PIN": (lambda source: source.token.write_pin("1"), "refuses the PIN"),
    "empty PIN": (lambda source: source.token.write_pin(""), "must have the PIN in one line"),
    "two lines": (lambda source: source.token.write_pin(f"{PIN}\nmore"), "must have the PIN in one line"),
    "long PIN": (lambda source: source.token.write_pin("1" * 300), "must have the PIN in one line"),
    "PIN for others": (lambda source: source.token.write_pin(PIN, 0o640), "mode 0600 or 0400"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_reason_and_no_key(source: Token, name: str) -> None:
    fault, reason = FAULTS[name]
    source.load()  # the control
    fault(source)
    with pytest.raises(MasterKeyError) as caught:
        source.load()
    assert reason in str(caught.value)
    assert PIN not in str(caught.value)
    assert ANOTHER_PIN not in str(caught.value)


def test_without_a_pin_nothing_is_tried(source: Token, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_credentials", dict)
    with pytest.raises(MasterKeyError, match="cannot be opened: there is no PIN"):
        source.load()


def test_a_refused_pin_is_tried_again_only_after_its_file_has_changed(source: Token) -> None:
    """The token is changed so that it would accept the refused PIN: a login would succeed."""
    source.token.write_pin(ANOTHER_PIN)
    with pytest.raises(MasterKeyError, match="refuses the PIN"):
        source.load()
    change_pin(source.token, PIN, ANOTHER_PIN)
    for _ in range(3):
        with pytest.raises(MasterKeyError, match="it is not tried again"):
            source.load()
    source.token.write_pin(ANOTHER_PIN)
    source.load()


def test_a_pin_is_not_tried_where_its_refusal_could_not_be_noted(source: Token) -> None:
    (source.state / "pin-refused.new").mkdir()
    with pytest.raises(MasterKeyError, match="without it no PIN is tried"):
        source.load()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (TokenFlag.TOKEN_INITIALIZED, "has no PIN of its user yet"),
        (
            TokenFlag.TOKEN_INITIALIZED | TokenFlag.USER_PIN_INITIALIZED | TokenFlag.USER_PIN_LOCKED,
            "has locked its user",
        ),
        (
            TokenFlag.TOKEN_INITIALIZED | TokenFlag.USER_PIN_INITIALIZED | TokenFlag.USER_PIN_FINAL_TRY,
            "no PIN is tried",
        ),
    ],
)
def test_a_token_that_would_lock_its_user_gets_no_pin(
    source: Token, flags: TokenFlag, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SoftHSM does not count wrong PINs, so this token says so itself."""
    logins: list[object] = []
    one = SimpleNamespace(label=TOKEN, flags=flags, open=lambda **given: logins.append(given))
    monkeypatch.setattr(pkcs11, "lib", lambda _path: SimpleNamespace(get_tokens=lambda: [one]))
    pin = os.open(source.token.pin_file, os.O_RDONLY)
    try:
        with pytest.raises(WrappingError, match=reason):
            pkcs11_token.unwrap(source.token.place, pin, source.state / "note", [])
        one.flags = TokenFlag.TOKEN_INITIALIZED | TokenFlag.USER_PIN_INITIALIZED
        assert [] == logins
        with suppress(AttributeError, TypeError):  # the control: this one gets it, and this token opens no session
            pkcs11_token.unwrap(source.token.place, pin, source.state / "note", [])
        assert [{"user_pin": PIN}] == logins
    finally:
        os.close(pin)
