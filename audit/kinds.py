"""The meaning and the fields of each kind of record. docs/audit-records.md is generated from this table.

Pure.

- The kinds are those of `audit.producers`, the fields those of `audit.records`. A test compares both.
- A field has one meaning in all kinds.
- The table describes. auditd enforces the kinds of a producer and the types of the fields, not the fields of a kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of record."""

    meaning: str
    fields: frozenset[str]
    """Names of the fields, beside those of every record. A record omits fields that do not apply."""
    decision: str
    example: Mapping[str, Any]


COMMON: Final[Mapping[str, tuple[str, str]]] = {
    "ts": ("time", "when auditd wrote the record: RFC 3339, UTC, milliseconds"),
    "kind": ("text", "the kind of the record"),
    "decision": ("text", "`allow`, `deny`, `observe` (permitted only because the policy does not enforce) or `info`"),
    "producer": ("text", "the component that wrote the record; auditd takes it from the channel"),
    "chain": ("text", "the chain the record belongs to: a sandbox id or `control`"),
    "seq": ("integer", "the place in the chain, from 1"),
    "prev": ("SHA-256", "the hash of the chain's previous line"),
    "hash": ("SHA-256", "the hash of this line"),
    "sandbox": ("text", "the sandbox that the record is about"),
    "generation": ("integer", "the generation of the gateway worker that wrote the record"),
    "accepted": (
        "time",
        "when the worker put the record into its ring, by the worker's clock, if that was more than 50 ms before `ts`",
    ),
    "clock_back": ("time", "the time of the previous line, if the clock was set back since"),
}
"""Type and meaning of the fields that auditd adds to every record. `sandbox` can also come from a producer."""

SIGNED: Final[Mapping[str, tuple[str, str]]] = {
    "key": ("SHA-256", "fingerprint of the key that signed the checkpoint"),
    "signature": ("base64", "Ed25519 signature of the checkpoint without `signature` and `hash`"),
    "log": ("SHA-256", "the hash over all lines before the checkpoint"),
    "heads": ("object", "sequence number and hash of each open chain, by chain"),
    "file": ("integer", "the number of the log file that begins here"),
    "boot": ("text", "the boot id of the host"),
    "closed": ("boolean", "the chain ends here: its sandbox was removed"),
    "next": ("hexadecimal", "the public key that signs from here on"),
}
"""Type and meaning of the fields that only a checkpoint has."""

FIELDS: Final[Mapping[str, str]] = {
    "action": "`scrub`: responses are searched for the secret, which is not sent; `login`: it is a registry's login",
    "actor": "the uid of the process that requested the change, for example `uid:0`",
    "alias": "a further name of the image",
    "address": "the address that the worker dials; of an `ingress` record, the sandbox's own",
    "addresses": "the addresses that the gateway may dial; the answer has those of IPv4, or else 192.0.0.8",
    "asked_host": "the name that a refused request had in place of `host`, in Host, `:authority` or its target",
    "binding": "the name of the rule or credential binding that injects a secret",
    "bytes_down": "bytes towards the sandbox (of an `ingress` record: towards the caller)",
    "bytes_up": "bytes from the sandbox (of an `ingress` record: from the caller)",
    "code": "the machine-readable cause",
    "count": "how many events the record stands for; `drop`: since launch; `vault.open`, `vault.regrant`: grants; "
    "`vault.refer`: references",
    "database": "the name of the database that the session is for",
    "cpu_nanos": "processor time limit, in billionths of a processor",
    "destination": "the address to which the sandbox sent its packets",
    "detail": "when hostd saw what raised the alarm",
    "digest": "the digest of the image's configuration, which is its id",
    "disk_bytes": "size of the sandbox's disk",
    "duration_ms": "time from the decision to the end of the response",
    "engine": "the engine that inspected the flow",
    "entry": "the entry of `always_deny` or `always_allow` that `rule` names",
    "error": "what went wrong",
    "expires": "when the signed route expires, in seconds since 1970",
    "flow": "id of the TCP flow",
    "host": "the name that the flow, request or query is for; policy judged this name",
    "hosts": "the hosts that the secret is bound to, or that the grants name",
    "image": "the name of the image",
    "pool": "the pool: in records of a sandbox with the mark of its creation after `@`",
    "injections": "the bindings whose secrets the request gets",
    "lease_seconds": "how long the worker may use the released secret",
    "lineage": "the CA lineage of the sandbox",
    "memory_bytes": "memory limit",
    "method": "the request's method",
    "name": "the named policy that is out of force or in force again",
    "observed": "the rule that would have denied",
    "path": "the request's path, without its query",
    "peer": "address and port inside the sandbox that the connection came from",
    "peer_name": "the name in the server's verified certificate that `host` matched",
    "policy": "digest of the policy in force",
    "policy_name": "name of the policy in force",
    "port": "the destination port",
    "qtype": "the type of the DNS query",
    "reason": "the cause, for a person",
    "request_id": "id of the request",
    "rule": "the rule that decided; `docs/policy-reference.md` lists the ids",
    "runtime": "the runtime of the sandbox",
    "scheme": "`http`, `https` or `postgres`",
    "forwarded": "the credential slots of the client that policy lets pass",
    "stripped": "the credential slots of the client that the gateway left out",
    "secret": "the name of the secret, never its value",
    "secrets": "the names of the secrets that the sandbox is granted",
    "source": "where the image is from: a name in a registry, a file, or Docker",
    "snapshot": "the id of the snapshot",
    "state": "`restarted`: auditd went on with an existing log",
    "status": "the response's status code",
    "target_generation": "the generation of the worker that the secret or certificate is for",
    "torn": "the bytes that auditd truncated at the end of the log after a crash",
    "treatment": "`splice` (relayed unread) or `inspect`",
    "user": "the user of the database server that the gateway logs in as",
    "volume": "the name of the named volume",
    "volumes": "source, place inside, `ro` or `rw`, and `deleted-with-sandbox` of each volume; names and paths only",
    "websocket": "the request asks for a WebSocket; in an outcome with `reason`, the end of an accepted one",
}
"""The meaning of each field that a producer writes; `audit.records` has its type and bound."""

