"""Real text that every machine has: two corpora gathered from the Python installation itself, no download.

code: the standard library's .py files. prose: the manual's topics, docstrings of the standard library,
descriptions and licences of the installed packages, and their docstrings, until there is enough.

What is unusual: a file goes to training or validation by the hash of its content, and its prose goes with it, so that
validation text never occurs in a training file; a paragraph of prose is kept once, because licences and parameter lists
repeat. Files are sorted by name; two runs on one machine write the same bytes. Tests of the packages and generated
tables are left out.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from types import MappingProxyType

from mdata.errors import UsageError
from mdata.progress import Progress
from mdata.util.atomic_io import atomic_write

LIMITS: Mapping[str, int] = MappingProxyType({"code": 8_000_000, "prose": 5_000_000})  # UTF-8 bytes at most
LEAST_BYTES = 500_000
VALID_ONE_IN = 20  # files of which one goes to validation
LEFT_OUT = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
LEFT_OUT |= {"encodings", "pydoc_data", "_vendor"}  # tables, and copies of other packages
_REPEATED_LENGTH = 80  # characters from which on a repeated paragraph is dropped
_LEAST_TEXT = 200  # characters below which a document is not worth its end-of-document token


@dataclass(frozen=True)
class TextRecord:
    """One record: its origin (a relative path), its text, its side of the split."""

    file: str
    text: str
    valid: bool


def gather(folder: Path, progress: Progress, *, limits: Mapping[str, int] = LIMITS) -> dict[str, int]:
    """Write code-train, code-valid, prose-train and prose-valid as <folder>/NAME.jsonl.

    Returns:
        UTF-8 bytes of text in each.

    Raises:
        UsageError: this Python came without its sources, so that there is too little text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_path("stdlib"))
    sites = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    corpora = {"code": (code(library), limits["code"]), "prose": (prose(library, sites), limits["prose"])}
    sizes: dict[str, int] = {}
    for name, (documents, limit) in corpora.items():
        taken = _take(documents, limit, name, progress)
        for side in ("train", "valid"):
            chosen = [document for document in taken if document.valid == (side == "valid")]
            sizes[f"{name}-{side}"] = sum(len(document.text.encode()) for document in chosen)
            _write(folder / f"{name}-{side}.jsonl", chosen)
        text_bytes = sizes[f"{name}-train"] + sizes[f"{name}-valid"]
        if text_bytes < LEAST_BYTES or not sizes[f"{name}-valid"]:
            raise UsageError(
                f"the Python installation {library} holds too little text for the quickstart's {name} corpus",
                found=f"{text_bytes} bytes, {sizes[f'{name}-valid']} of them for validation",
                expected=f"at least {LEAST_BYTES} bytes, some of them for validation",
                fix="use a Python that includes the sources of its library: make quickstart PYTHON=...",
            )
    return sizes


def code(library: Path) -> Iterator[TextRecord]:
    """Every source file of the standard library once."""
    digests: set[bytes] = set()
    for path in _sources(library):
        data = path.read_bytes()
        digest = hashlib.blake2b(data).digest()
        if digest not in digests:
            digests.add(digest)
            yield TextRecord(path.relative_to(library).as_posix(), _decoded(data), goes_to_validation(data))


def prose(library: Path, sites: Iterable[Path]) -> Iterator[TextRecord]:
    """Text written for people, from the best to the most repetitive."""
    sites = list(sites)
    paragraphs: set[str] = set()
    for file, text, origin in _prose_parts(library, sites):
        text = text.encode("utf-8", "replace").decode()  # a docstring can hold lone surrogates, UTF-8 cannot
        yield TextRecord(file, without_repeats(text, paragraphs), goes_to_validation(origin))


def goes_to_validation(content: bytes) -> bool:
    """The side of the split, decided only by a file's content."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") % VALID_ONE_IN == 0


def without_repeats(text: str, paragraphs: set[str]) -> str:
    """The paragraphs of a text that are short or new; adds them to `paragraphs`."""
    new_paragraphs = []
    for paragraph in re.split(r"\n[ \t]*\n", text):
        key = " ".join(paragraph.lower().split())
        if len(key) >= _REPEATED_LENGTH:
            if key in paragraphs:
                continue
            paragraphs.add(key)
        new_paragraphs.append(paragraph)
    return "\n\n".join(new_paragraphs)


def docstrings(source: bytes) -> str:
    """Every docstring of a Python file, in the order of the file; empty if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    return "\n\n".join(text for node in _owners(tree) if (text := ast.get_docstring(node)))


def _owners(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Everything that can have a docstring, from the top; expressions, most of a tree, are skipped."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _owners(child)


def _prose_parts(library: Path, sites: list[Path]) -> Iterator[tuple[str, str, bytes]]:
    """(name, text, content that decides the split) of each piece."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"topics/{name}", text, text.encode()
    yield from _docstring_parts(library)
    for site in sites:
        for path in sorted(site.glob("*.dist-info/METADATA")):
            data = path.read_bytes()
            body = BytesParser().parsebytes(data).get_payload()
            yield path.relative_to(site).as_posix(), body if isinstance(body, str) else "", data
        for path in sorted(p for p in site.glob("*.dist-info/**/LICEN[CS]E*") if p.is_file()):
            data = path.read_bytes()
            yield path.relative_to(site).as_posix(), _decoded(data), data
    for site in sites:
        yield from _docstring_parts(site)


def _docstring_parts(root: Path) -> Iterator[tuple[str, str, bytes]]:
    for path in _sources(root):
        data = path.read_bytes()
        yield path.relative_to(root).as_posix(), docstrings(data), data


def _sources(root: Path) -> list[Path]:
    """The .py files below a folder in the order of their names, tests and tables left out."""
    paths = (path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    return sorted(path for path in paths if path.is_file())


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _take(documents: Iterable[TextRecord], limit: int, name: str, progress: Progress) -> list[TextRecord]:
    """The first documents that fit the limit, in bytes of UTF-8."""
    taken: list[TextRecord] = []
    total = 0
    progress.begin(f"gather {name}", limit, unit="B")
    for document in documents:
        size = len(document.text.encode())
        if len(document.text) < _LEAST_TEXT:
            continue
        if total + size > limit:
            break
        total += size
        taken.append(document)
        progress.advance(size)
    progress.end()
    return taken


def _write(path: Path, documents: Iterable[TextRecord]) -> None:
    """One JSON object per line."""
    lines = (json.dumps({"text": d.text, "file": d.file}, ensure_ascii=False) + "\n" for d in documents)
    atomic_write(path, "".join(lines).encode())
