"""The OCI runtime that Docker calls. It puts a container into its prepared namespace, or refuses it.

Started as `python3 -IS shim.py <runc|runsc> <real runtime> <plan directory> <flag>... -- <Docker's arguments>`,
with the standard library, `profile` and `user_namespace` only: it runs as root on each container start. The wrapper
calls it for the subcommands that `handled` returns.

- `profile` has the differences between runtimes.
- A container that shares the host's kernel gets a user namespace of its own (`user_namespace`), so per-user quotas of
  the kernel are not shared.
- `create` needs a launch plan, named by Docker's container id, and claims it by an atomic rename: a plan works once. No
  plan, no container: `docker start` by hand, a restart policy or a reboot cannot start a sandbox without its gate.
- The bundle must have exactly one network namespace entry, without a path. The shim adds the plan's path, and the
  inode of that file must be the plan's.
- The bundle must be as restricted as hostd requested. A change by Docker, its configuration or another client
  (capabilities, devices, host namespaces, seccomp, mounts, hooks) is refused, not corrected.
- A container of runsc gets no seccomp listener of the host (`listeners`), so it survives a pause.
- The container has CAP_SYS_ADMIN only if the plan allows it, and only on a runtime with a kernel of its own.
  It then also has CAP_SETPCAP: execd needs it to remove both from the bounding set of the processes that it starts.
- If the plan limits what the sandbox can write, the root file system must not be larger. The volumes of its image are
  other directories without a limit, so they are not mounted: the root file system has their content, too.
- Each volume of the sandbox must be in the bundle, from the planned mount, whose root is the planned inode.
- A mount with a bind option counts as a bind mount, whatever its type is. Bind mounts lose set-user-id bits and
  devices, and no mount of the host propagates into the container.
- Of the hooks only Docker's `libnetwork-setkey` is removed (it would move the namespace); any other refuses.
- Before runsc deletes a container, the numbers of its processes that have ended are removed from its state. Otherwise
  runsc would kill any process of the host that has such a number by now.
- `run` and `restore` would start without a plan and are refused. An `exec` with more capabilities than the container,
  or with an option that Docker does not use, is refused. Each other subcommand goes to the real runtime unchanged.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time

sys.path.append(os.path.abspath(f"{__file__}/../../.."))  # last: it replaces no standard module
from runtimes.engine import listeners, user_namespace
from runtimes.engine.profile import PROFILES

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to import, and this starts for each container
    from typing import Any

_CAPABILITIES = frozenset(
    f"CAP_{name}"
    for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETUID", "SETGID", "NET_BIND_SERVICE")
)
_ISOLATION = frozenset(("CAP_SYS_ADMIN", "CAP_SETPCAP"))
_NAMESPACES = frozenset(("pid", "mount", "ipc", "uts", "network"))
_OPTIONAL_NAMESPACES = frozenset(("cgroup",))
_GLOBAL_WITH_VALUE = frozenset(("--root", "--log", "--log-format", "--criu", "--rootless"))
_GLOBAL_ALONE = frozenset(("--debug", "--systemd-cgroup", "--version", "-v", "--help", "-h"))
_CREATE_WITH_VALUE = frozenset(("--bundle", "-b", "--console-socket", "--pid-file", "--preserve-fds"))
_CREATE_ALONE = frozenset(("--no-pivot", "--no-new-keyring"))
_EXEC_WITH_VALUE = frozenset(("--process", "-p", "--console-socket", "--pid-file"))
_EXEC_ALONE = frozenset(("--detach", "-d"))
_REFUSED = frozenset(("run", "restore", "checkpoint"))
_CHECKED = _REFUSED | {"create", "exec"}
_LOCK_SECONDS = 5.0
_PROC = "/proc"
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What a file of an unexpected form can raise."""
_DEVICES = frozenset(((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2), (136, None)))
_ALL_DENIED = {"allow": False, "access": "rwm"}
_FORBIDDEN_CALLS = frozenset(
    (
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
        "bpf",
        "unshare",
        "setns",
        "mount",
        "umount2",
        "move_mount",
        "open_tree",
        "fsopen",
        "fsmount",
        "pivot_root",
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "keyctl",
        "add_key",
        "request_key",
        "io_setup",
        "fanotify_init",
        "userfaultfd",
        "perf_event_open",
        "init_module",
        "finit_module",
        "delete_module",
        "kexec_load",
        "kexec_file_load",
        "open_by_handle_at",
        "socketcall",
        "pidfd_getfd",
    )
)
_FAMILIES = frozenset((1, 2, 10))
_NETLINK = 16
_CLONE_NAMESPACES = 0x7E020000
_INERT = ("nosuid", "nodev")
_LIVELY = frozenset(("suid", "dev"))
"""The opposites of `_INERT`: of two opposite options a runtime follows the later one."""
_BIND = frozenset(("bind", "rbind"))
"""A mount with one of these options is a bind mount to both runtimes, whatever its type is."""
_KERNEL_MOUNTS = frozenset(("proc", "tmpfs", "devpts", "mqueue"))
_READ_ONLY_MOUNTS = frozenset(("sysfs", "cgroup"))
_MASKED = frozenset(
    (
        "/proc/acpi",
        "/proc/asound",
        "/proc/kcore",
        "/proc/keys",
        "/proc/latency_stats",
        "/proc/sched_debug",
        "/proc/scsi",
        "/proc/timer_list",
        "/proc/timer_stats",
        "/sys/firmware",
    )
)
_READ_ONLY = frozenset(("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"))
_SYSCTL = {"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": "1 0"}
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_MAX_FILE = 4 * 1024 * 1024


