"""Cookies and headers that a sandbox sets in a browser apply to the sandbox's own route only.

All sandboxes and the API share one host. The test judges with Python's cookie jar, and with a jar that follows RFC
6265 exactly.
"""

import email.message
import http.cookiejar
import urllib.request
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lifecycle.proxy.headers import ISOLATION, to_client

HOST = "api.example.test"
OWN = "/v1/sandboxes/sbx-1/proxy/8000"
ELSEWHERE = [
    f"http://{host}{path}"
    for host in (HOST, "example.test", "other.example.test", f"sub.{HOST}")
    for path in (
        *("/", "/x", "/v1", "/v1/", "/v1/sandboxes", "/v1/sandboxes/", "/v1/sandboxes/sbx-1", "/openapi.json"),
        *("/v1/sandboxes/sbx-1/proxy", "/v1/sandboxes/sbx-1/proxy/", "/v1/sandboxes/sbx-1/proxy/80", f"{OWN}1/x"),
        *("/v1/sandboxes/sbx-1/proxy/18080/policy", "/v1/sandboxes/sbx-1/proxy/44772/files"),
        *("/v1/sandboxes/sbx-2/proxy/8000/", "/v1/sandboxes/sbx-2/proxy/8000/x", "/sandboxes/sbx-1/proxy/8000/x"),
    )
]
OTHER_HOST = [f"http://{host}{OWN}/x" for host in ("example.test", "other.example.test", f"sub.{HOST}")]


def received(cookie: bytes, path: bytes) -> list[str]:
    """Return the `Set-Cookie` headers that a client gets when the program at `path` sends `cookie`."""
    headers = to_client([(b"Set-Cookie", cookie)], OWN.encode(), path)
    return [value.decode("latin-1") for name, value in headers if name.lower() == b"set-cookie"]


def in_pythons_jar(cookies: list[str], asked: str, url: str) -> bool:
    """Return whether `http.cookiejar`, given the cookies with an answer to `asked`, sends any to `url`."""
    policy = http.cookiejar.DefaultCookiePolicy
    jar = http.cookiejar.CookieJar(policy(strict_ns_domain=policy.DomainStrictNonDomain))
    headers = email.message.Message()
    for cookie in cookies:
        headers["Set-Cookie"] = cookie
    answer = type("Answer", (), {"info": lambda self: headers})()
    jar.extract_cookies(cast(Any, answer), urllib.request.Request(f"http://{HOST}{asked}"))
    request = urllib.request.Request(url)  # noqa: S310 - not opened
    jar.add_cookie_header(request)
    return request.has_header("Cookie")


def by_the_letter(cookies: list[str], asked: str, url: str) -> bool:
    """Return the same by RFC 6265, 5.1.3 to 5.4, and 6265bis' limit on attributes.

    `url` has a path and no port.
    """
    host, _, path = url.removeprefix("http://").partition("/")
    path = f"/{path}"
    for cookie in cookies:
        domain, only, kept = HOST, True, asked[: asked.rfind("/")] or "/"
        default = kept
        for attribute in cookie.split(";")[1:]:
            name, _, value = (text.strip(" \t") for text in attribute.partition("="))
            if len(value) > 1024:
                continue
            if name.lower() == "path":
                kept = value if value.startswith("/") else default
            if name.lower() == "domain" and value:
                domain, only = value.removeprefix(".").lower(), False
        if not (HOST == domain or HOST.endswith(f".{domain}")):
            continue
        to_host = host == domain or (not only and host.endswith(f".{domain}"))
        below = path == kept or (path.startswith(kept) and (kept.endswith("/") or path[len(kept)] == "/"))
        if to_host and below:
            return True
    return False


def leaks(cookies: list[str], asked: str) -> list[str]:
    """Return the URLs outside the route to which a cookie is sent."""
    return [
        url
        for url in (*ELSEWHERE, *OTHER_HOST)
        if in_pythons_jar(cookies, asked, url) or by_the_letter(cookies, asked, url)
    ]


_PATHS = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "/",
                "/v1",
                "/v1/",
                "/v1/sandboxes",
                "/v1/sandboxes/sbx-2",
                "x",
                "..",
                "/..",
                "/../../..",
                "*",
                "%2f",
            ),
            *(
                '"/"',
                '"',
                "'/'",
                "/ ",
                "\\",
                "/\\..",
                "//",
                "/x/../..",
                OWN,
                f"{OWN}/",
                f"{OWN}/..",
                f"{OWN}1",
                f'"{OWN}"',
            ),
            *("/" + "x" * 1100, "/\x0b", "/é", f"{OWN}/a/../../../../x", "/;", "/,"),
        ]
    ),
    st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=20),
)
_BLANK = st.sampled_from(["", " ", "\t", "  "])
_NAMES = st.sampled_from(
    [
        *("Path", "path", "PATH", "pAtH", "\x0bPath", "$Path", "Domain", "DOMAIN", "domain", "Secure", "HttpOnly"),
        *("SameSite", "Max-Age", "Version", "Port", "Expires", "Comment", "path\x1f", ""),
    ]
)
_VALUES = st.one_of(_PATHS, st.sampled_from(["example.test", f".{HOST}", HOST, "1", "None", "60"]))


