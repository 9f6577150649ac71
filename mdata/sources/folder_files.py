"""Which files of a folder are input, and which are left out, and why.

Taken are files of known endings, in any case, that fit the patterns; hidden names and results of ours never are. A
pattern means what it means to git and rsync: without a slash it is compared with every name on the way to a file, with
one with the path from the folder; `*` and `?` stop at a slash, `**` does not; a folder that fits takes all below it
along. What is left out is counted and the first names are kept, so that it can be told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from mdata.errors import UsageError, few, os_errors_named

Reason = Literal["unknown ending", "another format", "not included", "excluded", "hidden", "result of ours"]
_WORDS: Mapping[Reason, str] = {
    "unknown ending": "of an ending that is not read",
    "another format": "of another format than was asked for",
    "not included": "that fit no --include",
    "excluded": "that fit --exclude",
    "hidden": "with a hidden name",
    "result of ours": "that mdata wrote",
}
_NAMES_KEPT = 3
_TOKENIZER_FOLDER = re.compile(r"tokenizer-[0-9a-f]{16}")
_RESULTS = (".json", ".idx", ".bin", ".origins", ".bin.blake3")


@dataclass(frozen=True)
class Filter:
    """Patterns that a path below a folder has to fit.

    Args:
        include: one of these, whatever its ending; empty: any file of a known ending.
        exclude: none of these.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(isinstance(one, str) and one.strip("/") for one in patterns):
                raise UsageError(f"{name}={patterns!r}", expected="a sequence of patterns such as '*.jsonl.gz'")
            for pattern in patterns:
                _check(name, pattern)

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)


def _check(name: str, pattern: str) -> None:
    try:
        _expression(pattern.strip("/"))
    except re.error as error:
        raise UsageError(
            f"{name}: {pattern!r} is no pattern", found=str(error), fix="put [ in brackets: [[]"
        ) from error


@dataclass
class LeftOut:
    """How many names of folders were left out for each reason, and the first of them; a folder counts as one."""

    counts: dict[Reason, int] = field(default_factory=dict)
    names: dict[Reason, list[str]] = field(default_factory=dict)

    def add(self, reason: Reason, name: str) -> None:
        """Count one."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        kept = self.names.setdefault(reason, [])
        if len(kept) < _NAMES_KEPT:
            kept.append(name)

    def join(self, other: LeftOut) -> None:
        """Take over what another one counted."""
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
    folder: Path, endings: tuple[str, ...], *, known: tuple[str, ...], chosen: Filter, left_out: LeftOut
) -> list[Path]:
    """The input files below a folder, by the sorted paths; links are followed.

    Args:
        folder: where to look.
        endings: of the formats asked for, in lower case.
        known: of all formats.
        chosen: the user's patterns.
        left_out: hears of every name that is not taken.

    Raises:
        UsageError: a folder that cannot be listed; it is never skipped.
    """
    found = []
    for path, is_folder in _walk(folder, chosen, left_out):
        reason = None if is_folder else _reason(path, endings, known=known, folder=folder, chosen=chosen)
        if reason is None and not is_folder:
            found.append(path)
        elif reason is not None:
            left_out.add(reason, str(path))
    return sorted(found)


def is_result(path: Path) -> bool:
    """Whether a file is one that preprocess writes: beside an .idx and named after it, or a tokenizer's.

    Results may lie in the folder of the input; they are never input of the next run unless named outright.
    """
    if _TOKENIZER_FOLDER.fullmatch(path.parent.name) is not None:
        return True
    stems = [path.name.removesuffix(ending) for ending in _RESULTS if path.name.endswith(ending)]
    return any(stem and path.with_name(f"{stem}.idx").exists() for stem in stems)


def fits(pattern: str, parts: Sequence[str]) -> bool:
    """Whether a pattern fits a path below a folder, given by its parts, or a folder on the way to it."""
    inner = pattern.strip("/")
    expression = _expression(inner)
    anchored = "/" in inner or pattern.startswith("/")
    last = len(parts) - pattern.endswith("/")
    tried = ("/".join(parts[:end]) if anchored else parts[end - 1] for end in range(1, last + 1))
    return any(expression.fullmatch(name) for name in tried)


def _walk(folder: Path, chosen: Filter, left_out: LeftOut) -> Iterator[tuple[Path, bool]]:
    """Every name below a folder but those in folders that are left out."""

    def refuse(error: OSError) -> None:
        raise error

    with os_errors_named("reading the input"):
        seen: set[str] = set()
        for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
            real = os.path.realpath(root)
            if real in seen:  # a link that leads back
                folders.clear()
                continue
            seen.add(real)
            for name in sorted(folders):
                path = Path(root, name)
                reason = _folder_reason(path, folder, chosen)
                if reason is not None:
                    folders.remove(name)
                    left_out.add(reason, f"{path}/")
            folders.sort()
            yield from ((Path(root, name), False) for name in sorted(names))


def _folder_reason(path: Path, folder: Path, chosen: Filter) -> Reason | None:
    if path.name.startswith("."):
        return "hidden"
    if _TOKENIZER_FOLDER.fullmatch(path.name):
        return "result of ours"
    parts = (*path.relative_to(folder).parts, "")
    return "excluded" if any(fits(pattern, parts) for pattern in chosen.exclude) else None


def _reason(
    path: Path, endings: tuple[str, ...], *, known: tuple[str, ...], folder: Path, chosen: Filter
) -> Reason | None:
    """Why a file is left out; None: it is taken."""
    parts = path.relative_to(folder).parts
    if path.name.startswith("."):
        return "hidden"
    if is_result(path):
        return "result of ours"
    if any(fits(pattern, parts) for pattern in chosen.exclude):
        return "excluded"
    if chosen.include:
        return None if any(fits(pattern, parts) for pattern in chosen.include) else "not included"
    name = path.name.lower()
    if name.endswith(endings):
        return None
    return "another format" if name.endswith(known) else "unknown ending"


_TOKENS = re.compile(
    r"(?P<deep>(?:^|(?<=/))\*\*(?:/|$))|(?P<any>\*+)|(?P<one>\?)|\[(?P<set>!?\]?[^\]]*)\]|(?P<text>.)", re.S
)


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """A glob pattern as an expression over a whole path."""
    parts = []
    for found in _TOKENS.finditer(pattern):
        kind, text = found.lastgroup, found[found.lastgroup or 0]
        if kind == "deep":
            parts.append("(?:.*/)?" if text.endswith("/") else ".*")
        elif kind == "set":
            inside = re.escape(text.removeprefix("!")).replace(r"\-", "-")
            parts.append(f"(?!/)[{'^' if text.startswith('!') else ''}{inside}]")
        else:
            parts.append({"any": "[^/]*", "one": "[^/]"}.get(str(kind), re.escape(text)))
    return re.compile("".join(parts), re.S)
