"""The JSON of the lifecycle API: requests as pydantic models, responses as plain dicts without nulls.

- An unknown field is refused at any depth. So is a null, except for the fields in a model's `NULLABLE`, which a
  published client sends as null. See docs/compatibility.md.
- Strings from callers have a limit.
- Responses never contain null, because generated clients fail on some.
"""

from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from lifecycle.sandboxes.moments import timestamp
from lifecycle.sandboxes.pool import Count, SandboxPool
from lifecycle.sandboxes.registry import Sandbox
from lifecycle.snapshots.snapshot import Snapshot

type Text = Annotated[str, StringConstraints(max_length=4096)]
type Value = Annotated[str, StringConstraints(max_length=131072)]

HOOKS_VARIABLE = "OPENSANDBOX_LIFECYCLE"
"""The variable that carries the hooks to execd, which removes it from its children's environment."""
_RESERVED_ENV = {HOOKS_VARIABLE, "EXECD_RUNTIME_INIT"}
"""Variables that execd takes from the process that starts it."""


class Model(BaseModel):
    """Base of all request models."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True)
    NULLABLE: ClassVar[frozenset[str]] = frozenset()
    """The fields that may be null. Null means that the field is absent, unless the model says otherwise."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_null(cls, value: object, info: ValidationInfo) -> object:
        if value is None and info.field_name not in cls.NULLABLE:
            raise PydanticCustomError("null", "must not be null; leave the field out")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe a field as null only if null is accepted."""
        described = handler(schema)
        nullable = {cls.model_fields[name].alias for name in cls.NULLABLE}
        for name, field in handler.resolve_ref_schema(described).get("properties", {}).items():
            kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
            if name not in nullable and len(kinds) < len(field.get("anyOf", ())):
                del field["anyOf"]
                field.update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})
                field.pop("default", None)
        return described


class ImageAuth(Model):
    """Credentials for an image. They are accepted and dropped, because images come from the operator."""

    username: Text
    password: Text = Field(repr=False)


class Image(Model):
    """The image to start from."""

    uri: Text = ""
    auth: ImageAuth | None = None


class RuleModel(Model):
    """One egress rule as the caller writes it."""

    action: Annotated[str, StringConstraints(max_length=64)] | None = None
    target: Annotated[str, StringConstraints(min_length=1, max_length=1024)]

    def document(self) -> dict[str, str]:
        """Return the JSON form."""
        return {"target": self.target} | ({} if self.action is None else {"action": self.action})


class NetworkPolicy(Model):
    """The egress policy of a create call, or of a PUT on the network policy route."""

    default_action: Annotated[str, StringConstraints(max_length=64)] | None = None
    egress: list[RuleModel] | None = Field(default=None, max_length=4096)

    def document(self) -> dict[str, Any]:
        """Return the JSON form that the egress API uses."""
        document: dict[str, Any] = {}
        if self.default_action is not None:
            document["defaultAction"] = self.default_action
        if self.egress is not None:
            document["egress"] = [rule.document() for rule in self.egress]
        return document


class CredentialProxy(Model):
    """The option for a credential vault of the sandbox."""

    enabled: bool = False


class PreStart(Model):
    """A command that runs before the entrypoint."""

    command: list[Text] = Field(min_length=1, max_length=1024)
    timeout_seconds: int | None = Field(default=None, ge=1, le=10800)


class Periodic(Model):
    """A command with a schedule."""

    name: Text
    schedule: Text
    command: list[Text] = Field(min_length=1, max_length=1024)
    timeout_seconds: int | None = Field(default=None, ge=1, le=300)


class Hooks(Model):
    """Programs that execd runs before the entrypoint, and periodically. execd checks the schedules."""

    pre_start: PreStart | None = None
    periodic: list[Periodic] | None = Field(default=None, max_length=64)

    @model_validator(mode="after")
    def _not_blank(self) -> Self:
        if self.pre_start and not self.pre_start.command[0].strip():
            raise ValueError("lifecycle.preStart.command must not begin with a blank")
        names = [hook.name.strip() for hook in self.periodic or []]
        if any(not hook.schedule.strip() for hook in self.periodic or []) or "" in names:
            raise ValueError("lifecycle.periodic needs a name and a schedule")
        if len(set(names)) != len(names):
            raise ValueError("lifecycle.periodic names must be unique")
        return self

    def words(self) -> list[str]:
        """Return every text of the hooks."""
        texts = [] if self.pre_start is None else list(self.pre_start.command)
        for hook in self.periodic or []:
            texts += [hook.name, hook.schedule, *hook.command]
        return texts

    def document(self) -> str:
        """Return the JSON text for execd, without absent members; empty without a hook."""
        if self.pre_start is None and not self.periodic:
            return ""
        return self.model_dump_json(by_alias=True, exclude_none=True)


class Platform(Model):
    """Operating system and architecture."""

    os: Text
    arch: Text


class HostMount(Model):
    """A directory or a file of the host."""

    path: Text


class Pvc(Model):
    """A named volume. `storageClass` and `accessModes` are for Kubernetes, and have no effect here."""

    NULLABLE = frozenset({"storage_class", "storage", "access_modes"})

    claim_name: Text
    create_if_not_exists: bool = True
    delete_on_sandbox_termination: bool = False
    storage_class: Text | None = None
    storage: Text | None = None
    access_modes: list[Text] | None = Field(default=None, max_length=16)


class Ossfs(Model):
    """A bucket of an object store, which this server does not offer."""

    bucket: Text
    endpoint: Text
    version: Text = "2.0"
    options: list[Text] | None = Field(default=None, max_length=64, repr=False)
    access_key_id: Text | None = Field(default=None, repr=False)
    access_key_secret: Text | None = Field(default=None, repr=False)


class Volume(Model):
    """What is mounted into the sandbox. Exactly one of `host`, `pvc` and `ossfs` is given."""

    name: Text
    mount_path: Text
    read_only: bool = False
    sub_path: Text | None = None
    host: HostMount | None = None
    pvc: Pvc | None = None
    ossfs: Ossfs | None = None


class Create(Model):
    """The body of `POST /sandboxes`. `networkPolicy: null` is a policy that denies all."""

    NULLABLE = frozenset({"timeout", "network_policy"})

    image: Image | None = None
    snapshot_id: Text | None = None
    template_id: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = None
    timeout: int | None = Field(default=None, ge=60)
    resource_limits: dict[Text, Text] | None = None
    resource_requests: dict[Text, Text] | None = None
    entrypoint: list[Value] | None = Field(default=None, min_length=1, max_length=256)
    env: dict[Text, Value | None] | None = Field(default=None, max_length=1024, repr=False)
    metadata: dict[Text, Text] | None = None
    lifecycle: Hooks | None = None
    network_policy: NetworkPolicy | None = None
    credential_proxy: CredentialProxy | None = None
    secure_access: bool | None = None
    volumes: list[Volume] | None = Field(default=None, max_length=64)
    platform: Platform | None = None
    extensions: dict[Text, Text] | None = Field(default=None, max_length=64)

    @field_validator("timeout", mode="before")
    @classmethod
    def _no_boolean(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("timeout must be an integer")
        return value

    @field_validator("network_policy", mode="before")
    @classmethod
    def _closed(cls, value: object) -> object:
        return {} if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        pool = (self.extensions or {}).get("poolRef")
        image = self.image is not None and bool(self.image.uri.strip())
        snapshot = bool((self.snapshot_id or "").strip())
        if self.template_id is None and not pool:
            if image + snapshot != 1:
                raise ValueError("Exactly one of image, snapshotId or templateId must be given.")
            if self.resource_limits is None:
                raise ValueError("resourceLimits is required.")
            if image and self.entrypoint is None:
                raise ValueError("entrypoint is required when image is given.")
        elif self.template_id is not None and (image or snapshot):
            raise ValueError("Exactly one of image, snapshotId or templateId must be given.")
        if snapshot and pool:
            raise ValueError("snapshotId cannot be combined with poolRef.")
        if self.lifecycle is not None and (pool or self.template_id is not None):
            raise ValueError("lifecycle cannot be combined with poolRef or templateId.")
        for name in _RESERVED_ENV & (self.env or {}).keys():
            raise ValueError(f"env: {name} is reserved.")
        if self.credential_proxy and self.credential_proxy.enabled and self.network_policy is None:
            raise ValueError("credentialProxy.enabled requires networkPolicy.")
        return self


class CapacitySpec(Model):
    """The numbers of members of a pool."""

    buffer_max: int = Field(ge=0, le=10000)
    buffer_min: int = Field(ge=0, le=10000)
    pool_max: int = Field(ge=0, le=10000)
    pool_min: int = Field(ge=0, le=10000)


class PoolResources(Model):
    """The limits of a pool's members."""

    limits: dict[Text, Text] | None = None


