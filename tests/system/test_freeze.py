"""`vault freeze`, `revoke-all`, limits, selectors and missing secrets, on live flows. Judged at the far end.

It tests `vault/freeze.py`, `vault/budgets.py` and `vault/conditions.py` with real workers and hostd's report of images.
"""

import os
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from opensandbox.models.execd import RunCommandOpts
from opensandbox.sync.sandbox import SandboxSync

from testbed.census import daemons
from testbed.internet import API, STATUS, Internet, received_field
from testbed.stack import IMAGE, Stack
from tests.conftest import ON_RUNC
from tests.stacks import VAULTD, removed
from tests.system.test_create_and_delete import until
from tests.system.test_snapshots import closing_manager, ready, restore
from vault.client import AdminClient
from vault.conditions import Selectors, UseLimits
from vault.grants import SecretBinding
from vault.secret import Secret
from wire.api.vaultd import Used

pytestmark = [pytest.mark.system, pytest.mark.faults]

LIMIT = 1.0
"""Seconds in which a freeze or a revocation takes effect."""
MARGIN = 0.1
"""Until the server of the test internet notices the end of a connection: it writes to a stream every 0.05 s."""


@pytest.fixture(name="vault")
async def _vault(stack: Stack) -> AsyncIterator[AdminClient]:
    client = await AdminClient.connect(stack.run / "vault.sock", VAULTD)
    yield client
    await client.close()


def sandbox_of(stack: Stack, runtime: str, policy: str, **options: Any) -> AbstractContextManager[SandboxSync]:
    return removed(stack.create(runtime, policy=policy, **options))


def asked(sandbox: SandboxSync, host: str, path: str) -> str:
    """Return status and page of a request, without a word of curl."""
    done = sandbox.commands.run(f"curl -sS --max-time 20 -w ' %{{http_code}}' https://{host}{path} 2>&1")
    return done.text.replace("\n", " ").strip()


def ends(internet: Internet, mark: str) -> list[float]:
    """Return when the connections that carried `mark` ended at their server."""
    return [note["at"] for note in internet.notes() if mark in note.get("heard", "")]


def arrived(internet: Internet, mark: str) -> list[dict[str, Any]]:
    return [note for note in internet.notes() if mark in note.get("target", "")]


@pytest.mark.timed
@pytest.mark.parametrize("runtime", ON_RUNC)
@pytest.mark.parametrize("action", ["freeze", "revoke_all"])
async def test_live_flows_with_a_secret_end_within_a_second_and_others_go_on(
    stack: Stack, internet: Internet, vault: AdminClient, runtime: str, action: str
) -> None:
    """A stream that is under way, and an idle connection that carried the secret. The sandbox's other flow stays."""
    marks = {name: f"{name}-{secrets.token_hex(8)}" for name in ("stream", "quiet", "plain", "after")}
    with sandbox_of(stack, runtime, "agents") as sandbox:
        ident = str(sandbox.id)
        stream = f"curl -sSN https://{API}/v1/stream/{marks['stream']} >/tmp/stream 2>/tmp/stream-error"
        stay = "import http.client as h, time\nc = h.HTTPSConnection({!r})\nfor n in range(400):\n"
        stay += "    c.request('GET', '/{}')\n    c.getresponse().read()\n    time.sleep(0.05)\n"
        sandbox.files.write_file("/tmp/stay.py", stay.format(STATUS, marks["plain"]))
        for command in (stream, "python3 /tmp/stay.py"):
            sandbox.commands.run(command, opts=RunCommandOpts(background=True))
        assert asked(sandbox, API, f"/v1/quiet/{marks['quiet']}").endswith("200")
        assert until(lambda: arrived(internet, marks["stream"]) and arrived(internet, marks["plain"]))
        assert [] == ends(internet, marks["stream"]) + ends(internet, marks["quiet"])
        try:
            began = time.time()
            revoked = await getattr(vault, action)(sandbox=ident)
            answered = time.time()
            assert until(lambda: ends(internet, marks["stream"]) and ends(internet, marks["quiet"]), 10)
            cut = [*ends(internet, marks["stream"]), *ends(internet, marks["quiet"])]
            after = asked(sandbox, API, f"/v1/quiet/{marks['after']}")
            plain = len(arrived(internet, marks["plain"]))
            assert until(lambda: len(arrived(internet, marks["plain"])) > plain + 3, 10)
        finally:
            if action == "freeze":
                await vault.unfreeze(sandbox=ident)
        assert [] == [at - began for at in cut if not 0 <= at - began <= LIMIT + MARGIN]
        assert (1, 0) == (revoked.confirmed, revoked.cut_off)
        assert answered - began <= LIMIT
        if action == "freeze":
            assert "Not sent: the operator has frozen the secret api-token" in after
            assert after.endswith("503")
            assert [] == arrived(internet, marks["after"])
            assert asked(sandbox, API, f"/v1/quiet/{marks['after']}").endswith("200")
        else:
            assert after.endswith("200")  # the grant stays: the worker gets a new lease
        assert 1 == len(arrived(internet, marks["after"]))


async def test_a_freeze_outlives_vaultd_and_only_its_end_ends_it(
    stack: Stack, internet: Internet, vault: AdminClient
) -> None:
    """Everything is frozen by the command line. Requests without secrets go on; `vault list` shows the freeze."""
    mark = secrets.token_hex(8)
    with sandbox_of(stack, "runc", "agents") as sandbox:
        assert "every secret is frozen" in stack.sallyport("vault", "freeze")
        try:
            former = daemons(stack)["vault.vaultd"]
            os.kill(former, signal.SIGKILL)
            assert until(lambda: daemons(stack).get("vault.vaultd", former) != former)
            assert until(lambda: "the operator has frozen" in asked(sandbox, API, f"/v1/quiet/{mark}"), 30)
            assert asked(sandbox, STATUS, f"/{mark}").endswith("200")
            assert stack.sallyport("vault", "list").startswith("FROZEN since ")
        finally:
            stack.sallyport("vault", "unfreeze")
        assert [STATUS] == [note["host"] for note in arrived(internet, mark)]
        assert asked(sandbox, API, f"/v1/quiet/{mark}").endswith("200")
        assert not stack.sallyport("vault", "list").startswith("FROZEN")


