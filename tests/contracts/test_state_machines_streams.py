"""A state machine of background commands: the pages are the written bytes, in any steps of the reader.

Each command writes when the test requests it, in one of several ways.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.sync.sandbox import SandboxSync

from tests.contracts.machines import explore, failed

pytestmark = [pytest.mark.system, pytest.mark.extended]

PLACE = "/tmp/streams"
WAYS = ("cat {}", "cat {} >&2", "cat {} >>/dev/stdout", "cat {} >/dev/stderr", "(cat {} >&2)", "cat {} >/proc/$$/fd/1")
WRITER = """
trap 'exit 40' TERM
exec 9<>{place}/{name}.pipe
echo done >{place}/{name}.done
while IFS= read -r line <&9; do
  eval "$line"
  echo done >>{place}/{name}.done
done
"""
PIECES = [
    b"a",
    b"line\n",
    b"\r\n",
    b"\0",
    b"\xff",
    "é".encode(),
    "😀".encode(),
    "😀".encode()[:3],
    b"\x80",
    b"x" * 5000,
]
PIECES += [b'{"type":"execution_complete"}\n\n', b"EXECD-COMMANDS-TAIL-CURSOR: 0\r\n\r\n"]
pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(b"".join)


@dataclass(slots=True)
class Command:
    """A background command and its output so far."""

    id: str
    name: str
    trapping: bool
    written: bytes = b""
    steps: int = 0
    read: dict[int, int] = field(default_factory=lambda: {0: 0})  # by cursor that was returned
    code: int | None = None  # None while it runs


class Streams(RuleBasedStateMachine):
    """Background commands with several readers."""

    sandbox: ClassVar[SandboxSync]
    http: ClassVar[httpx.Client]
    commands = Bundle("commands")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Command] = []

    @initialize(target=commands)
    def begin(self) -> Command:
        assert 0 == self.sandbox.commands.run(f"mkdir -p {PLACE}").exit_code
        return self.start(trapping=True)

    def start(self, *, trapping: bool) -> Command:
        name = secrets.token_hex(8)
        script = WRITER.format(place=PLACE, name=name)
        if not trapping:
            script = script.replace("trap 'exit 40' TERM", ":")
        assert 0 == self.sandbox.commands.run(f"mkfifo {PLACE}/{name}.pipe; : >{PLACE}/{name}.done").exit_code
        execution = self.sandbox.commands.run(script, opts=RunCommandOpts(background=True))
        assert execution.id
        assert self.sandbox.commands.get_command_status(execution.id).running
        command = Command(execution.id, name, trapping)
        self.open.append(command)
        self.wait(command)
        return command

    @rule(target=commands, trapping=st.booleans())
    def another(self, trapping: bool) -> Command:
        return self.start(trapping=trapping)

    def tell(self, command: Command, line: str) -> None:
        self.sandbox.commands.run(["sh", "-c", 'printf "%s\\n" "$1" >"$2"', "sh", line, f"{PLACE}/{command.name}.pipe"])

    @rule(command=commands, data=pieces, way=st.sampled_from(WAYS))
    def write(self, command: Command, data: bytes, way: str) -> None:
        if command.code is not None:
            return
        source = f"{PLACE}/{command.name}.{command.steps}"
        self.sandbox.files.write_file(source, data)
        self.tell(command, way.format(source))
        command.written += data
        command.steps += 1
        self.wait(command)

    def wait(self, command: Command) -> None:
        """Wait until a command has done the requested steps; the first step is its start."""
        done = f"{PLACE}/{command.name}.done"
        wait = f'while [ "$(wc -l <{done})" -le {command.steps} ]; do sleep 0.01; done'
        assert 0 == self.sandbox.commands.run(wait).exit_code

    @rule(command=commands, data=st.data())
    def read(self, command: Command, data: Any) -> None:
        """Read from the end of some page, or from anywhere."""
        size = len(command.written)
        cursor = data.draw(st.one_of(st.sampled_from(sorted(command.read)), st.integers(0, size + 3)))
        answer = self.page(command, cursor)
        end = int(answer.headers["EXECD-COMMANDS-TAIL-CURSOR"])
        assert command.written[cursor:end] == answer.content
        assert "text/plain; charset=utf-8" == answer.headers["content-type"]
        if cursor >= size:
            assert (cursor, b"") == (end, answer.content)
            return
        held = command.written[end:]
        assert len(held) < 4
        if held:  # a character that more output can complete
            assert command.code is None
            assert held[0] >= 0xC0
        command.read[end] = 0

    def page(self, command: Command, cursor: int) -> httpx.Response:
        answer = self.http.get(f"/command/{command.id}/logs", params={"cursor": cursor})
        assert 200 == answer.status_code
        return answer

    @rule(command=commands)
    def look(self, command: Command) -> None:
        """A command runs, then its end is reported the same way for ever."""
        self.judge(command)

    def judge(self, command: Command) -> None:
        status = self.sandbox.commands.get_command_status(command.id)
        assert (command.code is None, command.code) == (status.running, status.exit_code)
        assert status.running == (status.finished_at is None)
        if command.code == -1:
            assert "signal: terminated" == status.error

    def ended(self, command: Command, code: int) -> None:
        until(lambda: not self.sandbox.commands.get_command_status(command.id).running)
        command.code = code
        self.judge(command)

    @rule(command=commands, code=st.sampled_from([0, 0, 3, 255]), data=pieces)
    def finish(self, command: Command, code: int, data: bytes) -> None:
        """The last output is available as soon as the command has ended."""
        if command.code is None:
            source = f"{PLACE}/{command.name}.last"
            self.sandbox.files.write_file(source, data)
            self.tell(command, f"cat {source}; exit {code}")
            command.written += data
            self.ended(command, code)
            assert command.written == self.page(command, 0).content

    @rule(command=commands)
    def interrupt(self, command: Command) -> None:
        if command.code is None:
            self.sandbox.commands.interrupt(command.id)
            self.ended(command, 40 if command.trapping else -1)
            self.sandbox.commands.interrupt(command.id)  # repeated within a minute
        elif command.code not in (40, -1):
            with pytest.raises(SandboxApiException) as refused:
                self.sandbox.commands.interrupt(command.id)
            assert 500 == refused.value.status_code

    def teardown(self) -> None:
        for command in self.open:
            if command.code is None and not failed():
                self.interrupt(command)
            if not failed():
                assert command.written == self.page(command, 0).content
                self.judge(command)
        self.sandbox.commands.run(f"rm -rf {PLACE}")


def until(happened: Callable[[], bool]) -> None:
    for _ in range(2000):
        if happened():
            return
    raise AssertionError("it did not happen")


def test_pages_are_what_was_written(sandbox: SandboxSync) -> None:
    endpoint = sandbox.get_endpoint(44772)
    with httpx.Client(base_url=f"http://{endpoint.endpoint}", headers=endpoint.headers, timeout=30) as http:
        Streams.sandbox, Streams.http = sandbox, http
        explore(Streams, 3, 12)
