"""Docker's data that already has the images of a server.

To import the base image takes three seconds of processor time, which is almost half of the start of a new server. So a
session imports it once, and each new server gets a copy of the data. It finds the images there, as after a restart.
"""

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path

from runtimes.engine.docker import Docker
from runtimes.engine.dockerd import Dockerd
from runtimes.spec import DockerdConfig

_SMALL_BYTES = 16 << 20  # an import of less costs less than a copy


def provide(data: Path, images: Mapping[str, str], below: str) -> None:
    """Write Docker's data with `images` (archives by name) to `data`, which must not exist.

    For small images it writes nothing: the server imports them itself.

    Args:
        below: a directory of the same file system, for the data that are copied.
    """
    if sum(Path(tar).stat().st_size for tar in images.values()) > _SMALL_BYTES:
        data.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", f"{_imported(tuple(images.items()), below).name}/data", data], check=True)


@cache  # the directory is removed with the process
def _imported(images: tuple[tuple[str, str], ...], below: str) -> "tempfile.TemporaryDirectory[str]":
    place = tempfile.TemporaryDirectory(prefix="sallyport-docker-", dir=below)
    asyncio.run(_import(Path(place.name), images))
    return place


async def _import(place: Path, images: tuple[tuple[str, str], ...]) -> None:
    config = DockerdConfig(
        binary=shutil.which("dockerd") or "/usr/sbin/dockerd",
        data_root=str(place / "data"),
        exec_root=str(place / "exec"),
        pidfile=str(place / "docker.pid"),
        log=str(place / "docker.log"),
    )
    (place / "daemon.json").write_text("{}")
    dockerd = Dockerd(config, str(place / "docker.sock"), place / "daemon.json")
    try:
        await dockerd.start()
        with closing(Docker(str(place / "docker.sock"))) as docker:
            for name, tar in images:
                await docker.import_image(name, Path(tar), {})
    finally:
        await dockerd.stop()
