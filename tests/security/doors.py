"""The table of the doors (interfaces of the kernel) that `hardening_probe.py` tries, with the answer at each place.

The table is complete: no other door may be open. The places are:

- `runc`, `runsc`: a sandbox.
- `opened`: a container of runsc with every capability. If the door is refused there, too, gVisor does not have it.
- `host`: root on the host in its own namespaces, without a filter. It is the control for runc.

An answer is `open` or the name of the error. A door that is open in a sandbox on runsc belongs to the sandbox's own
kernel: its keyring, its priorities, its files. It changes nothing outside of the sandbox, whose limits are set outside.
"""

from typing import NamedTuple


class Door(NamedTuple):
    """The answers at one door.

    Attributes:
        lacking: the host's answer if its kernel was built without the door.
        never: why the door is open at no place.
    """

    runc: str
    runsc: str
    opened: str
    host: str = "open"
    lacking: str = ""
    without: str = ""
    """runc's answer on a kernel without the door, if it differs from `runc`."""
    never: str = ""

    def answer(self, place: str, host: str) -> str:
        """Return the expected answer at `place` on a machine where the host answers `host`."""
        if self.lacking and host == self.lacking:
            return {"host": self.lacking, "runc": self.without or self.runc}.get(place) or getattr(self, place)
        return str(getattr(self, place))


