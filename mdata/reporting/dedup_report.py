"""The page of what `mdata dedup` removed: counts by file, sizes of groups, and examples with both texts side by side.

The numbers come from the folder alone; texts are read from the input again, for a few groups: the largest, and others
drawn with a fixed seed. What would take long to reach, inside a compressed file, is not shown. Words that one of two
texts lacks are marked; long texts are shown from shortly before the first difference.
"""

from __future__ import annotations

import heapq
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mdata.dedup.plan import CLUSTERS, signer_of
from mdata.dedup.row_set import FACTS, RowSet, path_of
from mdata.errors import DamageError, MdataError, counted, os_errors_named
from mdata.reporting.html_tables import Cell, percent, table
from mdata.reporting.report_style import page
from mdata.reporting.svg import escape
from mdata.sources.chunk import chunks, read_chunk
from mdata.sources.input_files import find_inputs
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec
from mdata.util import atomic_io

EXAMPLES = 12
_LARGEST = 4
_DRAWN = 400
_MOST_CHUNKS = 24  # of a compressed file before an example
_WORDS = 160  # of a text that are shown
_COMPARED_WORDS = 4000
_FILES = 1000
_WORD = re.compile(r"\S+|\s+")
_STYLE = """
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .2rem 1rem; margin: .4rem 0 1.6rem; }
.pair > div { min-width: 0; } .pair small { color: var(--quiet); overflow-wrap: anywhere; display: block; }
.pair p { background: var(--card); border-radius: 6px; padding: .5rem .8rem; margin: .2rem 0 0; font-size: 14px;
  overflow: auto; max-height: 24rem; overflow-wrap: anywhere; white-space: pre-wrap; }
mark { background: color-mix(in srgb, var(--c1) 28%, transparent); color: inherit; border-radius: 3px; }
@media (max-width: 40rem) { .pair { grid-template-columns: 1fr; } }
"""


class FileRow(NamedTuple):
    """A row of a file, from 1."""

    path: str
    row: int

    def __str__(self) -> str:
        return f"{self.path}:{self.row}"


@dataclass(frozen=True)
class DuplicateGroup:
    """A line of clusters.jsonl, with one of the documents that were removed."""

    kept: FileRow
    removed: FileRow
    size: int


@dataclass(frozen=True)
class Example:
    """Two texts of a group, and the share of n-grams that they have in common; None: one of them has no n-gram."""

    group: DuplicateGroup
    kept: str
    removed: str
    share: float | None


@dataclass(frozen=True)
class DedupReport:
    """A written page."""

    path: Path
    facts: dict[str, Any]


def is_dedup_folder(path: str | Path) -> bool:
    """Whether a path is a folder that `mdata dedup` has finished."""
    return (Path(path) / FACTS).is_file()


def report_dedup(folder: str | Path, output: str | Path | None = None) -> DedupReport:
    """Write the page of a folder of `mdata dedup`; default: report.html in it.

    Raises:
        UsageError: no finished result is there. DamageError: its files do not fit each other.
    """
    rows = RowSet.open(folder)
    facts = json.loads((rows.folder / FACTS).read_bytes())
    sizes, largest, drawn = _groups(rows.folder / CLUSTERS)
    examples = list(_examples(rows, facts["made_of"], [*largest, *drawn]))
    text = _render(rows, facts, sizes, largest, examples)
    path = Path(output) if output else rows.folder / "report.html"
    with os_errors_named("writing the report"):
        atomic_io.atomic_write(path, text.encode(errors="replace"))
    by_size = {str(size): count for size, count in sorted(sizes.items())}
    return DedupReport(path, {**facts["counts"], "groups_by_size": by_size, "examples": len(examples)})


