"""The commands of `./run`, after the bootstrap has found or made their Python environment."""

import os
import sys
from collections.abc import Callable

from frontdoor import command
from frontdoor.places import Places, enter

Command = Callable[[Places, list[str]], int]


def main(arguments: list[str]) -> int:
    """Run a command, or become the program that it names; return the exit status."""
    name, *rest = arguments or ["help"]
    if name == "sallyport":  # it needs nothing else
        command.become(enter(os.environ), rest)
    run = COMMANDS.get(name)
    if run is None:
        known = name in ("help", "-h", "--help")
        print(usage(), end="", file=sys.stdout if known else sys.stderr)
        return 0 if known else 2
    from frontdoor.steps import Failure, say

    try:
        return run(enter(os.environ), rest)
    except Failure as failure:
        say(str(failure))
        return failure.status
    except KeyboardInterrupt:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 128 + signal.SIGINT


def usage() -> str:
    """Return what `./run help` prints."""
    with open(os.path.join(os.path.dirname(__file__), "usage.txt")) as file:
        return file.read()


def _program(module: str) -> Command:
    """Return a command that sets up everything and becomes a Python program of the checkout."""

    def run(places: Places, arguments: list[str]) -> int:
        from frontdoor import builds, lock, steps

        builds.set_up(places)
        lock.only_one(places)
        steps.become(places.python, "-m", module, *arguments)

    return run


def _bench(places: Places, arguments: list[str]) -> int:
    from frontdoor import builds, lock, steps

    builds.code_image(places, builds.set_up(places))
    builds.for_bench(places)
    lock.only_one(places)
    steps.become(places.python, "-m", "bench.main", *arguments)


def _test(places: Places, arguments: list[str]) -> int:
    from frontdoor import builds, lanes, lock, steps

    if arguments[:1] == ["--fast"]:
        steps.become(sys.executable, "-m", "pytest", "-q", *lanes.fast_options(slow=False), *arguments[1:])
    built = builds.set_up(places)
    lock.only_one(places)
    return lanes.run(places, built, arguments)


def _mutation(places: Places, arguments: list[str]) -> int:
    import tempfile

    from frontdoor import steps

    steps.become(sys.executable, "-m", "tests.mutation_score", "--workdir", tempfile.mkdtemp(), *arguments)


def _images(places: Places, arguments: list[str]) -> int:
    from frontdoor import builds, steps

    built = builds.set_up(places)
    builds.code_image(places, built)
    command.write_built(places, built)
    steps.say(f"sallyport/code-interpreter: {built.code_image}")
    return 0


def _serve(places: Places, arguments: list[str]) -> int:
    from frontdoor import builds, lock

    command.write_built(places, builds.set_up(places))
    lock.only_one(places)
    command.become(places, ["serve", *arguments])


def _doctor(places: Places, arguments: list[str]) -> int:
    from frontdoor import builds

    command.write_built(places, builds.set_up(places))
    command.become(places, ["doctor", *arguments])


def _clean(places: Places, arguments: list[str]) -> int:
    from frontdoor import clean

    clean.run(places)
    return 0


COMMANDS: dict[str, Command] = {
    "demo": _program("demo.main"),
    "soak": _program("demo.soak"),
    "chaos": _program("demo.chaos"),
    "test": _test,
    "mutation": _mutation,
    "bench": _bench,
    "serve": _serve,
    "images": _images,
    "doctor": _doctor,
    "clean": _clean,
}
