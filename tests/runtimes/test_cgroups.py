"""The places of controllers, and the values that are written there."""

from pathlib import Path

import pytest

from runtimes.process.cgroups import (
    Cgroups,
    GroupLimits,
    Hierarchies,
    Processor,
    find,
    processor_time,
    remove_container_groups,
    settings,
)

_V1 = """\
32 31 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:30 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:34 / /sys/fs/cgroup/pids rw,relatime shared:9 - cgroup cgroup rw,pids
41 31 0:36 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
_V2 = "30 29 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_v1_controllers_are_found_beside_an_empty_unified_mount() -> None:
    roots = tuple(Path("/sys/fs/cgroup", name) for name in ("cpu", "memory", "pids"))
    assert Hierarchies(1, roots) == find(_V1)


def test_v2_is_one_hierarchy() -> None:
    assert Hierarchies(2, (Path("/sys/fs/cgroup"),)) == find(_V2)


@pytest.mark.parametrize("text", ["", _V1.splitlines()[0]])
def test_missing_controllers_are_an_error(text: str) -> None:
    with pytest.raises(OSError, match="no cgroup hierarchy"):
        find(text)


def test_limits_say_the_same_on_both_versions() -> None:
    limits = GroupLimits(memory_bytes=1024, pids=7, cpus=0.5)
    v1, v2 = settings(1, limits), settings(2, limits)
    assert ("1024", "7", "10000") == (v1["memory.limit_in_bytes"], v1["pids.max"], v1["cpu.cfs_quota_us"])
    assert ("1024", "7", "10000 20000") == (v2["memory.max"], v2["pids.max"], v2["cpu.max"])


def test_a_limit_that_cannot_be_set_leaves_no_group(tmp_path: Path) -> None:
    cgroups = Cgroups("/run/x", Hierarchies(1, (tmp_path,)))
    with pytest.raises(OSError, match="in any hierarchy"):
        cgroups.create("worker", GroupLimits())
    assert list(tmp_path.glob("sallyport/*/worker")) == []


def test_two_instances_have_groups_of_their_own(tmp_path: Path) -> None:
    hierarchies = Hierarchies(1, (tmp_path,))
    assert Cgroups("/run/a", hierarchies).parent != Cgroups("/run/b", hierarchies).parent


def test_what_docker_left_of_a_container_is_removed_in_every_hierarchy_and_nothing_else(tmp_path: Path) -> None:
    points = [tmp_path / "memory", tmp_path / "unified"]
    kept = points[0] / "docker" / "other"
    for group in (points[0] / "docker" / "id1" / "init", points[1] / "system.slice" / "docker-id1.scope", kept):
        group.mkdir(parents=True)
    table = "".join(
        f"1 2 0:3 / {point} rw - {kind} none rw\n" for point, kind in zip(points, ("cgroup", "cgroup2"), strict=True)
    )

    assert () == remove_container_groups("id1", table)
    assert not (points[0] / "docker" / "id1").exists()
    assert not (points[1] / "system.slice" / "docker-id1.scope").exists()
    assert kept.exists()


def test_a_group_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    group = tmp_path / "docker" / "id1"
    group.mkdir(parents=True)
    (group / "tasks").touch()

    assert (f"cgroup {group}",) == remove_container_groups("id1", f"1 2 0:3 / {tmp_path} rw - cgroup none rw\n")


def test_a_share_of_a_processor_is_given_in_short_periods_where_the_kernel_can() -> None:
    shares = {2 * 10**9: (20_000, 40_000), 500_000_000: (20_000, 10_000), 50_000_000: (20_000, 1000)}
    shares |= {49_000_000: (100_000, 4900), 10_000_000: (100_000, 1000), 1_000_000: (100_000, 1000)}
    assert shares == {nanos: processor_time(nanos) for nanos in shares}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("layout", ["docker/id1", "system.slice/docker-id1.scope"])
def test_time_and_weight_are_found_in_each_hierarchy_and_layout(tmp_path: Path, version: int, layout: str) -> None:
    cpu, times = (tmp_path, tmp_path) if version == 2 else (tmp_path / "cpu", tmp_path / "cpuacct")
    kinds = ("cgroup2 none rw",) if version == 2 else ("cgroup none rw,cpu", "cgroup none rw,cpuacct")
    table = "".join(f"1 2 0:3 / {at} rw - {kind}\n" for at, kind in zip((cpu, times), kinds, strict=False))
    cgroups = Cgroups("/run/x", Hierarchies(version, (cpu,)))
    worker = cpu / cgroups.parent / "sbx-1.1"
    for group in {cpu / layout, times / layout, worker}:
        group.mkdir(parents=True)
    (times / layout / "cpuacct.usage").write_text("1500000000\n")
    (times / layout / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    processor = Processor(cgroups, table)
    assert processor.seconds("id1") == 1.5
    processor.weigh("id1", "sbx-1.1", share=1 / 16)
    file, weight = ("cpu.weight", "6") if version == 2 else ("cpu.shares", "64")
    assert [weight] * 2 == [(group / file).read_text() for group in (cpu / layout, worker)]
    with pytest.raises(FileNotFoundError):
        processor.seconds("id2")
