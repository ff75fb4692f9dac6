"""Names of images, and the operator's patterns of names that may be fetched. Pure.

A name has the form of Docker's references: `[registry/]repository[:tag][@sha256:...]`.

- Without a registry the name is Docker Hub's (`docker.io`), and `ubuntu` is `library/ubuntu` there.
- Without a tag and a digest, the tag is `latest`.
- The first part is a registry if it has a dot or a colon, or is `localhost`.
"""

import re
from dataclasses import dataclass
from typing import Final

HUB: Final = "docker.io"
_MOST_NAME: Final = 256
_HUB_NAMES: Final = frozenset((HUB, "index.docker.io", "registry-1.docker.io"))
_LATEST: Final = "latest"
_HOST = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REGISTRY = re.compile(_HOST, re.ASCII)
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


def check_image_digest(text: str) -> None:
    """Check the digest of a manifest or a configuration.

    Raises:
        ValueError: the text is not `sha256:` and 64 hexadecimal digits.
    """
    if not _DIGEST.fullmatch(text):
        raise ValueError("not a digest of the form sha256:...")


@dataclass(frozen=True, slots=True)
class Reference:
    """A complete name: registry, repository, and a tag, a digest or both."""

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """Return the complete name of `text`.

        Raises:
            ValueError: it is no name of an image. The message does not repeat it.
        """
        if len(text) > _MOST_NAME:
            raise ValueError("the name is too long")
        rest, at, digest = text.partition("@")
        if at and not _DIGEST.fullmatch(digest):
            raise ValueError("the digest has not the form sha256:...")
        first, slash, others = rest.partition("/")
        if slash and ("." in first or ":" in first or first == "localhost"):
            registry, rest = first, others
        else:
            registry = HUB
        repository, colon, tag = rest.partition(":")
        registry = HUB if registry in _HUB_NAMES else registry
        if registry == HUB and "/" not in repository:
            repository = f"library/{repository}"
        if not _REGISTRY.fullmatch(registry) or not _REPOSITORY.fullmatch(repository):
            raise ValueError("not a name of an image")
        if colon and not _TAG.fullmatch(tag):
            raise ValueError("not a tag of an image")
        chosen = tag if colon else None if at else _LATEST
        return cls(registry, repository, chosen, digest if at else None)

    @property
    def path(self) -> str:
        """Registry and repository."""
        return f"{self.registry}/{self.repository}"

    @property
    def familiar(self) -> str:
        """The short form, as people write it: without Docker Hub's parts, and without the tag `latest`."""
        name = self.path.removeprefix(f"{HUB}/library/").removeprefix(f"{HUB}/")
        tag = f":{self.tag}" if self.tag is not None and self.tag != _LATEST else ""
        return f"{name}{tag}" if self.digest is None else f"{name}{tag}@{self.digest}"

    @property
    def key(self) -> str:
        """The complete name as one text; equal for each spelling of the same name."""
        tag = "" if self.tag is None else f":{self.tag}"
        return self.path + tag + ("" if self.digest is None else f"@{self.digest}")

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the registry, as it is known to its callers."""
        host, _, port = self.registry.partition(":")
        return host, int(port or 443)

    def at(self, digest: str) -> str:
        """Return the name of this repository's manifest with `digest`."""
        return f"{self.path}@{digest}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """One entry of the operator's list of what may be fetched.

    - `registry.example.com/team/tool:1.2`: this tag. `...@sha256:...`: this digest.
    - `registry.example.com/team/tool`: each tag and each digest of this repository.
    - `registry.example.com/team/*`: each repository below `team`.
    """

    path: str
    below: bool
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """Return the pattern of `text`.

        Raises:
            ValueError: it is no pattern.
        """
        if text.endswith("/*"):
            named = Reference.parse(f"{text[:-2]}/any")
            if named.tag != _LATEST or named.digest is not None or text.count("*") > 1:
                raise ValueError("a pattern ends in /* and has no tag")
            return cls(named.path.removesuffix("any"), True, None, None)
        named = Reference.parse(text)
        written = ":" in text.rpartition("/")[2].partition("@")[0]
        return cls(named.path, False, named.tag if written else None, named.digest)

    def permits(self, wanted: Reference) -> bool:
        """Return whether `wanted` may be fetched."""
        if self.below:
            return wanted.path.startswith(self.path)
        if wanted.path != self.path:
            return False
        if self.digest is not None:
            return wanted.digest == self.digest
        return self.tag is None or (wanted.tag == self.tag and wanted.digest is None)
