"""data.json: what a training run reads, for tracing. A trainer writes it into its run folder and into its checkpoints.

It knows nothing of the trainer's configuration: it has the options of the dataset as `DatasetOptions.from_keys` takes
them, and spans of steps with their batch sizes and data-parallel ranks. A blend that continues another one gives the
samples of that one as well, so the blend of the last span gives every sample of the run. As in a manifest, unknown
fields are refused except under `notes`: a field that decides what is read raises the version. A record with skipped
samples has version 2, any other version 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from mdata.corpus.open_part import is_stored
from mdata.dataset.run_paths import StartedIn
from mdata.errors import DamageError, UsageError, os_errors_named
from mdata.loader.batch_sizes import BatchSizes
from mdata.tracing.run_steps import LARGEST_SAMPLE, Steps, StepSpan
from mdata.util import atomic_io
from mdata.util.canonical_json import hash_of
from mdata.util.config_text import parse_json
from mdata.util.regular_files import regular_file

RECORD = "data.json"
FORMAT: Literal["mdata-run"] = "mdata-run"
Version = Literal[1, 2]
VERSION: Version = 1
SKIPPING: Version = 2
_WRITE_AGAIN = "restore it from a copy; a run that is started again writes it anew"


class RecordedSpan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps that were read in one way.

    Attributes:
        steps_before, samples_before: done before its first step.
        global_batch: pairs (consumed samples, samples of a step from there on); with `ramp_samples` a ramp as in
            Megatron, which ends there.
        micro_batch: rows of a forward pass. data_ranks: data-parallel ranks; None: unknown.
        blend: path or Megatron's words, as given; None: unknown. data_id: of the dataset; None: unknown.
    """

    steps_before: int
    samples_before: int
    global_batch: tuple[tuple[int, int], ...]
    ramp_samples: int | None = None
    micro_batch: int
    data_ranks: int | None
    blend: str | None
    data_id: str | None

    @property
    def sizes(self) -> BatchSizes:
        """The samples of each step."""
        if self.ramp_samples is None:
            return BatchSizes(self.global_batch)
        return BatchSizes(self.global_batch, self.ramp_samples, self.ramp_samples / (len(self.global_batch) - 1))

    @property
    def steps(self) -> StepSpan:
        """The span for `Steps`."""
        return StepSpan(
            sizes=self.sizes,
            steps_before=self.steps_before,
            samples_before=self.samples_before,
            micro_batch=self.micro_batch,
            dp_size=self.data_ranks,
        )


class RecordedSets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The validation or test sets of a run; see `evaluation_sets`.

    Attributes:
        paths: corpora as given; without any, the sets that the blend names, or its part of the split.
        data_ids: data id of each set by its name; None: unknown.
        num_samples: for which Megatron's order is built.
        eval_samples: samples of an evaluation; 0: all. interval: steps between evaluations; 0: only after the last.
    """

    paths: tuple[str, ...] = ()
    data_ids: dict[str, str] | None = None
    num_samples: int | None = None
    eval_samples: int = 0
    interval: int = 0


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of data.json.

    Attributes:
        num_steps: of the whole run, as planned.
        spans: ascending, at least one. The first begins later than at step 0 if nothing is known of earlier steps.
        options: of the training data, for `DatasetOptions.from_keys`.
        identity: what decides the order, field by field; its hash is the data id of the last span. Empty: unknown.
        corpora: id of each corpus by the name of its component; empty: unknown.
        valid, test: sets; None: nothing is evaluated.
        started_in: where relative paths start.
        skip: pairs (first, last) of samples that are not trained on, ascending, apart from each other.
        notes: for people and other programs; never decides what is read.
    """

    format: Literal["mdata-run"] = FORMAT
    version: Version = VERSION
    num_steps: int
    spans: tuple[RecordedSpan, ...]
    options: dict[str, Any]
    identity: dict[str, Any] = {}
    corpora: dict[str, str] = {}
    valid: RecordedSets | None = None
    test: RecordedSets | None = None
    started_in: StartedIn = StartedIn()
    skip: tuple[tuple[int, int], ...] = ()
    notes: dict[str, Any] = {}

    @property
    def now(self) -> RecordedSpan:
        """The last span."""
        return self.spans[-1]


