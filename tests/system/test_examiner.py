"""Slots as the watch reads them, with real namespaces: what is read again, and what is not kept."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtimes.checks.examiner import Examiner, Item, Seen
from runtimes.net import netns, netstate, slots
from runtimes.net.plan import PLAN, SANDBOX_SYSCTLS, WATCHED_SYSCTLS

pytestmark = pytest.mark.system


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[slots.Slot]:
    made = slots.make(tmp_path, 0, PLAN)
    yield made
    assert () == slots.destroy(made)


async def _read(examiner: Examiner, item: Item) -> Seen:
    (seen,) = await examiner.read([item])
    if isinstance(seen, Exception):
        raise seen
    return seen


async def test_everything_is_read_once_and_then_only_what_changed(slot: slots.Slot) -> None:
    examiner = Examiner()
    first = await _read(examiner, Item(slot, pid=os.getpid()))
    assert first.gateway is not None
    assert first.sandbox is not None
    assert first.gateway_settings is not None
    assert netstate.facts(slot.gateway, slot.gateway_inode, WATCHED_SYSCTLS) == first.gateway | first.gateway_settings
    inside = netstate.facts(slot.sandbox, slot.sandbox_inode, tuple(SANDBOX_SYSCTLS))
    assert first.sandbox | (first.sandbox_settings or frozenset()) <= inside
    assert netns.inode(None) == first.process

    again = await _read(examiner, Item(slot, first.state, full=False))
    assert first.state == again.state
    assert (None,) * 6 == (
        again.gateway,
        again.sandbox,
        again.gateway_settings,
        again.sandbox_settings,
        again.counters,
        again.process,
    )


@pytest.mark.parametrize(
    "setting", ["net/ipv4/conf/gw0/proxy_arp", "net/ipv4/conf/gw0/rp_filter", "net/ipv4/ip_forward"]
)
async def test_a_change_of_the_links_own_settings_is_seen_without_a_request_for_settings(
    slot: slots.Slot, setting: str
) -> None:
    examiner = Examiner()
    first = await _read(examiner, Item(slot))
    netns.inside(
        slot.gateway, lambda: Path("/proc/sys", setting).write_text("1" if "rp_filter" not in setting else "0")
    )
    seen = await _read(examiner, Item(slot, first.state, full=False))
    assert first.gateway_settings is not None
    assert seen.gateway_settings is not None
    assert {f"setting {setting}"} <= {
        fact.rpartition(" is ")[0] for fact in seen.gateway_settings - first.gateway_settings
    }


async def test_a_call_keeps_no_namespace(slot: slots.Slot) -> None:
    """Its thread is back in that of the process, and stays there also after a slot that cannot be read."""
    examiner = Examiner()
    gone = slots.Slot(1, slot.sandbox, slot.gateway, slot.sandbox_inode + 1, slot.gateway_inode)
    seen, failed = await examiner.read([Item(slot), Item(gone)])
    assert isinstance(seen, Seen)
    assert isinstance(failed, netns.WrongNamespaceError)
    inodes = {os.stat(f"/proc/self/task/{task}/ns/net").st_ino for task in os.listdir("/proc/self/task")}
    assert {netns.inode(None)} == inodes
