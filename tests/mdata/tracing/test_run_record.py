"""data.json: what it refuses, and how the spans of a run that goes on are put together."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from mdata import DamageError, UsageError
from mdata.dataset.run_paths import StartedIn
from mdata.loader.batch_sizes import BatchSizes, by_steps, constant, ramp_up
from mdata.tracing.run_record import (
    RecordedSets,
    RecordedSpan,
    RunRecord,
    common_ranges,
    continued_spans,
    has_record,
    in_ranges,
    merged_ranges,
    parse_record,
    ranges_without,
    read_record,
    span_of,
    write_record,
)
from mdata.tracing.run_steps import Steps
from mdata.util.canonical_json import hash_of

IDENTITY = {"blend": "b", "seed": 7}


def span(steps: int, samples: int, sizes: BatchSizes | None = None, **more: Any) -> RecordedSpan:
    values = {"micro_batch": 2, "data_ranks": 2, "blend": "mix.json", "data_id": hash_of(IDENTITY), **more}
    return span_of(sizes or constant(4), steps_before=steps, samples_before=samples, **values)


def record(*spans: RecordedSpan, **more: Any) -> RunRecord:
    values = {"num_steps": 9, "options": {"sequence_length": 8}, "identity": IDENTITY, **more}
    return RunRecord(spans=spans or (span(0, 0),), **values)


def changed(**values: Any) -> bytes:
    return json.dumps(msgspec.to_builtins(record()) | values).encode()


def of_span(**values: Any) -> bytes:
    return changed(spans=[msgspec.to_builtins(span(0, 0)) | values])


@pytest.mark.parametrize("sizes", [constant(4), ramp_up(4, 4, samples=36, size=16), by_steps("0:4 9:8 20:12")])
def test_what_is_written_is_read(tmp_path, sizes):
    sets = RecordedSets(paths=("a", "b"), data_ids={"a": "1"}, num_samples=9, eval_samples=4, interval=2)
    made = record(span(0, 0, sizes), valid=sets, started_in=StartedIn(absolute="/somewhere"), notes={"spikes": [3, {}]})
    assert not has_record(tmp_path) and read_record(tmp_path) is None
    write_record(tmp_path, made)
    assert has_record(tmp_path) and read_record(tmp_path) == made
    assert made.now.sizes == sizes


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (b"{", DamageError, "data.json is not JSON"),
        (b"[" * 100_000, DamageError, "nested more than"),
        (b"[]", DamageError, "not the record of a run"),
        (b'{"format": "mdata-manifest"}', DamageError, 'expected: "format": "mdata-run"'),
        (changed(version=3), UsageError, "cannot read its version\n  found: version 3\n  expected: version 1 or 2"),
        (changed(version=2), DamageError, "version 2 without skipped samples"),
        (changed(skip=[[4, 7]]), DamageError, "version 1 with skipped samples"),
        (changed(version=2, skip=[[4, 3]]), DamageError, "skipped ranges of samples are not ascending"),
        (changed(version=2, skip=[[8, 9], [4, 5]]), DamageError, "skipped ranges of samples are not ascending"),
        (changed(version=2, skip=[[4, 1 << 62]]), DamageError, "skipped ranges of samples are not ascending"),
        (changed(skipped=[[1, 2]]), DamageError, "unknown field `skipped`"),
        (of_span(skipped=[[1, 2]]), DamageError, r"unknown field `skipped` - at `\$.spans"),
        (changed(num_steps="9"), DamageError, r"Expected `int`, got `str` - at `\$.num_steps`"),
        (changed(spans=[]), DamageError, "no spans"),
        (changed(identity={"blend": "c"}), DamageError, "not the hash of the identity"),
        (changed(identity={"blend": 0.5}), DamageError, "not the hash of the identity"),
        (of_span(blend=None), DamageError, "not the hash of the identity"),
        (of_span(global_batch=[]), DamageError, "batch sizes of the span after step 0"),
        (of_span(global_batch=[[0, 0]]), DamageError, "batch sizes of the span after step 0"),
        (of_span(global_batch=[[0, 4], [0, 8]]), DamageError, "batch sizes of the span after step 0"),
        (of_span(ramp_samples=9), DamageError, "has no end"),
        (of_span(data_ranks=0), DamageError, "no ranks"),
        (of_span(samples_before=-1), DamageError, "a negative position"),
        (changed(spans=msgspec.to_builtins([span(0, 0), span(0, 0)])), DamageError, "span 2 does not begin behind"),
        (changed(spans=msgspec.to_builtins([span(0, 0), span(3, 13)])), DamageError, "do not end at sample 13"),
    ],
)
def test_other_content_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        parse_record(text, "data.json")


def test_skipped_samples_raise_the_version(tmp_path):
    """An older mdata would take them for samples that were trained on."""
    write_record(tmp_path, made := record(skip=((4, 7), (9, 9))))
    assert json.loads((tmp_path / "data.json").read_text())["version"] == 2
    assert read_record(tmp_path).skip == made.skip
    write_record(tmp_path, record())
    written = json.loads((tmp_path / "data.json").read_text())
    assert written["version"] == 1 and "skip" not in written, "older versions read what they know"


def test_ranges_are_merged_and_looked_up():
    assert merged_ranges([(8, 9), (0, 1)], [(2, 3), (3, 5)], []) == ((0, 5), (8, 9))
    samples = np.arange(12)
    inside = [bool({*range(0, 6), 8, 9} & {sample}) for sample in samples.tolist()]
    assert in_ranges(samples, ((0, 5), (8, 9))).tolist() == inside
    assert not in_ranges(samples, ()).any()


def test_a_file_of_another_kind_is_no_record(tmp_path):
    """A manifest may be called data.json, too."""
    (tmp_path / "data.json").write_text('{"format": "mdata-manifest"}')
    assert not has_record(tmp_path)


def test_spans_of_a_run_that_goes_on():
    first = continued_spans((), span(0, 0))
    assert first == (span(0, 0),)
    assert continued_spans(first, span(3, 12)) == first, "nothing has changed"
    moved = continued_spans(first, span(3, 12, blend="elsewhere/mix.json"))
    assert moved == (span(0, 0, blend="elsewhere/mix.json"),), "the same data at another place"
    ranks = continued_spans(first, span(3, 12, data_ranks=1))
    assert ranks == (span(0, 0), span(3, 12, data_ranks=1))
    batch = continued_spans(ranks, span(5, 20, constant(8)))
    assert batch == (*ranks, span(5, 20, constant(8)))
    mixed = continued_spans(batch, span(6, 28, constant(8), data_id="other", blend="new.json"))
    assert [one.blend for one in mixed] == ["mix.json"] * 3 + ["new.json"]
    assert continued_spans(mixed, span(4, 16)) == (*ranks, span(4, 16)), "back to an older checkpoint"
    assert continued_spans(mixed, span(3, 12)) == (span(0, 0),)
    assert continued_spans(mixed, span(0, 0, constant(2))) == (span(0, 0, constant(2)),)


def test_spans_of_another_run_are_not_taken_over():
    assert continued_spans((span(0, 0),), span(3, 13)) == (span(3, 13),)
    assert continued_spans((span(4, 16),), span(3, 12)) == (span(3, 12),)


def test_steps_before_the_first_span_are_unknown():
    steps = Steps([span(3, 12).steps, span(5, 20, constant(8)).steps], seed=0, total=7)
    for step in (1, 3):
        with pytest.raises(UsageError, match=rf"nothing is recorded of step {step}\n  found: steps from 4 on"):
            steps.bounds(step)
    assert steps.bounds(4) == (12, 4) and steps.bounds(7) == (28, 8) and steps.num_samples == 36
    assert list(steps.places(11)) == [] and [place.step for place in steps.places(12)] == [4]
    assert Steps([span(3, 12).steps], seed=0, total=3).num_samples == 12


def test_ranges_are_taken_from_ranges():
    ranges = ((2, 5), (9, 9), (20, 30))
    assert ranges_without(ranges, (4, 22)) == ((2, 3), (23, 30)) and ranges_without(ranges, (0, 99)) == ()
    assert ranges_without(ranges, (24, 25)) == ((2, 5), (9, 9), (20, 23), (26, 30))
    assert common_ranges(ranges, (4, 22)) == ((4, 5), (9, 9), (20, 22)) and common_ranges(ranges, (6, 8)) == ()
