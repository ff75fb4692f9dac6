"""What is looked for in the responses of one flow's host, and how much of it a sandbox may be shown.

- It is every value that a request to that host can carry under the policy in force, and the values before it: whichever
  request, connection or worker sent it. A secret that the sandbox does not have there is skipped; one that cannot be
  asked for is an error.
- Every answer to a guess is counted for the sandbox before it is given: the beginning of a value at an end
  (`MAX_PARTIAL` in the sandbox's life) and a value that was found (a rate). Beyond that there is no response.
"""

import base64
from collections.abc import Callable, Iterable

from gateway.effects import Effects, SecretRefused
from gateway.forms import Patterns
from gateway.messages import MessageScrubber
from gateway.scrub import Scrubber
from policy.compiled import SecretAt
from policy.injection import InjectionKind, InjectionPlan
from vault.secret import MIN_SENT, Secret

MAX_PARTIAL = 8
"""Responses to one sandbox that may end with what looks like the beginning of a secret. Each answers one guess."""
MAX_MATCHES = 1000
MATCHES_FORGOTTEN = 1000 / 3600
"""Pieces of responses to one sandbox that may hold a secret: so many at once, and so many a second."""
MAX_PATTERNS = 64

_PARTIAL = "too many responses ended with what looks like the beginning of a secret"
_MATCHED = "too many responses held a secret; try again later"
_NO_PASSWORDS = frozenset({"", "x-oauth-basic", "x-oauth", "api_token"})
"""What stands in the place of a password where the user is the token. Single characters do, too."""


class Withheld(Exception):
    """A response goes no further; the text says why."""


class KnownPatterns:
    """Compiled patterns by what they look for: flows of one host share them."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[frozenset[str], Patterns] = {}

    def of(self, texts: frozenset[str]) -> Patterns:
        """The patterns for `texts`."""
        known = self._known.pop(texts, None) or Patterns(texts)
        self._known[texts] = known
        if len(self._known) > MAX_PATTERNS:
            del self._known[next(iter(self._known))]
        return known

    def drop(self) -> None:
        """Forget them."""
        self._known.clear()

    def __repr__(self) -> str:
        return f"KnownPatterns({len(self._known)})"


class Sought:
    """What is looked for in the responses of one flow."""

    def __init__(self, host: str, effects: Effects, known: KnownPatterns) -> None:
        self._host = host
        self._decider = effects.decider
        self._secrets = effects.secrets
        self._disclosures = effects.disclosures
        self._recorder = effects.recorder
        self._clock = effects.clock
        self._known = known
        self._considered: set[SecretAt] = set()
        self._uses: set[SecretAt] = set()
        self._texts: frozenset[str] = frozenset()
        self.patterns: Patterns | None = None
        """None while nothing is looked for."""
        self.names: set[str] = set()
        """Names of the secrets that are looked for, or are being asked for."""

    def bound(self) -> bool:
        """Whether requests to the host can carry a secret."""
        return bool(self._decider.secrets_to(self._host))

    def complete(self) -> bool:
        """Whether all is looked for that the policy in force lets the host be sent."""
        return self._considered.issuperset(self._decider.secrets_to(self._host))

    def covers(self, plans: Iterable[InjectionPlan]) -> bool:
        """Whether what these plans send is looked for."""
        return {plan.secret for plan in plans} <= {use.plan.secret for use in self._uses}

    async def learn(self) -> None:
        """Look for all that the policy in force lets the host be sent, from now on.

        Raises:
            Exception: some of it is not known.
        """
        for use in self._decider.secrets_to(self._host):
            if use in self._uses:
                continue
            self._considered.add(use)
            self.names.add(
                use.plan.secret
            )  # before the wait, so that a revocation that happens meanwhile finds this flow
            try:
                values = await self._secrets.sought(use)
            except SecretRefused:
                continue
            texts = {text for value in values for text in texts_of(use.plan, value)}
            self._uses.add(use)
            if not texts <= self._texts:
                self._texts |= texts
                self.patterns = self._known.of(self._texts)

    def refusal(self) -> str | None:
        """Why no request to the host is answered now, None if it is."""
        if not self._uses and not self.bound():
            return None
        if self._disclosures.reflections >= MAX_PARTIAL:
            return _PARTIAL
        if self._disclosures.matches(self._clock(), MATCHES_FORGOTTEN) >= MAX_MATCHES:
            return _MATCHED
        return None

    def counted(
        self, scrubber: Scrubber | MessageScrubber, work: Callable[[], bytes], where: dict[str, object]
    ) -> bytes:
        """Let `scrubber` do its `work`, and count what it found.

        Raises:
            Withheld: it may not be shown; nothing of this piece is.
        """
        partials, matches = scrubber.partials, scrubber.matches
        out = work()
        for _ in range(scrubber.partials - partials):
            self.partial(where)
        if scrubber.matches > matches:
            self.match(where)
        return out

    def partial(self, where: dict[str, object]) -> None:
        """Count an end that looks like the beginning of a secret. Raises Withheld."""
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


def texts_of(plan: InjectionPlan, value: Secret) -> frozenset[str]:
    """The texts that give a value away. What is too short to be found is not sent: see `too_short`."""
    text = value.reveal()
    login = _login(plan, text)
    if login is not None:  # the name in front of a password is no secret
        texts = {login}
    else:
        scheme, _, rest = text.partition(" ")
        texts = {text, rest.strip()} if scheme.isalnum() else {text}
    return frozenset(one for one in texts if len(one) >= MIN_SENT)


def too_short(plan: InjectionPlan, value: Secret) -> str | None:
    """Why the value must not be sent, None if it may: what cannot be told from other text could not be taken out."""
    text = value.reveal()
    login = _login(plan, text)
    if len(text) >= MIN_SENT and (login is None or len(login) >= MIN_SENT):
        return None
    what = "secret" if login is None else "password"
    return f"the {what} is shorter than {MIN_SENT} characters and could not be kept out of responses"


def _login(plan: InjectionPlan, text: str) -> str | None:
    """What is secret of a text that is `user:password`; None if it is no such."""
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