class PoolContainer(Model):
    """The container of a pool's members."""

    name: Text | None = None
    image: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    command: list[Value] | None = Field(default=None, max_length=256)
    args: list[Value] | None = Field(default=None, max_length=256)
    resources: PoolResources | None = None


class PodSpec(Model):
    """The part of Kubernetes' PodSpec that has a meaning here."""

    containers: list[PoolContainer] = Field(min_length=1, max_length=1)
    runtime_class_name: Text | None = None


class PodTemplate(Model):
    """The part of Kubernetes' PodTemplateSpec that has a meaning here."""

    spec: PodSpec


class CreatePool(Model):
    """The body of `POST /pools`."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=253)]
    template: PodTemplate
    capacity_spec: CapacitySpec


class ResizePool(Model):
    """The body of `PUT /pools/{name}`."""

    capacity_spec: CapacitySpec


class Renew(Model):
    """The body of `POST /sandboxes/{id}/renew-expiration`."""

    expires_at: datetime


class CreateSnapshot(Model):
    """The optional body of `POST /sandboxes/{id}/snapshots`."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None


class MetricsEvent(Model):
    """An event that a client reports after a create. It is counted, never trusted."""

    event_type: Literal["sandbox.create"]
    create_duration_ms: int = Field(ge=0)
    success: bool
    sandbox_id: Text | None = None
    image: Text | None = None


