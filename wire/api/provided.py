"""The variables and files with placeholders that a sandbox gets when its first program starts.

No text here is a secret: a placeholder is worth nothing outside its sandbox. hostd keeps none of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_MOST: Final = 64
_MOST_TEXT: Final = 32 * 1024


@dataclass(frozen=True, slots=True)
class ProvidedFile:
    """A file, by its absolute path or one below the home directory (`~/`)."""

    path: str
    content: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Provided:
    """What the policy of one sandbox provides."""

    variables: Mapping[str, str] = field(repr=False)
    files: tuple[ProvidedFile, ...] = field(repr=False)

    def __post_init__(self) -> None:
        texts = (*self.variables.values(), *(file.content for file in self.files))
        if len(texts) > _MOST or any(len(text) > _MOST_TEXT for text in texts):
            raise ValueError(f"more than {_MOST} variables and files, or one of more than {_MOST_TEXT} characters")

    def __bool__(self) -> bool:
        return bool(self.variables or self.files)


NOTHING: Final = Provided({}, ())
