"""The allowed content of a launch message."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from runtimes.engine.disk import SMALLEST
from runtimes.spec import HostConfig, Uids, check_launch
from wire import codec
from wire.api.hostd import MOST_TEXT, Launch


def launch_message(**changes: Any) -> dict[str, Any]:
    return {
        "sandbox": "sbx-1",
        "runtime": "runc",
        "image": "sallyport/base:1",
        "entrypoint": ["sleep", "1"],
        "env": {"A": "b"},
        "cpu_nanos": 10**9,
        "memory_bytes": 2**28,
        "pids": 64,
        "disk_bytes": 1 << 30,
        "isolation": False,
        "held": False,
        "ca_root": "pem",
        "execd_token_sha256": "0" * 64,
        "selection": '{"policy_name": null, "network_policy": null, "bindings": []}',
        "volumes": [],
        "snapshot": None,
    } | changes


NAMED = {"name": "a", "create": True, "delete": False, "size_bytes": None}


def volume(**changes: Any) -> dict[str, Any]:
    plain = {"target": "/v", "sub_path": "", "read_only": False, "host": {"path": "/srv"}, "named": None}
    return plain | changes


def launch_of(**changes: Any) -> Launch:
    """Return the launch of a message, as hostd takes it."""
    launch = codec.decode(Launch, launch_message(**changes))
    check_launch(launch)
    return launch


UIDS = Uids(
    serve=700000001,
    vaultd=700000002,
    auditd=700000003,
    compiler=700000004,
    fetcher=700000005,
    worker_base=700001000,
    workers=4094,
)
MEMORY = dict.fromkeys(("auditd", "vaultd", "zygote", "compiler", "serve", "fetcher"), 1 << 30)


def host_config(**changes: Any) -> dict[str, Any]:
    processes = [{"name": name, "module": "a.b", "config": "/c"} for name in ("auditd", "vaultd", "compiler", "zygote")]
    return {
        "run_dir": "/run/sallyport",
        "state_dir": "/var/lib/sallyport/state",
        "python": "/usr/bin/python3",
        "upstream_netns": None,
        "docker_socket": "/run/docker.sock",
        "dockerd": None,
        "images": [],
        "registries": {"allowed": [], "secrets": {}, "max_bytes": 1 << 30, "skopeo": "/usr/bin/skopeo"},
        "runsc": "/usr/bin/runsc",
        "runc": "/usr/sbin/runc",
        "execd": "/usr/lib/execd",
        "upstream_roots": "/etc/ssl/certs/ca-certificates.crt",
        "dns_upstreams": ["10.0.0.53:53"],
        "allowed_addresses": ["10.0.0.0/8"],
        "host_addresses": {"git.corp.example": ["10.0.0.5"]},
        "gateway_limits": {"idle": 60},
        "maxima": {
            "cpu_nanos": 4 * 10**9,
            "memory_bytes": 2**32,
            "pids": 4096,
            "disk_bytes": 1 << 34,
            "sandboxes": 2,
        },
        "snapshots": {"count": 100, "bytes_each": 1 << 30, "bytes_total": 1 << 32},
        "launch_concurrency": 4,
        "volumes": {"allowed_host_paths": [], "default_bytes": 1 << 30, "max_bytes": 1 << 34, "max_count": 4},
        "processes": processes,
        "uids": UIDS.model_dump(),
        "listen": None,
        "runtimes": ["runc", "runsc"],
        "disk_limits": True,
        "network_bandwidth": None,
        "disk_bandwidth": None,
        "memory": MEMORY,
        "supplies": {"environment": [], "directories": [], "credential": None},
    } | changes


def test_a_complete_message_is_taken() -> None:
    assert ("sleep", "1") == launch_of().entrypoint
    assert launch_of(runtime="runsc", isolation=True).isolation
    assert SMALLEST == launch_of(disk_bytes=SMALLEST).disk_bytes
    assert launch_of(disk_bytes=None).disk_bytes is None


@pytest.mark.parametrize(
    "changes",
    [
        {"sandbox": "../x"},
        {"sandbox": "sbx-1\n"},
        {"sandbox": "A"},
        {"generation": 1},
        {"runtime": "kata"},
        {"image": "--privileged"},
        {"image": ""},
        {"image": "../containers/x"},
        {"image": "a/../../containers/x"},
        {"image": "a//b"},
        {"image": "a/"},
        {"image": "a\n"},
        {"image": "a?b"},
        {"image": "a" * 257},
        {"entrypoint": []},
        {"entrypoint": [""]},
        {"entrypoint": ["a\0b"]},
        {"env": {"A=B": "c"}},
        {"env": {"": "c"}},
        {"env": {"A": "b\0"}},
        {"env": {"A": 1}},
        {"cpu_nanos": 0},
        {"memory_bytes": 1024},
        {"pids": 0},
        {"pids": -1},
        {"execd_token_sha256": "0" * 63},
        {"execd_token_sha256": "g" * 64},
        {"selection": None},
        {"selection": {}},
        {"isolation": True},
        {"isolation": 0},
        {"disk_bytes": SMALLEST - 1},
        {"disk_bytes": 2**50 + 1},
        {"cpu_nanos": 999_999},
        {"cpu_nanos": 1024 * 10**9 + 1},
        {"memory_bytes": 6 * 1024 * 1024 - 1},
        {"memory_bytes": 2**44 + 1},
        {"pids": 4 * 1024 * 1024 + 1},
        {"entrypoint": ["a"] * 257},
        {"entrypoint": ["a", "b" * (MOST_TEXT + 1)]},
        {"env": {f"A{number}": "" for number in range(1025)}},
        {"env": {"A": "b" * (MOST_TEXT + 1)}},
        {"env": {f"A{number}": "b" * MOST_TEXT for number in range(8)}},
        {"gateway": {"sandbox": "sbx-1"}},
        {"upstream_roots": "pem"},
        {"ca_root": ""},
        {"ca_root": "a" * (64 * 1024 + 1)},
        {"privileged": True},
        {"binds": ["/:/host"]},
        {"volumes": None},
        {"volumes": ["/:/host"]},
        {"volumes": [volume(target=f"/v{number}") for number in range(33)]},
        {"volumes": [volume(), volume()]},
        {"volumes": [volume(host=None)]},
        {"volumes": [volume(named=NAMED)]},
        {"volumes": [volume(more=1)]},
        *(
            {"volumes": [volume(target=place)]}
            for place in ("", "v", "/", "/v/", "//v", "/a/../v", "/v\0", "/" + "v" * 256)
        ),
        *({"volumes": [volume(target=place)]} for place in ("/etc", "/proc/1", "/dev/shm", "/opt/opensandbox/execd")),
        *({"volumes": [volume(sub_path=path)]} for path in ("/a", "..", "a/../../b", "a//b", "a/.", "a\0")),
        *({"volumes": [volume(host={"path": path})]} for path in ("", "srv", "/srv/", "/srv/../etc", "/srv\0")),
        *({"volumes": [volume(host=None, named=NAMED | {"name": name})]} for name in ("", "A", "../a", "a" * 254)),
        *({"volumes": [volume(host=None, named=NAMED | {"size_bytes": size})]} for size in (0, 1, 2**50 + 1)),
    ],
)
def test_anything_else_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        launch_of(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": "a//b"}, "not an image name"),
        ({"env": {"A": "b", "A=B": "c"}}, "a variable's name is not allowed"),
        ({"disk_bytes": 67108863}, "disk_bytes: at least 67108864"),
        ({"isolation": True}, "isolated sessions need runsc"),
        (
            {"volumes": [volume(), volume(target="/proc/1")]},
            "a volume cannot be mounted there: /proc belongs to the sandbox itself",
        ),
        (
            {"volumes": [volume(target="/opt")]},
            "a volume cannot be mounted there: it would hide /opt/opensandbox",
        ),
        ({"volumes": [volume(host=None, named=NAMED | {"size_bytes": 67108863})]}, "size_bytes: at least 67108864"),
    ],
)
def test_a_refused_launch_has_a_complete_reason(changes: dict[str, Any], reason: str) -> None:
    """The caller sees it."""
    with pytest.raises(ValueError) as refusal:
        launch_of(**changes)
    assert reason == str(refusal.value)


@pytest.mark.parametrize("missing", sorted(launch_message()))
def test_nothing_has_a_default(missing: str) -> None:
    message = launch_message()
    del message[missing]
    with pytest.raises(codec.CodecError, match=re.escape(missing)):
        codec.decode(Launch, message)


def test_volumes_within_their_bounds_are_taken() -> None:
    given = [volume(), volume(target="/w", sub_path="a/b", host=None, named=NAMED | {"size_bytes": SMALLEST})]
    assert ["/v", "/w"] == [mount.target for mount in launch_of(volumes=given).volumes]


def test_a_refusal_does_not_repeat_what_was_sent() -> None:
    with pytest.raises(codec.CodecError) as refusal:
        launch_of(env={"TOKEN": "hunter2\0"})
    assert "hunter2" not in str(refusal.value)


def test_the_host_configuration_is_read_from_json() -> None:
    config = HostConfig.model_validate_json(json.dumps(host_config()))
    assert [str(network) for network in config.allowed] == ["10.0.0.0/8"]
    assert [(str(address), port) for address, port in config.resolvers] == [("10.0.0.53", 53)]


def test_the_kernels_limits_follow_those_of_the_gateways() -> None:
    config = HostConfig.model_validate(host_config(gateway_limits={"dial_rate": 2000, "connection_rate": 1000}))
    uids = config.uids
    assert 1000 == config.slot_plan.syn_rate
    assert 8000 == config.guard_plan.rate
    assert (uids.worker_base, uids.worker_base + uids.workers) == (
        config.guard_plan.first_uid,
        config.guard_plan.last_uid,
    ), "the user that fetches images is restricted like a worker"


@pytest.mark.parametrize(
    "changes",
    [
        {"run_dir": "relative"},
        {"processes": []},
        {"dns_upstreams": ["10.0.0.53"]},
        {"allowed_addresses": ["10.0.0.1/8"]},
        {"host_addresses": {"a.example": "10.0.0.5"}},
        {"gateway_limits": {"idle": "60"}},
        {"gateway_limits": {"dial_rate": 0}},
        {"gateway_limits": {"unknown": 1}},
        {"maxima": {}},
        {"launch_concurrency": 0},
        {"upstream_roots": "relative"},
        {"unknown": 1},
        {"images": [{"name": "x"}]},
        {"images": [{"name": "X", "tar": "/x", "env": {}}]},
        {"images": [{"name": f"x@sha256:{'0' * 64}", "tar": "/x", "env": {}}]},
        {"registries": {"allowed": ["*"], "secrets": {}, "max_bytes": 1 << 30, "skopeo": "/usr/bin/skopeo"}},
        {"registries": {"allowed": [], "secrets": {}, "max_bytes": 0, "skopeo": "/usr/bin/skopeo"}},
        {"registries": {"allowed": [], "secrets": {}, "max_bytes": 1 << 30, "skopeo": "skopeo"}},
        {"images": [{"name": "x", "tar": "/x"}]},
        {"images": [{"name": "x", "tar": "/x", "env": {"A B": "c"}}]},
        {"images": [{"name": "x", "tar": "/x", "env": {"A": "b\nUSER root"}}]},
        {"images": [{"name": "x", "tar": "/x", "env": {"A": 'b" B="c'}}]},
        {"images": [{"name": "x", "tar": "/x", "env": {"A": "$PATH"}}]},
        {"images": [{"name": "x", "tar": "/x", "env": {"A": "b\\"}}]},
    ],
)
def test_a_wrong_host_configuration_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HostConfig.model_validate(host_config(**changes))


@pytest.mark.parametrize("missing", sorted(host_config()))
def test_each_default_is_that_of_a_setting(missing: str) -> None:
    """So the file has every key."""
    with pytest.raises(ValidationError, match=missing):
        HostConfig.model_validate({key: value for key, value in host_config().items() if key != missing})


def test_no_two_processes_share_a_user() -> None:
    with pytest.raises(ValidationError):
        Uids(**(UIDS.model_dump() | {"vaultd": UIDS.serve}))
    with pytest.raises(ValidationError):
        Uids(**(UIDS.model_dump() | {"serve": 700001005}))
