"""Records that are written together continue their chains and change no other state."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit.batch import Batch, ChainEntry, gap_entry, torn_record
from audit.chain import ZERO, ChainHead, extend_log, parse_line

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
EARLY, LATE = "2026-01-01T00:00:00.000Z", "2026-01-02T00:00:00.000Z"
RECORD = {"kind": "request", "decision": "deny", "producer": "gateway", "sandbox": "sbx-1"}


def batch(ts: str = LATE, last_ts: str = EARLY) -> tuple[Batch, dict[str, ChainHead]]:
    heads = {"sbx-1": ChainHead(6, "a" * 64)}
    return Batch(KEY, heads=heads, log=ZERO, ts=ts, last_ts=last_ts), heads


def test_records_continue_their_chain_and_the_old_heads_stay() -> None:
    made, heads = batch()
    assert [7, 8, 1] == [made.add(ChainEntry(chain, RECORD)) for chain in ("sbx-1", "sbx-1", "sbx-2")]
    first, second, other = (parse_line(line) for line in made.lines)
    assert (first["hash"], "a" * 64) == (second["prev"], first["prev"])
    assert {"sbx-1": ChainHead(6, "a" * 64)} == heads
    assert {"sbx-1": ChainHead(8, second["hash"]), "sbx-2": ChainHead(1, other["hash"])} == made.heads


def test_the_log_and_the_sizes_are_those_of_the_lines() -> None:
    made, _ = batch()
    for _ in range(3):
        made.add(ChainEntry("sbx-1", RECORD))
    log = ZERO
    for line in made.lines:
        log = extend_log(log, line)
    assert (log, {"sbx-1": sum(map(len, made.lines))}) == (made.log, made.grown)


def test_a_clock_that_was_set_back_is_shown_once() -> None:
    made, _ = batch(ts=EARLY, last_ts=LATE)
    for _ in range(2):
        made.add(ChainEntry("sbx-1", RECORD))
    first, second = (parse_line(line) for line in made.lines)
    assert LATE == first["clock_back"]
    assert "clock_back" not in second


def test_a_last_checkpoint_closes_its_chain() -> None:
    made, _ = batch()
    made.checkpoint("sbx-1", {"closed": True})
    assert made.heads["sbx-1"] is None
    assert 1 == made.add(ChainEntry("sbx-1", RECORD))


def test_a_gap_counts_what_is_known_to_be_lost() -> None:
    assert 3 == gap_entry("sbx-1", "lost", 3).record["count"]
    assert "count" not in gap_entry("sbx-1", "lost").record
    assert "sandbox" not in gap_entry("control", "lost").record


def test_a_long_torn_line_is_named_by_its_hash_and_length() -> None:
    assert "torn_length" not in torn_record(b"x" * 2048)
    assert 2049 == torn_record(b"x" * 2049)["torn_length"]
