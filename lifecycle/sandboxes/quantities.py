"""Resource limits: from the texts of a create call to the numbers that hostd takes.

- A value that cannot be parsed and an unknown name are refused. No fault results in "unlimited" or in a default.
- A resource without a request gets the server's default. A request above the server's maximum is refused.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from lifecycle.api.errors import invalid
from policy.strict import unknown

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}i"] = 1024**_power
    _UNITS[_letter] = _UNITS[f"{_letter}b"] = 1000**_power

_MEMORY = re.compile(r"([0-9]{1,18})\s*([a-z]{0,2})", re.ASCII)
_CPU = re.compile(r"[0-9]{1,19}(\.[0-9]{1,19})?|\.[0-9]{1,19}", re.ASCII)
_MILLIS = re.compile(r"([0-9]{1,18})m", re.ASCII)
_NANO = 1_000_000_000
MEMORY_FLOOR = 16 * 1024 * 1024
DISK_FLOOR = 64 * 1024 * 1024
_DISK_KEYS = ("disk", "ephemeral-storage")
_NAMES = ("cpu", "memory", "pids", *_DISK_KEYS, "gpu")


@dataclass(frozen=True, slots=True)
class Resources:
    """The limits of one sandbox. `disk_bytes` None is no limit."""

    cpu_nanos: int
    memory_bytes: int
    pids: int
    disk_bytes: int | None


def memory(text: str) -> int:
    """Parse a memory size into bytes.

    Raises:
        ValueError: the text is no positive integer with a known unit.
    """
    match = _MEMORY.fullmatch(text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    size = int(match[1]) * unit if match and unit is not None else 0
    if not 0 < size < 1 << 63:
        raise ValueError(f"not a memory size: {text[:40]!r}")
    return size


def cpu(text: str) -> int:
    """Parse a number of cores into billionths of a core.

    Raises:
        ValueError: the text is neither `<millis>m` nor a positive decimal number.
    """
    text = text.strip()
    try:
        if match := _MILLIS.fullmatch(text):
            nanos = int(match[1]) * (_NANO // 1000)
        else:
            nanos = int(Decimal(text) * _NANO) if _CPU.fullmatch(text) else 0
    except InvalidOperation:
        nanos = 0
    if not 0 < nanos < 1 << 63:
        raise ValueError(f"not a number of cores: {text[:40]!r}")
    return nanos


def check_names(resources: Mapping[str, str], field: str) -> None:
    """Refuse an unknown resource, because a misspelt limit would silently become the default.

    Raises:
        ApiError: with the name of the resource.
    """
    for name in resources:
        if name not in _NAMES:
            raise invalid(f"{unknown((field, name))}; known are {', '.join(_NAMES)}.")


def resolve(
    limits: Mapping[str, str], defaults: Resources, maxima: Resources, field: str = "resourceLimits"
) -> Resources:
    """Convert the limits in a field of a call into the limits of a sandbox.

    Raises:
        ApiError: a value cannot be parsed, is above the maximum, or names an unknown resource.
    """
    check_names(limits, field)
    cpu_nanos = _parse(limits, "cpu", cpu, field) or defaults.cpu_nanos
    memory_bytes = _parse(limits, "memory", memory, field) or defaults.memory_bytes
    pids = _parse(limits, "pids", _positive, field) or defaults.pids
    if "gpu" in limits:
        if limits["gpu"] != "all":
            _parse(limits, "gpu", _positive, field)
        raise invalid(f"{field}.gpu: this server offers no GPUs.")
    if memory_bytes < MEMORY_FLOOR:
        raise invalid(f"{field}.memory: at least {MEMORY_FLOOR // 1024**2}Mi.")
    if cpu_nanos > maxima.cpu_nanos:
        raise invalid(f"{field}.cpu: over this server's maximum of {Decimal(maxima.cpu_nanos) / _NANO} cores.")
    if memory_bytes > maxima.memory_bytes:
        raise invalid(f"{field}.memory: over this server's maximum of {maxima.memory_bytes} bytes.")
    if pids > maxima.pids:
        raise invalid(f"{field}.pids: over this server's maximum of {maxima.pids}.")
    return Resources(cpu_nanos, memory_bytes, pids, _disk(limits, defaults.disk_bytes, maxima.disk_bytes, field))


def _disk(limits: Mapping[str, str], default: int | None, maximum: int | None, field: str) -> int | None:
    """Return the size of the sandbox's disk. If both names of it are given, the smaller value counts."""
    named = [key for key in _DISK_KEYS if key in limits]
    sizes = [size for key in named if (size := _parse(limits, key, memory, field)) is not None]
    if maximum is None:
        if named:
            raise invalid(f"{field}.{named[0]}: this server does not limit disks.")
        return None
    wanted = min(sizes) if sizes else default
    if wanted is None or wanted > maximum:
        raise invalid(f"{field}.disk: over this server's maximum of {maximum} bytes.")
    if wanted < DISK_FLOOR:
        raise invalid(f"{field}.disk: at least {DISK_FLOOR // 1024**2}Mi.")
    return wanted


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) == 0:
        raise ValueError(f"not a positive number: {text[:40]!r}")
    return int(text)


def _parse(limits: Mapping[str, str], key: str, parse: Callable[[str], int], field: str) -> int | None:
    if key not in limits:
        return None
    try:
        return parse(limits[key])
    except ValueError as error:
        raise invalid(f"{field}.{key}: {error}.") from None
