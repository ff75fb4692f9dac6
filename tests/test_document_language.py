"""Documents, comments and docstrings use plain technical English, and the links of documents have existing targets."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "execd").glob("*.md"))
)
FOLDERS = (
    "audit",
    "bench",
    "demo",
    "frontdoor",
    "gateway",
    "lifecycle",
    "policy",
    "runtimes",
    "testbed",
    "tests",
    "vault",
    "wire",
)
"""Folders of Python files whose comments and docstrings are checked."""
FORBIDDEN = {
    r"who|whoever|nobody|somebody": "a component has a name; a person is the caller, the operator, the user",
    r"told|tells? (?:of|it|them)": "components send, report, record",
    r"anew|mend(?:s|ed|ing)?|whilst|farewell|birth|born": "again, repair, while, refusal, spawn",
    r"keepers?": "watchdog",
    r"R\d{1,2}|section \d+|(?:CRD|LIF|NAM|RES|TLS)-\d+": "requirements of documents outside of the repository",
}
ALLOWED = {
    "the user who": "a person",
    "the operator who": "a person",
    "people who": "persons",
}
"""Permitted phrases that contain a forbidden word, and the reasons."""
_CODE = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL)
_QUOTED = re.compile(r'"[^"\n]*"|“[^”\n]*”')
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_GO_COMMENT = re.compile(r"(?:^|\s)//(?!go:|nolint|export )(.*)$", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def prose(text: str) -> str:
    """Return a document without code, quotes, targets of links and permitted phrases."""
    text = _QUOTED.sub('""', _CODE.sub("``", text))
    for phrase in ALLOWED:
        text = re.sub(rf"\b{phrase}\b", "", text, flags=re.IGNORECASE)
    return text


def problems(text: str) -> list[str]:
    """Return the forbidden words of the text, each with the words around it."""
    text = re.sub(r"\s+", " ", prose(text))
    return [
        text[max(0, match.start() - 40) : match.end() + 20]
        for words in FORBIDDEN
        for match in re.finditer(rf"\b(?:{words})\b", text, re.IGNORECASE)
    ]


def comments(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of Python code.

    The docstrings include those of attributes. Consecutive comments are one text.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            block.append(token.string.lstrip("# "))
        elif token.type != tokenize.NL:
            yield " ".join(block)
            block = []


def code_problems(source: str) -> list[str]:
    """Return the forbidden words in comments and docstrings.

    A source without any forbidden word is not parsed.
    """
    if not re.search(rf"\b(?:{'|'.join(FORBIDDEN)})\b", re.sub(r"[\s#]+", " ", source), re.IGNORECASE):
        return []
    return [problem for text in comments(source) for problem in problems(text)]


def anchors(text: str) -> set[str]:
    """Return the fragments of a document's headings."""
    headings = (heading.replace("`", "").lower() for heading in _HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def dead_links(path: Path, text: str) -> list[str]:
    """Return the relative links of a document whose target does not exist."""
    dead = []
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        exists = target.exists() and target.is_relative_to(ROOT)
        if not exists or (fragment and fragment not in anchors(target.read_text())):
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_is_in_plain_language(document: str) -> None:
    if document != "docs/glossary.md":  # the glossary names the words that are not used
        assert [] == problems((ROOT / document).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_comments_of_a_folder_are_in_plain_language(folder: str) -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / folder).rglob("*.py")}
    assert sources
    found = {name: code_problems(source) for name, source in sources.items()}
    assert {} == {name: words for name, words in found.items() if words}


def test_the_comments_of_execd_are_in_plain_language() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "execd").rglob("*.go")}
    assert sources
    found = {name: problems("\n".join(_GO_COMMENT.findall(source))) for name, source in sources.items()}
    assert {} == {name: words for name, words in found.items() if words}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_links_of_a_document_lead_somewhere(document: str) -> None:
    path = ROOT / document
    assert [] == dead_links(path, path.read_text())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Whoever dies is restarted.", 1),
        ("The log is told, and nobody\nwaits.", 2),
        ('The user `nobody`, and `whoever` "who" asks.', 0),
        ("Ask the user who made it.", 0),
        ("As R33 demands, see section 6.", 2),
        ("```\nwho\n```\n", 0),
    ],
)
def test_forbidden_words_are_found_in_prose_only(text: str, found: int) -> None:
    assert found == len(problems(text))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Whoever asks."""\n', 1),
        ("limit = 1  # nobody needs more\n", 1),
        ("# The log is\n# told of it.\nlimit = 1\n", 1),
        ('class Limit:\n    most: int\n    """Who may\n    exceed it."""\n', 1),
        ("def run():\n    '''It is born here, and mended.'''\n", 2),
        ('who = "nobody"  # the user `nobody`\n', 0),
        ('raise ValueError("who")\n', 0),
    ],
)
def test_forbidden_words_are_found_in_comments_and_docstrings_only(source: str, found: int) -> None:
    assert found == len(code_problems(source))


def test_a_dead_link_is_found() -> None:
    path = ROOT / "README.md"
    assert ["docs/none.md", "docs/glossary.md#none"] == dead_links(
        path, "[a](docs/none.md) [b](docs/glossary.md#none) [c](docs/glossary.md#audit-log) [d](https://example.com)"
    )


def test_each_document_is_reached_from_the_readme() -> None:
    waiting, reached = [ROOT / "README.md"], set()
    while waiting:
        path = waiting.pop()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        links = (link.partition("#")[0] for link in _LINK.findall(path.read_text()) if not re.match(r"[a-z]+:", link))
        for target in ((path.parent / link).resolve() for link in links if link):
            waiting += sorted(target.glob("*.md")) if target.is_dir() else [target]
    assert set() == {path for path in map(ROOT.joinpath, DOCUMENTS) if path not in reached}
