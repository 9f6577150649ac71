"""The rooms of mdata and of the trainer: the order declared in docs/design, and the imports of the files.

A room is a folder; its modules are those directly inside. A room imports from rooms above it in the table, never from
one below, and no file imports itself through others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mdata.util.gc_pause import gc_paused
from tests.helpers.house_rules import ROOT

TABLES = {"mdata": ROOT / "docs/design/house.md", "trainer": ROOT / "docs/design/trainer.md"}

Imports = Mapping[str, frozenset[str]]


def declared(package: str) -> dict[str, str]:
    """Room -> its description, in the order of the table: each may import from those before it."""
    rows = re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", TABLES[package].read_text(encoding="utf-8"), re.MULTILINE)
    return {f"{package}." + row.removeprefix(f"{package}/").replace("/", "."): text for row, text in rows}


def modules(package: str) -> dict[str, Path]:
    """Module -> file, for all modules of a package."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(text: str, known: Iterable[str]) -> frozenset[str]:
    """The known modules that a file imports, including imports for type checkers and inside functions."""
    known = set(known)
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for name in node.names:
                inside = f"{node.module}.{name.name}"
                found.add(inside if inside in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return frozenset(found & known)


def all_imports(package: str) -> dict[str, frozenset[str]]:
    """Module -> the modules of its package that it imports."""
    files = modules(package)
    with gc_paused():
        return {name: imports_of(path.read_text(encoding="utf-8"), files) - {name} for name, path in files.items()}


def room_of(module: str, files: Mapping[str, Path]) -> str:
    """The package of a module; a package belongs to itself."""
    return module if files[module].name == "__init__.py" else module.rpartition(".")[0]


def upward(imports: Imports, rooms: Mapping[str, str], order: list[str]) -> list[str]:
    """Imports from a room that comes later in the order than the importing one."""
    place = {room: number for number, room in enumerate(order)}
    return [
        f"{module} imports {other}"
        for module, others in sorted(imports.items())
        for other in sorted(others)
        if place[rooms[other]] > place[rooms[module]]
    ]


def circles(imports: Imports) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}
    for start in imports:
        seen: set[str] = set()
        open_ = list(imports[start])
        while open_:
            module = open_.pop()
            if module not in seen:
                seen.add(module)
                open_ += imports.get(module, ())
        reach[start] = seen
    in_circle = sorted(module for module in imports if module in reach[module])
    groups = {tuple(sorted(other for other in in_circle if other in reach[m] and m in reach[other])) for m in in_circle}
    return [list(group) for group in sorted(groups)]
