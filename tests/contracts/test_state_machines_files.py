"""A state machine of files and directories: the tree equals its model, and nothing else changes.

Each step is one call of the SDK. The tree is compared through the API after each step, and at the end with an archive
that a program in the sandbox makes of it.
"""

import base64
import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    EntryInfo,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.sync.sandbox import SandboxSync

from tests.contracts.machines import explore, failed, quoted

pytestmark = [pytest.mark.system, pytest.mark.extended]

ROOT = "/tmp/tree"
LINKS = 40

type Parts = tuple[str, ...]


class Refused(Exception):
    """The status that the model expects instead of an effect."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class Node:
    """An entry of the tree. `target` is the target of a link: from the root, or from the link's directory."""

    kind: str  # directory, file, symlink, other
    mode: int  # as octal digits
    content: bytes = b""
    target: Parts = ()
    relative: bool = False

    @property
    def link(self) -> str:
        return "/".join(self.target if self.relative else (ROOT, *self.target))


class Tree:
    """A model of Linux's directories and paths."""

    def __init__(self) -> None:
        self.nodes: dict[Parts, Node] = {(): Node("directory", 755)}

    def find(self, parts: Parts, *, follow: bool, links: int = 0) -> tuple[Parts, Node | None]:
        """Return the real place of a path and its node. Raise Refused(404) if a parent is no directory."""
        place: Parts = ()
        for index, name in enumerate(parts):
            last = index == len(parts) - 1
            if self.nodes[place].kind != "directory":
                raise Refused(404)
            node = self.nodes.get((*place, name))
            if node is None:
                if last:
                    return (*place, name), None
                raise Refused(404)
            if node.kind == "symlink" and (follow or not last):
                if links == LINKS:
                    raise Refused(500)
                start = place if node.relative else ()
                return self.find((*start, *node.target, *parts[index + 1 :]), follow=follow, links=links + 1)
            place = (*place, name)
        return place, self.nodes[place]

    def get(self, parts: Parts, *, follow: bool = True) -> tuple[Parts, Node]:
        place, node = self.find(parts, follow=follow)
        if node is None:
            raise Refused(404)
        return place, node

    def exists(self, parts: Parts, *, follow: bool) -> bool:
        try:
            return self.find(parts, follow=follow)[1] is not None
        except Refused:
            return False

    def make(self, parts: Parts) -> None:
        """Make a directory with its parents."""
        for length in range(1, len(parts) + 1):
            try:
                place, node = self.find(parts[:length], follow=True)
            except Refused:
                raise Refused(500) from None
            if node is None and self.find(parts[:length], follow=False)[1] is not None:
                raise Refused(500)  # a link without a target
            if node is None:
                self.nodes[place] = Node("directory", 755)
            elif node.kind != "directory":
                raise Refused(500)

    def below(self, place: Parts) -> list[Parts]:
        return [parts for parts in self.nodes if parts[: len(place)] == place]

    def walk(self, place: Parts, depth: int) -> Iterator[tuple[Parts, Node]]:
        """Yield entries in the order of names, each directory before its entries."""
        if depth == 0:
            return
        children = [parts for parts in self.nodes if len(parts) == len(place) + 1 and parts[:-1] == place]
        for parts in sorted(children, key=lambda parts: parts[-1].encode()):
            yield parts, self.nodes[parts]
            if self.nodes[parts].kind == "directory":
                yield from self.walk(parts, depth - 1)


