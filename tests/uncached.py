"""A pytest plugin for mutation tests: it empties all caches before each test.

A process that first imports the unchanged module and then runs the tests of a mutant would otherwise find results of
the unchanged function in a cache. Values that a module computes at its import stay.
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


functools.lru_cache = _registered  # `functools.cache` also calls it


def pytest_runtest_setup() -> None:
    """Empty all caches."""
    for cached in _caches:
        cached.cache_clear()
