"""Request paths and path patterns."""

import posixpath
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.paths import PathPattern, ambiguity

AMBIGUOUS = {
    "a dot segment": "/v1/safe/../admin",
    "a dot segment at the end": "/v1/safe/..",
    "a single dot": "/v1/./safe",
    "an encoded dot segment": "/v1/safe/%2e%2e/admin",
    "a half-encoded dot segment": "/v1/safe/.%2e/admin",
    "an encoded slash": "/v1/safe%2f..%2fadmin",
    "an encoded slash alone": "/v1%2Fsafe",
    "a backslash": "/v1/safe\\..\\admin",
    "an encoded backslash": "/v1/safe%5cadmin",
    "double encoding": "/v1/safe/%252e%252e/admin",
    "double encoding of a slash": "/v1/safe%252fadmin",
    "two slashes": "/v1//safe",
    "two slashes in front": "//v1/safe",
    "two slashes at the end": "/v1/safe//",
    "a path parameter": "/v1/safe;x=1/../admin",
    "an encoded path parameter": "/v1/safe%3bx",
    "an encoded NUL": "/v1/safe%00",
    "an encoded line feed": "/v1/safe%0a",
    "a trailing dot": "/v1/safe.",
    "a trailing dot inside": "/v1/safe./x",
    "a trailing encoded blank": "/v1/safe%20/x",
    "three dots": "/v1/.../x",
    "dots and blanks": "/v1/.%20./x",
    "a fragment": "/v1/safe#x",
    "a query": "/v1/safe?x",
    "a blank": "/v1/sa fe",
    "a tab": "/v1/sa\tfe",
    "raw UTF-8": "/v1/s\u00e4fe",
    "overlong UTF-8 of a slash": "/v1/safe%c0%af..",
    "broken UTF-8": "/v1/safe%ff",
    "broken encoding": "/v1/safe%zz",
    "cut encoding": "/v1/safe%2",
    "a letter encoded without need": "/%76%31/safe",
    "no slash in front": "v1/safe",
    "empty": "",
    "an asterisk": "*",
    "too long": "/" + "a" * 9000,
}

CLEAR = [
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
    """It is refused on hosts with path rules, never rewritten."""
    assert ambiguity(AMBIGUOUS[case]) is not None


@pytest.mark.parametrize("path", CLEAR)
def test_ordinary_paths_are_clear(path: str) -> None:
    """The control of the refusals above."""
    assert ambiguity(path) is None


_PIECES = st.sampled_from(
    ["/", "..", ".", "%2e", "%2f", "%5c", "\\", ";", "v1", "safe", "admin", "%25", "2e", "%", "%20", " ", "x", "A", "?"]
)


@given(st.lists(_PIECES, max_size=12).map(lambda pieces: "/v1/safe/" + "".join(pieces)))
def test_no_accepted_path_leaves_the_prefix_under_common_normalisers(path: str) -> None:
    """Decode once or twice, resolve dots, turn backslashes, cut parameters: the prefix stays."""
    if ambiguity(path) is not None or not PathPattern("/v1/safe/*").matches(path):
        return
    for text in (path, unquote(path), unquote(unquote(path))):
        turned = text.replace("\\", "/")
        cut = "/".join(segment.partition(";")[0] for segment in turned.split("/"))
        stripped = "/".join(segment.rstrip(". ") for segment in turned.split("/"))
        for form in (text, turned, cut, stripped, posixpath.normpath(text), posixpath.normpath(cut)):
            assert (form + "/").startswith("/v1/safe/")


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


def test_denials_ignore_ascii_case() -> None:
    """A server that folds case must not open a denied prefix."""
    assert PathPattern("/v1/Admin/*").matches_any_case("/V1/ADMIN/x")
    assert not PathPattern("/v1/Admin/*").matches_any_case("/v1/administrator/x")


@pytest.mark.parametrize(
    "text", ["", "*", "v1/*", "/v1/*/x", "/v1/**", "/v1/../x", "/v1//*", "/a%2fb", "/a;b", "/v1?x", "/ä"]
)
def test_a_pattern_that_could_never_match_is_refused(text: str) -> None:
    """A dead pattern is a mistake of its author."""
    with pytest.raises(ValueError, match="path pattern"):
        PathPattern(text)


_PATTERNS = st.sampled_from(["/*", "/a*", "/a/*", "/a/b", "/a/b*", "/ab", "/b/*", "/a/", "/a"])


@given(_PATTERNS, _PATTERNS)
def test_overlap_is_what_a_search_over_short_paths_finds(first: str, second: str) -> None:
    """Two patterns overlap if and only if some path is matched by both."""
    mine, theirs = PathPattern(first), PathPattern(second)
    found = any(
        mine.matches(path) and theirs.matches(path)
        for path in ("/", "/a", "/a/", "/a/b", "/a/bc", "/a/c", "/ab", "/abc", "/b/", "/b/c", "/c")
    )

    assert found == mine.overlaps(theirs) == theirs.overlaps(mine)
