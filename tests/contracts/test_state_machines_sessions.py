"""A state machine of bash sessions: each run finds exactly the state that the previous run left.

The shell itself writes its state to a file, at the beginning and at the end of each run. The model also records the
calls for each session.
"""

import re
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import Execution
from opensandbox.sync.sandbox import SandboxSync

from tests.contracts.machines import TRIPPED, explore, failed, hostile, quoted, values

pytestmark = [pytest.mark.system, pytest.mark.extended]

PLACE = "/tmp/told"
TELL = r"""
\builtin printf '%s\0' "$PWD"; \builtin umask -p; \builtin printf '\0'
\builtin set +o; \builtin printf '\0'; \builtin shopt -p; \builtin printf '\0'; \builtin set +efuxvk
\builtin alias -p; \builtin printf '\0'; \builtin declare -f; \builtin printf '\0'; \builtin declare -F
\builtin printf '\0'
\builtin mapfile -t __told_names < <(\builtin compgen -v)
for __told in "${__told_names[@]}"; do
case $__told in BASH*|_|__*|RANDOM|SRANDOM|SECONDS|EPOCH*|PPID|LINENO|DIRSTACK|FUNCNAME) continue;; esac
case $__told in PIPESTATUS|SHLVL|HISTCMD|COMP_*|UID|EUID|GROUPS|SHELLOPTS|OPTERR|READLINE_*|PWD) continue;; esac
\builtin eval "__told_flags=\${$__told@a} __told_count=\${#$__told[@]}"
\builtin printf '%s\0%s\0%s\0' "$__told" "$__told_flags" "$__told_count"
\builtin eval "\builtin printf '%s\0' \"\${!$__told[@]}\"; \builtin printf '%s\0' \"\${$__told[@]}\""
\builtin declare -p "$__told"; \builtin printf '\0'
done; \builtin printf 'over\0'
"""


@dataclass(slots=True)
class Told:
    """The state that a shell has written."""

    directory: bytes
    umask: bytes
    options: dict[str, bool]
    aliases: bytes
    functions: bytes
    exported: bytes
    variables: dict[str, tuple[str, dict[bytes, bytes], bytes]]  # flags, elements, declaration

    @classmethod
    def of(cls, raw: bytes) -> "Told":
        directory, umask, sets, shopts, aliases, functions, exported, *rest = raw.split(b"\0")
        options = {}
        for line in (sets + shopts).decode().split("\n"):
            if line:
                _, flag, name = line.split()
                options[name] = flag in ("-o", "-s")
        variables = {}
        while rest:
            name, flags, count, *rest = rest
            size = max(int(count), 1)  # a variable without a value has one empty word
            keys, values, declaration = rest[:size], rest[size : 2 * size], rest[2 * size]
            rest = rest[2 * size + 1 :]
            elements = dict(zip(keys, values, strict=True)) if int(count) else {}
            variables[name.decode()] = (flags.decode(), elements, declaration)
        return cls(directory, umask, options, aliases, functions, exported, variables)


type Elements = dict[bytes, bytes]


@dataclass(slots=True)
class Shell:
    """The model of a session: the calls for it, and the last state that it wrote."""

    session: str
    directory: bytes | None = None  # directory of the next run; None: the last one's
    told: Told | None = None
    given: dict[str, bytes] = field(default_factory=dict)  # by the file of EXECD_ENVS, at the last run
    variables: dict[str, tuple[set[str], Elements]] = field(default_factory=dict)
    functions: dict[str, bytes] = field(default_factory=dict)  # by their output
    aliases: dict[str, bytes] = field(default_factory=dict)
    options: dict[str, bool] = field(default_factory=dict)
    umask: int | None = None

    def noisy(self) -> bool:
        return self.options.get("xtrace", False) or self.options.get("verbose", False)

    def fragile(self) -> bool:
        """Return whether a failing command ends the shell."""
        return self.options.get("errexit", False) or self.options.get("posix", False)


