"""The trust store that the HTTP clients of a test session share (tests/trust_store.py)."""

import ssl
from pathlib import Path

import httpx
import pytest
from opensandbox.config import ConnectionConfigSync


def context(client: httpx.Client) -> ssl.SSLContext:
    found: ssl.SSLContext = client._transport._pool._ssl_context  # type: ignore[attr-defined]
    return found


def test_clients_without_a_trust_store_of_their_own_share_one() -> None:
    own = ssl.create_default_context()
    with httpx.Client() as first, httpx.Client() as second, httpx.Client(verify=own) as third:
        assert context(first) is context(second)
        assert context(third) is own
        assert ssl.CERT_REQUIRED is context(first).verify_mode


def test_the_published_sdk_reads_it_once() -> None:
    transports = [ConnectionConfigSync().new_owned_transport() for _ in range(2)]
    first, second = (transport._inner._ssl_context for transport in transports)  # type: ignore[attr-defined]
    assert first is second is httpx.create_ssl_context()
    for transport in transports:
        transport.close()


def test_variables_of_the_environment_select_another_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with httpx.Client() as former:
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
        with httpx.Client() as other, httpx.Client(trust_env=False) as without:
            assert context(other) is not context(former)
            assert context(without) is not context(former)
