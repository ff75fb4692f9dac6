"""Stand-ins of OpenAI, Anthropic, Hugging Face and AWS for the tests of the presets.

Each checks what the real service checks (the credential, its header, the version header, the signature of a presigned
address or of a request) and answers in the shape that the service documents. A request that a preset must not let
through is answered, too: only the policy keeps it away. Everything that arrives is kept in `Services.received`.
"""

import base64
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from testbed.stand_ins import Server
from tests.gateway.signing.aws_server import Keys, Refused, verify

REPOSITORY = "bank/ledger-model"
COMMIT = "5e1f" * 10
CONFIG = b'{"model_type": "ledger"}'
WEIGHTS = bytes(range(256)) * 512
XET_HASH = "ab" * 32
XORB = "cd" * 32
FILE_ID = "file-0123456789abcdef"
REPLY = "four eyes"
_JSON = "application/json"

type Answer = tuple[int, bytes, Mapping[str, str]]


@dataclass(frozen=True)
class Received:
    """One request, as it arrived."""

    host: str
    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass
class Services:
    """The accounts and what arrived. The credentials are of no real service."""

    openai: str = field(default_factory=lambda: f"sk-proj-{secrets.token_hex(24)}")
    anthropic: str = field(default_factory=lambda: f"sk-ant-api03-{secrets.token_hex(24)}")
    huggingface: str = field(default_factory=lambda: f"hf_{secrets.token_hex(17)}")
    aws: tuple[str, str] = field(
        default_factory=lambda: (f"AKIA{secrets.token_hex(8).upper()}", secrets.token_urlsafe(30))
    )
    received: list[Received] = field(default_factory=list)
    items: dict[str, Any] = field(default_factory=dict)
    uploaded: list[bytes] = field(default_factory=list)
    presigning: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    @property
    def secrets(self) -> tuple[str, ...]:
        """The values that no sandbox may have."""
        return self.openai, self.anthropic, self.huggingface, self.aws[1]

    def asked(self, host: str) -> list[Received]:
        return [one for one in self.received if one.host == host]

    def presigned(self, host: str, path: str) -> str:
        """Return an address of a file with a signature."""
        return f"https://{host}{path}?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature={self.signature(host, path)}"

    def signature(self, host: str, path: str) -> str:
        return hmac.new(self.presigning, f"{host}{path}".encode(), "sha256").hexdigest()


def _json(status: int, value: Any, **headers: str) -> Answer:
    return status, json.dumps(value).encode(), {"Content-Type": _JSON, **headers}


def _events(*events: tuple[str, Any]) -> Answer:
    """Return a stream of server-sent events; one without a name has its data only."""
    text = "".join(
        (f"event: {name}\n" if name else "") + f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n"
        for name, value in events
    )
    return 200, text.encode(), {"Content-Type": "text/event-stream; charset=utf-8"}


# ---- OpenAI


def openai(services: Services, asked: Received) -> Answer:
    """https://platform.openai.com/docs/api-reference"""
    if asked.header("authorization") != f"Bearer {services.openai}":
        error = {"message": "Incorrect API key provided.", "type": "invalid_request_error", "param": None}
        return _json(401, {"error": {**error, "code": "invalid_api_key"}})
    match asked.method, asked.path:
        case "POST", "/v1/chat/completions":
            return _completion(json.loads(asked.body))
        case "POST", "/v1/responses":
            return _response(json.loads(asked.body))
        case "POST", "/v1/embeddings":
            wanted = json.loads(asked.body)
            numbers = [0.25, -0.5]
            encoded = base64.b64encode(struct.pack("<2f", *numbers)).decode()
            vector = encoded if wanted.get("encoding_format") == "base64" else numbers
            item = {"object": "embedding", "index": 0, "embedding": vector}
            usage = {"prompt_tokens": 1, "total_tokens": 1}
            return _json(200, {"object": "list", "data": [item], "model": wanted["model"], "usage": usage})
        case "POST", "/v1/files":
            return _openai_upload(services, asked)
        case "GET", path if path == f"/v1/files/{FILE_ID}/content":
            return 200, services.uploaded[-1], {"Content-Type": "application/octet-stream"}
        case "GET", "/v1/models":
            model = {"id": "gpt-4o", "object": "model", "created": 1, "owned_by": "system"}
            return _json(200, {"object": "list", "data": [model]})
    return _json(200, {"object": "list", "data": [], "has_more": False})


