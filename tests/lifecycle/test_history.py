"""The history of a sandbox: which events it has, and its bounds."""

from dataclasses import replace

from lifecycle.sandboxes.history import (
    MOST_EVENTS,
    MOST_OUTPUT,
    EventKind,
    Given,
    History,
    Removal,
    kept,
    printable,
)
from lifecycle.sandboxes.quantities import Resources
from lifecycle.sandboxes.registry import Sandbox, State

PENDING = Sandbox("sbx-1", State.PENDING, "CONTAINER_STARTING", "", 1.0, 1.0, None, "image", ("true",), "runc")
RUNNING = replace(PENDING.moved(State.RUNNING, "CONTAINER_RUNNING", "It runs.", 2.0), policy_digest="a" * 64)
BEGUN = History.begun(replace(PENDING, policy_digest="a" * 64), None)


def reasons(history: History) -> list[str]:
    return [event.reason for event in history.events]


def test_each_new_state_is_an_event_and_nothing_else_of_a_row() -> None:
    history = BEGUN.followed(RUNNING, 2.0)
    assert ["CONTAINER_STARTING", "CONTAINER_RUNNING"] == reasons(history)
    assert history == history.followed(replace(RUNNING, metadata={"a": "b"}, expires_at=9.0, message="other"), 3.0)
    paused = history.followed(RUNNING.moved(State.PAUSED, "CONTAINER_PAUSED", "", 4.0), 4.0)
    assert (3, 4.0, "Paused") == (len(paused.events), paused.events[-1].at, paused.events[-1].state)


def test_a_new_policy_is_an_event_with_a_part_of_its_digest_only() -> None:
    """A policy that is being changed has no digest in the row. The one that comes back is not new."""
    history = BEGUN.followed(RUNNING, 2.0).followed(replace(RUNNING, policy_digest=""), 3.0)
    assert 2 == len(history.followed(RUNNING, 4.0).events)
    event = history.followed(replace(RUNNING, policy_digest="b" * 64), 5.0).events[-1]
    assert ("POLICY_CHANGED", 5.0, f"The gateway has policy {'b' * 16}.") == (event.reason, event.at, event.message)


def test_what_hostd_reports_is_an_event_once() -> None:
    history = BEGUN.followed(RUNNING, 2.0)
    assert history == history.observed(1, None, 3.0, oom=False)
    replaced = history.observed(3, None, 3.0, oom=True)
    assert ["GATEWAY_REPLACED", "OOM_KILL"] == reasons(replaced)[2:]
    assert "The gateway was replaced 2 times." == replaced.events[2].message
    assert replaced == replaced.observed(3, None, 4.0, oom=True)
    assert (3, 137) == (len(replaced.events) - 1, replaced.observed(1, 137, 5.0, oom=False).exit_code)


def test_the_kinds_of_events() -> None:
    rows = [
        ("CONTAINER_RUNNING", EventKind.RUNTIME),
        ("OOM", EventKind.RUNTIME),
        ("GATEWAY_DOWN", EventKind.NETWORK),
        ("ISOLATION_ALARM", EventKind.NETWORK),
        ("CREATE_FAILED", EventKind.LIFECYCLE),
        ("REMOVING", EventKind.LIFECYCLE),
    ]
    for reason, scope in rows:
        assert scope is BEGUN.followed(PENDING.moved(State.FAILED, reason, "", 2.0), 2.0).events[-1].scope


def test_of_many_events_the_first_and_the_last_ones_stay() -> None:
    history = BEGUN
    for number in range(MOST_EVENTS + 50):
        history = history.followed(RUNNING.moved(State.RUNNING, f"R{number}", "", float(number)), 0.0)
    assert (MOST_EVENTS, 51) == (len(history.events), history.dropped)
    assert ["CONTAINER_STARTING", "R51", f"R{MOST_EVENTS + 49}"] == [reasons(history)[place] for place in (0, 1, -1)]


def test_messages_are_bounded_and_have_no_control_characters() -> None:
    message = (
        BEGUN.followed(PENDING.moved(State.FAILED, "X", "a\x1b[2J\u202e" + "y" * 5000, 2.0), 2.0).events[-1].message
    )
    assert message.startswith("a\\u{1b}[2J\\u{202e}yyy")
    assert len(message) < 1050


def test_the_output_of_a_sandbox_that_never_ran_is_not_kept() -> None:
    """It is that of a failed start."""
    removal = Removal(9.0, "deleted by the API", "text\n", truncated=True)
    history = BEGUN.ended(removal)
    assert ("", 9.0, "Removed: deleted by the API.") == (
        history.output,
        history.removed_at,
        history.events[-1].message,
    )
    assert "text\n" == BEGUN.followed(RUNNING, 2.0).ended(removal).output


def test_the_end_of_a_long_output_is_kept_in_whole_lines() -> None:
    text = "".join(f"line {number} é\n" for number in range(10_000))
    output, truncated = kept(text)
    assert truncated
    assert text.endswith(output)
    assert output.startswith("line ")
    assert MOST_OUTPUT - 20 < len(output.encode()) <= MOST_OUTPUT
    assert (True, MOST_OUTPUT) == (kept("é" * MOST_OUTPUT)[1], len(kept("é" * MOST_OUTPUT)[0].encode()))
    assert ("a\n", False) == kept("a\n")


def test_an_output_keeps_lines_and_tabs_and_no_other_control_character() -> None:
    """Escapes of terminals, C1, bidirectional and invisible characters, line separators."""
    hostile = (
        "\x00\x07\x08\x0b\x0c\x1b[31m\x7f\x80\x9b\u00ad\u061c\u200b\u200e\u2028\u2029\u202e\u2066\ufeff\ud800\U000e0041"
    )
    shown = printable(f"a\tb\r\n{hostile}\n\rc")
    first, second, third = shown.split("\n")
    assert "a\tb" == first
    assert second.isascii()
    assert second.isprintable()
    assert "\\u{d}c" == third


def test_of_the_environment_only_names_are_kept_and_not_too_many() -> None:
    given = Given.of(Resources(1, 2, 3, None), {f"NAME{number:03}": "value" for number in range(150)})
    assert (100, 50, "NAME000") == (len(given.variables), given.more_variables, given.variables[0])
    assert "value" not in repr(given)


def test_the_output_of_a_claimed_member_is_withheld_until_its_variables_are_known() -> None:
    """Its history begins with the claim. Without the names of its variables its output is not kept."""
    given = Given.of(Resources(1, 2, 3, None), {})
    member = History.begun(replace(RUNNING, pool="p@1", idle=True), given).observed(2, None, 3.0, oom=False)
    claimed = member.followed(replace(PENDING, pool="p@1", created_at=5.0), 5.0)
    assert (["CONTAINER_STARTING"], 5.0, True, 2) == (
        reasons(claimed),
        claimed.created_at,
        claimed.withheld,
        claimed.generation,
    )
    running = claimed.followed(replace(RUNNING, pool="p@1"), 6.0)
    assert "" == running.ended(Removal(9.0, "expired", "text\n")).output
    assert "text\n" == running.handed_over(["A"]).ended(Removal(9.0, "expired", "text\n")).output
