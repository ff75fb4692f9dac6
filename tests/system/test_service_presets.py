"""The presets of model services and of AWS with the real clients in a sandbox. Judged by what arrives at the stand-ins.

It tests `policy/load.py` and the files of `policy/presets/`. The clients are those of `tests/clients/services.txt` and
of its package.json, unmodified. S3 is versitygw, which verifies signatures; the other services are stand-ins
(`services`).
"""

import hashlib
import http.client
import json
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from opensandbox.sync.sandbox import SandboxSync

from testbed.internet import AWS_STORAGE, AWS_STORAGE_ADDRESS, STAND_IN_ADDRESS, Internet, in_namespace
from testbed.leaks import forms_of, leaks_in
from testbed.stack import Stack
from testbed.stand_ins import served
from testbed.storage import BUCKET, Storage
from tests.conftest import ON_RUNC
from tests.system import services as stand_ins
from tests.system.services import CONFIG, REPLY, REPOSITORY, WEIGHTS, Services

pytestmark = [pytest.mark.system, pytest.mark.images]

_PYTHON = f"""
import json, sys

REPOSITORY, BUCKET = {REPOSITORY!r}, {BUCKET!r}
ASK = [{{"role": "user", "content": "hello"}}]


def openai():
    import openai
    client = openai.OpenAI(max_retries=0)
    chat = client.chat.completions
    parts = chat.create(model="gpt-4o", messages=ASK, stream=True)
    yield "chat", chat.create(model="gpt-4o", messages=ASK).choices[0].message.content
    yield "chat, streamed", [part.choices[0].delta.content for part in parts]
    yield "response", client.responses.create(model="gpt-4o", input="hello").output_text
    events = client.responses.create(model="gpt-4o", input="hello", stream=True)
    yield "response, streamed", [event.delta for event in events if event.type == "response.output_text.delta"]
    yield "embedding", client.embeddings.create(model="text-embedding-3-small", input="hello").data[0].embedding
    file = client.files.create(file=("ledger.jsonl", b"a\\r\\n--b" * 100), purpose="user_data")
    yield "file", [file.bytes, client.files.content(file.id).read() == b"a\\r\\n--b" * 100]
    yield "models", [one.id for one in client.models.list()]


def anthropic():
    import anthropic
    client = anthropic.Anthropic(max_retries=0)
    wanted = {{"model": "claude-1", "max_tokens": 9, "messages": ASK}}
    yield "message", client.messages.create(**wanted).content[0].text
    with client.messages.stream(**wanted) as stream:
        yield "message, streamed", list(stream.text_stream)
    yield "tokens", client.messages.count_tokens(model="claude-1", messages=ASK).input_tokens
    yield "models", [one.id for one in client.models.list()]


def huggingface():
    import hashlib, pathlib
    import huggingface_hub as hub
    from huggingface_hub import constants
    yield "whoami", hub.whoami()["name"]
    for name, without_xet in (("xet", False), ("presigned", True)):
        constants.HF_HUB_DISABLE_XET = without_xet
        place = pathlib.Path(hub.snapshot_download(REPOSITORY, cache_dir="/tmp/hf-" + name))
        yield name, {{one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in place.iterdir()}}
        yield name + ", branch", hub.hf_hub_download(
            REPOSITORY, "config.json", revision="refs/pr/1", cache_dir="/tmp/hf-pr-" + name).endswith("config.json")


def aws():
    import boto3
    storage, tables = boto3.client("s3"), boto3.client("dynamodb")
    storage.put_object(Bucket=BUCKET, Key="a/b \\u00e9.txt", Body=b"data")
    yield "object", storage.get_object(Bucket=BUCKET, Key="a/b \\u00e9.txt")["Body"].read().decode()
    yield "objects", [one["Key"] for one in storage.list_objects_v2(Bucket=BUCKET, Prefix="a/")["Contents"]]
    tables.put_item(TableName="t", Item={{"id": {{"S": "1"}}, "sum": {{"N": "42"}}}})
    yield "item", tables.get_item(TableName="t", Key={{"id": {{"S": "1"}}}})["Item"]["sum"]["N"]


for service in (openai, anthropic, huggingface, aws):
    try:
        for name, result in service():
            print(json.dumps([service.__name__ + ": " + name, result]))
    except Exception as error:
        print(json.dumps([service.__name__ + " failed", f"{{type(error).__name__}}: {{error}}"[:2000]]))
"""
"""The clients of the sandbox in Python. Each prints a line for each result."""

