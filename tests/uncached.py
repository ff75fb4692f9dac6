"""A pytest plugin for mutation tests: no cache lasts from one test to the next.

A process that imports the unchanged module first, and then runs the tests of a change, would else find in a cache what
the unchanged function returned. Values that a module makes at its import stay.
"""

import functools
from collections.abc import Callable
from typing import Any

_caches: list[Any] = []
_lru_cache: Callable[..., Any] = functools.lru_cache


def _registered(maxsize: Any = 128, typed: bool = False) -> Any:
    made = _lru_cache(maxsize, typed)
    if callable(maxsize):
        _caches.append(made)
        return made

    def decorate(function: Callable[..., Any]) -> Any:
        cached = made(function)
        _caches.append(cached)
        return cached

    return decorate


functools.lru_cache = _registered  # `functools.cache` calls it, too


def pytest_runtest_setup() -> None:
    """Forget what all caches hold."""
    for cached in _caches:
        cached.cache_clear()
