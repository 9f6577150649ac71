"""`decontaminate`: finds texts of test sets in training texts by exact n-grams of words, and removes them.

As for GPT-3 (Brown et al. 2020, appendix C): a test item of at least `ngram` words gives all its n-grams, one of at
least `min_ngram` words is one n-gram, shorter items are ignored. A match is compared word by word
(mdata_cpp/ngram_match.hpp). Texts that match are reported, dropped, or split: the passage is cut out up to the next
ends of sentences on both sides, and short pieces are removed. Slow twin: tests/reference/decontaminate.py.

`compat="openwebtext"` gives the bytes of Megatron-LM's filter_ngrams.py (mdata/cleaning/openwebtext_ngrams.py), which
first counts the texts in which each n-gram occurs, and ignores frequent ones.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from mdata import _core
from mdata.cleaning.openwebtext_ngrams import OpenWebTextNgrams, Pieces, dumped
from mdata.cleaning.text_job import (
    BLOCK_BYTES,
    KEEP,
    Edit,
    TextBatch,
    TextJobOptions,
    TextJobResult,
    TextWork,
    join_reports,
    run_text_job,
)
from mdata.errors import BadInputError, UsageError
from mdata.progress import SILENT, Progress
from mdata.sources.chunk import chunks, read_chunk
from mdata.sources.input_files import find_inputs
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec, in_members

COUNTS = ".counts"  # the folder of compat's first pass, below the output
_STOP = re.compile("[.!?]")  # ends a sentence


@dataclass(frozen=True, kw_only=True)
class DecontaminateRules:
    """The n-grams to look for, and what to do with texts that contain them.

    Args:
        against: files of test items, each as "PATH" or "NAME=PATH".
        against_keys: the keys or columns of an item's text, which are joined by line ends.
        ngram: words of an n-gram. min_ngram: least words of a shorter item, which is one n-gram.
        mode: what happens to texts that match.
        margin: characters that are cut on each side of a passage, at least.
        min_characters: pieces of at most this length are removed. max_pieces: texts that split into more are removed.
        compat: "openwebtext". key_threshold: n-grams in at least this many texts are ignored; with compat only.
    """

    against: tuple[str, ...]
    against_keys: tuple[str, ...] = ("text",)
    ngram: int = 13
    min_ngram: int = 8
    mode: Literal["report", "drop", "split"] = "drop"
    margin: int = 200
    min_characters: int = 200
    max_pieces: int = 10
    compat: str | None = None
    key_threshold: int = 10

    def __post_init__(self) -> None:
        if not self.against:
            raise UsageError("against names no test set")
        if not 1 <= self.min_ngram <= self.ngram <= 256:
            numbers = f"min_ngram={self.min_ngram}, ngram={self.ngram}"
            raise UsageError(numbers, expected="1 <= min_ngram <= ngram <= 256")
        if self.mode not in ("report", "drop", "split"):
            raise UsageError(f"mode={self.mode}", expected="report, drop or split")
        if self.compat not in (None, "openwebtext"):
            raise UsageError(f"compat={self.compat}", expected="openwebtext")
        if self.compat and self.mode != "split":
            raise UsageError("OpenWebText splits texts", found=f"mode={self.mode}", fix="mode=split")
        for name in ("margin", "min_characters", "max_pieces", "key_threshold"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}", expected="0 or more")


@dataclass(frozen=True)
class ItemSet:
    """The items of a test set."""

    name: str
    items: list[str] = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """A hash of the items."""
        return blake3("\0".join(self.items).encode()).hexdigest(length=16)


def load_item_sets(rules: DecontaminateRules) -> list[ItemSet]:
    """The test sets.

    Raises:
        UsageError: a file cannot be read or has no items, or two sets have one name.
        BadInputError: an item has no text.
    """
    spec = ReadSpec(json_keys=rules.against_keys, sentence_lists=False, key_option="--against-keys")
    sets = []
    for named in rules.against:
        name, _, path = named.partition("=") if not Path(named).exists() and "=" in named else ("", "", named)
        files = find_inputs([path]).files
        items: list[str] = []
        rows: Counter[str] = Counter()
        with closing(chunks(files, BLOCK_BYTES, spec=spec)) as read:
            for chunk in read:
                batch = parse(chunk.source.format, read_chunk(chunk, spec), spec=spec)
                if batch.bad_rows:
                    bad_row = in_members(batch.bad_rows, chunk.members)[0]
                    raise BadInputError(
                        f"{bad_row.place(chunk.source.path, rows[str(chunk.source.path)])}: {bad_row.reason}",
                        found=bad_row.excerpt,
                        fix="correct this item of the test set; --against-keys names the keys of its text",
                    )
                rows[str(chunk.source.path)] += batch.rows
                columns = (column.sentences for column in batch.columns)
                items += ["\n".join(texts) for texts in zip(*columns, strict=True)]
        if not items:
            raise UsageError(f"the test set {path} has no items", fix="give its file, or leave it out of --against")
        sets.append(ItemSet(name or Path(path).name.partition(".")[0], items))
    names = Counter(item_set.name for item_set in sets)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UsageError(f"two test sets have the name {twice[0]}", fix="name them: --against NAME=PATH")
    return sets


@dataclass
class _Decontaminate:
    """See `TextWork`."""

    rules: DecontaminateRules
    # The report of a part names the items that were found, so that none counts twice.
    names_items: bool = False
    index: _core.NgramIndex | None = None
    # The number of the first item of each set.
    firsts: Sequence[int] = ()

    name, keys = "decontaminate", ()

    @property
    def writes(self) -> bool:
        return self.rules.mode != "report"

    @cached_property
    def sets(self) -> list[ItemSet]:
        """The test sets, read when they are first used."""
        return load_item_sets(self.rules)

    def __getstate__(self) -> dict[str, Any]:
        return {"rules": self.rules, "names_items": self.names_items, "index": None, "firsts": ()}

    def record(self) -> dict[str, Any]:
        names: tuple[str, ...] = ("against_keys", "ngram", "min_ngram", "mode")
        names += ("margin", "min_characters", "max_pieces") if self.rules.mode == "split" else ()
        options = {name: getattr(self.rules, name) for name in names}
        sets = [[item_set.name, len(item_set.items), item_set.fingerprint] for item_set in self.sets]
        return {"version": 1, "unicode": _core.text_classes_unicode(), "sets": sets, **options}

    def prepare(self) -> None:
        items = [item for item_set in self.sets for item in item_set.items]
        self.index = _core.NgramIndex(items, self.rules.ngram, self.rules.min_ngram)
        self.firsts = np.cumsum([0, *(len(item_set.items) for item_set in self.sets)])[:-1].tolist()

    def edit(self, batch: TextBatch) -> tuple[list[Edit], Counter[str]]:
        assert self.index is not None, "prepared before"
        spans, hits = self.index.match(batch.texts)
        edits, counts = [KEEP] * len(batch.texts), Counter[str]()
        if not len(hits):
            return edits, counts
        counts.update({f"item {item}": count for item, count in _counted(hits[:, 1])})
        of_set = np.searchsorted(np.array(self.firsts), hits[:, 1], side="right") - 1
        rows = np.unique(np.column_stack((hits[:, 0], of_set)), axis=0)
        counts.update({f"rows {number}": count for number, count in _counted(rows[:, 1])})
        if self.rules.mode == "report":
            return edits, counts
        first = {int(text): int(number) for text, number in rows[::-1].tolist()}
        for text, passages in _by_text(spans):
            reason = f"contaminated-{self.sets[first[text]].name}"
            if self.rules.mode == "drop":
                edits[text] = Edit(reason)
                continue
            pieces = split_text(batch.texts[text], passages, self.rules)
            many = len(pieces) > self.rules.max_pieces
            edits[text] = Edit(texts=pieces) if pieces and not many else Edit("too-many-pieces" if many else reason)
        return edits, counts

    def summary(self, counts: Counter[str]) -> dict[str, Any]:
        hit_items = np.array([int(name[5:]) for name in counts if name.startswith("item ")], np.int64)
        sets, first = [], 0
        for number, item_set in enumerate(self.sets):
            last = first + len(item_set.items)
            hit = int(((hit_items >= first) & (hit_items < last)).sum())
            share = round(hit / max(1, len(item_set.items)), 6)
            rows = counts[f"rows {number}"]
            sets.append(
                {"name": item_set.name, "items": len(item_set.items), "found": hit, "share": share, "rows": rows}
            )
            first = last
        return {"sets": sets, **({"items": sorted(hit_items.tolist())} if self.names_items else {})}

    def join(self, summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The summary of all parts."""
        counts = Counter[str]()
        for summary in summaries:
            counts.update(f"item {item}" for item in summary["items"])
            counts.update({f"rows {number}": facts["rows"] for number, facts in enumerate(summary["sets"])})
        return replace(self, names_items=False).summary(counts)


