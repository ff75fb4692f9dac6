"""No kind of secret, and no value that is derived from one, is in any place of a response, in any coding and division.

A host can send back what it was not sent in this exchange, so the request of each case carries no secret.
"""

import gzip
from collections.abc import Callable
from dataclasses import replace

import brotli  # type: ignore[import-untyped]
import pytest
import zstandard

from policy.compiled import secrets_to
from tests.gateway.exchange_cases import HOST, OPEN, PLAIN_CONNECTED, Case, split
from tests.gateway.test_exchange import drive
from tests.kinds import KINDS, Kind

CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
AROUND = b"<p>before "
LEAKS = [
    pytest.param(kind, secret, text, id=f"{kind.name}-{name}-{secret.partition(':')[0]}")
    for kind in KINDS
    for secret in kind.names
    for name, text in kind.revealing.items()
]
leaks = pytest.mark.parametrize(("kind", "secret", "text"), LEAKS)


def shown(kind: Kind, secret: str, **response: object) -> tuple[bytes, bool]:
    """Return all that the client got, and whether it was the server's whole response."""
    base = Case("any", PLAIN_CONNECTED, 200, decision=OPEN, uses=secrets_to(kind.policy(secret), HOST))
    assert base.uses
    seen = drive(replace(base, secret=kind.value, **response))  # type: ignore[arg-type]
    lines = [name + b": " + value for name, value in (*seen.headers, *seen.trailers)]
    return b"\n".join((*lines, seen.body)), seen.whole and seen.status == 200


def revealed(kind: Kind, found: bytes) -> list[str]:
    """Return the names of the texts that reveal the secret in what was shown, also their middles."""
    lower = found.lower()
    return [name for name, text in kind.revealing.items() if text in found or text[2:-2].lower() in lower]


@leaks
def test_no_header_or_trailer_shows_it(kind: Kind, secret: str, text: bytes) -> None:
    for fields in ({"answer": ((b"X-Echo", text),)}, {"trailers": ((b"X-Sum", text),)}):
        for http2 in (False, True):
            if http2:
                fields = {key: tuple((name.lower(), value) for name, value in found) for key, found in fields.items()}
            found, whole = shown(kind, secret, http2=http2, **fields)
            assert whole
            assert [] == revealed(kind, found)
            assert b"x-echo" in found.lower() or b"x-sum" in found.lower()


@pytest.mark.slow
@leaks
def test_no_body_shows_it_wherever_it_is_divided(kind: Kind, secret: str, text: bytes) -> None:
    body = AROUND + text + b" after</p>"
    for at in range(len(AROUND), len(AROUND) + len(text) + 1, max(1, len(text) // 12)):
        found, whole = shown(kind, secret, pieces=split(body, at))
        assert whole
        assert [] == revealed(kind, found)
        assert AROUND in found
        assert found.endswith(b"after</p>")
    single = tuple(body[at : at + 1] for at in range(len(body)))
    assert [] == revealed(kind, shown(kind, secret, pieces=single)[0])


@pytest.mark.parametrize("coding", CODINGS)
@leaks
def test_no_encoded_body_shows_it(kind: Kind, secret: str, text: bytes, coding: str) -> None:
    body = CODINGS[coding](AROUND + text + b" after</p>")
    answer = ((b"Content-Encoding", coding.encode()),)
    found, whole = shown(kind, secret, answer=answer, pieces=split(body, len(body) // 3, len(body) // 2))
    assert whole
    assert [] == revealed(kind, found)
    assert AROUND in found
    assert found.endswith(b"after</p>")


def test_the_texts_are_shown_by_a_host_without_a_secret() -> None:
    """The control: each case above would show its text."""
    for kind in KINDS:
        for text in kind.revealing.values():
            seen = drive(Case("any", PLAIN_CONNECTED, 200, decision=OPEN, uses=(), pieces=(AROUND + text,)))
            assert text in seen.body
