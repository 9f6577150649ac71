"""Finds the parts of a job on disk: which are finished, and whether they belong to the same job.

A part is identified by its name, `PREFIX-00003-of-00064_RESULT.json`, and by the content of its manifest. All reasons
against joining the parts are collected and reported at once; nothing is changed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdata.errors import UsageError, few, os_errors_named
from mdata.indexed.pair_format import bin_path, idx_path
from mdata.manifest.io import load_manifest
from mdata.manifest.sidecars import manifest_path
from mdata.manifest.types import CorpusManifest, Provenance
from mdata.preprocessing.parts import part_prefix
from mdata.preprocessing.resume import difference
from mdata.sources.sections import PartNumber

_OF_PART = ("shard", "shard_inputs")
_IGNORED = ("shard", "max_errors")


@dataclass(frozen=True)
class FoundPart:
    """One finished part of one result: the prefix of its pair, its manifest, and its provenance (never None)."""

    prefix: Path
    manifest: CorpusManifest
    made_by: Provenance


@dataclass(frozen=True)
class FoundResult:
    """All parts of one result, in order.

    Attributes:
        prefix: of the corpus that they are parts of.
        parts: those parts, in order.
        options: as each part records them, without those that make it a part.
    """

    prefix: Path
    parts: Sequence[FoundPart]

    @property
    def options(self) -> dict[str, Any]:
        """The options that one run of the whole job would record."""
        return {name: value for name, value in self.parts[0].made_by.options.items() if name not in _OF_PART}


def find_parts(output_prefix: str, *, count: int | None = None) -> list[FoundResult]:
    """The results of a job that ran in parts, each with all of its parts.

    Args:
        output_prefix: of the job, as given to `mdata preprocess`.
        count: number of parts; None: from the names, if they agree.

    Raises:
        UsageError: there are no parts, some are missing, or they are not parts of one job; lists every reason.
        DamageError: a manifest is damaged.
    """
    prefix = Path(output_prefix)
    numbers = _numbers_by_result(prefix)
    counts = sorted({part.count for parts in numbers.values() for part in parts})
    if count is None and len(counts) > 1:
        raise UsageError(
            f"{prefix}: the job was divided in several ways",
            found=", ".join(_how_many(numbers, division) for division in counts),
            expected="parts of one division",
            fix="name one with --parts, or remove the files of the others",
        )
    count = count or (counts[0] if counts else 0)
    chosen = {result: {part.number for part in parts if part.count == count} for result, parts in numbers.items()}
    chosen = {result: parts for result, parts in chosen.items() if parts}
    if not chosen:
        raise UsageError(
            f"{prefix}: no finished part was found",
            found=f"parts of {few(list(map(str, counts)))}" if counts else None,
            expected=f"{part_prefix(prefix.name, PartNumber(1, count or 64))}_text_document.json, ...",
            fix="make them with mdata preprocess --shard K/N, or mdata launch",
        )
    _check_complete(prefix, count, chosen)
    return [_load(prefix, result, count=count) for result in sorted(chosen)]


def _numbers_by_result(prefix: Path) -> dict[str, list[PartNumber]]:
    """By what follows a part's number in the names of manifests."""
    pattern = re.compile(re.escape(prefix.name) + r"-([0-9]{5})-of-([0-9]{5})_(.+)\.json")
    numbers: dict[str, list[PartNumber]] = {}
    with os_errors_named("looking for parts"):
        for path in prefix.parent.iterdir():
            if named := pattern.fullmatch(path.name):
                numbers.setdefault(named[3], []).append(PartNumber(int(named[1]), int(named[2])))
    return numbers


def _how_many(numbers: Mapping[str, Sequence[PartNumber]], count: int) -> str:
    finished = {part.number for parts in numbers.values() for part in parts if part.count == count}
    return f"{len(finished)} of {count}"


def _check_complete(prefix: Path, count: int, chosen: Mapping[str, set[int]]) -> None:
    problems = []
    for result, parts in sorted(chosen.items()):
        if missing := sorted(set(range(1, count + 1)) - parts):
            problems.append(f"{result}: {len(missing)} of {count} are missing: {as_ranges(missing)}")
    if problems:
        first = sorted(set(range(1, count + 1)) - min(chosen.values(), key=len))[0]
        raise UsageError(
            f"{prefix}: not all parts are finished",
            found="; ".join(problems),
            fix=f"run the missing ones, such as --shard {first}/{count}, and merge again; nothing was changed",
        )


def as_ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers as text: "1,3-5", which Slurm understands too."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _load(prefix: Path, result: str, *, count: int) -> FoundResult:
    parts, problems = [], []
    for number in range(1, count + 1):
        pair = Path(f"{part_prefix(str(prefix), PartNumber(number, count))}_{result}")
        manifest = load_manifest(manifest_path(pair))
        if not isinstance(manifest, CorpusManifest) or manifest.provenance is None or len(manifest.shards) != 1:
            problems.append(f"{manifest_path(pair)} was not made by mdata preprocess --shard")
            continue
        parts.append(FoundPart(pair, manifest, manifest.provenance))
        problems += [f"part {number}: {reason}" for reason in _differences(parts[0], parts[-1], f"{number}/{count}")]
    if problems:
        raise UsageError(
            f"{prefix}_{result}: these are not parts of one job",
            found="; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else ""),
            expected=f"what part 1 of {count} has",
            fix="make the parts named here again, with --overwrite; nothing was changed",
        )
    return FoundResult(prefix.with_name(f"{prefix.name}_{result}"), parts)


def _differences(first: FoundPart, part: FoundPart, shard: str) -> Iterator[str]:
    """Why a part is not of the same job as the first one."""
    if part.made_by.options.get("shard") != shard:
        yield f"it records --shard {part.made_by.options.get('shard')}"
    described = [_described(each) for each in (first, part)]
    if reason := difference(*described):
        yield reason


def _described(part: FoundPart) -> dict[str, Any]:
    options = {name: value for name, value in part.made_by.options.items() if name not in _IGNORED}
    tokenizer = part.manifest.tokenizer
    facts = {"tokenizer": tokenizer and tokenizer.fingerprint, "type": part.manifest.dtype}
    return {"options": options, **facts, "level": part.manifest.level}


def check_pairs(prefix: object, results: Sequence[FoundResult], *, size_of: Callable[[Path], int | None]) -> None:
    """See that the pairs of all parts are there.

    Args:
        prefix: for the message. size_of: the bytes of a file; None: there is none.

    Raises:
        UsageError: names those that are not.
    """
    problems = []
    for part in (part for result in results for part in result.parts):
        (shard,) = part.manifest.shards
        for file, size in ((bin_path(part.prefix), shard.bytes), (idx_path(part.prefix), None)):
            actual_bytes = size_of(file)
            if actual_bytes is None:
                problems.append(f"{file.name} is missing")
            elif size is not None and actual_bytes != size:
                problems.append(f"{file.name} has {actual_bytes} bytes, not {size}")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UsageError(
            f"{prefix}: not all parts are complete",
            found="; ".join(problems[:8]) + more,
            fix="run these parts again, and merge again; nothing was changed",
        )


def max_errors_of(result: FoundResult) -> str | None:
    """The limit on bad rows with which the parts were made."""
    limit = result.parts[0].made_by.options.get("max_errors")
    return limit if isinstance(limit, str) else None
