"""The profile, read as data. The system tests try it on a kernel."""

import errno
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtimes.engine import seccomp
from runtimes.engine.seccomp import profile, profile_json
from runtimes.engine.shim import check_seccomp

_DENIED = """
_sysctl acct add_key adjtimex afs_syscall bpf chroot clock_adjtime clock_settime clone3 create_module delete_module
fanotify_init fanotify_mark finit_module fsconfig fsmount fsopen fspick get_kernel_syms get_mempolicy getpmsg
init_module io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit io_uring_enter io_uring_register
io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl listmount listns lookup_dcookie lsm_get_self_attr
lsm_list_modules lsm_set_self_attr mbind migrate_pages modify_ldt mount mount_setattr move_mount move_pages nfsservctl
open_by_handle_at open_tree open_tree_attr perf_event_open pidfd_getfd pivot_root process_madvise process_mrelease
process_vm_readv process_vm_writev ptrace putpmsg query_module quotactl quotactl_fd reboot request_key security
set_mempolicy set_mempolicy_home_node setdomainname sethostname setns settimeofday socketcall statmount stime swapoff
swapon sysfs syslog tuxcall umount umount2 unshare uselib uretprobe userfaultfd ustat vhangup vm86 vm86old vserver
"""
DENIED = _DENIED.split()
"""Every call of Linux up to 6.18 that a sandbox is denied, with any arguments."""

ALLOWED = (Path(__file__).parent / "golden" / "calls.txt").read_text().split()
"""Every call that a sandbox is allowed, with any arguments."""

CONDITIONAL = ["clone", "personality", "socket", "socketpair"]


def _met(condition: Mapping[str, Any], values: Sequence[int]) -> bool:
    """A comparison, as libseccomp defines it."""
    value = values[condition["index"]]
    match condition["op"]:
        case "SCMP_CMP_EQ":
            return bool(value == condition["value"])
        case "SCMP_CMP_MASKED_EQ":
            return bool(value & condition["value"] == condition["valueTwo"])
    raise AssertionError(condition["op"])


def outcome(name: str, *values: int) -> str | int:
    """Return the kernel's verdict on a call under the profile: `allow`, or the error that it returns."""
    arguments = (*values, *(0,) * (6 - len(values)))
    found = profile()
    rules = [
        rule
        for rule in found["syscalls"]
        if name in rule["names"] and all(_met(condition, arguments) for condition in rule["args"])
    ]
    actions = {(rule["action"], rule.get("errnoRet", errno.EPERM)) for rule in rules}
    assert len(actions) <= 1, "rules that contradict each other"
    action, number = actions.pop() if actions else (found["defaultAction"], found.get("defaultErrnoRet", errno.EPERM))
    return {"SCMP_ACT_ALLOW": "allow", "SCMP_ACT_ERRNO": int(number)}[action]


@pytest.mark.parametrize("name", DENIED)
def test_a_call_that_is_a_door_is_refused_with_any_arguments(name: str) -> None:
    """No rule of the profile allows it. Two calls report that they do not exist, so that programs use others."""
    expected = errno.ENOSYS if name in ("clone3", "io_setup") else errno.EPERM
    assert {expected} == {outcome(name, *(value,) * 6) for value in (0, 1, 2, 0xFFFFFFFF)}
    assert [] == [
        rule for rule in profile()["syscalls"] if name in rule["names"] and rule["action"] != "SCMP_ACT_ERRNO"
    ]


def test_the_calls_that_are_allowed_are_these() -> None:
    """A call that is added to the profile, or removed, changes this table."""
    rules = profile()["syscalls"]
    plain = [
        name for rule in rules if rule["action"] == "SCMP_ACT_ALLOW" and not rule["args"] for name in rule["names"]
    ]
    assert sorted(ALLOWED) == sorted(plain)
    assert {"allow"} == {outcome(name, value) for name in ALLOWED for value in (0, 1)}
    named = {name for rule in rules for name in rule["names"]}
    assert {*ALLOWED, *CONDITIONAL, "clone3", "io_setup"} == named
    assert not set(ALLOWED) & set(DENIED)


