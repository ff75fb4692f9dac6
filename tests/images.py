"""A server that may fetch from the registry of the test internet."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.internet import REGISTRY
from testbed.registry import Registry
from testbed.stack import StackError
from tests.image_files import ImageFile
from tests.stacks import Second, beside

SECRET = "registry-login"
PASSWORD = "registry-canary-6fd2c0b7"
PORT = 444
"""Of the registry of an attacker, on the same host."""


class Fetching(Second):
    """A server with the empty image, which may fetch `team/*` of the registry and all of the attacker's."""

    skopeo = ""
    largest = "1Gi"
    disk = "64Mi"

    @property
    def settings(self) -> str:
        skopeo = f'skopeo = "{self.skopeo}"\n' if self.skopeo else ""
        registry = (
            f'[sallyport.registry]\nallowed = ["{REGISTRY}/team/*", "{REGISTRY}:{PORT}/evil/*"]\n'
            f'secrets = {{"{REGISTRY}" = "{SECRET}"}}\n{skopeo}\n'
        )
        return (
            super()
            .settings.replace("[sallyport.docker]", registry + "[sallyport.docker]")
            .replace("default_disk =", f'max_image = "{self.largest}"\ndefault_disk =')
        )


@dataclass
class Place:
    """A server, its registry, and a directory for files."""

    stack: Fetching
    registry: Registry
    directory: Path

    def image(self, *arguments: str) -> str:
        """Run `sallyport image`; return its output."""
        return self.stack.sallyport("image", *arguments)

    def refused(self, *arguments: str) -> str:
        """Run `sallyport image`, which must fail; return its message."""
        try:
            said = self.image(*arguments)
        except StackError as error:
            return str(error)
        raise AssertionError(f"image {arguments} was not refused: {said}")

    def listed(self) -> dict[str, dict[str, Any]]:
        """Return the list by name."""
        return {one["name"]: one for one in json.loads(self.image("list", "--json"))}

    def write(self, name: str, content: bytes) -> str:
        """Write a file; return its path."""
        path = self.directory / name
        path.write_bytes(content)
        return str(path)

    def leftovers(self) -> list[str]:
        """Return what an addition of an image has left on the host."""
        work = str(self.stack.state / "hostd" / "image-work")
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if work in line]
        backing = Path("/sys/block").glob("loop*/loop/backing_file")
        loops = [text for path in backing if work in (text := _text(path))]
        files = [str(path) for path in Path(work).iterdir()]
        return [*mounts, *loops, *files, *self.processes()]

    def processes(self) -> list[str]:
        """Return the processes of the user that fetches and unpacks images for this server."""
        root = str(self.stack.run / "image-jail")
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            if root in (text := _text(path).replace("\0", " ")):
                found.append(text[:100])
        return found

    def docker_images(self) -> set[str]:
        """Return the ids of all images that Docker has."""
        return set(self.stack.docker("images", "-aq", "--no-trunc").stdout.split())


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def small() -> ImageFile:
    """Return an image with a shell."""
    return ImageFile([Path(os.environ["SALLYPORT_SMALL_IMAGE"]).read_bytes()])


@contextmanager
def fetching(name: str, directory: Path, kind: type[Fetching] = Fetching) -> Iterator[Place]:
    """Run a server and a registry."""
    with beside(kind, name) as stack, Registry(stack.internet, directory / "registry", PASSWORD) as registry:
        assert isinstance(stack, Fetching)
        stack.sallyport("vault", "put", SECRET, "--host", REGISTRY, stdin=registry.login)
        yield Place(stack, registry, directory)
