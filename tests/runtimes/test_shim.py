"""The shim's verdicts on arguments and bundles. The system tests run it under Docker."""

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtimes.engine import shim
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
            "maskedPaths": ["/proc/kcore"],
            "readonlyPaths": ["/proc/sys"],
            "resources": {
                "devices": [
                    {"allow": False, "access": "rwm"},
                    {"allow": True, "type": "c", "access": "m"},
                    {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rwm"},
                ]
            },
        },
    }


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
    with pytest.raises(LaunchRefused, match=capability):
        harden(copy.deepcopy(config), plan(), "runsc")
    with pytest.raises(LaunchRefused, match="kernel of its own"):
        harden(copy.deepcopy(config), plan(isolation=True), "runc")
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


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("process/noNewPrivileges", False),
        ("process/capabilities/bounding", ["CAP_NET_ADMIN"]),
        ("process/capabilities/ambient", ["CAP_NET_RAW"]),
        ("process", None),
        ("linux/seccomp", None),
        ("linux/seccomp", {"defaultAction": "SCMP_ACT_ALLOW"}),
        ("linux/seccomp/syscalls/0/names/0", "io_uring_setup"),
        ("linux/seccomp/syscalls/1/args", []),
        ("linux/seccomp/syscalls/1/args/0/value", 40),
        ("linux/seccomp/architectures", ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"]),
        ("linux/devices", [{"path": "/dev/kvm"}]),
        ("linux/resources", {}),
        ("linux/resources/devices/0", {"allow": True, "access": "rwm"}),
        ("linux/resources/devices/2/minor", 1),
        ("linux/resources/devices/2/type", "b"),
        ("linux/maskedPaths", []),
        ("linux/readonlyPaths", None),
        ("linux/rootfsPropagation", "rshared"),
        ("linux/namespaces", [{"type": name} for name in ("mount", "network", "uts", "pid")]),
        ("linux/namespaces", [{"type": name} for name in ("mount", "network", "network", "uts", "pid", "ipc")]),
        ("linux/namespaces/1", {"type": "network", "path": "/proc/1/ns/net"}),
        ("linux/namespaces/3", {"type": "pid", "path": "/proc/1/ns/pid"}),
        ("mounts/2/source", "/etc/hosts"),
        ("mounts/2/options", ["rbind"]),
        ("mounts/2/options", ["rbind", "ro", "rshared"]),
        ("mounts/1/options", ["rw"]),
        ("hooks/prestart/0/args", ["other"]),
        ("hooks/poststart", [_HOOK]),
        ("annotations", {"dev.gvisor.flag.network": "host"}),
    ],
)
def test_a_bundle_that_is_softer_than_ordered_is_refused(path: str, value: Any) -> None:
    with pytest.raises(LaunchRefused):
        harden(_changed(path, value), plan(), "runc")


@pytest.mark.parametrize("word", ["shared", "rshared", "slave", "rslave"])
def test_no_mount_propagates_in_either_direction(word: str) -> None:
    """Slave propagation is refused too, because a mount that the host makes later would appear inside."""
    with pytest.raises(LaunchRefused, match="mount on /etc/hosts propagates"):
        harden(_changed("mounts/2/options", ["rbind", "ro", word]), plan(), "runc")
    with pytest.raises(LaunchRefused, match="root file system propagates"):
        harden(_changed("linux/rootfsPropagation", word), plan(), "runc")


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
            with pytest.raises(LaunchRefused, match=f"seccomp allows {name}"):
                _judged(rule | {"action": action})
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
        with pytest.raises(LaunchRefused, match="sockets of other families"):
            _judged(_allows(name, arguments=arguments))


NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""


