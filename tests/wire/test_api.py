"""Values that cross a process boundary check themselves."""

from collections.abc import Callable
from typing import Any

import pytest

from wire import codec
from wire.api import auditd, fetcher, hostd, vaultd, worker, zygote
from wire.errors import RequestError

DIGEST = "a" * 64
HEAD = auditd.Head(1, DIGEST)
ANCHOR: dict[str, Any] = {
    "version": 1,
    "ts": "2026-01-01T00:00:00.000Z",
    "identity": DIGEST,
    "key": DIGEST,
    "file": 1,
    "offset": 0,
    "log": DIGEST,
    "heads": {"control": HEAD},
}
FORK: dict[str, Any] = {"sandbox": "sbx-1", "generation": 1, "uid": 1000, "gid": 1000, "cgroup": ("/a",)}
ENTRY = auditd.Entry("request", "deny")

WRONG: dict[str, Callable[[], object]] = {
    "no record": lambda: auditd.Records(()),
    "too many records": lambda: auditd.Records((ENTRY,) * (auditd.MOST_RECORDS + 1)),
    "a gateway without a sandbox": lambda: auditd.Attach(auditd.Producer.GATEWAY, None, 1),
    "a vault with a sandbox": lambda: auditd.Attach(auditd.Producer.VAULT, "sbx-1", 1),
    "the control chain as a sandbox": lambda: auditd.Attach(auditd.Producer.GATEWAY, "control", 1),
    "the end of the control chain": lambda: auditd.CloseSandbox("control"),
    "a negative sequence number": lambda: auditd.Head(-1, DIGEST),
    "a head without a hash": lambda: auditd.Head(1, ""),
    "an anchor of another version": lambda: auditd.Anchor(**{**ANCHOR, "version": 2}),
    "an anchor with a long time": lambda: auditd.Anchor(**{**ANCHOR, "ts": "2" * 65}),
    "an anchor with a negative offset": lambda: auditd.Anchor(**{**ANCHOR, "offset": -1}),
    "an anchor with a path as a chain": lambda: auditd.Anchor(**{**ANCHOR, "heads": {"../x": HEAD}}),
    "a vault channel without a generation": lambda: vaultd.Attach("sbx-1", 0),
    "a login of a long name": lambda: vaultd.WriteLogin("a" * 257, "r.test", 443),
    "a login for a long host": lambda: vaultd.WriteLogin("a", "r" * 257, 443),
    "an image of nowhere": lambda: hostd.AddImage(hostd.ImageOrigin.FILE, "", (), "", False),
    "an image of a long path": lambda: hostd.AddImage(hostd.ImageOrigin.FILE, "/" * 4097, (), "", False),
    "an image with many names": lambda: hostd.AddImage(hostd.ImageOrigin.FILE, "/a", ("a",) * 33, "", False),
    "an image with a long name in its archive": lambda: hostd.AddImage(
        hostd.ImageOrigin.FILE, "/a", (), "a" * 257, False
    ),
    "a value that is fresh for longer than it is valid": lambda: fetcher.Reading(vaultd.Value("v"), 2, 1, True),
    "a value without an end": lambda: fetcher.Reading(vaultd.Value("v"), 1, fetcher.MOST_SECONDS + 1, True),
    "neither a value nor a problem": lambda: fetcher.Fetched(None, None),
    "a value with a problem": lambda: fetcher.Fetched(
        fetcher.Reading(vaultd.Value("v"), 1, 1, True), fetcher.Problem(fetcher.Fault.FAILED, "")
    ),
    "a refresh token of no origin": lambda: fetcher.KeptToken("0" * 63, vaultd.Value("v")),
    "an empty refresh token": lambda: fetcher.KeptToken("0" * 64, vaultd.Value("")),
    "a long refresh token": lambda: fetcher.KeptToken("0" * 64, vaultd.Value("é" * 8193)),
    "a refresh token for a path": lambda: fetcher.Keep("../x", fetcher.KeptToken("0" * 64, vaultd.Value("v"))),
    "the refresh token of a path": lambda: fetcher.Recall("a/b"),
    "the refresh token of a long name": lambda: fetcher.Recall("x" * 129),
    "a long reason": lambda: fetcher.Problem(fetcher.Fault.FAILED, "x" * 301),
    "a long reference": lambda: fetcher.Fetch("x" * 257, "sbx-1"),
    "a reference for a path": lambda: fetcher.Fetch("env://A", "../x"),
    "the end of a path's value": lambda: fetcher.Release("env://A", "../x"),
    "a file of a long name": lambda: fetcher.Open(1, fetcher.Material.FILE, "x" * 257),
    "a vault channel of a path": lambda: vaultd.Attach("../x", 1),
    "a configuration of a path": lambda: worker.Configure("../x", 1, "{}"),
    "a configuration of no generation": lambda: worker.Configure("sbx-1", 0, "{}"),
    "a policy without a digest": lambda: worker.Confirmed(""),
    "a worker that is root": lambda: zygote.Fork(**{**FORK, "uid": 0}),
    "a worker in the group of root": lambda: zygote.Fork(**{**FORK, "gid": 0}),
    "a relative control group": lambda: zygote.Fork(**{**FORK, "cgroup": ("a",)}),
    "too many control groups": lambda: zygote.Fork(**{**FORK, "cgroup": ("/a",) * 65}),
    "init as a worker": lambda: zygote.Forked(1),
    "a group of processes as a worker": lambda: zygote.Exited(-7, 0),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_value_out_of_its_bounds_is_refused(case: str) -> None:
    with pytest.raises(ValueError):
        WRONG[case]()


def test_values_within_their_bounds_are_taken() -> None:
    assert HEAD == auditd.Anchor(**ANCHOR).heads["control"]
    assert 1000 == zygote.Fork(**FORK).uid
    assert "sbx-1" == vaultd.Attach("sbx-1", 1).sandbox
    assert auditd.MOST_RECORDS == len(auditd.Records((ENTRY,) * auditd.MOST_RECORDS).entries)


CANARY = "canary-5f0c2a91"
VALUE = vaultd.Value(CANARY)
BINDING = vaultd.BindingForm(("api.test",), (443,), ("https",), vaultd.Scope(), None)


@pytest.mark.parametrize(
    "message",
    [
        VALUE,
        vaultd.Put("a", VALUE, BINDING),
        vaultd.Rotate("a", VALUE),
        vaultd.OpenSandbox("sbx-1", "l", inline={"inline:a": VALUE}),
        vaultd.Regrant("sbx-1", (), {"inline:a": VALUE}),
        vaultd.IssuedAuthority("", "", VALUE),
        vaultd.Released(VALUE, (VALUE,), 1, vaultd.Scope()),
    ],
    ids=lambda message: type(message).__name__,
)
def test_no_representation_of_a_message_has_a_secret(message: object) -> None:
    for shown in (repr(message), str(message), f"{message}", f"{[message]}", repr({"x": message})):
        assert CANARY not in shown


@pytest.mark.parametrize(
    "given",
    [
        {"name": "a", "value": [CANARY]},
        {"name": "a", "value": {"text": CANARY}},
        {"name": [CANARY], "value": CANARY},
        {"name": "a", "value": CANARY, "more": CANARY},
        {"value": CANARY},
    ],
)
def test_no_refusal_of_a_message_has_a_secret(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        vaultd.CONTROL.read("rotate", given)
    assert CANARY not in str(refused.value)
    assert CANARY not in repr(refused.value)


@pytest.mark.parametrize("uses", [None, 0, 1])
@pytest.mark.parametrize("sent", [None, 0, 1])
def test_a_lease_permits_something(uses: int | None, sent: int | None) -> None:
    if 0 in (uses, sent):
        with pytest.raises(ValueError):
            vaultd.Released(VALUE, (), 1, vaultd.Scope(), uses, sent)
    else:
        vaultd.Released(VALUE, (), 1, vaultd.Scope(), uses, sent)


@pytest.mark.parametrize("size", [0, -1, True, "1", 1.5])
def test_the_size_of_a_request_is_a_number_of_bytes(size: object) -> None:
    asked = codec.encode(vaultd.Release("a", "a.test", 443, "https"))
    assert 1 == vaultd.CHANNEL.read("release", {**asked, "size": 1}).size
    with pytest.raises(RequestError):
        vaultd.CHANNEL.read("release", {**asked, "size": size})
