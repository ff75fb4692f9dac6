"""The verifier, fed line by line: signatures, places of epochs, shares, anchors and notes, one condition at a time.

All hashes are correct and each chain is in order, so a finding has exactly the cause that its case names.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit import shares
from audit.chain import ZERO, ChainHead, SignedAnchor, extend_log, fingerprint, seal, seal_checkpoint
from audit.ring import Ring, hexadecimal
from audit.shares import Kept, Retention, Segment, Share
from audit.verifier import Verifier
from tests.audit.conftest import A, B
from wire.api import auditd

TS = "2026-01-01T00:00:00.000Z"
FOREIGN = Ed25519PrivateKey.generate()
KEYS = tuple(Ed25519PrivateKey.generate() for _ in range(3))
UNSIGNED = "checkpoint is not signed by this log's key"


def ring() -> Ring:
    return Ring([key.public_key() for key in KEYS])


def epoch_of(key: int, present: int) -> str:
    return f"checkpoint is signed by the key of epoch {key + 1}, in epoch {present + 1}"


@dataclass
class Chain:
    """The lines of one chain, each with its correct hash."""

    name: str
    head: ChainHead = field(default_factory=ChainHead)
    lines: list[bytes] = field(default_factory=list)

    def record(self, kind: str = "dns", **more: Any) -> "Chain":
        producer = "root" if self.name == "control" else "gateway"
        body = {"chain": self.name, "kind": kind, "decision": "deny", "producer": producer, "ts": TS, **more}
        body |= {} if self.name == "control" else {"sandbox": self.name}
        line, self.head = seal(body, self.head)
        self.lines.append(line)
        return self

    def checkpoint(self, key: Ed25519PrivateKey, **more: Any) -> "Chain":
        body = {"chain": self.name, "kind": "checkpoint", "decision": "info", "producer": "auditd", "ts": TS, **more}
        body |= {} if self.name == "control" else {"sandbox": self.name}
        line, head = seal_checkpoint(key, body, self.head)
        self.lines.append(line)
        self.head = head
        return self

    def forged(self) -> "Chain":
        """Append a checkpoint that names the first key and has a signature of another key."""
        record = json.loads(Chain(self.name, self.head).checkpoint(FOREIGN).lines[0])
        body = {name: value for name, value in record.items() if name not in ("seq", "prev", "hash")}
        line, self.head = seal({**body, "key": fingerprint(KEYS[0].public_key())}, self.head)
        self.lines.append(line)
        return self

    @property
    def share(self) -> Share:
        return Share(0, ZERO, (Segment(1, sum(map(len, self.lines)), self.head.seq, self.head.hash),))


def judged(chain: Chain, share: Share | None = None) -> Verifier:
    """Return a verifier that has read one share."""
    verifier = Verifier(ring())
    verifier.share(chain.name, share or chain.share, chain.lines)
    return verifier


def found(verifier: Verifier) -> list[str]:
    """Return the findings without their places."""
    return [text.partition(": ")[2] for text in verifier.findings]


# Shares.


@pytest.mark.parametrize("name", ["control", A])
def test_a_share_with_right_signatures_has_no_finding(name: str) -> None:
    kind = "alarm" if name == "control" else "dns"
    chain = Chain(name).record(kind).checkpoint(KEYS[0]).checkpoint(KEYS[0]).record(kind)
    verifier = judged(chain)
    assert ([], 4, 2) == (verifier.findings, verifier.records, verifier.checkpoints)


def test_a_checkpoint_of_a_share_that_names_a_key_is_signed_by_it() -> None:
    assert [UNSIGNED] == found(judged(Chain("control").forged()))
    assert [UNSIGNED] == found(judged(Chain(A).forged()))
    assert [UNSIGNED] == found(judged(Chain(A).checkpoint(FOREIGN)))


def test_the_epochs_of_a_share_do_not_go_back() -> None:
    assert [epoch_of(0, 1)] == found(judged(Chain(A).checkpoint(KEYS[1]).checkpoint(KEYS[0])))


def test_the_control_chain_skips_no_epoch_and_another_chain_may() -> None:
    assert [] == found(judged(Chain(A).checkpoint(KEYS[0]).checkpoint(KEYS[2])))
    assert [epoch_of(2, 0)] == found(judged(Chain("control").checkpoint(KEYS[0]).checkpoint(KEYS[2])))


def test_the_next_key_of_a_share_is_the_one_of_the_ring() -> None:
    for key, expected in (
        (KEYS[1], []),
        (KEYS[2], ["the key of the next epoch is not the one in keys/epochs.jsonl"]),
    ):
        following = hexadecimal(key.public_key())
        verifier = judged(Chain("control").checkpoint(KEYS[0], next=following).checkpoint(KEYS[1]))
        assert (expected, 1) == (found(verifier), verifier.epoch)


def test_each_line_of_a_share_is_read_whatever_is_wrong_with_the_one_before() -> None:
    chain, other = Chain(A).record(), Chain(B).record()
    chain.lines.append(other.lines[0])
    chain.record("gap", count=3, reason="full")
    verifier = judged(chain)
    assert [f"this is a line of chain {B}"] == found(verifier)
    assert 3 == verifier.records
    assert [f"chains/{A} line 3: gap in chain {A} at {TS}: 3 (full)"] == verifier.notes


def test_a_share_ends_at_the_signed_head_with_the_signed_size() -> None:
    chain = Chain(A).record().record()
    shorter = Share(0, ZERO, (Segment(1, chain.share.segments[0].size - 1, chain.head.seq, chain.head.hash),))
    for share in (Chain(A).record().share, shorter):
        assert [f"chain {A}: what is kept of it is not what was signed"] == judged(chain, share).findings


@pytest.mark.parametrize("name", ["control", A])
def test_a_chain_that_lost_its_beginning_has_its_share_at_least(name: str) -> None:
    least = {"control": 100, A: 50}
    for size in (least[name] - 1, least[name]):
        verifier = Verifier(ring())
        share = Share(7, ZERO, (Segment(1, size, 9, ZERO),))
        kept = Kept(2, 1, 0, {"control_share": 100, "sandbox_share": 50}, {"control": share, name: share})
        verifier.begin_shares(kept)
        expected = f"chain {name}: only {size} bytes are kept, and the share of it is {least[name]}"
        assert (size < least[name]) == (expected in verifier.findings)


def test_a_file_above_the_share_of_a_chain_is_cut_to_it(tmp_path: Path) -> None:
    chain = Chain(A)
    for _ in range(100):
        chain.record()
    (tmp_path / "file").write_bytes(b"".join(chain.lines))
    most = 10 * len(chain.lines[-1])
    retention = Retention(max_files=1, sandbox_share=most)
    kept = shares.split(tmp_path, 1, tmp_path / "file", Kept(), retention, KEYS[0])
    (segment,) = kept.chains[A].segments
    assert most <= segment.size < most + len(chain.lines[-1])


def test_a_second_text_of_a_statements_signature_is_refused() -> None:
    """Base64 must have one text for each signature. A decoder that skips foreign characters would accept many."""
    signed = json.loads(shares._written(KEYS[0], Kept()))
    assert shares.read_kept(ring(), json.dumps(signed).encode()) == Kept()
    text = signed["signature"]
    signed["signature"] = f"{text[:8]}\n{text[8:]}"
    assert shares.read_kept(ring(), json.dumps(signed).encode()) is None


# Files.


def file(number: int, key: Ed25519PrivateKey, *, log: str = ZERO, heads: dict[str, list[Any]] | None = None) -> Chain:
    """Return the first line of a file."""
    return Chain("control").checkpoint(key, file=number, log=log, heads=heads or {}, boot="one")


def fed(number: int, chain: Chain, anchor: SignedAnchor | None = None) -> Verifier:
    """Return a verifier that has read one file."""
    verifier = Verifier(ring(), anchor)
    verifier.begin_file(number)
    verifier.lines(chain.lines)
    return verifier


def test_a_file_that_begins_unsigned_has_both_findings() -> None:
    assert [] == found(fed(1, file(1, KEYS[0])))
    unsigned = [UNSIGNED, "a file must begin with a signed checkpoint of all chains"]
    assert unsigned == found(fed(1, file(1, FOREIGN)))


@pytest.mark.parametrize(("heads", "log"), [({A: [1, ZERO]}, ZERO), ({}, "1" * 64)])
def test_the_first_file_has_no_file_before_it(heads: dict[str, list[Any]], log: str) -> None:
    verifier = fed(1, file(1, KEYS[0], log=log, heads=heads))
    assert ["the first file says that others came before it"] == found(verifier)


@pytest.mark.parametrize("first", [0, 1])
def test_a_log_without_its_first_file_begins_in_any_epoch_and_stays_in_it(first: int) -> None:
    chain = file(2, KEYS[first]).checkpoint(KEYS[first])
    assert [] == found(fed(2, chain))
    assert [epoch_of(first + 1, first)] == found(fed(2, chain.checkpoint(KEYS[first + 1])))


def test_the_next_key_of_a_file_is_the_one_of_the_ring() -> None:
    following = hexadecimal(KEYS[1].public_key())
    chain = file(1, KEYS[0]).checkpoint(KEYS[0], next=following).checkpoint(KEYS[1])
    assert ([], 1) == (found(fed(1, chain)), fed(1, chain).epoch)
    wrong = file(1, KEYS[0]).checkpoint(KEYS[0], next=hexadecimal(KEYS[2].public_key()))
    assert ["the key of the next epoch is not the one in keys/epochs.jsonl"] == found(fed(1, wrong))


@pytest.mark.parametrize(("more", "shown"), [({}, "unknown ()"), ({"count": 2, "reason": "killed"}, "2 (killed)")])
def test_a_gap_is_a_note_with_its_number_and_reason(more: dict[str, Any], shown: str) -> None:
    gap = Chain(A).record("gap", **more)
    chain = file(1, KEYS[0])
    chain.lines += gap.lines
    verifier = fed(1, chain)
    assert ([], [f"file 1 line 2: gap in chain {A} at {TS}: {shown}"]) == (verifier.findings, verifier.notes)


# Anchors.


def anchor_of(chain: Chain, **changed: Any) -> SignedAnchor:
    """Return the anchor at the end of a file."""
    log = ZERO
    for line in chain.lines:
        log = extend_log(log, line)
    fields = {"first": 1, "file": 1, "offset": sum(map(len, chain.lines)), "log": log, "ts": TS, "boot": "one"}
    return SignedAnchor(**{**fields, "clean": True, **changed})


def test_the_signed_end_has_its_place_and_its_hash() -> None:
    chain = file(1, KEYS[0]).checkpoint(KEYS[0])
    for changed, expected in (
        ({}, 0),
        ({"log": "1" * 64}, 1),
        ({"offset": len(chain.lines[0]) + 1, "clean": False}, 1),
    ):
        verifier = fed(1, chain, anchor_of(chain, **changed))
        verifier.finish()
        assert expected == len(verifier.findings), changed
        assert all("is not the one that was signed" in text for text in verifier.findings)


def test_an_anchor_at_the_begin_of_a_file_is_compared() -> None:
    chain, key = file(1, KEYS[0]), fingerprint(KEYS[0].public_key())
    other = f"the log up to byte 0 of file 2 is not as it was anchored at {TS}"
    for log, expected in ((extend_log(ZERO, chain.lines[0]), []), ("1" * 64, [other])):
        verifier = Verifier(ring())
        verifier.pins.add(auditd.Anchor(auditd.ANCHOR_VERSION, TS, key, key, 2, 0, log, {}))
        verifier.begin_file(1)
        verifier.lines(chain.lines)
        verifier.begin_file(2)
        verifier.anchor, verifier.anchored = anchor_of(chain, clean=False), True
        verifier.finish()
        assert expected == verifier.findings


def test_trusted_lines_count_the_epochs_that_they_begin() -> None:
    following = [hexadecimal(key.public_key()) for key in KEYS]
    chain = file(1, KEYS[0])
    chain.checkpoint(KEYS[0], next=following[1]).checkpoint(KEYS[1]).checkpoint(KEYS[1], next=following[2])
    chain.record("alarm", detail=f'a text with "next":"{following[0]}"')
    verifier = Verifier(ring(), anchor_of(chain))
    verifier.begin_file(1)
    verifier.line(chain.lines[0])
    assert verifier.trust(chain.lines[1:])
    assert (2, 5, []) == (verifier.epoch, verifier.records, verifier.findings)
    verifier.lines(Chain("control", chain.head).checkpoint(KEYS[2]).lines)
    assert ([], KEYS[2].public_key()) == (found(verifier), verifier.ring.keys[verifier.epoch])