@st.composite
def _attributes(draw: st.DrawFn) -> str:
    name, value = draw(_NAMES), draw(_VALUES)
    equals = draw(st.sampled_from(["=", "=", "==", ""]))
    return draw(_BLANK) + name + draw(_BLANK) + (equals + draw(_BLANK) + value + draw(_BLANK) if equals else "")


_PAIRS = st.one_of(
    st.sampled_from(
        ["a=1", "__Host-a=1", "__Secure-a=1", "__host-a=1", "a", "=1", "", "Path=/", "a=Path=/", 'a="1;x"']
    ),
    st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=12),
)
_COOKIES = st.builds(lambda pair, rest: ";".join([pair, *rest]), _PAIRS, st.lists(_attributes(), max_size=5))
_ASKED = st.one_of(
    st.sampled_from(
        ["", "/", "/x", "/x/y", "/..", "/../x", "/a/../../../../b", "//", "//x", "/x;y/z", '/"/x', "/%2e%2e/x"]
    ),
    st.from_regex(r"\A(/[!-~]{0,6}){0,5}\Z"),
)


@pytest.mark.filterwarnings("ignore:http.cookiejar bug")  # a Max-Age without a value: it drops the cookie
@given(_COOKIES, _ASKED)
@example("a=1", "")
@example("a=1; Path", "")
@example('a=1; Path="/"', "/x")
@example("a=1; Path=/; Path=", "")
@example("__Host-a=1; Secure; Path=/", "/x")
@example("a=1; Domain=example.test; Path=/", "/x")
@example("a=1; Path=/" + "x" * 1020, "")
def test_no_cookie_of_a_sandbox_is_sent_anywhere_else(cookie: str, asked: str) -> None:
    """For any form of the cookie and any requested path of the route, by neither of the two jars."""
    sent = received(cookie.encode("latin-1"), asked.encode())
    assert [] == leaks(sent, f"{OWN}{asked}")


UNDEFENDED = [
    "a=1",
    'a=1; Path="/"',
    "a=1; Path",
    "a=1; Path=/; Path=x",
    "a=1; Path=/",
    "a=1; Path=/v1",
    "a=1; Path=/" + "x" * 1100,
]


@pytest.mark.parametrize("cookie", UNDEFENDED)
def test_the_jars_can_tell(cookie: str) -> None:
    """A control: without the server's changes, each of these cookies of the port's root reaches another route."""
    assert [] != leaks([cookie], OWN)


@pytest.mark.parametrize(
    ("cookie", "asked", "expected"),
    [
        ("a=1", "", f"a=1; Path={OWN}/"),
        ("a=1", "/", f"a=1; Path={OWN}/"),
        ("a=1", "/x", f"a=1; Path={OWN}/"),
        ("a=1", "/app/login", f"a=1; Path={OWN}/app"),
        ("a=1; Path=/; HttpOnly", "/x", f"a=1; HttpOnly; Path={OWN}/"),
        ("a=1;path=/v1/sandboxes/sbx-2;Secure", "/x", f"a=1;Secure; Path={OWN}/v1/sandboxes/sbx-2"),
        (f"a=1; Path={OWN}/app", "/x", f"a=1; Path={OWN}/app"),
        (f"a=1; Path={OWN}1/app", "/x", f"a=1; Path={OWN}{OWN}1/app"),
        ("a=1; Path=/one; pAtH = /two", "/x", f"a=1; Path={OWN}/two"),
        ("a=Path=/; Domain=example.test; Max-Age=5", "/x", f"a=Path=/; Max-Age=5; Path={OWN}/"),
        ("a=1; Path=relative", "/app/login", f"a=1; Path={OWN}/app"),
        ("a=1; Path=/app/../..", "/x", f"a=1; Path={OWN}/"),
    ],
)
def test_a_cookie_keeps_the_meaning_that_it_has_in_the_sandbox(cookie: str, asked: str, expected: str) -> None:
    """The path is the program's own, below the route. The lifetime and the attributes for scripts stay."""
    assert [expected] == received(cookie.encode(), asked.encode())
    where = expected.rpartition("Path=")[2].rstrip("/")
    assert in_pythons_jar([expected.replace(";Secure", "")], f"{OWN}{asked}", f"http://{HOST}{where}/y")


@pytest.mark.parametrize(
    "name",
    [
        *("Strict-Transport-Security", "Alt-Svc", "Clear-Site-Data", "NEL", "Report-To", "Service-Worker-Allowed"),
        "Set-Cookie2",
    ],
)
def test_what_is_about_the_whole_host_is_not_for_a_sandbox_to_say(name: str) -> None:
    """The browser would apply it to the API and every other sandbox, too."""
    assert [ISOLATION] == to_client([(name.encode(), b"value")], OWN.encode(), b"/")
