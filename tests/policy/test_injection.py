"""Plans and rendered headers."""

import base64

import pytest

from policy.api import ApiPolicyError
from policy.bindings import parse_binding
from policy.injection import InjectionKind, InjectionPlan, header_name, render

K = InjectionKind


def plan(kind: InjectionKind, header: str = "Authorization", username: str | None = None) -> InjectionPlan:
    """Return a plan with an arbitrary binding and secret."""
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
    "a lone surrogate": "v4lue-canary\ud800",
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
def test_a_value_that_a_header_cannot_carry_is_refused_without_being_quoted(case: str, kind: InjectionKind) -> None:
    """The message names the secret and never contains a part of its value."""
    with pytest.raises(ValueError, match="secret 'token'") as caught:
        render(plan(kind), REFUSED[case])

    assert "canary" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("surrogate", ["\ud800", "\udfff"])
def test_a_login_that_is_not_unicode_is_refused_without_being_quoted(surrogate: str) -> None:
    """No error contains the value, and no error's cause does."""
    for login in (plan(K.BASIC), plan(K.BASIC, username="me")):
        with pytest.raises(ValueError, match=r"secret 'token' has a control character or is not Unicode$") as caught:
            render(login, f"me:v4lue-canary{surrogate}")
        assert ValueError is type(caught.value)
    with pytest.raises(ValueError, match="username"):
        plan(K.BASIC, username=f"me{surrogate}")
    for neighbour in ("\ud7ff", "\ue000"):
        assert base64.b64encode(f"me:p{neighbour}".encode()).decode() in render(plan(K.BASIC), f"me:p{neighbour}")[1]


def test_only_blanks_are_refused_at_the_edges() -> None:
    assert ("X-Api-Key", "X-v-X") == render(plan(K.API_KEY, "X-Api-Key"), "X-v-X")


def test_basic_without_a_colon_is_refused() -> None:
    """An incomplete login is not sent."""
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
    """Also with underscores, which some servers treat as hyphens."""
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
    assert "x-api-key" == plan(K.API_KEY, "X-Api-Key").slot
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


RESERVED = (
    # reserved by the OpenSandbox egress API
    *("Host", "Content-Length", "Content-Type", "Transfer-Encoding", "Connection", "Upgrade", "Te", "Trailer"),
    *("Proxy-Authorization", "Proxy-Authenticate", "Forwarded"),
    *("X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"),
    # beyond the contract
    *("Expect", "Keep-Alive", "Proxy-Connection", "Http2-Settings", "Content-Encoding", "Date", "Via"),
    *("X-Http-Method", "X-Http-Method-Override", "X-Method-Override", "X-Original-Url", "X-Rewrite-Url"),
    *("X-Forwarded-Port", "X-Forwarded-Server", "X-Forwarded-Prefix", "X-Real-Ip"),
    *("Sec-Websocket-Key", "Opensandbox-Api-Key", "Open-Sandbox-Api-Key", "X-Sallyport-Sandbox"),
)


@pytest.mark.parametrize("name", RESERVED)
def test_a_reserved_header_takes_no_secret_in_any_spelling(name: str) -> None:
    """Neither a plan nor a binding can name it."""
    for spelling in (name, name.lower(), name.upper(), name.replace("-", "_")):
        with pytest.raises(ValueError, match=rf'^reserved credential header name "{spelling.lower()}"$'):
            header_name(spelling)
    with pytest.raises(ValueError, match="reserved credential header name"):
        plan(K.API_KEY, name)
    for auth in (
        {"type": "apiKey", "name": name, "credential": "c"},
        {"type": "customHeaders", "headers": [{"name": "x-a", "credential": "c"}, {"name": name, "credential": "d"}]},
    ):
        with pytest.raises(ApiPolicyError, match=r'^binding "b": reserved credential header name'):
            parse_binding({"name": "b", "match": {"hosts": ["good.test"]}, "auth": auth})


def test_a_header_near_a_reserved_one_is_free() -> None:
    """A control: names and prefixes are matched as a whole."""
    for name in ("X-Host", "Hosts", "Opensandbox", "Sec-Websocket", "X-Sallyport", "Authorization", "Cookie"):
        assert name == header_name(name)


CHARACTERS = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def test_the_characters_of_a_header_name_are_those_of_a_token() -> None:
    """RFC 9110, 5.6.2."""
    for character in map(chr, range(0x100)):
        name = f"x{character}"
        if character in CHARACTERS:
            assert name.lower() == header_name(name).lower()
        else:
            with pytest.raises(ValueError, match=r"^invalid credential header name"):
                header_name(name)


def test_a_header_name_has_at_most_256_characters() -> None:
    assert "X" + "x" * 255 == header_name("x" * 256)
    with pytest.raises(ValueError, match=r"^invalid credential header name"):
        header_name("x" * 257)


@pytest.mark.parametrize("kind", [K.BEARER, K.BASIC_RAW, K.API_KEY])
def test_the_longest_value_is_64_kib(kind: InjectionKind) -> None:
    assert "v" * 65536 == render(plan(kind), "v" * 65536)[1].rpartition(" ")[2]
    with pytest.raises(ValueError, match="too long"):
        render(plan(kind), "v" * 65537)


def test_a_value_or_username_has_no_control_character() -> None:
    """Of C0, DEL and C1. All other characters are accepted in a login."""
    for octet in range(0x100):
        value = f"me:p{chr(octet)}w"
        if octet < 0x20 or 0x7F <= octet <= 0x9F:
            with pytest.raises(ValueError, match="control character"):
                render(plan(K.BASIC), value)
            with pytest.raises(ValueError, match="control character"):
                plan(K.BASIC, username=f"m{chr(octet)}e")
        else:
            assert value == base64.b64decode(render(plan(K.BASIC), value)[1].removeprefix("Basic ")).decode()
