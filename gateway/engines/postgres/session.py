"""One database session of a flow: judges it, and gets its secret. Sans-IO.

    startup packet -> judge -> connection: verified route -> recorded -> credentials -> login -> finish

Order: decide -> admit -> count -> allow record accepted -> (the engine dials and verifies the server) -> `connect`
record accepted -> lease -> use record accepted -> decide again -> credentials.

- The session awaits its effects itself, in this order. A step out of order raises `RuntimeError`.
- The secret is leased only after the server's certificate was verified. It is used for one login.
- A denial is a `SessionRefused` with an error message for the client. So is a failure of the log or the vault. On any
  other exception the engine ends the flow.
- What the server sends after the login is not searched for the password: a server with SCRAM never gets it, and a
  search would tell a client with SQL which guesses are right (ADR 35).

Effects are ports (`gateway.effects`). The module opens no connection.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from gateway import startup as packets
from gateway.effects import Effects, SecretRefused, SecretsSuspended, Sessions
from gateway.scrub.searched import too_short
from gateway.startup import Startup
from gateway.verdicts import Origin, Route
from policy.decision import Deny
from policy.facts import SessionFacts
from policy.logins import LoginPlan, login_of
from policy.sessions import AllowSession
from vault.secret import Secret

_ASK = "To get access, ask the operator of this sandbox."


class SessionRefused(Exception):
    """The session does not begin. `answer` is the error message for the client."""

    def __init__(self, answer: bytes) -> None:
        super().__init__("the session does not begin")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Credentials:
    """A login: the user's name, and the password."""

    user: str
    password: Secret


class _Stage(Enum):
    NEW = auto()
    ALLOWED = auto()
    CONNECTED = auto()
    LEASED = auto()
    FINISHED = auto()


