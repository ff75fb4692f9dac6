"""The code-interpreter image with its official SDK: documented examples, state, results, errors, and faults.

One sandbox on each runtime, created with the default policy (deny-all): all of it works without a network.
"""

import ast
import asyncio
import contextlib
import gc
import http.client
import inspect
import json
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pytest
from code_interpreter import CodeInterpreter, CodeInterpreterSync
from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import Execution
from opensandbox.models.execd_sync import ExecutionHandlersSync
from opensandbox.sync.sandbox import SandboxSync

from bench import first_code
from bench.fixture import Fixture
from testbed.internet import Internet
from testbed.stack import CODE_ENTRYPOINT, Stack
from tests.conftest import ON_RUNC, RUNTIMES, representatives

pytestmark = [pytest.mark.system, pytest.mark.images]

README = str(metadata.metadata("opensandbox-code-interpreter").get_payload())
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MIB = 1024 * 1024
FLOOD_MIB = 512


@dataclass(frozen=True, slots=True)
class Box:
    """A sandbox of the image, and the SDK's objects for it."""

    stack: Stack
    sandbox: SandboxSync
    interpreter: CodeInterpreterSync
    made: list[str] = field(default_factory=list)

    def run(self, code: str, **options: Any) -> Execution:
        return self.interpreter.codes.run(code, **options)

    def context(self, language: str = "python") -> Any:
        context = self.interpreter.codes.create_context(language)
        self.made.append(str(context.id))
        return context

    def contexts(self, language: str) -> list[str]:
        return [str(item.id) for item in self.interpreter.codes.list_contexts(language)]


@pytest.fixture(scope="module", params=ON_RUNC, name="box")
def _box(request: pytest.FixtureRequest, stack: Stack, code_image: str) -> Iterator[Box]:
    sandbox = stack.create(request.param, image=code_image, policy=None, entrypoint=CODE_ENTRYPOINT)
    try:
        with CodeInterpreterSync.create(sandbox=sandbox) as interpreter:
            yield Box(stack, sandbox, interpreter)
    finally:
        sandbox.kill()
        sandbox.close()