_NOT_OWNED = "a user namespace has no right over a network that it does not own"
DOORS = {
    "keyctl": Door("EPERM", "open", "open"),
    "add_key": Door("EPERM", "EACCES", "EACCES"),
    "bpf": Door("EPERM", "EPERM", "EINVAL"),
    "perf_event_open": Door("EPERM", "ENODEV", "ENODEV"),
    "userfaultfd": Door("EPERM", "ENOSYS", "ENOSYS"),
    "io_uring": Door("EPERM", "ENOSYS", "ENOSYS"),
    "open_by_handle_at": Door("EPERM", "ENOTSUP", "ENOTSUP"),
    "process_vm_readv": Door("EPERM", "EPERM", "open"),
    "pidfd_getfd": Door("EPERM", "EPERM", "open"),
    "ptrace init": Door("EPERM", "EPERM", "open"),
    "fsopen": Door("EPERM", "EPERM", "open"),
    "mount": Door("EPERM", "EPERM", "open"),
    "remount /proc/sys": Door("EPERM", "EPERM", "EINVAL"),
    "setns": Door("EPERM", "EPERM", "open"),
    "init_module": Door("EPERM", "EPERM", "ENOSYS", lacking="ENOSYS"),
    "kexec_load": Door("EPERM", "EPERM", "ENOSYS", lacking="ENOSYS"),
    "mknod": Door("EPERM", "EPERM", "open"),
    "tun": Door("ENOENT", "EPERM", "open"),
    "route": Door("EPERM", "EPERM", "open"),
    "chroot": Door("EPERM", "EPERM", "open"),
    "sethostname": Door("EPERM", "EPERM", "open"),
    "nice -5": Door("EACCES", "open", "open"),
    "raw icmp": Door("EPERM", "EPERM", "open"),
    "raw icmp6": Door("EPERM", "EPERM", "open"),
    "raw ip": Door("EPERM", "EPERM", "open"),
    "raw ip from a user namespace": Door("EPERM", "EPERM", "EPERM", host="EPERM", never=_NOT_OWNED),
    "packet from a user namespace": Door("EPERM", "EPERM", "EPERM", host="EPERM", never=_NOT_OWNED),
    "route from a user namespace": Door("EPERM", "EPERM", "EPERM", host="EPERM", never=_NOT_OWNED),
    "ping socket": Door("EACCES", "open", "open"),
    "sctp": Door("EPROTONOSUPPORT", "EINVAL", "EINVAL", lacking="EPROTONOSUPPORT"),
    "unshare mnt": Door("EPERM", "EPERM", "open"),
    "unshare uts": Door("EPERM", "EPERM", "open"),
    "unshare ipc": Door("EPERM", "EPERM", "open"),
    "unshare user": Door("EPERM", "open", "open"),
    "unshare net": Door("EPERM", "EPERM", "open"),
    "family packet": Door("EPERM", "EPERM", "open"),
    "family vsock": Door("EPERM", "EAFNOSUPPORT", "EAFNOSUPPORT"),
    "family alg": Door("EPERM", "EAFNOSUPPORT", "EAFNOSUPPORT", lacking="EAFNOSUPPORT"),
    "family xdp": Door("EPERM", "EAFNOSUPPORT", "EAFNOSUPPORT"),
    "family key": Door("EPERM", "EAFNOSUPPORT", "EAFNOSUPPORT", lacking="EAFNOSUPPORT"),
    "family can": Door("EPERM", "EAFNOSUPPORT", "EAFNOSUPPORT", lacking="EAFNOSUPPORT"),
    "family tipc": Door("EPERM", "EAFNOSUPPORT", "EAFNOSUPPORT", lacking="EAFNOSUPPORT"),
    "netlink sock_diag": Door("EPERM", "EPROTONOSUPPORT", "EPROTONOSUPPORT"),
    "netlink xfrm": Door("EPERM", "EPROTONOSUPPORT", "EPROTONOSUPPORT"),
    "netlink audit": Door("EPERM", "EPROTONOSUPPORT", "EPROTONOSUPPORT"),
    "netlink netfilter": Door("EPERM", "EPROTONOSUPPORT", "EPROTONOSUPPORT"),
    "netlink uevent": Door("EPERM", "open", "open"),
    "netlink generic": Door("EPERM", "EPROTONOSUPPORT", "EPROTONOSUPPORT"),
    "write /proc/sysrq-trigger": Door("EACCES", "open", "open", lacking="ENOENT", without="ENOENT"),
    "write /proc/sys/kernel/core_pattern": Door("EACCES", "ENOENT", "ENOENT"),
    "write /proc/sys/kernel/hostname": Door("EACCES", "open", "open"),
    "write /proc/sys/kernel/modprobe": Door("EACCES", "ENOENT", "ENOENT", lacking="ENOENT", without="ENOENT"),
    "write /proc/sys/net/ipv4/ip_forward": Door("EACCES", "open", "open"),
    "write /proc/sys/vm/overcommit_memory": Door("EACCES", "open", "open"),
    "write /proc/irq/default_smp_affinity": Door("EACCES", "ENOENT", "ENOENT"),
    "write /proc/1/oom_score_adj": Door("open", "open", "open"),
    "write /proc/1/mem": Door("EACCES", "EACCES", "open"),
    "write /sys/kernel/uevent_helper": Door("EROFS", "ENOENT", "ENOENT", lacking="ENOENT", without="ENOENT"),
    "write /sys/kernel/mm/transparent_hugepage/enabled": Door("EROFS", "ENOENT", "ENOENT"),
    "write /sys/fs/cgroup/memory.max": Door("EACCES", "ENOENT", "ENOENT", lacking="ENOENT", without="ENOENT"),
    "write /sys/fs/cgroup/cgroup.procs": Door("EACCES", "ENOENT", "ENOENT", lacking="ENOENT", without="ENOENT"),
    "write /sys/fs/cgroup/memory/memory.limit_in_bytes": Door(
        "EACCES", "open", "ENOENT", lacking="ENOENT", without="ENOENT"
    ),
    "write /sys/fs/cgroup/memory/release_agent": Door("ENOENT", "ENOENT", "ENOENT", lacking="ENOENT"),
    "write /sys/fs/cgroup/devices/devices.allow": Door("EACCES", "open", "ENOENT", lacking="ENOENT", without="ENOENT"),
    "write /sys/fs/cgroup/pids/pids.max": Door("EACCES", "open", "ENOENT", lacking="ENOENT", without="ENOENT"),
    "read /proc/kcore": Door("ENODATA", "ENOENT", "ENOENT", lacking="ENOENT", without="ENOENT"),
    "read /proc/keys": Door("ENODATA", "ENOENT", "ENOENT"),
    "read /proc/timer_list": Door("ENODATA", "ENOENT", "ENOENT"),
    "read /proc/kmsg": Door("EACCES", "ENOENT", "ENOENT"),
    "read /proc/1/environ": Door("EACCES", "EACCES", "open"),
    "read /dev/mem": Door("ENOENT", "ENOENT", "ENOENT", lacking="ENOENT"),
}
SESSION = {
    f"write /sys/fs/cgroup/{name}": "EROFS"
    for name in ("memory/memory.limit_in_bytes", "devices/devices.allow", "pids/pids.max")
}
"""The answers of an isolated session on runsc where they differ from those of its sandbox."""
