"""The shim's verdicts on arguments and bundles. The system tests run it under Docker."""

import copy
import fcntl
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtimes.engine import listeners, shim, user_namespace
from runtimes.engine.profile import RUNSC
from runtimes.engine.seccomp import profile
from runtimes.engine.shim import LaunchRefused, create_target, harden, main, split_arguments

ID = "a" * 64
_HOOK = {"path": "/proc/9/exe", "args": ["libnetwork-setkey", "-exec-root=/run", ID, "b"]}


def plan(**changes: Any) -> dict[str, Any]:
    return {
        "container": ID,
        "sandbox": "sbx-1",
        "runtime": "runc",
        "netns": "/proc/self/ns/net",
        "netns_inode": os.stat("/proc/self/ns/net").st_ino,
        "binds": {"/etc/hosts": ["/run/hosts", True]},
        "volumes": {},
        "room": None,
        "isolation": False,
        "users": 1879048192,
    } | changes


MASKED = (
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


def bundle() -> dict[str, Any]:
    """A bundle as Docker 20.10 writes it, shortened."""
    capabilities = ["CAP_CHOWN", "CAP_SETUID"]
    return {
        "process": {
            "noNewPrivileges": True,
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "ro"]},
            {
                "destination": "/etc/hosts",
                "type": "bind",
                "source": "/run/hosts",
                "options": ["rbind", "ro", "rprivate"],
            },
        ],
        "hooks": {"prestart": [_HOOK]},
        "linux": {
            "seccomp": profile(),
            "sysctl": {"net.ipv4.ping_group_range": "0 2147483647"},
            "namespaces": [{"type": name} for name in ("mount", "network", "uts", "pid", "ipc")],
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
            "resources": {
                "devices": [
                    {"allow": False, "access": "rwm"},
                    {"allow": True, "type": "c", "access": "m"},
                    {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rwm"},
                ]
            },
        },
    }


def _reason(judge: Callable[..., object], *given: Any) -> str:
    """Return the complete reason of a refusal. An operator sees it in Docker's error."""
    with pytest.raises(LaunchRefused) as refusal:
        judge(*given)
    return str(refusal.value)


def test_the_namespace_is_set_and_only_dockers_hook_is_gone() -> None:
    config = bundle()
    harden(config, plan(), "runc")
    network = [entry for entry in config["linux"]["namespaces"] if entry["type"] == "network"]
    assert [{"type": "network", "path": "/proc/self/ns/net"}] == network
    assert config["hooks"] == {}
    assert config["linux"]["sysctl"]["net.ipv4.ping_group_range"] == "1 0"


@pytest.mark.parametrize("capability", ["CAP_SYS_ADMIN", "CAP_SETPCAP"])
def test_mounting_is_for_planned_sandboxes_with_a_kernel_of_their_own(capability: str) -> None:
    config = bundle()
    config["process"]["capabilities"]["bounding"].append(capability)
    unplanned = _reason(harden, copy.deepcopy(config), plan(), "runsc")
    assert f"bounding capabilities beyond the sandbox's: {capability}" == unplanned
    shared = _reason(harden, copy.deepcopy(config), plan(isolation=True), "runc")
    assert "only a sandbox with a kernel of its own may mount" == shared
    harden(config, plan(isolation=True), "runsc")


def test_planned_mounts_carry_no_privilege_and_nothing_propagates() -> None:
    config = bundle()
    harden(config, plan(), "runc")
    assert ["rbind", "ro", "rprivate", "nosuid", "nodev"] == config["mounts"][2]["options"]
    assert "rprivate" == config["linux"]["rootfsPropagation"]


