"""What gives a secret away, and which answers can be searched for it."""

import base64

import pytest

from gateway.full.charsets import searchable
from gateway.full.sought import texts_of, too_short
from policy.injection import InjectionKind, InjectionPlan
from vault.secret import Secret


def plan(kind: InjectionKind, username: str | None = None) -> InjectionPlan:
    header = "X-Key" if kind is InjectionKind.API_KEY else "Authorization"
    return InjectionPlan("r", "token", kind, header, username)


RAW = base64.b64encode(b"user:long-password").decode()


@pytest.mark.parametrize(
    ("kind", "username", "value", "texts"),
    [
        (InjectionKind.BEARER, None, "tok:en-value", {"tok:en-value"}),
        (InjectionKind.API_KEY, None, "Token abcdefgh", {"Token abcdefgh", "abcdefgh"}),
        (InjectionKind.BASIC, None, "user:long-password", {"long-password"}),
        (InjectionKind.BASIC, None, "user:long:password", {"long:password"}),
        (InjectionKind.BASIC, "user", "long:password", {"long:password"}),
        (InjectionKind.BASIC, None, "a-long-token:", {"a-long-token"}),
        (InjectionKind.BASIC, None, "a-long-token:x", {"a-long-token"}),
        (InjectionKind.BASIC, None, "a-long-token:x-oauth-basic", {"a-long-token"}),
        (InjectionKind.BASIC_RAW, None, RAW, {"long-password"}),
        (InjectionKind.BASIC_RAW, None, "no-base64-at-all", {"no-base64-at-all"}),
    ],
)
def test_what_gives_a_value_away(kind, username, value, texts):
    assert texts == texts_of(plan(kind, username), Secret(value))
    assert too_short(plan(kind, username), Secret(value)) is None


@pytest.mark.parametrize(
    ("kind", "username", "value", "what"),
    [
        (InjectionKind.BEARER, None, "7-chars", "secret"),
        (InjectionKind.BASIC, "user", "7-chars", "secret"),
        (InjectionKind.BASIC, None, "administrator:7-chars", "password"),
        (InjectionKind.BASIC, None, "short:x", "password"),
        (InjectionKind.BASIC, None, "no-8-ch:x", "password"),
        (InjectionKind.BASIC_RAW, None, base64.b64encode(b"administrator:7-chars").decode(), "password"),
    ],
)
def test_what_could_not_be_told_from_other_text_is_not_sent(kind, username, value, what):
    assert f"the {what} is shorter than 8 characters" in str(too_short(plan(kind, username), Secret(value)))


@pytest.mark.parametrize(
    ("content_type", "answer"),
    [
        ("text/html", True),
        ("text/html; charset=utf-8", True),
        ('text/html; Charset="UTF-8"', True),
        ("text/html; charset=", True),
        ("text/html; charset=ISO-8859-15; x=y", True),
        ("text/plain;charset=utf-16le", True),
        ("text/plain; charset=windows-1252", True),
        ("text/plain; charset=Shift_JIS", True),
        ("text/plain; charset=utf-7", False),
        ("text/plain; charset='utf-7'", False),
        ("text/plain; charset=utf-8; charset=utf-7", False),
        ("text/plain; charset*=us-ascii''utf-7", False),
        ("text/plain; charset*0=utf-7", False),
        ("text/plain; charset=unicode-1-1-utf-7", False),
        ("text/plain; charset=ibm037", False),
        ("text/plain; charset=cp500", False),
        ("text/plain; charset=iso-2022-jp", False),
        ("text/plain; charset=hz-gb-2312", False),
        ("text/plain; charset=nonsense", False),
    ],
)
def test_a_charset_in_which_text_is_not_its_own_bytes_is_not_searched(content_type, answer):
    assert answer is searchable(["text/plain", content_type])
