"""A short chaos run with the verdicts of `./run chaos`. Only the limit of the recovery time is higher."""

import os
import random
import secrets
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from demo.chaos.judge import judge
from demo.chaos.kills import Part, plan
from demo.chaos.main import POLICY
from demo.chaos.run import Settings, run
from testbed.internet import API, Internet
from testbed.stack import Stack
from tests.stacks import INTERNET, scratch

SECONDS = 40.0
BOUND = 30.0
"""Seconds. Other tests can run at the same time."""
PARTS = tuple(Part)


@pytest.fixture(name="token")
def _token() -> str:
    return secrets.token_urlsafe(40)


@pytest.fixture(name="mortal")
def _mortal(token: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A separate server with its own Docker and internet, under the policy of a chaos run."""
    run_dir = Path(f"{os.environ['SALLYPORT_RUN_DIR']}-chaos")
    with scratch("chaos") as place:
        monkeypatch.setenv("SALLYPORT_HOME", str(place / "home"))
        monkeypatch.setenv("SALLYPORT_RUN_DIR", str(run_dir))
        accounts = {"git": "a:b", "index": "a:b", "api": token}
        with Internet(f"{INTERNET}-chaos", place / "internet", accounts) as internet:
            try:
                with Stack(internet, place / "stack", POLICY) as stack:
                    stack.sallyport("vault", "put", "api-token", "--host", API, stdin=token)
                    yield stack
            finally:
                subprocess.run(["rm", "-rf", str(run_dir), str(place / "home")], check=False)


@pytest.mark.system
@pytest.mark.extended
def test_whatever_is_killed_nothing_escapes_and_wire_and_log_agree(mortal: Stack, token: str) -> None:
    facts = run(mortal, token, Settings(SECONDS, PARTS, secrets.randbits(32)), print)
    verdict = judge(facts, BOUND)

    assert {} == {name: found for name, found in verdict.findings.items() if found}
    assert len(facts.kills) >= 2
    assert {"a", "b", "c", "d"} == {arrival.ident[1] for arrival in facts.arrivals if arrival.secret}


def test_a_plan_meets_every_part_first_and_then_every_pair() -> None:
    parts = tuple(Part)
    planned = list(islice(plan(parts, random.Random(7)), 55))

    assert set(parts) == {kill[0] for kill in planned[:10]}
    assert 45 == len({frozenset(kill) for kill in planned[10:]})
    assert planned == list(islice(plan(parts, random.Random(7)), 55))
    assert planned != list(islice(plan(parts, random.Random(8)), 55))
