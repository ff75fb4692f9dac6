"""The places inside a sandbox at which no volume is mounted."""

from pathlib import Path

import pytest

from runtimes.engine import targets
from runtimes.engine.containers import plan_container
from tests.runtimes.test_spec import launch_of


@pytest.mark.parametrize(
    "target",
    [
        *("/", "/etc", "/etc/ssl", "/etc/ssl/certs", "/etc/ssl/certs/java", "/opt", "/opt/opensandbox"),
        *("/opt/opensandbox/execd", "/etc/hosts", "/etc/hosts/x", "/etc/resolv.conf", "/etc/hostname"),
        *("/etc/machine-id", "/proc", "/proc/1", "/sys", "/sys/fs/cgroup", "/dev", "/dev/shm"),
    ],
)
def test_no_volume_hides_what_the_sandbox_needs(target: str) -> None:
    assert targets.problem(target)


@pytest.mark.parametrize(
    "target",
    ["/mnt", "/mnt/work", "/home/user", "/etc/app", "/optional", "/opt/tool", "/devices", "/var/lib/x"],
)
def test_a_volume_is_mounted_anywhere_else(target: str) -> None:
    assert "" == targets.problem(target)


def test_every_mount_of_sallyport_is_protected() -> None:
    plan = plan_container(launch_of(), "sha256:1", Path("/run/files"), Path("/execd"))
    assert plan.binds
    for bind in plan.binds:
        assert targets.problem(bind.destination), bind
        assert targets.problem(str(Path(bind.destination).parent)), bind