def _counted(numbers: Any) -> list[tuple[int, int]]:
    values, counts = np.unique(numbers, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))


def _by_text(spans: Any) -> list[tuple[int, list[tuple[int, int]]]]:
    grouped: dict[int, list[tuple[int, int]]] = {}
    for text, begin, end in spans.tolist():
        grouped.setdefault(text, []).append((begin, end))
    return list(grouped.items())


def split_text(text: str, passages: Sequence[tuple[int, int]], rules: DecontaminateRules) -> list[str]:
    """The pieces of a text without these passages and the sentences around them, short ones left out."""
    pieces, start = [], 0
    for begin, end in passages:
        if end <= start:
            continue
        before = max(start, begin - rules.margin)
        stop = max(text.rfind(mark, start, before + 1) for mark in ".!?") + 1
        pieces.append(text[start:stop])
        following = _STOP.search(text, end + rules.margin)
        start = following.end() if following else len(text)
    pieces.append(text[start:])
    return [piece for piece in pieces if len(piece) > rules.min_characters]


# ---- as OpenWebText did


@dataclass
class _Counted:
    """The first pass of `compat`: in how many texts each n-gram occurs, and the rows of each chunk."""

    rules: DecontaminateRules
    ngrams: OpenWebTextNgrams | None = None

    name, keys, writes = "count", (), False

    @cached_property
    def sets(self) -> list[ItemSet]:
        return load_item_sets(self.rules)

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: value for name, value in vars(self).items() if name != "sets"}, "ngrams": None}

    def record(self) -> dict[str, Any]:
        names = ("against_keys", "ngram", "min_ngram")
        sets = [[item_set.name, len(item_set.items), item_set.fingerprint] for item_set in self.sets]
        return {"version": 1, "sets": sets, **{name: getattr(self.rules, name) for name in names}}

    def prepare(self) -> None:
        self.ngrams = self._loaded()

    def _loaded(self) -> OpenWebTextNgrams:
        items = [item for item_set in self.sets for item in item_set.items]
        return OpenWebTextNgrams.of_items(items, most=self.rules.ngram, least=self.rules.min_ngram)

    def edit(self, batch: TextBatch) -> tuple[list[Edit], Counter[str]]:
        assert self.ngrams is not None, "prepared before"
        counts = Counter({f"chunk {batch.chunk.file_number} {batch.chunk.number}": batch.num_rows})
        for text in batch.texts:
            counts.update(f"ngram {key}" for key in self.ngrams.occurring(text))
        return [KEEP] * len(batch.texts), counts

    def summary(self, counts: Counter[str]) -> dict[str, Any]:
        return {"counts": dict(sorted(counts.items()))}


