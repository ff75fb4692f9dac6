"""What a server makes once: the same at each start, readable by its own user only."""

from pathlib import Path

import pytest

from lifecycle.lasting import identity, route_key, token_key


def test_key_and_identity_stay(tmp_path: Path) -> None:
    key, name = token_key(tmp_path), identity(tmp_path)
    assert (key, name) == (token_key(tmp_path), identity(tmp_path))
    assert (32, "srv-", 28) == (len(key), name[:4], len(name))
    assert [0o600, 0o600] == [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()]


def test_the_key_of_signed_routes_is_one_of_its_own(tmp_path: Path) -> None:
    """Its removal ends all signed routes and no token."""
    key, tokens = route_key(tmp_path), token_key(tmp_path)
    assert key != tokens
    (tmp_path / "route-key").unlink()
    assert tokens == token_key(tmp_path)
    assert key != route_key(tmp_path)


def test_two_servers_differ(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert identity(tmp_path / "one") != identity(tmp_path / "two")


@pytest.mark.parametrize("content", ["", "srv-1", "srv-000000000000000000000001' OR '1'='1"])
def test_another_content_is_no_identity(tmp_path: Path, content: str) -> None:
    """Rows of this server would belong to no server then. The file is not replaced."""
    (tmp_path / "server-id").write_text(content)
    with pytest.raises(ValueError, match="server-id: not the identity of a server"):
        identity(tmp_path)
    assert content == (tmp_path / "server-id").read_text()


def test_a_file_that_was_not_completed_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "server-id.new").write_text("srv-")
    assert identity(tmp_path) == identity(tmp_path)
