"""The grants that `serve` requests from vaultd: those that the compiled policy can use, and no wider ones."""

import pytest

from lifecycle.egress.policies import Policies
from policy.api import parse_network_policy
from policy.bindings import parse_bindings
from policy.load import load_text
from policy.operator_file import OperatorFile
from policy.selection import Selection

DOCUMENT = """
version: 1
always_deny: [banned.example.org]
wildcard_bindings: true
policies:
  team:
    rules:
      - {id: one, host: one.example.org, methods: [GET], inject: {secret: a, as: bearer}}
      - {id: two, host: two.example.org, ports: [8443], inject: {secret: b, as: bearer}}
      - {id: banned, host: banned.example.org, inject: {secret: c, as: bearer}}
      - {id: free, host: free.example.org}
"""
ONE = ("a", "one.example.org", 443, "https")
TWO = ("b", "two.example.org", 8443, "https")


@pytest.mark.parametrize(
    ("name", "hosts", "bound", "granted"),
    [
        ("team", None, [], [ONE, TWO]),
        ("team", ["one.example.org"], [], [ONE]),
        ("team", ["free.example.org"], [], []),
        (None, ["one.example.org"], [], []),
        (None, ["*.example.org"], ["x.example.org"], [("inline:1/v", "x.example.org", 443, "https")]),
        (None, ["*.w.example.org"], ["*.w.example.org"], [("inline:1/v", "*.w.example.org", 443, "https")]),
        (None, ["other.example.org"], ["x.example.org"], []),
    ],
)
async def test_a_grant_is_as_narrow_as_the_rule_it_comes_from(
    name: str | None, hosts: list[str] | None, bound: list[str], granted: list[tuple[str, str, int, str]]
) -> None:
    """The rule's host (or pattern), port and scheme.

    No grant for a host that the operator's or the caller's policy denies.
    """
    policies = Policies(OperatorFile(load_text(DOCUMENT)))
    asked = None
    if hosts is not None:
        rules = [{"action": "allow", "target": host} for host in hosts]
        asked = parse_network_policy({"defaultAction": "deny", "egress": rules})
    auth = {"type": "bearer", "credential": "1/v"}
    bindings = parse_bindings([{"name": "b", "match": {"hosts": bound}, "auth": auth}] if bound else [])
    compiled = await policies.enforce(Selection(name, asked, bindings))
    found = [(item.secret, item.host, item.port, item.scheme) for item in compiled.grants]
    assert granted == sorted(found)