@dataclass
class _OpenWebText(_Counted):
    """The second pass: texts split around n-grams that are not frequent."""

    counts: Mapping[str, int] = field(default_factory=dict)

    name, writes = "decontaminate", True

    def record(self) -> dict[str, Any]:
        names = ("margin", "min_characters", "max_pieces", "key_threshold", "compat")
        return {**super().record(), **{name: getattr(self.rules, name) for name in names}}

    def prepare(self) -> None:
        self.ngrams = self._loaded().without(self._frequent)

    @cached_property
    def rows_before(self) -> dict[tuple[int, int], int]:
        """For each chunk, the rows before it."""
        places = sorted(tuple(map(int, key.split()[1:])) for key in self.counts if key.startswith("chunk "))
        before, rows = dict[tuple[int, int], int](), 0
        for file, number in places:
            before[file, number] = rows
            rows += self.counts[f"chunk {file} {number}"]
        return before

    def edit(self, batch: TextBatch) -> tuple[list[Edit], Counter[str]]:
        assert self.ngrams is not None, "prepared before"
        limits = Pieces(self.rules.margin, self.rules.min_characters)
        tasks = "-".join(item_set.name for item_set in self.sets)
        before = self.rows_before[batch.chunk.file_number, batch.chunk.number]
        edits = []
        for number, (row, text) in enumerate(zip(batch.rows, batch.texts, strict=True)):
            pieces = self.ngrams.free_pieces(text, limits)
            if not pieces or len(pieces) > self.rules.max_pieces:
                edits.append(Edit("too-many-pieces" if pieces else "contaminated"))
                continue
            lines = dumped(batch.fields(number), batch.key, pieces, f"{tasks}-{before + row:010d}")
            edits.append(Edit(texts=None if pieces == [text] else pieces, lines=lines))
        return edits, Counter()

    def summary(self, counts: Counter[str]) -> dict[str, Any]:
        return {"frequent": sorted(key.removeprefix("ngram ") for key in self._frequent)}

    @property
    def _frequent(self) -> list[str]:
        least = self.rules.key_threshold
        return [key for key, count in self.counts.items() if key.startswith("ngram ") and count >= least]