NAMES = ["x", "y", "IFS", "PS4", "Z_9", "LC_ALL", "HOME", "PATH", "OLDPWD", "TMOUT", "ENV", "GLOBIGNORE", "FIGNORE"]
GIVEN = ["E1", "E2"]
names = st.sampled_from(NAMES)
functions = st.sampled_from(
    ["greet", "a-b", "é", "printf", "declare", "exit", "unset", "eval", "set", "test", "cd", ":"]
)
aliases = st.sampled_from(["ll", "a.b", "..", "builtin", "printf", "exit", "é", "declare", "shopt", "unset", "eval"])
SETS = ["allexport", "noclobber", "noglob", "nounset", "pipefail", "physical", "errtrace", "functrace", "ignoreeof"]
SETS += ["braceexpand", "hashall", "histexpand", "notify", "errexit", "posix", "xtrace", "verbose"]
SHOPTS = ["extglob", "nullglob", "dotglob", "globstar", "failglob", "nocaseglob", "nocasematch", "lastpipe", "xpg_echo"]
SHOPTS += ["localvar_inherit", "expand_aliases", "sourcepath", "assoc_expand_once", "patsub_replacement", "cdable_vars"]
DIRECTORIES = [
    b"plain",
    b"with space",
    b"new\nline\n",
    b"quo'te\"",
    b"$(x)",
    b"\xff\xfe",
    b"-n",
    b"*",
    b"\x01\x7f",
    b"link",
]
BODIES = {
    "printf": "\\builtin printf %s {word}",
    "heredoc": "\\builtin local v; \\builtin mapfile -d '' v <<'E_O_F' && \\builtin printf %s \"$v\"\n{text}\nE_O_F\n",
    "case": "case {word} in a) \\builtin printf A;; *) \\builtin printf %s {word};; esac",
    "loop": "\\builtin local i; for ((i = 0; i < 2; i++)); do \\builtin printf %s {word}; done",
    "string": '\\builtin local v="$(\\builtin printf %s {word})"; \\builtin printf %s "$v"',
    "pattern": "[[ {word} =~ ^(a|.*)$ ]] && \\builtin printf %s {word}",
    "input": "{{ \\builtin printf %s {word}; }} </dev/null 2>&1 | "
    '{{ \\builtin local v; IFS= \\builtin read -r -d "" v; \\builtin printf %s "$v"; }}',
}
ENDINGS: dict[str, int] = {  # commands that end a shell early, and the exit code for the client
    "exit 0": 0,
    "exit 7": 7,
    "\\builtin exec sh -c 'exit 4'": 4,
    "\\builtin kill -KILL $$": -1,
    "\\builtin kill -TERM $$": -1,
    "\\builtin set -e; false; true": 1,
    "\\builtin set -u; \\builtin printf $no_such": 127,
    ": ${no_such?gone}": 127,
}


