"""A strict codec between frozen dataclasses and JSON values. Pure.

- `decode(T, encode(x)) == x` for every dataclass of these field types: str, int, bool, StrEnum, `tuple[X, ...]`,
  `Mapping[str, X]`, dataclasses, and a union with at most one of them for each JSON type (`X | None`, `str | int`).
- Decoding refuses unknown and missing keys, wrong types (a bool is not an int), and values that the type's own checks
  (`__post_init__`) refuse. Fields with a default are encoded, and required, too.
- A dataclass whose only field is `text` is written as that text.
- Errors name the place, such as `$.rules[0].port`. They repeat names of keys, shortened and escaped, and never a value.
"""

import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final

type Json = bool | int | str | list[Json] | dict[str, Json] | None

type _Decoder = Callable[[object], Any]

_KEYS_SHOWN: Final = 5


class CodecError(ValueError):
    """The JSON value is no output of `encode`. The message names the place."""


class _WrongError(Exception):
    """Internal: the problem of a value, and its place, built from the inside out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place = ""


def encode(value: object) -> Json:
    """Return the JSON value of a dataclass, mapping, tuple or scalar."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {_name(name): encode(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        shape = _shape(type(value))
        if shape == ("text",):
            return encode(getattr(value, "text"))  # noqa: B009 - only the line above shows that the field exists
        return {name: encode(getattr(value, name)) for name in shape}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def decode[T](kind: type[T], value: object, place: str = "$") -> T:
    """Return the value of type `kind` whose JSON form is `value`.

    Raises:
        CodecError: `value` is no JSON form of `kind`.
    """
    hashable: Any = kind
    try:
        decoded: T = _decoder(hashable)(value)
    except _WrongError as error:
        raise CodecError(f"{place}{error.place}: {error.problem}") from None
    return decoded


def canonical_json(value: Json) -> bytes:
    """Return the canonical serialisation; its hash identifies the value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def digest(value: Json) -> str:
    """Return the SHA-256 of the canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError("the keys of a mapping are texts")
    return str(name)


@cache
def _shape(kind: type) -> tuple[str, ...]:
    """The names of the fields of the constructor."""
    return tuple(field.name for field in fields(kind) if field.init)


@cache
def _decoder(kind: Any) -> _Decoder:
    if isinstance(kind, typing.TypeAliasType):
        return _decoder(kind.__value__)
    origin = typing.get_origin(kind)
    if origin is types.UnionType or origin is typing.Union:
        return _of_union(typing.get_args(kind))
    if origin is tuple:
        item, rest = typing.get_args(kind)
        if rest is not Ellipsis:
            raise TypeError(f"{kind} has no JSON form")
        return _of_items(_decoder(item))
    if origin is Mapping:
        name, item = typing.get_args(kind)
        if name is not str:
            raise TypeError(f"{kind} has no JSON form")
        return _of_mapping(_decoder(item))
    if is_dataclass(kind) and isinstance(kind, type):
        return _of_dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _of_enumeration(kind)
    if kind in (str, int, bool):
        return _of_scalar(kind)
    raise TypeError(f"{kind} has no JSON form")


def _of_scalar(kind: type) -> _Decoder:
    def decoder(value: object) -> object:
        if type(value) is not kind:
            raise _WrongError(f"expected {kind.__name__}")
        return value

    return decoder


def _of_enumeration(kind: type[StrEnum]) -> _Decoder:
    members = {member.value: member for member in kind}

    def decoder(value: object) -> StrEnum:
        if not isinstance(value, str) or value not in members:
            raise _WrongError(f"expected one of {', '.join(kind)}")
        return members[value]

    return decoder


def _of_items(item: _Decoder) -> _Decoder:
    def decoder(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _WrongError("expected a list")
        found = []
        for position, element in enumerate(value):
            try:
                found.append(item(element))
            except _WrongError as error:
                error.place = f"[{position}]{error.place}"
                raise
        return tuple(found)

    return decoder


def _of_mapping(item: _Decoder) -> _Decoder:
    def decoder(value: object) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise _WrongError("expected an object")
        found = {}
        for name, element in value.items():
            try:
                found[name] = item(element)
            except _WrongError as error:
                error.place = f"[{name[:64]!a}]{error.place}"
                raise
        return types.MappingProxyType(found)

    return decoder


def _of_union(options: tuple[Any, ...]) -> _Decoder:
    by_type: dict[type, _Decoder] = {}
    for option in options:
        given = _json_type(option)
        if given in by_type:
            raise TypeError(f"two options of {options} have the same JSON type")
        by_type[given] = (lambda _: None) if given is type(None) else _decoder(option)
    names = ", ".join(sorted("null" if given is type(None) else given.__name__ for given in by_type))

    def decoder(value: object) -> object:
        if (option := by_type.get(type(value))) is None:
            raise _WrongError(f"expected one of {names}")
        return option(value)

    return decoder


def _json_type(kind: Any) -> type:
    """Return the JSON type of a value of type `kind`."""
    if isinstance(kind, typing.TypeAliasType):
        return _json_type(kind.__value__)
    if kind is type(None):
        return type(None)
    if typing.get_origin(kind) is tuple:
        return list
    if is_dataclass(kind) and isinstance(kind, type):
        return str if _shape(kind) == ("text",) else dict
    if isinstance(kind, type) and issubclass(kind, str):
        return str
    return kind if kind in (int, bool) else dict


def _of_dataclass(kind: type) -> _Decoder:
    hints = typing.get_type_hints(kind)
    shape = _shape(kind)
    names = frozenset(shape)
    decoders: dict[str, _Decoder] = {}

    def decoder(value: object) -> object:
        if not decoders:  # made at the first use, because a type can contain values of its own type
            decoders.update({name: _decoder(hints[name]) for name in shape})
        if shape == ("text",):
            value = {"text": value}
        if not isinstance(value, dict):
            raise _WrongError("expected an object")
        if value.keys() != names:
            odd = sorted(map(str, value.keys() ^ names))
            raise _WrongError(f"missing or unknown keys: {', '.join(ascii(name[:64]) for name in odd[:_KEYS_SHOWN])}")
        given = {}
        for name, item in decoders.items():
            try:
                given[name] = item(value[name])
            except _WrongError as error:
                error.place = f".{name}{error.place}"
                raise
        try:
            return kind(**given)
        except ValueError as error:
            raise _WrongError(str(error)) from None

    return decoder