class LaunchRefused(Exception):
    """The container must not be created. The text has the reason."""


def handled(kind: str) -> frozenset[str]:
    """Return the subcommands of a runtime for which Docker must call the shim."""
    return _CHECKED | {"delete"} if PROFILES[kind].kills_by_number else _CHECKED


def split_arguments(arguments: list[str]) -> tuple[list[str], str | None, list[str], str | None]:
    """Return (global arguments, subcommand or None, the rest, path of the --log file or None)."""
    log, index = None, 0
    while index < len(arguments):
        word = arguments[index]
        if not word.startswith("-"):
            return arguments[:index], word, arguments[index + 1 :], log
        name, separator, value = word.partition("=")
        if name in _GLOBAL_ALONE:
            index += 1
        elif name in _GLOBAL_WITH_VALUE:
            if not separator:
                value = arguments[index + 1] if index + 1 < len(arguments) else ""
                index += 1
            log = value if name == "--log" else log
            index += 1
        else:
            raise LaunchRefused(f"unknown runtime option {name}")
    return arguments, None, [], log


def create_target(rest: list[str]) -> tuple[str, str]:
    """Return (container id, bundle) of `create`'s arguments."""
    return _target("create", rest, ("--bundle", "-b"), _CREATE_WITH_VALUE, _CREATE_ALONE)


def exec_target(rest: list[str]) -> tuple[str, str]:
    """Return (container id, process file) of `exec`'s arguments. Other options for the process are refused."""
    return _target("exec", rest, ("--process", "-p"), _EXEC_WITH_VALUE, _EXEC_ALONE)