def _changed(path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(bundle())
    at: Any = config
    *way, last = path.split("/")
    for step in way:
        at = at[int(step)] if isinstance(at, list) else at[step]
    if isinstance(at, list):
        at[int(last)] = value
    else:
        at[last] = value
    return config


UNPLANNED = "namespaces must be each once: ipc, mount, network, pid, uts"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("process/noNewPrivileges", False, "noNewPrivileges is not set"),
        (
            "process/capabilities/bounding",
            ["CAP_CHOWN", "CAP_SYS_TIME", "CAP_NET_ADMIN"],
            "bounding capabilities beyond the sandbox's: CAP_NET_ADMIN, CAP_SYS_TIME",
        ),
        ("process/capabilities/ambient", ["CAP_NET_RAW"], "ambient capabilities beyond the sandbox's: CAP_NET_RAW"),
        ("process", None, "the bundle has no linux or process part"),
        ("linux", None, "the bundle has no linux or process part"),
        ("linux/seccomp", None, "no seccomp allowlist"),
        ("linux/seccomp", {"defaultAction": "SCMP_ACT_ALLOW"}, "no seccomp allowlist"),
        ("linux/seccomp/syscalls/0/names/0", "io_uring_setup", "seccomp allows io_uring_setup"),
        ("linux/seccomp/syscalls/0/names", ["read", "setns", "bpf"], "seccomp allows bpf, setns"),
        ("linux/seccomp/syscalls/1/args", [], "seccomp allows sockets of other families"),
        ("linux/seccomp/syscalls/1/args/0/value", 40, "seccomp allows sockets of other families"),
        (
            "linux/seccomp/architectures",
            ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
            "seccomp allows more than the native architecture",
        ),
        ("linux/devices", [{"path": "/dev/kvm"}], "the bundle brings device nodes"),
        ("linux/resources", {}, "devices are not denied first"),
        ("linux/resources/devices/0", {"allow": True, "access": "rwm"}, "devices are not denied first"),
        ("linux/resources/devices/0", {"allow": False, "access": "rwm", "major": 1}, "devices are not denied first"),
        ("linux/resources/devices/0", {"allow": False, "access": "rw"}, "devices are not denied first"),
        ("linux/resources/devices/0", {"allow": False, "access": "rwm", "type": "c"}, "devices are not denied first"),
        ("linux/resources/devices/0", {"allow": False, "access": "rwm", "minor": 3}, "devices are not denied first"),
        ("linux/resources/devices/2/minor", 1, "a device is allowed"),
        ("linux/resources/devices/2/type", "b", "a device is allowed"),
        ("linux/maskedPaths", [], "masked and read-only paths are missing"),
        ("linux/readonlyPaths", None, "masked and read-only paths are missing"),
        ("linux/rootfsPropagation", "rshared", "the root file system propagates mounts"),
        ("linux/namespaces", [{"type": name} for name in ("mount", "network", "uts", "pid")], UNPLANNED),
        (
            "linux/namespaces",
            [{"type": name} for name in ("mount", "network", "network", "uts", "pid", "ipc")],
            UNPLANNED,
        ),
        (
            "linux/namespaces/1",
            {"type": "network", "path": "/proc/1/ns/net"},
            "a namespace is shared with something else",
        ),
        ("linux/namespaces/3", {"type": "pid", "path": "/proc/1/ns/pid"}, "a namespace is shared with something else"),
        ("mounts/1/options", ["rw"], "mount on /sys is not planned"),
        ("mounts/1/options", ["ro", "rw"], "mount on /sys is not planned"),
        ("mounts/2/source", "/etc/hosts", "mount on /etc/hosts is not planned"),
        ("mounts/2/options", ["rbind"], "mount on /etc/hosts is not read-only"),
        ("mounts/2/options", ["rbind", "ro", "rw"], "mount on /etc/hosts is not read-only"),
        ("mounts/2/options", ["rbind", "ro", "suid"], "mount on /etc/hosts has devices or set-user-id bits"),
        ("mounts/2/options", ["rbind", "ro", "dev"], "mount on /etc/hosts has devices or set-user-id bits"),
        ("mounts/2/options", ["rbind", "ro", "rshared"], "mount on /etc/hosts propagates"),
        ("hooks/prestart/0/args", ["other"], "a prestart hook"),
        ("hooks/poststart", [_HOOK], "a poststart hook"),
        ("annotations", {"dev.gvisor.flag.network": "host"}, "an annotation sets runtime flags"),
    ],
)
def test_a_bundle_that_is_softer_than_ordered_is_refused(path: str, value: Any, reason: str) -> None:
    assert reason == _reason(harden, _changed(path, value), plan(), "runc")