def span_of(
    sizes: BatchSizes,
    *,
    steps_before: int,
    samples_before: int,
    micro_batch: int,
    data_ranks: int | None,
    blend: str | None,
    data_id: str | None,
) -> RecordedSpan:
    """A span of steps of these sizes."""
    return RecordedSpan(
        steps_before=steps_before,
        samples_before=samples_before,
        global_batch=sizes.table,
        ramp_samples=sizes.until,
        micro_batch=micro_batch,
        data_ranks=data_ranks,
        blend=blend,
        data_id=data_id,
    )


def continued_spans(earlier: Sequence[RecordedSpan], span: RecordedSpan) -> tuple[RecordedSpan, ...]:
    """The spans of a run that goes on with `span`.

    Later ones are dropped: the run went back to an older checkpoint. If the samples of the earlier ones do not end
    where `span` begins, they are another run's, and nothing is known of the steps before it. A span that reads like the
    one before continues it.
    """
    kept = [earlier_span for earlier_span in earlier if earlier_span.steps_before < span.steps_before]
    if not kept or samples_until(kept, span.steps_before) != span.samples_before:
        return (span,)
    last = kept[-1]
    same = msgspec.structs.replace(
        span, steps_before=last.steps_before, samples_before=last.samples_before, blend=last.blend
    )
    if same == last:
        return (*kept[:-1], msgspec.structs.replace(last, blend=span.blend))
    return (*kept, span)


def samples_until(spans: Sequence[RecordedSpan], step: int) -> int:
    """Samples consumed after this many steps."""
    return sum(Steps([span.steps for span in spans], seed=0).bounds(step))


SampleRanges = Sequence[tuple[int, int]]
"""Pairs (first, last) of samples."""


def merged_ranges(*lists: SampleRanges) -> tuple[tuple[int, int], ...]:
    """All samples of some lists of ranges as ascending ranges that are apart from each other."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for ranges in lists for pair in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def common_ranges(ranges: SampleRanges, span: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The samples of merged ranges that are in a span (first, last)."""
    pairs = ((max(first, span[0]), min(last, span[1])) for first, last in ranges)
    return tuple((first, last) for first, last in pairs if first <= last)


