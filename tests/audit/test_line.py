"""The fast form of a gateway's records: equal bytes, and the same refusals as the general one."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.chain import ZERO, ChainHead, parse_line, seal
from audit.client import encoded
from audit.line import Form, content, read, sealed
from audit.producers import GATEWAY, KINDS
from audit.records import BOOLEANS, INTEGERS, LISTS, MAX_INTEGER, TEXTS, bounded, escaped, record

KIND = KINDS[GATEWAY]
SET = {"chain": "sbx-a", "producer": GATEWAY, "sandbox": "sbx-a", "generation": 3, "ts": "2026-01-01T00:00:00.000Z"}

texts = {name: st.text(max_size=300) for name in TEXTS if name != "sandbox"}
values: dict[str, Any] = (
    texts
    | {name: st.integers(-MAX_INTEGER - 5, MAX_INTEGER + 5) for name in INTEGERS}
    | {name: st.booleans() for name in BOOLEANS}
    | {name: st.lists(st.text(max_size=100), max_size=70) for name in LISTS}
)
fields = st.sets(st.sampled_from(sorted(values)), max_size=12).flatmap(
    lambda names: st.fixed_dictionaries({name: values[name] for name in sorted(names)})
)


@given(fields, st.sampled_from(sorted(KIND)), st.sampled_from(["allow", "deny", "observe", "info"]))
def test_a_record_has_the_same_line_both_ways(given_: dict[str, Any], kind: str, decision: str) -> None:
    item = record(kind, decision, **given_)
    line = read(encoded(item), KIND)
    if line is None:
        return
    for name, value in SET.items():
        setattr(line, name, value)
    general = {"kind": kind, "decision": decision, **escaped(bounded(given_)), **SET}
    head = ChainHead(6, "a" * 64)
    assert seal(general, head) == sealed(line, head)


PLAIN: dict[str, Any] = {"kind": "request", "decision": "allow", "host": "a.example", "port": 443, "path": "/v1"}


def test_a_plain_record_takes_the_fast_way_and_its_line_is_valid() -> None:
    line = read(msgspec.json.encode(PLAIN | {"injections": ["one"], "websocket": True}), KIND)
    for name, value in SET.items():
        setattr(line, name, value)
    written, head = sealed(line, ChainHead())
    assert {**PLAIN, **SET, "injections": ["one"], "websocket": True, "seq": 1, "prev": ZERO, "hash": head.hash} == (
        parse_line(written)
    )


SLOW = [
    PLAIN | {"host": "ä.example"},
    PLAIN | {"host": 'a"b'},
    PLAIN | {"host": "a\\b"},
    PLAIN | {"host": "a\x7f"},
    PLAIN | {"host": "a\n"},
    PLAIN | {"host": "a" * 256},
    PLAIN | {"path": "/v1?token=x"},
    PLAIN | {"path": "/v1#x"},
    PLAIN | {"port": 2**53},
    PLAIN | {"port": True},
    PLAIN | {"port": 1.5},
    PLAIN | {"port": "443"},
    PLAIN | {"websocket": 1},
    PLAIN | {"injections": ["x"] * 65},
    PLAIN | {"injections": ["x" * 129]},
    PLAIN | {"nonsense": "x"},
    PLAIN | {"path_sha256": "a" * 64},
    PLAIN | {"host": None},
    PLAIN | {"kind": "checkpoint"},
    PLAIN | {"kind": "secret.release"},
    PLAIN | {"kind": 5},
    PLAIN | {"decision": "maybe"},
    {"decision": "allow"},
    {"kind": "request"},
    *(PLAIN | {name: value} for name, value in {**SET, "prev": ZERO, "clock_back": "x"}.items()),
    PLAIN | {"seq": 1},
    PLAIN | {"hash": "x"},
]


@pytest.mark.parametrize("item", SLOW, ids=str)
def test_what_must_be_changed_or_refused_takes_the_general_way(item: dict[str, Any]) -> None:
    assert read(json.dumps(item).encode(), KIND) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b'"x"', b"{}", b"\xff", b'{"kind":"dns"}{}'])
def test_what_is_no_record_takes_the_general_way(content: bytes) -> None:
    assert read(content, KIND) is None


def test_a_text_with_a_lone_surrogate_is_put_into_the_ring_too() -> None:
    assert {"host": "\ud800"} == json.loads(encoded({"host": "\ud800"}))


VARYING = ("bytes_down", "duration_ms", "path", "request_id")
HOSTILE = ['","bytes_down":7,"', '"request_id":"7"', "%s%d%%", "7", "\x85", "\u2028", 'a"bytes_down":7', '"path":"7"']
varying = st.tuples(
    st.integers(-1, MAX_INTEGER + 1),
    st.integers(0, 9),
    st.one_of(
        st.from_regex(r"/[!-~]{0,9}", fullmatch=True),
        st.text(max_size=9),
        st.sampled_from([*HOSTILE, "/a?b", "/a#b", "/" + "a" * 2047, "/" + "a" * 2048]),
    ),
    st.one_of(st.from_regex(r"[0-9a-f-]{1,64}", fullmatch=True), st.text(max_size=70), st.sampled_from(HOSTILE)),
)


@given(fields, st.lists(varying, min_size=1, max_size=4), st.sampled_from(HOSTILE))
def test_a_form_gives_the_record_of_its_fields(
    given_: dict[str, Any], uses: list[tuple[int, int, str, str]], hostile: str
) -> None:
    fixed = {name: value for name, value in given_.items() if name not in VARYING} | {"host": hostile}
    form = Form("request", "info", VARYING, fixed)
    for values in uses:
        made = form.content(values)
        whole = fixed | dict(zip(VARYING, values, strict=True))
        assert whole == form.fields(values)
        assert made is None or made == content("request", "info", whole)


def test_each_use_of_a_plain_form_takes_the_fast_way() -> None:
    form = Form("request", "info", VARYING, {"error": None, "status": 200})
    for number in range(3):
        made = form.content((number, 7, f"/v1/%20%s~{number}", f"f1-{number}"))
        assert made is not None
        assert {"kind": "request", "decision": "info", "status": 200} | {
            "bytes_down": number,
            "duration_ms": 7,
            "path": f"/v1/%20%s~{number}",
            "request_id": f"f1-{number}",
        } == json.loads(made)