KERNEL_MOUNTS = {
    "/proc": ("proc", ["nosuid", "noexec", "nodev"]),
    "/dev": ("tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
    "/dev/pts": ("devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
    "/dev/shm": ("tmpfs", ["nosuid", "noexec", "nodev", "mode=1777", "size=67108864"]),
    "/dev/mqueue": ("mqueue", ["nosuid", "noexec", "nodev"]),
    "/sys": ("sysfs", ["nosuid", "noexec", "nodev", "ro"]),
    "/sys/fs/cgroup": ("cgroup", ["ro", "nosuid", "noexec", "nodev"]),
}
"""The mounts of Docker without a file of the host, with their types and options."""


def _with_mount(kind: str, destination: str, options: list[str] | None) -> dict[str, Any]:
    config = bundle()
    config["mounts"].append({"destination": destination, "type": kind, "source": kind, "options": options})
    return config


@pytest.mark.parametrize("destination", KERNEL_MOUNTS)
def test_a_mount_without_a_file_of_the_host_is_taken_unchanged(destination: str) -> None:
    kind, options = KERNEL_MOUNTS[destination]
    config = _with_mount(kind, destination, list(options))
    harden(config, plan(), "runc")
    assert options == config["mounts"][-1]["options"]


@pytest.mark.parametrize("destination", KERNEL_MOUNTS)
@pytest.mark.parametrize("word", ["bind", "rbind"])
def test_a_bind_mount_is_planned_whatever_its_type_is(destination: str, word: str) -> None:
    """runc and runsc ignore the type of a mount with one of these options."""
    kind, options = KERNEL_MOUNTS[destination]
    config = _with_mount(kind, destination, [*options, word])
    assert f"mount on {destination} is not planned" == _reason(harden, config, plan(), "runc")


def test_a_planned_bind_mount_is_inert_whatever_its_type_is() -> None:
    config = _changed("mounts/2/type", "none")
    harden(config, plan(), "runc")
    assert ["rbind", "ro", "rprivate", "nosuid", "nodev"] == config["mounts"][2]["options"]


@pytest.mark.parametrize(
    ("name", "path"), [*(("maskedPaths", path) for path in MASKED), *(("readonlyPaths", path) for path in READ_ONLY)]
)
def test_each_path_of_the_kernel_that_docker_covers_is_covered(name: str, path: str) -> None:
    config = bundle()
    config["linux"][name].remove(path)
    assert "masked and read-only paths are missing" == _reason(harden, config, plan(), "runc")
    config["linux"][name] += [path, "/proc/more"]
    harden(config, plan(), "runc")


@pytest.mark.parametrize("kind", ["sysfs", "cgroup"])
@pytest.mark.parametrize("options", [["nosuid", "rw"], ["nosuid"], [], None])
def test_a_writable_interface_of_the_kernel_is_refused(kind: str, options: list[str] | None) -> None:
    assert "mount on /sys/x is not planned" == _reason(harden, _with_mount(kind, "/sys/x", options), plan(), "runc")


@pytest.mark.parametrize("word", ["shared", "rshared", "slave", "rslave"])
def test_no_mount_propagates_in_either_direction(word: str) -> None:
    """Slave propagation is refused too, because a mount that the host makes later would appear inside."""
    mounted = _changed("mounts/2/options", ["rbind", "ro", word])
    assert "mount on /etc/hosts propagates" == _reason(harden, mounted, plan(), "runc")
    root = _changed("linux/rootfsPropagation", word)
    assert "the root file system propagates mounts" == _reason(harden, root, plan(), "runc")


@pytest.mark.parametrize("word", ["private", "rprivate", "", None])
def test_a_root_that_does_not_propagate_is_private_in_all_its_parts(word: str | None) -> None:
    config = _changed("linux/rootfsPropagation", word)
    harden(config, plan(), "runc")
    assert "rprivate" == config["linux"]["rootfsPropagation"]


def _allows(*names: str, arguments: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"names": list(names), "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def _judged(rule: Mapping[str, Any]) -> None:
    filtered = profile()
    filtered["syscalls"].append(rule)
    shim.check_seccomp(filtered)


_DOORS = """
add_key bpf delete_module fanotify_init finit_module fsmount fsopen init_module io_setup io_uring_enter
io_uring_register io_uring_setup kexec_file_load kexec_load keyctl mount move_mount open_by_handle_at open_tree
perf_event_open pidfd_getfd pivot_root process_vm_readv process_vm_writev ptrace request_key setns socketcall umount2
unshare userfaultfd clone3
"""
DOORS = _DOORS.split()


@pytest.mark.parametrize("name", DOORS)
def test_a_filter_that_allows_a_door_is_refused(name: str) -> None:
    """Alone, among others, under any action that is no refusal, and with a condition."""
    condition = {"index": 0, "value": 1, "valueTwo": 0, "op": "SCMP_CMP_EQ"}
    for rule in (_allows(name), _allows("read", name), _allows(name, arguments=[condition])):
        for action in ("SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE", "SCMP_ACT_NOTIFY"):
            assert f"seccomp allows {name}" == _reason(_judged, rule | {"action": action})
    _judged(_allows(name) | {"action": "SCMP_ACT_ERRNO"})


def _equal(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": 0, "op": "SCMP_CMP_EQ"}


@pytest.mark.parametrize("name", ["socket", "socketpair"])
def test_a_filter_that_opens_another_family_is_refused(name: str) -> None:
    """AF_UNIX, AF_INET, AF_INET6, and of AF_NETLINK protocol 0 are allowed. A rule must fix a family by equality."""
    open_ones = [[_equal(0, family)] for family in (1, 2, 10)] + [[_equal(0, 16), _equal(2, 0)]]
    for arguments in open_ones:
        _judged(_allows(name, arguments=arguments))
    closed = [[_equal(0, family)] for family in range(47) if family not in (1, 2, 10)]
    closed += [[_equal(0, 16), _equal(2, protocol)] for protocol in range(1, 24)]
    closed += [[], [_equal(1, 1)], [_equal(0, 17), _equal(1, 1)], [_equal(0, 16), _equal(1, 0)]]
    closed += [[{**_equal(0, 1), "op": op}] for op in ("SCMP_CMP_NE", "SCMP_CMP_GE", "SCMP_CMP_MASKED_EQ")]
    for arguments in closed:
        assert "seccomp allows sockets of other families" == _reason(_judged, _allows(name, arguments=arguments))


@pytest.mark.parametrize("name", ["socket", "socketpair", "clone", "read"])
@pytest.mark.parametrize("op", ["SCMP_CMP_EQ", "SCMP_CMP_NE"])
def test_a_filter_with_two_conditions_on_one_argument_is_refused(name: str, op: str) -> None:
    """runc allows a call that meets one of them."""
    first = _equal(0, 1) if name != "clone" else {"index": 0, "value": sum(NAMESPACES), "op": "SCMP_CMP_MASKED_EQ"}
    second = {**_equal(0, 17), "op": op}
    _judged(_allows(name, arguments=[first, _equal(1, 5)]))
    for arguments in ([first, second], [second, first], [_equal(1, 5), first, second]):
        assert "seccomp has several conditions on one argument" == _reason(_judged, _allows(name, arguments=arguments))


NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""


def test_a_filter_that_lets_clone_make_any_namespace_is_refused() -> None:
    whole = {"index": 0, "value": sum(NAMESPACES), "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    _judged(_allows("clone", arguments=[whole]))
    _judged(_allows("clone", arguments=[{"index": 0, "value": sum(NAMESPACES), "op": "SCMP_CMP_MASKED_EQ"}]))
    _judged(_allows("clone", arguments=[whole | {"value": 0xFFFFFFFF}]))
    changes: list[dict[str, Any]] = [{"value": sum(NAMESPACES) - flag} for flag in NAMESPACES]
    changes += [{"valueTwo": flag} for flag in NAMESPACES] + [{"index": 1}, {"op": "SCMP_CMP_EQ"}, {"value": 0}]
    wrong = [[whole | change] for change in changes] + [[{"index": 0, "op": "SCMP_CMP_MASKED_EQ"}], []]
    for arguments in wrong:
        assert "seccomp allows clone with namespaces" == _reason(_judged, _allows("clone", arguments=arguments))


@pytest.mark.parametrize("value", [None, [], "x", {}, {"defaultAction": "SCMP_ACT_LOG"}])
def test_what_is_no_allowlist_is_refused(value: Any) -> None:
    assert "no seccomp allowlist" == _reason(shim.check_seccomp, value)


def test_a_filter_of_one_architecture_is_taken() -> None:
    for architectures in (None, [], ["SCMP_ARCH_X86_64"]):
        shim.check_seccomp(profile() | {"architectures": architectures})
    two = profile() | {"architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X32"]}
    assert "seccomp allows more than the native architecture" == _reason(shim.check_seccomp, two)


def test_a_namespace_that_is_not_the_planned_one_is_refused() -> None:
    reason = _reason(harden, bundle(), plan(netns_inode=1), "runc")
    assert "the planned network namespace is not there" == reason


def test_runsc_needs_no_filter_but_takes_no_wrong_one() -> None:
    harden(_changed("linux/seccomp", None), plan(), "runsc")
    wrong = _changed("linux/seccomp", {"defaultAction": "SCMP_ACT_ALLOW"})
    assert "no seccomp allowlist" == _reason(harden, wrong, plan(), "runsc")


def test_dockers_arguments_are_understood() -> None:
    words = ["--root", "/r", "--log=/l", "--log-format", "json", "create", "--bundle", "/b", "--pid-file", "/p", ID]
    _, command, rest, log = split_arguments(words)
    assert ("create", "/l", (ID, "/b")) == (command, log, create_target(rest))


@pytest.mark.parametrize(("words", "log"), [([], None), (["--log"], ""), (["--log", "/l"], "/l"), (["--root"], None)])
def test_arguments_without_a_subcommand_are_understood(words: list[str], log: str | None) -> None:
    assert (words, None, [], log) == split_arguments(words)


@pytest.mark.parametrize(
    ("size", "text", "reason"),
    [(4 * 1024 * 1024 + 1, "{", "a file is too large"), (2, "[]", "a file is not a JSON object")],
)
def test_a_file_that_is_no_bounded_object_is_refused(tmp_path: Path, size: int, text: str, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    os.truncate(path, size)
    assert reason == _reason(shim.read_json, str(path))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--unknown", "create"], "unknown runtime option --unknown"),
        (["--root=/r", "--evil=1", "state"], "unknown runtime option --evil"),
    ],
)
def test_an_unknown_global_option_is_refused(words: list[str], reason: str) -> None:
    assert reason == _reason(split_arguments, words)


INCOMPLETE = "create needs one container id and --bundle"


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ([], INCOMPLETE),
        ([ID], INCOMPLETE),
        (["--bundle", "/b"], INCOMPLETE),
        (["--bundle", "/b", "../x"], INCOMPLETE),
        (["--bundle", "/b", ID, ID], INCOMPLETE),
        (["--new", ID], "unknown create option --new"),
    ],
)
def test_create_needs_a_bundle_and_one_id(rest: list[str], reason: str) -> None:
    assert reason == _reason(create_target, rest)


type Executed = list[tuple[str, list[str]]]
"""Programs, each with its words."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    """Collect the calls of exec: the real runtime is outside of this program."""
    calls: Executed = []
    monkeypatch.setattr(os, "execv", lambda path, words: calls.append((path, words)))
    monkeypatch.setattr(listeners, "refuse", lambda: None)  # permanent for the process
    return calls


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what needs root: this process keeps its namespaces and its /dev. All checks stay."""
    monkeypatch.setattr(user_namespace, "_user_namespace", lambda base: -1)
    monkeypatch.setattr(os, "setns", lambda fd, kind: None)
    monkeypatch.setattr(user_namespace, "_unshare_mounts", lambda: None)
    monkeypatch.setattr(user_namespace, "_cover_dev", lambda base: None)


def _create(tmp_path: Path, config: dict[str, Any], kind: str = "runc") -> list[str]:
    (tmp_path / "bundle").mkdir(exist_ok=True)
    (tmp_path / "bundle" / "config.json").write_text(json.dumps(config))
    log = str(tmp_path / "log")
    return [kind, "/real", str(tmp_path), "--", "--log", log, "create", "--bundle", str(tmp_path / "bundle"), ID]


def _logged(tmp_path: Path) -> list[str]:
    """Return the messages in the log file of `_create`."""
    return [json.loads(line)["msg"] for line in (tmp_path / "log").read_text().splitlines()]


def test_a_plan_works_once(tmp_path: Path, executed: Executed) -> None:
    (tmp_path / f"{ID}.json").write_text(json.dumps(plan(runtime="runsc")))
    words = _create(tmp_path, bundle(), "runsc")
    main(words)
    assert [("/real", ["/real", *words[4:]])] == executed
    written = json.loads((tmp_path / "bundle" / "config.json").read_text())
    assert written["hooks"] == {}
    assert 0o600 == (tmp_path / "bundle" / "config.json").stat().st_mode & 0o777
    assert main(_create(tmp_path, bundle(), "runsc")) == 1
    assert len(executed) == 1
    entry = json.loads((tmp_path / "log").read_text())
    assert "error" == entry["level"]
    assert "sallyport: no launch plan: only Sallyport starts this container, in a fresh slot" == entry["msg"]
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])-[0-3]\d" + r"T[0-2]\d:[0-5]\d:[0-5]\dZ", entry["time"])


