"""Host names and patterns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.api import parse_network_policy
from policy.compile import compile_api
from policy.decision import AllowName, Deny, decide_flow, decide_name
from policy.document import PolicyDocument
from policy.facts import FlowFacts, Scheme
from policy.names import (
    HostPattern,
    InvalidName,
    canonical_host,
    is_canonical,
    is_local_name,
    parse_any_pattern,
    parse_pattern,
    wire_host,
)

WIRE_ACCEPTED = {
    "a plain name stays": (b"good.test", "good.test"),
    "ASCII letters are folded": (b"GOOD.Test", "good.test"),
    "one trailing dot is dropped": (b"good.test.", "good.test"),
    "an underscore is part of a label": (b"_acme.good.test", "_acme.good.test"),
    "hyphens inside a label, even in third place, are fine": (b"r3---sn-x.good.test", "r3---sn-x.good.test"),
    "a canonical A-label is kept": (b"xn--mnchen-3ya.test", "xn--mnchen-3ya.test"),
    "a label of 63 is the longest": (b"a" * 63 + b".test", "a" * 63 + ".test"),
    "a name of 253 is the longest": (b".".join([b"a" * 63] * 3 + [b"a" * 61]), ".".join(["a" * 63] * 3 + ["a" * 61])),
    "and one of 253 with its dot": (
        b".".join([b"a" * 63] * 3 + [b"a" * 61, b""]),
        ".".join(["a" * 63] * 3 + ["a" * 61]),
    ),
    "a single label is a name": (b"localhost", "localhost"),
    "digits elsewhere than in the last label are fine": (b"1.2.3.4.test", "1.2.3.4.test"),
    "a last label that begins like a hexadecimal number": (b"a.0xg1", "a.0xg1"),
    "a last label with digits and letters is no number": (b"a.1x", "a.1x"),
}

WIRE_REFUSED = {
    "empty": b"",
    "only a dot": b".",
    "two trailing dots": b"good.test..",
    "a leading dot": b".good.test",
    "a doubled dot": b"good..test",
    "a NUL that would hide the rest": b"evil.test\0.good.test",
    "a NUL at the end": b"good.test\0",
    "a line feed at the end": b"good.test\n",
    "a carriage return": b"good\r.test",
    "a blank": b"good .test",
    "DEL": b"good.test\x7f",
    "percent-encoding": b"good%2etest",
    "a port": b"good.test:443",
    "userinfo": b"good.test@evil.test",
    "a slash": b"good.test/",
    "a backslash": b"good.test\\",
    "a hash": b"good.test#",
    "a comma": b"good.test,evil.test",
    "a wildcard": b"*.good.test",
    "raw UTF-8": "münchen.test".encode(),
    "the Kelvin sign": "good.tes\u212a".encode(),
    "a folded full stop": "good\u3002test".encode(),
    "an edge hyphen in front": b"-good.test",
    "an edge hyphen behind": b"good-.test",
    "a label of 64": b"a" * 64 + b".test",
    "a name of 254": b".".join([b"a" * 63] * 3 + [b"a" * 62]),
    "a dotted quad": b"93.184.216.34",
    "a dotted quad with a dot": b"93.184.216.34.",
    "octal": b"0177.0.0.1",
    "hexadecimal": b"0x7f.1",
    "hexadecimal alone": b"0x7f000001",
    "an empty hexadecimal number": b"good.0x",
    "decimal": b"2130706433",
    "a short form": b"127.1",
    "an IPv6 literal": b"::1",
    "a bracketed IPv6 literal": b"[::1]",
    "a numeric top level": b"good.123",
    "Punycode of nothing": b"xn--.test",
    "Punycode of plain ASCII": b"xn--abc-.test",
    "broken Punycode": b"xn--9999999999999.test",
}

POLICY_ACCEPTED = {
    "U-labels become A-labels": ("münchen.test", "xn--mnchen-3ya.test"),
    "upper case U-labels too": ("MÜNCHEN.Test", "xn--mnchen-3ya.test"),
    "sharp s is itself (IDNA 2008)": ("straße.test", "xn--strae-oqa.test"),
    "a Cyrillic look-alike is visibly another name": ("g\u043e\u043ed.test", "xn--gd-fmca.test"),
}

POLICY_REFUSED = {
    "full-width letters": "\uff47ood.test",
    "an ideographic full stop": "good\u3002test",
    "a soft hyphen": "go\u00adod.test",
    "a joiner without context": "go\u200dod.test",
    "the Kelvin sign": "\u212agood.test",
    "a long s": "te\u017ft.test",
    "a dotted capital I": "\u0130.test",
    "invalid Punycode": "xn--zzzzzzz9999999.test",
    "white space around": " good.test",
    "a line feed": "good.test\n",
    "a URL": "https://good.test",
}


@pytest.mark.parametrize("case", WIRE_ACCEPTED)
def test_a_clean_wire_name_has_one_canonical_form(case: str) -> None:
    """The canonical form is that of the table."""
    raw, expected = WIRE_ACCEPTED[case]

    assert expected == wire_host(raw)


@pytest.mark.parametrize("case", WIRE_REFUSED)
def test_anything_else_on_the_wire_is_refused(case: str) -> None:
    """No repair, no truncation, no decoding."""
    with pytest.raises(InvalidName):
        wire_host(WIRE_REFUSED[case])


@pytest.mark.parametrize("case", POLICY_ACCEPTED)
def test_a_policy_stores_a_labels(case: str) -> None:
    """A name in another script is stored in its form on the wire."""
    text, expected = POLICY_ACCEPTED[case]

    assert expected == canonical_host(text)


@pytest.mark.parametrize("case", POLICY_REFUSED)
def test_a_policy_name_that_only_looks_right_is_refused(case: str) -> None:
    """There is no compatibility mapping, because it would give one name two spellings."""
    with pytest.raises(InvalidName):
        canonical_host(POLICY_REFUSED[case])


def test_the_message_of_a_refusal_is_plain_ascii() -> None:
    """A hostile name cannot send control characters to a terminal through an error."""
    with pytest.raises(InvalidName) as caught:
        wire_host(b"\x1b]0;x\x07\r\n\xe2\x80\xae.test")

    assert str(caught.value).isascii() and str(caught.value).isprintable()


def reference(raw: bytes) -> str | None:
    """Return the canonical form by a second, simple implementation."""
    text = "".join(chr(b + 32) if 65 <= b <= 90 else chr(b) for b in raw)
    labels = text.split(".")
    if labels[-1] == "":
        labels = labels[:-1]
    if not labels or len(".".join(labels)) > 253:
        return None
    for label in labels:
        if not 1 <= len(label) <= 63 or label[0] == "-" or label[-1] == "-":
            return None
        if any(c not in "abcdefghijklmnopqrstuvwxyz0123456789-_" for c in label):
            return None
        if label[:4] == "xn--":
            try:
                unicode = label[4:].encode().decode("punycode")
            except UnicodeError:
                return None
            if all(ord(c) < 128 for c in unicode) or unicode.encode("punycode").decode() != label[4:]:
                return None
    last = labels[-1]
    if all(c in "0123456789" for c in last):
        return None
    if last[:2] == "0x" and all(c in "0123456789abcdef" for c in last[2:]):
        return None
    return ".".join(labels)


_LABELS = st.text("abcXYZ019-_xn", min_size=0, max_size=8) | st.sampled_from(
    ["xn--mnchen-3ya", "0x1F", "com", "a" * 63]
)
_NAMES = st.lists(_LABELS, max_size=6).map(".".join).map(str.encode)


@given(_NAMES | st.binary(max_size=40))
def test_the_canonicaliser_equals_its_reference_and_never_raises_anything_else(raw: bytes) -> None:
    """The same verdict and result. The output is ASCII, and a second application changes nothing."""
    try:
        actual = wire_host(raw)
    except InvalidName:
        actual = None

    assert reference(raw) == actual
    if actual is not None:
        assert actual.isascii() and actual == wire_host(actual.encode()) and is_canonical(actual)


@given(st.text(max_size=30))
def test_what_a_person_wrote_becomes_a_wire_name_or_is_refused(text: str) -> None:
    """Every accepted policy name can occur on the wire."""
    try:
        host = canonical_host(text)
    except InvalidName:
        return

    assert host == wire_host(host.encode("ascii"))


MATCHES = {
    "an exact name matches itself": ("good.test", "good.test", True),
    "an exact name matches nothing below it": ("good.test", "a.good.test", False),
    "a dot is a dot": ("api.good.test", "apixgood.test", False),
    "a wildcard matches one label": ("*.good.test", "a.good.test", True),
    "a wildcard matches three labels": ("*.good.test", "a.b.c.good.test", True),
    "a wildcard never matches the apex": ("*.good.test", "good.test", False),
    "a wildcard never matches an ancestor": ("*.good.test", "test", False),
    "a suffix needs a label boundary": ("*.good.test", "evilgood.test", False),
    "a name further right does not count": ("*.good.test", "a.good.test.evil.test", False),
    "a wildcard of another spelling": ("*.good.test", "good.testevil.test", False),
}


@pytest.mark.parametrize("case", MATCHES)
def test_patterns_match_by_label(case: str) -> None:
    """Suffixes end at label boundaries, and the apex does not match."""
    pattern, host, expected = MATCHES[case]

    assert expected == HostPattern(pattern).matches(host)


DANGEROUS = {
    "a bare star": "*",
    "a star and a dot": "*.",
    "an unlisted single label": "*.test",
    "a top-level domain": "*.com",
    "a second-level public suffix": "*.co.uk",
    "a private-section suffix": "*.github.io",
    "an ancestor of private-section suffixes": "*.amazonaws.com",
    "an ancestor of one such suffix": "*.srcf.net",
    "a suffix made by a wildcard rule of the list": "*.kawasaki.jp",
    "a public suffix in a script of its own": "*.公司.cn",
    "an inner star": "a*.good.test",
    "a star without a dot": "*good.test",
    "two stars": "**.good.test",
    "two wildcard labels": "*.*.good.test",
    "a star at the end": "good.*",
    "a character class": "[a-z].good.test",
    "a regular expression": "(?i)good.test",
    "an alternative": "good.test|evil.test",
    "an address": "*.0.0.1",
}


@pytest.mark.parametrize("case", DANGEROUS)
def test_patterns_that_span_owners_or_are_no_patterns_are_refused(case: str) -> None:
    """No pattern that allows is wider than one registrable name."""
    with pytest.raises(InvalidName):
        parse_pattern(DANGEROUS[case])


@pytest.mark.parametrize("text", ["*.good.test", "*.example.com", "*.bucket.s3.amazonaws.com", "*.me.github.io"])
def test_a_wildcard_below_a_registration_is_a_pattern(text: str) -> None:
    """A control for the refusals above."""
    assert text == parse_pattern(text).text


@pytest.mark.parametrize("text", ["\u00e4.test", "A.test", "a.test.", "", "10.0.0.1", "a b"])
def test_any_other_text_is_not_canonical(text: str) -> None:
    """The function returns False and raises nothing."""
    assert is_canonical(text) is False
    assert is_canonical("a.test")


def test_an_exact_name_may_be_a_public_suffix() -> None:
    """Because it has one owner."""
    assert "github.io" == parse_pattern("github.io").text


MESSAGES = {
    b"": "host name is empty",
    b"a." * 127 + b"a": "host name is longer than 253 characters",
    b"a b": "host name 'a b' has a character that is not allowed in host names",
    b"a..b": "host name 'a..b' has an empty label",
    b"\xc3\xa4.test": r"host name '\xc3\xa4.test' has a character that is not allowed in host names",
    b"a" * 64 + b".test": f"host name '{'a' * 64}.test' has a label longer than 63 characters",
    b"-a.Test": "host name '-a.Test' has a label with a hyphen at its edge",
    b"xn--9999.test": "host name 'xn--9999.test' has a label that is not Punycode",
    b"10.0.0.1": "host name '10.0.0.1' ends in a number, so it is an address and not a name",
}


@pytest.mark.parametrize("raw", MESSAGES)
def test_a_refusal_says_what_is_wrong(raw: bytes) -> None:
    with pytest.raises(InvalidName) as caught:
        wire_host(raw)
    assert MESSAGES[raw] == str(caught.value)


@pytest.mark.parametrize("text", ["*", "*.", "", "a.*.test", "*.*.test", "a*"])
def test_a_refused_wildcard_is_distinguished_from_a_name(text: str) -> None:
    with pytest.raises(InvalidName, match=r"the only wildcard is a leading `\*\.` in front of a name$"):
        parse_any_pattern(text)


def test_width_is_free_where_it_only_takes_away() -> None:
    """A denial may name a whole top-level domain. It must still be a pattern."""
    assert "*.com" == parse_any_pattern("*.com").text
    with pytest.raises(InvalidName):
        parse_any_pattern("*")


def test_a_pattern_cannot_be_built_from_text_that_is_not_canonical() -> None:
    """Deserialised patterns are checked too."""
    for text in ("Good.test", "good.test.", "*.GOOD.test", "*", "*.", "a.*.test"):
        with pytest.raises(InvalidName):
            HostPattern(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("a.localhost", True),
        ("printer.local", True),
        ("metadata.google.internal", True),
        ("intranet", True),
        ("1.0.0.127.in-addr.arpa", True),
        ("good.test", False),
        ("notlocal.example.com", False),
        ("mylocal", True),
        ("a.mylocal.example", False),
    ],
)
def test_local_names_are_not_public(host: str, expected: bool) -> None:
    """Single labels and the reserved local suffixes never count as public names."""
    assert expected == is_local_name(host)


LOCAL_SUFFIXES = (
    "localhost",
    "localdomain",
    "local",
    "internal",
    "intranet",
    "private",
    "corp",
    "home",
    "lan",
    "home.arpa",
    "in-addr.arpa",
    "ip6.arpa",
    "onion",
    "alt",
)
_ANY_PUBLIC = compile_api(
    PolicyDocument(),
    parse_network_policy(
        {
            "defaultAction": "allow",
            "egress": [
                {"action": "allow", "target": target} for suffix in LOCAL_SUFFIXES for target in (suffix, f"*.{suffix}")
            ],
        }
    ),
)


@pytest.mark.parametrize("suffix", LOCAL_SUFFIXES)
def test_no_rule_of_a_caller_opens_a_local_name(suffix: str) -> None:
    """The suffix itself, and names below it. A name that only resembles one of them is public."""
    for host in (suffix, f"a.{suffix}", f"a.b.{suffix}"):
        assert is_local_name(host)
        denial = decide_name(_ANY_PUBLIC, host)
        assert isinstance(denial, Deny) and denial.rule == "ceiling"
        denial = decide_flow(_ANY_PUBLIC, FlowFacts(host, 443, Scheme.HTTPS))
        assert isinstance(denial, Deny) and denial.rule == "ceiling"
    for host in (f"a.x{suffix}", f"{suffix}.test", f"a.{suffix}.test", f"a.{suffix}x"):
        assert not is_local_name(host)
        assert AllowName("default") == decide_name(_ANY_PUBLIC, host)
