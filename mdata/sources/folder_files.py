"""Which files of a folder are input, which are skipped, and why.

Input files have known endings, in upper or lower case, and match the patterns; hidden files and results of mdata are
never input. Patterns work as in git and rsync: one without a slash is compared with every name on the way to a file,
one with a slash with the path from the folder; `*` and `?` stop at a slash, `**` does not; a folder that matches
includes everything below it. Skipped files are counted, and their first names kept for a message.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal

from mdata.errors import UsageError, few, os_errors_named

Reason = Literal[
    "unknown ending", "another format", "not included", "excluded", "hidden", "own result", "not of the dataset"
]
_WORDS: Mapping[Reason, str] = {
    "unknown ending": "with an unknown ending",
    "another format": "of another format than --input-format",
    "not included": "that match no --include",
    "excluded": "that match --exclude",
    "hidden": "that are hidden",
    "own result": "written by mdata",
    "not of the dataset": "beside a saved dataset, not of it",
}
_NAMES_KEPT = 3
_TOKENIZER_FOLDER = re.compile(r"tokenizer-[0-9a-f]{16}")
# Beside the texts that these commands write.
_REPORTS = frozenset(f"{name}.report" for name in ("extract", "clean", "decontaminate", "count", "filter"))
_RESULTS = (".json", ".idx", ".bin", ".origins", ".blake3", ".bin.blake3")


@dataclass(frozen=True)
class PathFilter:
    """Patterns for paths below a folder.

    Args:
        include: a path must match one of these, and may have any ending; empty: any file with a known ending.
        exclude: a path must match none of these.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(item, str) and item.strip("/") for item in patterns):
                raise UsageError(f"{name}={patterns!r}", expected="a sequence of patterns such as '*.jsonl.gz'")
            for pattern in patterns:
                _check(name, pattern)

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)


def _check(name: str, pattern: str) -> None:
    try:
        pattern_expression(pattern.strip("/"))
    except re.error as error:
        raise UsageError(
            f"{name}: {pattern!r} is not a valid pattern", found=str(error), fix="put [ in brackets: [[]"
        ) from error


@dataclass
class SkippedFiles:
    """How many names were skipped for each reason, and the first of them; a folder counts as one."""

    counts: dict[Reason, int] = field(default_factory=dict)
    names: dict[Reason, list[str]] = field(default_factory=dict)

    def add(self, reason: Reason, name: str) -> None:
        """Count one, unless it is the report of a command, which every folder of its texts has."""
        if PurePath(name).name in _REPORTS:
            return
        self.counts[reason] = self.counts.get(reason, 0) + 1
        names = self.names.setdefault(reason, [])
        if len(names) < _NAMES_KEPT:
            names.append(name)

    def update(self, other: SkippedFiles) -> None:
        """Add the counts of another one."""
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
            self.names[reason] = [*self.names.get(reason, ()), *other.names[reason]][:_NAMES_KEPT]

    def __str__(self) -> str:
        parts = []
        for reason, count in sorted(self.counts.items(), key=lambda item: list(_WORDS).index(item[0])):
            rest = count - len(self.names[reason])
            names = few(self.names[reason]) + (f" and {rest:,} more" if rest else "")
            parts.append(f"{count:,} {_WORDS[reason]} ({names})")
        return "; ".join(parts)


def files_below(
    folder: Path, endings: tuple[str, ...], *, all_endings: tuple[str, ...], filter: PathFilter, skipped: SkippedFiles
) -> list[Path]:
    """The input files below a folder, sorted; links are followed.

    Args:
        folder: where to look.
        endings: of the requested formats, in lower case.
        all_endings: of all formats.
        filter: the user's patterns.
        skipped: receives every name that is not input.

    Raises:
        UsageError: a folder cannot be listed; it is never skipped.
    """
    files = []
    for path, is_folder in _walk(folder, filter, skipped):
        reason = (
            None if is_folder else reason_to_skip(path, endings, all_endings=all_endings, folder=folder, filter=filter)
        )
        if reason is None and not is_folder:
            files.append(path)
        elif reason is not None:
            skipped.add(reason, str(path))
    return sorted(files)