def decontaminate(options: TextJobOptions, rules: DecontaminateRules, progress: Progress = SILENT) -> TextJobResult:
    """Find test items in texts and remove them; an interrupted command continues.

    Raises:
        UsageError: unusable options, rules or input, or the folder holds a result of other options.
        BadInputError: a bad row, compressed data or parquet is damaged.
        ResourceError: the disk or memory ran out; run again to continue.
    """
    if rules.compat is None or options.shard is not None:
        return run_text_job(options, decontaminate_work(options, rules), progress)
    _check_rows_only(options, rules)
    folder = Path(options.output) / COUNTS
    if (folder.parent / "decontaminate.report").exists():
        result = run_text_job(options, _OpenWebText(rules), progress)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed just before it removed them
        return result
    folder.parent.mkdir(parents=True, exist_ok=True)
    counted = run_text_job(
        replace(options, output=folder, removed=None, compression="none", on_error="skip", quarantine=None),
        _Counted(rules),
        progress,
    )
    result = run_text_job(options, _OpenWebText(rules, counts=counted.summary["counts"]), progress)
    shutil.rmtree(folder)
    return result


def decontaminate_work(options: TextJobOptions, rules: DecontaminateRules, *, in_parts: bool = False) -> TextWork:
    """The work on the texts of a job, or of its parts.

    Raises:
        UsageError: options and rules that do not go together.
    """
    _check_rows_only(options, rules)
    in_parts |= options.shard is not None
    if rules.compat is not None and in_parts:
        raise UsageError(
            "OpenWebText counts n-grams in all texts, which parts divide", fix="leave --compat or --shard out"
        )
    return _Decontaminate(rules, names_items=in_parts)


def join_parts(
    options: TextJobOptions, rules: DecontaminateRules, num_parts: int, progress: Progress = SILENT
) -> TextJobResult:
    """Write one report for a job of finished parts: an item that several parts found counts once.

    Raises:
        UsageError: a part is not finished, is of other input or options, or the folder holds another result.
    """
    if options.shard is not None:
        raise UsageError(f"shard={options.shard} is one part", fix="leave it out to join the reports of all")
    work = decontaminate_work(options, rules, in_parts=True)
    assert isinstance(work, _Decontaminate), "compat is refused"
    return join_reports(options, work, num_parts, work.join, progress)


def _check_rows_only(options: TextJobOptions, rules: DecontaminateRules) -> None:
    if options.rows_only and rules.mode != "drop":
        raise UsageError(f"rows_only lists removed rows, and mode={rules.mode} removes none", fix="mode=drop")