def _groups(path: Path) -> tuple[Counter[int], list[DuplicateGroup], list[DuplicateGroup]]:
    """How many groups have each size; the largest; and some others."""
    draw, sizes = random.Random(0), Counter[int]()
    largest: list[tuple[int, int, DuplicateGroup]] = []
    drawn: list[DuplicateGroup] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            try:
                cluster = json.loads(line)
                group = DuplicateGroup(
                    FileRow(*cluster["kept"]), FileRow(*cluster["removed"][0]), 1 + len(cluster["removed"])
                )
            except (ValueError, LookupError, TypeError) as error:
                raise DamageError(f"{path}:{number + 1} is not a group", found=str(error)[:200]) from error
            sizes[group.size] += 1
            heapq.heappush(largest, (group.size, -number, group))
            if len(largest) > _LARGEST:
                heapq.heappop(largest)
            # Each group has the same chance (Vitter 1985, algorithm R).
            if len(drawn) < _DRAWN:
                drawn.append(group)
            elif (place := draw.randrange(number + 1)) < _DRAWN:
                drawn[place] = group
    top = [group for *_, group in sorted(largest, reverse=True)]
    return sizes, top, [group for group in draw.sample(drawn, len(drawn)) if group not in top]


def _examples(rows: RowSet, made_of: dict[str, Any], groups: Sequence[DuplicateGroup]) -> Iterator[Example]:
    texts = _Texts(rows, made_of)
    signer = signer_of(made_of)
    shown = 0
    for group in groups:
        if shown == EXAMPLES:
            return
        kept, removed = texts.text_of(group.kept), texts.text_of(group.removed)
        if kept is None or removed is None:
            continue
        shown += 1
        hashes, ends = signer.ngram_sets([kept, removed])
        sets = [set(part.tolist()) for part in np.split(hashes, ends[:-1])]
        union = len(sets[0] | sets[1])
        yield Example(group, kept, removed, len(sets[0] & sets[1]) / union if all(sets) else None)


class _Texts:
    """Texts of the input by file and row."""

    def __init__(self, rows: RowSet, made_of: dict[str, Any]) -> None:
        self._rows = rows
        self._format = made_of["input_format"]
        self._spec = ReadSpec(
            json_keys=(made_of["json_key"],), text_documents=made_of["text_documents"], sentence_lists=False
        )

    def text_of(self, row: FileRow) -> str | None:
        """A text; None: it is too far inside its file, or not there any more."""
        try:
            (file,) = find_inputs([row.path], format=self._format).files
            numbers = [number for number, candidate in enumerate(self._rows.files) if candidate.path == path_of(file)]
            if not numbers:
                return None  # a text of --against, whose chunks are not recorded
            ends = np.cumsum(self._rows.chunks_of(numbers[0])["rows"].astype(np.int64))
            chunk = int(np.searchsorted(ends, row.row - 1, side="right"))
            if file.streamed and chunk > _MOST_CHUNKS:
                return None
            before = int(ends[chunk - 1]) if chunk else 0
            read = chunks([file], self._rows.chunk_bytes, spec=self._spec, start=(0, chunk))
            batch = parse(file.format, read_chunk(next(read), self._spec), spec=self._spec)
            read.close()
        except (MdataError, StopIteration, IndexError):
            return None
        kept = range(1, batch.rows + 1) if batch.kept is None else list(batch.kept)
        texts = dict(zip(kept, batch.columns[0].sentences, strict=True))
        return texts.get(row.row - before)


def _render(
    rows: RowSet,
    facts: dict[str, Any],
    sizes: Counter[int],
    largest: Sequence[DuplicateGroup],
    examples: Sequence[Example],
) -> str:
    counts, options = facts["counts"], facts["made_of"]
    share = counts["removed"] / max(1, counts["rows"])
    how = "equal texts only"
    if options["bands"]:
        how = f"{options['bands']} bands of {options['rows']}, n-grams of {options['ngram']} {options['unit']}"
    if options.get("verify"):
        how += f"; at least {percent(options['verify'])} of them in common"
    lead = (
        f"{counts['removed']:,} of {counts['rows']:,} rows ({percent(share)}) repeat earlier ones, "
        f"{counts['exact']:,} of them exactly; {counted(counts['clusters'], 'group')}; {how}"
    )
    sections = [
        f'<h1>{escape(str(rows.folder))}</h1><p class="lead">{escape(lead)}</p>',
        _files(rows),
        _sizes(sizes),
        "<h2>Largest groups</h2>" * bool(largest),
        table(["kept", "documents"], [[Cell(str(group.kept)), Cell(group.size)] for group in largest])
        if largest
        else "",
        _shown(examples, counts["clusters"]),
    ]
    return page(f"{rows.folder.name}: what was removed", sections, style=_STYLE)


