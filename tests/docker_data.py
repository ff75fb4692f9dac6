"""Docker's data that already has the images of a server's settings.

To import the base image takes three seconds of processor time, which is almost half of the start of a new server. So a
session imports it once, and each new server gets a copy of the data. It finds the images there, as after a restart.
"""

import asyncio
import shutil
import subprocess
import tempfile
import tomllib
from functools import cache
from pathlib import Path

from runtimes.engine.docker import Docker
from runtimes.engine.dockerd import Dockerd
from runtimes.spec import DockerdConfig

_SMALL_BYTES = 16 << 20  # an import of less costs less than a copy

type _Image = tuple[str, str]


def provide(data: Path, settings: str, below: str) -> None:
    """Write Docker's data with the images of `settings` (TOML) to `data`, which must not exist, in a file system.

    A server with small images only gets nothing, and imports them itself.

    Args:
        below: a directory of the same file system, for the data that are copied.
    """
    images = tuple((image["name"], image["tar"]) for image in tomllib.loads(settings)["sallyport"]["images"])
    if sum(Path(tar).stat().st_size for _, tar in images) > _SMALL_BYTES:
        data.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", f"{_imported(images, below).name}/data", data], check=True)


@cache  # the directory is removed with the process
def _imported(images: tuple[_Image, ...], below: str) -> "tempfile.TemporaryDirectory[str]":
    place = tempfile.TemporaryDirectory(prefix="sallyport-docker-", dir=below)
    asyncio.run(_import(Path(place.name), images))
    return place


async def _import(place: Path, images: tuple[_Image, ...]) -> None:
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
        docker = Docker(str(place / "docker.sock"))
        for name, tar in images:
            await docker.import_image(name, Path(tar), {})
        docker.close()
    finally:
        await dockerd.stop()
