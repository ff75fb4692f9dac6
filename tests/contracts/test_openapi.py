"""The OpenAPI document and the server agree: schemathesis makes calls of the document, valid and invalid ones.

- Each answer has a status, a content type and a body that the document has for the route.
- A call that the document does not permit is refused with a 4xx. None causes a 500.

It tests `lifecycle/api/document.py` and `lifecycle/api/answers.py`. Examples that schemathesis cannot find, such as a
field that is misspelt, are in `test_strict_input.py`.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from standins import IMAGE, KEY, World, world

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
HEADERS = {"OPEN-SANDBOX-API-KEY": KEY}
EXAMPLES = 20
CONFIG = schemathesis.Config.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": [400, 401, 403, 404, 405, 409, 413, 422, 429]}}}
)
ROUTES = {
    ("get", "/health"): "200",
    ("get", "/version"): "200",
    ("post", "/v1/sandboxes"): "202",
    ("get", "/v1/sandboxes"): "200",
    ("get", "/v1/sandboxes/{sandbox}"): "200",
    ("delete", "/v1/sandboxes/{sandbox}"): "204",
    ("patch", "/v1/sandboxes/{sandbox}/metadata"): "200",
    ("post", "/v1/sandboxes/{sandbox}/pause"): "202",
    ("post", "/v1/sandboxes/{sandbox}/resume"): "202",
    ("post", "/v1/sandboxes/{sandbox}/renew-expiration"): "200",
    ("get", "/v1/sandboxes/{sandbox}/endpoints/{port}"): "200",
    ("get", "/v1/sandboxes/{sandbox}/networkpolicy"): "200",
    ("put", "/v1/sandboxes/{sandbox}/networkpolicy"): "200",
    ("patch", "/v1/sandboxes/{sandbox}/networkpolicy"): "200",
    ("delete", "/v1/sandboxes/{sandbox}/networkpolicy"): "200",
    ("post", "/v1/sandboxes/{sandbox}/snapshots"): "202",
    ("get", "/v1/snapshots"): "200",
    ("get", "/v1/snapshots/{snapshot}"): "200",
    ("delete", "/v1/snapshots/{snapshot}"): "204",
    ("post", "/v1/metrics/events"): "204",
    ("get", "/v1/sandboxes/{sandbox}/diagnostics/logs"): "200",
    ("get", "/v1/sandboxes/{sandbox}/diagnostics/events"): "200",
    ("get", "/v1/sandboxes/{sandbox}/diagnostics/inspect"): "200",
    ("get", "/v1/sandboxes/{sandbox}/diagnostics/summary"): "200",
    ("post", "/v1/pools"): "201",
    ("get", "/v1/pools"): "200",
    ("get", "/v1/pools/{pool}"): "200",
    ("put", "/v1/pools/{pool}"): "200",
    ("delete", "/v1/pools/{pool}"): "204",
}
"""The routes of the contract, with the status of a success. It has templates only for Kubernetes."""
CREATE: dict[str, Any] = {
    "image": {"uri": IMAGE},
    "entrypoint": ["sleep", "inf"],
    "resourceLimits": {"cpu": "1", "memory": "64Mi"},
    "timeout": 600,
    "metadata": {"team": "a"},
    "platform": {"os": "linux", "arch": "amd64"},
    "networkPolicy": {"egress": [{"action": "allow", "target": "a.example.org"}]},
    "extensions": {"opensandbox.extensions.x": "y"},
}
NULLABLE = {"Create": {"timeout", "networkPolicy"}, "Pvc": {"storageClass", "storage", "accessModes"}}
"""The fields that a client may send as null, by the name of the model."""


@pytest.fixture
async def server() -> AsyncIterator[World]:
    async with world() as made, made.serving():
        yield made


def operations(url: str) -> list[Any]:
    document = schemathesis.openapi.from_url(f"{url}/openapi.json", config=CONFIG)
    return [found.ok() for found in document.get_all_operations()]


def sent_as_generated(operation: Any, query: dict[str, Any]) -> bool:
    """Whether a query is on the wire what was generated.

    A list is sent as its items, an object as its names, and each of them can be text that the server must accept; an
    empty one and None are not sent.
    """
    parameters = operation.definition.raw.get("parameters", ())
    lists = {found["name"] for found in parameters if found["in"] == "query" and "array" in repr(found["schema"])}
    return not lists & query.keys() and all(isinstance(value, str | int | float) for value in query.values())


def fault_of(operation: Any, mode: GenerationMode, url: str) -> str | None:
    """Make generated calls of one operation. Return what disagrees with the document."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        assume(mode is GenerationMode.POSITIVE or sent_as_generated(operation, case.query or {}))
        case.validate_response(case.call(base_url=url, headers=HEADERS, timeout=20), checks=CHECKS)

    try:
        one()
    except Unsatisfiable:  # Nothing of this call can be wrong.
        return None
    except BaseExceptionGroup as error:
        return f"{operation.label}: {error}"
    return None