def test_what_is_not_named_is_refused() -> None:
    assert profile()["defaultAction"] == "SCMP_ACT_ERRNO"
    assert outcome("a_call_of_tomorrow") == errno.EPERM


@pytest.mark.parametrize("name", ["socket", "socketpair"])
def test_each_family_of_sockets_is_judged(name: str) -> None:
    """Type and protocol count only for AF_NETLINK, of which NETLINK_ROUTE (0) is allowed."""
    unix, inet, inet6, netlink = 1, 2, 10, 16
    for family in (*range(64), 1 << 32 | unix):
        for kind in (1, 2, 3, 5, 0x80801):
            for protocol in range(25):
                allowed = family == unix
                if name == "socket":
                    allowed |= family in (inet, inet6) or (family == netlink and protocol == 0)
                assert ("allow" if allowed else errno.EPERM) == outcome(name, family, kind, protocol)


NAMESPACES = {
    "NEWNS": 0x20000,
    "NEWCGROUP": 0x2000000,
    "NEWUTS": 0x4000000,
    "NEWIPC": 0x8000000,
    "NEWUSER": 0x10000000,
    "NEWPID": 0x20000000,
    "NEWNET": 0x40000000,
}
THREAD = 0x3D0F00  # The call with which libc starts a thread,
FORK = 0x1200011  # and a child process.


@pytest.mark.parametrize("flag", NAMESPACES.values(), ids=NAMESPACES)
def test_no_clone_makes_a_namespace(flag: int) -> None:
    for others in (0, 0x11, THREAD, FORK, sum(NAMESPACES.values()), 0xFFFFFFFF):
        assert outcome("clone", others | flag) == errno.EPERM


def test_a_clone_that_makes_no_namespace_is_allowed() -> None:
    rest = [1 << bit for bit in range(32) if not 1 << bit & sum(NAMESPACES.values())]
    assert {"allow"} == {outcome("clone", flags) for flags in (0, 0x11, THREAD, FORK, 0x4111, sum(rest), *rest)}


def test_only_personalities_without_a_weakness_are_allowed() -> None:
    """PER_LINUX and PER_LINUX32, each with UNAME26, and the query of the present one. Not for example
    READ_IMPLIES_EXEC.
    """
    allowed = {0, 8, 0x20000, 0x20008, 0xFFFFFFFF}
    tried = {*range(32), *(1 << bit for bit in range(32)), *allowed, 0x20001, 0x40008, 0xFFFFFFFE}
    assert allowed == {value for value in tried if outcome("personality", value) == "allow"}


def test_four_kinds_of_sockets_can_be_opened() -> None:
    """Each condition is complete: an equality has one value."""
    rules = [rule for rule in profile()["syscalls"] if rule["names"] == ["socket"]]
    assert [
        [{"index": 0, "value": socket.AF_UNIX, "valueTwo": 0, "op": "SCMP_CMP_EQ"}],
        [{"index": 0, "value": socket.AF_INET, "valueTwo": 0, "op": "SCMP_CMP_EQ"}],
        [{"index": 0, "value": socket.AF_INET6, "valueTwo": 0, "op": "SCMP_CMP_EQ"}],
        [
            {"index": 0, "value": socket.AF_NETLINK, "valueTwo": 0, "op": "SCMP_CMP_EQ"},
            {"index": 2, "value": 0, "valueTwo": 0, "op": "SCMP_CMP_EQ"},
        ],
    ] == [rule["args"] for rule in rules]


def test_only_the_native_architecture_is_there() -> None:
    assert "architectures" not in profile()
    assert "archMap" not in profile()


def test_the_shim_takes_this_profile() -> None:
    check_seccomp(profile())


def test_the_json_is_always_the_same() -> None:
    assert json.dumps(profile(), separators=(",", ":"), sort_keys=True) == profile_json()
    assert profile() == json.loads(profile_json())


@pytest.mark.parametrize("name", ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"])
def test_a_family_has_the_number_of_the_kernel(name: str) -> None:
    assert int(getattr(socket, name)) == getattr(seccomp, name)