@pytest.fixture(autouse=True, name="tidy")
def _tidy(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test's own contexts end with it, because each has a kernel, and a sandbox has two gigabytes."""
    yield
    if "box" in request.fixturenames:
        box: Box = request.getfixturevalue("box")
        for name in box.made:
            with contextlib.suppress(SandboxApiException):
                box.interpreter.codes.delete_context(name)
        box.made.clear()


def text(execution: Execution, stream: str = "stdout") -> str:
    return "".join(message.text for message in getattr(execution.logs, stream))


def until(said: str, happened: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


class Running:
    """A run in the background. `begun` is set when its code has printed something."""

    def __init__(self, box: Box, code: str, context: Any) -> None:
        self.begun = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        handlers = ExecutionHandlersSync(on_stdout=lambda _: self.begun.set())
        self._future = self._pool.submit(box.run, code, context=context, handlers=handlers)
        assert self.begun.wait(120)

    def result(self) -> Execution:
        try:
            return self._future.result(timeout=120)
        finally:
            self._pool.shutdown(wait=False)


@pytest.mark.usefixtures("code_image")
def test_the_documented_quick_starts_work_as_written(stack: Stack) -> None:
    """The two programs of the package's README. Only the address and the key are inserted.

    They are processes of their own, as of a user: the second closes no connection.
    """
    programs = [code for code in EXAMPLES if "api.opensandbox.io" in code]
    assert 2 == len(programs)
    for program in programs:
        ours = program.replace("api.opensandbox.io", f"127.0.0.1:{stack.port}").replace("your-api-key", stack.api_key)
        done = subprocess.run([sys.executable, "-c", ours], capture_output=True, text=True, check=False, timeout=300)
        assert (0, "4\n") == (done.returncode, done.stdout), done.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.extended
@pytest.mark.parametrize("box", ["runsc"], indirect=True)
def test_the_documented_usage_works_as_written(box: Box) -> None:
    """Each snippet of the README, in its order."""
    snippets = [code for code in EXAMPLES if "interpreter.codes" in code and "api.opensandbox.io" not in code]
    assert 6 == len(snippets)

    async def follow() -> dict[str, Any]:
        config = ConnectionConfig(domain=f"127.0.0.1:{box.stack.port}", api_key=box.stack.api_key)
        async with await Sandbox.connect(box.sandbox.id, connection_config=config) as sandbox:
            names: dict[str, Any] = {"interpreter": await CodeInterpreter.create(sandbox=sandbox)}
            for code in snippets:
                compiled = compile(code, "README", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                done = eval(compiled, names)  # noqa: S307 - as above
                if inspect.isawaitable(done):
                    await done
            await names["interpreter"].aclose()
            return names

    names = asyncio.run(follow())
    gc.collect()

    java = box.interpreter.codes.get_context(box.contexts("java")[0])
    assert ("Calculating sum...\nSum: 30\n", "30") == (text(names["execution"]), names["execution"].result[0].text)
    assert "60" == box.run("sum * 2", context=java).result[0].text
    failed = box.run('throw new IllegalStateException("wrong");', context=java).error
    assert failed is not None
    assert ("EvalException", "java.lang.IllegalStateException, wrong") == (failed.name, failed.value)
    box.interpreter.codes.delete_context(java.id)
    assert "['Alice', 'Bob', 'Charlie', 'Dave']" == names["result"].result[0].text


@pytest.mark.extended
def test_a_file_of_the_sdk_lies_where_code_looks_for_it(box: Box) -> None:
    """The example of the SDK's own documentation: a relative name is the same place for both."""
    box.sandbox.files.write_file("data.txt", "Hello")

    assert "Hello\n" == text(box.run("with open('data.txt') as f: print(f.read())"))


@pytest.mark.parametrize("box", ["runc"], indirect=True)
def test_another_version_is_said_to_be_missing_and_what_there_is_serves(box: Box) -> None:
    """Requested by the variables that the SDK documents."""
    command = f"PYTHON_VERSION=3.11 NODE_VERSION=20 JUPYTER_PORT=1 timeout 3 {CODE_ENTRYPOINT[0]} 2>&1"
    said = text(box.sandbox.commands.run(command))

    assert "NODE_VERSION asks for 20" in said
    assert "PYTHON_VERSION" not in said


@pytest.mark.parametrize("box", ["runc"], indirect=True)
def test_packages_install_as_documented(box: Box) -> None:
    """`pip install` without options. A running kernel can import the package."""
    made = (
        "import zipfile\n"
        "with zipfile.ZipFile('/tmp/answer-1-py3-none-any.whl', 'w') as wheel:\n"
        "    wheel.writestr('answer.py', 'ANSWER = 42')\n"
        "    info = 'answer-1.dist-info/'\n"
        "    wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: answer\\nVersion: 1\\n')\n"
        "    wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "    wheel.writestr(info + 'RECORD', '')\n"
    )
    assert box.run(made).error is None

    installed = box.sandbox.commands.run("pip install --no-index /tmp/answer-1-py3-none-any.whl")

    assert 0 == installed.exit_code, text(installed)
    assert "42" == box.run("import answer; answer.ANSWER").result[0].text


@pytest.mark.parametrize(
    ("language", "first", "second", "expected"),
    [
        ("python", "x = 20", "print(x + 1)", "21\n"),
        ("bash", "x=20; cd /opt", "echo $((x + 1)); pwd", "21\n/opt\n"),
        ("javascript", "const x = 20", "console.log(x + 1)", "21\n"),
        ("typescript", "const x: number = 20", "console.log(x + 1 as number)", "21\n"),
    ],
)
def test_a_context_keeps_its_state(box: Box, language: str, first: str, second: str, expected: str) -> None:
    """In each language of the image. The next context of the language does not see the state."""
    context = box.context(language)
    assert box.run(first, context=context).error is None

    done = box.run(second, context=context)

    assert (None, expected) == (done.error, text(done))
    box.interpreter.codes.delete_context(context.id)


@pytest.mark.extended
@pytest.mark.parametrize("box", ["runc"], indirect=True)
def test_java_keeps_its_state(box: Box) -> None:
    """Also on runc. Its documented example runs on runsc above."""
    context = box.context("java")
    assert box.run("int x = 20;", context=context).error is None
    assert "21" == box.run("x + 1", context=context).result[0].text


@pytest.mark.extended
@pytest.mark.parametrize("box", ["runc"], indirect=True)
@pytest.mark.parametrize(
    ("code", "name", "value"),
    [
        ('throw new IllegalStateException("wrong");', "EvalException", "java.lang.IllegalStateException, wrong"),
        ("undefined()", "CompilationException", "[snippet: [undefined()], status: REJECTED]"),
        (
            "int[] a = {}; a[0]",
            "EvalException",
            "java.lang.ArrayIndexOutOfBoundsException, Index 0 out of bounds for length 0",
        ),
        ('throw new RuntimeException("wrong");', "EvalException", "java.lang.RuntimeException, wrong"),
    ],
)
def test_errors_of_java_have_the_names_that_clients_expect(box: Box, code: str, name: str, value: str) -> None:
    """An exception of any class that the code did not catch, and code that does not compile."""
    failed = box.run(code, language="java")

    assert failed.error is not None and failed.complete is not None
    assert (name, value) == (failed.error.name, failed.error.value)


@pytest.mark.extended
def test_go_builds_and_runs_whole_programs(box: Box) -> None:
    """Each in the context's directory. The message of the compiler or the program is the error."""
    context = box.context("go")

    def program(body: str, *imports: str) -> str:
        return "package main\n" + "".join(f'import "{name}"\n' for name in imports) + f"func main() {{ {body} }}"

    done = box.run(
        program('d, _ := os.Getwd(); fmt.Println("über", d); println("aside")', "fmt", "os"), context=context
    )
    assert (None, "über /\n", "aside\n") == (done.error, text(done), text(done, "stderr"))
    wrong = box.run(program("undefined()"), context=context).error
    assert wrong is not None and ("CompileError", "main.go:2:15: undefined: undefined") == (wrong.name, wrong.value)
    failed = box.run(program("os.Exit(3)", "os"), context=context).error
    assert failed is not None and ("ExitError", "exit status 3") == (failed.name, failed.value)
    running = Running(box, program('fmt.Println("begun"); time.Sleep(time.Hour)', "fmt", "time"), context)
    box.interpreter.codes.interrupt(context.id)
    stopped = running.result().error
    assert stopped is not None and "KeyboardInterrupt" == stopped.name
    assert None is box.run(program(""), context=context).error


def test_contexts_run_beside_each_other_and_share_nothing(box: Box) -> None:
    """Each waits for the other's file, so neither could end if they ran one after the other."""
    code = (
        "import os, pathlib, time\n"
        "pathlib.Path('/tmp/{own}').touch()\n"
        "while not os.path.exists('/tmp/{other}'): time.sleep(0.01)\n"
        "name = '{own}'\nprint(name)"
    )
    contexts = [box.context(), box.context()]
    runs = [("one", "two", contexts[0]), ("two", "one", contexts[1])]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda run: box.run(code.format(own=run[0], other=run[1]), context=run[2]), runs))

    assert ["one\n", "two\n"] == [text(execution) for execution in done]
    assert ["one\n", "two\n"] == [text(box.run("print(name)", context=context)) for context in contexts]
    assert box.run("first_only", context=contexts[1]).error is not None


def test_a_context_is_busy_while_its_code_runs(box: Box) -> None:
    """With the words that clients wait for. The present run is not disturbed."""
    context = box.context()
    wait = "while not os.path.exists('/tmp/go'): time.sleep(0.05)"
    code = f"import os, time\nprint('begun', flush=True)\n{wait}\nprint('done')"
    running = Running(box, code, context)

    with pytest.raises(SandboxApiException, match="session is busy"):
        box.run("1", context=context)
    box.sandbox.files.write_file("/tmp/go", "")
    assert "begun\ndone\n" == text(running.result())


def test_results_and_display_data_arrive(box: Box) -> None:
    """The value of the last expression and everything that was displayed before it (the SDK keeps only their text)."""
    shown = "from IPython.display import display, HTML\ndisplay(HTML('<b>bold</b>'))\n"
    done = box.run(f"{shown}import sys\nprint('e', end='', file=sys.stderr)\n[1]")

    assert ["<IPython.core.display.HTML object>", "[1]"] == [result.text for result in done.result]
    assert "e" == text(done, "stderr")
    assert done.complete is not None
    script = box.run("[1, 'a']", language="javascript")
    assert '[ 1, "a" ]' == script.result[0].text


@pytest.mark.parametrize(
    ("language", "code", "name", "value"),
    [
        ("python", "def f(): return 1 / 0\nf()", "ZeroDivisionError", "division by zero"),
        ("python", "def (", "SyntaxError", "invalid syntax"),
        ("javascript", "throw new TypeError('wrong')", "TypeError", "wrong"),
        ("bash", "(exit 7)", "", "7"),
    ],
)
def test_an_error_has_name_value_and_traceback(box: Box, language: str, code: str, name: str, value: str) -> None:
    """The context still works."""
    failed = box.run(code, language=language)

    assert failed.error is not None
    assert (name, value) == (failed.error.name, failed.error.value.split(" (")[0].split(", ")[-1])
    if name == "ZeroDivisionError":
        assert any("in f" in line or "f()" in line for line in failed.error.traceback)
    assert failed.complete is not None
    assert box.run("1", language="python").error is None


def test_an_endless_loop_is_interrupted(box: Box) -> None:
    """The run ends with the kernel's own error. Variables stay."""
    context = box.context()
    running = Running(box, "kept = 7\nprint('begun', flush=True)\nwhile True: pass", context)

    box.interpreter.codes.interrupt(context.id)

    error = running.result().error
    assert error is not None and "KeyboardInterrupt" == error.name
    assert "7\n" == text(box.run("print(kept)", context=context))


@dataclass(frozen=True, slots=True)
class Kind:
    """Code in a language: an endless loop, a sum, a variable set and read. And the name of an interrupt's error."""

    endless: str
    sum: str
    set: str
    read: str
    interrupted: str


def _program(body: str) -> str:
    return f'package main\nimport "fmt"\nfunc main() {{ fmt.Print(); {body} }}'


KINDS = {
    "python": Kind("while True: pass", "print(1 + 1)", "x = 41", "print(x + 1)", "KeyboardInterrupt"),
    "bash": Kind("while true; do sleep 0.1; done", "echo $((1 + 1))", "x=41", "echo $((x + 1))", "Aborted"),
    "javascript": Kind("while (true) {}", "console.log(1 + 1)", "let x = 41", "console.log(x + 1)", "Error"),
    "typescript": Kind("while (true) {}", "console.log(1 + 1)", "let x: number = 41", "console.log(x + 1)", "Error"),
    "java": Kind(
        "while (true) Thread.sleep(50);",
        "System.out.println(1 + 1);",
        "int x = 41;",
        "System.out.println(x + 1);",
        "EvaluationInterruptedException",
    ),
    "go": Kind(
        _program("for {}"), _program("fmt.Println(2)"), _program(""), _program("fmt.Println(42)"), "KeyboardInterrupt"
    ),
}
FRESH = {"java": 1}  # Each of its kernels takes two seconds to start.
ROUNDS = 4


def interrupted_at_init(box: Box, code: str, context: Any) -> Execution:
    """Run code, and interrupt it as soon as its first event is there."""
    handlers = ExecutionHandlersSync(on_init=lambda _: box.interpreter.codes.interrupt(context.id))
    return box.run(code, context=context, handlers=handlers)


@pytest.mark.parametrize("language", representatives(KINDS, "python"))
def test_a_run_interrupted_at_its_init_keeps_its_context(box: Box, language: str) -> None:
    """While the kernel starts, and at each moment of its first steps in a run. Variables stay."""
    kind = KINDS[language]
    for _ in range(FRESH.get(language, ROUNDS)):
        context = box.context(language)
        stopped = interrupted_at_init(box, kind.endless, context)
        assert stopped.error is not None and stopped.complete is not None
        assert stopped.error.name in {"KeyboardInterrupt", kind.interrupted}, stopped.error
        done = box.run(kind.sum, context=context)
        assert (None, "2\n") == (done.error, text(done))
        box.interpreter.codes.delete_context(context.id)
    context = box.context(language)
    assert box.run(kind.set, context=context).error is None
    for _ in range(ROUNDS):
        stopped = interrupted_at_init(box, kind.endless, context)
        assert stopped.error is not None and kind.interrupted == stopped.error.name
        done = box.run(kind.read, context=context)
        assert (None, "42\n") == (done.error, text(done))


@pytest.mark.extended
@pytest.mark.parametrize("box", ["runc"], indirect=True)
def test_an_interrupt_of_a_context_in_which_nothing_runs_changes_nothing(box: Box) -> None:
    """Also while its kernel starts."""
    for language, kind in KINDS.items():
        context = box.context(language)
        box.interpreter.codes.interrupt(context.id)
        done = box.run(kind.sum, context=context)
        assert (None, "2\n") == (done.error, text(done))
        box.interpreter.codes.delete_context(context.id)


@pytest.mark.parametrize("box", ["runc"], indirect=True)
def test_a_kernel_deaf_to_interrupts_is_ended(box: Box) -> None:
    """Code that ignores interrupts, and Deno in an await: after the grace period the context is removed."""
    runs = [
        # The first use of setTimeout loads it, and an interrupt prevents that. So the use comes before the sign to
        # interrupt.
        ("javascript", "const end = new Promise(done => setTimeout(done, 1e6)); console.log('begun'); await end"),
        ("python", "import signal\nsignal.signal(2, signal.SIG_IGN)\nprint('begun', flush=True)\nwhile True: pass"),
    ]
    contexts = [box.context(language) for language, _ in runs]
    running = [Running(box, code, context) for (_, code), context in zip(runs, contexts, strict=True)]
    for context in contexts:
        box.interpreter.codes.interrupt(context.id)

    for (language, _), context, run in zip(runs, contexts, running, strict=True):
        error = run.result().error
        assert error is not None and "kernel" in error.value
        assert context.id not in box.contexts(language)


def test_contexts_are_listed_found_and_deleted(box: Box) -> None:
    """By language and by id. An unknown one is a 404."""
    codes = box.interpreter.codes
    codes.delete_contexts("bash")
    made = [str(box.context("bash").id) for _ in range(2)]
    assert sorted(made) == sorted(box.contexts("bash"))
    assert "bash" == codes.get_context(made[0]).language

    codes.delete_context(made[0])

    assert [made[1]] == box.contexts("bash")
    with pytest.raises(SandboxApiException) as gone:
        codes.get_context(made[0])
    assert 404 == gone.value.status_code
    codes.delete_contexts("bash")
    assert [] == box.contexts("bash")


def test_deleting_a_context_ends_what_runs_in_it(box: Box) -> None:
    """With an error, without a long wait."""
    context = box.context()
    running = Running(box, "print('begun', flush=True)\nwhile True: pass", context)

    box.interpreter.codes.delete_context(context.id)

    assert running.result().error is not None


@pytest.mark.extended
@pytest.mark.parametrize("box", ["runsc"], indirect=True)
def test_a_flood_arrives_whole_where_it_is_read(box: Box) -> None:
    """Ten megabytes in lines. A single message that is too large for a client is left out, with a notice."""
    context = box.context()
    line = "x" * 999
    received = 0

    def count(message: Any) -> None:
        nonlocal received
        received += len(message.text)

    flood = f"for _ in range(10_000): print('{line}')"
    done = box.run(flood, context=context, handlers=ExecutionHandlersSync(on_stdout=count))
    assert (None, 10_000 * 1000) == (done.error, received)
    done = box.run(f"print('x' * {40 * MIB})", context=context)

    assert "dropped" in text(done, "stderr")
    assert "" == text(done).strip()  # The end of its line can be a separate message.
    assert "1" == box.run("1", context=context).result[0].text


@pytest.mark.extended
@pytest.mark.parametrize("box", ["runc"], indirect=True)
def test_a_reader_that_stops_costs_bounded_memory(box: Box) -> None:
    """Output without a reader is dropped, while the sandbox answers. Then the run ends."""
    context = box.context()
    code = (
        "import os, sys\n"
        "def resident():\n"
        "    return int(open(f'/proc/{os.getppid()}/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "before = most = resident()\n"
        f"for _ in range({FLOOD_MIB}):\n"
        "    print('x' * 2**20); sys.stdout.flush()\n"
        "    most = max(most, resident())\n"
        "open('/tmp/flooded', 'w').write(str(most - before))"
    )
    endpoint = box.sandbox.get_endpoint(44772)
    host, _, path = endpoint.endpoint.partition("/")
    body = json.dumps({"code": code, "context": {"id": context.id, "language": "python"}})
    with contextlib.closing(http.client.HTTPConnection(host, timeout=120)) as connection:
        connection.request("POST", f"/{path}/code", body, {"Content-Type": "application/json", **endpoint.headers})
        answer = connection.getresponse()
        assert 200 == answer.status
        until("the kernel is not held up", lambda: "" != text(box.sandbox.commands.run("cat /tmp/flooded 2>/dev/null")))
        rest = answer.read()

    grown = int(text(box.sandbox.commands.run("cat /tmp/flooded")))
    print(grown / MIB)
    assert 0 < grown < FLOOD_MIB * MIB / 2
    assert b"dropped" in rest[-4096:] or b"dropped" in rest
    assert b"execution_complete" in rest[-200:]


HOLD = """
import glob, os, signal
def found(part):
    for name in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if part in open(name).read(): yield int(name.split("/")[2])
        except OSError: pass
server, before = next(found("code-interpreter/server" + ".py")), set(found("deno\\0" + "jupyter"))
print("watching", flush=True)
while not set(found("deno\\0" + "jupyter")) - before: pass
os.kill(server, signal.SIGSTOP)
"""
GO_ON = "kill -CONT $(grep -ls '[c]ode-interpreter/server.py' /proc/[0-9]*/cmdline | cut -d/ -f3)"
KERNELS = "grep -lsa 'deno.[j]upyter' /proc/[0-9]*/cmdline | wc -l"


@pytest.mark.parametrize("box", ["runc"], indirect=True)
@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("code/context", {"language": "javascript"}),
        ("code", {"code": "1", "context": {"language": "javascript"}}),
    ],
)
def test_a_client_that_leaves_during_a_creation_leaves_no_kernel(box: Box, path: str, request_: dict[str, Any]) -> None:
    """A context of its own or a default one. The server is stopped as soon as the kernel has a process."""
    endpoint = box.sandbox.get_endpoint(44772)
    host, _, prefix = endpoint.endpoint.partition("/")
    headers = {"Content-Type": "application/json", **endpoint.headers}

    def clean() -> bool:
        return [] == box.contexts("javascript") and "0" == text(box.sandbox.commands.run(KERNELS)).strip()

    def forget() -> None:
        for context in box.contexts("javascript"):
            box.interpreter.codes.delete_context(context)
        until("no kernel is left", clean)

    def left_in_between() -> bool:
        forget()
        watching = threading.Event()
        handlers = ExecutionHandlersSync(on_stdout=lambda _: watching.set())
        with (
            ThreadPoolExecutor(1) as pool,
            contextlib.closing(http.client.HTTPConnection(host, timeout=120)) as connection,
        ):
            stopped = pool.submit(box.sandbox.commands.run, f"python3 -c '{HOLD}'", handlers=handlers)
            assert watching.wait(60)
            connection.request("POST", f"/{prefix}/{path}", json.dumps(request_), headers)
            assert 0 == stopped.result(60).exit_code
            answered = bool(select.select([connection.sock], [], [], 1)[0])
        assert 0 == box.sandbox.commands.run(GO_ON).exit_code
        return not answered

    assert any(left_in_between() for _ in range(20)), "it was always faster"
    until("no kernel is left", clean)
    assert "2" == box.run("1 + 1", language="javascript").result[0].text