@pytest.fixture
def five_hours_ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this process a local time that is not UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "AHEAD-5")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("five_hours_ahead")
def test_a_refusal_is_logged_with_its_time_in_utc(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    shim.report(str(tmp_path / "log"), "the reason")
    after = datetime.now(UTC)
    entry = json.loads((tmp_path / "log").read_text())
    assert {"level": "error", "msg": "sallyport: the reason", "time": entry["time"]} == entry
    assert before <= datetime.strptime(entry["time"], "%Y-%m-%dT%H:%M:%S%z") <= after


@pytest.mark.parametrize("kind", ["runc", "runsc"])
def test_only_a_container_of_runsc_is_created_without_seccomp_listeners(
    tmp_path: Path, executed: Executed, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    refused: list[int] = []
    monkeypatch.setattr(listeners, "refuse", lambda: refused.append(len(executed)))
    monkeypatch.setattr(shim, "prepare", lambda *_: None)
    main(_create(tmp_path, bundle(), kind))
    assert ([0] if kind == "runsc" else []) == refused  # before the runtime
    assert 1 == len(executed)


def test_a_container_whose_listeners_cannot_be_refused_is_not_created(
    tmp_path: Path, executed: Executed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError

    monkeypatch.setattr(listeners, "refuse", refuse)
    (tmp_path / f"{ID}.json").write_text(json.dumps(plan(runtime="runsc")))
    assert 1 == main(_create(tmp_path, bundle(), "runsc"))
    assert [] == executed


@pytest.mark.parametrize("changes", [{"runtime": "runsc"}, {"container": "b" * 64}])
def test_a_plan_for_something_else_is_used_up_and_refused(
    tmp_path: Path, executed: Executed, changes: dict[str, Any]
) -> None:
    (tmp_path / f"{ID}.json").write_text(json.dumps(plan(**changes)))
    assert main(_create(tmp_path, bundle())) == 1
    assert ["sallyport: the launch plan is for something else"] == _logged(tmp_path)
    assert executed == []
    assert not (tmp_path / f"{ID}.json").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "refused: JSONDecodeError while reading the launch plan or the bundle"),
        ("[]", "a file is not a JSON object"),
        ("{}", "the launch plan is for something else"),
        ('{"container": 1}', "the launch plan is for something else"),
    ],
)
def test_a_broken_plan_is_refused(tmp_path: Path, executed: Executed, text: str, reason: str) -> None:
    (tmp_path / f"{ID}.json").write_text(text)
    assert main(_create(tmp_path, bundle())) == 1
    assert [f"sallyport: {reason}"] == _logged(tmp_path)
    assert executed == []


