"""A dial does not reach an address of the gateway's own host, also if the host gets the address during the dial.

It tests `gateway/upstream.py` in a network namespace of its own, on a public-looking address.
"""

import asyncio
import contextlib
import subprocess
import sys
from ipaddress import IPv4Address

import pytest

from gateway.config import GatewayConfig, WorkerConstants
from gateway.dns.resolver import Resolver
from gateway.upstream import DialError, UpstreamDialler
from policy.load import load_text
from policy.selection import Selection
from tests.gateway.states import in_force

pytestmark = pytest.mark.system

PLACE = "93.184.216.34"
POLICY = f"""
version: 1
policies:
  one: {{rules: [{{id: box, address: {PLACE}}}]}}
"""


@pytest.mark.parametrize(
    ("when", "answer"),
    [("never", "connect 0"), ("before", "address-class:own 0"), ("during", "address-class:own 1")],
)
def test_an_own_address_is_not_dialled_whenever_the_host_got_it(when: str, answer: str) -> None:
    """The number is that of the connections that the host's server saw; one got no byte.

    `never` is the control: the address is allowed, has a route, and no host answers.
    """
    command = ["unshare", "--net", sys.executable, "-m", "tests.system.test_own_addresses", when]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (0, answer) == (done.returncode, done.stdout.strip()), done.stderr


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _get() -> None:
    _ip("address", "add", f"{PLACE}/32", "dev", "lo")


async def _dial(when: str) -> str:
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "out", "type", "veth", "peer", "name", "away")
    _ip("address", "add", "198.51.100.1/24", "dev", "out")
    _ip("link", "set", "out", "up")
    _ip("link", "set", "away", "up")
    _ip("route", "add", "default", "dev", "out")
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(serve, "0.0.0.0", 443)
    if when == "before":
        _get()

    async def announce(_address: object, _verdict: object) -> None:
        if when == "during":
            _get()

    policy, _ = Selection("one").compiled(load_text(POLICY))
    constants = WorkerConstants("", (), IPv4Address("192.0.2.2"))
    clock = asyncio.get_running_loop().time
    dialler = UpstreamDialler(Resolver((), clock), in_force(GatewayConfig("sbx-1", 1, policy, constants)), clock)
    try:
        connection = await dialler.dial_address(IPv4Address(PLACE), 443, announce)
    except DialError as error:
        rule = error.rule
    else:
        connection.sock.close()
        rule = "connected"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            while not seen:  # noqa: ASYNC110 - in this process nothing else happens
                await asyncio.sleep(0.01)
    server.close()
    return f"{rule} {len(seen)}" if not any(seen) else "bytes"


if __name__ == "__main__":
    print(asyncio.run(_dial(sys.argv[1])))
