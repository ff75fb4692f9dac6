"""The volumes of a create call: codes of the contract, and what hostd is asked to mount.

It tests `lifecycle/sandboxes/volumes.py`.
"""

from typing import Any

import pytest
from standins import IMAGE, World

import wire
from lifecycle.api.errors import ApiError
from lifecycle.api.models import Volume
from lifecycle.sandboxes.volumes import described, mounts
from wire.api.hostd import HostPath, NamedVolume, VolumeMount

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}}
HOST: dict[str, Any] = {"name": "v", "mountPath": "/mnt", "host": {"path": "/srv/data"}}
PVC: dict[str, Any] = {"name": "v", "mountPath": "/mnt", "pvc": {"claimName": "c"}}
OSSFS = {"bucket": "abc", "endpoint": "e.example.org", "accessKeyId": "i", "accessKeySecret": "s3cr3t"}


def pvc(**changes: Any) -> dict[str, Any]:
    return PVC | {"pvc": PVC["pvc"] | changes}


@pytest.mark.parametrize(
    ("volumes", "status", "code"),
    [
        ([HOST | {"name": "V"}], 400, "VOLUME::INVALID_NAME"),
        ([HOST | {"name": ""}], 400, "VOLUME::INVALID_NAME"),
        ([HOST | {"name": "v" * 64}], 400, "VOLUME::INVALID_NAME"),
        ([HOST, PVC | {"mountPath": "/other"}], 400, "VOLUME::DUPLICATE_NAME"),
        ([HOST | {"pvc": {"claimName": "c"}}], 400, "VOLUME::INVALID_BACKEND"),
        ([{"name": "v", "mountPath": "/mnt"}], 400, "VOLUME::INVALID_BACKEND"),
        ([{"name": "v", "mountPath": "/mnt", "ossfs": OSSFS}], 400, "VOLUME::UNSUPPORTED_BACKEND"),
        *(
            ([HOST | {"mountPath": path}], 400, "VOLUME::INVALID_MOUNT_PATH")
            for path in (
                "mnt",
                "",
                "/",
                "//",
                "/mnt/../etc",
                "/mnt\0",
                "/opt/opensandbox/",
                "/proc/self",
                "/etc/./hosts",
            )
        ),
        ([HOST, PVC | {"name": "w", "mountPath": "/mnt/./"}], 400, "VOLUME::INVALID_MOUNT_PATH"),
        *(
            ([HOST | {"subPath": path}], 400, "VOLUME::INVALID_SUB_PATH")
            for path in ("/a", "..", "a/../b", "a\0", "/".join("a" * 65), "a" * 256)
        ),
        *(
            ([HOST | {"host": {"path": path}}], 400, "VOLUME::INVALID_HOST_PATH")
            for path in ("srv", "", "C:\\data", "D:/data", "/srv/../etc", "/srv\0")
        ),
        *(
            ([pvc(claimName=name)], 400, "VOLUME::INVALID_PVC_NAME")
            for name in ("", "A", "a_b", "-a", "../a", "a" * 254)
        ),
        *(
            ([pvc(storage=text)], 400, "SANDBOX::INVALID_PARAMETER")
            for text in ("", "1 Gi", "1G", "-1Gi", "1Mi", "9999Ei", "1e9")
        ),
        ([HOST | {"name": f"v{n}", "mountPath": f"/m{n}"} for n in range(33)], 400, "SANDBOX::INVALID_PARAMETER"),
        ([{"name": f"v{n}"} for n in range(65)], 422, "SANDBOX::INVALID_PARAMETER"),
        ([HOST | {"readonly": True}], 400, "SANDBOX::INVALID_PARAMETER"),
        ([HOST | {"readOnly": "x"}], 422, "SANDBOX::INVALID_PARAMETER"),
        ([HOST | {"readOnly": None}], 422, "SANDBOX::INVALID_PARAMETER"),
        ([{"name": "v", "host": {"path": "/srv"}}], 422, "SANDBOX::INVALID_PARAMETER"),
        ([pvc(driver="local")], 400, "SANDBOX::INVALID_PARAMETER"),
    ],
)
async def test_a_wrong_volume_is_refused_with_the_code_of_the_contract(
    server: World, volumes: list[Any], status: int, code: str
) -> None:
    """Nothing is launched, and no secret of the call is repeated."""
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json={**BODY, "volumes": volumes})
    assert (status, code) == (answer.status_code, answer.json()["code"]), answer.text
    assert "s3cr3t" not in answer.text
    assert [] == server.hostd.named("launch")