def status(sandbox: Sandbox) -> dict[str, str]:
    """Render the status object."""
    body = {"state": str(sandbox.state), "lastTransitionAt": timestamp(sandbox.changed_at)}
    if sandbox.reason:
        body["reason"] = sandbox.reason
    if sandbox.message:
        body["message"] = sandbox.message
    return body


def created(sandbox: Sandbox) -> dict[str, Any]:
    """Render a `CreateSandboxResponse`."""
    body: dict[str, Any] = {
        "id": sandbox.id,
        "status": status(sandbox),
        "createdAt": timestamp(sandbox.created_at),
        "entrypoint": list(sandbox.entrypoint),
    }
    if sandbox.expires_at is not None:
        body["expiresAt"] = timestamp(sandbox.expires_at)
    if sandbox.metadata:
        body["metadata"] = sandbox.metadata
    if sandbox.extensions:
        body["extensions"] = sandbox.extensions
    if sandbox.platform is not None:
        body["platform"] = sandbox.platform
    return body


def shown(sandbox: Sandbox) -> dict[str, Any]:
    """Render a `Sandbox`."""
    if sandbox.snapshot is not None:
        return created(sandbox) | {"snapshotId": sandbox.snapshot}
    body = created(sandbox) | {"image": {"uri": sandbox.image}}
    if sandbox.pool:
        body["allocation"] = {"mode": "pool", "poolRef": SandboxPool.named_by(sandbox.pool), "state": "allocated"}
    return body


def pool(found: SandboxPool, count: Count) -> dict[str, Any]:
    """Render a pool."""
    capacity = found.capacity
    status = {
        "total": count.idle + count.making + count.claimed,
        "allocated": count.claimed,
        "available": count.idle,
        "revision": found.revision,
    }
    return {
        "name": found.name,
        "capacitySpec": {
            "bufferMax": capacity.buffer_max,
            "bufferMin": capacity.buffer_min,
            "poolMax": capacity.pool_max,
            "poolMin": capacity.pool_min,
        },
        "status": status | ({"message": count.problem} if count.problem else {}),
        "createdAt": timestamp(found.created_at),
    }


def snapshot_shown(snapshot: Snapshot) -> dict[str, Any]:
    """Render a `Snapshot`."""
    body: dict[str, Any] = {
        "id": snapshot.id,
        "sandboxId": snapshot.sandbox,
        "status": {
            "state": str(snapshot.state),
            "reason": snapshot.reason,
            "message": snapshot.message,
            "lastTransitionAt": timestamp(snapshot.changed_at),
        },
        "createdAt": timestamp(snapshot.created_at),
    }
    return body if snapshot.name is None else body | {"name": snapshot.name}


def pagination(page: int, size: int, total: int) -> dict[str, Any]:
    """Render the `pagination` of a list."""
    return {
        "page": page,
        "pageSize": size,
        "totalItems": total,
        "totalPages": -(-total // size),
        "hasNextPage": page * size < total,
    }