@pytest.mark.usefixtures("unprivileged")
def test_a_container_of_runc_without_an_overlay_is_refused(tmp_path: Path, executed: Executed) -> None:
    """The bundle passes all checks that come before."""
    config = bundle() | {"root": {"path": str(tmp_path)}}
    (tmp_path / f"{ID}.json").write_text(json.dumps(plan()))
    assert 1 == main(_create(tmp_path, config))
    assert ["sallyport: no user namespace: the root file system is not an overlay"] == _logged(tmp_path)
    assert config == json.loads((tmp_path / "bundle" / "config.json").read_text())
    assert [] == executed


@pytest.mark.parametrize("command", ["run", "restore", "checkpoint"])
def test_what_would_start_without_a_plan_is_refused(
    tmp_path: Path, executed: Executed, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(["runc", "/real", str(tmp_path), "--", command, ID]) == 1
    assert f"sallyport: {command} is not available\n" == capsys.readouterr().err
    assert executed == []


@pytest.mark.parametrize("command", ["features", "state", "kill", "start", "delete", "events"])
def test_everything_else_passes_through_with_our_flags(tmp_path: Path, executed: Executed, command: str) -> None:
    main(["runsc", "/real", str(tmp_path), "--network=sandbox", "--", "--root=/r", command, "x", "9"])
    assert [("/real", ["/real", "--network=sandbox", "--root=/r", command, "x", "9"])] == executed


def _exec(tmp_path: Path, process: Any, *options: str, kind: str = "runsc") -> list[str]:
    path = tmp_path / "process.json"
    path.write_text(json.dumps(process))
    return [kind, "/real", str(tmp_path), "--", "exec", "--process", str(path), "--detach", *options, ID]


HARMLESS = {"noNewPrivileges": True, "capabilities": {"effective": ["CAP_CHOWN"], "ambient": None}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"noNewPrivileges": False}, "noNewPrivileges is not set"),
        ({"noNewPrivileges": 1}, "noNewPrivileges is not set"),
        ({"noNewPrivileges": None}, "noNewPrivileges is not set"),
        (
            {"capabilities": {"effective": ["CAP_SYS_ADMIN"]}},
            "effective capabilities beyond the sandbox's: CAP_SYS_ADMIN",
        ),
        (
            {"capabilities": {"effective": [], "inheritable": ["CAP_SETPCAP"]}},
            "inheritable capabilities beyond the sandbox's: CAP_SETPCAP",
        ),
    ],
)
def test_an_exec_with_more_privileges_is_refused(
    tmp_path: Path, executed: Executed, capsys: pytest.CaptureFixture[str], change: dict[str, Any], reason: str
) -> None:
    assert main(_exec(tmp_path, HARMLESS | change)) == 1
    assert f"sallyport: {reason}\n" == capsys.readouterr().err
    assert executed == []
    for harmless in (HARMLESS, {"noNewPrivileges": True}):
        executed.clear()
        words = _exec(tmp_path, harmless)
        main(words)
        assert [("/real", ["/real", *words[4:]])] == executed


