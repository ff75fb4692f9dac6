"""A document and the policies that its policies extend."""

from types import MappingProxyType

import pytest

from policy.document import DENY_ALL_NAME, PolicyDocument, PolicySource

SOURCES = {
    "base": PolicySource("base"),
    "left": PolicySource("left", ("base",)),
    "right": PolicySource("right", ("base",)),
    "both": PolicySource("both", ("left", "right")),
}
DOCUMENT = PolicyDocument(policies=MappingProxyType(SOURCES))


@pytest.mark.parametrize(
    ("name", "lineage"),
    [("base", ["base"]), ("right", ["base", "right"]), ("both", ["base", "left", "right", "both"])],
)
def test_bases_come_first_and_each_once(name: str, lineage: list[str]) -> None:
    assert lineage == [source.name for source in DOCUMENT.lineage(name)]


def test_an_unknown_policy_has_no_lineage() -> None:
    with pytest.raises(KeyError):
        DOCUMENT.lineage("other")


def test_the_shipped_document_denies_all() -> None:
    document = PolicyDocument()
    assert (DENY_ALL_NAME, {}, ()) == (document.default, dict(document.policies), document.always_allow)
    assert not document.wildcard_bindings
