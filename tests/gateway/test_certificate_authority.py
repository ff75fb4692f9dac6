"""Properties of `gateway.tls.authority`: a worker always has an authority that holds now and for the names it needs."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from gateway.tls.authority import Certificates
from tests.gateway.states import in_force
from vault.authority import INTERMEDIATE_LIFETIME, Root
from vault.client import VaultUnavailableError, WorkerAuthority

HOUR = timedelta(hours=1)


class Authority:
    """A lineage's real root that answers like vaultd, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)
        self.names = ["good.test"]
        self.away = False
        self.asked = asyncio.Event()
        self.times = 0
        self.root = Root.create(self.now - 24 * HOUR)
        self.certificates = Certificates(in_force(vault=self), lambda: self.now, look_seconds=0.001)

    async def intermediate(self) -> WorkerAuthority:
        self.times += 1
        self.asked.set()
        if self.away:
            raise VaultUnavailableError("away")
        issued = self.root.issue_intermediate(self.now, self.names)
        return WorkerAuthority(issued.certificate_pem, issued.chain_pem, issued.key_pem)

    async def again(self) -> None:
        """Wait for the next request."""
        self.asked.clear()
        await asyncio.wait_for(self.asked.wait(), 20)

    def chain(self, host: str = "good.test") -> list[x509.Certificate]:
        return x509.load_pem_x509_certificates(self.certificates.leaf(host).chain_pem)


@pytest.fixture
async def authority() -> AsyncIterator[Authority]:
    found = Authority()
    keeping = asyncio.create_task(found.certificates.keep())
    assert await found.certificates.ready("good.test")
    yield found
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def handshake(authority: Authority, tmp_path: Path, host: str = "good.test") -> None:
    """Connect a client that trusts the lineage's root to a server with the leaf. Raise the client's exception."""
    leaf = authority.certificates.leaf(host)
    (tmp_path / "leaf.pem").write_bytes(leaf.chain_pem + leaf.key_pem)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "leaf.pem")
    trusting = ssl.create_default_context(cadata=authority.root.certificate_pem)
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(ours, theirs, server_hostname=host)
    server = serving.wrap_bio(theirs, ours, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.getpeercert()


async def test_before_there_is_an_intermediate_nothing_is_signed() -> None:
    with pytest.raises(ValueError, match="no intermediate certificate yet"):
        Authority().certificates.leaf("good.test")


async def test_the_next_intermediate_comes_at_half_of_the_life(authority: Authority, tmp_path: Path) -> None:
    """Not before. A client trusts the leaves of both. A month uses many of them."""
    handshake(authority, tmp_path)
    first = authority.chain()[1]
    authority.now += INTERMEDIATE_LIFETIME / 2 - HOUR
    assert await authority.certificates.ready("good.test")
    assert 1 == authority.times
    for _ in range(60):
        authority.now += INTERMEDIATE_LIFETIME / 2 + HOUR
        await authority.again()
        assert await authority.certificates.ready("good.test")
        leaf, intermediate = authority.chain()
        assert leaf.not_valid_before_utc <= authority.now < leaf.not_valid_after_utc
        assert leaf.not_valid_after_utc <= intermediate.not_valid_after_utc <= authority.now + INTERMEDIATE_LIFETIME
    authority.now = datetime.now(UTC)
    await authority.again()
    assert await authority.certificates.ready("good.test")
    assert first != authority.chain()[1]
    handshake(authority, tmp_path)


@pytest.mark.parametrize("jump", [timedelta(days=30), timedelta(hours=-20), timedelta(minutes=-6)])
async def test_a_clock_that_is_set_brings_another_intermediate(authority: Authority, jump: timedelta) -> None:
    """Before the next flow is served. Nothing is signed with an intermediate that is not valid now."""
    authority.now += jump
    with pytest.raises(ValueError, match="is not valid now"):
        authority.certificates.leaf("good.test")
    assert await authority.certificates.ready("good.test")
    for certificate in authority.chain():
        assert certificate.not_valid_before_utc <= authority.now < certificate.not_valid_after_utc


async def test_while_the_vault_is_away_the_last_intermediate_signs_until_its_end(authority: Authority) -> None:
    authority.away = True
    authority.now += INTERMEDIATE_LIFETIME - HOUR
    await authority.again()
    assert authority.chain()[0].not_valid_after_utc <= authority.chain()[1].not_valid_after_utc
    authority.now += 2 * HOUR
    with pytest.raises(ValueError, match="is not valid now"):
        authority.certificates.leaf("good.test")
    authority.away = False
    assert await authority.certificates.ready("good.test")
    assert authority.chain()


async def test_a_name_that_policy_has_added_is_waited_for(authority: Authority, tmp_path: Path) -> None:
    """The first flow to the name gets a new intermediate. A name that vaultd does not know is not signed."""
    authority.names = ["good.test", "*.more.test"]
    with pytest.raises(ValueError, match="not for this host"):
        authority.certificates.leaf("a.more.test")
    assert await authority.certificates.ready("a.more.test")
    handshake(authority, tmp_path, "a.more.test")
    assert not await authority.certificates.ready("evil.test")
    handshake(authority, tmp_path)