class Sessions(RuleBasedStateMachine):
    """Sessions with separate shells and states."""

    sandbox: ClassVar[SandboxSync]
    runs: ClassVar[int] = 0
    shells = Bundle("shells")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Shell] = []
        self.given: dict[str, bytes] = {}

    @initialize(target=shells)
    def begin(self) -> Any:
        places = " ".join(quoted(PLACE.encode() + b"/" + name) for name in DIRECTORIES[:-1])
        done = self.sandbox.commands.run(
            f"rm -rf {PLACE} {TRIPPED}; mkdir -p {places} && ln -s plain {PLACE}/link && "
            'if [ -e "$EXECD_ENVS" ]; then : >"$EXECD_ENVS"; fi'
        )
        assert 0 == done.exit_code, done
        self.sandbox.files.write_file(f"{PLACE}/tell", TELL)
        return multiple(self.create(None), self.create(f"{PLACE}/made/deep"))

    def create(self, directory: str | None) -> Shell:
        shell = Shell(self.sandbox.commands.create_session(working_directory=directory))
        shell.directory = directory.encode() if directory else None
        self.open.append(shell)
        return shell

    @rule(target=shells, shell=consumes(shells))
    def delete(self, shell: Shell) -> Shell:
        self.open.remove(shell)
        self.sandbox.commands.delete_session(shell.session)
        with pytest.raises(SandboxApiException) as refused:
            self.sandbox.commands.run_in_session(shell.session, "true")
        assert 500 == refused.value.status_code
        with pytest.raises(SandboxApiException) as refused:
            self.sandbox.commands.delete_session(shell.session)
        assert 404 == refused.value.status_code
        return self.create(f"{PLACE}/plain")

    def run(self, shell: Shell, command: str, *, ends: bool | None = True, last: str = "", **options: Any) -> Execution:
        """Run a command between two writes of the shell's state. Compare the first one with the model.

        `ends` is whether the shell reaches the second write; None: either is correct.
        """
        type(self).runs += 1
        name = str(self.runs)
        tell = f"(\\builtin . {PLACE}/tell) >>{PLACE}/{name} 2>/dev/null"
        note(f"{name}: {shell.session}: {command} {last} {options}")
        done = self.sandbox.commands.run_in_session(shell.session, "\n".join((tell, command, tell, last)), **options)
        now, left, *_ = [*map(Told.of, self.sandbox.files.read_bytes(f"{PLACE}/{name}").split(b"\0over\0")[:-1]), None]
        self.compare(shell, now)
        assert ends is None or ends == (left is not None), done
        shell.directory, shell.given, shell.told = None, dict(self.given), left or now
        if left is None:  # it ended early: the state at its start stays
            shell.directory = now.directory
        return done

    def changed(self, shell: Shell, command: str, **options: Any) -> bool:
        """Run a command that must complete, unless the shell ends at a failure."""
        self.run(shell, command, ends=None if shell.fragile() else True, **options)
        assert shell.told
        return shell.directory is None

    def compare(self, shell: Shell, now: Told) -> None:
        """Compare the shell's state with the one that it left and with the calls since then."""
        if (left := shell.told) is not None:
            assert (shell.directory or left.directory) == now.directory
            assert left.umask == now.umask
            assert left.options == now.options
            assert left.aliases == now.aliases
            assert left.functions == now.functions
            assert left.exported == now.exported
            expected = dict(left.variables)
            for name in shell.given.keys() | self.given.keys():
                was = expected.get(name)
                if was and (was[0] != "x" or was[1].get(b"0") != shell.given.get(name)):
                    continue  # the session's own
                if not was and name in shell.given:
                    continue  # removed by the session
                expected.pop(name, None)
                if name in self.given:
                    expected[name] = ("x", {b"0": self.given[name]}, now.variables[name][2])
            assert expected == now.variables
        elif shell.directory is not None:
            assert shell.directory == now.directory
        for name, (flags, elements) in shell.variables.items():
            found = now.variables[name]
            assert (flags, elements) == (set(found[0]) - ({"x"} - flags), found[1]), name
        for name, value in shell.aliases.items():
            word = value.replace(b"'", b"'\\''")
            line = b"alias %s=%s\n" % (name.encode(), b"\\'" if value == b"'" else b"'%s'" % word)
            assert line in now.aliases
        assert shell.options.items() <= now.options.items()
        if shell.umask is not None:
            assert b"umask %04o\n" % shell.umask == now.umask

    def teardown(self) -> None:
        for shell in self.open:
            if not failed():
                self.run(shell, ":", ends=None if shell.fragile() else True)
            self.sandbox.commands.delete_session(shell.session)
        if not failed():
            with pytest.raises(SandboxApiException):
                self.sandbox.files.get_file_info([TRIPPED])

    @rule(
        shell=shells,
        name=st.sampled_from([*NAMES, *GIVEN]),
        value=values,
        flag=st.sampled_from(["", "x", "r", "l", "u"]),
    )
    def set_scalar(self, shell: Shell, name: str, value: bytes, flag: str) -> None:
        fixed = name in shell.variables and "r" in shell.variables[name][0]
        flag = "" if flag == "r" and name in (*GIVEN, "OLDPWD", "IFS") else flag
        kept = {"l": value.lower(), "u": value.upper()}.get(flag, value)
        command = f"\\builtin unset -v {name}; \\builtin declare -g{flag} {name}={quoted(value)}"
        if self.changed(shell, command) and not fixed and name not in GIVEN:
            shell.variables[name] = ({flag} - {""}, {b"0": kept})

    @rule(shell=shells, name=names, value=values)
    def assign(self, shell: Shell, name: str, value: bytes) -> None:
        flags, elements = shell.variables.get(name, (set(), {}))
        if "r" in flags:
            done = self.run(shell, f"y=lost; {name}=lost", ends=False)
            assert done.exit_code not in (0, None)
        elif not flags & {"l", "u", "A", "i"} and self.changed(shell, f"{name}={quoted(value)}"):
            shell.variables[name] = (flags, elements | {b"0": value})

    @rule(
        shell=shells,
        name=st.sampled_from(["x", "y", "list", "map"]),
        elements=st.dictionaries(
            st.one_of(st.integers(0, 300).map(lambda n: b"%d" % n), values.filter(bool)), values, max_size=4
        ),
        export=st.booleans(),
    )
    def set_array(self, shell: Shell, name: str, elements: Elements, export: bool) -> None:
        if name in shell.variables and "r" in shell.variables[name][0]:
            return
        kind = "a" if all(key.isdigit() for key in elements) else "A"
        items = " ".join(f"[{quoted(key)}]={quoted(value)}" for key, value in elements.items())
        flags = kind + ("x" if export else "")
        if self.changed(shell, f"\\builtin unset -v {name}; \\builtin declare -g{flags} {name}; {name}=({items})"):
            shell.variables[name] = (set(flags), elements)

    @rule(shell=shells, name=st.sampled_from(["n", "m"]), number=st.integers(-(2**63), 2**63 - 1))
    def set_number(self, shell: Shell, name: str, number: int) -> None:
        if self.changed(shell, f"\\builtin unset -v {name}; \\builtin declare -gi {name}={number}-0"):
            shell.variables[name] = ({"i"}, {b"0": b"%d" % number})

    @rule(
        shell=shells,
        name=st.sampled_from([*NAMES, "n", "list", *GIVEN]),
        how=st.sampled_from(["unset -v", "export", "export -n"]),
    )
    def treat(self, shell: Shell, name: str, how: str) -> None:
        flags, elements = shell.variables.get(name, (set(), {}))
        if "r" in flags or not self.changed(shell, f"\\builtin {how} {name}"):
            return
        if how == "unset -v":
            shell.variables.pop(name, None)
            assert shell.told and name not in shell.told.variables
        elif name in shell.variables:
            shell.variables[name] = (flags | {"x"} if how == "export" else flags - {"x"}, elements)

    @rule(shell=shells, target_name=st.sampled_from(["x", "list", "never"]), name=st.sampled_from(["ref", "other"]))
    def refer(self, shell: Shell, target_name: str, name: str) -> None:
        self.changed(shell, f"\\builtin unset -n {name}; \\builtin declare -gn {name}={target_name}")

    @rule(name=st.sampled_from(GIVEN), value=hostile.filter(lambda raw: b"__execd" not in raw))
    def give(self, name: str, value: bytes) -> None:
        """Set a variable for all commands. Sessions get it, too, unless they changed it."""
        self.sandbox.commands.set_env(name, value.decode())
        self.given[name] = value

    @rule(shell=shells, name=functions, body=st.sampled_from(sorted(BODIES)), value=values, export=st.booleans())
    def define(self, shell: Shell, name: str, body: str, value: bytes, export: bool) -> None:
        prints = value
        if body == "heredoc":
            value = value.decode("utf-8", "replace").encode()
            prints = value + b"\n"
        prints = {"case": b"A" if value == b"a" else value, "loop": value * 2, "string": value.rstrip(b"\n")}.get(
            body, prints
        )
        text = BODIES[body].format(word=quoted(value), text=value.decode("utf-8", "replace"))
        command = f"\\builtin unset -f {name}\nfunction {name} {{ {text}\n}}"
        if self.changed(shell, command + (f"\n\\builtin export -f {name}" if export else "")):
            shell.functions[name] = prints

    @rule(shell=shells, name=functions)
    def call(self, shell: Shell, name: str) -> None:
        if name in shell.functions and not shell.noisy() and not shell.fragile():
            done = self.run(shell, f"\\{name}")
            assert lines(shell.functions[name]) == printed(done)

    @rule(shell=shells, name=functions)
    def forget(self, shell: Shell, name: str) -> None:
        if self.changed(shell, f"\\builtin unset -f {name}"):
            shell.functions.pop(name, None)

    @rule(shell=shells, name=aliases, value=values)
    def alias(self, shell: Shell, name: str, value: bytes) -> None:
        if self.changed(shell, f"\\builtin alias {name}={quoted(value)}"):
            shell.aliases[name] = value

    @rule(shell=shells, name=st.sampled_from(SETS + SHOPTS), on=st.booleans())
    def option(self, shell: Shell, name: str, on: bool) -> None:
        command = f"set {'-' if on else '+'}o {name}" if name in SETS else f"shopt -{'s' if on else 'u'} {name}"
        if self.changed(shell, f"\\builtin {command}"):
            shell.options[name] = on

    @rule(shell=shells, mask=st.integers(0, 0o777))
    def mask(self, shell: Shell, mask: int) -> None:
        if self.changed(shell, f"\\builtin umask {mask:04o}"):
            shell.umask = mask

    @rule(shell=shells, name=st.sampled_from(DIRECTORIES), relative=st.booleans())
    def cd(self, shell: Shell, name: bytes, relative: bool) -> None:
        word = quoted(b"./" + name if relative else PLACE.encode() + b"/" + name)
        if self.changed(shell, f"\\builtin cd {PLACE}; \\builtin cd -- {word}"):
            physical = shell.options.get("physical") and name == b"link"
            assert shell.told
            assert PLACE.encode() + b"/" + (b"plain" if physical else name) == shell.told.directory

    @rule(shell=shells, name=st.sampled_from(["plain", "with space", "$(x)", "-n", "*", "link", "new\nline\n"]))
    def begin_in(self, shell: Shell, name: str) -> None:
        shell.directory = f"{PLACE}/{name}".encode()
        self.changed(shell, ":", working_directory=shell.directory.decode())

    @rule(shell=shells)
    def lose_directory(self, shell: Shell) -> None:
        """A run in a removed directory is an error. The session continues in another directory."""
        if not self.changed(
            shell,
            f"\\builtin cd {PLACE}/plain && command -p mkdir -p lost && \\builtin cd lost && command -p rmdir ../lost",
        ):
            return
        with pytest.raises(SandboxApiException) as refused:
            self.sandbox.commands.run_in_session(shell.session, ":")
        assert 400 == refused.value.status_code
        shell.directory = b"/usr"
        self.changed(shell, ":", working_directory="/usr")

    @rule(shell=shells, code=st.integers(1, 255))
    def fail(self, shell: Shell, code: int) -> None:
        done = self.run(shell, ":", ends=None if shell.fragile() else True, last=f"(\\builtin exit {code})")
        assert code == done.exit_code or shell.fragile()

    @rule(shell=shells, how=st.sampled_from(sorted(ENDINGS)))
    def end(self, shell: Shell, how: str) -> None:
        lost = "x=lost; \\builtin cd /; \\builtin umask 0; \\builtin alias lost=lost; lost() { :; }"
        done = self.run(shell, f"{lost}\n\\builtin unset -f exit set kill exec\n\\builtin unalias -a\n{how}", ends=None)
        assert shell.directory is not None
        assert ENDINGS[how] == done.exit_code or shell.fragile()

    @rule(shell=shells)
    def outlast(self, shell: Shell) -> None:
        done = self.run(
            shell, "x=lost; command -p sleep 60 & command -p sleep 60", ends=False, timeout=timedelta(milliseconds=600)
        )
        assert (-1, ["timeout after 600ms"]) == (done.exit_code, done.error and done.error.traceback)

    @rule(shell=shells, value=values)
    def say(self, shell: Shell, value: bytes) -> None:
        """Output arrives unchanged. Text that resembles an event or a marker has no effect."""
        if shell.noisy() or shell.fragile():
            return
        done = self.run(shell, f"\\builtin printf %s {quoted(value)}; \\builtin printf %s {quoted(value)} >&2")
        assert lines(value + value) == printed(done)

    @rule(shell=shells)
    def meddle(self, shell: Shell) -> None:
        """No open descriptor leads to the session's state."""
        self.changed(
            shell,
            "for fd in {3..251}; do { \\builtin printf 'x\\0y\\0end\\0' >&$fd; } 2>/dev/null; done; "
            "\\builtin exec 10>/dev/null 11>/dev/null 250>/dev/null 251>/dev/null",
        )


def lines(raw: bytes) -> list[str]:
    """Return the texts of an output's events: lines without their ends; an empty line is its end alone."""
    texts = [line or b"\n" for line in re.split(rb"\r\n|\n|\r", raw)]
    if not raw or raw[-1:] in (b"\n", b"\r"):
        texts.pop()
    return [re.sub("�+", "�", text.decode("utf-8", "replace")) for text in texts]


def printed(done: Execution) -> list[str]:
    return [re.sub("�+", "�", message.text) for message in done.logs.stdout]


def test_sessions_keep_what_their_shells_hold(sandbox: SandboxSync) -> None:
    Sessions.sandbox = sandbox
    explore(Sessions, 4, 12)
