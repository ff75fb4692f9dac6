"""Plans and rendered headers."""

import base64

import pytest

from policy.injection import InjectionKind, InjectionPlan, header_name, render

K = InjectionKind


def plan(kind: InjectionKind, header: str = "Authorization", username: str | None = None) -> InjectionPlan:
    """A plan with an unimportant binding and secret."""
    return InjectionPlan("agents/api", "token", kind, header, username)


RENDERED = {
    "bearer": (plan(K.BEARER), "s3cr3t", ("Authorization", "Bearer s3cr3t")),
    "basic encodes user:password": (
        plan(K.BASIC),
        "me:pw",
        ("Authorization", f"Basic {base64.b64encode(b'me:pw').decode()}"),
    ),
    "basic with a username": (
        plan(K.BASIC, username="me"),
        "p:w",
        ("Authorization", f"Basic {base64.b64encode(b'me:p:w').decode()}"),
    ),
    "basic encodes UTF-8": (
        plan(K.BASIC),
        "me:pä",
        ("Authorization", f"Basic {base64.b64encode('me:pä'.encode()).decode()}"),
    ),
    "basic-raw is verbatim": (plan(K.BASIC_RAW), "bWU6cHc=", ("Authorization", "Basic bWU6cHc=")),
    "api-key is verbatim": (plan(K.API_KEY, "X-Api-Key"), "k e y", ("X-Api-Key", "k e y")),
}

REFUSED = {
    "a line feed": "v4lue-canary\nX: y",
    "a carriage return": "v4lue-canary\r",
    "a NUL": "v4lue-canary\0",
    "an escape": "v4lue-canary\x1b",
    "a C1 control": "v4lue-canary\x85",
    "a blank in front": " v4lue-canary",
    "a blank behind": "v4lue-canary ",
    "not ASCII": "v4lue-canary-ä",
    "empty": "",
    "too long": "v4lue-canary" * 10_000,
}


@pytest.mark.parametrize("case", RENDERED)
def test_each_kind_renders_its_header(case: str) -> None:
    """Header name and value."""
    given, value, expected = RENDERED[case]

    assert expected == render(given, value)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", [K.BEARER, K.BASIC_RAW, K.API_KEY])
def test_a_value_that_a_header_cannot_carry_is_refused_without_being_told(case: str, kind: InjectionKind) -> None:
    """The message names the secret and never holds a part of its value."""
    with pytest.raises(ValueError, match="secret 'token'") as caught:
        render(plan(kind), REFUSED[case])

    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_basic_without_a_colon_is_refused() -> None:
    """Half a login is not sent."""
    with pytest.raises(ValueError, match="user:password"):
        render(plan(K.BASIC), "only-a-password")


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "content-LENGTH",
        "Transfer_Encoding",
        "Connection",
        "Proxy-Authorization",
        "Expect",
        "X-HTTP-Method-Override",
        "X-Original-URL",
        "X-Forwarded-For",
        "Sec-WebSocket-Key",
        "OPEN-SANDBOX-API-KEY",
        "HTTP2-Settings",
    ],
)
def test_headers_that_frame_or_route_are_reserved(name: str) -> None:
    """Also with underscores, which some servers read as hyphens."""
    with pytest.raises(ValueError, match="reserved credential header name"):
        header_name(name)


@pytest.mark.parametrize("name", ["", "X Api", "X-Api:", "X-Äpi", "x\n", "x" * 300])
def test_a_header_name_is_a_token(name: str) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError, match="invalid credential header name"):
        header_name(name)


def test_header_names_have_one_case() -> None:
    """`x-api-key` and `X-API-KEY` are one slot."""
    assert "X-Api-Key" == header_name("x-api-key") == header_name("X-API-KEY")
    assert "Authorization" == header_name("authorization")


@pytest.mark.parametrize(
    ("kind", "header", "username"),
    [
        (K.API_KEY, "x-api-key", None),
        (K.BEARER, "X-Api-Key", None),
        (K.BEARER, "Authorization", "me"),
        (K.BASIC, "Authorization", "m:e"),
        (K.BASIC, "Authorization", ""),
        (K.BASIC, "Authorization", "m\ne"),
    ],
)
def test_a_plan_that_makes_no_sense_cannot_be_built(kind: InjectionKind, header: str, username: str | None) -> None:
    """Deserialised plans are checked too."""
    with pytest.raises(ValueError):
        plan(kind, header, username)
