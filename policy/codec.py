"""Frozen dataclasses to JSON values and back, strictly.

- `decode(T, encode(x)) == x` for every value of the types of this package.
- Decoding refuses unknown and missing keys, wrong types (a bool is not an int), and everything the type's own checks
  refuse.
- A dataclass whose only field is `text` is written as that text.

Only what this package's types need is known: str, int, bool, StrEnum, `tuple[X, ...]`, `X | None` and dataclasses of
these.
"""

import hashlib
import json
import types
import typing
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any

type Json = bool | int | str | list[Json] | dict[str, Json] | None


class CodecError(ValueError):
    """The JSON value is not one that `encode` makes. The message names the place."""


def encode(value: object) -> Json:
    """Return the JSON value of a dataclass, tuple or scalar."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        shape = _shape(type(value))  # type: ignore[arg-type,unused-ignore]
        if list(shape) == ["text"]:
            return encode(getattr(value, "text"))  # noqa: B009 - the field is known by the line above only
        return {name: encode(getattr(value, name)) for name in shape}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def decode(kind: Any, value: object, place: str = "$") -> Any:
    """Return the value of type `kind` that `value` is the JSON form of.

    Raises:
        CodecError: it is none.
    """
    try:
        return _decode(kind, value, place)
    except CodecError:
        raise
    except ValueError as error:
        raise CodecError(f"{place}: {error}") from error


def canonical_json(value: Json) -> bytes:
    """Return the one serialisation whose hash identifies the value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def digest(value: Json) -> str:
    """Return the SHA-256 of the canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _decode(kind: Any, value: object, place: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        inner = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else _decode(inner[0], value, place)
    if origin is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, list):
            raise CodecError(f"{place}: expected a list")
        return tuple(_decode(item, element, f"{place}[{position}]") for position, element in enumerate(value))
    if is_dataclass(kind):
        return _decode_dataclass(kind, value, place)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if not isinstance(value, str) or value not in {member.value for member in kind}:
            raise CodecError(f"{place}: expected one of {', '.join(kind)}")
        return kind(value)
    if type(value) is not kind:
        raise CodecError(f"{place}: expected {kind.__name__}")
    return value


def _decode_dataclass(kind: Any, value: object, place: str) -> Any:
    shape = _shape(kind)
    if list(shape) == ["text"]:
        value = {"text": value}
    if not isinstance(value, dict):
        raise CodecError(f"{place}: expected an object")
    if set(value) != set(shape):
        odd = sorted(map(str, set(value) ^ set(shape)))
        raise CodecError(f"{place}: missing or unknown keys: {', '.join(map(ascii, odd[:5]))}")
    arguments = {name: _decode(hint, value[name], f"{place}.{name}") for name, hint in shape.items()}
    try:
        return kind(**arguments)
    except ValueError as error:
        raise CodecError(f"{place}: {error}") from error


@cache
def _shape(kind: type) -> dict[str, Any]:
    """The fields that are given to the constructor, with their resolved types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}