NAMES = [
    "a",
    "b",
    "c.txt",
    "a b ",
    "$5",
    "$NO_SUCH${x",
    "~",
    "%2F%41+",
    "a&b=c;d",
    "#?",
    "new\nline\r\n",
    "quo'te\"",
    "\\",
]
NAMES += [
    "*",
    "[x]",
    "{a,b}",
    "-rf",
    ".hidden",
    "..x",
    "é",
    "e\u0301",
    "😀\u2028",
    "\x7f\t",  # the multipart reader refuses other control characters in a header with 400
    'x"; filename="y',
    "n" * 255,
]
names = st.sampled_from(NAMES)
few = st.sampled_from(["a", "b", "c.txt", "$5", "new\nline\r\n", "{a,b}"])  # few names, so that paths coincide
paths = st.lists(st.one_of(few, few, names), min_size=1, max_size=3).map(tuple)
contents = st.one_of(
    st.binary(max_size=64),
    st.lists(st.sampled_from([b"one", b"\n", b"\r\n", b"\r", b"two\n", b"\0", b"\xff", "é".encode()]), max_size=12).map(
        b"".join
    ),
    st.sampled_from([b"x" * 5000, b"--", b"\r\n--boundary--\r\n"]),
)
modes = st.sampled_from([0, 644, 755, 600, 400, 1777, 4755, 2750, 7, 777])
PATTERN = st.recursive(
    st.one_of(
        st.tuples(st.just("lit"), st.one_of(names, st.sampled_from([*"abcx.", "$", "\n"]))),
        st.just(("star", "*")),
        st.just(("any", "?")),
        st.sampled_from([("set", "[a-c]"), ("set", "[^a-c]"), ("set", "[!x]"), ("set", "[][]"), ("set", r"[\]é-]")]),
    ),
    lambda inner: st.tuples(st.just("alt"), st.lists(st.lists(inner, max_size=2), min_size=1, max_size=3)),
    max_leaves=6,
)
SETS = {"[a-c]": "abc", "[][]": "[]", r"[\]é-]": "]é-"}
NOT_IN = {"[^a-c]": "abc", "[!x]": "x"}


def spelled(pattern: list[Any]) -> str:
    """Return a pattern as text."""
    text = ""
    for kind, value in pattern:
        match kind:
            case "lit":
                text += "".join(f"\\{char}" if char in "*?[]{},\\!^-" else char for char in value)
            case "alt":
                text += "{" + ",".join(map(spelled, value)) + "}"
            case _:
                text += value
    return text


def matches(pattern: list[Any], name: str) -> bool:
    """Return whether a pattern matches a whole name."""
    if not pattern:
        return not name
    (kind, value), rest = pattern[0], pattern[1:]
    match kind:
        case "lit":
            return name.startswith(value) and matches(rest, name[len(value) :])
        case "star":
            return any(matches(rest, name[start:]) for start in range(len(name) + 1))
        case "any":
            return bool(name) and matches(rest, name[1:])
        case "set":
            inside = name[:1] in SETS[value] if value in SETS else name[:1] not in NOT_IN[value]
            return bool(name) and inside and matches(rest, name[1:])
    return any(matches([*alternative, *rest], name) for alternative in value)


