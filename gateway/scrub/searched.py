"""The values to search for in the responses of one flow's host, and the limits of what a sandbox learns by guesses.

- The search covers every value that a request to that host can carry under the policy in force, and its former values,
  also if another request, connection or worker sent them. A secret that the sandbox does not have at the host is
  skipped. A secret whose value is not available is an error.
- Of the key of a signature the search covers the keys that are derived from it today and tomorrow, too.
- A scrubbed response tells the sandbox whether a guess was right. Each such response is counted for the sandbox before
  it is relayed: the apparent beginning of a value at an end (`MAX_PARTIAL` in the sandbox's life), and a found value (a
  rate). Above the limit the response is withheld.
"""

import base64
import contextlib
import re
from collections.abc import Callable

from gateway.effects import Effects, SecretRefused
from gateway.scrub.forms import Patterns
from gateway.scrub.frames import FrameScrubber
from gateway.scrub.grpc import MessageScrubber
from gateway.scrub.stream import Scrubber, Withheld
from gateway.signing.signer import is_sent, signing_texts
from policy.compiled import SecretAt
from policy.injection import InjectionKind, InjectionPlan
from policy.logins import AnyPlan, LoginPlan
from policy.references import SecretReference, is_reference
from vault.client_certificate import CertificateError, parse
from vault.secret import MIN_SENT, Secret

MAX_PARTIAL = 8
"""The limit of responses to one sandbox that end with the apparent beginning of a secret."""
MAX_MATCHES = 1000
MATCHES_FORGOTTEN = 1000 / 3600
"""The limits of pieces of responses to one sandbox with a secret in them: burst, and rate per second."""
MAX_PATTERNS = 64

_PARTIAL = "too many responses ended with what looks like the beginning of a secret"
_MATCHED = "too many responses held a secret; try again later"
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)")
_NO_PASSWORDS = frozenset({"", "x-oauth-basic", "x-oauth", "api_token"})
"""Placeholders for the password if the user name is the token. A single character counts as one, too."""