NO_EXEC = "exec needs one container id and --process"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--cap", "CAP_SYS_ADMIN"], "unknown exec option --cap"),
        (["--cap=CAP_SYS_ADMIN"], "unknown exec option --cap"),
        (["-c", "CAP_SYS_ADMIN"], "unknown exec option -c"),
        (["-c=CAP_SYS_ADMIN"], "unknown exec option -c"),
        (["--preserve-fds", "3"], "unknown exec option --preserve-fds"),
        (["--preserve-fds=3"], "unknown exec option --preserve-fds"),
        (["-preserve-fds=3"], "unknown exec option -preserve-fds"),  # Go's flag package accepts one dash too.
        (["--no-new-privs=false"], "unknown exec option --no-new-privs"),
        (["-process", "/other"], "unknown exec option -process"),
        (["--"], "unknown exec option --"),
        ([ID], NO_EXEC),
        (["--process", ""], NO_EXEC),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_an_exec_has_no_option_that_adds_to_its_process(
    tmp_path: Path,
    executed: Executed,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    reason: str,
    first: bool,
) -> None:
    """Before the process file and after it. Docker's own options are allowed."""
    words = _exec(tmp_path, HARMLESS)
    place = 5 if first else len(words) - 1
    if not (first and options[0] == "--process"):  # The last one counts.
        assert main([*words[:place], *options, *words[place:]]) == 1
        assert executed == []
        assert f"sallyport: {reason}\n" == capsys.readouterr().err
    words = _exec(tmp_path, HARMLESS, "--console-socket", "/s", "--pid-file=/p", "-d")
    main(words)
    assert [("/real", ["/real", *words[4:]])] == executed


@pytest.mark.parametrize("rest", [[], [ID], ["--process", "/p"], ["--process", "/p", "x"], [ID, "--process"]])
def test_an_exec_needs_a_process_file_and_one_id(
    tmp_path: Path, executed: Executed, capsys: pytest.CaptureFixture[str], rest: list[str]
) -> None:
    assert main(["runsc", "/real", str(tmp_path), "--", "exec", *rest]) == 1
    assert f"sallyport: {NO_EXEC}\n" == capsys.readouterr().err
    assert executed == []


def test_the_last_process_file_is_the_one_that_is_judged(tmp_path: Path, executed: Executed) -> None:
    """The runtime's own reading."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"noNewPrivileges": False}))
    assert main(_exec(tmp_path, HARMLESS, "-p", str(other))) == 1
    assert executed == []


@pytest.mark.usefixtures("unprivileged")
def test_an_exec_of_runc_is_refused_if_its_network_is_not_the_planned_one(tmp_path: Path, executed: Executed) -> None:
    words = _exec(tmp_path, HARMLESS, kind="runc")
    (tmp_path / f"{ID}.claimed").write_text(json.dumps(plan(netns_inode=1)))
    with pytest.raises(OSError, match=r"^the planned network namespace is not there$"):
        shim.check_exec("runc", str(tmp_path), words[5:])
    assert 1 == main(words)
    assert HARMLESS == json.loads((tmp_path / "process.json").read_text())
    assert [] == executed


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    """Return the limits of open files, and set them again after the test."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, found)


