"""Answers of the gateway in place of the server."""

import json

import pytest

from gateway import pages


@pytest.mark.parametrize(
    "page",
    [
        pages.failure(502),
        pages.refusal(400, "A reason."),
        pages.denial("r", "why", "GET a.example/", ()),
        pages.denial("r", "why", "GET a.example/", [b"application/json"]),
        pages.over("too many", 7),
        pages.busy(3),
    ],
)
def test_a_page_has_its_length_and_is_not_stored(page: tuple[pages.Fields, bytes]) -> None:
    fields, body = page
    assert str(len(body)).encode() == dict(fields)[b"content-length"]
    assert b"no-store" == dict(fields)[b"cache-control"]


def test_a_denial_says_the_rule_the_reason_and_what_to_ask_for() -> None:
    _, body = pages.denial("default", "no rule allows it", "GET a.example/x", [b"text/html"])
    assert all(part in body for part in (b"default", b"no rule allows it", b"GET a.example/x"))
    document = json.loads(pages.denial("default", "no rule allows it", "GET a.example/x", [b"Application/JSON"])[1])
    assert ("default", "no rule allows it", "GET a.example/x") == tuple(
        document[name] for name in ("rule", "reason", "request")
    )


def test_a_client_learns_when_to_ask_again() -> None:
    assert b"7" == dict(pages.over("too many", 7)[0])[b"retry-after"]
    assert b"3" == dict(pages.busy(3)[0])[b"retry-after"]


def test_a_whole_response_ends_its_connection() -> None:
    head, _, body = pages.http1(403, pages.refusal(403, "No.")).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert (b"HTTP/1.1 403 Forbidden", b"No.\n") == (lines[0], body)
    assert b"connection: close" in lines
    assert "" == pages.reason_phrase(799)