class KnownPatterns:
    """A cache of compiled patterns by their texts; flows to one host share them."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[frozenset[str | bytes], Patterns] = {}

    def of(self, texts: frozenset[str | bytes]) -> Patterns:
        """Return the patterns for `texts`."""
        known = self._known.pop(texts, None) or Patterns(texts)
        self._known[texts] = known
        if len(self._known) > MAX_PATTERNS:
            del self._known[next(iter(self._known))]
        return known

    def drop(self) -> None:
        """Empty the cache."""
        self._known.clear()

    def __repr__(self) -> str:
        return f"KnownPatterns({len(self._known)})"


class SearchedSecrets:
    """The values to search for in the responses of one flow."""

    def __init__(self, host: str, effects: Effects, known: KnownPatterns) -> None:
        self._host = host
        self._decider = effects.decider
        self._secrets = effects.secrets
        self._disclosures = effects.disclosures
        self._recorder = effects.recorder
        self._clock = effects.clock
        self._date = effects.date
        self._known = known
        self._considered: set[SecretAt] = set()
        self._uses: set[SecretAt] = set()
        self._covered: set[str] = set()
        self._learned: tuple[SecretAt, ...] | None = None
        self._day = 0
        self._texts: frozenset[str | bytes] = frozenset()
        self.patterns: Patterns | None = None
        """None while there is no value to search for."""
        self.sent = False
        """Whether requests to the host can contain a value. Keys of signatures are searched for, but never sent."""
        self.names: set[str] = set()
        """Names of the secrets that are searched for, or are being fetched."""

    def bound(self) -> bool:
        """Whether requests to the host can carry a secret."""
        return bool(self._decider.secrets_to(self._host))

    def complete(self) -> bool:
        """Whether every secret that the policy in force permits at the host is searched for."""
        return self._considered.issuperset(self._decider.secrets_to(self._host))

    def covers(self, secrets: frozenset[str]) -> bool:
        """Whether the secrets with these names are searched for."""
        return secrets <= self._covered

    async def learn(self) -> None:
        """Search from now on for every secret that the policy in force permits at the host.

        Raises:
            Exception: the value of a secret is not available.
        """
        uses = self._decider.secrets_to(self._host)
        day = self._date().toordinal()
        if uses is self._learned and day == self._day:
            return
        if day != self._day:  # a signature's derived keys are others
            self._uses.clear()
            self._day = day
        skipped = False
        for use in uses:
            if use in self._uses:
                continue
            self._considered.add(use)
            self.names.add(use.plan.secret)  # set before the wait: a revocation during the wait then finds this flow
            try:
                values = await self._secrets.searched(use)
            except SecretRefused:
                skipped = True
                continue
            texts = {text for value in values for text in self._texts_of(use, value)}
            self._uses.add(use)
            self._covered.add(use.plan.secret)
            if not texts <= self._texts:
                self._texts |= texts
                self.patterns = self._known.of(self._texts)
        self._learned = None if skipped else uses

    def _texts_of(self, use: SecretAt, value: Secret) -> frozenset[str | bytes]:
        if not isinstance(use.plan, InjectionPlan) or not use.plan.signs:
            self.sent = True
            return texts_of(use.plan, value)
        self.sent = self.sent or is_sent(use.plan, value.reveal())
        texts = signing_texts(use.plan, value.reveal(), use.host, self._date().timestamp())
        return frozenset(one for one in texts if len(one) >= MIN_SENT)

    def refusal(self) -> str | None:
        """Return why requests to the host are refused now, None if they are not."""
        if not self._uses and not self.bound():
            return None
        if self._disclosures.reflections >= MAX_PARTIAL:
            return _PARTIAL
        if self._disclosures.matches(self._clock(), MATCHES_FORGOTTEN) >= MAX_MATCHES:
            return _MATCHED
        return None

    def counted(
        self,
        scrubber: Scrubber | MessageScrubber | FrameScrubber,
        work: Callable[[bytes], bytes],
        data: bytes,
        where: dict[str, object],
    ) -> bytes:
        """Call `work` of `scrubber` with `data`, and count the values that it found.

        Raises:
            Withheld: a limit is reached; this piece must not be sent.
        """
        partials, matches = scrubber.partials, scrubber.matches
        out = work(data)
        for _ in range(scrubber.partials - partials):
            self.partial(where)
        if scrubber.matches > matches:
            self.match(where)
        return out

    def partial(self, where: dict[str, object]) -> None:
        """Count an end with the apparent beginning of a secret. Raises Withheld."""
        if self._disclosures.reflections >= MAX_PARTIAL:
            raise Withheld(_PARTIAL)
        self._disclosures.reflections += 1
        reason = "a response ended with what looks like the beginning of a secret"
        self._recorder.note("request", "info", rule="reflection", reason=reason, **where)

    def match(self, where: dict[str, object]) -> None:
        """Count a piece in which a secret was found. Raises Withheld."""
        now = self._clock()
        if self._disclosures.matches(now, MATCHES_FORGOTTEN) >= MAX_MATCHES:
            raise Withheld(_MATCHED)
        self._disclosures.match(now, MATCHES_FORGOTTEN)
        self._recorder.note("request", "info", rule="reflection", reason="a response held a secret", **where)


def texts_of(plan: AnyPlan, value: Secret) -> frozenset[str | bytes]:
    """Return the texts that reveal a value. A value with a text that is too short is not sent: see `too_short`.

    Of a client certificate, they are the private numbers of its key.
    """
    text = value.reveal()
    if isinstance(plan, InjectionPlan) and plan.handshake:
        with contextlib.suppress(CertificateError):  # a former value may be a token
            return parse(text).private_parts()
    login = _login(plan, text)
    if login is not None:  # the user name before a password is no secret
        texts = {login}
    else:
        scheme, _, rest = text.partition(" ")
        texts = {text, rest.strip()} if scheme.isalnum() else {text}
        texts |= _parts(plan, rest.strip() or text)
    return frozenset(one for one in texts if len(one) >= MIN_SENT)


def _parts(plan: AnyPlan, text: str) -> set[str]:
    """Return the parts of a composed value that are secrets by themselves.

    They are the password of two fields of a backend, and the signature of a JWT, whose other parts are no secret.
    """
    parts: set[str] = set()
    if is_reference(plan.secret) and len(SecretReference.parse(plan.secret).fields) > 1:
        parts.add(text.partition(":")[2])
    if (signed := _JWT.fullmatch(text)) is not None:
        parts.add(signed[1])
    return parts


def too_short(plan: AnyPlan, value: Secret) -> str | None:
    """Return why the value is too short to be sent, None if it is not. A short value could not be scrubbed."""
    text = value.reveal()
    login = _login(plan, text)
    if len(text) >= MIN_SENT and (login is None or len(login) >= MIN_SENT):
        return None
    what = "secret" if login is None else "password"
    return f"the {what} is shorter than {MIN_SENT} characters and could not be kept out of responses"


def _login(plan: AnyPlan, text: str) -> str | None:
    """Return the secret part of a text `user:password`; None if the text has another form."""
    if isinstance(plan, LoginPlan):
        _, colon, password = text.partition(":")
        return password if colon and plan.username is None else None
    if not isinstance(plan, InjectionPlan):
        return None
    if plan.kind not in (InjectionKind.BASIC, InjectionKind.BASIC_RAW) or plan.username is not None:
        return None
    if plan.kind is InjectionKind.BASIC_RAW:
        try:
            text = base64.b64decode(text, validate=True).decode("utf-8")
        except ValueError:
            return None
    user, colon, password = text.partition(":")
    if not colon:
        return None
    return user if len(password) == 1 or password in _NO_PASSWORDS else password
