"""Composes a request to send from the judged one: placeholders in what the client sent, then injections. Pure.

- The head is composed from the client's head only. A placeholder in an injected value is not replaced.
- Placeholders of the path are replaced in the path that policy judged. The result must have exactly one reading.
- A composed body is framed by `Content-Length`.
- The result and its limits do not depend on the engine. No error message contains a secret.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway import substitute
from gateway.effects import SecretRefused
from gateway.inject import inject, inject_cookies, inject_query
from gateway.substitute import TooMany
from gateway.tls.hello import MAX_HEAD
from gateway.translate import Headers, Translated
from policy.injection import InjectionKind, InjectionPlan, SecretPlan, SubstitutionPlan, Surface, basic_login
from policy.paths import ambiguity
from vault.secret import Secret

AMBIGUOUS = "request path contains ambiguous substituted segments"
_OF_BODY = frozenset({b"content-length", b"transfer-encoding", b"expect"})

type Rendered = Sequence[tuple[InjectionPlan, str]]
"""Injections, each with the text for its slot."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A request with its secrets.

    Attributes:
        path: the path, if placeholders were replaced in it; otherwise None.
        sensitive: names, in lower case, of the headers and pseudo-headers that carry a secret.
        body: the body to send, None if it is sent as it comes.
    """

    target: bytes = field(repr=False)
    headers: Headers = field(repr=False)
    path: str | None = field(repr=False)
    sensitive: frozenset[bytes]
    body: bytes | None = field(repr=False)


def needs_body(translated: Translated, plans: Iterable[SubstitutionPlan], *, http2: bool) -> bool:
    """Whether a placeholder may have to be replaced in the body of this request."""
    return (
        any(Surface.BODY in plan.surfaces for plan in plans)
        and (http2 or _announced(translated))  # over HTTP/2 a body needs no announcement
        and substitute.body_form(translated.headers) is not None
    )


def found_in_head(translated: Translated, plans: Sequence[SubstitutionPlan]) -> frozenset[SubstitutionPlan]:
    """Return the plans whose placeholder is on a surface of the head.

    Raises:
        TooMany: see `gateway.substitute`.
    """
    path, _, query = translated.target.partition(b"?")
    found: set[SubstitutionPlan] = set()
    for surface, text in ((Surface.PATH, path), (Surface.QUERY, query)):
        there = substitute.in_target(text, _placeholders(plans, surface))
        found |= {plan for plan in plans if surface in plan.surfaces and plan.placeholder in there}
    wanted = _placeholders(plans, Surface.HEADER)
    if wanted:
        for name, value in translated.headers:
            if substitute.takes_placeholders(name):
                there = substitute.in_header(value, wanted)
                found |= {plan for plan in plans if Surface.HEADER in plan.surfaces and plan.placeholder in there}
    logins = {_login(one) for one in translated.headers}
    return frozenset(found | {plan for plan in plans if Surface.BASIC in plan.surfaces and plan.login in logins})


def found_in_body(
    translated: Translated, body: bytes, plans: Sequence[SubstitutionPlan]
) -> frozenset[SubstitutionPlan]:
    """Return the plans whose placeholder is in the body.

    Raises:
        TooMany: see `gateway.substitute`.
    """
    form, wanted = substitute.body_form(translated.headers), _placeholders(plans, Surface.BODY)
    if form is None or not wanted or not substitute.is_utf8(body):
        return frozenset()
    there = substitute.in_body(form, body, wanted)
    return frozenset(plan for plan in plans if Surface.BODY in plan.surfaces and plan.placeholder in there)


def compose(
    translated: Translated,
    rendered: Rendered,
    substituted: Sequence[tuple[SubstitutionPlan, Secret]],
    body: bytes | None,
    limit: int,
) -> Composed:
    """Return the request to send.

    Args:
        substituted: the plans whose placeholder was found, with their values.
        body: the whole body, None if it is not collected.
        limit: of the composed body, in bytes.

    Raises:
        SecretRefused: the request with its secrets must not be sent.
        ValueError: a secret cannot be sent.
    """
    sensitive: set[bytes] = set()
    path, mark, query = translated.target.partition(b"?")
    headers = list(translated.headers)
    given, before = path, (path, query)
    try:
        if values := _values(substituted, Surface.PATH):
            path = substitute.replaced_in_target(path, values, MAX_HEAD)
        if values := _values(substituted, Surface.QUERY):
            query = substitute.replaced_in_target(query, values, MAX_HEAD)
        if values := _values(substituted, Surface.HEADER):
            headers = [_header(one, values, sensitive) for one in headers]
        if logins := {plan.login: value for plan, value in substituted if Surface.BASIC in plan.surfaces}:
            headers = [_with_password(one, logins, sensitive) for one in headers]
        if body is not None:
            body = _body(translated, body, _values(substituted, Surface.BODY), limit)
            headers = [one for one in headers if one[0].lower() not in _OF_BODY]
            if body or _framed(translated):
                headers.append((b"Content-Length", b"%d" % len(body)))
    except TooMany as error:
        raise SecretRefused(str(error)) from None
    if path != given and ambiguity(path.decode("ascii", "replace")) is not None:
        raise SecretRefused(AMBIGUOUS)
    target = path + mark + query
    if (path, query) != before:
        sensitive.add(b":path")
    if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) > 2 * MAX_HEAD:
        raise SecretRefused("the head of the request with its secrets is too large")
    target, composed = _injected(target, tuple(headers), rendered, sensitive)
    return Composed(target, composed, None if path == given else path.decode("ascii"), frozenset(sensitive), body)


def _injected(target: bytes, headers: Headers, rendered: Rendered, sensitive: set[bytes]) -> tuple[bytes, Headers]:
    fields: list[tuple[str, str]] = []
    cookies: list[tuple[str, str]] = []
    parameters: list[tuple[str, str]] = []
    for plan, text in rendered:
        match plan.kind:
            case InjectionKind.QUERY:
                parameters.append((plan.name, text))
            case InjectionKind.COOKIE:
                cookies.append((plan.name, text))
            case _:
                fields.append((plan.name, text))
                sensitive.add(plan.slot.encode("ascii"))
    headers = inject(headers, fields)
    if cookies:
        headers = inject_cookies(headers, cookies)
        sensitive.add(b"cookie")
    if parameters:
        target = inject_query(target, parameters)
        sensitive.add(b":path")
    return target, headers


def _header(header: tuple[bytes, bytes], values: dict[str, str], sensitive: set[bytes]) -> tuple[bytes, bytes]:
    name, value = header
    if not substitute.takes_placeholders(name):
        return header
    replaced = substitute.replaced_in_header(value, values, MAX_HEAD)
    if replaced != value:
        sensitive.add(name.lower())
    return name, replaced


def _login(header: tuple[bytes, bytes]) -> tuple[bytes, bytes] | None:
    """Return the Basic login for the server, None if the header has none."""
    name, value = header
    return basic_login(value) if name.lower() == b"authorization" else None


def _with_password(
    header: tuple[bytes, bytes], logins: dict[tuple[bytes, bytes], Secret], sensitive: set[bytes]
) -> tuple[bytes, bytes]:
    login = _login(header)
    if login is None or login not in logins:
        return header
    sensitive.add(b"authorization")
    return header[0], substitute.replaced_password(header[1], logins[login].reveal())


def _body(translated: Translated, body: bytes, values: dict[str, str], limit: int) -> bytes:
    form = substitute.body_form(translated.headers)
    return body if form is None or not values else substitute.replaced_in_body(form, body, values, limit)


def _values(substituted: Sequence[tuple[SubstitutionPlan, Secret]], surface: Surface) -> dict[str, str]:
    return {plan.placeholder: value.reveal() for plan, value in substituted if surface in plan.surfaces}


def _placeholders(plans: Iterable[SubstitutionPlan], surface: Surface) -> frozenset[str]:
    return frozenset(plan.placeholder for plan in plans if surface in plan.surfaces)


def _framed(translated: Translated) -> bool:
    return any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in translated.headers)


def _announced(translated: Translated) -> bool:
    return _framed(translated) and not any(
        name.lower() == b"content-length" and value == b"0" for name, value in translated.headers
    )


def split(
    injected: Iterable[tuple[SecretPlan, Secret]],
) -> tuple[list[tuple[InjectionPlan, Secret]], list[tuple[SubstitutionPlan, Secret]]]:
    """Return the injections and the substitutions of `injected`."""
    injections: list[tuple[InjectionPlan, Secret]] = []
    substitutions: list[tuple[SubstitutionPlan, Secret]] = []
    for plan, value in injected:
        if isinstance(plan, InjectionPlan):
            injections.append((plan, value))
        else:
            substitutions.append((plan, value))
    return injections, substitutions