def _completion(wanted: dict[str, Any]) -> Answer:
    base = {"id": "chatcmpl-1", "created": 1, "model": wanted["model"]}
    if not wanted.get("stream"):
        message = {"role": "assistant", "content": REPLY, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        return _json(200, {**base, "object": "chat.completion", "choices": [choice], "usage": usage})
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}, *({"content": one} for one in REPLY)]
    parts = [{**base, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": one}]} for one in deltas]
    return _events(*(("", part) for part in parts), ("", "[DONE]"))


def _response(wanted: dict[str, Any]) -> Answer:
    content = {"type": "output_text", "text": REPLY, "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [content]}
    common = {"id": "resp_1", "object": "response", "created_at": 1, "model": wanted["model"]}
    made = {**common, "status": "completed", "output": [message], "tools": [], "parallel_tool_calls": True}
    if not wanted.get("stream"):
        return _json(200, made)
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
    deltas = [{"type": "response.output_text.delta", "delta": one, **place} for one in REPLY]
    events = [{"type": "response.created", "response": {**made, "output": []}}, *deltas]
    events.append({"type": "response.completed", "response": made})
    return _events(*((one["type"], {**one, "sequence_number": number}) for number, one in enumerate(events)))


def _openai_upload(services: Services, asked: Received) -> Answer:
    head = f"Content-Type: {asked.header('content-type')}\r\n\r\n".encode()
    parts: dict[str, Message] = {
        str(part.get_param("name", header="content-disposition")): part
        for part in BytesParser(policy=HTTP).parsebytes(head + asked.body).iter_parts()  # type: ignore[attr-defined]
    }
    if set(parts) != {"purpose", "file"}:
        return _json(400, {"error": {"message": "purpose and file are required", "type": "invalid_request_error"}})
    content = parts["file"].get_payload(decode=True)
    assert isinstance(content, bytes)
    services.uploaded.append(content)
    about = {"filename": parts["file"].get_filename(), "purpose": "user_data", "status": "processed"}
    return _json(200, {"id": FILE_ID, "object": "file", "bytes": len(content), "created_at": 1, **about})


# ---- Anthropic


def anthropic(services: Services, asked: Received) -> Answer:
    """https://docs.anthropic.com/en/api/messages, and what the SDKs send. The key is in one header."""
    given = {"x-api-key": asked.header("x-api-key"), "authorization": asked.header("authorization")}
    wanted = {"x-api-key": services.anthropic, "authorization": f"Bearer {services.anthropic}"}
    (name, key), *more = [(name, value) for name, value in given.items() if value is not None] or [("", None)]
    if more or key is None or key != wanted[name]:
        return _anthropic_error(401, "authentication_error", "invalid x-api-key")
    if asked.header("anthropic-version") not in ("2023-06-01", "2026-10-21"):
        return _anthropic_error(400, "invalid_request_error", "anthropic-version: header is required")
    match asked.method, asked.path:
        case "POST", "/v1/messages":
            return _message(json.loads(asked.body))
        case "POST", "/v1/messages/count_tokens":
            return _json(200, {"input_tokens": 7})
        case "GET", "/v1/models":
            model = {"type": "model", "id": "claude-1", "display_name": "One", "created_at": "2026-01-01T00:00:00Z"}
            return _json(200, {"data": [model], "has_more": False, "first_id": "claude-1", "last_id": "claude-1"})
    return _json(200, {"data": [], "has_more": False})


def _anthropic_error(status: int, kind: str, message: str) -> Answer:
    return _json(status, {"type": "error", "error": {"type": kind, "message": message}})


def _message(wanted: dict[str, Any]) -> Answer:
    base = {"id": "msg_1", "type": "message", "role": "assistant", "model": wanted["model"], "stop_sequence": None}
    usage = {"input_tokens": 1, "output_tokens": 2}
    if not wanted.get("stream"):
        content = [{"type": "text", "text": REPLY}]
        return _json(200, {**base, "content": content, "stop_reason": "end_turn", "usage": usage})
    started = {**base, "content": [], "stop_reason": None, "usage": usage}
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": one}} for one in REPLY
    ]
    ended = {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage}
    events = [
        *({"type": "message_start", "message": started}, block, {"type": "ping"}, *deltas),
        *({"type": "content_block_stop", "index": 0}, ended, {"type": "message_stop"}),
    ]
    return _events(*((str(one["type"]), one) for one in events))


# ---- Hugging Face


def huggingface(services: Services, asked: Received) -> Answer:
    """https://huggingface.co/docs/hub/api, and what huggingface_hub reads of the answers."""
    if asked.header("authorization") != f"Bearer {services.huggingface}":
        return _json(401, {"error": "Invalid username or password."}, **{"X-Error-Message": "Invalid credentials"})
    api, files = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/"
    weights = hashlib.sha256(WEIGHTS).hexdigest()
    lfs = {"oid": weights, "size": len(WEIGHTS), "pointerSize": 134}
    tree = [
        {"type": "file", "oid": "0" * 40, "size": len(CONFIG), "path": "config.json"},
        {"type": "file", "oid": "1" * 40, "size": len(WEIGHTS), "path": "big.bin", "lfs": lfs, "xetHash": XET_HASH},
    ]
    if asked.method not in ("GET", "HEAD"):
        return _json(200, {})
    if asked.path == "/api/whoami-v2":
        return _json(
            200, {"type": "user", "id": "1", "name": "ledger-bot", "orgs": [], "auth": {"type": "access_token"}}
        )
    if asked.path == f"{api}/xet-read-token/{COMMIT}":
        made = {"accessToken": _cas_token(services), "exp": 4102444800, "casUrl": "https://cas-server.xethub.hf.co"}
        names = {"X-Xet-Access-Token": "accessToken", "X-Xet-Token-Expiration": "exp", "X-Xet-Cas-Url": "casUrl"}
        return _json(200, made, **{name: str(made[key]) for name, key in names.items()})
    if asked.path.startswith(f"{api}/tree/"):
        return _json(200, tree)
    if asked.path.startswith(api):
        siblings = [{"rfilename": one["path"]} for one in tree]
        return _json(200, {"_id": "1", "id": REPOSITORY, "sha": COMMIT, "private": True, "siblings": siblings})
    common = {"X-Repo-Commit": COMMIT}
    if asked.path.startswith(files) and asked.path.endswith("/config.json"):
        return 200, CONFIG, {**common, "ETag": f'"{"0" * 40}"', "Content-Type": _JSON}
    if asked.path.startswith(files) and asked.path.endswith("/big.bin"):
        found = services.presigned("us.aws.cdn.hf.co", f"/xet-bridge-us/1/{weights}")
        route = f'<https://huggingface.co{api}/xet-read-token/{COMMIT}>; rel="xet-auth"'
        linked = {"X-Linked-Etag": f'"{weights}"', "X-Linked-Size": str(len(WEIGHTS)), "ETag": '"x"'}
        return 302, b"Found", {**common, **linked, "Location": found, "X-Xet-Hash": XET_HASH, "Link": route}
    return _json(404, {"error": "Entry not found"}, **{"X-Error-Code": "EntryNotFound", **common})


def _cas_token(services: Services) -> str:
    return "cas." + hmac.new(services.presigning, b"cas", "sha256").hexdigest()


def presigned_file(services: Services, asked: Received) -> Answer:
    """Serve the weights to the holder of the address, and to no token."""
    given = parse_qs(asked.query).get("X-Amz-Signature", [""])[0]
    if asked.header("authorization") is not None or given != services.signature(asked.host, asked.path):
        return 403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>", {"Content-Type": "application/xml"}
    content = xorb() if asked.host.startswith("transfer.") else WEIGHTS
    wanted = asked.header("range")
    if wanted is None:
        return 200, content, {"Content-Type": "application/octet-stream"}
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    part = content[int(first) : int(last or len(content) - 1) + 1]
    end = int(first) + len(part) - 1
    return 206, part, {"Content-Range": f"bytes {first}-{end}/{len(content)}"}


def xorb() -> bytes:
    """Return the weights in two uncompressed chunks: https://huggingface.co/docs/xet/xorb"""
    parts = [WEIGHTS[: 1 << 16], WEIGHTS[1 << 16 :]]
    return b"".join(
        b"\0" + len(one).to_bytes(3, "little") + b"\0" + len(one).to_bytes(3, "little") + one for one in parts
    )


def cas(services: Services, asked: Received) -> Answer:
    """https://huggingface.co/docs/xet/api"""
    if asked.header("authorization") != f"Bearer {_cas_token(services)}":
        return _json(401, {"error": "Unauthorized"})
    if asked.path != f"/v1/reconstructions/{XET_HASH}":
        return _json(404, {"error": "not found"})
    chunks, octets = {"start": 0, "end": 2}, {"start": 0, "end": len(xorb()) - 1}
    url = services.presigned("transfer.xethub.hf.co", f"/xorb/default/{XORB}")
    term = {"hash": XORB, "unpacked_length": len(WEIGHTS), "range": chunks}
    fetched = {XORB: [{"range": chunks, "url": url, "url_range": octets}]}
    return _json(200, {"offset_into_first_range": 0, "terms": [term], "fetch_info": fetched})


# ---- AWS


def aws(services: Services, asked: Received) -> Answer:
    """DynamoDB, and IAM and STS as far as the tests ask them."""
    keys = {services.aws[0]: Keys(services.aws[1])}
    target = asked.path + (f"?{asked.query}" if asked.query else "")
    try:
        found = verify(asked.method, target, asked.headers, asked.body, keys, datetime.now(UTC))
    except Refused as refused:
        kind = "com.amazon.coral.service#InvalidSignatureException"
        return _json(400, {"__type": kind, "message": str(refused)}, **{"X-Why": str(refused)})
    if found.service != "dynamodb":
        return 200, b"<Response><AccessKeyId>AKIANEW</AccessKeyId></Response>", {"Content-Type": "text/xml"}
    wanted = json.loads(asked.body)
    match asked.header("x-amz-target"):
        case "DynamoDB_20120810.PutItem":
            services.items[wanted["Item"]["id"]["S"]] = wanted["Item"]
            return _json(200, {})
        case "DynamoDB_20120810.GetItem":
            item = services.items.get(wanted["Key"]["id"]["S"])
            return _json(200, {"Item": item} if item else {})
    return _json(400, {"__type": "com.amazon.coral.service#UnknownOperationException"})


HOSTS: Mapping[str, Callable[[Services, Received], Answer]] = {
    "api.openai.com": openai,
    "api.anthropic.com": anthropic,
    "huggingface.co": huggingface,
    "us.aws.cdn.hf.co": presigned_file,
    "transfer.xethub.hf.co": presigned_file,
    "cas-server.xethub.hf.co": cas,
    "dynamodb.eu-west-1.amazonaws.com": aws,
    "iam.amazonaws.com": aws,
    "sts.eu-west-1.amazonaws.com": aws,
}


class Handler(BaseHTTPRequestHandler):
    """One request to any of the services."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing to standard error."""

    def _any(self) -> None:
        services: Services = self.server.services
        parts = urlsplit(self.path)
        host = str(self.headers["Host"]).partition(":")[0]
        asked = Received(host, self.command, parts.path, parts.query, tuple(self.headers.items()), self._body())
        services.received.append(asked)
        known = HOSTS.get(host)
        status, body, headers = known(services, asked) if known else _json(404, {})
        self.send_response(status)
        streamed = headers.get("Content-Type", "").startswith("text/event-stream")
        own = {"Transfer-Encoding": "chunked"} if streamed else {"Content-Length": str(len(body))}
        for name, value in {**headers, **own}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            for piece in _chunks(body) if streamed else [body]:
                self.wfile.write(piece)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(body)


def _chunks(body: bytes) -> Iterator[bytes]:
    """Return each event in a chunk of its own."""
    for event in body.split(b"\n\n")[:-1]:
        yield b"%x\r\n%s\n\n\r\n" % (len(event) + 2, event)
    yield b"0\r\n\r\n"
