"""Secrets in responses: values that reveal them, searchable responses, and the limit of what these may reveal."""

import base64
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from gateway.admission import Admission
from gateway.effects import Effects, Over, SecretRefused
from gateway.ledger import Ledger
from gateway.placeholders import NONE, Placeholders
from gateway.scrub.charsets import searchable
from gateway.scrub.grpc import MessageScrubber
from gateway.scrub.searched import MAX_PARTIAL, MAX_PATTERNS, KnownPatterns, SearchedSecrets, texts_of, too_short
from gateway.scrub.stream import Withheld
from policy.compiled import SecretAt
from policy.decision import AllowRequest, Deny
from policy.facts import RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan, SecretPlan
from policy.rules import Endpoint
from policy.signing import AwsSigning, HmacSigning, KeyForm
from vault.secret import Secret


def plan(kind: InjectionKind, username: str | None = None) -> InjectionPlan:
    header = "X-Key" if kind is InjectionKind.API_KEY else "Authorization"
    return InjectionPlan("r", "token", kind, header, username)


RAW = base64.b64encode(b"user:long-password").decode()


@pytest.mark.parametrize(
    ("kind", "username", "value", "texts"),
    [
        (InjectionKind.BEARER, None, "tok:en-value", {"tok:en-value"}),
        (InjectionKind.API_KEY, None, "Token abcdefgh", {"Token abcdefgh", "abcdefgh"}),
        (InjectionKind.BASIC, None, "user:long-password", {"long-password"}),
        (InjectionKind.BASIC, None, "user:long:password", {"long:password"}),
        (InjectionKind.BASIC, "user", "long:password", {"long:password"}),
        (InjectionKind.BASIC, None, "a-long-token:", {"a-long-token"}),
        (InjectionKind.BASIC, None, "a-long-token:x", {"a-long-token"}),
        (InjectionKind.BASIC, None, "a-long-token:x-oauth-basic", {"a-long-token"}),
        (InjectionKind.BASIC_RAW, None, RAW, {"long-password"}),
        (InjectionKind.BASIC_RAW, None, "no-base64-at-all", {"no-base64-at-all"}),
    ],
)
def test_what_gives_a_value_away(kind, username, value, texts):
    assert texts == texts_of(plan(kind, username), Secret(value))
    assert too_short(plan(kind, username), Secret(value)) is None


@pytest.mark.parametrize(
    ("kind", "username", "value", "what"),
    [
        (InjectionKind.BEARER, None, "7-chars", "secret"),
        (InjectionKind.BASIC, "user", "7-chars", "secret"),
        (InjectionKind.BASIC, None, "administrator:7-chars", "password"),
        (InjectionKind.BASIC, None, "short:x", "password"),
        (InjectionKind.BASIC, None, "no-8-ch:x", "password"),
        (InjectionKind.BASIC_RAW, None, base64.b64encode(b"administrator:7-chars").decode(), "password"),
    ],
)
def test_a_value_that_looks_like_other_text_is_not_sent(kind, username, value, what):
    assert f"the {what} is shorter than 8 characters" in str(too_short(plan(kind, username), Secret(value)))


@pytest.mark.parametrize(
    ("content_type", "answer"),
    [
        ("text/html", True),
        ("text/html; charset=utf-8", True),
        ('text/html; Charset="UTF-8"', True),
        ("text/html; charset=", True),
        ("text/html; charset=ISO-8859-15; x=y", True),
        ("text/plain;charset=utf-16le", True),
        ("text/plain; charset=windows-1252", True),
        ("text/plain; charset=Shift_JIS", True),
        ("text/plain; charset=utf-7", False),
        ("text/plain; charset='utf-7'", False),
        ("text/plain; charset=utf-8; charset=utf-7", False),
        ("text/plain; charset*=us-ascii''utf-7", False),
        ("text/plain; charset*0=utf-7", False),
        ("text/plain; charset=unicode-1-1-utf-7", False),
        ("text/plain; charset=ibm037", False),
        ("text/plain; charset=cp500", False),
        ("text/plain; charset=iso-2022-jp", False),
        ("text/plain; charset=hz-gb-2312", False),
        ("text/plain; charset=nonsense", False),
    ],
)
def test_a_charset_in_which_text_is_not_its_own_bytes_is_not_searched(content_type, answer):
    assert answer is searchable(["text/plain", content_type])


# Values to search for, and counts.


@dataclass
class Vault:
    """The policy's bindings of the host, and vaultd's answers."""

    uses: tuple[SecretAt, ...]
    values: dict[str, tuple[str, ...] | Exception]
    asked: list[str] = field(default_factory=list)
    on_ask: Callable[[], None] = lambda: None

    def decide_request(self, _facts: RequestFacts) -> AllowRequest | Deny:
        return Deny("none", "not asked here")

    def secrets_to(self, _host: str) -> tuple[SecretAt, ...]:
        return self.uses

    def placeholders(self) -> Placeholders:
        return NONE

    def request(self) -> Over | None:
        return None

    async def lease(self, _plan: SecretPlan, _facts: RequestFacts, _size: int | None) -> Secret:
        raise SecretRefused("not asked here")

    async def searched(self, use: SecretAt) -> tuple[Secret, ...]:
        self.asked.append(use.plan.secret)
        self.on_ask()
        values = self.values[use.plan.secret]
        if isinstance(values, Exception):
            raise values
        return tuple(map(Secret, values))