_POLICY = ("policy", "policy_name", "entry")
_PLACE = ("flow", "host", "port", "scheme", "destination")
_VERDICT = ("rule", "reason", "observed", *_POLICY)
_REQUEST = (*_PLACE, "peer", "engine", "method", "path", "database", "user")
_GRANTS = ("secrets", "hosts", "count", "actor")
_SHORTFALL = ("policy", "code", "name", "binding", "reason", "count")

_FLOW = {"flow": "f7", "host": "api.example.com", "port": 443, "scheme": "https", "destination": "203.0.113.9"}
_OF_POLICY = {"policy": "sha256:5f2b", "policy_name": "agents"}
_SENT = {**_FLOW, "method": "GET", "path": "/v1/me"}


def _kind(meaning: str, fields: tuple[str, ...], decision: str, **example: object) -> Kind:
    return Kind(meaning, frozenset(fields), decision, example)


DESCRIBED: Final[Mapping[str, Kind]] = {
    "dns": _kind(
        "A DNS query of the sandbox: the verdict on the name, then (`info`) the answer.",
        (*_VERDICT, "host", "qtype", "addresses", "count"),
        "deny",
        **{"host": "tracker.example.net", "qtype": "A", "rule": "default", "reason": "no rule matched", **_OF_POLICY},
    ),
    "flow": _kind(
        "A TCP flow: the verdict on the connection, and (`info`) the end of a spliced flow with its byte counts.",
        (*_VERDICT, *_PLACE, "treatment", "asked_host", "address", "bytes_up", "bytes_down", "engine", "count"),
        "allow",
        **{**_FLOW, "rule": "agents/docs", "treatment": "splice", **_OF_POLICY},
    ),
    "connect": _kind(
        "A dial: written before it, once for each address. `info`: the server's certificate was verified, "
        "before the first byte of a request.",
        (*_VERDICT, *_PLACE, "address", "peer", "peer_name", "engine", "request_id"),
        "info",
        **{**_FLOW, "address": "203.0.113.9", "peer_name": "*.example.com", "request_id": "r1"},
    ),
    "request": _kind(
        "A request of an inspected flow, or a database session: the verdict before it, and (`info`) the outcome.",
        (
            *_VERDICT,
            *_REQUEST,
            *("request_id", "websocket", "injections", "stripped", "forwarded", "secret"),
            *("asked_host", "address", "peer_name"),
            *("status", "error", "bytes_up", "bytes_down", "duration_ms"),
        ),
        "deny",
        **{**_SENT, "method": "POST", "rule": "default", "reason": "no rule matched", **_OF_POLICY},
    ),
    "secret.use": _kind(
        "A secret is put into a request, or logs in to a database server. Written before the request or login is sent. "
        "`info`: the secret is not put into it, because its placeholder is absent.",
        (*_REQUEST, *_POLICY, "rule", "secret", "binding", "reason"),
        "allow",
        **{**_SENT, "rule": "agents/api", "secret": "api-token", "binding": "agents/api", **_OF_POLICY},
    ),
    "ingress": _kind(
        "A connection into the sandbox (`allow`) and its end (`info`). Requests may share a connection.",
        ("address", "port", "bytes_up", "bytes_down"),
        "allow",
        address="192.0.2.2",
        port=44772,
    ),
    "gateway.configure": _kind(
        "The worker put a policy in force (`info`), or ended flows that the new policy denies (`deny`).",
        (*_POLICY, "reason", "count"),
        "info",
        **_OF_POLICY,
    ),
    "gateway.guard": _kind(
        "The guard's process ended: the worker ended all flows and dials nothing.",
        ("reason", "count"),
        "deny",
        reason="the guard is gone",
        count=3,
    ),
    "gateway.pause": _kind(
        "The sandbox is frozen, and the worker ended all of its flows. It forwards nothing before the record "
        "`gateway.resume` or the next worker.",
        ("count",),
        "info",
        count=3,
    ),
    "gateway.resume": _kind("The worker forwards again what policy allows.", (), "info"),
    "drop": _kind(
        "Frames that the kernel dropped. Written when the number of one kind has grown, at most every three seconds.",
        ("rule", "reason", "count"),
        "deny",
        sandbox="sbx-1",
        rule="drop-quic",
        reason="UDP datagrams to port 443 (QUIC), dropped by the kernel since the sandbox was launched",
        count=12,
    ),
    "alarm": _kind(
        "hostd: the isolation of a sandbox or the audit log was changed. `serve`: the policy file cannot be used.",
        ("rule", "reason", "detail", "count", "error"),
        "deny",
        sandbox="sbx-1",
        rule="isolation.link",
        reason="gateway side: an additional link",
        detail="seen at 2026-01-02T03:04:05Z",
    ),
    "image.fetch": _kind(
        "hostd is about to fetch an image from a registry.",
        ("source", "secret", "actor"),
        "info",
        source="registry.example.com/team/tool:1.2",
        actor="uid:0",
    ),
    "image.add": _kind(
        "An image is about to be added to those that may be started.",
        ("image", "digest", "source", "actor"),
        "info",
        image="team/tool:1.2",
        digest="sha256:5f2b",
        source="registry.example.com/team/tool:1.2",
        actor="uid:0",
    ),
    "image.alias": _kind(
        "An image is about to get a further name.",
        ("image", "digest", "alias", "actor"),
        "info",
        image="sallyport/code-interpreter",
        digest="sha256:5f2b",
        alias="opensandbox/code-interpreter:v1.1.0",
        actor="uid:0",
    ),
    "image.remove": _kind(
        "An image, or only its name `alias`, is about to be removed from those that may be started.",
        ("image", "digest", "alias", "actor"),
        "info",
        image="team/tool:1.2",
        digest="sha256:5f2b",
        actor="uid:0",
    ),
    "volume.remove": _kind(
        "An operator removes a named volume. Written before the removal, also before one that is refused.",
        ("volume", "actor"),
        "info",
        volume="cache",
        actor="uid:0",
    ),
    "lifecycle.create": _kind(
        "A sandbox is about to be launched. With `snapshot` it begins with the file system of that snapshot.",
        ("image", "snapshot", "runtime", "policy", "cpu_nanos", "memory_bytes", "disk_bytes", "pool", "volumes"),
        "allow",
        sandbox="sbx-1",
        image="sallyport/base",
        runtime="runsc",
        policy="sha256:5f2b",
        cpu_nanos=1_000_000_000,
        memory_bytes=2_147_483_648,
        disk_bytes=2_147_483_648,
        volumes=["host:/srv/data /mnt/data ro", "pvc:cache /cache rw"],
    ),
    "lifecycle.claim": _kind(
        "An idle sandbox of a pool is about to get its caller's policy and entrypoint.",
        ("pool", "image", "runtime", "policy"),
        "allow",
        sandbox="sbx-1",
        pool="workers@5f2b1c0d",
        image="sallyport/base",
        runtime="runsc",
        policy="sha256:5f2b",
    ),
    "lifecycle.pool": _kind(
        "A pool is about to be created, resized or deleted.",
        ("pool", "image", "reason"),
        "info",
        pool="workers",
        image="sallyport/base",
        reason="created",
    ),
    "lifecycle.create_failed": _kind(
        "A launch failed and was undone.", ("code",), "info", sandbox="sbx-1", code="DOCKER::SANDBOX_START_FAILED"
    ),
    "lifecycle.remove": _kind("A removal began.", ("reason",), "info", sandbox="sbx-1", reason="deleted by its caller"),
    "lifecycle.policies": _kind(
        "`serve` read a changed policy file.", ("reason",), "info", reason="the policy file was read again"
    ),
    "lifecycle.pause": _kind("A sandbox is about to be paused.", (), "info", sandbox="sbx-1"),
    "lifecycle.resume": _kind("A sandbox is about to be resumed.", (), "info", sandbox="sbx-1"),
    "lifecycle.signed_route": _kind(
        "A caller is about to get a signed route to a port of a sandbox.",
        ("port", "expires"),
        "allow",
        sandbox="sbx-1",
        port=8000,
        expires=1_767_323_045,
    ),
    "lifecycle.snapshot": _kind(
        "A snapshot of a sandbox is about to be taken.",
        ("snapshot", "image"),
        "allow",
        sandbox="sbx-1",
        snapshot="0b0e2b0c-8c8f-4b63-9a3e-5d6a3c1f2e4d",
        image="sallyport/base",
    ),
    "lifecycle.snapshot_failed": _kind(
        "A snapshot was not taken. Nothing of it is left.",
        ("snapshot", "code"),
        "info",
        sandbox="sbx-1",
        snapshot="0b0e2b0c-8c8f-4b63-9a3e-5d6a3c1f2e4d",
        code="too_large",
    ),
    "lifecycle.snapshot_delete": _kind(
        "A snapshot of the sandbox is about to be removed.",
        ("snapshot",),
        "info",
        sandbox="sbx-1",
        snapshot="0b0e2b0c-8c8f-4b63-9a3e-5d6a3c1f2e4d",
    ),
    "gateway.policy": _kind(
        "A caller changes the policy of a sandbox.", ("policy",), "info", sandbox="sbx-1", policy="sha256:5f2b"
    ),
    "gateway.dropped": _kind(
        "A part of a sandbox's policy is out of force, because the operator's file refuses it.",
        _SHORTFALL,
        "deny",
        sandbox="sbx-1",
        policy="sha256:5f2b",
        code="binding",
        binding="github",
        reason="always_deny names git.example.com",
    ),
    "gateway.restored": _kind(
        "A part of a sandbox's policy is in force again.",
        _SHORTFALL,
        "info",
        sandbox="sbx-1",
        policy="sha256:5f2b",
        code="binding",
        binding="github",
    ),
    "vault.bind": _kind(
        "A caller changes the credential vault of a sandbox.",
        ("policy",),
        "info",
        sandbox="sbx-1",
        policy="sha256:5f2b",
    ),
    "vault.revoke": _kind(
        "A caller removed bindings that were not in force, or the whole vault.",
        ("policy",),
        "info",
        sandbox="sbx-1",
        policy="sha256:5f2b",
    ),
    "vault.put": _kind(
        "A secret is about to be stored.",
        ("secret", "hosts", "actor"),
        "info",
        secret="api-token",  # noqa: S106 - a name
        hosts=["api.example.com"],
        actor="uid:0",
    ),
    "vault.rotate": _kind(
        "A secret is about to get a new value.",
        ("secret", "actor"),
        "info",
        secret="api-token",  # noqa: S106 - a name
        actor="uid:0",
    ),
    "vault.delete": _kind(
        "A secret was deleted.",
        ("secret", "actor"),
        "info",
        secret="api-token",  # noqa: S106 - a name
        actor="uid:0",
    ),
    "vault.open": _kind(
        "A sandbox is about to get its grants and its CA lineage.",
        (*_GRANTS, "lineage"),
        "info",
        sandbox="sbx-1",
        secrets=["api-token"],
        hosts=["api.example.com"],
        count=1,
        lineage="sbx-1",
        actor="uid:700000001",
    ),
    "vault.regrant": _kind(
        "The grants of a sandbox are replaced.",
        _GRANTS,
        "info",
        sandbox="sbx-1",
        secrets=["api-token"],
        hosts=["api.example.com"],
        count=1,
        actor="uid:700000001",
    ),
    "vault.close": _kind(
        "The grants and values of a removed sandbox were deleted.",
        ("actor",),
        "info",
        sandbox="sbx-1",
        actor="uid:700000001",
    ),
    "vault.limit": _kind(
        "An operator limits the use of references that match the pattern in `secret`. Their leases end.",
        ("secret", "hosts", "actor"),
        "info",
        secret="vault://kv/agents/*",  # noqa: S106 - a pattern
        hosts=["api.example.com"],
        actor="uid:0",
    ),
    "vault.unlimit": _kind(
        "A limit of references is about to end.",
        ("secret", "actor"),
        "info",
        secret="vault://kv/agents/*",  # noqa: S106 - a pattern
        actor="uid:0",
    ),
    "vault.freeze": _kind(
        "An operator stopped the release of every secret, of one secret, or of those of one sandbox. Their leases end.",
        ("secret", "actor"),
        "info",
        actor="uid:0",
    ),
    "vault.unfreeze": _kind("A freeze is about to end.", ("secret", "actor"), "info", actor="uid:0"),
    "vault.revoke_all": _kind(
        "An operator ends the leases of every secret, of one secret, or of those of one sandbox. Grants stay.",
        ("secret", "actor"),
        "info",
        actor="uid:0",
    ),
    "vault.reset": _kind(
        "The uses of a limited secret are about to be counted from zero again.",
        ("secret", "actor"),
        "info",
        secret="api-token",  # noqa: S106 - a name
        actor="uid:0",
    ),
    "vault.rekey": _kind("The master key is about to be replaced.", ("actor",), "info", actor="uid:0"),
    "vault.refer": _kind(
        "The references of the operator's policy file to secrets of backends are about to change: `count` of them, "
        "each with each of its hosts.",
        ("count", "actor"),
        "info",
        count=3,
        actor="uid:0",
    ),
    "vault.keep": _kind(
        "An issuer replaced the refresh token behind a token of the settings. vaultd stored the new one. `deny`: it "
        "could not, and no access token is obtained until it can.",
        ("secret", "code", "reason"),
        "info",
        secret="token://crm",  # noqa: S106 - a name
    ),
    "vault.intermediate": _kind(
        "A worker is about to get an intermediate certificate of its sandbox's CA.",
        ("target_generation",),
        "allow",
        sandbox="sbx-1",
        target_generation=1,
    ),
    "secret.release": _kind(
        "A worker requested a secret, or hostd the login of a registry. `allow` is on disk before the value leaves "
        "vaultd.",
        (
            *("target_generation", "secret", "host", "port", "scheme", "method", "path"),
            *("action", "actor", "code", "reason", "lease_seconds"),
        ),
        "allow",
        sandbox="sbx-1",
        target_generation=1,
        secret="api-token",  # noqa: S106 - a name
        host="api.example.com",
        port=443,
        scheme="https",
        method="GET",
        path="/v1/me",
        lease_seconds=300,
    ),
    "gap": _kind(
        "Records are missing here: `count` of them, or an unknown number without `count`.",
        ("reason", "count", "torn"),
        "info",
        reason="an incomplete last line was truncated",
        count=1,
        torn='{"chain":"control","dec',
    ),
    "checkpoint": _kind(
        "auditd signs the state of the log.",
        (*SIGNED, "state"),
        "info",
        key="9f…",
        signature="mK…",
        log="4c…",
        closed=True,
    ),
}
"""Each kind, in the order of docs/audit-records.md."""


def undescribed(kind: str, fields: frozenset[str]) -> frozenset[str]:
    """Return those of `fields` that the table does not list for `kind`."""
    known = DESCRIBED[kind].fields | COMMON.keys()
    return frozenset(
        name for name in fields - known if not (name.endswith(("_sha256", "_length")) and name[:-7] in known)
    )
