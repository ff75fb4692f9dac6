"""Removes every layer of a sandbox's network isolation, to show that a denial test can fail.

The product never does this: the gateway namespace gets an uplink, forwarding and no rules. Then the sandbox is
connected to the demo internet like any host. For tests only; the sandbox is deleted afterwards.
"""

import subprocess

from testbed.internet import ATTACKER_V6, DNS_ADDRESS, Internet, in_namespace
from testbed.stack import Stack

BRIDGE = "ungate-br"
_TO_RESOLVER = f"ip daddr 192.0.2.1 meta l4proto {{ tcp, udp }} th dport 53 dnat to {DNS_ADDRESS}"
_RESOLVER = f"table ip ungate {{ chain pre {{ type nat hook prerouting priority dstnat; {_TO_RESOLVER}; }}; }}"
"""Redirects the sandbox's resolver address to the internet's resolver."""


def far_end_of(index: int) -> str:
    """Return the name, in the demo internet, of the interface that `uplink` made."""
    return f"ungated{index}"


def uplink(gateway: str, net: str, index: int = 0) -> None:
    """Connect the gateway namespace at `gateway` with the demo internet at `net`: a link, routes, forwarding.

    Its rules do not change. `index` distinguishes several of them; below 32.
    """
    near, far = f"ungate{index}", far_end_of(index)
    address, router = f"93.184.{219 + index}.1", f"93.184.{219 + index}.2"
    six = f"2606:2800:{0x223 + index:x}"
    _in(gateway, "ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", net)
    _in(gateway, "ip", "addr", "add", f"{address}/24", "dev", near)
    _in(gateway, "ip", "link", "set", near, "up")
    _in(net, "ip", "addr", "add", f"{router}/24", "dev", far)
    _in(net, "ip", "link", "set", far, "up")
    _in(gateway, "ip", "route", "add", "default", "via", router)
    for setting, value in (
        ("ipv4/ip_forward", "1"),
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/gw0/rp_filter", "0"),
        ("ipv6/conf/all/disable_ipv6", "0"),
        ("ipv6/conf/gw0/disable_ipv6", "0"),
        (f"ipv6/conf/{near}/disable_ipv6", "0"),
        ("ipv6/conf/all/forwarding", "1"),
        ("ipv6/conf/gw0/proxy_ndp", "1"),
    ):
        _set(gateway, setting, value)
    _in(gateway, "ip", "-6", "neigh", "add", "proxy", ATTACKER_V6, "dev", "gw0")
    _in(net, "ip", "-6", "addr", "add", f"{six}::1/64", "dev", far, "nodad")
    _in(gateway, "ip", "-6", "addr", "add", f"{six}::2/64", "dev", near, "nodad")
    _in(gateway, "ip", "-6", "route", "add", "default", "via", f"{six}::1")
    masquerade = f'oifname "{near}" masquerade'
    rules = f"table ip ungate {{ chain post {{ type nat hook postrouting priority srcnat; {masquerade}; }}; }}"
    _in(gateway, "nft", rules)


class Ungated:
    """A sandbox without a gateway, connected to `internet` through the interface `far`. Use as a context manager."""

    far = far_end_of(0)

    def __init__(self, internet: Internet, stack: Stack, sandbox: str) -> None:
        self._internet = internet
        self._gateway = stack.netns(sandbox, "gw")

    def __enter__(self) -> "Ungated":
        _in(self._gateway, "nft", "flush", "ruleset")
        uplink(self._gateway, self._internet.path(self._internet.net))
        _in(self._gateway, "nft", _RESOLVER)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(
            ["nsenter", f"--net={self._gateway}", "ip", "link", "del", "ungate0"], capture_output=True, check=False
        )


def join_neighbours(stack: Stack, one: str, other: str) -> None:
    """Put two sandboxes on one Ethernet segment, which nothing in the product can do."""
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
