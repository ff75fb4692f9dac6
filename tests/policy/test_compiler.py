"""The compiler: a selection selects and narrows, and the document is the current content of the file."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import wire
from policy import compiler
from policy.bindings import MAX_BINDINGS, MAX_PLACES
from policy.compile import DENY_ALL, compile_named
from policy.compiled import CompiledPolicy
from policy.compiler import CLOSED, configured, run
from policy.document import PolicyDocument
from policy.load import load_text
from policy.operator_file import OperatorFile
from wire.api.compiler import REPORTS, Changed, Compile, References
from wire.api.vaultd import GrantForm
from wire.operations import operation
from wire.serving import handler

LOOSE = """
version: 1
policies:
  team:
    rules: [{id: api, host: api.example.org, inject: {secret: stored, as: bearer}}]
"""
TIGHT = LOOSE + "always_deny: [api.example.org]\n"
TEAM = {"policy_name": "team", "network_policy": None, "bindings": []}
ALL = {"policy_name": None, "network_policy": {"defaultAction": "allow"}, "bindings": []}
BINDING: dict[str, Any] = {
    "name": "b",
    "match": {"hosts": ["api.example.org"]},
    "auth": {"type": "bearer", "credential": "1/token"},
}


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    path = tmp_path / "policies.yaml"
    path.write_text(LOOSE)
    return path


class Hostd:
    """hostd's end of the compiler's channel."""

    def __init__(self, file: OperatorFile) -> None:
        ours, theirs = socket.socketpair()
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.client = wire.Client(ours, handler(REPORTS, self._handle))
        self.client.start()
        self.compiler = asyncio.create_task(run(theirs, file))

    async def _handle(self, _client: wire.Client, report: Changed, fds: list[int]) -> None:
        assert [] == fds
        await self.told.put(operation(report))

    async def compile(self, selection: object) -> CompiledPolicy:
        answer = await self.client.ask(Compile(json.dumps(selection)))
        return CompiledPolicy.from_json(json.loads(answer.policy))


@pytest.fixture(name="hostd")
async def _hostd(file: Path) -> AsyncIterator[Hostd]:
    hostd = Hostd(configured(json.dumps({"policy_file": str(file)})))
    yield hostd
    await hostd.client.close()
    await hostd.compiler  # the compiler ends with its channel


async def test_the_document_is_the_one_that_the_file_has_at_each_question(hostd: Hostd, file: Path) -> None:
    assert compile_named(load_text(LOOSE), "team") == await hostd.compile(TEAM)
    write(file, TIGHT)
    assert compile_named(load_text(TIGHT), "team") == await hostd.compile(TEAM)


@pytest.mark.parametrize("broken", ["version: 2\n", "::", None])
async def test_a_file_that_cannot_be_read_keeps_the_last_good_document(
    hostd: Hostd, file: Path, broken: str | None
) -> None:
    write(file, TIGHT)
    tight = await hostd.compile(TEAM)
    if broken is None:
        file.unlink()
    else:
        write(file, broken)
    assert tight == await hostd.compile(TEAM)
    write(file, LOOSE)
    assert compile_named(load_text(LOOSE), "team") == await hostd.compile(TEAM)


async def test_without_a_readable_file_at_the_start_nothing_is_allowed_until_there_is_one(file: Path) -> None:
    write(file, "version: 2\n")
    hostd = Hostd(configured(json.dumps({"policy_file": str(file)})))
    for selection in (TEAM, ALL):
        policy = await hostd.compile(selection)
        assert all(rules.rules == () or rules.ceiling == CLOSED.ceiling for rules in policy.lists)
        assert not policy.always_allow
    assert hostd.told.empty()  # a compiler that restarts with a broken file changes no sandbox's policy
    write(file, TIGHT)
    assert "changed" == await hostd.told.get()
    assert compile_named(load_text(TIGHT), "team") == await hostd.compile(TEAM)
    await hostd.client.close()
    await hostd.compiler


async def test_hostd_gets_each_document_without_a_request(hostd: Hostd, file: Path) -> None:
    assert "changed" == await hostd.told.get()
    for text in (TIGHT, LOOSE):
        write(file, text)
        assert "changed" == await hostd.told.get()


MANY = [f"h{number}.example.org" for number in range(100)]
REFUSED: dict[str, object] = {
    "nothing": None,
    "a list": [],
    "no key": {},
    "a missing key": {"policy_name": None, "network_policy": None},
    "roots": TEAM | {"upstream_roots": "pem"},
    "a compiled policy": DENY_ALL.to_json(),
    "a name that is none": TEAM | {"policy_name": 1},
    "an empty name": TEAM | {"policy_name": ""},
    "a long name": TEAM | {"policy_name": "n" * 1025},
    "an operator's list": TEAM | {"network_policy": {"always_allow": ["a.example"]}},
    "bindings that are none": TEAM | {"bindings": {}},
    "too many bindings": TEAM | {"bindings": [BINDING] * (MAX_BINDINGS + 1)},
    "too many places": TEAM | {"bindings": [BINDING | {"match": {"hosts": MANY}}] * (MAX_PLACES // len(MANY) + 1)},
    "an unknown key in a binding": TEAM | {"bindings": [BINDING | {"inject": {"secret": "stored"}}]},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_anything_else_is_refused_by_its_place(hostd: Hostd, name: str) -> None:
    with pytest.raises(wire.RemoteError, match="invalid: selection: "):
        await hostd.compile(REFUSED[name])
    assert "team" == (await hostd.compile(TEAM)).name


async def test_hostd_gets_the_references_of_the_document_in_force(hostd: Hostd, file: Path) -> None:
    assert () == (await hostd.client.ask(References())).uses
    write(file, LOOSE.replace("secret: stored", 'secret: "vault://kv/a#b"'))
    assert (GrantForm("vault://kv/a#b", "api.example.org", 443, "https"),) == (
        await hostd.client.ask(References())
    ).uses


async def test_too_many_references_are_refused(hostd: Hostd, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, LOOSE.replace("secret: stored", 'secret: "vault://kv/a#b"'))
    monkeypatch.setattr(compiler, "MOST_REFERENCES", 0)
    with pytest.raises(wire.RemoteError, match="too_large"):
        await hostd.client.ask(References())


@pytest.mark.parametrize("op", ["", "load", "document"])
async def test_there_is_no_other_operation(hostd: Hostd, op: str) -> None:
    with pytest.raises(wire.RemoteError, match="unknown_op"):
        await hostd.client.call(op)
    with pytest.raises(wire.RemoteError, match="invalid"):
        await hostd.client.call("compile", selection=json.dumps(TEAM), document=LOOSE)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": }', "nothing"])
async def test_a_selection_is_a_json_text(hostd: Hostd, text: str) -> None:
    with pytest.raises(wire.RemoteError, match="invalid: selection: not a JSON text"):
        await hostd.client.ask(Compile(text))
    assert "team" == (await hostd.compile(TEAM)).name


async def test_a_policy_that_is_no_frame_is_refused(hostd: Hostd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "WHOLE", wire.FrameLimits(frame=8192))
    rules = [{"action": "allow", "target": f"host-{number}.example.org"} for number in range(50)]
    with pytest.raises(wire.RemoteError, match="too_large"):
        await hostd.compile(TEAM | {"network_policy": {"egress": rules}})


async def test_a_binding_never_names_a_stored_secret(hostd: Hostd) -> None:
    rules = [{"action": "allow", "target": "api.example.org"}]
    for credential in ("stored", "../stored", "inline:stored"):
        bound = BINDING | {"auth": {"type": "bearer", "credential": credential}}
        policy = await hostd.compile({"policy_name": None, "network_policy": {"egress": rules}, "bindings": [bound]})
        plans = [plan for binding in policy.bindings for plan in binding.injections]
        assert [f"inline:{credential}"] == [plan.secret for plan in plans]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"policy_file": "relative"}', '{"policy_file": null, "x": 1}'])
def test_a_configuration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"policy_file|Expecting value"):
        configured(text)


def test_without_a_file_the_shipped_default_is_in_force() -> None:
    assert PolicyDocument() == configured('{"policy_file": null}').document
