"""Takes every layer of a sandbox's network away, and so shows that a denial test can fail.

What the product never does: the gateway namespace gets an uplink, forwarding and no rules. From then on the sandbox
is on the demo internet like any host. For tests only; the sandbox is deleted afterwards.
"""

import subprocess

from demo.internet import ATTACKER_V6, Internet, in_namespace
from demo.stack import Stack

_UPLINK, _FAR = "ungate0", "ungate1"
_ADDRESS, _ROUTER = "93.184.219.1", "93.184.219.2"
BRIDGE = "ungate-br"


class Ungated:
    """A sandbox without a gate, connected to `internet` through the interface `far`. Use as a context manager."""

    far = _FAR

    def __init__(self, internet: Internet, stack: Stack, sandbox: str) -> None:
        self._internet = internet
        self._gateway = stack.netns(sandbox, "gw")

    def __enter__(self) -> "Ungated":
        gateway = self._gateway
        _in(gateway, "nft", "flush", "ruleset")
        _in(gateway, "ip", "link", "add", _UPLINK, "type", "veth", "peer", "name", _FAR)
        _in(gateway, "ip", "link", "set", _FAR, "netns", self._internet.net)
        _in(gateway, "ip", "addr", "add", f"{_ADDRESS}/24", "dev", _UPLINK)
        _in(gateway, "ip", "link", "set", _UPLINK, "up")
        far = self._internet.path(self._internet.net)
        _in(far, "ip", "addr", "add", f"{_ROUTER}/24", "dev", _FAR)
        _in(far, "ip", "link", "set", _FAR, "up")
        _in(gateway, "ip", "route", "add", "default", "via", _ROUTER)
        for setting, value in (
            ("ipv4/ip_forward", "1"),
            ("ipv4/conf/all/rp_filter", "0"),
            ("ipv4/conf/gw0/rp_filter", "0"),
            ("ipv6/conf/all/disable_ipv6", "0"),
            ("ipv6/conf/gw0/disable_ipv6", "0"),
            (f"ipv6/conf/{_UPLINK}/disable_ipv6", "0"),
            ("ipv6/conf/all/forwarding", "1"),
            ("ipv6/conf/gw0/proxy_ndp", "1"),
        ):
            _set(gateway, setting, value)
        _in(gateway, "ip", "-6", "neigh", "add", "proxy", ATTACKER_V6, "dev", "gw0")
        _in(far, "ip", "-6", "addr", "add", "2606:2800:223::1/64", "dev", _FAR, "nodad")
        _in(gateway, "ip", "-6", "addr", "add", "2606:2800:223::2/64", "dev", _UPLINK, "nodad")
        _in(gateway, "ip", "-6", "route", "add", "default", "via", "2606:2800:223::1")
        rules = (
            "table ip ungate { chain post { type nat hook postrouting priority srcnat; "
            f'oifname "{_UPLINK}" masquerade; }}; }}'
        )
        _in(gateway, "nft", rules)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(
            ["nsenter", f"--net={self._gateway}", "ip", "link", "del", _UPLINK], capture_output=True, check=False
        )


def join_neighbours(stack: Stack, one: str, other: str) -> None:
    """Put two sandboxes on one Ethernet segment, as nothing in the product can."""
    first, second = stack.netns(one, "gw"), stack.netns(other, "gw")
    _in(first, "ip", "link", "add", "join0", "type", "veth", "peer", "name", "join1")
    with open(second) as handle:
        subprocess.run(
            ["nsenter", f"--net={first}", "ip", "link", "set", "join1", "netns", f"/proc/self/fd/{handle.fileno()}"],
            check=True,
            pass_fds=(handle.fileno(),),
            capture_output=True,
        )
    for namespace, port in ((first, "join0"), (second, "join1")):
        _in(namespace, "nft", "flush", "ruleset")
        _in(namespace, "ip", "link", "add", BRIDGE, "type", "bridge")
        for name in (port, "gw0"):
            _in(namespace, "ip", "link", "set", name, "master", BRIDGE)
        for name in (port, BRIDGE):
            _in(namespace, "ip", "link", "set", name, "up")


def _in(netns: str, *command: str) -> None:
    done = subprocess.run(["nsenter", f"--net={netns}", *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _set(netns: str, setting: str, value: str) -> None:
    def write() -> None:
        with open(f"/proc/sys/net/{setting}", "w") as file:
            file.write(value)

    in_namespace(netns, write)
