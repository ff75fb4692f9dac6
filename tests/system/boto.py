"""boto3 for a sandbox: the modules of the tests' own environment in one archive."""

import io
import zipfile
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("boto3", "botocore", "s3transfer", "jmespath", "dateutil", "urllib3")
_SERVICES = ("s3", "sts", "dynamodb")
PLACE = "/tmp/boto"


def archive() -> bytes:
    """Return a zip archive with boto3, its dependencies and the models of a few services."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        for package in _PACKAGES:
            root = _folder(package)
            for path in root.rglob("*"):
                below = path.relative_to(root)
                if path.is_file() and path.suffix != ".pyc" and _wanted(package, below):
                    target.write(path, f"{package}/{below.as_posix()}")
        target.write(_folder("dateutil").parent / "six.py", "six.py")
    return made.getvalue()


def _wanted(package: str, path: Path) -> bool:
    if package != "botocore" or path.parts[0] != "data" or len(path.parts) == 2:
        return True
    return path.parts[1] in _SERVICES


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