def test_a_killed_kernel_is_an_error_and_its_context_is_gone(box: Box) -> None:
    """During a run, and while it is idle. The old name never gets a new kernel."""
    during, idle = box.context(), box.context()
    pid = text(box.run("import os; kept = 1; print(os.getpid())", context=idle)).strip()
    failed = box.run("import os; os.kill(os.getpid(), 9)", context=during)
    assert failed.error is not None and "kernel" in failed.error.value
    box.sandbox.commands.run(f"kill -9 {pid}")

    failed = box.run("print(kept)", context=idle)

    assert failed.error is not None and "kernel" in failed.error.value
    assert {during.id, idle.id}.isdisjoint(box.contexts("python"))


def test_a_hostile_kernel_harms_its_own_run_only(box: Box) -> None:
    """Malformed messages, foreign parents, raw frames and a false death, all sent by the code itself."""
    context, other = box.context(), box.context()
    code = (
        "k = get_ipython().kernel\nparent = k.get_parent()\n"
        "def say(kind, content, parent=parent): k.session.send(k.iopub_socket, kind, content, parent=parent)\n"
        "say('execute_result', {'data': 'x', 'execution_count': []})\nsay('stream', {'name': 7, 'text': {}})\n"
        "say('error', {'ename': [], 'traceback': 'no list'})\nsay('status', {'execution_state': 7})\n"
        "say('stream', {'name': 'stdout', 'text': 'foreign'}, {'header': {'msg_id': 'another'}})\n"
        "k.iopub_socket.send_multipart([b'raw', b'<IDS|MSG>', b'signed by nobody'])\nprint('honest')"
    )
    done = box.run(code, context=context)
    assert (None, "honest\n") == (done.error, text(done))

    done = box.run("say('status', {'execution_state': 'dead'}); import time; time.sleep(30)", context=context)

    assert done.error is not None
    assert "2" == box.run("1 + 1", context=other).result[0].text


