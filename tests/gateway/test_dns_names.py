"""The data that a sandbox can encode into resolved names is bounded. Ordinary names are allowed."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dns.names import NameBudget, entropy, over_bounds
from gateway.ledger import Ledger
from policy.compiled import CompiledPolicy
from policy.decision import Deny
from policy.facts import Scheme
from policy.names import HostPattern, is_canonical
from policy.rules import Action, DnsSettings, Endpoint, Mode, Precedence, Rule, RuleList

ZONE = "wild.example.com"


def policy(*hosts: str, dns: DnsSettings | None = None, mode: Mode = Mode.ENFORCE) -> CompiledPolicy:
    rule = Rule("r", Action.ALLOW, tuple(HostPattern(host) for host in hosts), endpoints=(Endpoint(443, Scheme.HTTPS),))
    return CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, mode, (rule,)),), dns=dns or DnsSettings())


POLICY = policy("good.example.com", f"*.{ZONE}")


def over(host: str, rules: CompiledPolicy = POLICY, names: NameBudget | None = None, now: float = 0.0) -> str | None:
    """Return the rule that refuses a name; None if it may be resolved."""
    denied = (names or NameBudget(Ledger.fresh())).admit(rules, host, now)
    return None if denied is None else denied.rule


USUAL = (
    ("*.us-east-1.elb.amazonaws.com", "internal-a1b2c3d4e5f67890-1234567890.us-east-1.elb.amazonaws.com"),
    ("*.elb.eu-west-1.amazonaws.com", "a0123456789abcdef0123456789abcdef-0123456789abcdef.elb.eu-west-1.amazonaws.com"),
    ("*.elb.eu-west-1.amazonaws.com", "a7f3c9e1b5d2846f0a9c3e7b1d5f2846-9c1e5b7d3f2a8064.elb.eu-west-1.amazonaws.com"),
    ("*.us-east-1.elb.amazonaws.com", "k8s-default-webappin-8f2b1c7d9e-1029384756.us-east-1.elb.amazonaws.com"),
    ("*.s3.eu-central-1.amazonaws.com", "my-company-prod-artifacts-2026.s3.eu-central-1.amazonaws.com"),
    ("*.s3.eu-central-1.amazonaws.com", "customer-data-lake-landing-zone-123456789012.s3.eu-central-1.amazonaws.com"),
    ("*.s3.amazonaws.com", "elasticmapreduce-us-east-1-123456789012-logs.s3.amazonaws.com"),
    ("*.cloudfront.net", "d111111abcdef8.cloudfront.net"),
    ("*.execute-api.eu-west-1.amazonaws.com", "a1b2c3d4e5.execute-api.eu-west-1.amazonaws.com"),
    ("*.eks.amazonaws.com", "0f1e2d3c4b5a69788796a5b4c3d2e1f0.gr7.eu-west-1.eks.amazonaws.com"),
    ("*.cdn.example.net", "5f4dcc3b5aa765d61d8327deb882cf99.cdn.example.net"),
    ("*.cdn.example.net", "da39a3ee5e6b4b0d3255bfef95601890afd80709.cdn.example.net"),
    ("*.vercel.app", "my-app-git-feature-new-login-page-acme-team.vercel.app"),
    ("*.vercel.app", "my-app-qwertz9k2-acme-projects.vercel.app"),
    ("*.netlify.app", "deploy-preview-1234--wonderful-johnson-a1b2c3.netlify.app"),
    ("*.netlify.app", "65f0a1b2c3d4e5f6a7b8c9d0--kubernetes-docs-preview.netlify.app"),
    ("*.blob.core.windows.net", "mystorageaccountprod2026.blob.core.windows.net"),
    ("*.blob.core.windows.net", "acmeproddatalake2026weu1.blob.core.windows.net"),
    ("*.azurewebsites.net", "contoso-payments-prod-gzfqbyh7d5fkhyek.westeurope-01.azurewebsites.net"),
    ("*.azurecr.io", "acmeplatformregistry.azurecr.io"),
    ("*.r2.cloudflarestorage.com", "8a7d6f5e4c3b2a19887766554433221100ffeedd.r2.cloudflarestorage.com"),
    ("*.run.app", "payments-api-6kq7w2n5aa-ew.a.run.app"),
    ("*.example.de", "xn--vermgensberater-gesucht-mnchen-9dd8w.example.de"),
    ("*.example.ru", "xn--80aakbafh6ca3c.example.ru"),
    ("*.example.org", "xn--fiqs8s.xn--55qx5d.example.org"),
    ("*.preview.example.org", "sandbox-7c9e6679-7425-40de-944b-e07fc1f90ae7.preview.example.org"),
    ("*.compute.amazonaws.com", "ec2-203-0-113-25.eu-central-1.compute.amazonaws.com"),
    ("*.googlevideo.com", "rr4---sn-4g5e6nsz.googlevideo.com"),
)


@pytest.mark.parametrize(("pattern", "host"), USUAL, ids=lambda text: str(text))
def test_the_usual_names_of_load_balancers_stores_and_previews_pass(pattern: str, host: str) -> None:
    assert is_canonical(host)
    assert None is over(host, policy(pattern))


WORDS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=24)
HEX = st.text("0123456789abcdef", min_size=1, max_size=63)


@given(st.lists(WORDS | HEX, min_size=1, max_size=8))
def test_words_and_hexadecimal_parts_are_not_taken_for_data(parts: list[str]) -> None:
    label = "-".join(parts)[:63].strip("-")
    if label and not label.startswith("xn--"):
        assert None is over(f"{label}.{ZONE}")


@given(st.integers(25, 36), st.randoms(use_true_random=False))
def test_a_long_part_that_uses_each_character_once_is_taken_for_data(size: int, random: object) -> None:
    characters = list(string.ascii_lowercase + string.digits)
    random.shuffle(characters)  # type: ignore[attr-defined]
    assert "dns.entropy" == over(f"{''.join(characters[:size])}.{ZONE}")


@pytest.mark.parametrize(
    ("free", "settings", "rule"),
    [
        ("a" * 41, DnsSettings(max_label=40), "dns.max_label"),
        ("a" * 40, DnsSettings(max_label=40), None),
        ("a.b.c.d.e", DnsSettings(), "dns.max_labels"),
        ("a.b.c.d", DnsSettings(), None),
        (f"{'a' * 50}.{'b' * 50}", DnsSettings(), "dns.max_name"),
        (f"{'a' * 50}.{'b' * 49}", DnsSettings(), None),
        ("k3j9x0q8w7e6r5t4y3u2i1o0pz", DnsSettings(), "dns.entropy"),
        ("cdn-k3j9x0q8w7e6r5t4y3u2i1o0pz", DnsSettings(), "dns.entropy"),
        ("k3j9x0q8w7e6r5t4y3u2i1o0pz", DnsSettings(entropy=600), None),
    ],
)
def test_each_bound_can_be_set_and_names_itself(free: str, settings: DnsSettings, rule: str | None) -> None:
    assert rule == over(f"{free}.{ZONE}", policy(f"*.{ZONE}", dns=settings))


def test_distinct_names_are_counted_once_each_for_an_hour() -> None:
    rules, names = policy(f"*.{ZONE}", dns=DnsSettings(unique_names=3)), NameBudget(Ledger.fresh())
    asked = [over(f"h{number}.{ZONE}", rules, names) for number in (0, 0, 1, 1, 2, 3, 4)]
    assert [None] * 5 + ["dns.unique_names"] * 2 == asked
    assert None is over(f"h1.{ZONE}", rules, names)
    assert None is over(f"h9.{ZONE}", rules, names, now=3601.0)


@pytest.mark.parametrize(
    "rules",
    [policy("a" * 60 + ".example.com"), policy("*.example.com", "a" * 60 + ".example.com")],
)
def test_names_that_policy_spells_out_have_no_bound(rules: CompiledPolicy) -> None:
    tight = DnsSettings(max_label=1, max_name=1, unique_names=1)
    rules = CompiledPolicy(rules.name, rules.lists, dns=tight)
    assert None is over("a" * 60 + ".example.com", rules)


def test_where_a_mode_or_a_default_allows_a_name_its_last_two_labels_are_the_zone() -> None:
    watch = policy("good.example.com", dns=DnsSettings(max_labels=1), mode=Mode.OBSERVE)
    assert ("dns.max_labels", None) == (over("a.b.other.example", watch), over("a.other.example", watch))


@given(st.text(string.ascii_lowercase, min_size=1, max_size=80))
def test_entropy_is_between_none_and_that_of_distinct_characters(text: str) -> None:
    assert 0 <= round(entropy(text), 9) <= round(entropy("".join(sorted(set(text)))), 9)


def test_a_denial_says_what_to_look_for() -> None:
    denied = NameBudget(Ledger.fresh()).admit(POLICY, f"a.b.c.d.e.{ZONE}", 0.0)
    assert Deny("dns.max_labels", f"This name has more than 4 labels in front of {ZONE}.") == denied


DENIALS = {
    "labels": ("a.b.c.d.e", Deny("dns.max_labels", f"This name has more than 4 labels in front of {ZONE}.")),
    "length": (
        f"{'a' * 50}.{'b' * 50}",
        Deny("dns.max_name", f"This name has more than 100 characters in front of {ZONE}."),
    ),
    "a label": ("a" * 41, Deny("dns.max_label", "A label of this name is longer than 40 characters.")),
    "data": (string.ascii_lowercase[:25], Deny("dns.entropy", "A label of this name looks like data.")),
    "data behind a hyphen": (
        f"a-{string.ascii_lowercase[:25]}-b",
        Deny("dns.entropy", "A label of this name looks like data."),
    ),
    "data in a later label": (
        f"a.{string.ascii_lowercase[:25]}",
        Deny("dns.entropy", "A label of this name looks like data."),
    ),
    "nothing: 24 characters are too few to tell": (string.ascii_lowercase[:24], None),
}


@pytest.mark.parametrize("case", DENIALS)
def test_each_bound_says_what_it_is(case: str) -> None:
    free, expected = DENIALS[case]
    settings = DnsSettings(max_label=63 if case != "a label" else 40)
    rules = policy(f"*.{ZONE}", dns=settings)
    assert expected == NameBudget(Ledger.fresh()).admit(rules, f"{free}.{ZONE}", 0.0)
    assert expected == over_bounds(rules, f"{free}.{ZONE}")


def test_the_bound_of_entropy_is_in_hundredths_of_a_bit_and_may_be_reached() -> None:
    """32 hexadecimal digits, each twice, have four bits per character."""
    label = "0123456789abcdef" * 2
    for entropy_bound, rule in {399: "dns.entropy", 400: None, 401: None}.items():
        rules = policy(f"*.{ZONE}", dns=DnsSettings(entropy=entropy_bound))
        assert rule == over(f"{label}.{ZONE}", rules)


@pytest.mark.parametrize(
    ("text", "bits"), [("a", 0.0), ("ab", 1.0), ("aabb", 1.0), ("abcd", 2.0), ("abcdefgh", 3.0), ("aaab", 0.8112781)]
)
def test_entropy_is_that_of_shannon(text: str, bits: float) -> None:
    assert bits == pytest.approx(entropy(text))


def test_each_zone_has_its_own_count() -> None:
    rules = policy("*.a.example.com", "*.b.example.com", "*.c.b.example.com", dns=DnsSettings(unique_names=1))
    names = NameBudget(Ledger.fresh())
    asked = ("x.a.example.com", "x.b.example.com", "y.c.b.example.com", "y.a.example.com", "c.b.example.com")
    refused = [names.admit(rules, host, 0.0) for host in asked]
    assert [None, None, None] == refused[:3]
    assert (
        Deny("dns.unique_names", "This sandbox used too many distinct names below a.example.com in an hour.")
        == refused[3]
    )
    assert "dns.unique_names" == over("z.b.example.com", rules, names)


def test_the_count_of_an_hour_ends_with_it() -> None:
    rules, ledger = policy(f"*.{ZONE}", dns=DnsSettings(unique_names=1)), Ledger.fresh()
    names = NameBudget(ledger)
    assert None is over(f"a.{ZONE}", rules, names, now=100.0)
    assert "dns.unique_names" == over(f"b.{ZONE}", rules, names, now=3699.9)
    assert None is over(f"b.{ZONE}", rules, names, now=3700.0)
    assert "dns.unique_names" == over(f"a.{ZONE}", rules, names, now=7299.0)


def test_the_names_of_a_former_worker_count_until_their_hour_ends() -> None:
    rules, ledger = policy(f"*.{ZONE}", dns=DnsSettings(unique_names=3)), Ledger.fresh()
    for host in ("a", "b"):
        assert None is over(f"{host}.{ZONE}", rules, NameBudget(ledger), now=5000.0)
    assert 2 == ledger.names
    names = NameBudget(ledger)
    assert None is over(f"c.{ZONE}", rules, names, now=8599.0)
    assert "dns.unique_names" == over(f"d.{ZONE}", rules, names, now=8599.9)
    assert None is over(f"d.{ZONE}", rules, names, now=8600.0)


def test_the_zones_that_are_counted_are_bounded() -> None:
    """A known zone stays allowed. Zones of an hour ago are removed."""
    watch, names = policy("good.example.com", mode=Mode.OBSERVE), NameBudget(Ledger.fresh())
    assert [None] * 1024 == [over(f"a.z{number}.test", watch, names, now=10.0) for number in range(1024)]
    assert "dns.unique_names" == over("a.other.test", watch, names, now=3609.9)
    assert None is over("b.z7.test", watch, names, now=3609.9)
    assert None is over("a.other.test", watch, names, now=3610.0)


def test_the_names_that_are_held_are_bounded() -> None:
    """At most 50,000 over all zones. Names of an hour ago are removed, known ones stay allowed."""
    wide = policy(f"*.{ZONE}", "*.b.example.com", dns=DnsSettings(unique_names=1_000_000))
    names = NameBudget(Ledger.fresh())
    assert None is over("w.b.example.com", wide, names, now=10.0)
    assert all(names.admit(wide, f"{number}.{ZONE}", 10.0) is None for number in range(49_999))
    assert "dns.unique_names" == over(f"x.{ZONE}", wide, names, now=10.0)
    assert "dns.unique_names" == over("x.b.example.com", wide, names, now=10.0)
    assert None is over(f"7.{ZONE}", wide, names, now=10.0)
    assert [None] * 3 == [over(f"{label}.b.example.com", wide, names, now=3610.0) for label in "xyz"]
    assert None is over(f"x.{ZONE}", wide, names, now=3610.0)


def test_the_names_of_an_hour_ago_are_held_no_longer() -> None:
    """One zone may have the same number in each hour."""
    wide = policy(f"*.{ZONE}", dns=DnsSettings(unique_names=1_000_000))
    names = NameBudget(Ledger.fresh())
    for hour in range(2):
        assert all(names.admit(wide, f"{number}.{ZONE}", 10.0 + 3600 * hour) is None for number in range(26_000))


def test_the_rate_is_refilled_by_time_up_to_the_burst() -> None:
    settings, names = DnsSettings(query_rate=2, query_burst=3), NameBudget(Ledger.fresh())

    def take(now: float, patience: float = 2.0) -> float | None:
        return names.take(settings, now, patience)

    assert [0.0, 0.0, 0.0, 0.5, 1.0] == [take(100.0) for _ in range(5)]
    assert take(100.0, 1.25) is None, "what is refused takes no place"
    assert 1.5 == take(100.0, 1.5)
    assert 1.5 == take(100.5), "half a second is one place"
    assert 2.0 == take(100.0), "a clock that goes back refills nothing"
    assert [0.0, 0.0, 0.0, 0.5] == [take(1000.0) for _ in range(4)]


ZONES = {
    "the longest suffix, not the last": (("*.b.test", "*.a.b.test"), "x.y.a.b.test", "a.b.test"),
    "a suffix of this name only": (
        ("*.a.b.test", "*.longer.c.test", "a-longer-name.c.test"),
        "x.y.a.b.test",
        "a.b.test",
    ),
    "an exact name that ends alike": (("*.b.test", "aya.b.test"), "x.ya.b.test", "b.test"),
    "a suffix without its dot": (("*.b.test", "*.a.b.test"), "x.xa.b.test", "b.test"),
}


@pytest.mark.parametrize("case", ZONES)
def test_the_zone_is_what_policy_wrote_for_this_name(case: str) -> None:
    """As the refusal names it."""
    patterns, host, zone = ZONES[case]
    expected = Deny("dns.max_labels", f"This name has more than 1 labels in front of {zone}.")
    rules = policy(*patterns, dns=DnsSettings(max_labels=1))
    assert expected == NameBudget(Ledger.fresh()).admit(rules, host, 0.0)


def test_what_a_denial_spells_out_has_bounds() -> None:
    allow = Rule("r", Action.ALLOW, (HostPattern("*.b.test"),), endpoints=(Endpoint(443, Scheme.HTTPS),))
    deny = Rule("d", Action.DENY, (HostPattern("x.y.b.test"),), methods=("DELETE",))
    lists = (RuleList("p", Precedence.DENY_WINS, rules=(allow, deny)),)
    assert "dns.max_labels" == over("x.y.b.test", CompiledPolicy("p", lists, dns=DnsSettings(max_labels=1)))


def test_the_zone_is_the_longest_suffix_that_policy_wrote() -> None:
    tight = DnsSettings(max_labels=1)
    rules = policy("*.example.com", f"*.{ZONE}", dns=tight)
    assert None is over(f"a.{ZONE}", rules)
    assert "dns.max_labels" == over(f"a.b.{ZONE}", rules)
    always = CompiledPolicy(rules.name, rules.lists, always_allow=("*.b.wild.example.com", "x.y.z.test"), dns=tight)
    assert None is over(f"a.b.{ZONE}", always)
    assert None is over("x.y.z.test", always)
    assert "dns.max_labels" == over("w.x.y.z.test", always)
