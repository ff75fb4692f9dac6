"""Renders the nftables rules: a slot's gateway namespace, and the guard of the upstream namespace. Pure.

- Each ruleset is one file for one `nft -f`: it is there as a whole or not at all.
- In a slot every base chain has policy drop, and the namespace has no uplink: the rules steer, they do not contain.
- Rules take numbers and parsed addresses only; no text of a caller reaches nft.
- `ct count` forgets connections that are over, the table does not: they leave it after seconds here, not minutes, so
  that opening and closing without end fills nobody's table.
- What is beyond a slot's rates is dropped where it arrives, before anything is spent on it, and counted under the names
  `DROPS`. What would pass them by, a connection that begins in fragments, is dropped with all fragments of TCP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from runtimes.netplan import NetworkPlan

GUARD_TABLE = "sallyport_guard"
CONNECTION_RATE, DATAGRAM_RATE = "connection-rate", "datagram-rate"
DROPS = {"over_connections": CONNECTION_RATE, "over_datagrams": DATAGRAM_RATE}
"""The counters of a slot's gateway namespace, and the rule that the audit log calls each by."""

_CLOSED_V4 = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
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
_CLOSED_V6 = (
    "::/96",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "100::/64",
    "2001::/23",
    "2001:db8::/32",
    "2002::/16",
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
)


@dataclass(frozen=True, slots=True)
class GuardPlan:
    """What gateway workers may dial from the upstream namespace.

    Attributes:
        first_uid, last_uid: the workers' uids, both included.
        resolvers: exact pinholes (address, port), UDP and TCP.
        allowed: operator-named ranges that are open although they are private or local.
        connections, rate, burst: per uid: live connections; new ones per second.
    """

    first_uid: int
    last_uid: int
    resolvers: Sequence[tuple[IPv4Address | IPv6Address, int]] = ()
    allowed: Sequence[IPv4Network | IPv6Network] = ()
    connections: int = 1024
    rate: int = 200
    burst: int = 400


def _brief(family: str) -> str:
    """How long a connection that is over, or not yet one, stays in the table, in seconds."""
    policy = "syn_sent : 20, syn_recv : 10, fin_wait : 30, close_wait : 60, last_ack : 10, time_wait : 2, close : 2"
    return f"""\
	ct timeout brief-{family} {{
		protocol tcp;
		l3proto {family};
		policy = {{ {policy} }};
	}}"""


def render_gateway(plan: NetworkPlan) -> str:
    """Return the ruleset of a slot's gateway namespace; its link must exist already."""
    link = plan.gateway_interface
    return f"""\
table netdev sallyport {{
	counter over_connections {{
	}}
	counter over_datagrams {{
	}}
	chain pin {{
		type filter hook ingress device "{link}" priority -500; policy drop;
		ether saddr != {plan.inside_mac} counter drop
		ether type arp arp operation request arp saddr ether {plan.inside_mac} arp saddr ip {plan.inside} \
arp daddr ip {plan.gateway} limit rate 50/second burst 50 packets accept
		ip protocol tcp ip frag-off & 0x3fff != 0 counter drop
		tcp flags & (syn | ack) == syn limit rate over {plan.syn_rate}/second burst {plan.syn_rate * 2} packets \
counter name "over_connections" drop
		ip protocol != tcp limit rate over {plan.datagram_rate}/second burst {plan.datagram_rate * 2} packets \
counter name "over_datagrams" drop
		ether type ip ether daddr {plan.gateway_mac} ip version 4 ip hdrlength 5 ip saddr {plan.inside} accept
		counter drop
	}}
}}
table inet sallyport {{
{_brief("ip")}
	chain steer {{
		type nat hook prerouting priority dstnat; policy drop;
		iifname "{link}" udp dport {plan.dns_port} redirect to :{plan.dns_port}
		iifname "{link}" tcp dport {plan.dns_port} redirect to :{plan.dns_port}
		iifname "{link}" meta l4proto tcp redirect to :{plan.proxy_port}
	}}
	chain input {{
		type filter hook input priority filter; policy drop;
		iifname != "{link}" counter drop
		ct state invalid counter drop
		ct state established accept
		ct state new ct count over {plan.max_connections} counter drop
		meta l4proto tcp ct timeout set "brief-ip"
		ip daddr {plan.gateway} tcp dport {plan.proxy_port} ct state new ct status dnat accept
		ip daddr {plan.gateway} tcp dport {plan.dns_port} ct state new accept
		ip daddr {plan.gateway} udp dport {plan.dns_port} ct state new accept
		meta l4proto tcp counter reject with tcp reset
		counter drop
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


def render_guard(plan: GuardPlan) -> str:
    """Return the guard's ruleset: matches worker uids only, everybody else's traffic is untouched.

    Refusals are rejections, so that a worker's dial fails at once.
    """
    refuse = "counter reject with icmpx admin-prohibited"
    lines = [
        "ct state established accept",
        *(_resolver(address, port) for address, port in plan.resolvers),
        *(f"{_family(network)} daddr {network} meta l4proto tcp goto paced" for network in plan.allowed),
        f"fib daddr type {{ local, broadcast, anycast, multicast, blackhole, unreachable, prohibit }} {refuse}",
        f"ip daddr {{ {', '.join(_CLOSED_V4)} }} {refuse}",
        f"ip6 daddr {{ {', '.join(_CLOSED_V6)} }} {refuse}",
        "meta l4proto tcp goto paced",
        refuse,
    ]
    body = "\n".join(f"\t\t{line}" for line in lines)
    return f"""\
table inet {GUARD_TABLE} {{
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
	chain paced {{
		ct state new add @rates {{ meta skuid limit rate over {plan.rate}/second burst {plan.burst} packets }} {refuse}
		ct state new add @counts {{ meta skuid ct count over {plan.connections} }} {refuse}
		meta nfproto ipv4 ct timeout set "brief-ip"
		meta nfproto ipv6 ct timeout set "brief-ip6"
		accept
	}}
	chain worker {{
{body}
	}}
	chain output {{
		type filter hook output priority filter; policy accept;
		meta skuid {plan.first_uid}-{plan.last_uid} goto worker
	}}
}}
"""


def _family(item: IPv4Address | IPv6Address | IPv4Network | IPv6Network) -> str:
    return "ip" if item.version == 4 else "ip6"


def _resolver(address: IPv4Address | IPv6Address, port: int) -> str:
    return f"{_family(address)} daddr {address} meta l4proto {{ tcp, udp }} th dport {port} accept"