_NODE = """
import OpenAI, { toFile } from "openai";
import Anthropic from "@anthropic-ai/sdk";
const say = (name, result) => console.log(JSON.stringify([name, result]));
const messages = [{ role: "user", content: "hello" }];
const openai = new OpenAI({ maxRetries: 0 });
const chat = await openai.chat.completions.create({ model: "gpt-4o", messages });
say("npm openai: chat", chat.choices[0].message.content);
const parts = [];
for await (const part of await openai.chat.completions.create({ model: "gpt-4o", messages, stream: true }))
  parts.push(part.choices[0].delta.content);
say("npm openai: chat, streamed", parts);
say("npm openai: response", (await openai.responses.create({ model: "gpt-4o", input: "hello" })).output_text);
const vector = await openai.embeddings.create({ model: "text-embedding-3-small", input: "hello" });
say("npm openai: embedding", vector.data[0].embedding);
const anthropic = new Anthropic({ maxRetries: 0 });
const wanted = { model: "claude-1", max_tokens: 9, messages };
say("npm anthropic: message", (await anthropic.messages.create(wanted)).content[0].text);
const texts = [];
for await (const event of anthropic.messages.stream(wanted)) if (event.delta?.text) texts.push(event.delta.text);
say("npm anthropic: message, streamed", texts);
"""

_LETTERS = list(REPLY)
_FILES = {"config.json": hashlib.sha256(CONFIG).hexdigest(), "big.bin": hashlib.sha256(WEIGHTS).hexdigest()}
EXPECTED: dict[str, Any] = {
    "openai: chat": REPLY,
    "openai: chat, streamed": ["", *_LETTERS],
    "openai: response": REPLY,
    "openai: response, streamed": _LETTERS,
    "openai: embedding": [0.25, -0.5],
    "openai: file": [600, True],
    "openai: models": ["gpt-4o"],
    "anthropic: message": REPLY,
    "anthropic: message, streamed": _LETTERS,
    "anthropic: tokens": 7,
    "anthropic: models": ["claude-1"],
    "huggingface: whoami": "ledger-bot",
    **{f"huggingface: {way}": _FILES for way in ("xet", "presigned")},
    **{f"huggingface: {way}, branch": True for way in ("xet", "presigned")},
    "aws: object": "data",
    "aws: objects": ["a/b \u00e9.txt"],
    "aws: item": "42",
    "npm openai: chat": REPLY,
    "npm openai: chat, streamed": ["", *_LETTERS],
    "npm openai: response": REPLY,
    "npm openai: embedding": [0.25, -0.5],
    "npm anthropic: message": REPLY,
    "npm anthropic: message, streamed": _LETTERS,
}
_CURL = """curl -sS https://api.anthropic.com/v1/messages/count_tokens -H "x-api-key: $ANTHROPIC_API_KEY" \\
  -H 'anthropic-version: 2023-06-01' -H 'content-type: application/json' -d '{"model": "claude-1", "messages": []}'"""
COMMANDS = {
    _CURL: '{"input_tokens": 7}',
    "python3 python/bin/hf auth whoami": "ledger-bot",
    f"python3 python/bin/aws s3 ls s3://{BUCKET}/a/": "b \u00e9.txt",
    'python3 python/bin/aws dynamodb get-item --table-name t --key \'{"id": {"S": "1"}}\' --output text': "42",
}


USED = {
    *(f"preset/openai/{rule}" for rule in ("inference", "models", "upload", "files")),
    *(f"preset/anthropic/{rule}" for rule in ("messages", "models")),
    *(f"preset/aws/eu-west-1/{rule}" for rule in ("storage", "tables")),
    "preset/huggingface/hub",
}
"""The rules with a secret that the clients use."""


@pytest.fixture(scope="module", name="services")
def _services(stack: Stack, internet: Internet) -> Iterator[Services]:
    made = Services()
    hosts = {
        "openai-api-key": (made.openai, "api.openai.com"),
        "anthropic-api-key": (made.anthropic, "api.anthropic.com"),
        "huggingface-token": (made.huggingface, "huggingface.co"),
        "aws-keys": (":".join(made.aws), AWS_STORAGE, "dynamodb.eu-west-1.amazonaws.com"),
    }
    for name, (value, *places) in hosts.items():
        stack.sallyport("vault", "put", name, *(part for host in places for part in ("--host", host)), stdin=value)
    with served(internet, stand_ins.Handler, made):
        yield made
    for name in hosts:
        stack.sallyport("vault", "delete", name)


@pytest.fixture(scope="module", name="storage")
def _storage(internet: Internet, directory: Path, services: Services) -> Iterator[Storage]:
    with Storage(internet, directory / "aws-storage", services.aws, AWS_STORAGE, AWS_STORAGE_ADDRESS) as storage:
        yield storage