def _target(
    command: str, rest: list[str], wanted: tuple[str, ...], with_value: frozenset[str], alone: frozenset[str]
) -> tuple[str, str]:
    found, positional, index = "", [], 0
    while index < len(rest):
        word = rest[index]
        name, separator, value = word.partition("=")
        if not word.startswith("-"):
            positional.append(word)
        elif name in with_value:
            if not separator:
                value = rest[index + 1] if index + 1 < len(rest) else ""
                index += 1
            found = value if name in wanted else found
        elif name not in alone:
            raise LaunchRefused(f"unknown {command} option {name}")
        index += 1
    if len(positional) != 1 or not _CONTAINER_ID.fullmatch(positional[0]) or not found:
        raise LaunchRefused(f"{command} needs one container id and {wanted[0]}")
    return positional[0], found


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object from a bounded file."""
    with open(path, "rb") as file:
        data = file.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise LaunchRefused("a file is too large")
    value = json.loads(data)
    if not isinstance(value, dict):
        raise LaunchRefused("a file is not a JSON object")
    return value


def replace_json(path: str, value: dict[str, Any]) -> None:
    """Replace a file by a JSON object that only root can read."""
    temporary = f"{path}.sallyport"
    with open(temporary, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(value, file)
    os.rename(temporary, path)


def claim(plans: str, container: str) -> dict[str, Any]:
    """Claim the plan of `container`. No other process can claim it then."""
    claimed = os.path.join(plans, f"{container}.claimed")
    try:
        os.rename(os.path.join(plans, f"{container}.json"), claimed)
    except FileNotFoundError:
        raise LaunchRefused("no launch plan: only Sallyport starts this container, in a fresh slot") from None
    return read_json(claimed)


def check_process(process: dict[str, Any], *, isolation: bool = False) -> None:
    """Refuse a process with more privileges than a sandbox has. With `isolation` it can mount."""
    if process.get("noNewPrivileges") is not True:
        raise LaunchRefused("noNewPrivileges is not set")
    for kind, names in (process.get("capabilities") or {}).items():
        extra = set(names or ()) - _CAPABILITIES - (_ISOLATION if isolation else frozenset())
        if extra:
            raise LaunchRefused(f"{kind} capabilities beyond the sandbox's: {', '.join(sorted(extra))}")


def check_seccomp(seccomp: Any) -> None:
    """Refuse a filter that is not an allowlist, or that permits a call that a sandbox must not have."""
    if not isinstance(seccomp, dict) or seccomp.get("defaultAction") != "SCMP_ACT_ERRNO":
        raise LaunchRefused("no seccomp allowlist")
    if len(seccomp.get("architectures") or ()) > 1:
        raise LaunchRefused("seccomp allows more than the native architecture")
    for rule in seccomp.get("syscalls") or ():
        if rule.get("action") == "SCMP_ACT_ERRNO":
            continue
        names, arguments = set(rule.get("names") or ()), rule.get("args") or []
        if len({item.get("index") for item in arguments}) != len(arguments):
            raise LaunchRefused("seccomp has several conditions on one argument")  # runc allows what meets any of them
        if names & _FORBIDDEN_CALLS:
            raise LaunchRefused(f"seccomp allows {', '.join(sorted(names & _FORBIDDEN_CALLS))}")
        if "clone3" in names:
            raise LaunchRefused("seccomp allows clone3")
        if "clone" in names and not _masks_namespaces(arguments):
            raise LaunchRefused("seccomp allows clone with namespaces")
        if names & {"socket", "socketpair"} and not _closed_socket(arguments):
            raise LaunchRefused("seccomp allows sockets of other families")


def _masks_namespaces(arguments: list[dict[str, Any]]) -> bool:
    return any(
        item.get("index") == 0
        and item.get("op") == "SCMP_CMP_MASKED_EQ"
        and item.get("value", 0) & _CLONE_NAMESPACES == _CLONE_NAMESPACES
        and not item.get("valueTwo")
        for item in arguments
    )


def _closed_socket(arguments: list[dict[str, Any]]) -> bool:
    equal = {item.get("index"): item.get("value") for item in arguments if item.get("op") == "SCMP_CMP_EQ"}
    return equal.get(0) in _FAMILIES or (equal.get(0) == _NETLINK and equal.get(2) == 0)


def check_devices(linux: dict[str, Any]) -> None:
    """Refuse device nodes, and device rules beyond the harmless pseudo devices."""
    if linux.get("devices"):
        raise LaunchRefused("the bundle brings device nodes")
    rules = (linux.get("resources") or {}).get("devices") or []
    if not rules or {name: value for name, value in rules[0].items() if value is not None} != _ALL_DENIED:
        raise LaunchRefused("devices are not denied first")
    for rule in rules[1:]:
        if not rule.get("allow") or rule.get("access") == "m":
            continue
        pair = (rule.get("major"), rule.get("minor"))
        if rule.get("type") != "c" or (pair not in _DEVICES and (pair[0], None) not in _DEVICES):
            raise LaunchRefused("a device is allowed")


def check_mounts(mounts: list[dict[str, Any]], binds: dict[str, Any], volumes: dict[str, Any]) -> None:
    """Refuse bind mounts that hostd did not plan, and a bundle without a planned volume.

    `binds` maps destinations to [source, read-only], `volumes` to [source, read-only, device, inode].
    """
    bound = {mount.get("destination"): mount.get("source") for mount in mounts}
    for place, (source, _, device, inode) in volumes.items():
        if bound.get(place) != source:
            raise LaunchRefused(f"the volume on {place} is missing")
        found = os.stat(source, follow_symlinks=False)
        if (found.st_dev, found.st_ino) != (device, inode):
            raise LaunchRefused(f"the volume on {place} is not what was checked")
    for mount in mounts:
        kind, options = mount.get("type"), mount.get("options") or []
        read_only = "ro" in options and "rw" not in options
        if not _is_bind(mount) and (kind in _KERNEL_MOUNTS or (kind in _READ_ONLY_MOUNTS and read_only)):
            continue
        destination = mount.get("destination")
        planned = volumes.get(str(destination)) or binds.get(str(destination))
        if planned is None or planned[0] != mount.get("source"):
            raise LaunchRefused(f"mount on {destination} is not planned")
        if planned[1] and not read_only:
            raise LaunchRefused(f"mount on {destination} is not read-only")
        if _LIVELY & set(options):
            raise LaunchRefused(f"mount on {destination} has devices or set-user-id bits")
        if {"shared", "rshared", "slave", "rslave"} & set(options):
            raise LaunchRefused(f"mount on {destination} propagates")


def _is_bind(mount: dict[str, Any]) -> bool:
    return mount.get("type") == "bind" or not _BIND.isdisjoint(mount.get("options") or ())


def harden(config: dict[str, Any], plan: dict[str, Any], kind: str) -> None:
    """Check a bundle's configuration and put the plan's namespace into it."""
    profile = PROFILES[kind]
    linux = config.get("linux")
    process = config.get("process")
    if not isinstance(linux, dict) or not isinstance(process, dict):
        raise LaunchRefused("the bundle has no linux or process part")
    if plan["isolation"] and not profile.isolation:
        raise LaunchRefused("only a sandbox with a kernel of its own may mount")
    check_process(process, isolation=plan["isolation"])
    if profile.seccomp or linux.get("seccomp"):
        check_seccomp(linux.get("seccomp"))
    check_devices(linux)
    check_mounts(config.get("mounts") or [], plan["binds"], plan["volumes"])
    if plan["room"] is not None:
        bound_writes(config, plan)
    if _MASKED - set(linux.get("maskedPaths") or ()) or _READ_ONLY - set(linux.get("readonlyPaths") or ()):
        raise LaunchRefused("masked and read-only paths are missing")
    if linux.get("rootfsPropagation") in ("shared", "rshared", "slave", "rslave"):
        raise LaunchRefused("the root file system propagates mounts")
    if any(name.startswith("dev.gvisor.flag") for name in config.get("annotations") or ()):
        raise LaunchRefused("an annotation sets runtime flags")
    namespaces = linux.get("namespaces") or []
    kinds = [entry.get("type") for entry in namespaces]
    if len(kinds) != len(set(kinds)) or set(kinds) - _OPTIONAL_NAMESPACES != _NAMESPACES:
        raise LaunchRefused("namespaces must be each once: " + ", ".join(sorted(_NAMESPACES)))
    if any(entry.get("path") for entry in namespaces):
        raise LaunchRefused("a namespace is shared with something else")
    if os.stat(plan["netns"]).st_ino != plan["netns_inode"]:
        raise LaunchRefused("the planned network namespace is not there")
    next(entry for entry in namespaces if entry["type"] == "network")["path"] = plan["netns"]
    linux["sysctl"] = dict(_SYSCTL)
    linux["rootfsPropagation"] = "rprivate"
    for mount in config.get("mounts") or ():
        if _is_bind(mount):
            options = mount.get("options") or []
            mount["options"] = [*options, *(name for name in _INERT if name not in options)]
    config["hooks"] = remaining_hooks(config.get("hooks") or {})


def bound_writes(config: dict[str, Any], plan: dict[str, Any]) -> None:
    """Refuse a root file system that is larger than planned, and remove writable mounts of other file systems."""
    found = os.statvfs(config["root"]["path"])
    if found.f_bavail * found.f_frsize > plan["room"]:
        raise LaunchRefused("what the container writes is not bounded")
    volumes = {destination for destination, (_, read_only) in plan["binds"].items() if not read_only}
    config["mounts"] = [mount for mount in config.get("mounts") or () if mount.get("destination") not in volumes]


def remaining_hooks(hooks: dict[str, Any]) -> dict[str, Any]:
    """Return the hooks without Docker's network hook; refuse any other."""
    for stage, entries in hooks.items():
        for entry in entries or ():
            arguments = entry.get("args") or [""]
            if stage != "prestart" or arguments[0] != "libnetwork-setkey":
                raise LaunchRefused(f"a {stage} hook")
    return {}


