"""Every value of every type that crosses a process boundary survives its JSON form, and nothing else is read."""

import hashlib
import inspect
import json
import math
import random
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pkgutil import iter_modules
from typing import Any

import pytest

import wire.api
from wire import codec
from wire.api import auditd, compiler, fetcher, hostd, provided, states, vaultd, worker, zygote
from wire.codec import CodecError
from wire.operations import Request, operation

MODULES = (auditd, compiler, fetcher, hostd, provided, states, vaultd, worker, zygote)
TYPES = sorted(
    {
        kind
        for module in MODULES
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if is_dataclass(kind) and kind.__module__ == module.__name__
    },
    key=lambda kind: (kind.__module__, kind.__name__),
)
TEXTS = ("", "a", "sbx-1", "0" * 64, "gateway", "vault", "é\ud800", "x" * 70, "/x")
NUMBERS = (-1, 0, 1, 5000, 2**31, 2**53 - 1, 2**53)


SNAPSHOT = "00000000-0000-4000-8000-000000000000"
DRAWN: dict[type, dict[str, tuple[str | int, ...]]] = {
    hostd.Launch: {"sandbox": ("a", "sbx-1"), "cpu_nanos": (10**6, 10**9), "memory_bytes": (6 << 20, 2**40)},
    hostd.TakeSnapshot: {"snapshot": (SNAPSHOT, "x")},
    hostd.RemoveSnapshot: {"snapshot": (SNAPSHOT, "")},
}
"""Values for fields that would refuse most values."""


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True, slots=True)
class Name:
    text: str

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("a name is not empty")


@dataclass(frozen=True, slots=True)
class Whole:
    name: Name
    colour: Colour
    number: int
    many: tuple[Name, ...]
    by_name: Mapping[str, str | int | bool | tuple[str, ...]]
    maybe: Name | None = None
    flag: bool = False


SCALARS: dict[str, str | int | bool | tuple[str, ...]] = {"a": "t", "b": 1, "c": True, "d": ("x", "y")}
WHOLE = Whole(Name("n"), Colour.RED, 1, (Name("a"), Name("b")), SCALARS, Name("m"))
FORM: dict[str, Any] = {
    "name": "n",
    "colour": "red",
    "number": 1,
    "many": ["a", "b"],
    "by_name": {"a": "t", "b": 1, "c": True, "d": ["x", "y"]},
    "maybe": "m",
    "flag": False,
}


def test_a_value_has_one_form_and_comes_back_from_it() -> None:
    assert FORM == codec.encode(WHOLE)
    assert WHOLE == codec.decode(Whole, json.loads(json.dumps(FORM)))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"more": 1}, "$: missing or unknown keys: 'more'"),
        ({"more": 1, "other": 2}, "$: missing or unknown keys: 'more', 'other'"),
        ({"name": ""}, "$.name: a name is not empty"),
        ({"name": {"text": "n"}}, "$.name.text: expected str"),
        ({"name": None}, "$.name.text: expected str"),
        ({"colour": "blue"}, "$.colour: expected one of red, green"),
        ({"colour": ["red"]}, "$.colour: expected one of red, green"),
        ({"number": True}, "$.number: expected int"),
        ({"number": 1.0}, "$.number: expected int"),
        ({"number": "1"}, "$.number: expected int"),
        ({"many": "ab"}, "$.many: expected a list"),
        ({"many": ["a", ""]}, "$.many[1]: a name is not empty"),
        ({"by_name": []}, "$.by_name: expected an object"),
        ({"by_name": {"k": None}}, "$.by_name['k']: expected one of bool, int, list, str"),
        ({"by_name": {"k": 1.5}}, "$.by_name['k']: expected one of bool, int, list, str"),
        ({"by_name": {"k": [1]}}, "$.by_name['k'][0]: expected str"),
        ({"by_name": {"k": {}}}, "$.by_name['k']: expected one of bool, int, list, str"),
        ({"maybe": 1}, "$.maybe: expected one of null, str"),
        ({"flag": 0}, "$.flag: expected bool"),
    ],
)
def test_another_value_is_refused_with_its_place(change: dict[str, Any], place: str) -> None:
    with pytest.raises(CodecError) as refused:
        codec.decode(Whole, FORM | change)
    assert place == str(refused.value)


@pytest.mark.parametrize("name", FORM)
def test_a_missing_key_is_refused_also_where_there_is_a_default(name: str) -> None:
    with pytest.raises(CodecError, match="missing or unknown keys"):
        codec.decode(Whole, {key: value for key, value in FORM.items() if key != name})


@pytest.mark.parametrize("value", [None, [], "x", 1])
def test_a_value_that_is_no_object_is_no_dataclass(value: object) -> None:
    with pytest.raises(CodecError, match=r"^\$: expected an object$"):
        codec.decode(Whole, value)


type _Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Options:
    alias: _Names | None
    mapping: Mapping[str, int] | None
    value: Whole | str
    flag: bool | int


@pytest.mark.parametrize(
    "value", [_Options(("a",), {"a": 1}, WHOLE, True), _Options(None, None, "x", 1), _Options((), {}, "", False)]
)
def test_each_option_of_a_union_is_read_from_its_own_json_type(value: _Options) -> None:
    assert value == codec.decode(_Options, json.loads(json.dumps(codec.encode(value))))


