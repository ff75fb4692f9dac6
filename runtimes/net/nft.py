"""Renders the nftables rules: a slot's gateway namespace, and guard and floor of the upstream namespace. Pure.

- Each ruleset is one file for one `nft -f`: it is loaded completely or not at all.
- In a slot every base chain has policy drop, and the namespace has no uplink. So the rules only redirect traffic;
  isolation does not depend on them.
- Rules contain only numbers and parsed addresses; no text of a caller reaches nft.
- `ct count` does not count connections that have ended, but the connection table still holds them. Here they leave
  the table after seconds instead of minutes, so that a client that opens and closes connections without pause does
  not fill it.
- Each dropped frame of a sandbox is counted in exactly one named counter of `DROPS`: by its kind, or by the rate that
  it exceeded. (`netstate` adds the packets with damaged IP headers, which the kernel's own stack drops between the
  two tables.) TCP packets that belong to no connection are counted too; the stack answers them with a reset.
- Packets above a slot's rates are dropped at ingress, before any other work is done for them. All fragments are
  dropped, because a connection that begins in fragments would bypass the rates. No traffic of a sandbox needs
  fragments here.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from runtimes.net.plan import NetworkPlan
from wire.gateway_limits import GatewayLimits

GUARD_TABLE = "sallyport_guard"
FLOOR_TABLE = "sallyport_floor"
_ACCEPTED = 0x08000000
"""The bit of a packet's mark that says that the guard has accepted the packet.

The floor clears it just before the guard's chain and after it. So a mark that another program of the host has set has
no effect here, and keeps its other bits. The bit does not change the route, which was chosen before.
"""
MALFORMED = "malformed"
DROPS = {
    "over_connections": ("connection-rate", "connections beyond the rate"),
    "over_datagrams": ("datagram-rate", "datagrams beyond the rate"),
    "over_tracked": ("tracked-connections", "packets of connections beyond the number that is tracked"),
    "drop_tcp": ("drop-tcp", "TCP packets that belong to no connection, or of a wrong source"),
    "drop_quic": ("drop-quic", "UDP datagrams to port 443 (QUIC)"),
    "drop_udp": ("drop-udp", "UDP datagrams that are no DNS questions, or of a wrong source"),
    "drop_icmp": ("drop-icmp", "ICMP packets"),
    "drop_ipv6": ("drop-ipv6", "IPv6 packets"),
    "drop_arp": ("drop-arp", "ARP frames other than honest questions for the gateway"),
    "drop_fragments": ("drop-fragments", "IP fragments"),
    "drop_other": ("drop-other", "frames of another protocol"),
    MALFORMED: ("drop-malformed", "IP packets with a damaged header"),
}
"""The counters of a slot's gateway namespace: the name of each one's rule in the audit log, and the frames it counts.
"""
_KINDS = tuple(name for name in DROPS if name.startswith("drop_"))
_REFUSE = "counter reject with icmpx admin-prohibited"
"""The rejection makes a refused dial fail at once; over IPv6 when its SYN is repeated, after a second."""

_CLOSED_V4 = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "168.63.129.16/32",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/3",
)
_CLOSED_V6 = ("::/3", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "4000::/2", "8000::/1")
"""Everything but global unicast (2000::/3), and the special ranges in it.

This contains loopback, IPv4 in IPv6, NAT64, unique local, link-local, site-local and multicast addresses.
"""
_ISATAP = "::fdff:ffff:0:0 == ::5efe:0:0"
"""The addresses of any network that embed an IPv4 address by their interface identifier."""


_LEAST_CONNECTIONS, _LEAST_RATE = 1024, 200
"""The guard bounds a worker that was taken over. The operator's limits widen these bounds and never narrow them."""


@dataclass(frozen=True, slots=True)
class GuardPlan:
    """The destinations that gateway workers may dial from the upstream namespace.

    Attributes:
        first_uid, last_uid: the workers' uids, both included.
        resolvers: exact exceptions (address, port), UDP and TCP.
        allowed: ranges that the operator has opened although they are private or local.
        connections, rate: per uid: concurrent connections; new connections per second, with a burst of twice that.
    """

    first_uid: int
    last_uid: int
    resolvers: Sequence[tuple[IPv4Address | IPv6Address, int]] = ()
    allowed: Sequence[IPv4Network | IPv6Network] = ()
    connections: int = _LEAST_CONNECTIONS
    rate: int = _LEAST_RATE

    def widened(self, limits: GatewayLimits) -> "GuardPlan":
        """Return the plan for workers with `limits`: the kernel refuses nothing that they permit.

        A dial above a worker's rate waits for its turn, but one above the guard's rate fails. A dial can try four
        addresses, and each repeated SYN counts as a new connection. So the guard's rate is four times that of the
        worker.
        """
        return replace(
            self,
            connections=max(self.connections, 2 * limits.connections),
            rate=max(self.rate, 4 * limits.dial_rate),
        )


