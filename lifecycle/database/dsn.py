"""DSNs of PostgreSQL, in libpq's forms: `postgresql://user@host/name?option=value` and `host=... dbname=...`.

A DSN may contain a password. So no error of this module repeats a part of one.
"""

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

_SHOWN = ("host", "hostaddr", "port", "dbname", "user", "service")


def parsed(dsn: str) -> dict[str, Any]:
    """Return the options of a DSN.

    Raises:
        ValueError: it is none, or it names no user. The text continues after the name of its place.
    """
    try:
        found = conninfo_to_dict(dsn)
    except (psycopg.Error, UnicodeError):
        raise ValueError("is not a DSN: an option is unknown, or its form is wrong") from None
    if not found.get("user") and not found.get("service"):
        raise ValueError("names no user; the server's own user has no name that could stand in")
    return {name: value for name, value in found.items() if value is not None}


def described(options: Mapping[str, Any]) -> str:
    """Return a text for messages, without a password."""
    return " ".join(["postgresql", *(f"{name}={options[name]}" for name in _SHOWN if name in options)])
