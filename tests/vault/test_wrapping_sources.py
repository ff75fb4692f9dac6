"""Properties of `vault.wrapping.sources`."""

import json

import pytest

from vault.wrapping.sources import MOST_BYTES, KeySource, Pkcs11Token, WrappedKey, WrappingConfig
from wire import codec

KEY = WrappedKey(1, "pkcs11", "0f" * 16, "AAAA")


def test_a_wrapped_key_is_read_as_it_was_written() -> None:
    assert KEY == WrappedKey.parse(KEY.text)
    assert KEY.text.endswith(b"\n")
    assert KEY.text.startswith(b"{")  # which no plain key does


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"source": "file"},
        {"source": "other"},
        {"id": "0f" * 15},
        {"id": "0F" * 16},
        {"wrapped": ""},
        {"wrapped": "A" * MOST_BYTES},
        {"wrapped": None},
        {"more": 1},
    ],
)
def test_only_the_exact_form_is_a_wrapped_key(change: dict[str, object]) -> None:
    document = json.loads(KEY.text) | change
    with pytest.raises(ValueError):
        WrappedKey.parse(json.dumps(document).encode())


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b"{" * 3000, KEY.text * 2, KEY.text[:-3], b"\xff"])
def test_other_content_is_no_wrapped_key(text: bytes) -> None:
    with pytest.raises(ValueError):
        WrappedKey.parse(text)


def test_the_context_differs_with_each_key_and_source() -> None:
    contexts = {
        KEY.context,
        WrappedKey(1, "transit", KEY.id, "AAAA").context,
        WrappedKey(1, "pkcs11", "0e" * 16, "AAAA").context,
    }
    assert 3 == len(contexts)


def test_the_configuration_says_which_keys_it_opens() -> None:
    token = Pkcs11Token("/module.so", "token", "key", "/pin", {"A": "b"})
    config = WrappingConfig(KeySource.FILE, token)
    assert (True, False, False) == tuple(map(config.has, ("pkcs11", "transit", "file")))
    assert config == codec.decode(WrappingConfig, codec.encode(config))
