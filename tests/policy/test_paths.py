"""Request paths and path patterns."""

import posixpath
import re
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.paths import LENIENT, STRICT, Leniency, PathPattern, ambiguity, literal, routed

AMBIGUOUS = {
    "a dot segment": ("/v1/safe/../admin", "dot segment"),
    "a dot segment at the end": ("/v1/safe/..", "dot segment"),
    "a single dot": ("/v1/./safe", "dot segment"),
    "an encoded dot segment": ("/v1/safe/%2e%2e/admin", "percent-encoded character that needs none"),
    "a half-encoded dot segment": ("/v1/safe/.%2e/admin", "percent-encoded character that needs none"),
    "an encoded slash": ("/v1/safe%2f..%2fadmin", "percent-encoded separator"),
    "an encoded slash alone": ("/v1%2Fsafe", "percent-encoded separator"),
    "a backslash": ("/v1/safe\\..\\admin", "character that a path does not have"),
    "an encoded backslash": ("/v1/safe%5cadmin", "percent-encoded separator"),
    "double encoding": ("/v1/safe/%252e%252e/admin", "nested percent-encoding"),
    "double encoding of a slash": ("/v1/safe%252fadmin", "nested percent-encoding"),
    "two slashes": ("/v1//safe", "empty segment"),
    "two slashes in front": ("//v1/safe", "empty segment"),
    "two slashes at the end": ("/v1/safe//", "empty segment"),
    "a path parameter": ("/v1/safe;x=1/../admin", "path parameter"),
    "an encoded path parameter": ("/v1/safe%3bx", "percent-encoded separator"),
    "an encoded NUL": ("/v1/safe%00", "percent-encoded control character"),
    "an encoded line feed": ("/v1/safe%0a", "percent-encoded control character"),
    "a trailing dot": ("/v1/safe.", "segment ending in a dot or blank"),
    "a trailing dot inside": ("/v1/safe./x", "segment ending in a dot or blank"),
    "a trailing encoded blank": ("/v1/safe%20/x", "segment ending in a dot or blank"),
    "three dots": ("/v1/.../x", "dot segment"),
    "dots and blanks": ("/v1/.%20./x", "dot segment"),
    "a fragment": ("/v1/safe#x", "character that a path does not have"),
    "a query": ("/v1/safe?x", "character that a path does not have"),
    "a blank": ("/v1/sa fe", "control character, blank or non-ASCII character"),
    "a tab": ("/v1/sa\tfe", "control character, blank or non-ASCII character"),
    "raw UTF-8": ("/v1/s\u00e4fe", "control character, blank or non-ASCII character"),
    "overlong UTF-8 of a slash": ("/v1/safe%c0%af..", "percent-encoded text that is not UTF-8"),
    "broken UTF-8": ("/v1/safe%ff", "percent-encoded text that is not UTF-8"),
    "broken encoding": ("/v1/safe%zz", "broken percent-encoding"),
    "broken encoding in its first digit": ("/v1/safe%g0", "broken percent-encoding"),
    "broken encoding behind a good one": ("/v1/%20safe%2", "broken percent-encoding"),
    "double encoding at the end": ("/v1/safe%25AF", "nested percent-encoding"),
    "an encoded slash before another escape": ("/v1%2fsafe%20x", "percent-encoded separator"),
    "an encoded slash between other escapes": ("/v1%20%2f%20x", "percent-encoded separator"),
    "only an encoded blank": ("/v1/%20/x", "dot segment"),
    "a dot segment at the end of a directory": ("/v1/safe/../", "dot segment"),
    "a trailing encoded blank at the end": ("/v1/safe%20", "segment ending in a dot or blank"),
    "cut encoding": ("/v1/safe%2", "broken percent-encoding"),
    "a letter encoded without need": ("/%76%31/safe", "percent-encoded character that needs none"),
    "no slash in front": ("v1/safe", "does not begin with a slash"),
    "empty": ("", "does not begin with a slash"),
    "an asterisk": ("*", "does not begin with a slash"),
    "too long": ("/" + "a" * 9000, "path too long"),
}

CLEAR = [
    "/a%25g0",
    "/a%252",
    "/.a/..b",
    "/%20a",
    "/%20ab",
    "/X",
    "/",
    "/v1/",
    "/v1/safe",
    "/v1/safe/",
    "/@scope/pkg",
    "/a..b/c.d",
    "/.well-known/x",
    "/%C3%A4/x",
    "/a%20b",
    "/100%25",
    "/~me/x=1,y:2",
    "/*",
]


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_path_that_servers_read_differently_is_ambiguous(case: str) -> None:
    """It is refused on hosts with path rules, and never rewritten."""
    path, reason = AMBIGUOUS[case]

    assert reason == ambiguity(path)


@pytest.mark.parametrize("path", CLEAR)
def test_ordinary_paths_are_clear(path: str) -> None:
    """A control for the refusals above."""
    assert ambiguity(path) is None


ENCODED, EMPTY = Leniency(encoded_slashes=True), Leniency(empty_segments=True)

