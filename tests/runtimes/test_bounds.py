import pytest

from runtimes.bounds import ENV_NAME, IMAGE_NAME, configured_name, image_environment


@pytest.mark.parametrize("name", ["a", "base:latest", "registry.bank.example:5000/team/base:1", "a" * 256])
def test_docker_is_asked_for_these_names(name: str) -> None:
    assert IMAGE_NAME.fullmatch(name)


@pytest.mark.parametrize(
    "name", ["", "/etc", "../a", "a/../b", "a//b", "a/", "a?b", "a b", "a\n", "a%2fb", "\u00e4", "a" * 257]
)
def test_a_name_that_leads_elsewhere_is_none(name: str) -> None:
    assert not IMAGE_NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", "1A", "A=B", "A B", "A\n", "A\0", "\u00c4", "A" * 257])
def test_a_variable_has_a_plain_name(name: str) -> None:
    assert ENV_NAME.fullmatch("_A.b-1")
    assert not ENV_NAME.fullmatch(name)
    with pytest.raises(ValueError, match="names of variables"):
        image_environment({name: "value"})


@pytest.mark.parametrize("text", ['"', "$HOME", "back\\slash", "line\nline", "\0", "\x7f", "\u00e4", "a" * 1025])
def test_a_value_that_docker_would_change_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must have names of variables and plain values in each env$"):
        image_environment({"A": text})


def test_each_plain_value_is_kept() -> None:
    plain = {
        "A": "".join(chr(number) for number in range(32, 127) if chr(number) not in '"$\\'),
        "B": "",
        "C": "a" * 1024,
    }

    assert plain == image_environment(plain)


@pytest.mark.parametrize("name", ["base@sha256:" + "0" * 64, "", "a b", "-a"])
def test_an_image_of_the_settings_has_a_name_without_a_digest(name: str) -> None:
    assert "base:1" == configured_name("base:1")
    with pytest.raises(ValueError):
        configured_name(name)