@pytest.fixture(scope="module", name="callers")
def _callers(stack: Stack, storage: Storage, some_runtimes: tuple[str, ...]) -> Iterator[dict[str, SandboxSync]]:
    """Return one sandbox on each runtime with all clients. The region of AWS is no secret: the create call has it."""
    clients = (Path(os.environ["SALLYPORT_CLIENTS"]) / "services.tar.gz").read_bytes()
    options: dict[str, Any] = {
        "env": {"AWS_DEFAULT_REGION": "eu-west-1"},
        "resource": {"cpu": "1", "memory": "2Gi", "disk": "512Mi"},
    }
    made = {runtime: stack.create(runtime, policy="calling", **options) for runtime in some_runtimes}
    for sandbox in made.values():
        sandbox.files.write_file("/tmp/clients.tar.gz", clients)
        sandbox.files.write_file("/tmp/program.py", _PYTHON)
        done(sandbox, "mkdir /tmp/clients && tar -C /tmp/clients -xzf /tmp/clients.tar.gz")
        sandbox.files.write_file("/tmp/clients/program.mjs", _NODE)
    yield made
    for sandbox in made.values():
        sandbox.kill()
        sandbox.close()


def done(sandbox: SandboxSync, command: str) -> str:
    """Run a command among the clients; return its output and errors."""
    settings = "cd /tmp/clients 2>/dev/null; export PYTHONPATH=/tmp/clients/python;"
    return sandbox.commands.run(f"{{ {settings} {command}; }} 2>&1").text


def results(printed: str) -> dict[str, Any]:
    return dict(json.loads(line) for line in printed.splitlines() if line.startswith('["'))


@pytest.mark.extended
def test_each_client_works_under_its_preset(
    stack: Stack, services: Services, storage: Storage, callers: dict[str, SandboxSync], runtime: str
) -> None:
    """SDKs of Python and npm, and command lines, with their own default addresses. No secret comes into the sandbox."""
    services.received.clear()
    sandbox = callers[runtime]
    printed = done(sandbox, "python3 /tmp/program.py; node program.mjs")
    got = results(printed)
    assert EXPECTED == got, printed
    assert b"data" == storage.stored("a/b \u00e9.txt")
    for command, answer in COMMANDS.items():
        answered = done(sandbox, command)
        assert answer in answered, answered
        printed += answered

    openai, anthropic = (services.asked(host) for host in ("api.openai.com", "api.anthropic.com"))
    assert {f"Bearer {services.openai}"} == {one.header("authorization") for one in openai}
    assert {
        ("2023-06-01", services.anthropic, None),  # the documented request
        ("2026-10-21", None, f"Bearer {services.anthropic}"),  # the SDKs
    } == {tuple(map(one.header, ("anthropic-version", "x-api-key", "authorization"))) for one in anthropic}
    holders = {one.host for one in services.received if services.huggingface in str(one.headers)}
    assert {"huggingface.co"} == holders
    assert len(services.asked("us.aws.cdn.hf.co")) >= 1 <= len(services.asked("transfer.xethub.hf.co"))
    ident = str(sandbox.id)
    records = [one for one in stack.audit_records() if one.get("sandbox") == ident]
    uses = {(one["secret"], one["binding"]) for one in records if one["kind"] == "secret.use"}
    assert {binding for _, binding in uses} >= USED
    written = "find /root /tmp /etc /var -newer /tmp/program.py -type f ! -path '/tmp/clients*'"
    seen = done(sandbox, f"env; cat /proc/1/environ ~/.aws/config; {written} -exec cat {{}} +")
    assert "addressing_style = path" in seen
    assert not leaks_in(
        (text.encode() for text in (seen, printed, json.dumps(records))),
        [form for secret in services.secrets for form in forms_of(secret)],
    )


ATTACKS = {
    "keys of the organization": ("api.openai.com", "GET", "/v1/organization/admin_api_keys"),
    "a deletion of a model": ("api.openai.com", "DELETE", "/v1/models/ft:gpt-4o:bank"),
    "a list of files": ("api.openai.com", "GET", "/v1/files"),
    "members of the organization": ("api.anthropic.com", "GET", "/v1/organizations/users"),
    "a batch": ("api.anthropic.com", "POST", "/v1/messages/batches"),
    "a deletion of a repository": ("huggingface.co", "DELETE", "/api/repos/delete"),
    "a commit": ("huggingface.co", "POST", f"/api/models/{REPOSITORY}/commit/main"),
}
_VARIABLES = {
    "api.openai.com": "OPENAI_API_KEY",
    "api.anthropic.com": "ANTHROPIC_API_KEY",
    "huggingface.co": "HF_TOKEN",
}
_AWS = """
import boto3
from botocore.config import Config
once = Config(retries={"total_max_attempts": 1}, connect_timeout=5)
for ask in (lambda: boto3.client("iam", config=once).create_access_key(UserName="admin"),
            lambda: boto3.client("sts", config=once).get_session_token()):
    try:
        print(ask())
    except Exception as error:
        print(type(error).__name__)
"""
_CALLS = {
    "iam.amazonaws.com": ("us-east-1", "CreateAccessKey"),
    "sts.eu-west-1.amazonaws.com": ("eu-west-1", "GetSessionToken"),
}