PERMITTED = {
    "a scoped package": ("/@scope%2fname", ENCODED, None),
    "with digits in upper case": ("/@scope%2Fname/-/x.tgz", ENCODED, None),
    "two of them": ("/a%2Fb%2Fc", ENCODED, None),
    "one at the end": ("/a%2F", ENCODED, None),
    "a dot segment behind one": ("/a%2F..%2Fb", ENCODED, "dot segment"),
    "a dot segment at the end": ("/a/x%2F..", ENCODED, "dot segment"),
    "a dot before one": ("/a.%2Fb", ENCODED, "segment ending in a dot or blank"),
    "two in succession": ("/a%2F%2Fb", ENCODED, "empty segment"),
    "one beside a slash": ("/a/%2Fb", ENCODED, "empty segment"),
    "one that is encoded twice": ("/a%252Fb", ENCODED, "nested percent-encoding"),
    "one with an encoded digit": ("/a%2%46b", ENCODED, "broken percent-encoding"),
    "one inside another escape": ("/a%%2F2Fb", ENCODED, "broken percent-encoding"),
    "an encoded backslash": ("/a%5cb", ENCODED, "percent-encoded separator"),
    "an encoded parameter": ("/a%3bb", ENCODED, "percent-encoded separator"),
    "an empty segment, if only encoded slashes are permitted": ("/a//b", ENCODED, "empty segment"),
    "an object's key with an empty segment": ("/bucket//key", EMPTY, None),
    "several empty segments": ("/bucket///a//b//", EMPTY, None),
    "a dot segment between slashes": ("/bucket//../b", EMPTY, "dot segment"),
    "what some servers read as a host": ("//evil.test/x", EMPTY, "empty segment"),
    "an encoded slash, if only empty segments are permitted": ("/a%2Fb", EMPTY, "percent-encoded separator"),
    "both forms": ("/a//b%2F%2Fc", LENIENT, None),
    "both forms, at the front": ("/%2Fevil.test/x", LENIENT, "empty segment"),
    "both forms, with a dot segment": ("/a/%2F/..%2f/b", LENIENT, "dot segment"),
    "too long": ("/" + "a%2F" * 3000, LENIENT, "path too long"),
}


@pytest.mark.parametrize("case", PERMITTED)
def test_a_permitted_form_has_two_readings_and_no_more(case: str) -> None:
    """What makes a path ambiguous otherwise makes either reading ambiguous."""
    path, leniency, reason = PERMITTED[case]

    assert reason == ambiguity(path, leniency)
    assert ambiguity(path, STRICT) is not None


def test_the_two_readings_of_a_path() -> None:
    assert ("/a%2Fb//c", "/a/b/c") == (literal("/a%2fb//c"), routed("/a%2fb//c"))


def test_an_encoded_slash_is_no_separator_for_an_allow_pattern() -> None:
    """It is one for a deny pattern, in either case of its digits."""
    assert PathPattern("/@corp%2Fui").matches("/@corp%2fui")
    assert not PathPattern("/@corp%2Fui").matches("/@corp/ui")
    assert not PathPattern("/@corp/ui").matches("/@corp%2fui")
    assert not PathPattern("/v1/*").matches("/v1%2fx")
    assert PathPattern("/v1/*").matches("/v1/a%2fx")
    assert PathPattern("/v1/Admin/*").matches_any_case("/v1/admin%2fx")
    assert PathPattern("/v1/Admin/*").matches_any_case("/v1//admin//x")
    assert PathPattern("/a%2Fb*").encoded_slashes
    assert not PathPattern("/a/b*").encoded_slashes


_PIECES = st.sampled_from(
    ["/", "..", ".", "%2e", "%2f", "%5c", "\\", ";", "v1", "safe", "admin", "%25", "2e", "%", "%20", " ", "x", "A", "?"]
)


@given(
    st.lists(_PIECES, max_size=12).map(lambda pieces: "/v1/safe/" + "".join(pieces)),
    st.sampled_from([STRICT, ENCODED, EMPTY, LENIENT]),
)
def test_no_accepted_path_leaves_the_prefix_under_common_normalisers(path: str, leniency: Leniency) -> None:
    """Decode once or twice, resolve dots, convert backslashes, remove parameters: the prefix stays, with each form that
    a rule can permit.
    """
    if ambiguity(path, leniency) is not None or not PathPattern("/v1/safe/*").matches(path):
        return
    for text in (path, unquote(path), unquote(unquote(path))):
        turned = text.replace("\\", "/")
        cut = "/".join(segment.partition(";")[0] for segment in turned.split("/"))
        stripped = "/".join(segment.rstrip(". ") for segment in turned.split("/"))
        merged = re.sub("/+", "/", text)
        for form in (text, turned, cut, stripped, merged, posixpath.normpath(text), posixpath.normpath(cut)):
            assert (form + "/").startswith("/v1/safe/")


PLAIN = "!$%&'()*+,-./0123456789:=@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz~"


