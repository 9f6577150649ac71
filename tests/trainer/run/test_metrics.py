"""metrics.jsonl, events.jsonl, ranks.json: whole lines, no step twice, torn ends and damage."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import DamageError
from mdata.util import atomic_io
from tests.helpers.failures import durable_calls
from trainer.run.metrics import MetricsWriter, read_events, read_metrics, write_ranks


def write_steps(folder: Path, first: int, stop: int, *, resumed_step: int | None) -> None:
    with MetricsWriter(folder, resumed_step=resumed_step) as log:
        for step in range(first, stop):
            log.step(step, {"loss": 1.0 / step, "run": first})


def test_what_is_written_is_read(tmp_path):
    write_steps(tmp_path, 1, 4, resumed_step=None)
    assert read_metrics(tmp_path) == [{"step": s, "loss": 1.0 / s, "run": 1} for s in (1, 2, 3)]


def test_each_line_is_there_at_once(tmp_path):
    with MetricsWriter(tmp_path) as log:
        log.step(1, {"loss": 2.0})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n'


def test_resuming_puts_the_steps_aside_that_are_done_again(tmp_path):
    write_steps(tmp_path, 1, 8, resumed_step=None)
    write_steps(tmp_path, 4, 10, resumed_step=3)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["run"] for line in lines] == [1] * 3 + [4] * 6
    aside = [json.loads(line) for line in (tmp_path / "metrics-1.jsonl").read_text().splitlines()]
    assert [(line["step"], line["run"]) for line in aside] == [(step, 1) for step in range(4, 8)]


def test_a_new_run_starts_an_empty_curve_and_keeps_the_older_ones(tmp_path):
    for number in (1, 2):
        write_steps(tmp_path, number, 4, resumed_step=None)
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with MetricsWriter(tmp_path, resumed_step=None) as log:
            assert read_metrics(tmp_path) == []
        assert log.put_aside == tmp_path / f"metrics-{number}.jsonl"
        assert log.put_aside.read_bytes() == before


def test_nothing_is_put_aside_where_there_is_nothing(tmp_path):
    for resumed_step in (None, None, 0, 3):  # no file, an empty one, a start from a checkpoint
        with MetricsWriter(tmp_path, resumed_step=resumed_step) as log:
            assert log.put_aside is None
    write_steps(tmp_path, 4, 6, resumed_step=3)
    with MetricsWriter(tmp_path, resumed_step=5) as log:
        assert log.put_aside is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_measured_values_are_never_lost_to_a_full_disk(tmp_path, monkeypatch):
    """Every write, sync and rename of a start fails once: each line stands in one of the files, none is torn."""
    whole = tmp_path / "whole"
    whole.mkdir()
    write_steps(whole, 1, 8, resumed_step=None)
    with durable_calls(monkeypatch) as calls:
        MetricsWriter(shutil.copytree(whole, tmp_path / "all"), resumed_step=3).close()
    assert len(calls.seen) > 8
    for number in range(len(calls.seen)):
        folder = shutil.copytree(whole, tmp_path / str(number))
        with durable_calls(monkeypatch, number), pytest.raises(OSError, match="No space"):
            MetricsWriter(folder, resumed_step=3).close()
        lines = b"".join(path.read_bytes() for path in folder.glob("metrics*.jsonl")).splitlines()
        assert {json.loads(line)["step"] for line in lines} == set(range(1, 8))


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    for number, name in enumerate(("metrics.jsonl", "events.jsonl")):
        with MetricsWriter(tmp_path) as log, durable_calls(monkeypatch, number), pytest.raises(OSError) as error:
            log.step(1, {})
            log.event("note", {})
        assert error.value.filename == str(tmp_path / name)


def test_events_stay_and_say_when(tmp_path):
    for step in (0, 3):
        with MetricsWriter(tmp_path, resumed_step=step) as log:
            log.event("start", {"step": step})
    events = read_events(tmp_path)
    assert [(event["event"], event["step"]) for event in events] == [("start", 0), ("start", 3)]
    assert events[0]["time_s"] <= events[1]["time_s"]


@given(st.integers(0, 60))
def test_a_torn_end_is_left_out_and_removed_on_resume(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("run")
    write_steps(folder, 1, 3, resumed_step=None)
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    left = whole[:cut].count(b"\n")
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, left + 1))
    write_steps(folder, left + 1, 3, resumed_step=left)
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]


def test_a_torn_event_does_not_swallow_the_next_one(tmp_path):
    """A full disk tears a line; the run that goes on must not continue it."""
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "sav')
    with MetricsWriter(tmp_path, resumed_step=0) as log:
        log.event("start", {"step": 0})
    assert [event["event"] for event in read_events(tmp_path)] == ["start", "start"]


def test_a_line_torn_inside_a_character_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "valid": {"\xc3')
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_damage_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DamageError, match=r"metrics\.jsonl, line 2 is not a JSON object\n  found: 'nonsense'"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("line", ['{"loss": 1.0}', '{"step": "1"}', '{"step": true}', "[" * 100_000])
def test_a_line_without_a_step_is_damage(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(DamageError, match=r"metrics\.jsonl.*(without a step|not a JSON object)"):
        MetricsWriter(tmp_path, resumed_step=3)


def test_no_files_is_no_lines(tmp_path):
    assert read_metrics(tmp_path) == [] and read_events(tmp_path) == []


def test_values_that_json_does_not_know_become_null(tmp_path):
    with MetricsWriter(tmp_path) as log:
        log.step(1, {"loss": math.nan, "valid": {"prose": math.inf}, "list": (1, -math.inf)})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "loss": None, "valid": {"prose": None}, "list": [1, None]}


def test_ranks_are_replaced_whole(tmp_path):
    for size in (2, 1):
        write_ranks(tmp_path, [{"rank": rank, "elements": 10} for rank in range(size)])
    assert json.loads((tmp_path / "ranks.json").read_text()) == [{"rank": 0, "elements": 10}]


def test_a_short_write_is_completed(tmp_path, monkeypatch):
    whole = atomic_io.write
    monkeypatch.setattr(atomic_io, "write", lambda fd, data: whole(fd, bytes(data)[:3]))
    write_steps(tmp_path, 1, 3, resumed_step=None)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