@dataclass
class Log:
    notes: list[dict[str, object]] = field(default_factory=list)

    async def accept(self, _kind: str, _decision: str, **_fields: object) -> None:
        raise ConnectionError("nothing here waits for the log")

    def note(self, _kind: str, _decision: str, **fields: object) -> None:
        self.notes.append(fields)


def use(name: str) -> SecretAt:
    return SecretAt(InjectionPlan("b", name, InjectionKind.BEARER, "Authorization"), HOST, Endpoint(443, Scheme.HTTPS))


HOST = "good.test"
FIRST, SECOND = use("first"), use("second")


def names(*uses: SecretAt) -> frozenset[str]:
    return frozenset(one.plan.secret for one in uses)


def looking(
    vault: Vault,
    ledger: Ledger | None = None,
    log: Log | None = None,
    date: Callable[[], datetime] = lambda: datetime(2026, 1, 2, tzinfo=UTC),
) -> SearchedSecrets:
    effects = Effects(
        decider=vault,
        allowance=vault,
        secrets=vault,
        recorder=log or Log(),
        disclosures=ledger or Ledger.fresh(),
        admission=Admission(lambda: 0.0),
        clock=lambda: 0.0,
        date=date,
    )
    return SearchedSecrets(HOST, effects, KnownPatterns())


async def test_all_values_of_all_secrets_of_the_host_are_looked_for_and_asked_for_once() -> None:
    vault = Vault((FIRST, SECOND), {"first": ("value-of-today", "value-of-yesterday"), "second": ("another-value",)})
    searched = looking(vault)
    assert (True, False, None) == (searched.bound(), searched.complete(), searched.patterns)
    for _ in range(2):
        await searched.learn()
    assert searched.patterns is not None and searched.complete()
    for text in (b"value-of-today", b"value-of-yesterday", b"another-value"):
        assert searched.patterns.spans(text)
    assert (["first", "second"], {"first", "second"}) == (vault.asked, searched.names)
    assert searched.covers(names(FIRST, SECOND)) and not searched.covers(names(use("third")))

    vault.uses = ()  # it can still come back
    await searched.learn()
    assert searched.patterns.spans(b"another-value")


async def test_a_secret_that_policy_binds_later_is_looked_for_from_then_on() -> None:
    vault = Vault((), {"first": ("value-of-today",), "second": ("another-value",)})
    searched = looking(vault)
    for uses in ((), (FIRST,), (FIRST, SECOND), (SECOND,)):
        vault.uses = uses
        await searched.learn()
        assert searched.complete() and searched.covers(names(*uses))
    assert ["first", "second"] == vault.asked


async def test_a_secret_that_the_sandbox_does_not_have_is_passed_over_and_covers_nothing() -> None:
    vault = Vault((FIRST, SECOND), {"first": SecretRefused("no"), "second": ("another-value",)})
    searched = looking(vault)
    await searched.learn()
    assert searched.patterns is not None and searched.patterns.spans(b"another-value")
    assert searched.complete() and searched.covers(names(SECOND)) and not searched.covers(names(FIRST))
    vault.values["first"] = ("it-is-there-now",)
    await searched.learn()
    assert searched.patterns.spans(b"it-is-there-now") and searched.covers(names(FIRST))


async def test_a_secret_that_is_not_known_is_an_error_and_its_flow_is_within_reach() -> None:
    vault = Vault((FIRST,), {"first": ConnectionError("gone")})
    searched = looking(vault)
    vault.on_ask = lambda: found.append(set(searched.names))
    found: list[set[str]] = []
    with pytest.raises(ConnectionError):
        await searched.learn()
    assert [{"first"}] == found
    assert not searched.covers(names(FIRST))


async def test_what_is_looked_for_once_is_bounded_also_when_policy_binds_it_no_more() -> None:
    vault, ledger = Vault((FIRST,), {"first": ("value-of-today",)}), Ledger.fresh()
    searched = looking(vault, ledger)
    await searched.learn()
    ledger.reflections = MAX_PARTIAL
    vault.uses = ()
    assert searched.refusal() is not None
    assert looking(vault, ledger).refusal() is None  # for a host that never had a secret