def test_a_filter_that_lets_clone_make_any_namespace_is_refused() -> None:
    whole = {"index": 0, "value": sum(NAMESPACES), "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    _judged(_allows("clone", arguments=[whole]))
    _judged(_allows("clone", arguments=[{"index": 0, "value": sum(NAMESPACES), "op": "SCMP_CMP_MASKED_EQ"}]))
    _judged(_allows("clone", arguments=[whole | {"value": 0xFFFFFFFF}]))
    with pytest.raises(LaunchRefused, match="clone with namespaces"):
        _judged(_allows("clone", arguments=[{"index": 0, "op": "SCMP_CMP_MASKED_EQ"}]))
    wrong: list[dict[str, Any]] = [{"value": whole["value"] - flag} for flag in NAMESPACES]
    wrong += [{"valueTwo": flag} for flag in NAMESPACES] + [{"index": 1}, {"op": "SCMP_CMP_EQ"}, {"value": 0}]
    for change in wrong:
        with pytest.raises(LaunchRefused, match="clone with namespaces"):
            _judged(_allows("clone", arguments=[whole | change]))
    with pytest.raises(LaunchRefused, match="clone with namespaces"):
        _judged(_allows("clone"))


@pytest.mark.parametrize("value", [None, [], "x", {}, {"defaultAction": "SCMP_ACT_LOG"}])
def test_what_is_no_allowlist_is_refused(value: Any) -> None:
    with pytest.raises(LaunchRefused, match="no seccomp allowlist"):
        shim.check_seccomp(value)


def test_a_filter_of_one_architecture_is_taken() -> None:
    for architectures in (None, [], ["SCMP_ARCH_X86_64"]):
        shim.check_seccomp(profile() | {"architectures": architectures})
    with pytest.raises(LaunchRefused, match="native architecture"):
        shim.check_seccomp(profile() | {"architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X32"]})


def test_a_namespace_that_is_not_the_planned_one_is_refused() -> None:
    with pytest.raises(LaunchRefused):
        harden(bundle(), plan(netns_inode=1), "runc")


def test_runsc_needs_no_filter_but_takes_no_wrong_one() -> None:
    harden(_changed("linux/seccomp", None), plan(), "runsc")
    with pytest.raises(LaunchRefused):
        harden(_changed("linux/seccomp", {"defaultAction": "SCMP_ACT_ALLOW"}), plan(), "runsc")


def test_dockers_arguments_are_understood() -> None:
    words = ["--root", "/r", "--log=/l", "--log-format", "json", "create", "--bundle", "/b", "--pid-file", "/p", ID]
    _, command, rest, log = split_arguments(words)
    assert ("create", "/l", (ID, "/b")) == (command, log, create_target(rest))


@pytest.mark.parametrize(("words", "log"), [([], None), (["--log"], ""), (["--log", "/l"], "/l"), (["--root"], None)])
def test_arguments_without_a_subcommand_are_understood(words: list[str], log: str | None) -> None:
    assert (words, None, [], log) == split_arguments(words)


