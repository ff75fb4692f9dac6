"""The address plan of a slot. Pure data.

- Every slot has the same IP and MAC addresses, because each slot is separate from all others. So nothing is
  allocated, and a checkpoint taken in one slot can be restored in any other.
- The range (192.0.2.0/30, RFC 5737) is routed nowhere: a packet that left the slot would get no answer.
"""

from dataclasses import dataclass, replace
from ipaddress import IPv4Address

from wire.gateway_limits import GatewayLimits

_LARGEST_PACKETS = 128 * 1024


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """Both ends of a slot's only link.

    Attributes:
        inside, gateway: addresses of the sandbox's and of the gateway's end.
        proxy_port, dns_port: the ports on which the gateway worker listens on `gateway`.
        max_connections: tracked connections of one slot; further new ones are dropped.
        syn_rate: new connections of one slot per second; the burst is twice that.
        datagram_rate: packets other than TCP (DNS questions) per second; the burst is twice that.
        bandwidth: bytes a second of the link, in each direction; None is no limit.
    """

    inside: IPv4Address
    gateway: IPv4Address
    prefix: int
    inside_interface: str
    gateway_interface: str
    inside_mac: str
    gateway_mac: str
    proxy_port: int
    dns_port: int
    max_connections: int
    syn_rate: int
    datagram_rate: int
    bandwidth: int | None = None

    @property
    def burst(self) -> int:
        """The bytes that pass at once, and those that wait at most: a tenth of a second, and two of the largest packets
        that the link carries.
        """
        return max((self.bandwidth or 0) // 10, _LARGEST_PACKETS)


PLAN = NetworkPlan(
    inside=IPv4Address("192.0.2.2"),
    gateway=IPv4Address("192.0.2.1"),
    prefix=30,
    inside_interface="eth0",
    gateway_interface="gw0",
    inside_mac="02:53:50:00:00:02",
    gateway_mac="02:53:50:00:00:01",
    proxy_port=15001,
    dns_port=53,
    max_connections=2048,
    syn_rate=GatewayLimits().connection_rate,
    datagram_rate=500,
)
"""The plan under the default limits."""

_TRACKED_PER_CONNECTION = 4
"""Connections that are closing, and DNS questions, are tracked too."""


def slot_plan(limits: GatewayLimits, bandwidth: int | None = None) -> NetworkPlan:
    """Return the plan of all slots of a host under these limits."""
    tracked = max(PLAN.max_connections, _TRACKED_PER_CONNECTION * limits.connections)
    return replace(PLAN, syn_rate=limits.connection_rate, max_connections=tracked, bandwidth=bandwidth)


RESOLV_CONF = f"nameserver {PLAN.gateway}\noptions timeout:3 attempts:2\n"


def hosts_file(hostname: str) -> str:
    """Return the sandbox's /etc/hosts."""
    return f"127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n{PLAN.inside} {hostname}\n"


_COMMON_SYSCTLS = {
    "net/ipv4/ip_forward": "0",
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
    "net/ipv4/conf/all/accept_redirects": "0",
    "net/ipv4/conf/default/accept_redirects": "0",
    "net/ipv4/conf/all/secure_redirects": "0",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv4/conf/all/accept_source_route": "0",
    "net/ipv4/conf/default/accept_source_route": "0",
    "net/ipv4/conf/all/route_localnet": "0",
    "net/ipv4/conf/default/route_localnet": "0",
}

GATEWAY_SYSCTLS = _COMMON_SYSCTLS | {
    "net/ipv4/conf/all/rp_filter": "1",
    "net/ipv4/conf/default/rp_filter": "1",
    "net/ipv4/conf/all/arp_ignore": "2",
    "net/ipv4/conf/all/arp_announce": "2",
    "net/ipv4/conf/all/arp_accept": "0",
    "net/ipv4/conf/default/arp_accept": "0",
    "net/ipv4/icmp_echo_ignore_all": "1",
    "net/ipv4/tcp_syncookies": "1",
}
"""Set in the gateway's namespace before any link exists there."""

WATCHED_SYSCTLS = (
    *GATEWAY_SYSCTLS,
    "net/ipv6/conf/all/forwarding",
    *(
        f"net/ipv4/conf/{PLAN.gateway_interface}/{name}"
        for name in ("forwarding", "proxy_arp", "route_localnet", "rp_filter", "arp_ignore")
    ),
    f"net/ipv6/conf/{PLAN.gateway_interface}/disable_ipv6",
)
"""The settings that are compared while the sandbox runs: those above, and those that its link derives from them."""

SANDBOX_SYSCTLS = _COMMON_SYSCTLS | {
    "net/ipv4/ping_group_range": "1 0",
    "net/ipv4/ip_unprivileged_port_start": "0",
}
"""Set in the sandbox's namespace (runc sees these; runsc has a network stack of its own)."""
