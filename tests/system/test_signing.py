"""Signatures of requests in sandboxes, verified at the far end by servers that know nothing of the gateway.

They test `gateway/signing/signer.py` in real workers. The object store is versitygw. Other requests are verified with
botocore's signer, from what the server received.
"""

import hmac
import json
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from opensandbox.sync.sandbox import SandboxSync

from testbed.internet import STATUS, STORAGE, Internet
from testbed.leaks import forms_of, leaks_in
from testbed.stack import Stack
from testbed.storage import BUCKET, REGION, Storage
from tests.conftest import ON_RUNC
from tests.gateway.signing.aws_server import Keys, verify
from tests.system import boto

pytestmark = pytest.mark.system

PROGRAM = '''
import hashlib, http.client, io, json, sys, urllib.request
import boto3
from boto3.s3.transfer import TransferConfig
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

HOST, BUCKET = sys.argv[1:3]
KEY, BIG = "reports/a b-\\u00e9.txt", bytes(range(256)) * 36864


def client(**options):
    config = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}, **options)
    return boto3.client("s3", endpoint_url="https://" + HOST, config=config)


def chunks():
    """Upload in signed chunks, as SDKs in other languages do. The signatures are of no key."""
    hollow, data = "0" * 64, [b"a" * 65536, b"b" * 1000]
    body = b"".join(b"%x;chunk-signature=%s\\r\\n%s\\r\\n" % (len(one), hollow.encode(), one) for one in [*data, b""])
    scope = "20200101/eu-west-1/s3/aws4_request"
    signed = "AWS4-HMAC-SHA256 Credential=PLACEHOLDER/%s, SignedHeaders=host, Signature=" % scope
    connection = http.client.HTTPSConnection(HOST)
    connection.request("PUT", "/%s/chunks" % BUCKET, body, {
        "Authorization": signed + hollow, "X-Amz-Date": "20200101T000000Z", "Content-Encoding": "aws-chunked",
        "X-Amz-Content-Sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        "X-Amz-Decoded-Content-Length": str(sum(map(len, data))),
    })
    answer = connection.getresponse()
    return [answer.status, answer.read().decode()[:300]]


def big():
    parts = TransferConfig(multipart_threshold=1 << 22, multipart_chunksize=5 << 20, use_threads=False)
    client().upload_fileobj(io.BytesIO(BIG), BUCKET, "big", Config=parts)
    loaded = io.BytesIO()
    client().download_fileobj(BUCKET, "big", loaded, Config=parts)
    return loaded.getvalue() == BIG


def presigned():
    made = client(signature_version="s3v4").generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": KEY})
    return urllib.request.urlopen(made).read().decode()


STEPS = {
    "put": lambda: client().put_object(Bucket=BUCKET, Key=KEY, Body=b"data")["ResponseMetadata"]["HTTPStatusCode"],
    "get": lambda: client().get_object(Bucket=BUCKET, Key=KEY)["Body"].read().decode(),
    "stream": lambda: client().put_object(Bucket=BUCKET, Key="stream", Body=io.BufferedReader(io.BytesIO(b"stream")))[
        "ResponseMetadata"]["HTTPStatusCode"],
    "unsigned": lambda: client(signature_version=UNSIGNED).get_object(Bucket=BUCKET, Key=KEY)["Body"].read().decode(),
    "list": lambda: [one["Key"] for one in client().list_objects_v2(Bucket=BUCKET, Prefix="reports/")["Contents"]],
    "big": big,
    "presigned": presigned,
    "chunks": chunks,
}
for name in sys.argv[3:]:
    try:
        result = STEPS[name]()
    except ClientError as error:
        result = [error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]]
    except Exception as error:
        result = [type(error).__name__, str(error)[:300]]
    print(json.dumps([name, result]))
'''
"""The client in the sandbox. It prints a line for each step."""
PLACEHOLDERS = "AWS_ACCESS_KEY_ID=PLACEHOLDER AWS_SECRET_ACCESS_KEY=placeholder"
"""Keys of a client. In the first test policy gives placeholders of its own."""


@pytest.fixture(scope="module", name="storage")
def _storage(stack: Stack, internet: Internet, directory: Path) -> Iterator[Storage]:
    """Run the object store. The vault has its keys, and others with the same id that are wrong."""
    keys = f"AKID{secrets.token_hex(6).upper()}", secrets.token_urlsafe(30)
    with Storage(internet, directory / "storage", keys) as storage:
        stack.sallyport("vault", "put", "storage-keys", "--host", STORAGE, stdin=":".join(keys))
        stack.sallyport("vault", "put", "wrong-keys", "--host", STORAGE, stdin=f"{keys[0]}:{secrets.token_urlsafe(30)}")
        yield storage


@pytest.fixture(scope="module", name="keys")
def _keys(stack: Stack) -> tuple[Keys, str]:
    """Store keys with a session token, and a key for hashes. The status host has no opinion of them."""
    keys, key = Keys(secrets.token_urlsafe(30), secrets.token_urlsafe(60)), secrets.token_hex(32)
    stack.sallyport("vault", "put", "service-keys", "--host", STATUS, stdin=f"AKIDSERVICE:{keys.secret}:{keys.token}")
    stack.sallyport("vault", "put", "hook-key", "--host", STATUS, stdin=key)
    return keys, key


