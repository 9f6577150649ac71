"""The house rules as functions from one parsed source file to findings; tests/test_house_rules.py applies them.

A rule yields (place, problem): the place is a file or `file::function`, and is what an exception names.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mdata.util.gc_pause import gc_paused

ROOT = Path(__file__).resolve().parents[2]

COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
}  # fmt: skip
_STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}
_WRITING = {"os.O_CREAT", "os.O_WRONLY", "os.O_RDWR"}
ENVIRONMENT = ("os.environ", "os.getenv")
GROUPS = {"init_process_group", "destroy_process_group", "new_group", "new_subgroups", "init_device_mesh"}

Finding = tuple[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: its path from the root with `/`, its text and, for Python, its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree."""
        return list(ast.walk(self.tree))


FOR_TRAINERS = (
    "errors",
    "progress",
    "util",
    "object_storage",
    "tokenizers",
    "chat",
    "dataset",
    "blend_planning",
    "launching",
    "loader",
    "reporting",
    "tracing",
)


@dataclass(frozen=True)
class Rule:
    """A rule, and the packages whose files it holds for."""

    check: Callable[[Source], Iterator[Finding]]
    packages: tuple[str, ...] = ("mdata", "trainer", "cli")

    def findings(self, source: Source) -> list[Finding]:
        return list(self.check(source)) if source.package in self.packages else []


def parse(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text) if path.endswith(".py") else ast.Module([], []))