def test_the_characters_of_a_path_are_the_listed_ones() -> None:
    """Each is judged alone inside a segment. Two dots and a single percent sign have other tests."""
    reasons = {";": "path parameter", "%": "broken percent-encoding"}
    for character in map(chr, range(0x101)):
        reason = reasons.get(character)
        if reason is None and character in '\\?#"<>^`{|}':
            reason = "character that a path does not have"
        elif reason is None and character not in PLAIN:
            reason = "control character, blank or non-ASCII character"
        assert reason == ambiguity(f"/a{character}b"), character


def test_the_octets_that_may_be_encoded_are_the_listed_ones() -> None:
    """In either case of the digits. Octets of UTF-8 only as complete characters."""
    for octet in range(0x100):
        character = chr(octet)
        if character.isascii() and (character.isalnum() or character in "-._~"):
            reason = "percent-encoded character that needs none"
        elif octet < 0x20 or octet == 0x7F:
            reason = "percent-encoded control character"
        elif character in "/\\;":
            reason = "percent-encoded separator"
        else:
            reason = "percent-encoded text that is not UTF-8" if octet >= 0x80 else None
        assert (
            reason == ambiguity(f"/a%{octet:02x}b") == ambiguity(f"/a%{octet:02X}b") == ambiguity(f"/%20a%{octet:02x}b")
        )


def test_a_path_and_a_pattern_have_a_longest_length() -> None:
    """The limits are 8192 and 2048 characters."""
    assert ambiguity("/" + "a" * 8191) is None
    assert "path too long" == ambiguity("/" + "a" * 8192)
    assert PathPattern("/" + "a" * 2047).matches("/" + "a" * 2047)
    with pytest.raises(ValueError, match="longer than 2048"):
        PathPattern("/" + "a" * 2048)


MATCHES = {
    "below a segment prefix": ("/v1/*", "/v1/x/y", True),
    "the segment itself with its slash": ("/v1/*", "/v1/", True),
    "the segment itself without a slash": ("/v1/*", "/v1", False),
    "a longer segment": ("/v1/*", "/v10/x", False),
    "a string prefix reaches into the segment": ("/v1*", "/v10/x", True),
    "exact": ("/health", "/health", True),
    "exact and a slash": ("/health", "/health/", False),
    "exact and something below": ("/health", "/health/x", False),
    "another case": ("/v1/*", "/V1/x", False),
    "everything": ("/*", "/", True),
}


@pytest.mark.parametrize("case", MATCHES)
def test_patterns_match_by_segment_prefix_or_exactly(case: str) -> None:
    """One star, at the end."""
    pattern, path, expected = MATCHES[case]

    assert expected == PathPattern(pattern).matches(path)


def test_an_open_prefix_may_end_where_a_path_may_not() -> None:
    """A further letter completes its last segment. An exact path cannot be completed."""
    assert PathPattern("/v1/a.*").matches("/v1/a.b")
    assert PathPattern("/v1/.*").matches("/v1/.b")
    for text in ("/v1/a.", "/v1/."):
        with pytest.raises(ValueError, match="never matches"):
            PathPattern(text)


def test_denials_ignore_ascii_case() -> None:
    """A server that ignores case must not open a denied prefix or a denied path."""
    for path, expected in {"/V1/ADMIN": True, "/v1/admin": True, "/v1/admin/": False, "/v1/Admi": False}.items():
        assert expected == PathPattern("/v1/Admin").matches_any_case(path)
    assert PathPattern("/v1/Admin/*").matches_any_case("/V1/ADMIN/x")
    assert not PathPattern("/v1/Admin/*").matches_any_case("/v1/administrator/x")


@pytest.mark.parametrize(
    "text",
    ["", "*", "v1/*", "/v1/*/x", "/v1/**", "/v1/../x", "/v1//*", "/a%2fb", "/a%2F..", "/a%2F/b", "/a;b", "/v1?x", "/ä"],
)
def test_a_pattern_that_could_never_match_is_refused(text: str) -> None:
    """Because such a pattern is a mistake of its author."""
    with pytest.raises(ValueError, match="path pattern"):
        PathPattern(text)


_PATTERNS = st.sampled_from(["/*", "/a*", "/a/*", "/a/b", "/a/b*", "/ab", "/b/*", "/a/", "/a"])


@given(_PATTERNS, _PATTERNS)
def test_overlap_is_what_a_search_over_short_paths_finds(first: str, second: str) -> None:
    """Two patterns overlap if and only if both match some path."""
    mine, theirs = PathPattern(first), PathPattern(second)
    assert first.endswith("*") == mine.prefix
    assert (first in ("/a*", "/a/b*")) == mine.splits_segment
    found = any(
        mine.matches(path) and theirs.matches(path)
        for path in ("/", "/a", "/a/", "/a/b", "/a/bc", "/a/c", "/ab", "/abc", "/b/", "/b/c", "/c")
    )

    assert found == mine.overlaps(theirs) == theirs.overlaps(mine)