class DatabaseSession:
    """See `gateway.engines.engine.FlowSession`. `sessions` None: every session is refused."""

    def __init__(self, origin: Origin, effects: Effects, sessions: Sessions | None) -> None:
        self.used: set[str] = set()
        """The name of the secret that the session logs in with."""
        self.over = False
        """Whether the flow was aborted. Set by the engine."""
        self._flow = origin.facts
        self._effects = effects
        self._sessions = sessions
        self._facts: SessionFacts | None = None
        self._allowed: AllowSession | None = None
        self._user: str | None = None
        self._route: Route | None = None
        self._stage = _Stage.NEW
        self._started = 0.0
        self._where: dict[str, object] = {
            "host": origin.facts.host,
            "port": origin.facts.port,
            "scheme": origin.facts.scheme.value,
            "flow": origin.flow_id,
            "destination": origin.destination,
            "peer": f"{origin.peer[0]}:{origin.peer[1]}",
            "engine": origin.engine,
        }

    def still_allowed(self) -> bool:
        """Whether the policy in force allows the session with the login that it has."""
        if self._facts is None or self._allowed is None:
            return True
        decision = self._decide(self._facts)
        return isinstance(decision, AllowSession) and decision.login == self._allowed.login

    async def judge(self, startup: Startup) -> None:
        """Judge the session that the client asks for.

        Raises:
            SessionRefused: it is not allowed.
        """
        self._next(_Stage.NEW, _Stage.ALLOWED)
        facts = self._facts = SessionFacts(self._flow.host, self._flow.port, startup.database)
        decision = self._decide(facts)
        if isinstance(decision, Deny):
            raise await self.refuse(decision)
        wait = self._effects.admission.retry_after()
        if wait is not None:
            self._note_denial(Deny("overload", "the worker has too many requests under way"))
            raise SessionRefused(
                packets.error(packets.TOO_MANY, "The gateway is busy.", f"Try again in {wait} seconds.")
            )
        over = self._effects.allowance.request()
        if over is not None:
            raise await self.refuse(Deny(over.rule, over.reason), packets.TOO_MANY)
        self._allowed = decision
        self._started = self._effects.clock()
        with self._under_way():
            await self._accept("request", "allow", rule=decision.rule, injections=[decision.login.binding])

    async def connection(self, route: Route) -> None:
        """Record the verified connection to the server.

        Raises:
            SessionRefused: the log does not accept the record.
        """
        self._next(_Stage.ALLOWED, _Stage.CONNECTED)
        self._route = route
        await self._accepted("connect", "info", **self._where, address=route.address, peer_name=route.peer_name)

    async def credentials(self) -> Credentials:
        """Return the login for the server of `connection`.

        Raises:
            SessionRefused: there is none.
        """
        self._next(_Stage.CONNECTED, _Stage.LEASED)
        facts, allowed, sessions = self._facts, self._allowed, self._sessions
        if facts is None or allowed is None or sessions is None:
            raise RuntimeError("a login without an allowed session")
        with self._under_way():
            return await self._released(sessions, facts, allowed)

    async def _released(self, sessions: Sessions, facts: SessionFacts, allowed: AllowSession) -> Credentials:
        plan = allowed.login
        self.used.add(plan.secret)  # set before the wait: a revocation during the wait then finds this flow
        try:
            value = await sessions.login(plan, facts)
            self._check_over()
            found = _login(plan, value)
        except SecretRefused as refused:
            raise await self.refuse(Deny(allowed.rule, refused.reason), secret=plan.secret) from None
        except SecretsSuspended as suspended:
            denial = Deny(allowed.rule, suspended.reason)
            raise await self.refuse(denial, packets.UNAVAILABLE, secret=plan.secret) from None
        except ConnectionAbortedError:
            raise
        except Exception as error:  # noqa: BLE001 - fails closed: there is no login, whichever part failed
            self._note_denial(Deny(allowed.rule, f"the secret is not available: {type(error).__name__}"), plan.secret)
            raise SessionRefused(
                packets.error(packets.UNAVAILABLE, "The gateway's vault gives no login now.")
            ) from None
        self._user = found.user
        await self._accept("secret.use", "allow", rule=allowed.rule, secret=plan.secret, binding=plan.binding)
        again = self._decide(facts)
        if not (isinstance(again, AllowSession) and again.login == plan):
            raise await self.refuse(Deny(allowed.rule, "the policy changed while this session was waiting"))
        return found

    def ready(self) -> None:
        """The session is open."""
        self._next(_Stage.LEASED, _Stage.FINISHED)

    def finish(self, bytes_up: int, bytes_down: int, error: str | None) -> None:
        """Record the end of an allowed session. `error`: why it ended before it was open, or was aborted."""
        if self._allowed is None:
            return
        route = self._route
        self._effects.recorder.note(
            "request",
            "info",
            **self._fields(),
            address=None if route is None else route.address,
            peer_name=None if route is None else route.peer_name,
            error=error,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            duration_ms=int((self._effects.clock() - self._started) * 1000),
        )

    async def cancelled(self) -> None:
        """Record a cancel request before it is relayed.

        Raises:
            SessionRefused: the log does not accept the record.
        """
        self._next(_Stage.NEW, _Stage.ALLOWED)
        over = self._effects.allowance.request()
        if over is not None:
            raise await self.refuse(Deny(over.rule, over.reason))
        await self._accept("request", "allow", reason="cancel request")

    async def refuse(self, denied: Deny, code: str = packets.DENIED, secret: str | None = None) -> SessionRefused:
        """Record a denial; return what the client gets."""
        fields = {**self._fields(), "rule": denied.rule, "reason": denied.reason, "secret": secret}
        try:
            await self._effects.recorder.accept("request", "deny", **fields)
        except Exception:  # noqa: BLE001 - the session is denied with or without the log
            self._note_denial(denied, secret)
        if code != packets.DENIED:
            return SessionRefused(packets.error(code, denied.reason))
        return SessionRefused(packets.denial(denied.rule, denied.reason, _ASK))

    def _decide(self, facts: SessionFacts) -> AllowSession | Deny:
        if self._sessions is None:
            return Deny("engine", "this gateway opens no database sessions")
        return self._sessions.decide_session(facts)

    async def _accept(self, kind: str, decision: str, **fields: object) -> None:
        await self._accepted(kind, decision, **self._fields(), **fields)

    async def _accepted(self, kind: str, decision: str, **fields: object) -> None:
        try:
            await self._effects.recorder.accept(kind, decision, **fields)
        except Exception:  # noqa: BLE001 - fails closed: nothing happens without its record
            self._note_denial(Deny("audit", "the audit log does not accept records"))
            raise SessionRefused(
                packets.error(packets.UNAVAILABLE, "The gateway's audit log takes no records now.")
            ) from None
        self._check_over()

    def _note_denial(self, denied: Deny, secret: str | None = None) -> None:
        fields = {**self._fields(), "rule": denied.rule, "reason": denied.reason, "secret": secret}
        self._effects.recorder.note("request", "deny", **fields)

    def _fields(self) -> dict[str, object]:
        database = None if self._facts is None else self._facts.database
        return {**self._where, "database": database, "user": self._user}

    def _check_over(self) -> None:
        if self.over:
            raise ConnectionAbortedError

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Count the session as under way at the log and the vault. The time of the server does not count."""
        number = self._effects.admission.begin()
        try:
            yield
        finally:
            self._effects.admission.end(number)

    def _next(self, stage: _Stage, following: _Stage) -> None:
        if self._stage is not stage:
            raise RuntimeError(f"a step out of order, in the stage {self._stage.name}")
        self._stage = following


def _login(plan: LoginPlan, value: Secret) -> Credentials:
    short = too_short(plan, value)
    if short is not None:
        raise SecretRefused(short)
    try:
        user, password = login_of(plan, value.reveal())
    except ValueError as error:
        raise SecretRefused(str(error)) from None
    return Credentials(user, Secret(password))
