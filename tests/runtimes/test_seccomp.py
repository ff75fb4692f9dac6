"""The profile, read as data; the system tests try it on a kernel."""

import json
import socket

from runtimes.oci_shim import check_seccomp
from runtimes.seccomp import profile, profile_json


def _allowed_without_arguments() -> set[str]:
    rules = profile()["syscalls"]
    return {name for rule in rules for name in rule["names"] if rule["action"] == "SCMP_ACT_ALLOW" and not rule["args"]}


def test_what_is_not_named_is_refused() -> None:
    assert profile()["defaultAction"] == "SCMP_ACT_ERRNO"


def test_no_door_of_the_kernel_is_open() -> None:
    doors = {
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
        "bpf",
        "unshare",
        "setns",
        "mount",
        "umount2",
        "move_mount",
        "fsopen",
        "fsmount",
        "open_tree",
        "pivot_root",
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "keyctl",
        "add_key",
        "request_key",
        "userfaultfd",
        "perf_event_open",
        "init_module",
        "finit_module",
        "kexec_load",
        "open_by_handle_at",
        "socketcall",
        "pidfd_getfd",
        "clone3",
        "clone",
        "socket",
        "socketpair",
        "personality",
        "chroot",
        "reboot",
        "swapon",
        "syslog",
        "quotactl",
        "fanotify_init",
    }
    assert doors & _allowed_without_arguments() == set()


def test_four_kinds_of_sockets_can_be_opened() -> None:
    rules = [rule for rule in profile()["syscalls"] if rule["names"] == ["socket"]]
    assert [[(item["index"], item["value"]) for item in rule["args"]] for rule in rules] == [
        [(0, socket.AF_UNIX)],
        [(0, socket.AF_INET)],
        [(0, socket.AF_INET6)],
        [(0, socket.AF_NETLINK), (2, 0)],
    ]


def test_only_the_native_architecture_is_there() -> None:
    assert "architectures" not in profile()
    assert "archMap" not in profile()


def test_the_shim_takes_this_profile() -> None:
    check_seccomp(profile())


def test_the_json_is_always_the_same() -> None:
    assert profile_json() == profile_json()
    assert profile() == json.loads(profile_json())