def _brief(family: str) -> str:
    """Return the time-outs, in seconds, of tracked connections that are not yet established or are closing."""
    policy = "syn_sent : 20, syn_recv : 10, fin_wait : 30, close_wait : 60, last_ack : 10, time_wait : 2, close : 2"
    return f"""\
	ct timeout brief-{family} {{
		protocol tcp;
		l3proto {family};
		policy = {{ {policy} }};
	}}"""


def _counters(*names: str) -> str:
    return "\n".join(f"\tcounter {name} {{\n\t}}" for name in names)


def render_gateway(plan: NetworkPlan) -> str:
    """Return the ruleset of a slot's gateway namespace; its link must exist already."""
    link = plan.gateway_interface
    return f"""\
table netdev sallyport {{
{_counters("over_connections", "over_datagrams", *_KINDS)}
	chain dropped {{
		ether type ip6 counter name "drop_ipv6" drop
		ether type arp counter name "drop_arp" drop
		ether type != ip counter name "drop_other" drop
		ip protocol tcp counter name "drop_tcp" drop
		ip protocol icmp counter name "drop_icmp" drop
		ip protocol udp udp dport 443 counter name "drop_quic" drop
		ip protocol udp counter name "drop_udp" drop
		counter name "drop_other" drop
	}}
	chain pin {{
		type filter hook ingress device "{link}" priority -500; policy drop;
		ether saddr != {plan.inside_mac} goto dropped
		ether type arp arp operation request arp saddr ether {plan.inside_mac} arp saddr ip {plan.inside} \
arp daddr ip {plan.gateway} limit rate 50/second burst 50 packets accept
		ip frag-off & 0x3fff != 0 counter name "drop_fragments" drop
		tcp flags & (syn | ack) == syn limit rate over {plan.syn_rate}/second burst {plan.syn_rate * 2} packets \
counter name "over_connections" drop
		ip protocol != tcp limit rate over {plan.datagram_rate}/second burst {plan.datagram_rate * 2} packets \
counter name "over_datagrams" drop
		ether type ip ether daddr {plan.gateway_mac} ip version 4 ip hdrlength 5 ip saddr {plan.inside} accept
		goto dropped
	}}
}}
table inet sallyport {{
{_brief("ip")}
{_counters("over_tracked", *(name for name in _KINDS if name not in ("drop_arp", "drop_fragments")))}
	chain dropped {{
		meta nfproto ipv6 counter name "drop_ipv6" drop
		meta l4proto tcp counter name "drop_tcp" drop
		meta l4proto icmp counter name "drop_icmp" drop
		udp dport 443 counter name "drop_quic" drop
		meta l4proto udp counter name "drop_udp" drop
		counter name "drop_other" drop
	}}
	chain known {{
		type filter hook prerouting priority mangle; policy drop;
		iifname "{link}" ct state invalid goto dropped
		iifname "{link}" meta l4proto != {{ tcp, udp }} goto dropped
		iifname "{link}" ct state new tcp flags & (fin | syn | rst | ack) != syn counter name "drop_tcp"
		accept
	}}
	chain steer {{
		type nat hook prerouting priority dstnat; policy drop;
		iifname "{link}" udp dport {plan.dns_port} redirect to :{plan.dns_port}
		iifname "{link}" tcp dport {plan.dns_port} redirect to :{plan.dns_port}
		iifname "{link}" meta l4proto tcp redirect to :{plan.proxy_port}
		iifname "{link}" goto dropped
	}}
	chain input {{
		type filter hook input priority filter; policy drop;
		iifname != "{link}" counter drop
		ct state invalid goto dropped
		ct state established accept
		ct state new ct count over {plan.max_connections} counter name "over_tracked" drop
		meta l4proto tcp ct timeout set "brief-ip"
		ip daddr {plan.gateway} tcp dport {plan.proxy_port} ct state new ct status dnat accept
		ip daddr {plan.gateway} tcp dport {plan.dns_port} ct state new accept
		ip daddr {plan.gateway} udp dport {plan.dns_port} ct state new accept
		meta l4proto tcp counter name "drop_tcp" reject with tcp reset
		goto dropped
	}}
	chain forward {{
		type filter hook forward priority filter; policy drop;
		counter drop
	}}
	chain output {{
		type filter hook output priority filter; policy drop;
		oifname != "{link}" counter drop
		ct state established accept
		meta l4proto tcp ct state related tcp flags & rst == rst accept
		ip saddr {plan.gateway} ip daddr {plan.inside} meta l4proto tcp ct state new accept
		counter drop
	}}
}}
"""


