"""One chaos run: a series of kills, each after the recovery from the one before, and then all of the facts."""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from demo.chaos import kills
from demo.chaos.facts import IDENT, Facts, Kill, read_far_end, read_log
from demo.chaos.kills import Part
from demo.chaos.lives import InterruptedLife, pools, whole_life
from demo.chaos.load import Load, loads
from demo.chaos.watch import Tail, WireWatch
from testbed import census
from testbed.internet import API, STATUS
from testbed.leaks import forms_of
from testbed.stack import Stack, StackError

PATIENCE = 30.0
"""Seconds after which a run no longer waits for a recovery; the judge then reports that it was late."""
_WARM_UP = 20.0
_STEADY = 1.0
_LIFE = 4.0
"""The maximum of seconds between the begin of a life and the kill that interrupts it."""
_POLL = 0.1
"""Seconds between two checks. The checks are cheap, because the measurement must not take processor time from the
recovery."""
_CREATED_AFTER = frozenset({Part.SERVE, Part.HOSTD, Part.DOCKERD, Part.CONTAINERD})


@dataclass(frozen=True, slots=True)
class Settings:
    """Duration, parts and seed of a run."""

    seconds: float
    parts: tuple[Part, ...]
    seed: int
    pairs: bool = True


class ChaosError(Exception):
    """The run could not be made, so there is no verdict."""


class Run:
    """Kills processes while the load continues."""

    def __init__(self, stack: Stack, load: Sequence[Load], settings: Settings, say: Callable[[str], None]) -> None:
        self._stack, self._load, self._settings, self._say = stack, load, settings, say
        self._chosen = random.Random(settings.seed)  # noqa: S311 - a seed that can be given again is what is wanted
        self._far = Tail(stack.internet.request_log)
        self._seen: dict[str, float] = {}
        self._runtimes = cycle(("runc", "runsc"))

    def _arrived(self) -> None:
        """Note the time at which the last request that can have a secret arrived from each client."""
        for line in self._far.lines():
            item = json.loads(line)
            if item["host"] == API and (match := IDENT.search(item.get("target", ""))) is not None:
                self._seen[match[0][1]] = float(item["at"])

    def _flowing(self) -> bool:
        self._arrived()
        now = time.time()
        return all(now - self._seen.get(load.tag, 0.0) < _STEADY for load in self._load)

    def warm_up(self) -> None:
        """Wait until all four loads are served.

        Raises:
            ChaosError: they are not.
        """
        deadline = time.monotonic() + _WARM_UP
        while not self._flowing():
            if time.monotonic() > deadline:
                raise ChaosError(f"not all loads are served at first: {sorted(self._seen)}")
            time.sleep(0.05)

    def kill_on(self) -> list[Kill]:
        """Kill parts for the configured time."""
        done: list[Kill] = []
        end = time.monotonic() + self._settings.seconds
        for number, parts in enumerate(kills.plan(self._settings.parts, self._chosen)):
            if time.monotonic() > end:
                break
            if len(parts) > 1 and not self._settings.pairs:
                continue
            time.sleep(self._chosen.uniform(0.0, 1.0))
            create = number % 3 == 0 or bool(_CREATED_AFTER & set(parts))
            kill = self._one(parts, create)
            done.append(kill)
            self._say(f"{' and '.join(parts)}: {_told(kill)}")
        return done

    def _one(self, parts: tuple[Part, ...], create: bool) -> Kill:
        if not create:
            return self._killed(parts)
        runtime = next(self._runtimes)
        life = InterruptedLife(self._stack, runtime)
        time.sleep(self._chosen.uniform(0.0, _LIFE))
        kill = self._killed(parts)
        try:
            life.remove()
            kill = replace(kill, created=whole_life(self._stack, runtime))
        except Exception as error:  # noqa: BLE001 - whatever the SDK raises is a finding
            kill = replace(kill, create_failed=f"{type(error).__name__}: {error}"[:200])
        return replace(kill, until=time.time())

    def _killed(self, parts: tuple[Part, ...]) -> Kill:
        at = time.time()
        victims = kills.kill(self._stack, parts, self._chosen)
        api = whole = None
        while time.time() - at < PATIENCE:
            if api is None and self._stack.healthy():
                api = time.time() - at
            if whole is None and self._whole(parts, victims):
                whole = time.time() - at
            if api is not None and whole is not None and time.time() - at > _STEADY and self._flowing():
                break
            time.sleep(_POLL)
        time.sleep(self._chosen.uniform(_STEADY, 2 * _STEADY))
        return Kill(tuple(parts), at, time.time(), len(victims), api, whole)

    def _whole(self, parts: Sequence[Part], victims: Sequence[kills.Process]) -> bool:
        dead = set(victims)
        if not all(set(kills.find(self._stack, part)) - dead for part in parts if part is not Part.WORKER):
            return False
        return len(set(kills.workers(self._stack).values()) - {pid for pid, _ in dead}) >= len(self._load)


def _told(kill: Kill) -> str:
    def seconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.2f} s"

    text = f"API back after {seconds(kill.api)}, processes {seconds(kill.whole)}"
    if kill.created is not None:
        text += f", a whole life of a sandbox in {kill.created:.2f} s"
    return text + (f", no whole life: {kill.create_failed}" if kill.create_failed else "")


def run(stack: Stack, token: str, settings: Settings, say: Callable[[str], None]) -> Facts:
    """Make a chaos run on a running server and return its facts. The vault has `token` as `api-token`.

    Raises:
        ChaosError: the load could not be started.
    """
    with pools(stack):
        for runtime in ("runsc", "runc"):
            whole_life(stack, runtime)  # what a runtime makes once and keeps is no residue
    before = _settled(stack)
    far = Tail(stack.internet.request_log)
    with WireWatch(stack.internet) as watch:
        with pools(stack), loads(stack, token) as made:
            say(f"four sandboxes: {', '.join(f'{load.tag} {load.runtime} {load.id}' for load in made)}")
            first = len(stack.audit_records())
            for load in made:
                load.begin()
            work = Run(stack, made, settings, say)
            work.warm_up()
            done = work.kill_on()
            time.sleep(_STEADY)
            asked = [item for load in made for item in load.finish()]
            sandboxes = {load.tag: load.id for load in made}
        wire = watch.found()
    after = _settled(stack, before)
    arrivals, strays = read_far_end(far.lines(), f"Bearer {token}")
    return Facts(
        asked=tuple(asked),
        arrivals=tuple(arrivals),
        records=tuple(read_log(stack.audit_records()[first:])),
        kills=tuple(done),
        wire=wire,
        sandboxes=sandboxes,
        spliced=frozenset(load.id for load in made if not load.operator),
        secret_forms=tuple(forms_of(token)),
        stray_names=tuple(strays),
        allowed_names=frozenset({API, STATUS}),
        verified=_verified(stack),
        census=after.beyond(before),
    )


def _settled(stack: Stack, wanted: census.Census | None = None) -> census.Census:
    """Return the census when it no longer changes, or equals `wanted`."""
    deadline = time.monotonic() + 15
    taken = census.take(stack)
    while time.monotonic() < deadline:
        time.sleep(0.5)
        former, taken = taken, census.take(stack)
        if taken == (former if wanted is None else wanted):
            break
    return taken


def _verified(stack: Stack) -> str:
    try:
        stack.sallyport("audit", "verify")
    except StackError as error:
        return str(error)[:500]
    return ""