@pytest.mark.usefixtures("unprivileged")
def test_the_shim_sets_the_limits_of_an_exec_in_place_of_runc(
    tmp_path: Path, executed: Executed, files: tuple[int, int]
) -> None:
    """The process file for runc has no limits, and only root can read it."""
    soft, hard = files
    limit = {"type": "RLIMIT_NOFILE", "soft": soft - 1, "hard": hard}
    words = _exec(tmp_path, HARMLESS | {"rlimits": [limit]}, kind="runc")
    (tmp_path / f"{ID}.claimed").write_text(json.dumps(plan()))
    main(words)
    assert (soft - 1, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert HARMLESS == json.loads((tmp_path / "process.json").read_text())
    assert 0o600 == (tmp_path / "process.json").stat().st_mode & 0o777
    assert [("/real", ["/real", *words[4:]])] == executed


def held(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_a_root_file_system_larger_than_planned_is_refused(tmp_path: Path) -> None:
    config = bundle() | {"root": {"path": str(tmp_path)}}
    harden(copy.deepcopy(config), plan(room=held(str(tmp_path)) * 2), "runc")
    reason = _reason(harden, config, plan(room=held(str(tmp_path)) // 2), "runc")
    assert "what the container writes is not bounded" == reason


def test_a_root_file_system_can_have_exactly_the_planned_free_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three fragments of 4096 bytes. Larger blocks, and what only root can use, do not count."""
    found = os.statvfs_result((65536, 4096, 100, 50, 3, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", {"/root": found}.__getitem__)
    config = bundle() | {"root": {"path": "/root"}}
    harden(copy.deepcopy(config), plan(room=12288), "runc")
    assert "what the container writes is not bounded" == _reason(harden, config, plan(room=12287), "runc")


def test_a_volume_of_the_image_is_not_mounted_beside_a_bounded_root(tmp_path: Path) -> None:
    config = bundle() | {"root": {"path": str(tmp_path)}}
    volume = {"destination": "/data", "type": "bind", "source": "/volumes/1", "options": ["rbind"]}
    config["mounts"].append(volume)
    binds = plan()["binds"] | {"/data": ["/volumes/1", False]}
    harden(config, plan(room=held(str(tmp_path)) * 2, binds=binds), "runc")
    assert ["/proc", "/sys", "/etc/hosts"] == [mount["destination"] for mount in config["mounts"]]


def volume(place: Path, *, read_only: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the mount of a volume in a bundle, and its part of the plan."""
    status = place.stat()
    options = ["rbind", "rprivate", *(["ro"] if read_only else [])]
    mount = {"destination": "/data", "type": "bind", "source": str(place), "options": options}
    return mount, {"/data": [str(place), read_only, status.st_dev, status.st_ino]}


@pytest.mark.parametrize("read_only", [False, True])
def test_a_planned_volume_is_mounted_also_beside_a_bounded_root(tmp_path: Path, read_only: bool) -> None:
    config = bundle() | {"root": {"path": str(tmp_path)}}
    mount, volumes = volume(tmp_path, read_only=read_only)
    config["mounts"].append(mount)
    harden(config, plan(room=held(str(tmp_path)) * 2, volumes=volumes), "runc")
    assert "/data" == config["mounts"][-1]["destination"]
    assert ["nosuid", "nodev"] == config["mounts"][-1]["options"][-2:]


def test_a_volume_that_is_not_as_planned_is_refused(tmp_path: Path) -> None:
    """It is missing, has another source, can be written, propagates, or another directory is at its source."""
    mount, volumes = volume(tmp_path, read_only=True)
    config = bundle()
    config["mounts"].append(mount)
    harden(copy.deepcopy(config), plan(volumes=volumes), "runc")
    assert "the volume on /data is missing" == _reason(harden, bundle(), plan(volumes=volumes), "runc")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"source": "/etc"}, "the volume on /data is missing"),
        ({"options": ["rbind"]}, "mount on /data is not read-only"),
        ({"options": ["rbind", "ro", "rshared"]}, "mount on /data propagates"),
    )
    for change, said in wrong:
        config["mounts"][-1] = mount | change
        assert said == _reason(harden, copy.deepcopy(config), plan(volumes=volumes), "runc")
    config["mounts"][-1] = mount
    tmp_path.rename(tmp_path.with_name("former"))
    tmp_path.mkdir()
    reason = _reason(harden, config, plan(volumes=volumes), "runc")
    assert "the volume on /data is not what was checked" == reason


def test_runsc_gets_the_size_of_its_overlay() -> None:
    assert ["--a", "--overlay2=root:self,size=6300"] == shim.sized("runsc", ["--a", "--overlay2=root:self"], 6400)
    assert ["--a", "--overlay2=root:self"] == shim.sized("runsc", ["--a", "--overlay2=root:self"], None)


def test_the_flag_that_is_sized_is_one_that_runsc_gets() -> None:
    assert RUNSC.size_flag in RUNSC.flags


class State:
    """The state that runsc has of a container, as far as the shim reads it."""

    def __init__(self, root: Path) -> None:
        self._place = root / f"{ID}_sandbox:{ID}"
        self.lock = self._place.with_name(self._place.name + ".lock")
        self.file = self._place.with_name(self._place.name + ".state")
        self.lock.touch()

    def write(self, sandbox: int, gofer: int) -> None:
        self.file.write_text(json.dumps({"id": ID, "goferPid": gofer, "sandbox": {"id": ID, "pid": sandbox}}))

    def numbers(self) -> tuple[int, int]:
        """Return the numbers of the sandbox and of its gofer."""
        state = json.loads(self.file.read_text())
        assert {"id": ID, "goferPid": state["goferPid"], "sandbox": {"id": ID, "pid": state["sandbox"]["pid"]}} == state
        return state["sandbox"]["pid"], state["goferPid"]


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path)


