"""A run ends at a known time with a checkpoint and exit code 75, on all ranks after the same step."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdata import ResourceError, StoppedError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_config
from tests.trainer.run.one_rank import alone, curve, events
from trainer.checkpoint.folder import whole_checkpoints
from trainer.config.sections import MeshSection, RunConfig, RunSection
from trainer.parallel.mesh import Mesh
from trainer.run import after_step
from trainer.run.end_time import ENDS, MARGIN_S, Deadline, EndTime, deadlines, parse_time, time_problems
from trainer.run.signals import LastTimeError
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")
NO_RUN = RunSection(folder="run")


def run_in(folder: Path, **run: Any) -> RunConfig:
    config = make_config(folder, blend="mock", valid=[], steps=6, eval_interval=None)
    model = replace(config.model, vocab_size=300, num_layers=1, hidden_size=16, num_heads=2)
    return replace(config, mesh=MeshSection(), model=model, run=replace(config.run, **run))


class Clock:
    """Advances by a minute each time that it is read, or by another step."""

    def __init__(self, now: float = 0.0, *, step: float = 60.0) -> None:
        self.now, self.step = now, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_times_are_those_of_the_settings_and_of_slurm():
    assert not deadlines(NO_RUN, {}, began_s=0.0)
    run = replace(NO_RUN, exit_at="2026-11-26T18:00:00+01:00", exit_after=30.0)
    at, after, slurm = deadlines(run, {"SLURM_JOB_END_TIME": "1800000000"}, began_s=1000.0)
    assert at == Deadline(1795712400.0, 'run.exit_at="2026-11-26T18:00:00+01:00"', is_last=True)
    assert after == Deadline(2800.0, "run.exit_after=30 minutes")
    assert slurm == Deadline(1800000000.0, "the time limit of the Slurm job", kills=True)
    assert not deadlines(NO_RUN, {"SLURM_JOB_END_TIME": "1800000000"}, began_s=1800000001.0), "the job was extended"
    assert not deadlines(NO_RUN, {"SLURM_JOB_END_TIME": "Unknown"}, began_s=0.0)


@pytest.mark.parametrize("text", ["18:00", "2026-11-26", "tomorrow", "2026-13-26 18:00", ""])
def test_a_time_that_is_none_is_refused(text):
    (problem,) = time_problems(replace(NO_RUN, exit_at=text), now_s=0.0)
    assert problem.startswith(f'run.exit_at="{text}" is not a date and a time')


def test_a_time_that_has_passed_is_refused():
    """A run that is started again and again would never come further than a step."""
    run = replace(NO_RUN, exit_at="2026-11-26 18:00")
    at = parse_time("2026-11-26 18:00")
    assert time.localtime(at)[3:5] == (18, 0)
    assert list(time_problems(run, now_s=at - 1)) == []
    assert "has passed" in next(time_problems(run, now_s=at))
    assert not list(time_problems(NO_RUN, now_s=at))


def test_a_limit_that_kills_leaves_time_for_the_save_and_two_steps():
    clock = Clock(step=0.0)
    times = EndTime([Deadline(1e9, "later"), Deadline(10_000.0, "limit", kills=True)], clock, clock)
    for clock.now in (0.0, 50.0, 60.0):
        assert times.vote(100.0) == 0.0
    assert times.margin_s(100.0) == MARGIN_S + 200 + 100
    for clock.now in range(100, 9600, 40):  # type: ignore[assignment]
        assert times.vote(100.0) == 0.0
    assert times.margin_s(100.0) == MARGIN_S + 200 + 80, "steps of long ago do not count"
    for clock.now, vote in ((9619.0, 0.0), (9660.0, ENDS + 1)):
        assert times.vote(100.0) == vote
    assert (times.named(ENDS + 1), times.named(0.0)) == (times.deadlines[1], None)


def test_a_clock_that_is_set_is_no_long_step():
    """One that was an hour behind: the run would end two hours before its limit."""
    clock, seconds = Clock(step=0.0), Clock(step=10.0)
    times = EndTime([Deadline(10_000.0, "limit", kills=True)], clock, seconds)
    for clock.now in (0.0, 10.0, 3620.0, 3630.0):
        assert times.vote(0.0) == 0.0
    assert times.margin_s(0.0) == MARGIN_S + 20


@pytest.mark.parametrize(
    ("run", "env", "why"),
    [
        ({"exit_after": 2.5}, {}, "run.exit_after=2.5 minutes"),
        ({"exit_at": "2026-11-26 18:00"}, {}, 'run.exit_at="2026-11-26 18:00"'),
        ({}, {"SLURM_JOB_END_TIME": "4000000000"}, "the time limit of the Slurm job"),
    ],
)
def test_a_run_that_ends_at_its_time_goes_on_bit_for_bit(run, env, why, tmp_path, monkeypatch):
    straight, config = run_in(tmp_path / "straight"), run_in(tmp_path / "run", **run)
    alone(straight)
    now = parse_time("2026-11-26 18:00") - 170 if "exit_at" in run else 4000000000 - 350 if env else time.time()
    monkeypatch.setattr(after_step, "EndTime", lambda times: EndTime(times, Clock(now), Clock()))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoppedError) as stopped:
        alone(config)
    assert stopped.value.exit_code == 75
    assert f"stopped at {why}, after step 3 and its checkpoint" in str(stopped.value)
    # A job that is queued again would start after that time, and fail.
    assert isinstance(stopped.value, LastTimeError) == ("choose a later run.exit_at" in str(stopped.value))
    assert isinstance(stopped.value, LastTimeError) == ("exit_at" in run)
    assert [folder.name for folder in whole_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-3"]
    monkeypatch.undo()
    alone(replace(config, run=replace(config.run, exit_at=None, exit_after=None)))
    assert curve(config) == curve(straight)


def _clocks_that_differ(context: Any, config: RunConfig, stops: str) -> None:
    """Rank 1's clock is hours ahead; rank 0's decides."""
    ahead = 1e5 * context.rank
    after_step.EndTime = lambda times: EndTime(times, Clock(time.time() + ahead), Clock())  # type: ignore[misc, assignment]
    try:
        train(config, context.join(Mesh(context.world)))
    except StoppedError as stopped:
        Path(stops, str(context.rank)).write_text(str(stopped))
    finally:
        after_step.EndTime = EndTime  # type: ignore[misc]


def test_the_clock_of_rank_0_ends_all_ranks_after_the_same_step(tmp_path):
    config = run_in(tmp_path / "run", exit_after=2.5)
    run_ranks(_clocks_that_differ, 2, config, str(tmp_path))
    texts = {(tmp_path / rank).read_text() for rank in "01"}
    assert len(texts) == 1 and "after step 3 and its checkpoint" in texts.pop()


def test_starts_without_progress_are_counted(tmp_path, monkeypatch):
    """Those that came further are not, and neither is the refusal."""
    config = run_in(tmp_path, max_restarts=1)

    class Crash(Exception):
        pass

    def crash(*_: Any) -> Any:
        raise Crash

    monkeypatch.setattr("trainer.run.train._Loop.run", crash)
    for _ in range(2):
        with pytest.raises(Crash):
            alone(config)
    for _ in range(2):
        with pytest.raises(ResourceError, match="started 2 times from step 0 without writing another checkpoint"):
            alone(config)
    assert len(events(config, "start")) == 2
    monkeypatch.undo()
    alone(replace(config, run=replace(config.run, max_restarts=None), train=replace(config.train, exit_interval=2)))
    alone(config)
    assert [start["step"] for start in events(config, "start")] == [0, 0, 0, 2]
