"""The rooms of docs/design/house.md and trainer.md, compared with the imports of mdata and of the trainer."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from tests.helpers import rooms
from trainer.config.sections import ModelSection
from trainer.models.family import FAMILIES, Family, family_named


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
    allowed = {"mdata": {"errors", "progress", "version", "__main__"}, "trainer": {"errors", "arithmetic"}}
    assert loose == allowed[package]


def test_a_room_says_what_it_is_in_the_words_of_the_table(package, files):
    for room, text in rooms.declared(package).items():
        docstring = " ".join(files[room].read_text(encoding="utf-8").split('"""')[1].split())
        assert docstring.startswith(text), room


def named_outside(imports, families):
    """Imports of a family's room by a file of the trainer that is in no family's room."""
    inside = tuple(f"{room}." for room in families)
    return [
        f"{module} imports {other}"
        for module, others in sorted(imports.items())
        for other in sorted(others)
        if f"{other}.".startswith(inside) and not f"{module}.".startswith(inside)
    ]


def test_no_other_code_names_a_family_of_models():
    """Nor can it ask for a family's types (isinstance), which it would have to import."""
    assert not named_outside(rooms.all_imports("trainer"), FAMILIES.values())
    assert set(FAMILIES) == set(get_args(get_type_hints(ModelSection)["family"]))
    assert all(isinstance(family_named(name), Family) for name in FAMILIES)
    wrong = {"trainer.run.a": frozenset({"trainer.models.gpt.shape"}), "trainer.models.gpt.b": frozenset({"c"})}
    assert named_outside(wrong, FAMILIES.values()) == ["trainer.run.a imports trainer.models.gpt.shape"]


def test_the_rules_can_fail():
    files = {"mdata.a.x", "mdata.b.y"}
    assert rooms.imports_of("from mdata.b import y\ndef f():\n import mdata.a.x", files) == {"mdata.a.x", "mdata.b.y"}
    imports = {"mdata.a.x": frozenset({"mdata.b.y"}), "mdata.b.y": frozenset({"mdata.a.x"})}
    of = {"mdata.a.x": "mdata.a", "mdata.b.y": "mdata.b"}
    assert rooms.upward(imports, of, ["mdata.a", "mdata.b"]) == ["mdata.a.x imports mdata.b.y"]
    assert rooms.circles(imports) == [["mdata.a.x", "mdata.b.y"]]
    assert rooms.circles({"mdata.a.x": frozenset({"mdata.b.y"}), "mdata.b.y": frozenset()}) == []
