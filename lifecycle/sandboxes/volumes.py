"""The volumes of a create call: from JSON to what hostd mounts.

Each fault has the code of the contract. hostd decides what is allowed and what exists; a call that passes here can
still be refused there, see `refusal`.
"""

import re
from collections.abc import Sequence
from decimal import Decimal

import wire
from lifecycle.api.errors import ApiError, invalid
from lifecycle.api.models import HostMount, Pvc, Volume
from runtimes.engine.targets import problem
from wire.api.hostd import MOST_VOLUMES, HostPath, NamedVolume, VolumeMount, check_volume_name, path_parts

_NAME = re.compile(r"(?=.{1,63}$)[a-z0-9](?:[-a-z0-9]*[a-z0-9])?", re.ASCII)
_STORAGE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(Ki|Mi|Gi|Ti|Pi|Ei)?", re.ASCII)
_UNITS = {unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)}
_SMALLEST, _LARGEST = 64 << 20, 1 << 50
_REFUSED = {
    wire.Code.UNKNOWN_VOLUME: (400, "VOLUME::PVC_NOT_FOUND"),
    wire.Code.PATH_FORBIDDEN: (400, "VOLUME::HOST_PATH_NOT_ALLOWED"),
    wire.Code.PATH_MISSING: (400, "VOLUME::HOST_PATH_NOT_FOUND"),
    wire.Code.PATH_KIND: (400, "VOLUME::INVALID_HOST_PATH"),
    wire.Code.SUB_PATH: (400, "VOLUME::INVALID_SUB_PATH"),
    wire.Code.PATH: (500, "VOLUME::HOST_PATH_CREATE_FAILED"),
    wire.Code.VOLUME: (500, "VOLUME::PVC_INSPECT_FAILED"),
    wire.Code.VOLUME_SIZE: (400, "SANDBOX::INVALID_PARAMETER"),
}


def mounts(volumes: Sequence[Volume]) -> tuple[VolumeMount, ...]:
    """Check the volumes of a call.

    Raises:
        ApiError: the first fault.
    """
    if len(volumes) > MOST_VOLUMES:
        raise invalid(f"volumes: at most {MOST_VOLUMES}.")
    found: list[VolumeMount] = []
    names: set[str] = set()
    for volume in volumes:
        if not _NAME.fullmatch(volume.name):
            raise _fault("INVALID_NAME", f"volumes: {volume.name[:80]!r} is not a name of a volume.")
        if volume.name in names:
            raise _fault("DUPLICATE_NAME", f"volumes: {volume.name} is there twice.")
        names.add(volume.name)
        mount = _mount(volume)
        if any(mount.target == other.target for other in found):
            raise _fault("INVALID_MOUNT_PATH", f"volumes: two are mounted at {mount.target[:200]!r}.")
        found.append(mount)
    return tuple(found)


def _mount(volume: Volume) -> VolumeMount:
    where = f"volumes: {volume.name}"
    if sum(backend is not None for backend in (volume.host, volume.pvc, volume.ossfs)) != 1:
        raise _fault("INVALID_BACKEND", f"{where} must have exactly one of host, pvc and ossfs.")
    if volume.ossfs is not None:
        raise _fault("UNSUPPORTED_BACKEND", f"{where}: ossfs is not supported by this server.")
    target = _absolute(volume.mount_path, "INVALID_MOUNT_PATH", f"{where}.mountPath")
    if why := problem(target):
        raise _fault("INVALID_MOUNT_PATH", f"{where}.mountPath {target[:200]!r}: {why}.")
    sub_path = volume.sub_path or ""
    if sub_path.startswith("/"):
        raise _fault("INVALID_SUB_PATH", f"{where}.subPath must be relative.")
    try:
        sub_path = "/".join(path_parts(sub_path))
    except ValueError as error:
        raise _fault("INVALID_SUB_PATH", f"{where}.subPath: {error}.") from None
    return VolumeMount(
        target=target,
        sub_path=sub_path,
        read_only=volume.read_only,
        host=None if volume.host is None else _host(volume.host, where),
        named=None if volume.pvc is None else _named(volume.pvc, where),
    )


def _host(host: HostMount, where: str) -> HostPath:
    return HostPath(_absolute(host.path, "INVALID_HOST_PATH", f"{where}.host.path"))


def _named(pvc: Pvc, where: str) -> NamedVolume:
    try:
        check_volume_name(pvc.claim_name)
    except ValueError:
        raise _fault("INVALID_PVC_NAME", f"{where}.pvc.claimName {pvc.claim_name[:80]!r} is not valid.") from None
    size = None if pvc.storage is None else _storage(pvc.storage, f"{where}.pvc.storage")
    return NamedVolume(pvc.claim_name, pvc.create_if_not_exists, pvc.delete_on_sandbox_termination, size)


def _storage(text: str, where: str) -> int:
    match = _STORAGE.fullmatch(text)
    size = int(Decimal(match[1]) * _UNITS.get(match[2], 1)) if match else 0
    if not _SMALLEST <= size <= _LARGEST:
        raise invalid(f"{where}: must be a size like 1Gi, from 64Mi to 1024Ti.")
    return size


def _absolute(text: str, code: str, where: str) -> str:
    if not text.startswith("/"):
        raise _fault(code, f"{where} must be an absolute path of Linux.")
    try:
        return "/" + "/".join(path_parts(text))
    except ValueError as error:
        raise _fault(code, f"{where}: {error}.") from None


def _fault(code: str, message: str) -> ApiError:
    return ApiError(400, f"VOLUME::{code}", message)


def refusal(error: wire.RemoteError) -> ApiError | None:
    """Translate hostd's refusal of a volume; None if it refused something else."""
    if error.code not in _REFUSED:
        return None
    status, code = _REFUSED[wire.Code(error.code)]
    return ApiError(status, code, f"A volume cannot be mounted: {error.message}.")


def described(volume: VolumeMount) -> str:
    """Describe a volume for the audit log: `host:/srv/data/sub /mnt/data ro`, `pvc:cache /cache rw new-deleted`."""
    source = f"host:{volume.host.path}" if volume.host is not None else ""
    if volume.named is not None:
        source = f"pvc:{volume.named.name}"
    words = [f"{source}/{volume.sub_path}" if volume.sub_path else source, volume.target]
    words.append("ro" if volume.read_only else "rw")
    if volume.named is not None and volume.named.delete:
        words.append("deleted-with-sandbox")
    return " ".join(words)
