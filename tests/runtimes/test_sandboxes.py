"""hostd's treatment of concurrent launches, up to the compiler. Every later step needs root."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import wire
from runtimes.engine.docker import DockerError, UnknownImage
from runtimes.operator import Operator
from runtimes.pausing import Pausing
from runtimes.process.cgroups import Cgroups, Hierarchies
from runtimes.process.freezer import Freezer
from runtimes.records import RecordStore
from runtimes.rings import Rings
from runtimes.sandbox import HostSandbox
from runtimes.sandboxes import Sandboxes
from runtimes.spec import HostConfig
from runtimes.volumes import make_volumes
from tests.runtimes.test_spec import host_config, launch_of
from wire.api.compiler import Compile, CompiledText
from wire.api.hostd import Runtime


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


def _sandboxes(place: Path, bound: int, daemons: Any, docker: Any) -> Sandboxes:
    """Return hostd's sandboxes below `place`, which has room for six, `bound` at once."""
    for name in ("plans", "netns", "records"):
        (place / name).mkdir()
    (place / "roots.pem").write_text("roots\n")
    maxima = host_config()["maxima"] | {"sandboxes": 6}
    places = {"run_dir": str(place), "state_dir": str(place), "upstream_roots": str(place / "roots.pem")}
    config = HostConfig.model_validate(host_config(launch_concurrency=bound, maxima=maxima, **places))
    groups = Cgroups(str(place), Hierarchies(2, (place / "groups",)))
    operator, records, rings = (
        Operator(config, daemons, "roots"),
        RecordStore(place / "records"),
        Rings(place / "rings"),
    )
    pausing, volumes = Pausing(Freezer(""), docker), make_volumes(config)
    return Sandboxes(config, operator, docker, docker, daemons, docker, groups, pausing, records, rings, volumes)


@pytest.mark.parametrize("bound", [1, 3, 6])
async def test_as_many_launches_are_under_way_as_the_operator_allows(tmp_path: Path, bound: int) -> None:
    """A launch begins with its policy, so the launches that are at the compiler at once are in progress at once."""
    compiler = Compiler(bound)
    sandboxes = _sandboxes(tmp_path, bound, compiler, NoContainers())
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


class BusyDocker:
    """A replacement for `runtimes.engine.docker.Docker`, which fails so many times for each sandbox.

    The first call waits for a second one at the same time.
    """

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.asked: dict[str, int] = {}
        self.present = self.most = 0
        self._second = asyncio.Event()

    async def ours(self, sandbox: str) -> list[tuple[str, str]]:
        self.present += 1
        self.most = max(self.most, self.present)
        if self.present == 2:
            self._second.set()
        await self._second.wait()
        await asyncio.sleep(0.02)  # A third one has time to come.
        self.present -= 1
        self.asked[sandbox] = self.asked.get(sandbox, 0) + 1
        if self.asked[sandbox] <= self.failures:
            raise DockerError("too late")
        return []


@pytest.mark.parametrize(("failures", "left"), [(0, 0), (2, 0), (9, 6)])
async def test_a_host_that_stops_removes_a_few_sandboxes_at_once_and_tries_again(
    tmp_path: Path, failures: int, left: int
) -> None:
    docker = BusyDocker(failures)
    sandboxes = _sandboxes(tmp_path, 2, Compiler(1), docker)
    names = [f"sbx-{number}" for number in range(6)]
    sandboxes._known.update({name: HostSandbox(name, 1, "runc") for name in names})
    async with asyncio.timeout(60):
        residue = await sandboxes.remove_all()
    assert 2 == docker.most
    assert left == len(residue) == len(sandboxes.names())


class Listed(NoContainers):
    """A replacement for `runtimes.images.store.ImageStore`, with one image."""

    async def id_of(self, name: str) -> str:
        if name != "team/tool:1":
            raise UnknownImage("no such image")
        return "sha256:new"


async def test_a_sandbox_of_an_image_that_left_the_list_is_not_claimable(tmp_path: Path) -> None:
    """Neither is a restored one, nor one whose image is not known. A refused claim leaves nothing."""
    sandboxes = _sandboxes(tmp_path, 1, Compiler(1), Listed())
    images: dict[str, tuple[str, ...] | None] = {
        "sbx-1": ("team/tool:1", "sha256:new"),
        "sbx-2": ("team/tool:1", "sha256:old"),
        "sbx-3": ("team/gone:1", "sha256:new"),
        "sbx-4": (),
        "sbx-5": None,
    }
    sandboxes._known.update(
        {name: HostSandbox(name, 1, Runtime.RUNC, images=of_image) for name, of_image in images.items()}
    )
    assert ("sbx-1",) == await sandboxes.claimable([*images, "sbx-unknown"])
    for name in list(images)[1:]:
        with pytest.raises(wire.RequestError) as refused:
            await sandboxes.claim(name, "{}", {"TOKEN": "value"})
        assert wire.Code.UNKNOWN_IMAGE == refused.value.code
        assert {} == sandboxes._known[name].given
