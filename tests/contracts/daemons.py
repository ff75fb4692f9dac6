"""The behaviour of each daemon on which its clients can rely: one table of calls for each kind of client.

The stand-ins of the tests and the real daemons must give the same answers. The calls are made in the table's order,
to a daemon without earlier calls.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import wire
from wire.api import compiler, hostd, vaultd
from wire.operations import Request, operation, parameters

type Call = Callable[..., Awaitable[wire.Message]]
type Answers = dict[str, frozenset[str] | str]

NAME = f"sbx-{'c' * 24}"
OTHER = f"sbx-{'d' * 24}"
SNAPSHOT = "00000000-0000-4000-8000-000000000000"
HOST = "api.example.org"
INLINE = "inline:token"


@dataclass(frozen=True, slots=True)
class Step:
    """One call.

    `answer` is the set of keys that its answer has at least, or the code of its error. `a.b` is a key of the object
    `a`.
    """

    what: str
    op: str
    answer: frozenset[str] | str
    parameters: dict[str, Any] = field(default_factory=dict)


def _step(what: str, op: str, answer: set[str] | str, **parameters: Any) -> Step:
    return Step(what, op, answer if isinstance(answer, str) else frozenset(answer), parameters)


def _grant(host: str = HOST) -> vaultd.GrantForm:
    return vaultd.GrantForm(INLINE, host, 443, "https")


def _record(kind: str, decision: str, **fields: str) -> dict[str, Any]:
    return {"entry": {"kind": kind, "decision": decision, "fields": fields}, "durable": False}


def _ask(what: str, request: Request[Any], answer: set[str] | str, **changed: Any) -> Step:
    return _step(what, operation(request), answer, **(parameters(request) | changed))


_ONE, _BOTH = (_grant(),), (_grant(), _grant("b.example.org"))
_OPEN = vaultd.OpenSandbox(NAME, NAME, names=(HOST,))
_MANY = {f"inline:{number}": "v" for number in range(vaultd.MOST_GRANTS + 1)}

VAULTD = (
    _ask("ping", wire.Ping(), set()),
    _step("an operation that there is not", "no-such-operation", "unknown_op"),
    _ask("an operation that is not serve's", vaultd.List(), "forbidden"),
    _ask("a login that is not serve's", vaultd.WriteLogin("token", HOST, 443), "forbidden"),
    _ask("a regrant of a sandbox that is not open", vaultd.Regrant(NAME, ()), "unknown_sandbox"),
    _ask("a narrowing of a sandbox that is not open", vaultd.Narrow(NAME, ()), "unknown_sandbox"),
    _ask("the end of a sandbox that is not open", vaultd.CloseSandbox(NAME), set()),
    _step("an opening without a lineage", "open_sandbox", "invalid", sandbox=NAME),
    _ask("an opening with a malformed grant", _OPEN, "invalid", grants=[{"host": HOST}]),
    _ask("an opening with a grant of no host", replace(_OPEN, grants=(_grant(""),)), "invalid"),
    _ask("an opening", _OPEN, {"root_pem"}),
    _ask("a grant of a value that there is not", vaultd.Regrant(NAME, _ONE), "unknown_secret"),
    _ask(
        "a value and its grants",
        vaultd.Regrant(NAME, _BOTH, {INLINE: vaultd.Value("v1")}, bounds=_BOTH, names=(HOST,)),
        set(),
    ),
    _ask("a kept value", vaultd.Regrant(NAME, _ONE, {}, (INLINE,), names=(HOST,)), set()),
    _ask(
        "a kept value for a host that it was not given for",
        vaultd.Regrant(NAME, (_grant("c.example.org"),), {}, (INLINE,)),
        "not_bound",
    ),
    _ask("a kept value that there is not", vaultd.Regrant(NAME, (), {}, ("inline:none",)), "unknown_secret"),
    _ask("more values than a sandbox has", vaultd.Regrant(NAME, ()), "invalid", inline=_MANY),
    _ask("a narrowing", vaultd.Narrow(NAME, (), (INLINE,)), set()),
    _ask("a narrowing that takes the value", vaultd.Narrow(NAME, (), ()), set()),
    _ask("a value that was taken", vaultd.Regrant(NAME, (), {}, (INLINE,)), "unknown_secret"),
    _ask("the end", vaultd.CloseSandbox(NAME), set()),
    _ask("a regrant after the end", vaultd.Regrant(NAME, ()), "unknown_sandbox"),
)

AUDITD = (
    _step("ping", "ping", set()),
    _step("an unknown operation", "no-such-operation", "unknown_op"),
    _step("a record", "record", {"seq"}, **_record("lifecycle.create", "info", sandbox=NAME)),
    _step("a record of another producer's kind", "record", "invalid", **_record("request", "allow")),
    _step("a record of no kind", "record", "invalid", **_record("no-such-kind", "info")),
    _step("a record with no decision", "record", "invalid", **_record("lifecycle.create", "maybe")),
    _step("a record of an unknown field", "record", "invalid", **_record("lifecycle.create", "info", nothing="x")),
    _step("a record without its entry", "record", "invalid", durable=False),
)

HOSTD = (
    _step("ping", "ping", set()),
    _step("an unknown operation", "no-such-operation", "unknown_op"),
    _ask("the list", hostd.List(), {"sandboxes"}),
    _ask("the images", hostd.Images(), {"images"}),
    _ask("an unknown image", hostd.DescribeImage("no-such-image"), "unknown_image"),
    _ask("an unknown sandbox", hostd.Inspect(OTHER), "unknown_sandbox"),
    _ask("the output of an unknown sandbox", hostd.ReadOutput(OTHER, 1), "unknown_sandbox"),
    _step("no line of an output", "read_output", "invalid", sandbox=OTHER, lines=0),
    _ask("the removal of an unknown sandbox", hostd.Remove(OTHER), {"residue"}),
    _ask("a policy for an unknown sandbox", hostd.Configure(OTHER, "{}", False), "unknown_sandbox"),
    _ask("the members that can be claimed", hostd.Claimable((OTHER,)), {"sandboxes"}),
    _step("the claim of no sandbox", "claim_member", "invalid", sandbox="../x", selection="{}", env={}),
    _ask("the claim of an unknown sandbox", hostd.ClaimMember(OTHER, "{}", {}), "unknown_sandbox"),
    _ask("the pause of an unknown sandbox", hostd.Pause(OTHER), "unknown_sandbox"),
    _ask("the resume of an unknown sandbox", hostd.Resume(OTHER), "unknown_sandbox"),
    _ask("the volumes", hostd.ListVolumes(), {"volumes"}),
    _ask("the removal of an unknown volume", hostd.RemoveVolume("none"), "unknown_volume"),
    _step("the removal of a path as a volume", "remove_volume", "invalid", name="../none"),
    _ask("the snapshots", hostd.ListSnapshots(), {"snapshots"}),
    _ask("a snapshot of an unknown sandbox", hostd.TakeSnapshot(OTHER, SNAPSHOT), "unknown_sandbox"),
    _step("a snapshot of no id", "take_snapshot", "invalid", sandbox=OTHER, snapshot="../x"),
    _ask("the removal of an unknown snapshot", hostd.RemoveSnapshot(SNAPSHOT), set()),
    _step("a launch of nothing", "launch", "invalid"),
)

AUDIT_CHANNEL = (
    _step("ping", "ping", set()),
    _step("an unknown operation", "attach", "unknown_op"),
    _step("a record", "record", {"seq"}, **_record("vault.open", "info", sandbox=NAME)),
    _step("a durable one", "record", {"seq"}, **(_record("vault.close", "info", sandbox=NAME) | {"durable": True})),
    _step("some records", "records", {"seq"}, entries=[_record("gap", "info", reason="r")["entry"]]),
    _step("no records", "records", "invalid", entries=[]),
    _step("a record of another producer's kind", "record", "invalid", **_record("request", "allow")),
    _step("a record with no decision", "record", "invalid", **_record("vault.open", "maybe")),
    _step("a record of a value", "record", "invalid", **_record("vault.open", "info", value="v")),
)
"""The calls of vaultd's audit channel."""

