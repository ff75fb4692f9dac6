"""The names of built parts: each has a hash of its sources, so that unchanged sources are built once."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_DIGITS = 16


def of_files(root: Path, paths: Iterable[str]) -> str:
    """Return the hash of files below `root`: that of the output of `sha256sum` for their sorted paths."""
    listing = hashlib.sha256()
    for path in sorted(paths, key=os.fsencode):
        listing.update(f"{_digest((root / path).read_bytes())}  {path}\n".encode())
    return listing.hexdigest()[:_DIGITS]


def of_contents(*paths: Path) -> str:
    """Return the hash of the concatenated contents of files."""
    return _digest(b"".join(path.read_bytes() for path in paths))[:_DIGITS]


def execd(root: Path) -> str:
    """Return the name of execd as built from the checkout `root`."""
    sources = (path for path in _files(root, "execd") if path.endswith(".go") or Path(path).name.startswith("go."))
    return f"execd-{of_files(root, sources)}"


def image(root: Path, name: str) -> str:
    """Return the name of the image that the script `name` builds."""
    return f"{name}-{of_contents(root / 'images' / f'{name}.sh')}.tar"


def code_image(root: Path) -> str:
    """Return the name of the code-interpreter image: everything below images/ is part of it."""
    sources = (path for path in _files(root, "images") if "/__pycache__/" not in path)
    return f"code-interpreter-{of_files(root, sources)}.tar"


def vault_server(root: Path) -> str:
    """Return the name of the tests' HashiCorp Vault."""
    return f"vault-{of_files(root, _files(root, 'testbed/vault_server'))}"


def clients(root: Path) -> str:
    """Return the name of the directory of the published clients."""
    return f"clients-{of_contents(*sorted((root / 'tests' / 'clients').iterdir()))}"


def _files(root: Path, folder: str) -> Iterable[str]:
    for directory, _, names in os.walk(root / folder):
        below = Path(directory).relative_to(root).as_posix()
        yield from (f"{below}/{name}" for name in names)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