def sources() -> list[Source]:
    """Every Python file of the three packages."""
    files = [file for name in ("mdata", "trainer", "cli") for file in sorted((ROOT / name).rglob("*.py"))]
    with gc_paused():  # nothing of a syntax tree is garbage, and looking for it takes twice as long as parsing
        return [parse(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def texts() -> list[Source]:
    """Every text file of the project, including documentation, scripts and C++."""
    folders = ["mdata", "mdata_cpp", "trainer", "cli", "tests", "benchmarks", "configs", "docs", "scripts", ".ci"]
    folders += ["fuzz"]  # its corpus, bytes without a suffix that are nobody's text, is left out below
    found = [file for name in folders for file in sorted((ROOT / name).rglob("*")) if file.is_file()]
    found += [file for file in sorted(ROOT.iterdir()) if file.is_file() and not file.name.startswith(".")]
    kinds = {".py", ".pyi", ".hpp", ".cpp", ".toml", ".txt", ".md", ".json", ".yml", ""}
    not_ours = {"golden", "corpus", "__pycache__"}
    kept = [f for f in found if f.suffix in kinds and not not_ours & set(f.parts)]
    return [
        Source(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8", errors="replace"), ast.Module([], []))
        for f in kept
    ]


def functions(source: Source) -> Iterator[tuple[str, Function, list[ast.AST]]]:
    """(qualified name, function, enclosing definitions from outside to inside)."""

    def visit(node: ast.AST, parents: list[ast.AST], names: list[str]) -> Iterator[tuple[str, Function, list[ast.AST]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield ".".join([*names, child.name]), child, parents
            inner = [*names, child.name] if isinstance(child, Function | ast.ClassDef) else names
            outer = [*parents, child] if isinstance(child, Function | ast.ClassDef) else parents
            yield from visit(child, outer, inner)

    yield from visit(source.tree, [], [])


def import_direction(source: Source) -> Iterator[Finding]:
    """cli -> trainer -> mdata; mdata does not import torch; trainer uses only a few rooms of mdata.

    cli is installed under another name, so its files import each other relatively.
    """
    forbidden = {"mdata": {"torch", "trainer", "cli"}, "trainer": {"cli"}, "cli": {"cli"}}[source.package]
    for node in source.nodes:
        for module, _ in _imports(node):
            if module.split(".")[0] in forbidden:
                yield source.path, f"imports {module}"
            room = module.split(".")[1:2]
            if source.package == "trainer" and module.startswith("mdata.") and room[0] not in FOR_TRAINERS:
                yield source.path, f"imports {module}; of mdata's rooms a trainer uses {', '.join(FOR_TRAINERS)}"


def no_global(source: Source) -> Iterator[Finding]:
    """No `global`: state is passed."""
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield source.path, f"line {node.lineno}: global {', '.join(node.names)}"


def collectives_in_one_file(source: Source) -> Iterator[Finding]:
    """Collectives are called in parallel/collectives.py, process groups are made in parallel/world.py; nowhere else."""
    if "distributed" not in source.text:
        return
    aliases = _aliases(source, "torch.distributed")
    for node in source.nodes:
        name = None
        if isinstance(node, ast.Attribute):
            base = _dotted(node.value)
            if base in aliases or (base and base.startswith("torch.distributed")):
                name = node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            name = next((a.name for a in node.names if a.name in COLLECTIVES | GROUPS), None)
        if name in COLLECTIVES and source.path != "trainer/parallel/collectives.py":
            yield (
                source.path,
                f"line {node.lineno}: torch.distributed.{name} belongs in trainer/parallel/collectives.py",
            )
        if name in GROUPS and source.path != "trainer/parallel/world.py":
            yield source.path, f"line {node.lineno}: torch.distributed.{name} belongs in trainer/parallel/world.py"


def no_print(source: Source) -> Iterator[Finding]:
    """Libraries do not print."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield source.path, f"line {node.lineno}: print"


def one_door_to_the_terminal(source: Source) -> Iterator[Finding]:
    """Commands print only through cli/terminal.py, which quotes control characters in foreign text."""
    if source.path == "cli/terminal.py":
        return
    for node in source.nodes:
        name = _dotted(node) if isinstance(node, ast.Attribute | ast.Name) else None
        imported = [one for module, one in _imports(node) if module == "sys" and one in _STREAMS]
        if imported or (name and name.startswith("sys.") and name.split(".")[1] in _STREAMS):
            yield source.path, f"line {getattr(node, 'lineno', 0)}: a standard stream; use cli.terminal"
        if isinstance(node, ast.Call) and (how := _prints(node)):
            yield source.path, f"line {node.lineno}: {how}; use cli.terminal.say"


def module_docstring(source: Source) -> Iterator[Finding]:
    """A module begins with its description."""
    if ast.get_docstring(source.tree) is None:
        yield source.path, "has no docstring"


def no_blanket_except(source: Source) -> Iterator[Finding]:
    """No bare `except`; everything may be caught only to be raised again."""
    for node in source.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        blanket = any(kind is None or _dotted(kind) in ("Exception", "BaseException") for kind in caught)
        again = isinstance(node.body[-1], ast.Raise)
        if node.type is None or (blanket and not again):
            yield source.path, f"line {node.lineno}: catches everything"


def requests_to_stop_pass(source: Source) -> Iterator[Finding]:
    """Ctrl-C and SIGTERM are caught only to be raised again, by a bare `raise` at the end and no other way out."""
    for node in source.nodes:
        suppresses = isinstance(node, ast.Call) and (_dotted(node.func) or "").rpartition(".")[2] == "suppress"
        if suppresses and any(_catches_requests(kind) for kind in node.args):
            yield source.path, f"line {node.lineno}: suppresses a request to stop"
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if not any(_catches_requests(kind) for kind in kinds):
            continue
        inside = [child for statement in node.body for child in ast.walk(statement)]
        again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if not again or any(isinstance(child, ast.Return | ast.Continue | ast.Break) for child in inside):
            yield source.path, f"line {node.lineno}: a request to stop may end here"


def closed_once(source: Source) -> Iterator[Finding]:
    """A descriptor kept by an object is an atomic_io.Descriptor: on a second close its number may be another file's."""
    for node in source.nodes:
        closes = isinstance(node, ast.Call) and _dotted(node.func) == "os.close"
        if closes and any(isinstance(argument, ast.Attribute) for argument in node.args):
            yield source.path, f"line {node.lineno}: os.close of an attribute; use atomic_io.Descriptor"


def atomic_io_is_the_door(source: Source) -> Iterator[Finding]:
    """Only mdata/util/atomic_io.py writes, syncs and renames files that users keep."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and (how := _writes(node)) and source.path != "mdata/util/atomic_io.py":
            yield source.path, f"line {node.lineno}: {how}; use mdata.util.atomic_io"


def assert_has_message(source: Source) -> Iterator[Finding]:
    """An assert checks an invariant and has a message."""
    for node in source.nodes:
        if isinstance(node, ast.Assert) and node.msg is None:
            yield source.path, f"line {node.lineno}: assert without a message"


def no_stub(source: Source) -> Iterator[Finding]:
    """No unimplemented functions."""
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield source.path, f"line {node.lineno}: NotImplementedError"


def no_environment_at_import(source: Source) -> Iterator[Finding]:
    """The environment is read where it is used, never while a module is imported."""
    reads = [node for node in source.nodes if isinstance(node, ast.Attribute) and _dotted(node) in ENVIRONMENT]
    inside = {id(child) for _, node, _ in functions(source) for child in ast.walk(node)} if reads else set()
    for node in reads:
        if id(node) not in inside:
            yield source.path, f"line {node.lineno}: {_dotted(node)} at import"


def no_machine_paths(source: Source) -> Iterator[Finding]:
    """No paths of the machine on which a file was written."""
    pattern = re.compile(r"(?<![\w.])/(" + "|".join(["work", "root", "home", "Users"]) + r")/\w")
    for number, line in enumerate(source.text.split("\n"), 1):
        if found := pattern.search(line):
            yield source.path, f"line {number}: {found[0]}"


RULES = {
    "import direction": Rule(import_direction),
    "no global": Rule(no_global),
    "collectives in one file": Rule(collectives_in_one_file),
    "no print": Rule(no_print, ("mdata", "trainer")),
    "one door to the terminal": Rule(one_door_to_the_terminal, ("cli",)),
    "module docstring": Rule(module_docstring),
    "no blanket except": Rule(no_blanket_except),
    "requests to stop pass": Rule(requests_to_stop_pass),
    "closed once": Rule(closed_once),
    "atomic_io is the door": Rule(atomic_io_is_the_door, ("mdata", "trainer")),
    "assert has a message": Rule(assert_has_message),
    "no stub": Rule(no_stub),
    "no environment at import": Rule(no_environment_at_import),
}
TEXT_RULES = {"no machine paths": no_machine_paths}


def _catches_requests(kind: ast.expr | None) -> bool:
    named = (_dotted(kind) or "").rpartition(".")[2]
    return kind is None or named in ("BaseException", "KeyboardInterrupt", "StoppedError")


def _imports(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name imported from it or None)."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, None) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield from ((node.module, alias.name) for alias in node.names)


def _aliases(source: Source, module: str) -> set[str]:
    """The names under which a file imports a module."""
    found = {module}
    package, _, last = module.rpartition(".")
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.asname for alias in node.names if alias.name == module and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.asname or alias.name for alias in node.names if alias.name == last}
    return found


def _dotted(node: ast.AST | None) -> str | None:
    """`a.b.c` of nested attributes; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def _prints(call: ast.Call) -> str | None:
    """How a call prints, or None; a Console of cli/console.py is allowed."""
    name = _dotted(call.func) or (call.func.attr if isinstance(call.func, ast.Attribute) else "")
    base, _, last = name.rpartition(".")
    if name in ("print", "os.write") or last in ("writelines", "print_exc", "print_help", "print_usage"):
        return name
    return name if last == "write" and base not in ("console", "self") else None


def _writes(call: ast.Call) -> str | None:
    """How a call writes or renames a file, or None."""
    name = _dotted(call.func) or (call.func.attr if isinstance(call.func, ast.Attribute) else "")
    last = name.rpartition(".")[2]
    if name in ("os.rename", "os.replace", "os.write", "os.fsync", "os.link", "shutil.move", "shutil.copy"):
        return name
    if name.startswith("atomic_io."):
        return None
    if name == "os.open" and _WRITING & {_dotted(node) for argument in call.args for node in ast.walk(argument)}:
        return "os.open for writing"
    if last in ("write_text", "write_bytes", "rename", "tofile", "save_file"):
        return last
    if last == "replace" and len(call.args) == 1 and not call.keywords:  # str.replace takes two, dataclasses' keywords
        return "Path.replace"
    if last == "open" and name != "os.open":
        mode = next((k.value for k in call.keywords if k.arg == "mode"), None)
        place = 1 if name == "open" else 0  # Path.open(mode)
        mode = mode or (call.args[place] if len(call.args) > place else None)
        if isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) & set("wax+"):
            return f"open(..., {mode.value!r})"
    return None
