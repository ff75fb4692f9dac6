"""Names of images mean one image in each of their spellings, and a pattern of the operator permits what it names."""

import pytest

from runtimes.images.references import Pattern, Reference, check_image_digest

DIGEST = f"sha256:{'a' * 64}"
OTHER = f"sha256:{'b' * 64}"


@pytest.mark.parametrize(
    ("text", "key", "familiar"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest", "ubuntu"),
        ("ubuntu:latest", "docker.io/library/ubuntu:latest", "ubuntu"),
        ("docker.io/library/ubuntu", "docker.io/library/ubuntu:latest", "ubuntu"),
        ("index.docker.io/ubuntu:22.04", "docker.io/library/ubuntu:22.04", "ubuntu:22.04"),
        ("sallyport/base", "docker.io/sallyport/base:latest", "sallyport/base"),
        ("r.example.com/a/b:1", "r.example.com/a/b:1", "r.example.com/a/b:1"),
        ("localhost:5000/a", "localhost:5000/a:latest", "localhost:5000/a"),
        ("a/b:1@" + DIGEST, "docker.io/a/b:1@" + DIGEST, "a/b:1@" + DIGEST),
        ("a/b@" + DIGEST, "docker.io/a/b@" + DIGEST, "a/b@" + DIGEST),
    ],
)
def test_each_spelling_of_a_name_is_the_same_name(text: str, key: str, familiar: str) -> None:
    found = Reference.parse(text)
    assert (key, familiar) == (found.key, found.familiar)
    assert found == Reference.parse(key) == Reference.parse(familiar)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "A",
            "a b",
            "a//b",
            "/a",
            "a/",
            "a:",
            "a:b:c",
            "a@b",
            "a@sha256:1",
            "../a",
            "a/../b",
            "-a",
            "a\n",
            "a\0b",
        ),
        *("-v /:/host", "a:-b", "http://r.example.com/a", "r.example.com:port/a", "r..example.com/a", "é", "a" * 257),
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Reference.parse(text)


def test_the_registry_of_a_name_is_dialled_at_its_port() -> None:
    assert ("r.example.com", 443) == Reference.parse("r.example.com/a").endpoint
    assert ("r.example.com", 5000) == Reference.parse("r.example.com:5000/a").endpoint


@pytest.mark.parametrize(
    ("pattern", "permitted", "refused"),
    [
        (
            "r.example.com/team/*",
            ["r.example.com/team/a:1", "r.example.com/team/a/b@" + DIGEST],
            ["r.example.com/teams/a"],
        ),
        (
            "r.example.com/team/*",
            [],
            ["r.example.com/team", "s.example.com/team/a", "team/a", "r.example.com:444/team/a"],
        ),
        ("ubuntu", ["ubuntu", "ubuntu:22.04", "docker.io/library/ubuntu@" + DIGEST], ["ubuntu2", "a/ubuntu"]),
        ("ubuntu:22.04", ["ubuntu:22.04"], ["ubuntu", "ubuntu:24.04", "ubuntu@" + DIGEST, "ubuntu:22.04@" + DIGEST]),
        ("ubuntu@" + DIGEST, ["ubuntu@" + DIGEST, "ubuntu:1@" + DIGEST], ["ubuntu", "ubuntu@" + OTHER]),
    ],
)
def test_a_pattern_permits_what_it_names(pattern: str, permitted: list[str], refused: list[str]) -> None:
    found = Pattern.parse(pattern)
    assert [] == [name for name in permitted if not found.permits(Reference.parse(name))]
    assert [] == [name for name in refused if found.permits(Reference.parse(name))]


@pytest.mark.parametrize("text", ["*", "/*", "*/a", "r.example.com/*/a/*", "r.example.com/a*", "r.*.com/a", ""])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Pattern.parse(text)


def test_a_digest_has_one_form() -> None:
    check_image_digest(DIGEST)
    for text in ("sha256:1", "a" * 64, DIGEST.upper(), DIGEST + "0"):
        with pytest.raises(ValueError):
            check_image_digest(text)
