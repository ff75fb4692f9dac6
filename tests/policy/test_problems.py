"""All mistakes of a file are reported at once, each with its place and a suggestion."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.cli import check, explain
from policy.load import PolicyError, load_text
from policy.problems import MAX_PROBLEMS

# Each line has a good form, and forms that are wrong in this line only.
LINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("version: 1", ("version: 2", "version: one", "version: 1.0")),
    ("default: agents", ("default: agnts", "default: 7", "default: [agents]")),
    ("always_deny: [bad.example]", ("always_deny: [bad.example, bad.example]", "always_deny: bad.example")),
    ("wildcard_bindings: false", ("wildcard_bindings: no", "wildcard_binding: false", "plaintext_secret: []")),
    ("ceiling: {ports: [80, 443]}", ("ceiling: {ports: [0, 443]}", "ceiling: {port: [80]}", "ceiling: []")),
    ("policies:", ("policies: &all",)),
    ("  base: {rules: [{host: a.example}]}", ("  base: {rules: [{host: '*.com'}]}", "  base: {rules: {}}")),
    ("  agents:", ("  agents: !!map",)),
    ("    extends: [base]", ("    extends: [bsae]", "    extends: base", "    extend: [base]")),
    ("    mode: enforce", ("    mode: enforced", "    mod: enforce", "    mode: true")),
    ("    limits: {connections: 8}", ("    limits: {connections: x}", "    limits: {connection: 8}", "    limits: 8")),
    ("    rules:", ("    rules: &rules",)),
    ("      - {id: a, host: b.example, methods: [GET]}", ("      - {id: a, host: b.example, methods: [G T]}",)),
    ("      - {id: b, host: c.example, paths: [/v1]}", ("      - {id: A, host: c.example, paths: [/v1]}",)),
    ("      - {id: c, hosts: [d.example]}", ("      - {id: c, hosts: [d.example], methods: GET}",)),
    (
        "      - {id: d, host: e.example, inject: {secret: s, as: bearer}}",
        (
            "      - {id: d, host: e.example, inject: {secret: s, as: bearr}}",
            "      - {id: d, host: e.example, inject: {secrets: s, as: bearer}}",
            "      - {id: d, host: '*.e.example', inject: {secret: s, as: bearer}}",
        ),
    ),
    ("      - {id: e, host: f.example, action: deny}", ("      - {id: e, host: f.example, action: deni}",)),
    ("  other: {}", ("  Other: {}", "  other: []", "  agents: {}")),
)


def _problems(text: str) -> tuple[PolicyError, ...]:
    try:
        load_text(text, "p.yaml")
    except PolicyError as error:
        assert str(error) == str(error.problems[0])
        return error.problems
    return ()


def test_the_good_forms_are_good() -> None:
    """A control: the mistakes reported below come from the changed lines."""
    assert () == _problems("\n".join(good for good, _ in LINES))


@given(st.tuples(*(st.sampled_from((None, *wrong)) for _, wrong in LINES)))
def test_every_line_that_is_wrong_is_reported_and_no_other(chosen: tuple[str | None, ...]) -> None:
    """With any other mistakes beside it."""
    text = "\n".join(wrong or good for wrong, (good, _) in zip(chosen, LINES, strict=True))
    expected = [number for number, wrong in enumerate(chosen, start=1) if wrong is not None]

    found = _problems(text)
    assert expected == sorted({problem.line for problem in found})
    assert [(problem.line, problem.column) for problem in found] == sorted(
        {(problem.line, problem.column) for problem in found}
    )


KEYS = {
    "": ("version", "ceiling", "default", "always_deny", "always_allow", "plaintext_secrets", "policies"),
    "policies: {p: {%s: 1}}": ("extends", "limits", "rules"),
    "policies: {p: {rules: [{host: a.example, %s: 1}]}}": ("action", "paths", "inspect", "methods", "schemes"),
    "policies: {p: {rules: [{host: a.example, inject: {secret: s, as: basic, %s: x}}]}}": ("header", "username"),
}


@given(st.data())
def test_a_key_with_one_wrong_letter_is_named_with_what_was_meant(data: st.DataObject) -> None:
    """A letter is left out, doubled, exchanged or replaced."""
    place = data.draw(st.sampled_from(sorted(KEYS)))
    key = data.draw(st.sampled_from(KEYS[place]))
    at = data.draw(st.integers(0, len(key) - 2))
    wrong = data.draw(
        st.sampled_from(
            (key[:at] + key[at + 1 :], key[: at + 1] + key[at:], key[:at] + key[at + 1] + key[at] + key[at + 2 :])
        )
    )
    if wrong in {known for names in KEYS.values() for known in names} | {"host", "rule"}:
        return
    line = place % wrong if place else f"{wrong}: 1"
    texts = [problem.problem for problem in _problems(f"version: 1\n{line}")]
    assert any(text.startswith(f"unknown key {wrong!a}; did you mean {key!a}?") for text in texts), texts


def test_a_file_of_nothing_but_problems_is_read_to_a_bound() -> None:
    """The first mistakes are kept, and the reading ends."""
    found = _problems("version: 1\npolicies:\n" + "".join(f"  P{number}: 7\n" for number in range(200)))
    assert MAX_PROBLEMS == len(found)
    rules = "".join(f"      - {{hosst: x{number}.example}}\n" for number in range(4000))
    assert MAX_PROBLEMS == len(_problems(f"version: 1\npolicies:\n  p:\n    rules:\n{rules}"))


def test_check_prints_all_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One per line, with file, line and column."""
    file = tmp_path / "p.yaml"
    file.write_text(
        "version: 1\npolicies:\n  p:\n    mod: enforce\n    rules:\n      - {host: a.example, method: [GET]}\n"
    )

    assert 2 == check(file)
    lines = capsys.readouterr().err.splitlines()
    assert [f"{file}:4:5: unknown key 'mod'; did", f"{file}:6:27: unknown key 'method'; did"] == [
        line.partition(" you")[0] for line in lines
    ]
    assert "'methods'?" in lines[1]


def test_a_policy_that_is_not_there_is_compared_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the arguments of `explain`, as in the file."""
    file = tmp_path / "p.yaml"
    file.write_text("version: 1\npolicies: {agents: {}}\n")

    assert 2 == explain(file, "agnets", "a.example", 443, "https")
    assert "there is no policy named 'agnets'; did you mean 'agents'?" in capsys.readouterr().err
    assert 2 == explain(file, "x", "a.example", 443, "https")
    assert "there are agents, deny-all" in capsys.readouterr().err