def test_paths_are_normalised_and_the_subset_of_kubernetes_has_no_effect() -> None:
    given = [
        Volume.model_validate(
            {"name": "a", "mountPath": "//mnt/./a/", "host": {"path": "/srv//data/"}, "subPath": "./s/"}
        ),
        Volume.model_validate(
            {
                "name": "b",
                "mountPath": "/b",
                "readOnly": True,
                "pvc": {"claimName": "c", "storage": "1.5Gi", "storageClass": None, "accessModes": ["ReadWriteOnce"]},
            }
        ),
        Volume.model_validate(
            {
                "name": "c",
                "mountPath": "/c",
                "subPath": "",
                "pvc": {
                    "claimName": "d",
                    "createIfNotExists": False,
                    "deleteOnSandboxTermination": True,
                    "storage": None,
                },
            }
        ),
    ]
    expected = (
        VolumeMount("/mnt/a", "s", False, HostPath("/srv/data"), None),
        VolumeMount("/b", "", True, None, NamedVolume("c", True, False, 3 << 29)),
        VolumeMount("/c", "", False, None, NamedVolume("d", False, True, None)),
    )
    assert expected == mounts(given)
    assert ["host:/srv/data/s /mnt/a rw", "pvc:c /b ro", "pvc:d /c rw deleted-with-sandbox"] == [
        described(mount) for mount in expected
    ]


async def test_hostd_is_asked_for_the_volumes_and_the_log_names_them(server: World) -> None:
    async with server.client() as client:
        made = await client.post("/v1/sandboxes", json={**BODY, "volumes": [HOST]})
        assert 202 == made.status_code
        assert 202 == (await client.post("/v1/sandboxes", json={**BODY, "volumes": []})).status_code
    asked = [launch["volumes"] for launch in server.hostd.named("launch")]
    host = {"path": "/srv/data"}
    assert [[{"target": "/mnt", "sub_path": "", "read_only": False, "host": host, "named": None}], []] == asked
    records = [record for record in server.auditd.records if record["kind"] == "lifecycle.create"]
    assert [["host:/srv/data /mnt rw"], None] == [record.get("volumes") for record in records]


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (wire.Code.UNKNOWN_VOLUME, 400, "VOLUME::PVC_NOT_FOUND"),
        (wire.Code.PATH_FORBIDDEN, 400, "VOLUME::HOST_PATH_NOT_ALLOWED"),
        (wire.Code.PATH_MISSING, 400, "VOLUME::HOST_PATH_NOT_FOUND"),
        (wire.Code.PATH_KIND, 400, "VOLUME::INVALID_HOST_PATH"),
        (wire.Code.SUB_PATH, 400, "VOLUME::INVALID_SUB_PATH"),
        (wire.Code.PATH, 500, "VOLUME::HOST_PATH_CREATE_FAILED"),
        (wire.Code.VOLUME, 500, "VOLUME::PVC_INSPECT_FAILED"),
        (wire.Code.VOLUME_SIZE, 400, "SANDBOX::INVALID_PARAMETER"),
        (wire.Code.FULL, 429, "SANDBOX::TOO_MANY_REQUESTS"),
        (wire.Code.DISK, 429, "SANDBOX::TOO_MANY_REQUESTS"),
    ],
)
async def test_a_refusal_of_hostd_has_the_code_of_the_contract(
    server: World, refusal: wire.Code, status: int, code: str
) -> None:
    """The call is undone: no row is left."""
    server.hostd.fail["launch"] = wire.RequestError(refusal, "no")
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json={**BODY, "volumes": [HOST]})
        assert (status, code) == (answer.status_code, answer.json()["code"])
        assert 0 == (await client.get("/v1/sandboxes")).json()["pagination"]["totalItems"]


def test_the_first_fault_in_the_order_of_the_list_counts() -> None:
    with pytest.raises(ApiError) as refused:
        mounts([Volume.model_validate(HOST | {"name": "_"}), Volume.model_validate(HOST | {"mountPath": "/"})])
    assert "VOLUME::INVALID_NAME" == refused.value.code
