"""Collected request bodies: each has a limit, and all of a sandbox together."""

from dataclasses import replace

import pytest

from gateway.engines.bodies import Bodies, BodyRefused
from gateway.engines.port import EngineLimits

LIMITS = replace(EngineLimits(), request_body_bytes=10)


def test_a_body_above_its_limit_is_refused_and_forgotten() -> None:
    bodies = Bodies(LIMITS)
    body = bodies.collect()
    body.add(b"12345")
    body.add(b"67890")
    assert (b"1234567890", 10) == (body.whole(), bodies.held)
    with pytest.raises(BodyRefused) as caught:
        body.add(b"x")

    assert (413, 0) == (caught.value.status, bodies.held)


def test_all_bodies_together_have_a_limit() -> None:
    bodies = Bodies(LIMITS)
    first, *_ = full = [bodies.collect() for _ in range(4)]
    for one in full:
        one.count(10)
    with pytest.raises(BodyRefused) as caught:
        bodies.collect().count(1)

    assert (503, 40) == (caught.value.status, bodies.held)
    first.release()
    first.release()
    bodies.collect().count(10)
    assert 40 == bodies.held


def test_a_representation_has_no_content() -> None:
    body = Bodies(LIMITS).collect()
    body.add(b"content")

    assert "Collected(7 bytes)" == repr(body)