def test_the_canonical_form_has_sorted_keys_and_ascii_without_spaces() -> None:
    value: codec.Json = {"b": [1, True, None], "a": {"z": "\u00e9", "y": '"'}}
    form = b'{"a":{"y":"\\"","z":"\\u00e9"},"b":[1,true,null]}'
    assert form == codec.canonical_json(value)
    assert hashlib.sha256(form).hexdigest() == codec.digest(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_have_has_no_canonical_form(number: Any) -> None:
    with pytest.raises(ValueError):
        codec.canonical_json({"a": number})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (1.5, "float has no JSON form"),
        (Whole, "type has no JSON form"),
        ({1: "a"}, "the keys of a mapping are texts"),
        ({"a": b"x"}, "bytes has no JSON form"),
    ],
)
def test_a_value_without_a_json_form_is_a_mistake(value: object, problem: str) -> None:
    with pytest.raises(TypeError, match=f"^{problem}$"):
        codec.encode(value)


@dataclass(frozen=True, slots=True)
class _Two:
    value: str | Colour


@dataclass(frozen=True, slots=True)
class _Pair:
    value: tuple[int, str]


@dataclass(frozen=True, slots=True)
class _Number:
    value: float


@pytest.mark.parametrize(
    ("kind", "problem"), [(_Two, "same JSON type"), (_Pair, "no JSON form"), (_Number, "no JSON form")]
)
def test_a_type_that_cannot_be_read_in_one_way_is_a_mistake(kind: type, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        codec.decode(kind, {"value": "x"})
    if kind is _Number:
        with pytest.raises(TypeError):
            codec.encode(_Number(1.5))


def _drawn(kind: Any, draw: random.Random) -> Any:
    """Return a value with fields of the right types, which the type's own checks can refuse."""
    if isinstance(kind, typing.TypeAliasType):
        return _drawn(kind.__value__, draw)
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        return _drawn(draw.choice(typing.get_args(kind)), draw)
    if kind is type(None):
        return None
    if origin is tuple:
        return tuple(_drawn(typing.get_args(kind)[0], draw) for _ in range(draw.randrange(4)))
    if origin is Mapping:
        return {draw.choice(TEXTS): _drawn(typing.get_args(kind)[1], draw) for _ in range(draw.randrange(4))}
    if is_dataclass(kind) and isinstance(kind, type):
        hints, few = typing.get_type_hints(kind), DRAWN.get(kind, {})
        names = [field.name for field in fields(kind) if field.init]
        for _ in range(5000):
            try:
                return kind(
                    **{name: draw.choice(few[name]) if name in few else _drawn(hints[name], draw) for name in names}
                )
            except ValueError:
                continue
        raise AssertionError(f"no {kind.__name__} was drawn")
    if issubclass(kind, StrEnum):
        return draw.choice(list(kind))
    if kind is bool:
        return draw.random() < 0.5
    common = "0" * 64 if kind is str else 1  # a value that many types accept
    return common if draw.random() < 0.5 else draw.choice(TEXTS if kind is str else NUMBERS)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")
def test_what_crosses_a_boundary_comes_back_and_each_other_form_is_refused(kind: type) -> None:
    draw = random.Random(7)
    for _ in range(20):
        value = _drawn(kind, draw)
        form = json.loads(json.dumps(codec.encode(value)))
        assert value == codec.decode(kind, form)
        if isinstance(form, dict):
            with pytest.raises(CodecError):
                codec.decode(kind, form | {"unknown": 1})
            for name in form:
                with pytest.raises(CodecError):
                    codec.decode(kind, {key: item for key, item in form.items() if key != name})
                with pytest.raises(CodecError):
                    codec.decode(kind, form | {name: 1.5})


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")
def test_any_json_is_read_or_refused(kind: type) -> None:
    """No input raises an exception other than `CodecError`."""
    draw = random.Random(11)

    def junk(depth: int) -> Any:
        match draw.randrange(8 if depth else 6):
            case 6:
                return [junk(depth - 1) for _ in range(draw.randrange(3))]
            case 7:
                names = [*TEXTS, *(field.name for field in fields(kind))]
                return {draw.choice(names): junk(depth - 1) for _ in range(draw.randrange(5))}
            case other:
                return (None, True, 1.5, *TEXTS, *NUMBERS)[other * 2]

    for _ in range(300):
        shape = {field.name: junk(3) for field in fields(kind)} if draw.random() < 0.5 else junk(3)
        try:
            codec.decode(kind, shape)
        except CodecError:
            continue


def test_each_boundary_is_tested_here() -> None:
    assert {module.__name__.rpartition(".")[2] for module in MODULES} == {
        item.name for item in iter_modules(wire.api.__path__)
    }


def test_the_operations_of_a_process_have_different_names() -> None:
    for module in MODULES:
        asked = [kind for kind in TYPES if kind.__module__ == module.__name__ and issubclass(kind, Request)]
        names = [operation(object.__new__(kind)) for kind in asked]
        assert sorted(set(names)) == sorted(names)
