"""The doctor's verdicts that need only bytes and numbers."""

import resource
import struct
from pathlib import Path

import pytest

from runtimes.checks import probes
from runtimes.checks.doctor import DoctorQuestion, add_to_docker, ask
from runtimes.checks.probes import CheckError
from runtimes.engine.wrappers import entries
from runtimes.spec import HostConfig
from tests.runtimes.test_spec import UIDS, host_config


def _elf(*kinds: int) -> bytes:
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 32, 64)
    struct.pack_into("<HH", head, 54, 56, len(kinds))
    return bytes(head) + b"".join(struct.pack("<I", kind) + bytes(52) for kind in kinds)


@pytest.mark.parametrize(
    ("head", "static"),
    [
        (_elf(1, 2), True),
        (_elf(1, 3), False),
        (_elf(), False),
        (_elf(1)[:100], False),
        (b"#!/bin/sh\n", False),
        (b"", False),
    ],
)
def test_a_static_program_asks_for_no_loader(head: bytes, static: bool) -> None:
    assert static == probes.is_static(head)


@pytest.mark.parametrize(
    ("name", "first", "count", "expected"),
    [
        ("serve", 700000001, 1, ["serve"]),
        ("range", 600000000, 100000001, []),
        ("range", 600000000, 100000002, ["range"]),
        ("last", 700005093, 1, ["last"]),
        ("of images", 700005094, 1, ["of images"]),
        ("behind", 700005095, 10, []),
        ("before sandboxes", 1879048191, 1, []),
        ("first sandbox", 1879048191, 2, ["first sandbox"]),
        ("behind sandboxes", 1879048192 + 4094 * 65536, 1, []),
    ],
)
def test_ids_of_others_are_reported_to_the_last_number(name: str, first: int, count: int, expected: list[str]) -> None:
    assert expected == probes.overlapping(UIDS, [(name, first, count)])


def test_subordinate_ranges_are_read_and_rubbish_is_not() -> None:
    text = "agent:100000:65536\n# nothing\nbad:x:1\n"
    assert [("agent", 100000, 65536)] == probes.subordinate(text)


def test_a_missing_program_is_distinguished_from_a_failing_one() -> None:
    with pytest.raises(CheckError, match="is missing"):
        probes.program("/nonexistent/x")
    with pytest.raises(CheckError, match="fails with status 1"):
        probes.program("/bin/false")


