"""Which documents of which input a corpus holds, according to its manifest: all, a part, or the held-out ones. Pure.

The provenance in every manifest that `mdata preprocess` writes says so: inputs by the hash of their text, the options,
and the name of the result ("text", "text/part0", "text/holdout"). A text is held out by its own hash (docs/formats.md,
"Records"), so held-out shares are intervals [0, share) of the same line in every run, and training gets the rest. Parts
are disjoint if the same input was divided in the same way. Nothing is known of a corpus without such a provenance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from blake3 import blake3

from mdata.manifest.types import CorpusManifest

# Recorded for a part and for parts merged by reference; together, all parts have the documents of the whole.
_OF_SHARDS = ("shard", "shard_inputs", "parts", "split")


@dataclass(frozen=True)
class Lineage:
    """Which documents of its input a corpus holds.

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
        part: its number, the number of parts, and whether they are runs of rows; None: not a part.
    """

    role: Literal["whole", "partition", "shard", "holdout"]
    key: str
    result: str
    run: tuple[object, ...]
    job: tuple[object, ...]
    inputs: dict[str, str]
    hashed: tuple[object, ...]
    held: tuple[Fraction, Fraction]
    part: tuple[int, int, bool] | None

    @property
    def what(self) -> str:
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
    known = manifest.provenance
    result = known.options.get("result") if known else None
    if known is None or not isinstance(result, str):
        return None
    try:
        return _lineage(manifest, result, known.options)
    except (TypeError, ValueError, ZeroDivisionError):  # edited together with its checksum, or written by a later mdata
        return None


def _lineage(manifest: CorpusManifest, result: str, options: dict[str, Any]) -> Lineage:
    assert manifest.provenance is not None, "its options were read from there"
    inputs = [one for one in manifest.provenance.inputs if one.rows]
    key, _, kind = result.partition("/")
    share, count = Fraction(options.get("holdout", "0")), int(options.get("partitions", 1))
    is_part, held_out = kind.startswith("part"), kind == "holdout"
    others = sorted((name, repr(value)) for name, value in options.items() if name not in ("result", *_OF_SHARDS))
    fingerprint = manifest.tokenizer.fingerprint if manifest.tokenizer else None
    shard = options.get("shard")
    of_job = options.get("shard_inputs") or inputs_digest([(i.path, i.bytes) for i in manifest.provenance.inputs])
    part = (int(kind.removeprefix("part")), count, bool(options.get("keep_sequential_samples"))) if is_part else None
    divided = options.get("split") or (None if held_out else shard)
    if divided is not None:
        number, of = map(int, divided.split("/"))
        part = (number, of, True)
    return Lineage(
        role="holdout" if held_out else "partition" if is_part else "shard" if divided else "whole",
        key=key,
        result=result,
        run=(key, fingerprint, tuple(others), tuple(one.hash for one in inputs)),
        job=(key, fingerprint, tuple(others), of_job),
        inputs={one.hash: one.path for one in inputs}
        | {f"{one.path}\0{one.bytes}\0{one.modified_ns}": one.path for one in inputs},
        hashed=(tuple(options.get("json_keys", ())), options.get("chat", False)),
        held=(Fraction(0), share) if held_out else (share, Fraction(1)),
        part=part,
    )


def inputs_digest(files: Iterable[tuple[str, int]]) -> str:
    """Hash of (path, size in bytes) of all inputs of a job, in order: 16 hex digits."""
    return blake3("".join(f"{size} {path}\0" for path, size in files).encode()).hexdigest(length=8)


def shared_input(one: Lineage, other: Lineage) -> str | None:
    """An input from which both may hold the same documents; None: they share none."""
    common = one.inputs.keys() & other.inputs.keys()
    if one.key != other.key or not common:
        return None
    if one.hashed == other.hashed and (one.held[1] <= other.held[0] or other.held[1] <= one.held[0]):
        return None
    alike = one.job == other.job if one.role == other.role == "shard" else list(one.inputs) == list(other.inputs)
    if one.part and other.part and one.part[1:] == other.part[1:] and alike:
        return None if one.part[0] != other.part[0] else one.inputs[next(iter(common))]
    return one.inputs[min(common)]


class ByInput:
    """An index of lineages by their inputs."""

    def __init__(self, lineages: Sequence[Lineage | None]) -> None:
        self._all = lineages
        self._of_input: dict[tuple[str, str], list[int]] = {}
        for number, lineage in enumerate(lineages):
            for input in lineage.inputs if lineage else ():
                assert lineage is not None, "only a known one has inputs"
                self._of_input.setdefault((lineage.key, input), []).append(number)

    def sharing(self, one: Lineage) -> Iterable[tuple[int, str]]:
        """Numbers of the lineages that may share documents with this one, with the input that both were made from."""
        near = {number for input in one.inputs for number in self._of_input.get((one.key, input), ())}
        for number in sorted(near):
            other = self._all[number]
            assert other is not None, "it was found by its inputs"
            if found := shared_input(one, other):
                yield number, found
