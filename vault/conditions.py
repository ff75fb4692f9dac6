"""Which sandboxes may have a secret, and how often it may be used: parts of a binding, or of a limit. Pure.

- Each condition can only refuse. A binding without conditions is for every sandbox that is granted the secret.
- All pairs of `metadata` must be those of the sandbox's create call. `serve` reports them.
- One of `images` must be the name or the id of the image that the sandbox was started from. hostd, which started it,
  reports both. A sandbox that was restored from a snapshot has no image here: its files are those of a former sandbox.
- A use is one request that gets the secret, in however many places.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from wire.api import vaultd

MAX_USES = 2**53 - 1
_KEY = re.compile(r"[A-Za-z0-9._/-]{1,317}", re.ASCII)
_TEXT = re.compile(r"[A-Za-z0-9._-]{0,63}", re.ASCII)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}", re.ASCII)


class ConditionError(ValueError):
    """A condition that cannot exist."""


@dataclass(frozen=True, slots=True)
class Selectors:
    """Sandboxes with all of `metadata` (sorted pairs) and one of `images` (empty: any)."""

    metadata: tuple[tuple[str, str], ...] = ()
    images: frozenset[str] = frozenset()

    @classmethod
    def make(cls, metadata: Mapping[str, str], images: Iterable[str] = ()) -> "Selectors":
        """Build selectors from what a person wrote.

        Raises:
            ConditionError: a key, a value or an image is none.
        """
        found = tuple(images)
        if max(len(metadata), len(found)) > vaultd.MOST_SELECTORS:
            raise ConditionError(f"a secret has at most {vaultd.MOST_SELECTORS} pairs of metadata, and as many images")
        if not all(_fits(_KEY, key) and _fits(_TEXT, value) for key, value in metadata.items()):
            raise ConditionError("metadata is a label's key and value")
        if not all(_fits(_IMAGE, image) for image in found):
            raise ConditionError("an image is the name or the id (sha256:...) of one")
        return cls(tuple(sorted(metadata.items())), frozenset(found))

    def refusal(self, metadata: Mapping[str, str], images: frozenset[str]) -> str | None:
        """Return why a sandbox may not have the secret, None if it may."""
        if any(metadata.get(key) != value for key, value in self.metadata):
            return "the secret is for sandboxes with other metadata"
        if self.images and not self.images & images:
            return "the secret is for sandboxes from other images"
        return None


@dataclass(frozen=True, slots=True)
class UseLimits:
    """How often a secret may be used: in all, and by each sandbox; None is no limit."""

    uses: int | None = None
    sandbox_uses: int | None = None

    def __post_init__(self) -> None:
        for number in (self.uses, self.sandbox_uses):
            if number is not None and (type(number) is not int or not 1 <= number <= MAX_USES):
                raise ConditionError("a number of uses is at least 1")

    @property
    def limited(self) -> bool:
        """Whether uses are counted."""
        return self.uses is not None or self.sandbox_uses is not None

    def both(self, other: "UseLimits") -> "UseLimits":
        """Return the limits that hold if these and others hold."""
        return UseLimits(_least(self.uses, other.uses), _least(self.sandbox_uses, other.sandbox_uses))


ANY_SANDBOX: Final = Selectors()
UNLIMITED: Final = UseLimits()


def form_of(selectors: Selectors, limits: UseLimits) -> vaultd.ConditionForm:
    """The form in a message."""
    return vaultd.ConditionForm(
        dict(selectors.metadata), tuple(sorted(selectors.images)), limits.uses, limits.sandbox_uses
    )


def of_form(form: vaultd.ConditionForm) -> tuple[Selectors, UseLimits]:
    """Return what `form` says.

    Raises:
        ConditionError: some part of it cannot be.
    """
    return Selectors.make(form.metadata, form.images), UseLimits(form.uses, form.sandbox_uses)


def to_json(selectors: Selectors, limits: UseLimits) -> dict[str, Any]:
    """The form in files, and of `sallyport vault list --json`; only the conditions that there are."""
    found = {
        "metadata": dict(selectors.metadata),
        "images": sorted(selectors.images),
        "max_uses": limits.uses,
        "max_uses_per_sandbox": limits.sandbox_uses,
    }
    return {key: value for key, value in found.items() if value}


KEYS = frozenset({"metadata", "images", "max_uses", "max_uses_per_sandbox"})
"""The keys of `to_json`."""


def from_json(document: Mapping[str, Any]) -> tuple[Selectors, UseLimits]:
    """Read `to_json`'s form.

    Raises:
        ConditionError: it is something else.
    """
    metadata, images = document.get("metadata", {}), document.get("images", [])
    if not isinstance(metadata, Mapping) or not isinstance(images, list):
        raise ConditionError("metadata is an object, images are a list")
    return Selectors.make(metadata, images), UseLimits(document.get("max_uses"), document.get("max_uses_per_sandbox"))


def _least(one: int | None, other: int | None) -> int | None:
    return min((number for number in (one, other) if number is not None), default=None)


def _fits(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None
