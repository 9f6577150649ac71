"""Where the time of a run went, over all its starts: as its slow twin says, in its lines, and for people."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.mtrain_train import result_text
from tests.reference.goodput import goodput as twin
from tests.trainer.run.one_rank import events
from tests.trainer.run.test_end_time import run_in
from trainer.config.sections import CheckpointSection
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.run.goodput import Goodput, Tally
from trainer.run.metrics import read_metrics, tally_of
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 32


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Events and lines of a run that is started up to five times, from any step that has a line, or from 0."""
    seconds = st.floats(0.01, 50)
    events, lines, time_s, curve = list[dict[str, Any]](), list[dict[str, Any]](), 1000.0, {0: 0}
    for _ in range(draw(st.integers(1, 5))):
        time_s += draw(seconds)
        step = draw(st.sampled_from(sorted(curve)))
        curve = {known: samples for known, samples in curve.items() if known <= step}
        events.append({"time_s": time_s, "event": "start", "step": step, "setup_s": draw(seconds)})
        for _ in range(draw(st.integers(0, 4))):
            time_s += draw(seconds)
            step += draw(st.integers(1, 3))
            curve[step] = max(curve.values()) + draw(st.integers(1, 9))
            rates = {"tokens_per_s": draw(st.floats(1, 1e3)), "data_wait": draw(st.floats(0, 1))}
            lines.append({"step": step, "time_s": time_s, "consumed_samples": curve[step], **rates})
            if draw(st.booleans()):
                time_s += draw(seconds)
                kind = draw(st.sampled_from(["saved", "save waited", "note"]))
                events.append({"time_s": time_s, "event": kind, "seconds": draw(seconds)})
        if draw(st.booleans()):
            time_s += draw(seconds)
            events.append({"time_s": time_s, "event": "finished", "step": step})
    return events, lines


@given(histories(), st.booleans())
def test_sums_are_those_of_the_twin(history, background):
    events, lines = history
    tally = Tally(LENGTH, background=background)
    for sign in sorted([*events, *lines], key=lambda sign: float(sign["time_s"])):
        (tally.event if "event" in sign else tally.line)(sign)
    expected = twin(events, lines, sequence_length=LENGTH, background=background)
    assert dataclasses.asdict(tally.goodput()) == pytest.approx(expected, abs=1e-6)


def test_a_run_that_was_killed_and_went_back_says_what_it_lost(tmp_path):
    """Each line has the share so far, the result and the report the whole; lost lines count that were put aside."""
    config = run_in(tmp_path)
    config = dataclasses.replace(config, checkpoint=CheckpointSection(interval=2, minutes=0.0, background=False))

    class Killed(Exception):
        pass

    def kill(finished: Any) -> None:
        if finished.step == 5:
            raise Killed

    world = join_world(Mesh(1), placement=Placement())
    with pytest.raises(Killed):
        train(config, world, callbacks=[kill])
    result = train(config, world)
    goodput = result.goodput
    assert goodput is not None and (goodput.starts, goodput.lost_steps) == (2, 1)
    assert goodput.lost_s > 0 and goodput.save_s > 0 and goodput.start_s > 0 and 0 < goodput.share < 1
    assert 0 < read_metrics(tmp_path)[-1]["goodput"] < 1
    read = tally_of(tmp_path, config.train.sequence_length, background=False).goodput()
    assert dataclasses.asdict(read) == pytest.approx(dataclasses.asdict(goodput), abs=0.1)
    assert "2 starts, 1 step lost" in result_text(result, str(tmp_path))
    assert events(config, "start")[1]["setup_s"] >= 0
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("no JSON\n")
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=7))
    again = train(dataclasses.replace(longer, optimizer=dataclasses.replace(config.optimizer, min_lr=1e-4)), world)
    assert again.goodput is not None and again.goodput.starts == 1, "the lines before cannot be read"


def test_it_is_said_in_a_line():
    goodput = Goodput(wall_s=7200.0, kept_s=6480.0, lost_s=144.0, start_s=360.0, starts=3, lost_steps=1200)
    text = "goodput 90.0% of 2.0 h; lost steps 2.0%, starts 5.0%, other 3.0%; 3 starts, 1,200 steps lost"
    assert goodput.text() == text
    assert Tally(LENGTH).goodput().text() == "goodput 0.0% of 0.0 min; 0 starts, 0 steps lost"


def test_files_of_older_versions_are_counted_as_far_as_they_tell(tmp_path):
    lines = [{"step": 1, "time_s": 10.0, "consumed_samples": 4}, {"step": 2, "time_s": 12.0, "consumed_samples": 8}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    goodput = tally_of(tmp_path, LENGTH).goodput()
    assert (goodput.wall_s, goodput.kept_s, goodput.starts) == (2.0, 2.0, 1)
