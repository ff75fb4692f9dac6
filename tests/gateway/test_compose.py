"""A request with its secrets, composed from the judged one. `exchange_cases` has more, through each engine."""

from dataclasses import replace

import pytest

from gateway.compose import Composed, compose, found_in_body, found_in_head, needs_body
from gateway.effects import SecretRefused
from gateway.translate import RequestParts, Translated, translate
from policy.facts import FlowFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan, SubstitutionPlan, Surface
from vault.secret import Secret

FLOW = FlowFacts("api.test", 443, Scheme.HTTPS)
PLAN = SubstitutionPlan("b", "token", "__T__", (Surface.PATH, Surface.QUERY, Surface.HEADER, Surface.BODY))
VALUE = Secret("the-secret-value")
LIMIT = 1000
POST = (
    (b"Host", b"api.test"),
    (b"X-Key", b"__T__"),
    (b"Content-Type", b"application/json"),
    (b"Content-Length", b"9"),
)


def translated(target: bytes, headers: tuple[tuple[bytes, bytes], ...] = POST, method: bytes = b"POST") -> Translated:
    """Return a request that the gateway accepts."""
    found = translate(RequestParts(11, method, target, b"", b"", headers), FLOW)
    assert isinstance(found, Translated)
    return found


def test_placeholders_are_replaced_before_injections_which_are_not_searched() -> None:
    request = translated(b"/a/__T__?q=__T__")
    plans = [
        (InjectionPlan("b", "k", InjectionKind.API_KEY, "X-Other"), "__T__"),
        (InjectionPlan("b", "k", InjectionKind.QUERY, "key"), "__T__"),
        (InjectionPlan("b", "k", InjectionKind.COOKIE, "sid"), "__T__"),
    ]

    assert Composed(
        b"/a/the-secret-value?q=the-secret-value&key=__T__",
        (
            (b"X-Key", b"the-secret-value"),
            (b"Content-Type", b"application/json"),
            (b"Content-Length", b"18"),
            (b"X-Other", b"__T__"),
            (b"Cookie", b"sid=__T__"),
        ),
        "/a/the-secret-value",
        frozenset({b":path", b"x-key", b"x-other", b"cookie"}),
        b'"the-secret-value"',
    ) == compose(request, plans, [(PLAN, VALUE)], b'"__T__"', LIMIT)


def test_a_binding_owns_what_it_injects_over_a_substitution() -> None:
    """The header of the client, with its placeholder, is removed."""
    key = InjectionPlan("b", "k", InjectionKind.API_KEY, "X-Key")
    composed = compose(translated(b"/"), [(key, "injected")], [(PLAN, VALUE)], None, LIMIT)

    assert [b"injected"] == [value for name, value in composed.headers if name == b"X-Key"]


def test_a_path_with_two_readings_is_refused_only_if_a_secret_made_it() -> None:
    plan = replace(PLAN, surfaces=(Surface.PATH,))
    for value in ("a/bcdefgh", "a%2fbcdefgh", "........", "a;bcdefgh", "trailing..", "a\\bcdefgh"):
        with pytest.raises(SecretRefused, match="ambiguous substituted segments"):
            compose(translated(b"/x/__T__"), [], [(plan, Secret(value))], None, LIMIT)
    assert b"/x//y" == compose(translated(b"/x//y"), [], [(plan, VALUE)], None, LIMIT).target


def test_a_composed_body_has_its_length_and_no_other_framing() -> None:
    chunked = (*POST[:3], (b"Transfer-Encoding", b"chunked"), (b"Expect", b"100-continue"))
    composed = compose(translated(b"/", chunked), [], [(PLAN, VALUE)], b'"__T__"', LIMIT)

    names = [name.lower() for name, _ in composed.headers]
    assert [b"x-key", b"content-type", b"content-length"] == names
    assert (b"Content-Length", b"18") in composed.headers
    with pytest.raises(SecretRefused):
        compose(translated(b"/", chunked), [], [(PLAN, VALUE)], b'"__T__"', 10)


def test_only_what_is_there_is_found() -> None:
    other = replace(PLAN, placeholder="__U__")
    request = translated(b"/a?__U__")

    assert {PLAN, other} == found_in_head(request, [PLAN, other])
    assert {other} == found_in_head(request, [replace(PLAN, surfaces=(Surface.PATH,)), other])
    assert {PLAN} == found_in_body(request, b'"__T__" __U__', [PLAN, other])
    assert set() == found_in_body(request, b'"__T__\xff"', [PLAN])
    assert set() == found_in_body(request, b'"__T__"', [replace(PLAN, surfaces=(Surface.HEADER,))])


def test_a_body_is_collected_only_if_a_placeholder_can_be_in_it() -> None:
    request, empty = translated(b"/"), translated(b"/", POST[:1], b"GET")

    assert needs_body(request, [PLAN], http2=False)
    assert not needs_body(request, [replace(PLAN, surfaces=(Surface.QUERY,))], http2=False)
    assert not needs_body(empty, [PLAN], http2=False)
    assert needs_body(empty, [PLAN], http2=True)
    multipart = (*POST[:2], (b"Content-Type", b"multipart/form-data; boundary=x"), POST[3])
    assert not needs_body(translated(b"/", multipart), [PLAN], http2=False)


@pytest.mark.parametrize(
    ("surface", "sensitive"),
    [(Surface.PATH, {b":path"}), (Surface.QUERY, {b":path"}), (Surface.HEADER, {b"x-key"}), (Surface.BODY, set())],
)
def test_what_carries_a_secret_is_sensitive(surface: Surface, sensitive: set[bytes]) -> None:
    """HTTP/2 sends it so that no table of the connection has it."""
    plan = replace(PLAN, surfaces=(surface,))

    assert sensitive == compose(translated(b"/__T__?__T__"), [], [(plan, VALUE)], b'"__T__"', LIMIT).sensitive


@pytest.mark.parametrize(
    ("name", "value", "sent"),
    [
        ("Authorization", "Basic bWU6X19UX18=", "Basic bWU6YTrDqS1sb25nZXI="),  # me:__T__ -> me:a:\u00e9-longer
        ("authorization", "bASIC  bWU6X19UX18", "Basic bWU6YTrDqS1sb25nZXI="),
        ("Authorization", "Basic X19UX186", None),  # __T__: the user
        ("Authorization", "Basic eW91Ol9fVF9f", None),  # you:__T__
        ("Authorization", "Basic bWU6X19UX194", None),  # me:__T__x
        ("Authorization", "Basic X19UX18=", None),  # no colon
        ("Authorization", "Basic !!", None),
        ("Authorization", "Bearer __T__", None),
        ("X-Other", "Basic bWU6X19UX18=", None),
    ],
)
def test_the_whole_password_of_a_login_is_replaced(name: str, value: str, sent: str | None) -> None:
    """Nothing else is, and a value with a control character is not sent."""
    plan = replace(PLAN, surfaces=(Surface.BASIC,), username="me")
    request = translated(b"/", (POST[0], (name.encode(), value.encode())), b"GET")
    found = found_in_head(request, [plan])

    assert (sent is not None) is (plan in found)
    composed = compose(request, [], [(plan, Secret("a:\u00e9-longer"))], None, LIMIT)
    assert ((name.encode(), (sent or value).encode()),) == composed.headers
    assert ({b"authorization"} if sent else set()) == composed.sensitive
    if sent is not None:
        with pytest.raises(ValueError, match="control character"):
            compose(request, [], [(plan, Secret("a\nb"))], None, LIMIT)
