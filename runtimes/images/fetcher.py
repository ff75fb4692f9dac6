"""Fetches an image from a registry with skopeo. Runs in a jail (`jail`), in the upstream namespace.

- The manifest is read and judged first. Then skopeo fetches by its digest, so the registry cannot give another one.
- skopeo's form `dir:` keeps manifest and layers as the registry has them. `unpacker` verifies all of it afterwards.
- The credentials are in a file on the jail's own tmpfs, which exists as long as the jail. They are on no command line.
- What skopeo prints is returned in one line, without the queries of URLs, which can contain credentials.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtimes.images import manifests
from runtimes.images.manifests import Index, Manifest, RefusedImage
from runtimes.images.references import Reference
from runtimes.images.unpacker import FETCHED, TOP, digest_of

_LOGIN: Final = "/run/login.json"
_MOST_LOGIN: Final = 128 * 1024
_MOST_SAID: Final = 64 * 1024
_QUERY = re.compile(r"\?[^\s\"']*")
_LEVEL = re.compile(r"^time=\S+ level=\w+ msg=")


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches into the directory `work`, at most `most` bytes, with the program `skopeo`."""

    skopeo: str
    work: Path
    architecture: str
    most: int
    login: str = ""

    def fetch(self, name: str) -> None:
        """Fetch the image `name`.

        Raises:
            RefusedImage: the registry does not give it, or it is not accepted.
        """
        wanted = Reference.parse(name)
        top = self._manifest(f"{wanted.path}:{wanted.tag}" if wanted.digest is None else wanted.at(wanted.digest))
        digest = digest_of(top)
        if wanted.digest not in (None, digest):
            raise RefusedImage(f"the registry gave {digest} for {wanted.digest}")
        found = manifests.parse_manifest(top)
        if isinstance(found, Index):
            digest = manifests.choose(found, self.architecture).digest
            text = self._manifest(wanted.at(digest))
            if digest_of(text) != digest:
                raise RefusedImage(f"the registry gave {digest_of(text)} for {digest}")
            found = manifests.parse_manifest(text)
        if not isinstance(found, Manifest):
            raise RefusedImage("an index names another index")
        if sum(layer.size for layer in found.layers) > self.most:
            raise RefusedImage(f"the image is larger than {self.most} bytes")
        (self.work / TOP).write_bytes(top)
        target = f"dir:{self.work / FETCHED}"
        self._run("copy", "--preserve-digests", *self._options("--src-"), f"docker://{wanted.at(digest)}", target)

    def _options(self, prefix: str = "--") -> tuple[str, ...]:
        return (f"{prefix}authfile", self.login) if self.login else (f"{prefix}no-creds",)

    def _manifest(self, name: str) -> bytes:
        return self._run("inspect", "--raw", *self._options(), f"docker://{name}")

    def _run(self, *arguments: str) -> bytes:
        said, printed = self.work / "said", self.work / "printed"
        environment = {"PATH": "/usr/bin", "HOME": str(self.work), "TMPDIR": str(self.work), "LANG": "C.UTF-8"}
        environment |= {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "GOMEMLIMIT": "384MiB"}
        with said.open("wb") as errors, printed.open("wb") as output:
            done = subprocess.run(
                (self.skopeo, "--insecure-policy", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                check=False,
            )
        if done.returncode != 0:
            raise RefusedImage(f"skopeo: {_last_line(said)}")
        with printed.open("rb") as output:
            return output.read(manifests.MOST_MANIFEST + 1)


def keep_login(fd: int) -> str:
    """Write the credentials from the pipe `fd` to a file of the jail, and return its name.

    Raises:
        RefusedImage: they are too large.
    """
    with os.fdopen(fd, "rb") as pipe:
        text = pipe.read(_MOST_LOGIN + 1)
    if len(text) > _MOST_LOGIN:
        raise RefusedImage("the credentials are too large")
    with open(_LOGIN, "xb", opener=lambda name, flags: os.open(name, flags, 0o400)) as file:
        file.write(text)
    return _LOGIN


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MOST_SAID))
        lines = file.read().decode("utf-8", "replace").strip().splitlines() or ["it gave no reason"]
    text = _QUERY.sub("?...", _LEVEL.sub("", lines[-1]))
    return "".join(character if character.isprintable() else "?" for character in text)[:400]
