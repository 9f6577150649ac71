"""Which documents of which input a corpus contains, by its manifest: all, a part, or the held-out ones. Pure.

The provenance in every manifest that `mdata preprocess` writes says so: inputs by the hash of their text, the options,
and the name of the result ("text", "text/part0", "text/holdout"). A text is held out by its own hash
(docs/reference/formats.md, "Records"), so held-out shares are intervals [0, share) of the same line in every run, and
training gets the rest. Parts are disjoint if they are different parts of one division: of the same input or corpus, in
the same way. A corpus made from a part (by a further split, a sample, a shuffle) lies within that part. A corpus
without such a provenance has no lineage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from blake3 import blake3

from mdata.manifest.types import CorpusManifest
from mdata.mixing.shares import fraction_of

# Recorded for a part and for parts merged by reference; together, all parts have the documents of the whole.
_OF_SHARDS = ("shard", "shard_inputs", "parts", "split")
# Recorded by mdata split, sample and shuffle.
_REWRITTEN = ("split_of", "earlier_splits", "sample_of", "sample_tokens", "sample_seed", "shuffle_of", "shuffle_seed")
_OF_TEXT = (
    "chat",
    "chat_schema",
    "input_format",
    "json_keys",
    "text_documents",
    "text_template",
)  # decide the text of a document


@dataclass(frozen=True)
class Lineage:
    """Which documents of its inputs a corpus contains.

    Attributes:
        role: all documents that are not held out, a part of them (by rows, --shard or mdata split), or those that are.
        key: of the records from which they came.
        result: its name in the run.
        run: the run that made it, as plain values: inputs, options and tokenizer.
        job: common to all parts (--shard) of a job and to their whole.
        inputs: hash and path of each input that has rows; path, size and time identify an input too, because the hash
            of a section is not that of its file.
        hashed: what was hashed of each text to decide whether it is held out.
        held: the interval of those hashes that the corpus has, as shares.
        part: its number and the number of parts; None: not a part.
        divisions: division -> part, for each division of an input or corpus inside one part of which this lies.
    """

    role: Literal["whole", "partition", "shard", "holdout"]
    key: str
    result: str
    run: tuple[object, ...]
    job: tuple[object, ...]
    inputs: dict[str, str]
    hashed: tuple[object, ...]
    held: tuple[Fraction, Fraction]
    part: tuple[int, int] | None
    divisions: dict[tuple[object, ...], int]

    @property
    def description(self) -> str:
        """A description for messages."""
        if self.role == "holdout":
            return f"the held-out part (--holdout {float(self.held[1]):g})"
        if self.part is not None and self.role == "shard":
            return f"part {self.part[0]} of {self.part[1]} of its job"
        if self.part is not None:
            return f"part {self.part[0]} of {self.part[1]} (--partitions)"
        return "the whole"


def lineage_of(manifest: CorpusManifest) -> Lineage | None:
    """The lineage in a manifest; None if `mdata preprocess` did not make the corpus."""
    provenance = manifest.provenance
    result = provenance.options.get("result") if provenance else None
    if provenance is None or not isinstance(result, str):
        return None
    try:
        return _lineage(manifest, result, provenance.options)
    except (TypeError, ValueError, ZeroDivisionError):  # edited together with its checksum, or written by a later mdata
        return None


def _lineage(manifest: CorpusManifest, result: str, options: dict[str, Any]) -> Lineage:
    assert manifest.provenance is not None, "its options were read from there"
    inputs = [file for file in manifest.provenance.inputs if file.rows]
    key, _, kind = result.partition("/")
    share, count = fraction_of(str(options.get("holdout", "0"))), int(options.get("partitions", 1))
    is_part, held_out = kind.startswith("part"), kind == "holdout"
    left_out = ("result", "chat_template_source", *_OF_SHARDS)  # the template's fingerprint says it, in all versions
    others = sorted((name, repr(value)) for name, value in options.items() if name not in left_out)
    of_run = tuple(option for option in others if option[0] not in _REWRITTEN)
    fingerprint = manifest.tokenizer.fingerprint if manifest.tokenizer else None
    shard = options.get("shard")
    of_job = options.get("shard_inputs") or inputs_digest([(i.path, i.bytes) for i in manifest.provenance.inputs])
    hashes, divisions = tuple(file.hash for file in inputs), dict[tuple[object, ...], int]()
    part = (int(kind.removeprefix("part")), count) if is_part else None
    if part:
        divisions["partitions", hashes, of_run] = part[0]
    divided = options.get("split") or (None if held_out else shard)
    if divided is not None:
        part = _numbers(divided)
    if shard:
        divisions["shards", of_job, of_run, _numbers(shard)[1]] = _numbers(shard)[0]
    for of, this in (*options.get("earlier_splits", ()), (options.get("split_of"), options.get("split"))):
        if of is not None and this is not None:
            divisions["split", of] = _numbers(this)[0]
    return Lineage(
        role="holdout" if held_out else "partition" if is_part else "shard" if divided else "whole",
        key=key,
        result=result,
        run=(key, fingerprint, tuple(others), hashes),
        job=(key, fingerprint, tuple(others), of_job),
        inputs={file.hash: file.path for file in inputs}
        | {f"{file.path}\0{file.bytes}\0{file.modified_ns}": file.path for file in inputs},
        hashed=tuple(option for option in others if option[0] in _OF_TEXT),
        held=(Fraction(0), share) if held_out else (share, Fraction(1)),
        part=part,
        divisions=divisions,
    )


def _numbers(part: str) -> tuple[int, int]:
    """ "2/3" -> (2, 3)."""
    number, of = map(int, part.split("/"))
    return number, of


def inputs_digest(files: Iterable[tuple[str, int]]) -> str:
    """Hash of (path, size in bytes) of all inputs of a job, in order: 16 hex digits."""
    return blake3("".join(f"{size} {path}\0" for path, size in files).encode()).hexdigest(length=8)


def shared_input(lineage: Lineage, other: Lineage) -> str | None:
    """An input of which both may contain the same documents; None: there is none."""
    common = lineage.inputs.keys() & other.inputs.keys()
    if lineage.key != other.key or not common:
        return None
    if lineage.hashed == other.hashed and (lineage.held[1] <= other.held[0] or other.held[1] <= lineage.held[0]):
        return None
    both = lineage.divisions.keys() & other.divisions.keys()
    if any(lineage.divisions[division] != other.divisions[division] for division in both):
        return None
    return lineage.inputs[min(common)]


class ByInput:
    """An index of lineages by their inputs."""

    def __init__(self, lineages: Sequence[Lineage | None]) -> None:
        self._all = lineages
        self._of_input: dict[tuple[str, str], list[int]] = {}
        for number, lineage in enumerate(lineages):
            for input in lineage.inputs if lineage else ():
                assert lineage is not None, "only a known one has inputs"
                self._of_input.setdefault((lineage.key, input), []).append(number)

    def sharing(self, lineage: Lineage) -> Iterable[tuple[int, str]]:
        """Numbers of the lineages that may share documents with this one, with the input that both were made from."""
        near = {number for input in lineage.inputs for number in self._of_input.get((lineage.key, input), ())}
        for number in sorted(near):
            other = self._all[number]
            assert other is not None, "it was found by its inputs"
            if common := shared_input(lineage, other):
                yield number, common