def test_a_killed_jupyter_server_comes_back(box: Box) -> None:
    """The run ends with an error, its kernels end too, and the same sandbox gets new contexts."""
    context = box.context()
    script = box.context("javascript")
    server = text(box.run("import os; print(os.getppid())", context=context)).strip()
    pid = text(box.run("console.log(Deno.pid)", context=script)).strip()
    running = Running(box, "print('begun', flush=True)\nwhile True: pass", context)

    box.sandbox.commands.run(f"kill -9 {server}")

    assert running.result().error is not None
    with contextlib.suppress(SandboxApiException):
        assert box.run("1", context=script).error is not None
    assert "2" == box.run("1 + 1", context=box.context()).result[0].text
    until("no kernel is left over", lambda: "0" == text(box.sandbox.commands.run(f"ls -d /proc/{pid} | wc -l")).strip())
    assert "Running" == box.sandbox.get_info().status.state


def test_the_server_listens_inside_only(box: Box) -> None:
    """On loopback. The sandbox's own address does not answer, so the token gives no access to others."""
    probe = "bash -c 'exec 3<>/dev/tcp/{}/44771' 2>/dev/null && echo open || echo closed"
    answers = [text(box.sandbox.commands.run(probe.format(host))).strip() for host in ("127.0.0.1", "192.0.2.2")]

    assert ["open", "closed"] == answers


@pytest.mark.extended
def test_the_benchmark_of_first_code_gives_whole_figures(stack: Stack, internet: Internet) -> None:
    """On both runtimes. The times have only a high limit."""
    figures = {figure.name: figure.values for figure in first_code.measure(Fixture(internet, stack, ""), 1)}

    wanted = ("ready", "first print(1)", "a later print(1)")
    assert {f"code {runtime}: {what}" for runtime in RUNTIMES for what in wanted} == set(figures)
    assert all(0 < value < 60_000 for values in figures.values() for value in values)
