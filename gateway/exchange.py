"""One HTTP exchange of an inspected flow: judges the request, and takes secrets out of the response. Sans-IO.

    request head, intended destination  ->  Forward(head, scrub) | Collect | Answer(status, headers, body)
    whole body, after Collect           ->  Forward and the body to send | Answer
    connection for the request          ->  recorded
    response head                       ->  Relay(status, headers, buffered) | Answer
    body chunks, trailers               ->  scrubbed bytes
    bytes of an accepted WebSocket      ->  bytes to relay, those of the server scrubbed

Order of a request:
translate -> decide -> guard -> admit -> count -> (collect the body -> decide) -> allow record accepted -> lease ->
compose -> use record accepted -> learn what to look for -> decide again -> (sign) -> `Forward`. The guard handles
credentials that the client itself sent.

- The exchange awaits its effects itself, in this order. The engine receives `Forward` after the last step, otherwise
  an `Answer` or an exception. It has no step to skip.
- Each method is valid in certain stages of the exchange. In any other stage it raises `RuntimeError`, and so does
  a step that would break an invariant. The engine then aborts the flow.
- Each request is judged on its own, independently of earlier requests on its connection.
- A denial is a 403 with a reason, a request above the rate limit a 429. A failure of the log or the vault is a 503,
  and so is an overloaded worker. On any other exception the engine ends the flow.
- A body is collected only if policy puts a secret into it. Until it is whole, there is no lease and no connection.
- Policy judges the path that the client sent, and that path limits the release of secrets. If a placeholder is replaced
  in it, no rule may deny the new path. Rules that allow name the placeholder, so they need not match the new path.
- A secret whose placeholder is absent is not leased. The record of that miss has the decision `info`.
- A request that gets a signature is read for it before anything is recorded, and signed as it is sent.
- The allow record names the connection that carries the request, if the engine reserves an existing one. Otherwise a
  `connect` record names it before the first byte of the request is sent.
- If policy can send a secret to a host, every response of that host is searched for it: header names and values,
  body, trailers. The values to look for are fixed when the response begins. Encoded bodies are decoded up to a limit.
  A response that cannot be searched (part of a document, unknown charset) is withheld. Requests to such a host ask
  for `identity`, and for the whole document (no `Range`) unless all its secrets are keys of signatures, never sent.
- A WebSocket to such a host has no extension, so its messages are not compressed. Its frames are read in both
  directions (`gateway.scrub.frames`), and those of the server are scrubbed. Other WebSockets are relayed unread.

Effects are ports (`gateway.effects`). The module does no framing, opens no connection and knows no engine. (Over 400
lines: the order of one exchange, read from top to bottom.)
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache

from gateway import pages
from gateway.client_credentials import GuardedRequest, guard
from gateway.compose import Composed, compose, found_in_body, found_in_head, needs_body, split
from gateway.effects import Effects, Over, RecordForm, SecretRefused, SecretsSuspended
from gateway.inject import slot
from gateway.placeholders import BodySearch, refusal
from gateway.presented import KeptCertificate, Presented, presents, read
from gateway.response_head import accepts_websocket, encodings, head_facts, joined
from gateway.scrub.decode import decode
from gateway.scrub.frames import FrameReader, FrameScrubber
from gateway.scrub.grpc import MessageScrubber
from gateway.scrub.searched import KnownPatterns, SearchedSecrets, too_short
from gateway.scrub.stream import Scrubber, Withheld, scrub_header
from gateway.signing.signer import Signer, check_key, signer_of
from gateway.signing.sigv4 import SigningRefused
from gateway.substitute import TooMany, body_form
from gateway.tls.hello import Refused
from gateway.translate import Headers, RequestParts, Translated, body_length, head_size, translate
from gateway.verdicts import Answer, Collect, Forward, ForwardHead, Injected, Origin, Relay, ResponseHead, Route
from policy.decision import DEFAULT, AllowRequest, Deny
from policy.facts import FlowFacts, RequestFacts
from policy.injection import InjectionPlan, SecretPlan, SubstitutionPlan, Surface, render
from vault.secret import Secret

HTTP2 = 20
MAX_RECORDED_PATH = 2048
_KEPT_HEADS = 128
_MAX_KEPT_HEAD = 4096
_CLOSE: Headers = ((b"Connection", b"close"),)
_EXTENSIONS = b"sec-websocket-extensions"
_NOT_WHEN_SEARCHED = frozenset({b"accept-encoding", b"grpc-accept-encoding", _EXTENSIONS})
_NOT_WITH_SECRETS = _NOT_WHEN_SEARCHED | {b"range", b"if-range"}
_OF_ENCODED_BODY = frozenset({b"content-encoding", b"transfer-encoding", b"content-length"})

type Reserve = Callable[[frozenset[SecretPlan]], Route | None]
"""Reserves an existing connection for a request with these secrets; returns its route, None if there is none."""


@dataclass(eq=False, repr=False, slots=True)
class _Repeated:
    """What equal requests of a flow have in common while policy decides equally.

    Attributes:
        translated: the request as received. `guarded` has it, and the decision, after the guard.
        plans: the uses of secrets that the request makes. A substitution is one if its placeholder is there.
        of_plans: the same without an order, with a hash that is computed once.
        missed: the substitutions whose placeholder is absent.
        path: for records.
        length, size: the bytes of the body, and of head and body, as received. None: the head does not say them, or no
            secret is sent.
        head: the head to send, without a signature, with what it was made of: the composed request, and whether the
            response is searched, and is a whole document.
    """

    parts: RequestParts
    translated: Translated
    decision: AllowRequest
    guarded: GuardedRequest
    plans: tuple[SecretPlan, ...]
    of_plans: frozenset[SecretPlan]
    missed: tuple[SubstitutionPlan, ...]
    secrets: frozenset[str]
    path: str
    length: int | None
    size: int | None
    records: "_Records"
    head: tuple[Composed, tuple[bool, bool], ForwardHead] | None = None


type _Same = tuple[str, bool, tuple[str, ...], tuple[str, ...], tuple[SecretPlan, ...]]
"""Of a request: method, whether it is a WebSocket handshake, stripped and forwarded credentials, uses of secrets."""


@dataclass(eq=False, repr=False, slots=True)
class _Records:
    """The records of requests of a flow that differ in their paths and headers only.

    Attributes:
        allowed, same: what the requests have in common. `fixed` are those fields of each record.
        uses: a record for each use of a secret.
        allow: the record of the decision, with the connection that it is for.
        outcome: the record of the end, with the status (-1 without one) and the connection that it is for.
    """

    allowed: AllowRequest
    same: _Same
    fixed: dict[str, object]
    uses: tuple[RecordForm, ...]
    allow: tuple[Route | None, RecordForm] | None = None
    outcome: tuple[int, Route | None, RecordForm] | None = None


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The text of a secret in its slot, kept with what it was made of."""

    plan: InjectionPlan
    value: Secret
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request whose body is being collected."""

    parts: RequestParts
    translated: Translated
    decision: AllowRequest
    guarded: GuardedRequest
    reserve: Reserve


class Session:
    """State that the exchanges of one flow share.

    `max_decoded` is the limit of a decoded response body in bytes, `max_body` that of a collected request body.
    """

    def __init__(
        self, origin: Origin, effects: Effects, known: KnownPatterns, max_decoded: int, max_body: int = 8 * 1024 * 1024
    ) -> None:
        self.facts = origin.facts
        scheme = origin.facts.scheme.value
        self.destination = origin.facts.host, origin.facts.port, scheme.encode("ascii")
        """Host, port and scheme to which requests may be sent."""
        self.effects = effects
        self.max_decoded = max_decoded
        self.max_body = max_body
        self.searched = SearchedSecrets(origin.facts.host, effects, known)
        self.sensitive: set[bytes] = set()
        """Names, in lower case, of the headers and pseudo-headers that secrets were sent in."""
        self.active: dict[str, Exchange] = {}
        """Allowed requests that are not both sent and answered whole."""
        self.prepared: dict[InjectionPlan, _Rendered] = {}
        """The last text of each injection."""
        self.certificate: KeptCertificate | None = None
        """The last client certificate."""
        self.composed: tuple[Translated, Injected, Composed] | None = None
        """The last request without a collected body: as judged, its secrets, and as sent."""
        self.repeated: _Repeated | None = None
        """Of the last request that was allowed."""
        self.records: _Records | None = None
        """Of the last request that was allowed, if its path is not too long for a record."""
        self.over = False
        """Whether the flow was aborted. Set by the engine, which may still finish what was under way."""
        self.where: dict[str, object] = {
            "host": origin.facts.host,
            "port": origin.facts.port,
            "scheme": scheme,
            "flow": origin.flow_id,
            "destination": origin.destination,
            "peer": f"{origin.peer[0]}:{origin.peer[1]}",
            "engine": origin.engine,
        }

    @property
    def used(self) -> set[str]:
        """Names of the secrets that were sent on this flow, or may come back on it."""
        return self.searched.names

    def may_connect(self) -> bool:
        """Whether an upstream connection has a reason to exist now."""
        return any(exchange.allowed for exchange in self.active.values())

    def still_allowed(self) -> bool:
        """Whether the policy in force allows every request in progress."""
        for exchange in self.active.values():
            if not exchange.still_allowed():
                return False
            if exchange.begun and not self.searched.complete():
                return False  # policy now permits a secret that this response is not searched for
        return True

    def finished(self, request_id: str) -> None:
        """The request is complete or was aborted: it is not in progress any more."""
        self.active.pop(request_id, None)

    def refused(self, refused: Refused) -> None:
        """Record a request that is malformed or for another host."""
        asked = {} if refused.asked_host is None else {"asked_host": refused.asked_host}
        self.deny("protocol", refused.reason, **asked)

    def deny(self, rule: str, reason: str, **more: object) -> None:
        """Record a denial without waiting."""
        self.effects.recorder.note("request", "deny", rule=rule, reason=reason, **self.where, **more)


class PlaceholderSent(Exception):
    """The body of a request has a placeholder where no rule replaces it."""


class _Stage(Enum):
    NEW = auto()
    JUDGING = auto()
    COLLECTING = auto()
    ANSWERED = auto()
    FORWARDED = auto()
    CONNECTED = auto()
    HEADED = auto()
    STREAMED = auto()
    BUFFERED = auto()
    WITHHELD = auto()
    TUNNEL = auto()
    COMPLETE = auto()
    FINISHED = auto()


# Tuples, because the hash of an enumeration's member is computed in Python.
_NOT_ALLOWED = (_Stage.NEW, _Stage.JUDGING, _Stage.COLLECTING, _Stage.ANSWERED)
_BEFORE_RESPONSE = (_Stage.FORWARDED, _Stage.CONNECTED)
_IN_BODY = (_Stage.STREAMED, _Stage.BUFFERED, _Stage.WITHHELD, _Stage.COMPLETE)


class Exchange:
    """One request of `session` and its response. `request_id` names it in the records."""

    def __init__(self, session: Session, request_id: str) -> None:
        self.session = session
        self.request_id = request_id
        self.facts: RequestFacts | None = None
        """None while the request is not translated, or if its form was refused."""
        self._repeated: _Repeated | None = None
        self._pending: _Pending | None = None
        self._signer: Signer | None = None
        self.scrub = False
        """The server was asked for the whole document (or a part, if no secret is sent), without content coding."""
        self._whole_asked = False
        self.begun = False
        """The response head was allowed, and its body is relayed to the client."""
        self._stage = _Stage.NEW
        self._whole = b""
        self._most_up: int | None = None
        """The bytes of the body that the secrets of the request were leased for; None: any number."""
        self._http2 = False
        self._closes = False
        self._websocket_key: bytes | None = None
        self._route: Route | None = None
        self._sent = False
        self._status = 0
        self._relayed: Headers = ()
        self._page = b""
        self._scrubber: Scrubber | MessageScrubber | FrameScrubber | None = None
        self._client_frames: FrameReader | None = None
        self._search: BodySearch | None = None
        """Looks for placeholders in the request body. None if the sandbox has none."""
        self._started = 0.0
        self._bytes_up = 0
        self._bytes_down = 0

    @property
    def allowed(self) -> bool:
        """Whether the request may be sent."""
        return self._stage not in _NOT_ALLOWED

    @property
    def collecting(self) -> bool:
        """Whether the request waits for its whole body. Nothing of it may be sent."""
        return self._stage is _Stage.COLLECTING

    def still_allowed(self) -> bool:
        """Whether the policy in force allows the request, with the credentials of the client that were sent."""
        decision = None if self.facts is None else self.session.effects.decider.decide_request(self.facts)
        if not isinstance(decision, AllowRequest):
            return False
        if self._repeated is None or decision.client_credentials is None:
            return True
        translated, sent = self._repeated.translated, self._repeated.guarded.translated
        guarded = guard(translated, decision)
        return isinstance(guarded, GuardedRequest) and guarded.translated == sent

    # The request.

    def malformed(self, reason: str) -> None:
        """Record a request that the engine refused as malformed. The engine answers it."""
        self._next((_Stage.NEW,), _Stage.ANSWERED)
        self.session.refused(Refused(reason))

    async def request(
        self, parts: RequestParts, destination: tuple[str, int, bytes], reserve: Reserve
    ) -> Answer | Collect | Forward:
        """Judge one request, and prepare it.

        Args:
            destination: host, port and scheme to which the engine would send the request.
            reserve: called once for a request that policy allows, before its record.

        Raises:
            Exception: the flow must end.
        """
        self._next((_Stage.NEW,), _Stage.JUDGING)
        session, effects = self.session, self.session.effects
        facts = session.facts
        if destination != session.destination:
            raise RuntimeError("the engine would send this request to another destination than the flow's")
        repeated = session.repeated
        same = repeated is not None and repeated.parts is parts
        translated = repeated.translated if repeated is not None and same else _translated(parts, facts)
        if isinstance(translated, Refused):
            session.refused(translated)
            return self._answer(parts, translated.status, pages.refusal(translated.status, translated.reason))
        self.facts = translated.facts
        self._http2 = parts.version == HTTP2
        decision = self._decide(translated)
        if isinstance(decision, Deny):
            return await self._deny(parts, translated, decision)
        if repeated is not None and same and repeated.decision is decision:
            guarded: GuardedRequest | Deny = repeated.guarded
        else:
            guarded = guard(translated, decision)
        known = effects.decider.placeholders()
        if isinstance(guarded, Deny):
            stray = known.in_head(translated.target, translated.headers)
            denied = guarded if stray is None else refusal(stray)
            return await self._deny(parts, translated, denied, secret=stray)
        try:
            self._signer = self._signer_of(guarded)
        except SigningRefused as error:
            return await self._deny(parts, translated, Deny(decision.rule, str(error)))
        wait = effects.admission.retry_after()
        if wait is not None:
            return self._turn_away(parts, translated.facts, wait)
        over = effects.allowance.request()
        if over is not None:
            return await self._deny_over(parts, translated, over)
        self._search = BodySearch(known) if known else None
        if not guarded.allowed.plans:
            stray = known.in_head(guarded.translated.target, guarded.translated.headers)
            if stray is not None:
                return await self._deny(parts, translated, refusal(stray), secret=stray)
        pending = _Pending(parts, translated, decision, guarded, reserve)
        signs_body = self._signer is not None and self._signer.needs_body
        substituted = guarded.allowed.substitutions
        if signs_body or (substituted and needs_body(guarded.translated, substituted, http2=self._http2)):
            return self._collect(pending)
        return await self._prepare(pending, None)

    def _signer_of(self, guarded: GuardedRequest) -> Signer | None:
        """Return the signer of a request that gets a signature.

        Raises:
            SigningRefused: it cannot be signed.
        """
        request = guarded.translated
        for plan in guarded.allowed.injections:
            if plan.signs:
                return signer_of(plan, request.facts, request.headers, http2=self._http2)
        return None

    def _collect(self, pending: _Pending) -> Answer | Collect:
        self._next((_Stage.JUDGING,), _Stage.COLLECTING)
        self._pending = pending
        announced = [value for name, value in pending.translated.headers if name.lower() == b"content-length"]
        if announced and int(announced[0]) > self.session.max_body:
            return self.refuse_body(413)
        return Collect(pending.translated.expect_continue)

    def refuse_body(self, status: int) -> Answer:
        """Answer a request whose body is larger than its limit (413), or larger than what is left (503)."""
        self._next((_Stage.COLLECTING,), _Stage.JUDGING)
        pending = self._take_pending()
        reason = "the request body is too large to get a secret or a signature"
        page = pages.refusal(413, f"The request was not sent: {reason}.")
        if status != 413:
            reason, page = "the request bodies of the sandbox are too large to get secrets or signatures", pages.busy(1)
        facts = pending.translated.facts
        self.session.deny("limits", reason, method=facts.method, path=facts.path[:MAX_RECORDED_PATH])
        return self._answer(pending.parts, status, page)

    async def request_whole(self, body: bytes) -> Answer | tuple[Forward, bytes]:
        """Judge the request again with its whole body. Return it, and the body to send.

        Raises:
            Exception: the flow must end.
        """
        self._next((_Stage.COLLECTING,), _Stage.JUDGING)
        pending = self._take_pending()
        if len(body) > self.session.max_body:
            raise RuntimeError("a body above the limit")
        if self.session.over:
            raise ConnectionAbortedError
        again = self._decide(pending.translated)
        if again != pending.decision:
            return await self._deny(pending.parts, pending.translated, _changed(pending.decision))
        verdict = await self._prepare(pending, body)
        return verdict if isinstance(verdict, Answer) else (verdict, self._whole)

    def _take_pending(self) -> _Pending:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("no request is waiting for its body")
        return pending

    async def _prepare(self, pending: _Pending, body: bytes | None) -> Answer | Forward:
        """Record the request, lease its secrets and put them into it."""
        session, effects = self.session, self.session.effects
        parts, translated, decision = pending.parts, pending.translated, pending.decision
        repeated = session.repeated
        admitted = effects.admission.begin()
        try:
            if body is not None or repeated is None or repeated.parts is not parts or repeated.decision is not decision:
                try:
                    repeated = self._begin(pending, body)
                except TooMany as error:
                    return await self._deny(parts, translated, Deny(decision.rule, str(error)))
            self._route = pending.reserve(repeated.of_plans)
            self._repeated = repeated
            permitted = await self._permit(repeated, body)
        finally:
            effects.admission.end(admitted)
        if isinstance(permitted, Answer):
            return permitted
        composed, injected, presented = permitted
        again = self._decide(translated)
        if again is not decision and again != decision:
            # Policy changed during the waits for log and vault. The decision under the old policy is void.
            return await self._deny(parts, translated, _changed(decision))
        if not session.searched.covers(repeated.secrets):
            raise RuntimeError("a secret would be sent that responses are not searched for")
        self._closes = translated.close and not self._http2
        self._started = effects.clock()
        self.scrub = session.searched.patterns is not None
        self._whole_asked = self.scrub and session.searched.sent
        head = self._kept_head(repeated, composed)
        try:
            head = self._signed(head, injected, composed.body)
        except SigningRefused as error:
            return await self._deny(parts, translated, Deny(decision.rule, str(error)))
        forward = Forward(head, self.scrub, injected, presented)
        self._whole = composed.body or b""
        self._most_up = repeated.length if body is None else None
        self._next((_Stage.JUDGING,), _Stage.FORWARDED)
        session.active[self.request_id] = self
        return forward

    def _decide(self, translated: Translated) -> AllowRequest | Deny:
        searched = self.session.searched
        decision = self.session.effects.decider.decide_request(translated.facts)
        if isinstance(decision, AllowRequest) and (reason := searched.refusal()) is not None:
            return Deny("reflection", reason)
        if not isinstance(decision, AllowRequest | Deny):
            raise TypeError("a decision is AllowRequest or Deny")
        return decision

    def _begin(self, pending: _Pending, body: bytes | None) -> _Repeated:
        """Prepare what this request has in common with equal ones. One with a collected body has no equal.

        Raises:
            TooMany: the request has too many placeholders.
        """
        session = self.session
        translated, allowed = pending.guarded.translated, pending.guarded.allowed
        found = found_in_head(translated, allowed.substitutions) if allowed.substitutions else frozenset()
        if body is not None:
            found |= found_in_body(translated, body, allowed.substitutions)
        plans: tuple[SecretPlan, ...] = (
            *allowed.injections,
            *(plan for plan in allowed.substitutions if plan in found),
        )
        facts = translated.facts
        length = None if body is None else len(body)
        if plans and body is None:
            length = body_length(pending.parts, websocket=translated.websocket)
        repeated = _Repeated(
            pending.parts,
            pending.translated,
            pending.decision,
            pending.guarded,
            plans,
            frozenset(plans),
            tuple(plan for plan in allowed.substitutions if plan not in found),
            frozenset(plan.secret for plan in plans),
            facts.path[:MAX_RECORDED_PATH],
            length,
            None if length is None else head_size(pending.parts) + length,
            self._records(pending.guarded, plans),
        )
        if body is None:
            session.repeated = repeated
        return repeated

    def _records(self, guarded: GuardedRequest, plans: tuple[SecretPlan, ...]) -> _Records:
        session, form, allowed = self.session, self.session.effects.recorder.form, guarded.allowed
        facts = guarded.translated.facts
        same: _Same = facts.method, guarded.translated.websocket, guarded.stripped, guarded.forwarded, plans
        whole = len(facts.path) <= MAX_RECORDED_PATH
        last = session.records
        if whole and last is not None and last.allowed is allowed and last.same == same:
            return last
        fixed = self._fields(facts)
        del fixed["path"]
        uses = tuple(
            form(
                "secret.use",
                "allow",
                ("path",),
                **fixed,
                rule=allowed.rule,
                secret=plan.secret,
                binding=plan.binding,
            )
            for plan in plans
        )
        records = _Records(allowed, same, fixed, uses)
        if whole:
            session.records = records
        return records

    def _allow(self, repeated: _Repeated) -> RecordForm:
        records, guarded = repeated.records, repeated.guarded
        if records.allow is not None and records.allow[0] == self._route:
            return records.allow[1]
        allowed, observed = guarded.allowed, guarded.allowed.observed
        made = self.session.effects.recorder.form(
            "request",
            "allow" if observed is None else "observe",
            ("path", "request_id"),
            **records.fixed,
            rule=allowed.rule,
            observed=None if observed is None else observed.rule,
            reason=None if observed is None else observed.reason,
            websocket=guarded.translated.websocket or None,
            injections=[plan.binding for plan in repeated.plans] or None,
            stripped=list(guarded.stripped) or None,
            forwarded=list(guarded.forwarded) or None,
            **_routed(self._route),
        )
        records.allow = self._route, made
        return made

    async def _permit(
        self, repeated: _Repeated, body: bytes | None
    ) -> tuple[Composed, Injected, Presented | None] | Answer:
        """Return the request to forward, its secrets, and the client certificate among them.

        An answer is for a request that is not forwarded.
        """
        session, effects = self.session, self.session.effects
        parts, translated, allowed = repeated.parts, repeated.guarded.translated, repeated.guarded.allowed
        facts = translated.facts
        asked: str | None = None
        try:
            await self._allow(repeated).accept(repeated.path, self.request_id)
            injected: list[tuple[SecretPlan, Secret]] = []
            presented: Presented | None = None
            # Set before the first wait: a revocation during the wait then finds this flow.
            session.used.update(repeated.secrets)
            leased: dict[str, Secret] = {}  # one use for each secret, in however many places
            last = session.composed
            same = body is None and last is not None and last[0] is translated
            before: Injected = last[1] if same and last is not None else ()
            for place, plan in enumerate(repeated.plans):
                asked = plan.secret
                value = leased.get(asked) or await effects.secrets.lease(plan, facts, repeated.size)
                leased[asked] = value
                if session.over:  # the secret may have been revoked during the wait
                    raise ConnectionAbortedError
                same = same and place < len(before) and before[place][0] is plan and before[place][1] is value
                if presents(plan):
                    kept = session.certificate = read(plan, value, effects.date(), session.certificate)
                    presented = kept.presented
                elif not same:
                    self._check(plan, value)
                injected.append((plan, value))
            same = same and len(before) == len(injected)
            composed = last[2] if same and last is not None else self._composed(translated, tuple(injected), body)
            known = effects.decider.placeholders()
            stray = known.in_head(composed.target, composed.headers) or known.in_bytes(composed.body or b"")
            if stray is not None:
                return await self._deny(parts, translated, refusal(stray), secret=stray)
            for use in repeated.records.uses:
                await use.accept(repeated.path)
            await session.searched.learn()
            if session.over:
                raise ConnectionAbortedError
            session.sensitive.update(composed.sensitive)
            if repeated.missed:
                self._missed(repeated, body)
        except SecretRefused as error:
            return await self._deny(parts, translated, Deny(allowed.rule, error.reason), secret=asked)
        except SecretsSuspended as error:
            session.deny(allowed.rule, error.reason, method=facts.method, path=facts.path, secret=asked)
            return self._answer(parts, 503, pages.suspended(error.reason))
        except Exception as error:  # noqa: BLE001 - fails closed: the request is not sent, whichever port failed
            reason = "a secret cannot be sent" if isinstance(error, ValueError) else "not available"
            session.deny(allowed.rule, reason)
            return self._answer(parts, 503, pages.failure(503))
        return composed, tuple(injected), presented

    def _composed(self, translated: Translated, injected: Injected, body: bytes | None) -> Composed:
        """Return the request to send.

        Raises:
            SecretRefused, ValueError: it must not be sent.
        """
        session = self.session
        injections, substitutions = split(injected)
        placed = [(plan, value) for plan, value in injections if not plan.signs and not presents(plan)]
        rendered = [(plan, self._rendered(plan, value)) for plan, value in placed]
        composed = compose(translated, rendered, substitutions, body, session.max_body)
        if self._signer is not None:
            target, headers = self._signer.without_signature(composed.target, composed.headers)
            composed = replace(composed, target=target, headers=headers)
        if composed.path is not None:
            judged = session.effects.decider.decide_request(replace(translated.facts, path=composed.path))
            if isinstance(judged, Deny) and judged.rule != DEFAULT:
                raise SecretRefused("a rule denies the path with its secret")
        if body is None:
            session.composed = translated, injected, composed
        return composed

    def _check(self, plan: SecretPlan, value: Secret) -> None:
        """Check that a value can be sent.

        Raises:
            SecretRefused, ValueError: it must not be sent.
        """
        if isinstance(plan, InjectionPlan) and not plan.signs:
            self._rendered(plan, value)
        elif (short := too_short(plan, value)) is not None:
            raise SecretRefused(short)
        elif isinstance(plan, InjectionPlan):
            try:
                check_key(plan, value.reveal())
            except SigningRefused as error:
                raise SecretRefused(str(error)) from None

    def _rendered(self, plan: InjectionPlan, value: Secret) -> str:
        """Return the text of a secret in its slot.

        Raises:
            SecretRefused, ValueError: it must not be sent.
        """
        prepared = self.session.prepared
        last = prepared.get(plan)
        if last is not None and last.value is value:
            return last.text
        if (short := too_short(plan, value)) is not None:
            raise SecretRefused(short)
        _, text = render(plan, value.reveal())
        prepared[plan] = _Rendered(plan, value, text)
        return text

    def _missed(self, repeated: _Repeated, body: bytes | None) -> None:
        """Record the substitutions whose placeholder is absent. A program need not send what the sandbox was given."""
        translated, allowed = repeated.guarded.translated, repeated.guarded.allowed
        for plan in repeated.missed:
            if plan.issued:
                continue
            unread = body is None and Surface.BODY in plan.surfaces and body_form(translated.headers) is None
            reason = "the body is of a kind in which placeholders are not replaced" if unread else "no placeholder"
            fields = self._fields(translated.facts, rule=allowed.rule, secret=plan.secret, binding=plan.binding)
            self.session.effects.recorder.note("secret.use", "info", reason=reason, **fields)

    def _signed(self, head: ForwardHead, injected: Injected, body: bytes | None) -> ForwardHead:
        """Return the head with its signature, if it gets one.

        Raises:
            SigningRefused: the request cannot be signed.
        """
        if self._signer is None:
            return head
        plan, value = next((plan, value) for plan, value in injected if isinstance(plan, InjectionPlan) and plan.signs)
        signed = self._signer.sign(value.reveal(), head, self.session.effects.date().timestamp(), body)
        self.session.sensitive.update(name.lower() for name, _ in signed.headers if slot(name) in plan.claims)
        if signed.target != head.target:
            self.session.sensitive.add(b":path")
        return signed

    def _kept_head(self, repeated: _Repeated, composed: Composed) -> ForwardHead:
        parts, translated = repeated.parts, repeated.guarded.translated
        if translated.websocket:
            return self._head(parts, translated, composed)
        asked = self.scrub, self._whole_asked
        if repeated.head is None or repeated.head[0] is not composed or repeated.head[1] != asked:
            repeated.head = composed, asked, self._head(parts, translated, composed)
        return repeated.head[2]

    def _head(self, parts: RequestParts, translated: Translated, composed: Composed) -> ForwardHead:
        fields = list(composed.headers)
        if self.scrub:
            dropped = _NOT_WITH_SECRETS if self._whole_asked else _NOT_WHEN_SEARCHED
            fields = [one for one in fields if one[0].lower() not in dropped]
            fields.append((b"accept-encoding", b"identity"))
        if translated.websocket:
            self._websocket_key = joined(composed.headers, b"sec-websocket-key")
        if parts.version == HTTP2:
            return ForwardHead(composed.target, translated.host_header, tuple(fields))
        fields.insert(0, (b"Host", translated.host_header))
        if translated.websocket:
            fields += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        return ForwardHead(composed.target, b"", tuple(fields))

    async def connection(self, route: Route) -> None:
        """Record the connection that carries the request. The engine awaits this before it sends the first byte.

        Raises:
            Exception: nothing may be sent on it.
        """
        self._require(self._stage in _BEFORE_RESPONSE)
        session = self.session
        if route != self._route:
            fields = {**session.where, **_routed(route), "request_id": self.request_id}
            await session.effects.recorder.accept("connect", "info", **fields)
            if session.over:
                raise ConnectionAbortedError
        self._next(_BEFORE_RESPONSE, _Stage.CONNECTED)
        self._route = route

    def request_chunk(self, data: bytes) -> bytes:
        """Return the bytes to send now for this chunk of the request body: all of it, or as signed again.

        Raises:
            Exception: the flow must end; nothing of this chunk may be sent.
        """
        self._require(self.allowed and self._stage is not _Stage.FORWARDED)
        stray = None if self._search is None else self._search.find(data)
        if stray is not None:
            denied = refusal(stray)
            self.session.deny(denied.rule, denied.reason, secret=stray)
            raise PlaceholderSent
        self._bytes_up += len(data)
        if self._most_up is not None and self._bytes_up > self._most_up:
            self.session.refused(Refused("a longer body than the head says"))
            raise RuntimeError("more bytes than secrets were leased for")
        if self._signer is None:
            return data
        signer = self._signer
        return self._by_signer(lambda: signer.chunk(data))

    def _by_signer[T](self, step: Callable[[], T]) -> T:
        """Do a step of the signer, and record its refusal."""
        try:
            return step()
        except SigningRefused as error:
            self.session.refused(Refused(str(error)))
            raise

    def request_sent(self) -> None:
        """The whole body of the request has passed. Called before its end is sent.

        Raises:
            Exception: the flow must end; the end may not be sent.
        """
        if self._signer is not None:
            self._by_signer(self._signer.end)
        self._sent = True
        self._settle()

    # Answers to requests that are not forwarded.

    def _answer(self, parts: RequestParts, status: int, page: tuple[pages.Fields, bytes]) -> Answer:
        self._next((_Stage.JUDGING,), _Stage.ANSWERED)
        fields, body = page
        return Answer(status, tuple(fields), b"" if parts.method == b"HEAD" else body)

    async def _deny(
        self, parts: RequestParts, translated: Translated, denied: Deny, *, secret: str | None = None
    ) -> Answer:
        facts = translated.facts
        what = f"{facts.method} {facts.scheme.value}://{translated.host_header.decode('ascii')}{facts.path[:512]}"
        accepts = [value for name, value in translated.headers if name.lower() == b"accept"]
        await self._record_denial(facts, denied, secret)
        return self._answer(parts, 403, pages.denial(denied.rule, denied.reason, what, accepts))

    async def _deny_over(self, parts: RequestParts, translated: Translated, over: Over) -> Answer:
        denied = Deny(over.rule, over.reason)
        if over.retry_after is None:
            return await self._deny(parts, translated, denied)
        await self._record_denial(translated.facts, denied, None)
        return self._answer(parts, 429, pages.over(over.reason, over.retry_after))

    def _turn_away(self, parts: RequestParts, facts: RequestFacts, wait: int) -> Answer:
        reason = "the worker has too many requests under way"
        self.session.deny("overload", reason, method=facts.method, path=facts.path)
        return self._answer(parts, 503, pages.busy(wait))

    async def _record_denial(self, facts: RequestFacts, denied: Deny, secret: str | None) -> None:
        try:
            fields = self._fields(facts, rule=denied.rule, reason=denied.reason, secret=secret)
            await self.session.effects.recorder.accept("request", "deny", **fields)
        except Exception:  # noqa: BLE001 - the request is denied with or without the log
            self.session.deny(denied.rule, denied.reason, method=facts.method, path=facts.path)

    # The response.

    async def response(self, head: ResponseHead) -> Answer | Relay:
        """Judge the head of the server's response.

        After an `Answer` the engine sends its head, and then the bytes that `response_chunk` and `response_end` return.

        Raises:
            Exception: the flow must end.
        """
        self._next((_Stage.CONNECTED,), _Stage.HEADED)
        self._status = head.status
        if head.status == 101 and not accepts_websocket(head, self._websocket_key):
            raise RuntimeError("101 without a valid WebSocket handshake")
        known = self.session.searched.patterns
        read = head_facts(head, keep=known is None or not known.in_headers(head.headers))
        if not read.plain:
            raise RuntimeError("a response in a transfer coding other than chunked")
        reason = await self._unsearchable(head, read.unsearchable)
        if reason is not None:
            return self._withhold(reason)
        self.begun = True
        patterns = self.session.searched.patterns
        own = _CLOSE if self._closes and not read.own else read.own
        shown = self._without_secrets(read.headers)
        self._relayed = (*shown, *own) if own else shown  # the same object for a repeated head
        buffered = patterns is not None and read.coded and head.status != 101
        self._next((_Stage.HEADED,), _Stage.BUFFERED if buffered else _Stage.STREAMED)
        if patterns is not None and head.status == 101:
            self._scrubber, self._client_frames = FrameScrubber(patterns), FrameReader(masked=True)
        elif patterns is not None and not buffered:
            by_message = self._http2 and head.http2 and read.grpc
            self._scrubber = MessageScrubber(patterns) if by_message else Scrubber(patterns)
        return Relay(head.status, pages.reason_phrase(head.status), self._relayed, buffered)

    async def _unsearchable(self, head: ResponseHead, reason: str | None) -> str | None:
        """Return why the response cannot be searched for secrets; None if it can, or has no need to be.

        `reason` is that of its head.
        """
        session = self.session
        try:
            await session.searched.learn()
        except Exception:  # noqa: BLE001 - fails closed: an unknown secret cannot be removed
            return "the gateway does not know which secrets to remove from it"
        if session.over:
            raise ConnectionAbortedError
        if session.searched.patterns is None:
            return None
        if head.status == 101:
            if not self.scrub or joined(head.headers, _EXTENSIONS):
                raise RuntimeError("a WebSocket with an extension that was not requested")
            return session.searched.refusal()
        if not self._whole_asked and session.searched.sent and head.status == 206:
            return "a part of a document cannot be searched for secrets"
        return reason or session.searched.refusal()

    def _withhold(self, reason: str) -> Answer:
        """Answer 502 in place of the server; the rest of its response is discarded."""
        self._next((_Stage.HEADED,), _Stage.WITHHELD)
        self.session.deny("scrub", reason)
        self._status = 502
        fields, page = pages.refusal(502, f"The answer was withheld: {reason}.")
        self._page = b"" if self.facts is not None and self.facts.method == "HEAD" else page
        return Answer(502, tuple(fields), b"")

    def response_chunk(self, data: bytes) -> bytes:
        """Take a chunk of the response body; return the bytes that can be sent now.

        Raises:
            Exception: the flow must end; nothing of this chunk may be sent.
        """
        if self._stage is _Stage.WITHHELD:
            return self._take_page()
        self._require(self._stage is _Stage.STREAMED)
        self._bytes_down += len(data)
        return data if self._scrubber is None else self._scrubbed(self._scrubber, data)

    def response_end(self, last: bytes = b"") -> bytes:
        """Take the last chunk; return the rest of the response body. Not called if the body is incomplete.

        Raises:
            Exception: the flow must end.
        """
        if self._stage is _Stage.WITHHELD:
            return self._take_page()
        self._next((_Stage.STREAMED,), _Stage.COMPLETE)
        self._bytes_down += len(last)
        return last if self._scrubber is None else self._scrubbed(self._scrubber, last, at_end=True)

    def response_whole(self, body: bytes) -> Answer | tuple[Headers, bytes]:
        """Return headers and body of a buffered response.

        Raises:
            Exception: the flow must end.
        """
        self._next((_Stage.BUFFERED,), _Stage.COMPLETE)
        if not body:
            return self._relayed, body
        decoded = decode(encodings(self._relayed), body, self.session.max_decoded)
        patterns = self.session.searched.patterns
        if decoded is None or patterns is None:
            self._status = 502
            fields, page = pages.failure(502)
            return Answer(502, tuple(fields), page)
        scrubber = Scrubber(patterns)
        shown = self._scrubbed(scrubber, decoded, at_end=True)
        kept = [one for one in self._relayed if one[0].lower() not in _OF_ENCODED_BODY]
        return (*kept, (b"content-length", str(len(shown)).encode("ascii"))), shown

    def response_trailers(self, fields: Headers) -> Headers:
        """Return the response trailers to send.

        Raises:
            Exception: the flow must end.
        """
        self._require(self._stage in _IN_BODY)
        return () if self._stage is _Stage.WITHHELD else self._without_secrets(fields)

    # An accepted WebSocket.

    def open_tunnel(self) -> None:
        """The head of a 101 is sent: record the outcome. The request is in progress until the tunnel is closed."""
        self._require(self.tunnel)
        self._next((_Stage.STREAMED,), _Stage.TUNNEL)
        self._outcome(self._status)

    def tunnel_up(self, data: bytes) -> bytes:
        """Take bytes of the client; return those to send to the server.

        Raises:
            Exception: the flow must end; nothing of these bytes may be sent.
        """
        self._require(self._stage is _Stage.TUNNEL)
        self._bytes_up += len(data)
        if self._client_frames is None:
            return data
        try:
            return b"".join([piece.head + piece.content for piece in self._client_frames.pieces(data)])
        except Withheld as error:
            self.session.refused(Refused(str(error)))
            raise

    def tunnel_down(self, data: bytes) -> bytes:
        """Take bytes of the server; return those that can be sent to the client now.

        Raises:
            Exception: see `tunnel_up`.
        """
        self._require(self._stage is _Stage.TUNNEL)
        self._bytes_down += len(data)
        return data if self._scrubber is None else self._scrubbed(self._scrubber, data)

    def close_tunnel(self, reason: str) -> None:
        """Record the end of the tunnel. Bytes that are held back are not sent."""
        self._next((_Stage.TUNNEL,), _Stage.FINISHED)
        repeated = self._allowed_request()
        self._end(repeated, self._outcome_form(repeated.records, self._status, websocket=True, reason=reason))
        self.session.finished(self.request_id)

    # The end.

    def finish(self) -> None:
        """The response is complete: record the outcome."""
        self._require(not self.tunnel)
        self._next(_IN_BODY, _Stage.FINISHED)
        self._settle()
        self._outcome(self._status)

    def failed(self) -> None:
        """The client's or the server's connection failed: record the outcome."""
        self.session.finished(self.request_id)
        if self.allowed:
            self._outcome(None)

    @property
    def withheld(self) -> bool:
        """Whether the server's response is withheld from the client."""
        return self._stage is _Stage.WITHHELD

    @property
    def tunnel(self) -> bool:
        """Whether the response opens a tunnel, which is in progress until it is closed."""
        return self._websocket_key is not None and self._status == 101

    def _without_secrets(self, fields: Headers) -> Headers:
        """Headers or trailers with values scrubbed; those with a secret in their name are left out."""
        patterns = self.session.searched.patterns
        if patterns is None or not patterns.in_headers(fields):
            return fields
        kept = tuple((name, scrub_header(patterns, value)) for name, value in fields if not patterns.spans(name))
        if kept != fields:
            self.session.searched.match(self.session.where)
        return kept

    def _scrubbed(
        self, scrubber: Scrubber | MessageScrubber | FrameScrubber, data: bytes, *, at_end: bool = False
    ) -> bytes:
        """Scrub a chunk; `at_end`, the last one."""
        session = self.session
        work = scrubber.finish if at_end and not isinstance(scrubber, FrameScrubber) else scrubber.feed
        try:
            return session.searched.counted(scrubber, work, data, session.where)
        except Withheld as error:
            session.deny("scrub", str(error))
            raise

    def _take_page(self) -> bytes:
        page, self._page = self._page, b""
        return page

    # Stages and records.

    def _next(self, stages: tuple[_Stage, ...], following: _Stage) -> None:
        if self._stage not in stages:
            self._require(held=False)
        self._stage = following

    def _require(self, held: bool) -> None:
        if not held:
            raise RuntimeError(f"a step out of order, in the stage {self._stage.name}")

    def _settle(self) -> None:
        if self._sent and self._stage is _Stage.FINISHED:
            self.session.finished(self.request_id)

    def _fields(self, facts: RequestFacts, **more: object) -> dict[str, object]:
        # The log may truncate `path`; `path_sha256` covers the whole path.
        fields: dict[str, object] = {**self.session.where, "method": facts.method, "path": facts.path, **more}
        if len(facts.path) > MAX_RECORDED_PATH:
            fields["path_sha256"] = hashlib.sha256(facts.path.encode()).hexdigest()
            fields["path"] = facts.path[:MAX_RECORDED_PATH]
        return fields

    def _outcome(self, status: int | None) -> None:
        repeated, number = self._allowed_request(), -1 if status is None else status
        records = repeated.records
        if records.outcome is None or records.outcome[:2] != (number, self._route):
            records.outcome = number, self._route, self._outcome_form(records, status)
        self._end(repeated, records.outcome[2])

    def _allowed_request(self) -> _Repeated:
        if self._repeated is None:
            raise RuntimeError("an outcome of a request that was not allowed")
        return self._repeated

    def _end(self, repeated: _Repeated, form: RecordForm) -> None:
        form.note(self._bytes_down, self._bytes_up, self._duration(), repeated.path, self.request_id)

    def _duration(self) -> int:
        """Return the milliseconds since the request was forwarded."""
        return int((self.session.effects.clock() - self._started) * 1000)

    def _outcome_form(self, records: _Records, status: int | None, **more: object) -> RecordForm:
        ended: dict[str, object] = {"error": "upstream or client failed"} if status is None else {"status": status}
        return self.session.effects.recorder.form(
            "request",
            "info",
            ("bytes_down", "bytes_up", "duration_ms", "path", "request_id"),
            **records.fixed,
            **_routed(self._route),
            **ended,
            **more,
        )


def _translated(parts: RequestParts, facts: FlowFacts) -> Translated | Refused:
    """Return `translate`'s result. The results of small heads are kept, since clients repeat them."""
    size = len(parts.target) + sum([len(name) + len(value) for name, value in parts.headers])
    return _translated_before(parts, facts) if size <= _MAX_KEPT_HEAD else translate(parts, facts)


@lru_cache(maxsize=_KEPT_HEADS)
def _translated_before(parts: RequestParts, facts: FlowFacts) -> Translated | Refused:
    return translate(parts, facts)


def _changed(decision: AllowRequest) -> Deny:
    return Deny(decision.rule, "the policy changed while this request was waiting")


def _routed(route: Route | None) -> dict[str, str | None]:
    return {} if route is None else {"address": route.address, "peer_name": route.peer_name}