async def test_each_end_that_looks_like_a_secret_is_counted_before_it_is_shown() -> None:
    """Also several in one piece."""
    ledger, log = Ledger.fresh(), Log()
    searched = looking(Vault((FIRST,), {"first": ("value-of-today",)}), ledger, log)
    await searched.learn()
    assert searched.patterns is not None
    message = b"\0\0\0\0\7value-o"
    scrubber = MessageScrubber(searched.patterns)
    out = searched.counted(scrubber, scrubber.feed, message * 3, {"host": HOST})
    assert (3 * message.replace(b"value-o", b"*" * 7), 3) == (out, ledger.reflections)
    assert [("reflection", HOST)] * 3 == [(note["rule"], note["host"]) for note in log.notes]
    for _ in range(MAX_PARTIAL - 3):
        searched.counted(scrubber, scrubber.feed, message, {})
    with pytest.raises(Withheld):
        searched.counted(scrubber, scrubber.feed, message, {})
    assert MAX_PARTIAL == ledger.reflections


def test_patterns_are_shared_bounded_and_forgotten() -> None:
    known = KnownPatterns()
    first = known.of(frozenset({"value-of-today"}))
    for number in range(MAX_PATTERNS - 1):
        known.of(frozenset({f"another value {number}"}))
    assert first is known.of(frozenset({"value-of-today"}))  # it is now the last used
    known.of(frozenset({"one more value"}))
    assert f"KnownPatterns({MAX_PATTERNS})" == repr(known)
    assert first is known.of(frozenset({"value-of-today"}))
    known.drop()
    assert "KnownPatterns(0)" == repr(known)
    assert first is not known.of(frozenset({"value-of-today"}))


AWS = InjectionPlan("b", "keys", InjectionKind.AWS_SIGV4, "Authorization", aws=AwsSigning("eu-west-1", "s3"))
KEYS = "AKIDEXAMPLE:s3cr3t/K7MDENG+bPxRfi"
TODAY = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


async def test_the_keys_of_a_signature_are_looked_for_in_all_their_encodings_for_today_and_tomorrow() -> None:
    """Derived keys are computed here by the documented steps. The access key id is no secret."""

    def derived(day: str) -> bytes:
        key = b"AWS4s3cr3t/K7MDENG+bPxRfi"
        for part in (day, "eu-west-1", "s3", "aws4_request"):
            key = hmac.new(key, part.encode(), "sha256").digest()
        return key

    times = [TODAY]
    vault = Vault((SecretAt(AWS, HOST, Endpoint(443, Scheme.HTTPS)),), {"keys": (KEYS,)})
    searched = looking(vault, date=lambda: times[-1])
    for day, other in (("20260102", "20260104"), ("20260103", "20260104"), ("20260104", "20260106")):
        await searched.learn()
        assert searched.patterns is not None
        key = derived(day)
        encoded = (key.hex().encode(), base64.b64encode(key), base64.urlsafe_b64encode(key))
        assert all(searched.patterns.spans(text) for text in (*encoded, b"s3cr3t/K7MDENG+bPxRfi"))
        assert not any(searched.patterns.spans(text) for text in (b"AKIDEXAMPLE", derived(other).hex().encode()))
        times.append(times[-1] + timedelta(0 if day == "20260102" else 2))


@pytest.mark.parametrize(
    ("plan", "value", "sent"),
    [
        (AWS, KEYS, False),
        (AWS, f"{KEYS}:session-token", True),
        (InjectionPlan("b", "k", InjectionKind.HMAC, "X-S", hmac=HmacSigning("X-S", "{path}")), "a-long-key", False),
        (FIRST.plan, "a-long-token", True),
    ],
)
async def test_only_a_secret_that_is_sent_can_come_back(plan: InjectionPlan, value: str, sent: bool) -> None:
    vault = Vault((SecretAt(plan, HOST, Endpoint(443, Scheme.HTTPS)),), {plan.secret: (value,)})
    searched = looking(vault)
    assert not searched.sent
    await searched.learn()
    assert searched.sent is sent
    assert searched.patterns is not None and searched.patterns.spans(value.partition(":")[2].encode() or value.encode())


@pytest.mark.parametrize("form", [KeyForm.BASE64, KeyForm.HEX])
async def test_the_key_of_a_keyed_hash_is_looked_for_in_each_encoding(form: KeyForm) -> None:
    key = b"\x00\xffkey of the service\x80"
    texts = {KeyForm.BASE64: base64.b64encode(key).decode(), KeyForm.HEX: key.hex()}
    signing = HmacSigning("X-S", "{path}", key=form)
    made = InjectionPlan("b", "k", InjectionKind.HMAC, "X-S", hmac=signing)
    searched = looking(Vault((SecretAt(made, HOST, Endpoint(443, Scheme.HTTPS)),), {"k": (texts[form],)}))
    await searched.learn()
    assert searched.patterns is not None
    assert all(searched.patterns.spans(text.encode()) for text in texts.values())


async def test_keys_of_another_form_are_looked_for_as_they_are() -> None:
    """They sign nothing, but an operator's mistake does not make them visible."""
    vault = Vault((SecretAt(AWS, HOST, Endpoint(443, Scheme.HTTPS)),), {"keys": ("no-access-key",)})
    searched = looking(vault)
    await searched.learn()
    assert searched.patterns is not None and searched.patterns.spans(b"no-access-key")
