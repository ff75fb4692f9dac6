"""The list of images: what a name means in it, how it changes, and its file."""

from pathlib import Path

import pytest

from runtimes.images.catalogue import Catalogue, CatalogueEntry, CatalogueFile, Leaving
from runtimes.images.references import Reference
from runtimes.images.store import _reconciled

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


def made(
    name: str, ident: str, *aliases: str, configured: bool = False, digests: tuple[str, ...] = ()
) -> CatalogueEntry:
    keys = [Reference.parse(one).key for one in (name, *aliases)]
    return CatalogueEntry(
        name=keys[0],
        aliases=tuple(keys[1:]),
        id=ident,
        digests=digests,
        source="s",
        configured=configured,
        added="2026-01-02T03:04:05+00:00",
        size=1,
        tags=(f"t:{ident[-1]}",),
    )


def _ids(catalogue: Catalogue, *names: str) -> list[str | None]:
    return [None if (found := catalogue.find(name)) is None else found.id for name in names]


def test_a_name_means_one_image_in_each_of_its_spellings() -> None:
    catalogue = Catalogue((made("ubuntu", A, "x/y:1"), made("r.example.com/a:1", B, digests=(C,))))
    assert [A, A, A, A] == _ids(catalogue, "ubuntu", "ubuntu:latest", "docker.io/library/ubuntu", "x/y:1")
    assert [B, B, B, B] == _ids(
        catalogue,
        *("r.example.com/a:1", f"r.example.com/a@{C}", f"r.example.com/a:1@{C}", f"r.example.com/a@{B}"),
    )
    none = ("ubuntu:1", "x/y", "r.example.com/a", f"r.example.com/a@{A}", f"r.example.com/a:2@{C}", A, "", "../x")
    assert [None] * len(none) == _ids(catalogue, *none)


def test_a_new_image_takes_its_names_from_others() -> None:
    before = Catalogue((made("a", A, "alias"), made("b", B, "other")))
    after = before.with_entry(made("a", C, "other"))
    assert [C, C, B, None] == _ids(after, "a", "other", "b", "alias")
    assert (Leaving(id=A, tags=("t:a",)),) == after.leaving


def test_an_image_with_another_name_stays_when_one_leaves() -> None:
    before = Catalogue((made("a", A), made("b", A)))
    after = before.without(before.entries[0])
    assert [None, A] == _ids(after, "a", "b")
    assert {A} == after.needed()


def test_an_image_that_is_added_again_does_not_leave() -> None:
    pending = Catalogue((), (Leaving(id=A), Leaving(id=B)))
    assert (Leaving(id=B),) == pending.with_entry(made("a", A)).leaving
    assert () == Catalogue((made("a", A),)).with_entry(made("a", A, "b")).leaving


def test_the_list_has_exactly_the_images_of_the_settings() -> None:
    before = Catalogue((made("old", A, configured=True), made("mine", B), made("taken", C)))
    after = _reconciled(before, [made("new", A, configured=True), made("taken", A, configured=True)])
    assert [None, A, A, B] == _ids(after, "old", "new", "taken", "mine")
    assert {C, A} == {one.id for one in after.leaving} | {A}
    assert ["new", "taken", "mine"] == list(after.names())


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = CatalogueFile(tmp_path / "images.json")
    assert Catalogue() == file.read()
    catalogue = Catalogue((made("a", A, "b", configured=True, digests=(B,)),), (Leaving(id=C, tags=("x:y",)),))
    file.write(catalogue)
    assert catalogue == file.read()
    assert 0o600 == (tmp_path / "images.json").stat().st_mode & 0o777


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "images": [{}], "leaving": []}'])
def test_a_damaged_file_opens_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "images.json").write_text(text)
    assert Catalogue() == CatalogueFile(tmp_path / "images.json").read()
    assert text == (tmp_path / "images.damaged").read_text()