@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_the_server_answers_each_call_as_its_document_says(server: World, mode: GenerationMode) -> None:
    def faults() -> list[str]:
        found = [fault_of(operation, mode, server.url) for operation in operations(server.url)]
        assert len(ROUTES) == len(found)
        return [fault for fault in found if fault is not None]

    assert [] == await asyncio.to_thread(faults)


async def test_each_success_has_the_body_of_the_document(server: World) -> None:
    """Generated calls seldom succeed, so each route is called once so that it does."""
    here: dict[str, str] = {"port": "44772", "pool": "p"}
    pool = {
        "name": "p",
        "template": {"spec": {"containers": [{"image": IMAGE, "command": ["serve"]}]}},
        "capacitySpec": {"bufferMin": 0, "bufferMax": 0, "poolMin": 0, "poolMax": 1},
    }
    event = {"eventType": "sandbox.create", "createDurationMs": 1, "success": True}
    bodies: dict[tuple[str, str], Any] = {
        ("post", "/v1/sandboxes"): CREATE,
        ("patch", "/v1/sandboxes/{sandbox}/metadata"): {"a": "b"},
        ("post", "/v1/sandboxes/{sandbox}/renew-expiration"): {"expiresAt": "2100-01-01T00:00:00Z"},
        ("put", "/v1/sandboxes/{sandbox}/networkpolicy"): CREATE["networkPolicy"],
        ("patch", "/v1/sandboxes/{sandbox}/networkpolicy"): CREATE["networkPolicy"]["egress"],
        ("delete", "/v1/sandboxes/{sandbox}/networkpolicy"): ["b.example.org"],
        ("post", "/v1/sandboxes/{sandbox}/snapshots"): {"name": "s"},
        ("post", "/v1/metrics/events"): event,
        ("post", "/v1/pools"): pool,
        ("put", "/v1/pools/{pool}"): {"capacitySpec": pool["capacitySpec"]},
    }
    queries = {"/v1/sandboxes/{sandbox}/diagnostics/logs": {"scope": "all"}}
    removals = [route for route in ROUTES if route[0] == "delete" and not route[1].endswith("networkpolicy")]

    def call(document: Any, method: str, path: str) -> None:
        names = re.findall(r"{(\w+)}", path)
        body = {"body": bodies[method, path], "media_type": "application/json"} if (method, path) in bodies else {}
        case = document[path][method].Case(
            path_parameters={name: here[name] for name in names}, query=queries.get(path, {}), **body
        )
        answer = case.call(base_url=server.url, headers=HEADERS, timeout=20)
        assert ROUTES[method, path] == str(answer.status_code), f"{method} {path}: {answer.text}"
        case.validate_response(answer, checks=CHECKS[:-1])
        made = {"/v1/sandboxes": "sandbox", "/v1/sandboxes/{sandbox}/snapshots": "snapshot"}.get(path)
        if method == "post" and made is not None:
            here[made] = answer.json()["id"]

    def journey() -> None:
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=CONFIG)
        for method, path in (*(route for route in ROUTES if route not in removals), *reversed(removals)):
            call(document, method, path)

    await asyncio.to_thread(journey)


async def test_the_document_has_the_routes_of_the_contract(server: World) -> None:
    async with server.client() as client:
        document = (await client.get("/openapi.json")).json()
    routes = {
        (method, path): next(status for status in operation["responses"] if status.startswith("2"))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert ROUTES == routes
    assert "0.1.0" == document["info"]["version"]


async def test_the_document_permits_null_only_where_the_server_accepts_it(server: World) -> None:
    async with server.client() as client:
        models = (await client.get("/openapi.json")).json()["components"]["schemas"]
    nullable = {
        name: {
            field for field, kinds in model.get("properties", {}).items() if {"type": "null"} in kinds.get("anyOf", ())
        }
        for name, model in models.items()
    }
    assert NULLABLE == {name: fields for name, fields in nullable.items() if fields}
