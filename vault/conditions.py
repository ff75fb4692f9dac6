"""Which sandboxes may have a secret, and how often it may be used: parts of a binding, or of a limit. Pure.

- Each condition can only refuse. A binding without conditions is for every sandbox that is granted the secret.
- All pairs of `metadata` must be those of the sandbox's create call. `serve` reports them.
- One of `images` must be the name or the id of the image that the sandbox was started from. hostd, which started it,
  reports both. A sandbox that was restored from a snapshot has no image here: its files are those of a former sandbox.
- A use is one request that gets the secret, in however many places.
- The bytes of a request are those of its head, as the sandbox wrote it (method, target, header names and values), and
  of its body. A secret that is limited in bytes is for requests whose length is known before they are sent.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from wire.api import vaultd

MOST = 2**53 - 1
"""The largest limit, in uses and in bytes."""
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
    """How often a secret may be used, and how many bytes the requests with it may have; None is no limit.

    Attributes:
        uses, sent: uses and bytes in all. `sandbox_uses` and `sandbox_sent` are those of each sandbox.
    """

    uses: int | None = None
    sandbox_uses: int | None = None
    sent: int | None = None
    sandbox_sent: int | None = None

    def __post_init__(self) -> None:
        for number in (self.uses, self.sandbox_uses, self.sent, self.sandbox_sent):
            if number is not None and (type(number) is not int or not 1 <= number <= MOST):
                raise ConditionError(f"a number of uses or bytes is from 1 to {MOST}")

    @property
    def of_uses(self) -> bool:
        """Whether uses are counted."""
        return self.uses is not None or self.sandbox_uses is not None

    @property
    def of_bytes(self) -> bool:
        """Whether bytes are counted."""
        return self.sent is not None or self.sandbox_sent is not None

    @property
    def limited(self) -> bool:
        """Whether anything is counted."""
        return self.of_uses or self.of_bytes

    def both(self, other: "UseLimits") -> "UseLimits":
        """Return the limits that hold if these and others hold."""
        return UseLimits(
            _least(self.uses, other.uses),
            _least(self.sandbox_uses, other.sandbox_uses),
            _least(self.sent, other.sent),
            _least(self.sandbox_sent, other.sandbox_sent),
        )


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of uses, and of bytes of requests; None: any number."""

    uses: int | None = None
    sent: int | None = None

    @property
    def limited(self) -> bool:
        """Whether one of them is a number."""
        return self.uses is not None or self.sent is not None

    def covers(self, size: int | None) -> bool:
        """Whether one more request of `size` bytes (None: unknown) is within it."""
        if self.uses is not None and self.uses < 1:
            return False
        return self.sent is None or (size is not None and size <= self.sent)

    def less(self, size: int | None) -> "Amount":
        """Return what is left after one request that it covers."""
        uses = None if self.uses is None else self.uses - 1
        return Amount(uses, None if self.sent is None else self.sent - (self.sent if size is None else size))

    def with_bytes(self, more: int | None) -> "Amount":
        """Return it with more bytes, if bytes are limited."""
        return Amount(self.uses, None if self.sent is None else self.sent + (more or 0))


ANY_SANDBOX: Final = Selectors()
UNLIMITED: Final = UseLimits()


def form_of(selectors: Selectors, limits: UseLimits) -> vaultd.ConditionForm:
    """The form in a message."""
    return vaultd.ConditionForm(
        dict(selectors.metadata),
        tuple(sorted(selectors.images)),
        limits.uses,
        limits.sandbox_uses,
        limits.sent,
        limits.sandbox_sent,
    )


def of_form(form: vaultd.ConditionForm) -> tuple[Selectors, UseLimits]:
    """Return what `form` says.

    Raises:
        ConditionError: some part of it cannot be.
    """
    limits = UseLimits(form.uses, form.sandbox_uses, form.sent, form.sandbox_sent)
    return Selectors.make(form.metadata, form.images), limits


def to_json(selectors: Selectors, limits: UseLimits) -> dict[str, Any]:
    """The form in files, and of `sallyport vault list --json`; only the conditions that there are."""
    found = {
        "metadata": dict(selectors.metadata),
        "images": sorted(selectors.images),
        **dict(zip(_LIMITS, (limits.uses, limits.sandbox_uses, limits.sent, limits.sandbox_sent), strict=True)),
    }
    return {key: value for key, value in found.items() if value}


_LIMITS = ("max_uses", "max_uses_per_sandbox", "max_bytes", "max_bytes_per_sandbox")
KEYS = frozenset({"metadata", "images", *_LIMITS})
"""The keys of `to_json`."""


def from_json(document: Mapping[str, Any]) -> tuple[Selectors, UseLimits]:
    """Read `to_json`'s form.

    Raises:
        ConditionError: it is something else.
    """
    metadata, images = document.get("metadata", {}), document.get("images", [])
    if not isinstance(metadata, Mapping) or not isinstance(images, list):
        raise ConditionError("metadata is an object, images are a list")
    return Selectors.make(metadata, images), UseLimits(*(document.get(key) for key in _LIMITS))


def _least(one: int | None, other: int | None) -> int | None:
    return min((number for number in (one, other) if number is not None), default=None)


def _fits(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None
