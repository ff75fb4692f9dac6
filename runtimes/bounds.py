"""Bounds that the settings and hostd's configuration have in common: names, variables of an image, numbers.

The command line imports this module for each command. So it imports nothing of the engine.
"""

import re
from typing import Final

from runtimes.images.references import Reference

IMAGE_NAME = re.compile(r"(?=.{1,256}$)[a-zA-Z0-9](?:[a-zA-Z0-9_:@-]|[./][a-zA-Z0-9_:@-])*")
"""The image names for which Docker can be asked. A name is part of a path there, so it must not lead elsewhere."""
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")
"""The names that a variable can have."""
_IMAGE_TEXT = re.compile(r"[ !#%-\[\]-~]{0,1024}")  # Docker's ENV takes it unchanged: no quote, dollar or backslash

LEAST_MEMORY: Final = 256 << 20
"""Bytes that each daemon needs."""
LEAST_BANDWIDTH: Final = 64 * 1024
MOST_BANDWIDTH: Final = 4_000_000_000
"""Bytes a second. The kernel's queue has 32 bits for its rate."""


def image_environment(env: dict[str, str]) -> dict[str, str]:
    """Check the environment of an image, and return it.

    Raises:
        ValueError: a name is invalid; or a value is too long, or has `"`, `$`, a backslash or other than printable
            ASCII.
    """
    for name, text in env.items():
        if not ENV_NAME.fullmatch(name) or not _IMAGE_TEXT.fullmatch(text):
            raise ValueError("must have names of variables and plain values in each env")
    return env


def configured_name(name: str) -> str:
    """Check the name of an image of the settings, and return it.

    Raises:
        ValueError: it is no name, or has a digest.
    """
    if Reference.parse(name).digest is not None:
        raise ValueError("an image of the settings has no digest in its name")
    return name