def ranges_without(ranges: SampleRanges, span: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The samples of merged ranges that are not in a span (first, last)."""
    before, after = (0, span[0] - 1), (span[1] + 1, LARGEST_SAMPLE)
    return (*common_ranges(ranges, before), *common_ranges(ranges, after))


def in_ranges(samples: npt.ArrayLike, ranges: SampleRanges) -> npt.NDArray[np.bool_]:
    """Which of these samples are in merged ranges."""
    bounds = np.array([(first, last + 1) for first, last in ranges], np.int64).reshape(-1)
    places: npt.NDArray[np.intp] = np.searchsorted(bounds, np.asarray(samples), side="right")
    inside: npt.NDArray[np.bool_] = places % 2 == 1
    return inside


def write_record(folder: Path, record: RunRecord) -> None:
    """Write data.json in one piece.

    Raises:
        OSError: from the file system; an older file stays as it was.
    """
    value = msgspec.to_builtins(msgspec.structs.replace(record, version=SKIPPING if record.skip else VERSION))
    if not record.skip:
        del value["skip"]
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    atomic_io.atomic_write(folder / RECORD, text.encode())


def has_record(folder: str | Path) -> bool:
    """Whether a folder, on a disk or in object storage, has a data.json of a run."""
    try:
        content = _content(folder)
    except UsageError:
        if not is_stored(folder):
            raise
        return False  # a bucket that may not be listed denies access to an object that is not there
    return content is not None and f'"{FORMAT}"'.encode() in content[:200]


def read_record(folder: str | Path) -> RunRecord | None:
    """The record in a run folder or checkpoint, on a disk or in object storage; None: there is none.

    Raises:
        UsageError: written by a later version, or it cannot be opened. DamageError: it is not what was written.
    """
    content = _content(folder)
    return None if content is None else parse_record(content, f"{str(folder).rstrip('/')}/{RECORD}")


def parse_record(content: bytes, name: str) -> RunRecord:
    """A record from its text; `name` is for messages.

    Raises:
        UsageError, DamageError: as `read_record`.
    """
    try:
        value = parse_json(content)
    except ValueError as error:
        raise DamageError(f"{name} is not JSON", found=str(error), fix=_WRITE_AGAIN) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DamageError(f"{name} is not the record of a run", expected=f'"format": "{FORMAT}"', fix=_WRITE_AGAIN)
    if value.get("version") not in (VERSION, SKIPPING):
        raise UsageError(
            f"{name}: this mdata cannot read its version",
            found=f"version {json.dumps(value.get('version'))}",
            expected=f"version {VERSION} or {SKIPPING}",
            fix="use the mdata that trained the run, or a later one",
        )
    try:
        record = msgspec.convert(value, RunRecord)
    except msgspec.ValidationError as error:
        raise DamageError(f"{name}: {error}", fix=_WRITE_AGAIN) from error
    if problem := _problem(record):
        raise DamageError(f"{name}: {problem}", fix=_WRITE_AGAIN)
    return record


def _problem(record: RunRecord) -> str | None:
    """Why a record cannot be what was written."""
    spans = record.spans
    if not spans or record.num_steps < 0:
        return "no spans, or fewer steps than none"
    for span in spans:
        starts = [start for start, _ in span.global_batch]
        smallest = min((size for _, size in span.global_batch), default=0)
        if smallest < 1 or starts != sorted(set(starts)) or starts[0] != 0 or span.micro_batch < 1:
            return f"the batch sizes of the span after step {span.steps_before} cannot be used"
        if span.ramp_samples is not None and (len(starts) < 2 or span.ramp_samples < 1):
            return f"the ramp of the span after step {span.steps_before} has no end"
    if min(spans[0].steps_before, spans[0].samples_before) < 0 or any(span.data_ranks == 0 for span in spans):
        return "a negative position, or no ranks"
    for number, span in enumerate(spans[1:], 1):
        if span.steps_before <= spans[number - 1].steps_before:
            return f"span {number + 1} does not begin behind the one before"
        if samples_until(spans[:number], span.steps_before) != span.samples_before:
            return f"the spans before step {span.steps_before} do not end at sample {span.samples_before}"
    wrong = any(not 0 <= first <= last < LARGEST_SAMPLE for first, last in record.skip)
    if wrong or record.skip != merged_ranges(record.skip):
        return "the skipped ranges of samples are not ascending and apart"
    if bool(record.skip) != (record.version == SKIPPING):
        return f"version {record.version} with{'out' * (not record.skip)} skipped samples"
    try:
        data_id = hash_of(record.identity)
    except TypeError:  # a float
        data_id = None
    if record.now.blend is None or data_id is None or data_id != record.now.data_id:
        return "the data id of the last span is not the hash of the identity"
    return None


def _content(folder: str | Path) -> bytes | None:
    if is_stored(folder):
        from mdata.object_storage.address import address_of, parse_address
        from mdata.object_storage.reading import object_there, read_range

        address = parse_address(address_of(folder) or str(folder))  # `Path` turns // into /
        facts = object_there(address.with_key(f"{address.key.rstrip('/')}/{RECORD}".lstrip("/")))
        return None if facts is None else read_range(facts, 0, stop=facts.size_bytes)
    path = Path(folder) / RECORD
    with os_errors_named("reading what a run reads"):
        return regular_file(path).read_bytes() if path.is_file() else None
