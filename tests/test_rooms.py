"""The rooms of docs/design/house.md and trainer.md, compared with the imports of mdata and of the trainer."""

from __future__ import annotations

import pytest

from tests.helpers import rooms


@pytest.fixture(scope="module", params=list(rooms.TABLES))
def package(request):
    return request.param


@pytest.fixture(scope="module")
def files(package):
    return rooms.modules(package)


@pytest.fixture(scope="module")
def imports(package):
    return rooms.all_imports(package)


def test_every_folder_is_a_declared_room(package, files):
    folders = {rooms.room_of(name, files) for name in files}
    assert folders == {package, *rooms.declared(package)}


def test_imports_go_downward_only(package, files, imports):
    of = {name: rooms.room_of(name, files) for name in files}
    # A program, which no module imports.
    imports = {name: names for name, names in imports.items() if name != f"{package}.__main__"}
    assert not rooms.upward(imports, of, [package, *rooms.declared(package)])


def test_no_file_imports_itself_through_others(imports):
    assert not rooms.circles(imports)


def test_nothing_else_is_loose_at_the_top(package, files):
    loose = {name.rpartition(".")[2] for name in files if name.count(".") == 1 and files[name].name != "__init__.py"}
    assert loose == {"mdata": {"errors", "progress", "version", "__main__"}, "trainer": {"errors"}}[package]


def test_a_room_says_what_it_is_in_the_words_of_the_table(package, files):
    for room, text in rooms.declared(package).items():
        docstring = " ".join(files[room].read_text(encoding="utf-8").split('"""')[1].split())
        assert docstring.startswith(text), room


def test_the_rules_can_fail():
    files = {"mdata.a.x", "mdata.b.y"}
    assert rooms.imports_of("from mdata.b import y\ndef f():\n import mdata.a.x", files) == {"mdata.a.x", "mdata.b.y"}
    imports = {"mdata.a.x": frozenset({"mdata.b.y"}), "mdata.b.y": frozenset({"mdata.a.x"})}
    of = {"mdata.a.x": "mdata.a", "mdata.b.y": "mdata.b"}
    assert rooms.upward(imports, of, ["mdata.a", "mdata.b"]) == ["mdata.a.x imports mdata.b.y"]
    assert rooms.circles(imports) == [["mdata.a.x", "mdata.b.y"]]
    assert rooms.circles({"mdata.a.x": frozenset({"mdata.b.y"}), "mdata.b.y": frozenset()}) == []