def _files(rows: RowSet) -> str:
    files = sorted(rows.files, key=lambda file: (-file.removed, file.path))
    lines = [
        [Cell(file.path), Cell(file.rows), Cell(file.removed), Cell(percent(file.removed / max(1, file.rows)))]
        for file in files[:_FILES]
    ]
    more = f'<p class="lead">and {counted(len(files) - _FILES, "more file")}</p>' if len(files) > _FILES else ""
    return f"<h2>Files</h2>{table(['file', 'rows', 'removed', 'share'], lines)}{more}"


def _sizes(sizes: Counter[int]) -> str:
    if not sizes:
        return ""
    by_range = Counter[int]()
    documents = Counter[int]()
    for size, count in sizes.items():
        by_range[size.bit_length()] += count
        documents[size.bit_length()] += count * (size - 1)
    lines = [
        [Cell(_range(bits)), Cell(by_range[bits]), Cell(documents[bits])]
        for bits in range(2, max(by_range) + 1)
        if by_range[bits]
    ]
    return f"<h2>Sizes of groups</h2>{table(['documents of a group', 'groups', 'removed'], lines)}"


def _range(bits: int) -> str:
    return f"{1 << (bits - 1):,} to {(1 << bits) - 1:,}"


def _shown(examples: Sequence[Example], clusters: int) -> str:
    if not examples:
        note = (
            "no text could be read again: files have moved or changed, or lie in compressed files far from their begin"
        )
        return f'<h2>Examples</h2><p class="lead">{note}</p>' if clusters else ""
    return "<h2>Examples</h2>" + "".join(map(_pair, examples))


def _pair(example: Example) -> str:
    kept, removed = marked(example.kept, example.removed)
    share = "" if example.share is None else f"; {percent(example.share)} of their n-grams in common"
    more = f"; one of {example.group.size - 1:,} removed" if example.group.size > 2 else ""
    return (
        f'<div class="pair"><div><small>kept: {escape(str(example.group.kept))}</small><p>{kept}</p></div>'
        f"<div><small>removed: {escape(str(example.group.removed))}{more}{share}</small><p>{removed}</p></div></div>"
    )


def marked(left: str, right: str) -> tuple[str, str]:
    """Two texts as HTML: the words that the other one lacks are marked, and long texts are cut."""
    words = [_WORD.findall(text)[: 2 * _COMPARED_WORDS] for text in (left, right)]
    one_words, other_words = ([word for word in part if not word.isspace()] for part in words)
    matcher = SequenceMatcher(None, one_words, other_words, autojunk=False)
    common: tuple[set[int], set[int]] = set(), set()
    for block in matcher.get_matching_blocks():
        common[0].update(range(block.a, block.a + block.size))
        common[1].update(range(block.b, block.b + block.size))
    ends = [len(one_words), len(other_words)]
    firsts = [next((n for n in range(end) if n not in same), end) for end, same in zip(ends, common, strict=True)]
    start = max(0, min(firsts) - _WORDS // 4) if min(firsts) < max(ends) else 0
    shown = [_marked(part, same, start) for part, same in zip(words, common, strict=True)]
    return shown[0], shown[1]


def _marked(words: Sequence[str], common: set[int], start: int) -> str:
    parts, number = ["... " if start else ""], -1
    for word in words:
        number += not word.isspace()
        if number < start:
            continue
        if number >= start + _WORDS:
            parts.append(" ...")
            break
        if word.isspace():
            parts.append("\n" if "\n" in word else " ")
        else:
            text = escape(word)
            parts.append(text if number in common else f"<mark>{text}</mark>")
    return "".join(parts)
