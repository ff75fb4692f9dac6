"""hostd's treatment of concurrent launches, up to the compiler. Every later step needs root."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import wire
from runtimes.operator import Operator
from runtimes.pausing import Pausing
from runtimes.process.cgroups import Cgroups, Hierarchies
from runtimes.process.freezer import Freezer
from runtimes.records import RecordStore
from runtimes.rings import Rings
from runtimes.sandboxes import Sandboxes
from runtimes.spec import HostConfig
from tests.runtimes.test_spec import host_config, launch_of
from wire.api.compiler import Compile, CompiledText


class Compiler:
    """A replacement for `runtimes.daemons.Daemons`: a compiler that refuses every policy once `released` is set.

    `full` is set when `bound` calls are present.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.released = asyncio.Event()
        self.full = asyncio.Event()
        self.present = self.most = 0

    async def reachable(self, name: str) -> None:
        assert "compiler" == name

    def client(self, name: str) -> "Compiler":
        assert "compiler" == name
        return self

    async def ask(self, request: Compile, timeout: float) -> CompiledText:
        assert timeout > 0
        self.present += 1
        self.most = max(self.most, self.present)
        if self.present >= self.bound:
            self.full.set()
        await self.released.wait()
        self.present -= 1
        raise wire.RemoteError("invalid", "refused")


class NoContainers:
    """A replacement for `runtimes.engine.docker.Docker`, on a host without containers."""

    async def ours(self, _sandbox: str) -> list[tuple[str, str]]:
        return []


@pytest.mark.parametrize("bound", [1, 3, 6])
async def test_as_many_launches_are_under_way_as_the_operator_allows(tmp_path: Path, bound: int) -> None:
    """A launch begins with its policy, so the launches that are at the compiler at once are in progress at once."""
    for name in ("plans", "netns", "records"):
        (tmp_path / name).mkdir()
    (tmp_path / "roots.pem").write_text("roots\n")
    maxima = host_config()["maxima"] | {"sandboxes": 6}
    places = {"run_dir": str(tmp_path), "state_dir": str(tmp_path), "upstream_roots": str(tmp_path / "roots.pem")}
    config = HostConfig.model_validate(host_config(launch_concurrency=bound, maxima=maxima, **places))
    compiler: Any = Compiler(bound)
    beyond: Any = NoContainers()
    groups = Cgroups(str(tmp_path), Hierarchies(2, (tmp_path / "groups",)))
    sandboxes = Sandboxes(
        config,
        Operator(config, compiler, "roots"),
        beyond,
        compiler,
        beyond,
        groups,
        Pausing(Freezer(""), beyond),
        RecordStore(tmp_path / "records"),
        Rings(tmp_path / "rings"),
    )
    specs = [launch_of(sandbox=f"sbx-{number}") for number in range(6)]
    launches = [asyncio.create_task(sandboxes.launch(spec)) for spec in specs]
    async with asyncio.timeout(10):
        await compiler.full.wait()
        for _ in range(100):  # Each of the others needs fewer turns to arrive.
            await asyncio.sleep(0)
        compiler.released.set()
        outcomes = await asyncio.gather(*launches, return_exceptions=True)
    assert ["invalid"] * 6 == [getattr(outcome, "code", outcome) for outcome in outcomes]
    assert bound == compiler.most
