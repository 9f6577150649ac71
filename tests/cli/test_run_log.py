"""The log of a run without a terminal: what it says beside the lines of steps."""

from __future__ import annotations

import json

import pytest

from cli.run_log import RunLog


@pytest.fixture
def made():
    written, now = [], [0.0]
    return (lambda form: RunLog(written.append, program="prog", format=form, clock=lambda: now[0])), written, now


def test_only_long_evaluations_say_something_between_steps(made):
    log, written, now = made[0]("text"), made[1], made[2]
    log.begin("train", 100, unit="steps", done=10)
    now[0] = 20.0
    log.advance(1, loss=2.0, tokens=64)
    log.measured({"step": 11, "steps": 100, "loss": 2.0})
    log.advance(0, to_evaluate=50)
    now[0] = 31.0
    log.advance(0, to_evaluate=40)
    log.advance(0, to_evaluate=0)
    now[0] = 60.0
    log.advance(1, loss=2.0, tokens=128)
    log.end()
    assert written == ["step 11/100 | loss 2.0000 | ETA 30 min", "evaluating | 40 samples left"]


def test_other_work_says_how_far_it_is(made):
    log, written, now = made[0]("text"), made[1], made[2]
    log.begin("building the order", 4000, unit="samples")
    now[0] = 11.0
    log.advance(1000)
    log.end()
    log.note("one more thing")
    assert written == [
        "building the order | 1,000/4,000 samples | ETA 33 s",
        "building the order | 1,000/4,000 samples | done",
        "prog: one more thing",
    ]


def test_every_line_is_json_where_that_is_asked_for(made):
    log, written, now = made[0]("json"), made[1], made[2]
    log.begin("building", None, unit="samples")
    now[0] = 11.0
    log.advance(5)
    log.note("a note")
    log.begin("train", 10, unit="steps")
    log.measured({"step": 1, "steps": 10, "loss": None})
    log.end()
    facts = [json.loads(line) for line in written]
    assert facts[0]["doing"] == "building" and facts[1]["note"] == "a note"
    assert facts[2] == {"step": 1, "steps": 10, "loss": None, "eta_s": None}