class Files(RuleBasedStateMachine):
    """A tree, and the API's calls on it."""

    sandbox: ClassVar[SandboxSync]

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree()
        self.files = self.sandbox.files

    @initialize()
    def begin(self) -> None:
        assert 0 == self.sandbox.commands.run(f"rm -rf {ROOT} && mkdir {ROOT}").exit_code

    @staticmethod
    def path(parts: Parts) -> str:
        return "/".join((ROOT, *parts))

    def judged[T](self, effect: Callable[[], T], call: Callable[[], Any]) -> tuple[T, Any] | None:
        """Apply a call to the model and to the API. Return None if both refuse it with the same status."""
        expected, answered, effected, answer = 200, 200, None, None
        try:
            effected = effect()
        except Refused as refused:
            expected = refused.status
        try:
            answer = call()
        except SandboxApiException as error:
            answered = error.status_code or 0
            assert error.error.message or answered == 404
        note(f"answered {answered}")
        assert expected == answered
        return (effected, answer) if expected == 200 else None  # type: ignore[return-value]

    @rule(entries=st.lists(st.tuples(paths, contents, modes), min_size=1, max_size=3))
    def write(self, entries: list[tuple[Parts, bytes, int]]) -> None:
        def effect() -> None:
            for parts, content, mode in entries:
                self.tree.make(parts[:-1])
                try:
                    place, node = self.tree.find(parts, follow=True)
                except Refused:
                    raise Refused(500) from None
                if node and node.kind != "file":
                    raise Refused(500)
                self.tree.nodes[place] = Node("file", mode or (node.mode if node else 755), content)

        asked = [WriteEntry(path=self.path(parts), data=data, mode=mode) for parts, data, mode in entries]
        self.judged(effect, lambda: self.files.write_files(asked))

    @rule(parts=paths)
    def read(self, parts: Parts) -> None:
        if done := self.judged(lambda: self.readable(parts), lambda: self.files.read_bytes(self.path(parts))):
            assert done[0].content == done[1]

    def readable(self, parts: Parts) -> Node:
        node = self.tree.get(parts)[1]
        if node.kind != "file":
            raise Refused(400)
        return node

    @rule(parts=paths, first=st.integers(0, 80), last=st.one_of(st.none(), st.integers(0, 90)), suffix=st.booleans())
    def read_range(self, parts: Parts, first: int, last: int | None, suffix: bool) -> None:
        header = f"bytes=-{first}" if suffix else f"bytes={first}-{'' if last is None else last}"

        def effect() -> bytes:
            content = self.readable(parts).content
            start = max(0, len(content) - first) if suffix else first
            if start >= len(content) or (not suffix and last is not None and last < first):
                raise Refused(416)
            return content[start:] if suffix or last is None else content[start : last + 1]

        if done := self.judged(effect, lambda: self.files.read_bytes(self.path(parts), range_header=header)):
            assert done[0] == done[1]

    @rule(parts=paths, offset=st.one_of(st.none(), st.integers(0, 6)), limit=st.one_of(st.none(), st.integers(0, 6)))
    def read_lines(self, parts: Parts, offset: int | None, limit: int | None) -> None:
        def effect() -> bytes:
            if offset == 0 or limit == 0:
                raise Refused(400)
            *lines, tail = self.readable(parts).content.split(b"\n")
            lines = [line.removesuffix(b"\r") for line in lines] + ([tail] if tail else [])
            first = (offset or 1) - 1
            return b"\n".join(lines[first : None if limit is None else first + limit])

        if offset is None and limit is None:
            return
        if done := self.judged(effect, lambda: self.files.read_bytes(self.path(parts), offset=offset, limit=limit)):
            assert done[0] == done[1]

    @rule(
        changes=st.dictionaries(
            paths,
            st.tuples(
                st.sampled_from(["one", "\n", "x", "é", "xx", "\0", ""]), st.sampled_from(["", "two", "$1\\n", "onone"])
            ),
            min_size=1,
            max_size=2,
        )
    )
    def replace(self, changes: dict[Parts, tuple[str, str]]) -> None:
        def effect() -> dict[str, int]:
            if any(not old for old, _ in changes.values()):
                raise Refused(400)
            counts = {}
            for path, parts in sorted((self.path(parts).encode(), parts) for parts in changes):
                old, new = (text.encode() for text in changes[parts])
                node = self.readable(parts)
                place = self.tree.get(parts)[0]
                counts[path.decode()] = node.content.count(old)
                self.tree.nodes[place] = replace(node, content=node.content.replace(old, new))
            return counts

        asked = [
            ContentReplaceEntry(path=self.path(parts), old_content=old, new_content=new)
            for parts, (old, new) in changes.items()
        ]
        if done := self.judged(effect, lambda: self.files.replace_contents_detailed(asked)):
            assert done[0] == {item.path: item.replaced_count for item in done[1]}

    @rule(moves=st.lists(st.tuples(paths, paths), min_size=1, max_size=2))
    def move(self, moves: list[tuple[Parts, Parts]]) -> None:
        def effect() -> None:
            for source, target in moves:
                origin = self.tree.get(source, follow=False)[0]
                if self.tree.exists(target, follow=False) or target[: len(source)] == source:
                    raise Refused(500)
                self.tree.make(target[:-1])
                place = self.tree.find(target, follow=False)[0]
                if place[: len(origin)] == origin:
                    raise Refused(500)
                for parts in self.tree.below(origin):
                    self.tree.nodes[(*place, *parts[len(origin) :])] = self.tree.nodes.pop(parts)

        asked = [MoveEntry(src=self.path(source), dest=self.path(target)) for source, target in moves]
        self.judged(effect, lambda: self.files.move_files(asked))

    @rule(several=st.lists(paths, max_size=3))
    def delete(self, several: list[Parts]) -> None:
        def effect() -> None:
            for parts in several:
                place, node = self.found(parts)
                if node and node.kind == "directory":
                    raise Refused(500)
                if node:
                    del self.tree.nodes[place]

        self.judged(effect, lambda: self.files.delete_files([self.path(parts) for parts in several]))

    def found(self, parts: Parts) -> tuple[Parts, Node | None]:
        try:
            return self.tree.find(parts, follow=False)
        except Refused as refused:
            if refused.status == 404:
                return (), None
            raise

    @rule(several=st.lists(paths, max_size=2))
    def delete_directories(self, several: list[Parts]) -> None:
        def effect() -> None:
            for parts in several:
                place, node = self.found(parts)
                if node and node.kind != "directory":
                    raise Refused(500)
                for inside in self.tree.below(place) if node else ():
                    del self.tree.nodes[inside]

        self.judged(effect, lambda: self.files.delete_directories([self.path(parts) for parts in several]))

    @rule(several=st.dictionaries(paths, modes, min_size=1, max_size=2))
    def mkdir(self, several: dict[Parts, int]) -> None:
        def effect() -> None:
            for _, parts in sorted((self.path(parts).encode(), parts) for parts in several):
                if not self.tree.exists(parts, follow=True):
                    self.tree.make(parts)
                    if several[parts]:
                        self.tree.nodes[self.tree.get(parts)[0]] = Node("directory", several[parts])
                elif self.tree.get(parts)[1].kind != "directory":
                    raise Refused(500)

        asked = [WriteEntry(path=self.path(parts), mode=mode) for parts, mode in several.items()]
        self.judged(effect, lambda: self.files.create_directories(asked))

    @rule(several=st.dictionaries(paths, st.one_of(modes, st.just(888)), min_size=1, max_size=2))
    def chmod(self, several: dict[Parts, int]) -> None:
        def effect() -> None:
            if 888 in several.values():
                raise Refused(400)
            for _, parts in sorted((self.path(parts).encode(), parts) for parts in several):
                try:
                    place, node = self.tree.get(parts)
                except Refused:
                    raise Refused(500) from None
                self.tree.nodes[place] = replace(node, mode=several[parts] or node.mode)

        asked = [SetPermissionEntry(path=self.path(parts), mode=mode) for parts, mode in several.items()]
        self.judged(effect, lambda: self.files.set_permissions(asked))

    @rule(several=st.lists(paths, max_size=3))
    def info(self, several: list[Parts]) -> None:
        def effect() -> dict[str, Node]:
            return {self.path(parts): self.tree.get(parts, follow=False)[1] for parts in several}

        if done := self.judged(effect, lambda: self.files.get_file_info([self.path(parts) for parts in several])):
            assert {path: shown(path, node) for path, node in done[0].items()} == {
                path: seen(entry) for path, entry in done[1].items()
            }

    @rule(
        parts=st.one_of(st.just(()), paths),
        pattern=st.lists(PATTERN, max_size=3),
        before=st.sampled_from(["", "", "**/"]),
    )
    def search(self, parts: Parts, pattern: list[Any], before: str) -> None:
        pattern = pattern or [("star", "**")]

        def effect() -> list[Any]:
            place, node = self.tree.get(parts)
            if node.kind != "directory":
                raise Refused(400)
            return [
                shown(self.path(parts + inside[len(place) :]), found)
                for inside, found in self.tree.walk(place, -1)
                if found.kind != "directory" and matches(pattern, inside[-1])
            ]

        asked = SearchEntry(path=self.path(parts), pattern=before + spelled(pattern))
        if done := self.judged(effect, lambda: self.files.search(asked)):
            assert done[0] == [seen(entry) for entry in done[1]]

    @rule(parts=paths, depth=st.integers(0, 3))
    def enumerate(self, parts: Parts, depth: int) -> None:
        def effect() -> Any:
            node = self.tree.get(parts, follow=False)[1]
            if node.kind != "directory":
                raise Refused(400)
            place = self.tree.get(parts, follow=False)[0]
            return [
                shown(self.path(parts + inside[len(place) :]), found) for inside, found in self.tree.walk(place, depth)
            ]

        asked = DirectoryListEntry(path=self.path(parts), depth=depth)
        if done := self.judged(effect, lambda: self.files.list_directory(asked)):
            assert done[0] == [seen(entry) for entry in done[1]]

    @rule(parts=paths, leads=paths, relative=st.booleans(), fifo=st.booleans())
    def make_special(self, parts: Parts, leads: Parts, relative: bool, fifo: bool) -> None:
        """Make a link or a pipe with a command in the sandbox, because no call of the API makes one."""
        try:
            place, node = self.tree.find(parts, follow=False)
        except Refused:
            return
        if node is not None:
            return
        made = Node("other", 644) if fifo else Node("symlink", 777, target=leads, relative=relative)
        argv = ["mkfifo", "--", self.path(parts)] if fifo else ["ln", "-sT", "--", made.link, self.path(parts)]
        assert 0 == self.sandbox.commands.run(argv).exit_code
        self.tree.nodes[place] = made

    @invariant()
    def nothing_else_changed(self) -> None:
        expected = [shown(self.path(parts), node) for parts, node in self.tree.walk((), -1)]
        found = self.files.list_directory(DirectoryListEntry(path=ROOT, depth=99))
        assert expected == [seen(entry) for entry in found]

    def teardown(self) -> None:
        """An archive from a program in the sandbox equals the model, byte for byte."""
        if failed():
            return
        done = self.sandbox.commands.run(f"cd {quoted(ROOT.encode())} && tar -c . | base64 -w 76")
        packed = io.BytesIO(base64.b64decode("".join(message.text for message in done.logs.stdout)))
        found = {}
        with tarfile.open(fileobj=packed) as archive:
            for member in archive:
                parts = tuple(member.name.split("/")[1:])
                if not parts:
                    continue
                mode = int(f"{member.mode:o}")
                if member.isdir():
                    found[parts] = ("directory", mode, b"")
                elif member.issym():
                    found[parts] = ("symlink", mode, member.linkname.encode())
                elif member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    found[parts] = ("file", mode, content.read())
                else:
                    found[parts] = ("other", mode, b"")
        assert {
            parts: (node.kind, node.mode, node.link.encode() if node.kind == "symlink" else node.content)
            for parts, node in self.tree.walk((), -1)
        } == found


def shown(path: str, node: Node) -> tuple[str, str, int, int]:
    """Return the API's description of an entry."""
    if node.kind == "directory":
        return path, node.kind, node.mode, 0
    return path, node.kind, node.mode, len(node.link.encode()) if node.kind == "symlink" else len(node.content)


def seen(entry: EntryInfo) -> tuple[str, str | None, int, int]:
    return entry.path, entry.entry_type, entry.mode, 0 if entry.entry_type == "directory" else entry.size


def test_a_tree_is_what_the_calls_made_of_it(sandbox: SandboxSync) -> None:
    Files.sandbox = sandbox
    explore(Files, 8, 12)