async def test_a_missing_secret_affects_only_its_rule_until_the_operator_adds_it(
    stack: Stack, internet: Internet, vault: AdminClient, values: Any
) -> None:
    mark = secrets.token_hex(8)
    with sandbox_of(stack, "runc", "unfulfilled") as sandbox:
        refused = asked(sandbox, API, f"/v1/quiet/{mark}")
        assert f"sallyport vault put unfulfilled-secret --host {API}" in refused
        assert refused.endswith("403")
        assert asked(sandbox, STATUS, f"/{mark}").endswith("200")
        assert [STATUS] == [note["host"] for note in arrived(internet, mark)]
        await vault.put("unfulfilled-secret", Secret(values.api), SecretBinding.make([API]))
        try:
            assert asked(sandbox, API, f"/v1/quiet/{mark}").endswith("200")
        finally:
            await vault.delete("unfulfilled-secret")


async def test_a_secret_is_sent_as_often_as_its_limit_says_and_for_the_sandboxes_it_is_for(
    stack: Stack, internet: Internet, vault: AdminClient
) -> None:
    """Requests are counted, not connections: two clients at once, each with one connection for all its requests."""
    value, marks = f"counted-{secrets.token_hex(16)}", [secrets.token_hex(8) for _ in range(3)]
    binding = SecretBinding.make([STATUS], selectors=Selectors.make({"team": "a"}, [IMAGE]), limits=UseLimits(uses=7))
    await vault.put("counted-token", Secret(value), binding)
    try:
        with (
            sandbox_of(stack, "runc", "counted", metadata={"team": "a"}) as sandbox,
            sandbox_of(stack, "runc", "counted", metadata={"team": "b"}) as other,
        ):
            assert "other metadata" in asked(other, STATUS, f"/{marks[0]}")
            urls = [" ".join(f"https://{STATUS}/{mark}/{number}" for number in range(5)) for mark in marks[1:]]
            said = sandbox.commands.run(
                f"(curl -sS {urls[0]} & curl -sS {urls[1]} & wait) 2>&1 | grep -c 'as often as its limits allow'"
            )
        assert "3" == said.text.strip()
        sent = [received_field(note, "Authorization") for mark in marks for note in arrived(internet, mark)]
        assert [f"Bearer {value}"] * 7 == sent
        assert {"counted-token": Used(7, 0)} == (await vault.listed()).used
    finally:
        await vault.delete("counted-token")


@pytest.mark.parametrize("protocol", ["--http1.1", "--http2"])
async def test_a_secret_is_sent_in_as_many_bytes_as_its_limit_says(
    stack: Stack, internet: Internet, vault: AdminClient, protocol: str
) -> None:
    """Of uploads at once as many arrive as the limit has room for. One of unknown length does not."""
    value, mark = f"counted-{secrets.token_hex(16)}", secrets.token_hex(8)
    binding = SecretBinding.make([STATUS], limits=UseLimits(sent=1_000_000))
    await vault.put("counted-token", Secret(value), binding)
    url = f"https://{STATUS}/{mark}"
    try:
        with sandbox_of(stack, "runc", "counted") as sandbox:
            curl = f"curl -sS {protocol} -o /tmp/said -w '%{{http_code}} '"
            said = sandbox.commands.run(
                f"head -c 300000 /dev/zero >/tmp/up; for n in 1 2 3 4 5; do {curl} -T /tmp/up {url}/up & done; wait"
            )
            assert ["200", "200", "200", "403", "403"] == sorted(said.text.split())
            streamed = sandbox.commands.run(f"echo x | {curl} -T - {url}/streamed; cat /tmp/said")
            assert "the length of this request is not known: send a Content-Length" in streamed.text
            assert sandbox.commands.run(f"{curl} {url}/small").text.startswith("200")
            assert sandbox.commands.run(f"{curl} -T /tmp/up {url}/up").text.startswith("403")
        sent = [note["target"] for note in arrived(internet, mark) if f"Bearer {value}" in str(note)]
        assert [f"/{mark}/small", *([f"/{mark}/up"] * 3)] == sorted(sent)
        used = (await vault.listed()).used["counted-token"]
        assert (0, True) == (used.uses, 900_000 < used.sent <= 1_000_000)
    finally:
        await vault.delete("counted-token")


async def test_a_restored_sandbox_has_no_image_for_the_vault(stack: Stack, vault: AdminClient) -> None:
    """Its files are those of a sandbox, not of the image that its source was started from."""
    binding = SecretBinding.make([STATUS], selectors=Selectors.make({}, [IMAGE]))
    await vault.put("counted-token", Secret(secrets.token_hex(16)), binding)
    mark = secrets.token_hex(8)
    with closing_manager(stack) as manager:
        try:
            with sandbox_of(stack, "runc", "counted") as source:
                assert asked(source, STATUS, f"/{mark}").endswith("200")
                snapshot = ready(manager, source)
            with removed(restore(stack, snapshot, "runc", "counted")) as restored:
                assert "other images" in asked(restored, STATUS, f"/{mark}")
            manager.delete_snapshot(snapshot)
        finally:
            await vault.delete("counted-token")