def prepare(kind: str, plans: str, rest: list[str]) -> int | None:
    """Do the work of `create` before the real runtime. Return how many bytes the sandbox can write."""
    container, bundle = create_target(rest)
    plan = claim(plans, container)
    if plan.get("container") != container or plan.get("runtime") != kind:
        raise LaunchRefused("the launch plan is for something else")
    path = os.path.join(bundle, "config.json")
    config = read_json(path)
    harden(config, plan, kind)
    if PROFILES[kind].user_namespace:
        try:
            user_namespace.prepare(config, plan["users"], (plan["netns"], plan["netns_inode"]), plan["volumes"])
        except OSError as error:
            raise LaunchRefused(f"no user namespace: {error.strerror or error} ({error.filename})") from None
        except ValueError as error:
            raise LaunchRefused(f"no user namespace: {error}") from None
    replace_json(path, config)
    room: int | None = plan["room"]
    return room


def sized(kind: str, flags: list[str], room: int | None) -> list[str]:
    """Let the runtime enforce the size, so that the sandbox sees it and gets "no space left" before the disk fills."""
    if room is None:
        return flags
    bounded = PROFILES[kind].size_flag
    return [f"{flag},size={room // 64 * 63}" if flag == bounded else flag for flag in flags]


def check_exec(kind: str, plans: str, rest: list[str]) -> None:
    """Refuse an exec with more privileges than the container. Enter the container's network where runc does not."""
    container, path = exec_target(rest)
    process = read_json(path)
    check_process(process)
    if PROFILES[kind].user_namespace:
        plan = read_json(os.path.join(plans, f"{container}.claimed"))
        user_namespace.prepare_exec(process, (plan["netns"], plan["netns_inode"]))
        replace_json(path, process)