def test_an_image_must_be_a_tar(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_text("no tar")
    images = [{"name": "x", "tar": str(tmp_path / "x.tar"), "env": {}}]
    with pytest.raises(CheckError, match="is not a tar"):
        probes.images(HostConfig.model_validate(host_config(images=images)))
    (tmp_path / "x.tar").write_bytes(bytes(10240))
    assert "x" == probes.images(HostConfig.model_validate(host_config(images=images)))


@pytest.mark.parametrize(("limit", "said"), [(resource.RLIM_INFINITY, "lock their memory"), (8 << 20, "is 8192 KiB")])
def test_the_limit_on_locked_memory_is_described(monkeypatch: pytest.MonkeyPatch, limit: int, said: str) -> None:
    monkeypatch.setattr(probes, "_SYS_RESOURCE", 63)  # a capability that no process has
    monkeypatch.setattr(resource, "getrlimit", lambda _limit: (limit, limit))
    assert said in probes.locked_memory()


def test_a_resolver_on_loopback_is_of_no_use() -> None:
    with pytest.raises(CheckError, match="this host itself"):
        probes.resolvers(HostConfig.model_validate(host_config(dns_upstreams=["127.0.0.53:53"])))
    with pytest.raises(CheckError, match="no resolver"):
        probes.resolvers(HostConfig.model_validate(host_config(dns_upstreams=[])))


def test_the_upstream_namespace_is_described_with_its_families(monkeypatch: pytest.MonkeyPatch) -> None:
    config = HostConfig.model_validate(host_config(upstream_netns=None, allowed_addresses=["fd00::/8"]))
    asked: list[object] = []
    monkeypatch.setattr(probes, "reaches_ipv6", lambda excepted: asked.append(excepted) is None)
    assert "workers dial from this network namespace, IPv4 and IPv6" == probes.upstream(config)
    assert [config.allowed] == asked
    monkeypatch.setattr(probes, "reaches_ipv6", lambda _excepted: False)
    assert "workers dial from this network namespace, IPv4: no IPv6 route" == probes.upstream(config)
    with pytest.raises(CheckError, match="/nonexistent is no network namespace: No such file"):
        probes.upstream(HostConfig.model_validate(host_config(upstream_netns="/nonexistent")))


def test_roots_must_be_certificates_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "roots.pem"
    path.write_text("nothing")
    path.chmod(0o644)
    with pytest.raises(CheckError, match="no certificate"):
        probes.roots(str(path))
    path.chmod(0o600)
    with pytest.raises(CheckError, match="readable by every user"):
        probes.roots(str(path))


def test_a_failure_is_one_line_with_its_remedy() -> None:
    def missing() -> str:
        raise FileNotFoundError(2, "No such file or directory", "/x")

    checks = [ask(DoctorQuestion("a", "mend it", missing)), ask(DoctorQuestion("b", "mend it", lambda: "fine"))]
    assert ["FAIL  a: /x: No such file or directory -> mend it", "ok    b: fine"] == [check.line() for check in checks]


def test_what_to_add_to_docker_is_the_very_text() -> None:
    said = add_to_docker(entries(Path("/run/sallyport/runtimes"), ["runsc"]))
    assert said.endswith(': "runtimes": {"sallyport-runsc": {"path": "/run/sallyport/runtimes/sallyport-runsc"}}')


def test_the_packages_that_are_installed_are_recent_enough() -> None:
    assert "none older than asked for" in probes.packages()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("h11>=99", r"h11 is \S+, and must be >=99"),
        ("h11<0.10", r"h11 is \S+, and must be <0.10"),
        ("no-such-package>=1", "no-such-package is missing"),
    ],
)
def test_a_package_below_its_floor_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, said: str
) -> None:
    known = tmp_path / "sallyport-9.dist-info" / "METADATA"
    known.parent.mkdir()
    known.write_text(f"Metadata-Version: 2.1\nName: sallyport\nVersion: 9\nRequires-Dist: {asked}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckError, match=said):
        probes.packages()


def test_a_package_for_another_platform_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tmp_path / "sallyport-9.dist-info" / "METADATA"
    known.parent.mkdir()
    other = 'Requires-Dist: no-such-package; sys_platform == "win32"'
    known.write_text(f"Metadata-Version: 2.1\nName: sallyport\nVersion: 9\n{other}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert probes.packages().startswith("0 packages")


def test_runsc_says_its_version_though_its_build_does_not(tmp_path: Path) -> None:
    """A build from the Go module reports VERSION_MISSING, and has the version in its build information."""
    program = tmp_path / "runsc"
    for text, expected in (
        ("echo runsc version release-20260101.0", "release-20260101.0"),
        (
            "echo runsc version VERSION_MISSING; exit\nmod\tgvisor.dev/gvisor\tv0.0.0-2026-ab12\th1:x=",
            "v0.0.0-2026-ab12",
        ),
        ("echo runsc version VERSION_MISSING", "of an unknown version"),
    ):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        found = probes.runsc(str(program))
        assert found.endswith(expected)
        assert "VERSION_MISSING" not in found


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError(2, "No such file or directory", "/x"), "/x: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("not a tar"), "not a tar"),
    ],
)
def test_a_finding_names_no_class_of_errors(error: Exception, expected: str) -> None:
    def probe() -> str:
        raise error

    with pytest.raises(probes.CheckError) as caught:
        probes.attempt(probe)
    assert expected == str(caught.value)