def rules_digest(plan: NetworkPlan) -> str:
    """Return the digest of a slot's ruleset and of the limit of its link."""
    limit = "" if plan.bandwidth is None else f"bandwidth {plan.bandwidth}\n"
    return hashlib.sha256(f"{render_gateway(plan)}{limit}".encode()).hexdigest()


def render_guard(plan: GuardPlan, owner: str) -> str:
    """Return the guard's ruleset. It matches only workers' uids; traffic of other uids does not change.

    - Only packets of connections that a worker has opened leave. A packet that answers another's connection, or
      belongs to no tracked flow, is dropped.
    - Each packet is judged by its destination, not by its flow's state, because the flow can belong to another
      process.
    - `owner` is the table's comment. A server uses it to distinguish its table from another server's.
    """
    refuse, over = _REFUSE, f"limit rate over {plan.rate}/second burst {2 * plan.rate} packets"
    lines = [
        *(_resolver(address, port) for address, port in plan.resolvers),
        *(f"{_family(network)} daddr {network} meta l4proto tcp goto paced" for network in plan.allowed),
        f"fib daddr type {{ local, broadcast, anycast, multicast, blackhole, unreachable, prohibit }} {refuse}",
        f"ip daddr {{ {', '.join(_CLOSED_V4)} }} {refuse}",
        f"ip6 daddr {{ {', '.join(_CLOSED_V6)} }} {refuse}",
        f"ip6 daddr & {_ISATAP} {refuse}",
        "meta l4proto tcp goto paced",
        refuse,
    ]
    body = "\n".join(f"\t\t{line}" for line in lines)
    return f"""\
table inet {GUARD_TABLE} {{
	comment "{owner}"
	flags owner;
{_brief("ip")}
{_brief("ip6")}
	set rates {{
		type uid
		size 8192
		flags dynamic,timeout
		timeout 1m
	}}
	set counts {{
		type uid
		size 8192
		flags dynamic
	}}
	chain passed {{
		meta mark set meta mark or {_ACCEPTED:#010x}
		accept
	}}
	chain paced {{
		ct state new add @rates {{ meta skuid {over} }} {refuse}
		ct state new add @counts {{ meta skuid ct count over {plan.connections} }} {refuse}
		meta nfproto ipv4 ct timeout set "brief-ip"
		meta nfproto ipv6 ct timeout set "brief-ip6"
		goto passed
	}}
	chain dialled {{
{body}
	}}
	chain worker {{
		ct direction original goto dialled
		counter drop
	}}
	chain output {{
		type filter hook output priority filter; policy accept;
		meta skuid {plan.first_uid}-{plan.last_uid} goto worker
	}}
}}
"""


def render_floor(plan: GuardPlan) -> str:
    """Return the floor's ruleset: it drops each packet of a worker that the guard has not accepted.

    The table has no owner, so it stays when guard or hostd end. It replaces an existing one.
    """
    workers, cleared = f"meta skuid {plan.first_uid}-{plan.last_uid}", 0xFFFFFFFF & ~_ACCEPTED
    return f"""\
table inet {FLOOR_TABLE} {{
}}
delete table inet {FLOOR_TABLE}
table inet {FLOOR_TABLE} {{
	chain before {{
		type filter hook output priority filter - 1; policy accept;
		{workers} meta mark set meta mark and {cleared:#010x}
	}}
	chain after {{
		type filter hook output priority filter + 1; policy accept;
		{workers} goto worker
	}}
	chain worker {{
		meta mark and {_ACCEPTED:#010x} != {_ACCEPTED:#010x} {_REFUSE}
		meta mark set meta mark and {cleared:#010x}
	}}
}}
"""


def _family(item: IPv4Address | IPv6Address | IPv4Network | IPv6Network) -> str:
    return "ip" if item.version == 4 else "ip6"


def _resolver(address: IPv4Address | IPv6Address, port: int) -> str:
    return f"{_family(address)} daddr {address} meta l4proto {{ tcp, udp }} th dport {port} goto passed"