@pytest.fixture(scope="module")
def pids() -> Iterator[dict[str, int]]:
    """Return the numbers of a process of the container, of a process of something else, and of an ended process."""
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    running = [subprocess.Popen([*sleep, word], stdout=subprocess.PIPE) for word in (ID, "b" * 64)]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    ended = subprocess.Popen(["true"])
    ended.wait()
    yield {"ours": running[0].pid, "other": running[1].pid, "ended": ended.pid, "none": 0}
    for process in running:
        with process:
            process.kill()


def _delete(tmp_path: Path, kind: str = "runsc") -> list[str]:
    return [kind, "/real", str(tmp_path), "--", "--root", str(tmp_path), "--log=/l", "delete", "--force", ID]


@pytest.mark.parametrize("gofer", ["ours", "other", "ended", "none"])
@pytest.mark.parametrize("sandbox", ["ours", "other", "ended", "none"])
def test_runsc_deletes_without_numbers_that_are_not_the_containers(
    tmp_path: Path, executed: Executed, state: State, pids: Mapping[str, int], sandbox: str, gofer: str
) -> None:
    """It would kill the processes that have these numbers now."""
    state.write(pids[sandbox], pids[gofer])
    written = state.file.stat().st_ino
    main(_delete(tmp_path))
    kept = {name: pids[name] if name == "ours" else 0 for name in pids}
    assert (kept[sandbox], kept[gofer]) == state.numbers()
    assert ({sandbox, gofer} <= {"ours", "none"}) == (written == state.file.stat().st_ino)
    assert [("/real", ["/real", *_delete(tmp_path)[4:]])] == executed


@pytest.mark.parametrize("groups", [f"4:freezer:/docker/{ID}\n1:name=x:/\n", f"0::/system.slice/docker-{ID}.scope\n"])
def test_a_process_that_hides_its_command_line_is_known_by_its_control_groups(
    tmp_path: Path, executed: Executed, state: State, monkeypatch: pytest.MonkeyPatch, groups: str
) -> None:
    monkeypatch.setattr(shim, "_PROC", str(tmp_path))
    for pid, text in ((7, groups), (8, groups.replace(ID, "b" * 64))):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text("[kworker/0:1]")
        (tmp_path / str(pid) / "cgroup").write_text(text)
    state.write(7, 8)
    main(_delete(tmp_path))
    assert (7, 0) == state.numbers()


@pytest.mark.parametrize("root", [[], ["--root"], ["--root="], ["--root", "/nonexistent"]])
def test_a_deletion_goes_on_without_a_state(tmp_path: Path, executed: Executed, root: list[str]) -> None:
    words = ["runsc", "/real", str(tmp_path), "--", *root, "delete", ID]
    main(words)
    assert [("/real", ["/real", *words[4:]])] == executed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"sandbox": null, "goferPid": null}',
        '{"sandbox": []}',
        '{"sandbox": [1]}',
        '{"sandbox": {"pid": "x/../1"}}',
        '{"goferPid": {}}',
        '{"goferPid": "1"}',
    ],
)
def test_a_container_with_a_broken_state_can_be_deleted(
    tmp_path: Path, executed: Executed, state: State, text: str
) -> None:
    state.file.write_text(text)
    main(_delete(tmp_path))
    assert text == state.file.read_text()
    assert [("/real", ["/real", *_delete(tmp_path)[4:]])] == executed


def test_a_state_that_runsc_has_locked_is_not_changed(
    tmp_path: Path, executed: Executed, state: State, pids: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "_LOCK_SECONDS", 0.05)
    state.write(pids["other"], pids["ended"])
    with state.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        main(_delete(tmp_path))
    assert (pids["other"], pids["ended"]) == state.numbers()
    assert 1 == len(executed)
    main(_delete(tmp_path))
    assert (0, 0) == state.numbers()


def test_what_an_interrupted_deletion_left_does_not_prevent_the_next(
    tmp_path: Path, executed: Executed, state: State, pids: Mapping[str, int]
) -> None:
    state.write(pids["other"], pids["ours"])
    left = state.file.with_name(state.file.name + ".sallyport")
    left.write_text("half")
    main(_delete(tmp_path))
    assert (0, pids["ours"]) == state.numbers()
    assert not left.exists()


def test_the_state_of_runc_is_not_read(
    tmp_path: Path, executed: Executed, state: State, pids: Mapping[str, int]
) -> None:
    """runc compares the time at which a process began before it signals it."""
    state.write(pids["other"], pids["ended"])
    main(_delete(tmp_path, "runc"))
    assert (pids["other"], pids["ended"]) == state.numbers()
    assert 1 == len(executed)