def derived(key: str) -> str:
    """Return the key that is derived from a secret key today, in hexadecimal."""
    made = b"AWS4" + key.encode()
    for part in (datetime.now(UTC).strftime("%Y%m%d"), REGION, "s3", "aws4_request"):
        made = hmac.new(made, part.encode(), "sha256").digest()
    return made.hex()


def boto3_in(sandbox: SandboxSync) -> None:
    sandbox.files.write_file("/tmp/boto.zip", boto.archive())
    sandbox.files.write_file("/tmp/program.py", PROGRAM)
    done = sandbox.commands.run(f"python3 -m zipfile -e /tmp/boto.zip {boto.PLACE}")
    assert done.exit_code == 0, done.text


def results(sandbox: SandboxSync, *steps: str, keys: str = "") -> dict[str, Any]:
    settings = f"PYTHONPATH={boto.PLACE} AWS_DEFAULT_REGION=us-east-1 {keys}"
    command = f"{settings} python3 /tmp/program.py {STORAGE} {BUCKET} {' '.join(steps)} 2>&1"
    lines = sandbox.commands.run(command).text.splitlines()
    return dict(map(json.loads, lines))


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_boto3_with_placeholder_keys_uses_an_object_store(stack: Stack, storage: Storage, runtime: str) -> None:
    """Whole objects, parts of objects, presigned URLs, and uploads in signed chunks. No key comes into the sandbox."""
    with stack.create(runtime, policy="signing") as sandbox:
        boto3_in(sandbox)
        got = results(sandbox, "put", "get", "stream", "unsigned", "list", "big", "presigned", "chunks")
        seen = sandbox.commands.run("env; cat /proc/1/environ; ").text
        ident = str(sandbox.id)
        sandbox.kill()

    assert {
        "put": 200,
        "get": "data",
        "stream": 200,
        "unsigned": "data",
        "list": ["reports/a b-\u00e9.txt"],
        "big": True,
        "presigned": "data",
        "chunks": [200, ""],
    } == got
    assert (b"data", b"stream") == (storage.stored("reports/a b-\u00e9.txt"), storage.stored("stream"))
    assert b"a" * 65536 + b"b" * 1000 == storage.stored("chunks")
    records = [one for one in stack.audit_records() if one.get("sandbox") == ident]
    uses = [one for one in records if one["kind"] == "secret.use"]
    assert uses and {("storage-keys", "signing/storage")} == {(one["secret"], one["binding"]) for one in uses}
    texts = [seen.encode(), json.dumps(records).encode(), json.dumps(got).encode()]
    assert not leaks_in(texts, [*forms_of(storage.keys[1]), derived(storage.keys[1]).encode()])


def test_the_object_store_refuses_a_signature_of_another_key(stack: Stack, storage: Storage) -> None:
    """The control: the server verifies heads, chunks and queries, and stores nothing."""
    before = storage.stored("reports/a b-\u00e9.txt"), storage.stored("chunks")
    with stack.create("runc", policy="missigning") as sandbox:
        boto3_in(sandbox)
        got = results(sandbox, "put", "chunks", "presigned", keys=PLACEHOLDERS)
        sandbox.kill()

    assert [403, "SignatureDoesNotMatch"] == got["put"]
    assert 403 == got["chunks"][0] and "SignatureDoesNotMatch" in got["chunks"][1]
    assert "403" in str(got["presigned"])
    assert before == (storage.stored("reports/a b-\u00e9.txt"), storage.stored("chunks"))


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_other_services_get_a_signature_over_the_body(
    stack: Stack, internet: Internet, keys: tuple[Keys, str], runtime: str
) -> None:
    """A client that does not sign. The signature is that of the received bytes, with a session token."""
    mark, known = secrets.token_hex(8), {"AKIDSERVICE": keys[0]}
    with stack.create(runtime, policy="signing") as sandbox:
        ask = f"curl -sS -X POST https://{STATUS}/service/{mark}?b=2\\&a=%2F -H 'X-Amz-Target: T.Get' -d '{{\"a\": 1}}'"
        assert "this is status" in sandbox.commands.run(ask).text
        sandbox.kill()

    (note,) = [one for one in internet.notes() if mark in one.get("target", "")]
    found = verify("POST", note["target"], note["headers"], note["body"].encode(), known, datetime.now(UTC))
    assert ("AKIDSERVICE", REGION, "dynamodb", b'{"a": 1}') == (found.key_id, found.region, found.service, found.body)
    assert "x-amz-target" in found.signed


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_webhook_gets_a_keyed_hash(stack: Stack, internet: Internet, keys: tuple[Keys, str], runtime: str) -> None:
    """The hash covers time, target and body, and replaces what the client sent."""
    mark = secrets.token_hex(8)
    with stack.create(runtime, policy="signing") as sandbox:
        ask = f"curl -sS https://{STATUS}/hook/{mark} -H 'X-Signature: mine' -H 'X_Timestamp: 1' -d 'x=1&y=2'"
        assert "this is status" in sandbox.commands.run(ask).text
        sandbox.kill()

    (note,) = [one for one in internet.notes() if mark in one.get("target", "")]
    named = [(name.lower().replace("_", "-"), value) for name, value in note["headers"]]
    (signature,) = [value for name, value in named if name == "x-signature"]
    (time,) = [value for name, value in named if name == "x-timestamp"]
    text = f"{time}.POST.{note['target']}.{note['body']}"
    assert abs(datetime.now(UTC).timestamp() - int(time)) < 300
    assert "v1=" + hmac.new(keys[1].encode(), text.encode(), "sha256").hexdigest() == signature