SELECTION = {"policy_name": None, "network_policy": None, "bindings": []}

COMPILER = (
    _step("ping", "ping", set()),
    _step("an unknown operation", "no-such-operation", "unknown_op"),
    _step("a question without a selection", "compile", "invalid"),
    _step("a selection that is no text", "compile", "invalid", selection=None),
    _ask("no selection", compiler.Compile("null"), "invalid"),
    _ask("a selection", compiler.Compile(json.dumps(SELECTION)), {"policy"}),
)
"""The calls of hostd to the compiler."""


def expected(steps: tuple[Step, ...]) -> Answers:
    """Return the answers of the table."""
    found = {step.what: step.answer for step in steps}
    assert len(steps) == len(found), "two steps have one name"
    return found


async def answers(call: Call, steps: tuple[Step, ...]) -> Answers:
    """Make the calls. Return the expected keys that each answer has, or the code of its error."""
    return {step.what: await _answer(call, step) for step in steps}


async def _answer(call: Call, step: Step) -> frozenset[str] | str:
    try:
        answer = await call(step.op, **step.parameters)
    except wire.RemoteError as error:
        return error.code
    keys = _keys(answer)
    return step.answer & keys if isinstance(step.answer, frozenset) else keys


def _keys(answer: wire.Message) -> frozenset[str]:
    inner = (f"{key}.{part}" for key, value in answer.items() if isinstance(value, dict) for part in value)
    return frozenset((*answer, *inner))