def is_result(path: PurePath, exists: Callable[[Any], bool] = os.path.exists) -> bool:
    """Whether a file is one that mdata writes: by an .idx of the same name, in a tokenizer folder, or a report.

    Results may be in the folder of the input; they are never input of the next run unless named explicitly. `exists`
    says whether a path beside it exists.
    """
    if path.name in _REPORTS or _TOKENIZER_FOLDER.fullmatch(path.parent.name) is not None:
        return True
    stems = [path.name.removesuffix(ending) for ending in _RESULTS if path.name.endswith(ending)]
    return any(stem and exists(path.with_name(f"{stem}.idx")) for stem in stems)


def matches(pattern: str, parts: Sequence[str]) -> bool:
    """Whether a pattern matches a path below a folder, given by its parts, or a folder on the way to it."""
    inner = pattern.strip("/")
    expression = pattern_expression(inner)
    anchored = "/" in inner or pattern.startswith("/")
    last = len(parts) - pattern.endswith("/")
    tried = ("/".join(parts[:end]) if anchored else parts[end - 1] for end in range(1, last + 1))
    return any(expression.fullmatch(name) for name in tried)


def _walk(folder: Path, filter: PathFilter, skipped: SkippedFiles) -> Iterator[tuple[Path, bool]]:
    """Every name below a folder except those in skipped folders."""

    def refuse(error: OSError) -> None:
        raise error

    with os_errors_named("reading the input"):
        visited: set[str] = set()
        for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
            real = os.path.realpath(root)
            if real in visited:  # a link that leads back
                folders.clear()
                continue
            visited.add(real)
            for name in sorted(folders):
                path = Path(root, name)
                reason = _folder_reason(path, folder, filter)
                if reason is not None:
                    folders.remove(name)
                    skipped.add(reason, f"{path}/")
            folders.sort()
            yield from ((Path(root, name), False) for name in sorted(names))


def _folder_reason(path: Path, folder: Path, filter: PathFilter) -> Reason | None:
    if path.name.startswith("."):
        return "hidden"
    if _TOKENIZER_FOLDER.fullmatch(path.name):
        return "own result"
    parts = (*path.relative_to(folder).parts, "")
    return "excluded" if any(matches(pattern, parts) for pattern in filter.exclude) else None


def reason_to_skip(
    path: PurePath,
    endings: tuple[str, ...],
    *,
    all_endings: tuple[str, ...],
    folder: PurePath,
    filter: PathFilter,
    exists: Callable[[Any], bool] = os.path.exists,
) -> Reason | None:
    """Why a file below a folder is skipped; None: it is input. `exists` is that of `is_result`."""
    parts = path.relative_to(folder).parts
    if any(part.startswith(".") for part in parts):
        return "hidden"
    if is_result(path, exists):
        return "own result"
    if any(matches(pattern, parts) for pattern in filter.exclude):
        return "excluded"
    if filter.include:
        return None if any(matches(pattern, parts) for pattern in filter.include) else "not included"
    name = path.name.lower()
    if name.endswith(endings):
        return None
    return "another format" if name.endswith(all_endings) else "unknown ending"


def would_be_read(path: Path, name: str, *, endings: tuple[str, ...], filter: PathFilter) -> bool:
    """Whether a file, which need not exist yet, is one of those that a folder or pattern names.

    Args:
        endings, filter: of the files that are read from a folder.
    """
    folder = Path(name)
    if folder.is_dir():
        here, path = folder.resolve(), path.resolve()
        inside = path.is_relative_to(here)
        return inside and reason_to_skip(path, endings, all_endings=endings, folder=here, filter=filter) is None
    if not glob.has_magic(name) or path.name.startswith("."):
        return False
    return pattern_expression(str(folder.absolute())).fullmatch(str(path.absolute())) is not None


_TOKENS = re.compile(
    r"(?P<deep>(?:^|(?<=/))\*\*(?:/|$))|(?P<any>\*+)|(?P<one>\?)|\[(?P<set>!?\]?[^\]]*)\]|(?P<text>.)", re.S
)


@cache
def pattern_expression(pattern: str) -> re.Pattern[str]:
    """A glob pattern as an expression over a whole path."""
    parts = []
    for token in _TOKENS.finditer(pattern):
        kind, text = token.lastgroup, token[token.lastgroup or 0]
        if kind == "deep":
            parts.append("(?:.*/)?" if text.endswith("/") else ".*")
        elif kind == "set":
            inside = re.escape(text.removeprefix("!")).replace(r"\-", "-")
            parts.append(f"(?!/)[{'^' if text.startswith('!') else ''}{inside}]")
        else:
            parts.append({"any": "[^/]*", "one": "[^/]"}.get(str(kind), re.escape(text)))
    return re.compile("".join(parts), re.S)