def asked_directly(
    internet: Internet, host: str, method: str, path: str, headers: dict[str, str], body: bytes = b""
) -> int:
    """Ask a stand-in from the namespace without a gateway; return the status."""
    context = ssl.create_default_context(cafile=str(internet.roots))
    plain = in_namespace(
        internet.path(internet.control), lambda: socket.create_connection((STAND_IN_ADDRESS, 443), timeout=10)
    )
    connection = http.client.HTTPSConnection(host)
    with plain, context.wrap_socket(plain, server_hostname=host) as secured:
        connection.sock = secured
        connection.request(method, path, body, headers)
        return connection.getresponse().status


def credentials(services: Services, host: str) -> dict[str, str]:
    """Return the headers with which the holder of the secret asks a service."""
    known = {"api.openai.com": services.openai, "huggingface.co": services.huggingface}
    if host == "api.anthropic.com":
        return {"x-api-key": services.anthropic, "anthropic-version": "2023-06-01"}
    return {"Authorization": f"Bearer {known[host]}"}


def signed(keys: tuple[str, str], host: str, body: bytes) -> dict[str, str]:
    """Return the headers of a POST request to AWS, signed with botocore."""
    request = AWSRequest("POST", f"https://{host}/", data=body)
    SigV4Auth(Credentials(*keys), host.partition(".")[0], _CALLS[host][0]).add_auth(request)
    return dict(request.headers)


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_what_a_preset_does_not_allow_does_not_arrive(
    internet: Internet, services: Services, callers: dict[str, SandboxSync], runtime: str
) -> None:
    """What a prompt injection would ask of the same hosts. The service would have done it: the control."""
    sandbox = callers[runtime]
    for name, (host, method, path) in ATTACKS.items():
        services.received.clear()
        key = f'-H "Authorization: Bearer ${_VARIABLES[host]}"'
        answered = done(sandbox, f"curl -sS -X {method} {key} -w '%{{http_code}}' https://{host}{path}")
        assert "Denied by policy rule" in answered and answered.endswith("403"), (name, answered)
        assert [] == services.received, name
        right = credentials(services, host)
        wrong = {header: value + "x" for header, value in right.items()}
        assert (200, 401) == tuple(asked_directly(internet, host, method, path, one) for one in (right, wrong)), name
    services.received.clear()
    sandbox.files.write_file("/tmp/aws.py", _AWS)
    assert ["EndpointConnectionError"] * 2 == done(sandbox, "python3 /tmp/aws.py").split()
    assert [] == services.received
    for host, (_, action) in _CALLS.items():
        body = f"Action={action}&Version=2011-06-15".encode()
        right, wrong = (signed(keys, host, body) for keys in (services.aws, (services.aws[0], "x" * 40)))
        assert (200, 400) == tuple(asked_directly(internet, host, "POST", "/", one, body) for one in (right, wrong))


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_the_storage_of_the_hub_gets_no_token(
    services: Services, callers: dict[str, SandboxSync], runtime: str
) -> None:
    """A presigned address works, with the query keys of its signature. The same with the placeholder is refused."""
    services.received.clear()
    url = services.presigned("us.aws.cdn.hf.co", "/xet-bridge-us/1/2")
    ask = f"curl -sS -o /dev/null -w '%{{http_code}}' '{url}'"
    assert "403" == done(callers[runtime], f'{ask} -H "Authorization: Bearer $HF_TOKEN"')
    assert [] == services.received
    assert "200" == done(callers[runtime], ask)


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_policy_without_the_presets_reaches_none_of_the_services(
    stack: Stack, services: Services, runtime: str
) -> None:
    services.received.clear()
    with stack.create(runtime, policy="installing") as sandbox:
        for host in (*_VARIABLES, AWS_STORAGE):
            assert "Could not resolve host" in done(sandbox, f"curl -sS https://{host}/v1/models")
        sandbox.kill()
    assert [] == services.received