@pytest.mark.parametrize(
    ("size", "text", "reason"), [(4 * 1024 * 1024 + 1, "{", "too large"), (2, "[]", "not a JSON object")]
)
def test_a_file_that_is_no_bounded_object_is_refused(tmp_path: Path, size: int, text: str, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    os.truncate(path, size)
    with pytest.raises(LaunchRefused, match=reason):
        shim.read_json(str(path))


@pytest.mark.parametrize("words", [["--unknown", "create"], ["--root=/r", "--evil=1", "state"]])
def test_an_unknown_global_option_is_refused(words: list[str]) -> None:
    with pytest.raises(LaunchRefused):
        split_arguments(words)


@pytest.mark.parametrize("rest", [[], [ID], ["--bundle", "/b"], ["--bundle", "/b", "../x"], ["--new", ID]])
def test_create_needs_a_bundle_and_one_id(rest: list[str]) -> None:
    with pytest.raises(LaunchRefused):
        create_target(rest)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collect the calls of exec: the real runtime is outside of this program."""
    calls: list[list[str]] = []
    monkeypatch.setattr(shim.os, "execv", lambda _path, words: calls.append(words))
    monkeypatch.setattr(shim.listeners, "refuse", lambda: None)  # permanent for the process
    return calls


def _create(tmp_path: Path, config: dict[str, Any], kind: str = "runc") -> list[str]:
    (tmp_path / "bundle").mkdir(exist_ok=True)
    (tmp_path / "bundle" / "config.json").write_text(json.dumps(config))
    log = str(tmp_path / "log")
    return [kind, "/real", str(tmp_path), "--", "--log", log, "create", "--bundle", str(tmp_path / "bundle"), ID]


def test_a_plan_works_once(tmp_path: Path, executed: list[list[str]]) -> None:
    (tmp_path / f"{ID}.json").write_text(json.dumps(plan(runtime="runsc")))
    words = _create(tmp_path, bundle(), "runsc")
    main(words)
    assert [["/real", *words[4:]]] == executed
    written = json.loads((tmp_path / "bundle" / "config.json").read_text())
    assert written["hooks"] == {}
    assert 0o600 == (tmp_path / "bundle" / "config.json").stat().st_mode & 0o777
    assert main(_create(tmp_path, bundle(), "runsc")) == 1
    assert len(executed) == 1
    entry = json.loads((tmp_path / "log").read_text())
    assert "error" == entry["level"]
    assert entry["msg"].startswith("sallyport: no launch plan")
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])-[0-3]\d" + r"T[0-2]\d:[0-5]\d:[0-5]\dZ", entry["time"])


@pytest.mark.parametrize("kind", ["runc", "runsc"])
def test_only_a_container_of_runsc_is_created_without_seccomp_listeners(
    tmp_path: Path, executed: list[list[str]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    refused: list[int] = []
    monkeypatch.setattr(shim.listeners, "refuse", lambda: refused.append(len(executed)))
    monkeypatch.setattr(shim, "prepare", lambda *_: None)
    main(_create(tmp_path, bundle(), kind))
    assert ([0] if kind == "runsc" else []) == refused  # before the runtime
    assert 1 == len(executed)


def test_a_container_whose_listeners_cannot_be_refused_is_not_created(
    tmp_path: Path, executed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError

    monkeypatch.setattr(shim.listeners, "refuse", refuse)
    (tmp_path / f"{ID}.json").write_text(json.dumps(plan(runtime="runsc")))
    assert 1 == main(_create(tmp_path, bundle(), "runsc"))
    assert [] == executed


@pytest.mark.parametrize("changes", [{"runtime": "runsc"}, {"container": "b" * 64}])
def test_a_plan_for_something_else_is_used_up_and_refused(
    tmp_path: Path, executed: list[list[str]], changes: dict[str, Any]
) -> None:
    (tmp_path / f"{ID}.json").write_text(json.dumps(plan(**changes)))
    assert main(_create(tmp_path, bundle())) == 1
    assert executed == []
    assert not (tmp_path / f"{ID}.json").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"container": 1}'])
def test_a_broken_plan_is_refused(tmp_path: Path, executed: list[list[str]], text: str) -> None:
    (tmp_path / f"{ID}.json").write_text(text)
    assert main(_create(tmp_path, bundle())) == 1
    assert executed == []


@pytest.mark.parametrize("command", ["run", "restore", "checkpoint"])
def test_what_would_start_without_a_plan_is_refused(tmp_path: Path, executed: list[list[str]], command: str) -> None:
    assert main(["runc", "/real", str(tmp_path), "--", command, ID]) == 1
    assert executed == []


@pytest.mark.parametrize("command", ["features", "state", "kill", "start", "delete", "events"])
def test_everything_else_passes_through_with_our_flags(tmp_path: Path, executed: list[list[str]], command: str) -> None:
    main(["runsc", "/real", str(tmp_path), "--network=sandbox", "--", "--root=/r", command, "x", "9"])
    assert [["/real", "--network=sandbox", "--root=/r", command, "x", "9"]] == executed


def _exec(tmp_path: Path, process: Any, *options: str, kind: str = "runsc") -> list[str]:
    path = tmp_path / "process.json"
    path.write_text(json.dumps(process))
    return [kind, "/real", str(tmp_path), "--", "exec", "--process", str(path), "--detach", *options, ID]


HARMLESS = {"noNewPrivileges": True, "capabilities": {"effective": ["CAP_CHOWN"], "ambient": None}}


@pytest.mark.parametrize(
    "change",
    [
        {"noNewPrivileges": False},
        {"noNewPrivileges": 1},
        {"noNewPrivileges": None},
        {"capabilities": {"effective": ["CAP_SYS_ADMIN"]}},
        {"capabilities": {"effective": [], "inheritable": ["CAP_SETPCAP"]}},
    ],
)
def test_an_exec_with_more_privileges_is_refused(
    tmp_path: Path, executed: list[list[str]], change: dict[str, Any]
) -> None:
    assert main(_exec(tmp_path, HARMLESS | change)) == 1
    assert executed == []
    for harmless in (HARMLESS, {"noNewPrivileges": True}):
        executed.clear()
        words = _exec(tmp_path, harmless)
        main(words)
        assert [["/real", *words[4:]]] == executed


@pytest.mark.parametrize(
    "options",
    [
        ["--cap", "CAP_SYS_ADMIN"],
        ["--cap=CAP_SYS_ADMIN"],
        ["-c", "CAP_SYS_ADMIN"],
        ["-c=CAP_SYS_ADMIN"],
        ["--preserve-fds", "3"],
        ["--preserve-fds=3"],
        ["-preserve-fds=3"],  # Go's flag package accepts one dash too.
        ["--no-new-privs=false"],
        ["-process", "/other"],
        ["--"],
        [ID],
        ["--process", ""],
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_an_exec_has_no_option_that_adds_to_its_process(
    tmp_path: Path, executed: list[list[str]], capsys: pytest.CaptureFixture[str], options: list[str], first: bool
) -> None:
    """Before the process file and after it. Docker's own options are allowed."""
    words = _exec(tmp_path, HARMLESS)
    place = 5 if first else len(words) - 1
    if not (first and options[0] == "--process"):  # The last one counts.
        assert main([*words[:place], *options, *words[place:]]) == 1
        assert executed == []
        assert re.search("unknown exec option|exec needs one container id", capsys.readouterr().err)
    words = _exec(tmp_path, HARMLESS, "--console-socket", "/s", "--pid-file=/p", "-d")
    main(words)
    assert [["/real", *words[4:]]] == executed


@pytest.mark.parametrize("rest", [[], [ID], ["--process", "/p"], ["--process", "/p", "x"], [ID, "--process"]])
def test_an_exec_needs_a_process_file_and_one_id(tmp_path: Path, executed: list[list[str]], rest: list[str]) -> None:
    assert main(["runsc", "/real", str(tmp_path), "--", "exec", *rest]) == 1
    assert executed == []


def test_the_last_process_file_is_the_one_that_is_judged(tmp_path: Path, executed: list[list[str]]) -> None:
    """The runtime's own reading."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"noNewPrivileges": False}))
    assert main(_exec(tmp_path, HARMLESS, "-p", str(other))) == 1
    assert executed == []


def held(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_a_root_file_system_larger_than_planned_is_refused(tmp_path: Path) -> None:
    config = bundle() | {"root": {"path": str(tmp_path)}}
    harden(copy.deepcopy(config), plan(room=held(str(tmp_path)) * 2), "runc")
    with pytest.raises(LaunchRefused, match="not bounded"):
        harden(config, plan(room=held(str(tmp_path)) // 2), "runc")


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
    with pytest.raises(LaunchRefused, match="is missing"):
        harden(bundle(), plan(volumes=volumes), "runc")
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"source": "/etc"}, "is missing"),
        ({"options": ["rbind"]}, "not read-only"),
        ({"options": ["rbind", "ro", "rshared"]}, "propagates"),
    )
    for change, said in wrong:
        config["mounts"][-1] = mount | change
        with pytest.raises(LaunchRefused, match=said):
            harden(copy.deepcopy(config), plan(volumes=volumes), "runc")
    config["mounts"][-1] = mount
    tmp_path.rename(tmp_path.with_name("former"))
    tmp_path.mkdir()
    with pytest.raises(LaunchRefused, match="not what was checked"):
        harden(config, plan(volumes=volumes), "runc")


def test_runsc_gets_the_size_of_its_overlay() -> None:
    assert ["--a", "--overlay2=root:self,size=6300"] == shim.sized("runsc", ["--a", "--overlay2=root:self"], 6400)
    assert ["--a", "--overlay2=root:self"] == shim.sized("runsc", ["--a", "--overlay2=root:self"], None)


def test_the_flag_that_is_sized_is_one_that_runsc_gets() -> None:
    assert RUNSC.size_flag in RUNSC.flags