def forget_ended(arguments: list[str], rest: list[str]) -> None:
    """Remove the numbers of ended processes from the state of the container that `delete` names in `rest`.

    Raises:
        LaunchRefused, OSError, ValueError and others: the state is not as expected. It is unchanged then.
    """
    root = _root(arguments)
    for container in filter(_CONTAINER_ID.fullmatch, rest):
        place = os.path.join(root, f"{container}_sandbox:{container}")
        with open(f"{place}.lock", "rb") as lock:  # runsc's own lock
            _lock(lock.fileno())
            state = read_json(f"{place}.state")
            if _without_ended(state, container):
                if os.path.exists(f"{place}.state.sallyport"):  # of an interrupted call
                    os.unlink(f"{place}.state.sallyport")
                replace_json(f"{place}.state", state)


def _root(arguments: list[str]) -> str:
    for index, word in enumerate(arguments):
        name, separator, value = word.partition("=")
        if name == "--root":
            return value if separator else arguments[index + 1]
    raise LaunchRefused("no --root")


def _lock(fd: int) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _without_ended(state: dict[str, Any], container: str) -> bool:
    """Set each number of a process that is not the container's to 0, which is none; return whether there was one."""
    changed = False
    for part, name in ((state.get("sandbox") or {}, "pid"), (state, "goferPid")):
        number = part.get(name)
        if isinstance(number, int) and number != 0 and not _is_of(container, number):
            part[name], changed = 0, True
    return changed


def _is_of(container: str, pid: int) -> bool:
    """Return whether a process has the container's id in its command line or its control groups.

    A process can write over its command line, but only root moves it out of its groups. So hostile code that has taken
    over runsc's own process does not escape the deletion.
    """
    for name in ("cmdline", "cgroup"):
        try:
            with open(f"{_PROC}/{pid}/{name}", "rb") as file:
                if container.encode() in file.read(_MAX_FILE):
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return False
    return False


def report(log: str | None, text: str) -> None:
    """Write the reason to the runtime's log file. Docker shows its last error."""
    print(f"sallyport: {text}", file=sys.stderr)
    if log:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"level": "error", "msg": f"sallyport: {text}", "time": moment}) + "\n")


def main(words: list[str]) -> int:
    """Run the shim. It returns only after a refusal."""
    split = words.index("--")
    (kind, real, plans, *flags), arguments = words[:split], words[split + 1 :]
    log = None
    try:
        _, command, rest, log = split_arguments(arguments)
        if command == "create":
            flags = sized(kind, flags, prepare(kind, plans, rest))
            if not PROFILES[kind].listeners:
                listeners.refuse()
        elif command == "exec":
            check_exec(kind, plans, rest)
        elif command == "delete" and PROFILES[kind].kills_by_number:
            try:
                forget_ended(arguments, rest)
            except (LaunchRefused, *_BROKEN):
                pass  # what is broken must be removable too
        elif command in _REFUSED:
            raise LaunchRefused(f"{command} is not available")
    except LaunchRefused as refusal:
        report(log, str(refusal))
        return 1
    except _BROKEN as error:
        report(log, f"refused: {type(error).__name__} while reading the launch plan or the bundle")
        return 1
    os.execv(real, [real, *flags, *arguments])  # noqa: S606 - becomes the real runtime; no shell
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
