"""A sandbox of a pool equals a launched one: policy, secrets, variables, output, limits, removal. Before its claim no
program runs in it.

It tests `lifecycle/sandboxes/pools.py` and `lifecycle/proxy/handover.py`.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule
from opensandbox.sync.manager import SandboxManagerSync
from opensandbox.sync.sandbox import SandboxSync

from testbed.census import daemons, take
from testbed.internet import API, STATUS
from testbed.stack import IMAGE, Stack
from tests.conftest import ON_RUNSC
from tests.images import small
from tests.system.test_create_and_delete import settled, until

pytestmark = [pytest.mark.system, pytest.mark.images]

RESOURCE = {"cpu": "1", "memory": "256Mi"}


@pytest.fixture(scope="module", autouse=True)
def _warm(stack: Stack) -> None:
    """Docker and runsc keep some things of their first containers."""
    for runtime in ("runc", "runsc"):
        made = stack.create(runtime)
        made.kill()
        made.close()


class Api:
    """The routes of pools, which no SDK has."""

    def __init__(self, stack: Stack) -> None:
        headers = {"OPEN-SANDBOX-API-KEY": stack.api_key}
        self.client = httpx.Client(base_url=f"{stack.base}/v1", headers=headers, timeout=60, trust_env=False)

    def make(self, runtime: str, number: int, most: int = 8, image: str = IMAGE) -> None:
        """Make the pool `p`, and wait for its members."""
        container = {"image": image, "resources": {"limits": RESOURCE}}
        body = {
            "name": "p",
            "template": {"spec": {"containers": [container], "runtimeClassName": runtime}},
            "capacitySpec": {"bufferMin": number, "bufferMax": number, "poolMin": 0, "poolMax": most},
        }
        answer = self.client.post("/pools", json=body)
        assert 201 == answer.status_code, answer.text
        self.full(number)

    def full(self, number: int) -> None:
        """Wait until a number of members is idle."""
        assert until(lambda: self.client.get("/pools/p").json()["status"]["available"] == number)


@pytest.fixture
def api(stack: Stack) -> Iterator[Api]:
    """Return the API. The pool `p` and all it had are gone afterwards."""
    before = take(stack)
    made = Api(stack)
    yield made
    made.client.delete("/pools/p")
    made.client.close()
    assert {} == settled(stack, before)


def claimed(stack: Stack, image: str = IMAGE, **options: Any) -> SandboxSync:
    """Claim a member with the SDK, which always names an image and limits."""
    extensions = {"poolRef": "p", **options.pop("extensions", {})}
    return SandboxSync.create(
        image, connection_config=stack.connection, extensions=extensions, resource=RESOURCE, **options
    )


def known(stack: Stack) -> set[str]:
    """Return the ids of all sandboxes of the host. Other modules keep some on the same server."""
    return {one.sandbox for one in stack.sandboxes()}


def ended(sandbox: SandboxSync) -> None:
    sandbox.kill()
    sandbox.close()


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_claimed_sandbox_has_all_of_its_call(stack: Stack, api: Api, runtime: str) -> None:
    """Variables, entrypoint, metadata and policy. The policy is in force when the entrypoint begins."""
    api.make(runtime, 1)
    policy = NetworkPolicy(defaultAction="deny", egress=[NetworkRule(action="allow", target=STATUS)])
    allowed = f"curl -sS -o /dev/null -w %{{http_code}} https://{STATUS}/ >/tmp/allowed"
    look = f"{allowed}; curl -sS https://{API}/ 2>/tmp/denied"
    entrypoint = ["sh", "-c", f'{look}; echo "$GIVEN $OPENSANDBOX_ID" >/tmp/began; exec tail -f /dev/null']
    made = claimed(stack, env={"GIVEN": "a b"}, metadata={"team": "x"}, entrypoint=entrypoint, network_policy=policy)
    try:
        assert until(lambda: "" != made.commands.run("cat /tmp/began 2>/dev/null; true").text)
        assert f"a b {made.id}" == made.commands.run("cat /tmp/began").text
        assert "200" == made.commands.run("cat /tmp/allowed").text
        assert "" != made.commands.run("cat /tmp/denied").text
        shown = made.get_info()
        assert ({"team": "x"}, entrypoint) == (shown.metadata, shown.entrypoint)
        assert ("a b", str(made.id)) == (made.commands.run("echo $GIVEN").text, made.commands.run("hostname").text)
    finally:
        ended(made)


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_the_output_of_a_claimed_sandbox_is_complete_and_shows_no_value_of_its_call(
    stack: Stack, api: Api, runtime: str
) -> None:
    """Nothing of the time before the claim. Also after hostd was killed, and after the removal."""
    others = known(stack)
    api.make(runtime, 1)
    (member,) = known(stack) - others
    container, secret = stack.container(member), "canary-of-a-claim"
    before = stack.docker("logs", container)
    assert ("", "") == (before.stdout, before.stderr)
    script = (
        'echo "first $GIVEN"; sleep 0.5; echo second >&2; until test -e /tmp/go; do sleep 0.1; done; echo "last $GIVEN"'
    )
    made = claimed(stack, env={"GIVEN": secret}, entrypoint=["sh", "-c", f"{script}; exec sleep 600"])
    first = "first [env GIVEN]\nsecond"
    try:
        assert until(lambda: first == logs(stack, member)), logs(stack, member)
        assert secret in stack.docker("logs", container).stdout
        os.kill(daemons(stack)["runtimes.hostd"], signal.SIGKILL)
        assert until(lambda: stack.healthy() and first == logs(stack, member))
        assert until(lambda: not made.commands.run("touch /tmp/go").error)
        assert until(lambda: f"{first}\nlast [env GIVEN]" == logs(stack, member))
    finally:
        ended(made)
    assert f"{first}\nlast [env GIVEN]" == logs(stack, member)


def logs(stack: Stack, sandbox: str) -> str:
    """Return the output of a sandbox, or why there is none now."""
    with SandboxManagerSync.create(stack.connection) as manager:
        try:
            return str(manager.get_diagnostic_logs(sandbox, "all").content)
        except SandboxApiException as error:
            return str(error)


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_member_of_a_replaced_image_is_given_to_no_claim(
    stack: Stack, api: Api, runtime: str, tmp_path: Path
) -> None:
    """A claim gets a sandbox of the new image. After the removal of the image it gets none."""
    name = "pools/image:1"
    tars = [tmp_path / f"{number}.tar" for number in range(2)]
    for number, path in enumerate(tars):
        image = small()
        image.changes = {"author": f"{runtime}-{number}"}
        path.write_bytes(image.saved(name))
    others = known(stack)
    stack.sallyport("image", "add", str(tars[0]))
    try:
        api.make(runtime, 2, image=name)
        former = known(stack) - others
        stack.sallyport("image", "add", str(tars[1]), "--replace")
        made = claimed(stack, image=name)
        try:
            assert made.id not in former
            assert "ok" == made.commands.run("echo ok").text
        finally:
            ended(made)
        assert until(lambda: not former & known(stack))
        api.full(2)
    finally:
        stack.sallyport("image", "remove", name)
    with pytest.raises(SandboxApiException) as refused:
        claimed(stack, image=name)
    assert 400 == refused.value.status_code
    assert until(lambda: others == known(stack))


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_no_program_runs_before_a_claim(stack: Stack, api: Api, runtime: str) -> None:
    """A member has execd and nothing else. A claimed one has its entrypoint too: the control."""
    others = known(stack)
    api.make(runtime, 1)
    (member,) = known(stack) - others
    container = stack.container(member)

    def programs() -> set[str]:
        loop = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | cut -d' ' -f1; done"
        shown = stack.docker("exec", container, "sh", "-c", loop)
        assert 0 == shown.returncode, shown.stderr
        return {line.rpartition("/")[2] for line in shown.stdout.split()} - {"sh", "cut", "tr"}

    assert {"execd"} == programs()
    made = claimed(stack)
    try:
        assert member == made.id
        assert {"execd", "tail"} == programs()
    finally:
        ended(made)


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_an_entrypoint_that_fails_is_the_answer_of_the_claim(stack: Stack, api: Api, runtime: str) -> None:
    """Nothing of the member is left, and the pool makes another one."""
    api.make(runtime, 1, most=1)
    with pytest.raises(SandboxApiException) as refused:
        claimed(stack, entrypoint=["/no/such-program"])
    assert "exit code 127" in str(refused.value)
    api.full(1)


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_burst_of_claims_gets_each_member_once(stack: Stack, api: Api, runtime: str) -> None:
    """The others are refused with 429. No two sandboxes share a machine id or a token."""
    api.make(runtime, 3, most=3)
    with ThreadPoolExecutor(5) as threads:
        futures = [threads.submit(claimed, stack) for _ in range(5)]
    made = [future.result() for future in futures if future.exception() is None]
    try:
        assert (3, 3) == (len(made), len({one.id for one in made}))
        assert 3 == len({one.commands.run("cat /etc/machine-id").text for one in made})
        assert 3 == len({str(one.get_endpoint(44772).headers) for one in made})
        refused = [str(future.exception()) for future in futures if future.exception() is not None]
        assert all("no idle sandbox" in text for text in refused), refused
    finally:
        for one in made:
            ended(one)


def test_a_dead_serve_keeps_its_pools(stack: Stack, api: Api) -> None:
    """Members stay idle through the restart, and a claim afterwards works."""
    others = known(stack)
    api.make("runc", 1)
    (member,) = known(stack) - others
    os.kill(daemons(stack)["lifecycle.serve"], signal.SIGKILL)
    assert until(stack.healthy)
    made = claimed(stack)
    try:
        assert (member, "ok") == (made.id, made.commands.run("echo ok").text)
    finally:
        ended(made)


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_claim_takes_less_time_than_a_launch(stack: Stack, api: Api, runtime: str) -> None:
    """Medians of three in one run."""

    def seconds(make: Callable[[], SandboxSync]) -> float:
        began = time.monotonic()
        made = make()
        took = time.monotonic() - began
        ended(made)
        return took

    launches = [seconds(lambda: stack.create(runtime, policy=None, resource=RESOURCE)) for _ in range(3)]
    api.make(runtime, 1)
    claims = []
    for _ in range(3):
        claims.append(seconds(lambda: claimed(stack)))
        api.full(1)
    assert statistics.median(claims) < statistics.median(launches), (claims, launches)
