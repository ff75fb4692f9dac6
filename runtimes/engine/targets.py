"""The places inside a sandbox at which no volume may be mounted. Pure.

Sallyport mounts execd, trust anchors and name files at fixed places. A volume there, below them or above them would
hide them, or they would be made in the volume. A link in an image can still lead elsewhere: a sandbox then damages its
own root file system, and nothing outside depends on that.
"""

from typing import Final

OPENSANDBOX: Final = "/opt/opensandbox"
FIXED: Final = (
    OPENSANDBOX,
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/ssl/certs/java/cacerts",
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/machine-id",
)
"""What Sallyport mounts, or the directory of it."""
_KERNEL: Final = ("/proc", "/sys", "/dev")


def problem(target: str) -> str:
    """Return why no volume may be mounted at `target`, an absolute and normalised path; empty if it may."""
    if target == "/":
        return "it is the root of the file system"
    for place in (*FIXED, *_KERNEL):
        if target == place or target.startswith(f"{place}/"):
            return f"{place} belongs to the sandbox itself"
        if place.startswith(f"{target}/"):
            return f"it would hide {place}"
    return ""
