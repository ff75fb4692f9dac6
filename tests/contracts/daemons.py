"""What a client may rely on in each daemon: one table of calls for each kind of client.

The stand-ins of the tests and the real daemons have to give the same answers. The calls are made in their order, at a
daemon at which none was made before.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import wire

type Call = Callable[..., Awaitable[wire.Message]]
type Answers = dict[str, frozenset[str] | str]

NAME = f"sbx-{'c' * 24}"
OTHER = f"sbx-{'d' * 24}"
HOST = "api.example.org"
INLINE = "inline:token"


@dataclass(frozen=True, slots=True)
class Step:
    """One call. `answer`: the keys that its answer has at least, or the code of its error.

    `a.b` is a key of the object `a`.
    """

    what: str
    op: str
    answer: frozenset[str] | str
    parameters: dict[str, Any] = field(default_factory=dict)


def _step(what: str, op: str, answer: set[str] | str, **parameters: Any) -> Step:
    return Step(what, op, answer if isinstance(answer, str) else frozenset(answer), parameters)


def _grant(host: str = HOST, secret: str = INLINE) -> dict[str, Any]:
    return {"secret": secret, "host": host, "port": 443, "scheme": "https"}


def _record(kind: str, decision: str, **fields: str) -> dict[str, Any]:
    return {"entry": {"kind": kind, "decision": decision, "fields": fields}, "durable": False}


_OPEN = {"sandbox": NAME, "lineage": NAME, "grants": [], "inline": {}, "names": [HOST]}
_BOTH = [_grant(), _grant("b.example.org")]

VAULTD = (
    _step("ping", "ping", set()),
    _step("an operation that is not serve's", "no-such-operation", "forbidden"),
    _step("a regrant of a sandbox that is not open", "regrant", "unknown_sandbox", sandbox=NAME, grants=[], names=[]),
    _step("a narrowing of a sandbox that is not open", "narrow", "unknown_sandbox", sandbox=NAME, grants=[]),
    _step("the end of a sandbox that is not open", "close_sandbox", set(), sandbox=NAME),
    _step("an opening without a lineage", "open_sandbox", "invalid", sandbox=NAME),
    _step("an opening with a malformed grant", "open_sandbox", "invalid", **(_OPEN | {"grants": [{"host": HOST}]})),
    _step("an opening", "open_sandbox", {"root_pem"}, **_OPEN),
    _step(
        "a grant of a value that there is not", "regrant", "unknown_secret", sandbox=NAME, grants=[_grant()], names=[]
    ),
    _step(
        "a value and its grants",
        "regrant",
        set(),
        sandbox=NAME,
        grants=_BOTH,
        inline={INLINE: "v1"},
        names=[HOST],
        bounds=_BOTH,
    ),
    _step("a kept value", "regrant", set(), sandbox=NAME, grants=[_grant()], inline={}, keep=[INLINE], names=[HOST]),
    _step(
        "a kept value for a host that it was not given for",
        "regrant",
        "not_bound",
        sandbox=NAME,
        grants=[_grant("c.example.org")],
        inline={},
        keep=[INLINE],
        names=[HOST],
    ),
    _step(
        "a kept value that there is not",
        "regrant",
        "unknown_secret",
        sandbox=NAME,
        grants=[],
        inline={},
        keep=["inline:none"],
        names=[HOST],
    ),
    _step(
        "more values than a sandbox has",
        "regrant",
        "invalid",
        sandbox=NAME,
        grants=[],
        inline={f"inline:{number}": "v" for number in range(513)},
        names=[],
    ),
    _step("a narrowing", "narrow", set(), sandbox=NAME, grants=[], keep=[INLINE]),
    _step("a narrowing that takes the value", "narrow", set(), sandbox=NAME, grants=[], keep=[]),
    _step(
        "a value that was taken",
        "regrant",
        "unknown_secret",
        sandbox=NAME,
        grants=[],
        inline={},
        keep=[INLINE],
        names=[],
    ),
    _step("the end", "close_sandbox", set(), sandbox=NAME),
    _step("a regrant after the end", "regrant", "unknown_sandbox", sandbox=NAME, grants=[], names=[]),
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
    _step("the list", "list", {"sandboxes"}),
    _step("the images", "images", {"images"}),
    _step("an unknown image", "image", "unknown_image", name="no-such-image"),
    _step("an unknown sandbox", "inspect", "unknown_sandbox", sandbox=OTHER),
    _step("the removal of an unknown sandbox", "remove", {"residue"}, sandbox=OTHER),
    _step("a policy for an unknown sandbox", "configure", "unknown_sandbox", sandbox=OTHER, selection={}),
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
"""What vaultd relies on in its audit channel."""

SELECTION = {"policy_name": None, "network_policy": None, "bindings": []}

COMPILER = (
    _step("ping", "ping", set()),
    _step("an unknown operation", "no-such-operation", "unknown_op"),
    _step("a question without a selection", "compile", "unknown_op"),
    _step("no selection", "compile", "invalid", selection=None),
    _step("a selection", "compile", {"policy", "policy.digest"}, selection=SELECTION),
)
"""What hostd relies on in the compiler."""


def expected(steps: tuple[Step, ...]) -> Answers:
    """The answers that the table says."""
    found = {step.what: step.answer for step in steps}
    assert len(steps) == len(found), "two steps have one name"
    return found


async def answers(call: Call, steps: tuple[Step, ...]) -> Answers:
    """Make the calls; return the expected keys that each answer has, or the code of its error."""
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
