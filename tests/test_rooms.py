"""The picture of docs/design/house.md, held against the imports of mdata."""

from __future__ import annotations

import pytest

from tests.helpers import rooms


@pytest.fixture(scope="module")
def files():
    return rooms.modules()


@pytest.fixture(scope="module")
def imports():
    return rooms.all_imports()


def test_every_folder_is_a_declared_room(files):
    folders = {rooms.room_of(name, files) for name in files}
    assert folders == set(rooms.declared())


def test_imports_go_downward_only(files, imports):
    of = {name: rooms.room_of(name, files) for name in files}
    assert not rooms.upward(imports, of, rooms.declared())


def test_no_file_imports_itself_through_others(imports):
    assert not rooms.circles(imports)


def test_nothing_else_is_loose_at_the_top(files):
    loose = {name.rpartition(".")[2] for name in files if name.count(".") == 1 and files[name].name != "__init__.py"}
    assert loose == {*rooms.TOP, "__main__"}


def test_no_module_name_occurs_twice(files):
    assert not rooms.doubled(name for name, path in files.items() if path.name != "__init__.py")


def test_a_room_says_what_it_is_in_the_words_of_the_table(files):
    text = rooms.HOUSE.read_text(encoding="utf-8")
    for room in rooms.declared()[1:]:
        if room != rooms.TWINS:
            docstring = " ".join(files[room].read_text(encoding="utf-8").split('"""')[1].split())
            row = text.split(f"| `{room.removeprefix('mdata.').replace('.', '/')}/` | ")[1].split(" |")[0]
            assert docstring.startswith(row), room


def test_the_rules_can_fail():
    files = {"mdata.a.x", "mdata.b.y", "mdata.reference.y"}
    assert rooms.imports_of("from mdata.b import y\ndef f():\n import mdata.a.x", files) == {"mdata.a.x", "mdata.b.y"}
    imports = {"mdata.a.x": frozenset({"mdata.b.y"}), "mdata.b.y": frozenset({"mdata.a.x"})}
    of = {"mdata.a.x": "mdata.a", "mdata.b.y": "mdata.b"}
    assert rooms.upward(imports, of, ["mdata.a", "mdata.b"]) == ["mdata.a.x imports mdata.b.y"]
    assert rooms.circles(imports) == [["mdata.a.x", "mdata.b.y"]]
    assert rooms.circles({"mdata.a.x": frozenset({"mdata.b.y"}), "mdata.b.y": frozenset()}) == []
    assert rooms.doubled(files) == []
    assert rooms.doubled({*files, "mdata.a.y"}) == ["y"]
