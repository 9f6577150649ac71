"""Spans by hand; and a collector of this machine: each span once, whatever was killed.

The collector needs the libraries of the extra [track]; without them its tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdata.util import file_lock
from tests.helpers.house_rules import ROOT
from tests.helpers.posts import Posts, receiving_posts
from tests.helpers.processes import wait_until
from tests.trainer.plan.test_plan import config as sound
from tests.trainer.tracking.test_follower import sending, steps, write
from trainer.config.parse import dump_config
from trainer.tracking.files import Alerts
from trainer.tracking.follower import tracked_run
from trainer.tracking.spans import Span, Trace, span_id, trace_id
from trainer.tracking.trackers import OpenTelemetry, TrackedRun, missing_libraries

START = {"time_s": 100.0, "event": "start", "step": 0, "setup_s": 10.0, "host": "gpu1", "world_size": 2}
SAVED = {"time_s": 130.0, "event": "saved", "step": 5, "checkpoint": "step-5", "seconds": 4.0}
SPIKE = {"time_s": 140.0, "event": "spike", "step": 7, "losses": {"a": 2.0}}
BACK = [
    {"time_s": 141.0, "event": "rollback", "step": 7, "checkpoint": "step-5"},
    {"time_s": 142.0, "event": "start", "step": 5, "rolled_back": True},
]
AGAIN = {"time_s": 900.0, "event": "start", "step": 5, "setup_s": 20.0}
FINISHED = {"time_s": 1000.0, "event": "finished", "step": 12}


def spans_of(*events: dict[str, Any]) -> list[Span]:
    trace, alerts, spans = Trace(), Alerts(), list[Span]()
    for event in events:
        spans += trace.event(event)
        for alert in alerts.of(event):
            spans += trace.alert(alert)
    return spans


def test_attempts_saves_and_the_run_are_spans():
    save, first, second, run = spans_of(START, SAVED, SPIKE, *BACK, AGAIN, FINISHED)
    assert (save.name, save.parent, save.begin_s, save.end_s) == ("save", "attempt-1", 126.0, 130.0)
    assert save.facts == {"step": 5, "checkpoint": "step-5"}
    assert (first.key, first.begin_s) == ("attempt-1", 90.0)
    assert first.end_s == 142.0, "what it did last, not when the next one began"
    assert first.error is not None and "without recording why" in first.error
    assert [moment.name for moment in first.moments] == ["spike", "rollback", "crash"]
    assert first.facts == {"host": "gpu1", "world_size": 2, "first_step": 0, "last_step": None, "ended": "crash"}
    assert (second.key, second.begin_s, second.end_s, second.error) == ("attempt-2", 880.0, 1000.0, None)
    assert (run.parent, run.begin_s, run.end_s, run.facts["attempts"]) == (None, 90.0, 1000.0, 2)


def test_an_evaluation_belongs_to_the_attempt_of_its_time():
    trace, alerts = Trace(), Alerts()
    for event in (START, AGAIN):
        spans = [*trace.event(event), *(span for alert in alerts.of(event) for span in trace.alert(alert))]
    assert [span.key for span in spans] == ["attempt-1"]
    assert not list(trace.evaluation(4, {"loss": 2.0}, 120.0))
    (span,) = trace.evaluation(5, {"loss": 2.0, "valid/a": 1.5, "eval_s": 3.0}, 125.0)
    assert (span.parent, span.begin_s, span.end_s) == ("attempt-1", 125.0, 128.0)
    assert span.facts == {"step": 5, "valid/a": 1.5}


def test_a_run_that_is_extended_has_one_span_of_its_own():
    more = ({"time_s": 2000.0, "event": "start", "step": 12}, {"time_s": 2100.0, "event": "finished", "step": 20})
    assert [span.key for span in spans_of(START, FINISHED, *more)] == ["attempt-1", "run", "attempt-2"]


def test_ids_are_those_of_the_run_and_of_what_a_span_is():
    assert trace_id("a") != trace_id("b") and trace_id("a") < 2**128
    assert len({span_id(origin, key) for origin in "ab" for key in ("run", "attempt-1")}) == 4
    assert span_id("a", "run") == span_id("a", "run") < 2**64


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Posts]:
    if missing_libraries(["opentelemetry"]):
        pytest.skip("opentelemetry's exporter is not installed (extra [track])")
    with receiving_posts() as posts:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", posts.address)
        yield posts


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    (tmp_path / "config.toml").write_text(dump_config(sound()))
    return tracked_run(tmp_path, sound())


def received(posts: Posts) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    assert set(posts.paths) <= {"/v1/traces"}
    requests = [ExportTraceServiceRequest.FromString(body) for body in posts.bodies]
    return [
        span
        for request in requests
        for of_resource in request.resource_spans
        for scope in of_resource.scope_spans
        for span in scope.spans
    ]


def lines(run: TrackedRun, first: int, last: int) -> None:
    write(run, "metrics", *(line | {"valid": {"a": 1.5}, "eval_s": 2.0} for line in steps(first, last)))


def test_each_span_is_sent_once_after_kills(run, collector):
    """Of the follower; one whose sending was not noted is sent again as the same span."""
    command = [sys.executable, "-m", "cli.mtrain", "track", str(run.folder), "--to", "opentelemetry", "--follow"]
    stages: list[tuple[list[dict[str, Any]], int]] = [([START, SAVED], 2), ([SPIKE, *BACK], 1), ([AGAIN], 2)]
    stages += [([SAVED | {"time_s": 950.0, "step": 10}], 2), ([], 1)]
    with file_lock.hold(run.folder / ".lock"):  # as the run does
        for number, (events, count) in enumerate(stages, 1):
            write(run, "events", *events)
            lines(run, number, number)
            before = len(collector.bodies)
            with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
                wait_until(lambda before=before, count=count: len(collector.bodies) >= before + count)
                process.kill()
            for lock in run.folder.glob(".track-*.lock"):
                lock.unlink()
    write(run, "events", FINISHED)
    sending(run, OpenTelemetry(), name="opentelemetry").run()
    spans = {span.span_id: span for span in received(collector)}.values()
    assert Counter(span.name for span in spans) == {"save": 2, "evaluation": 5, "attempt": 2, "run": 1}
    assert len({span.trace_id for span in spans}) == 1
    (root,) = (span for span in spans if span.name == "run")
    attempts = [span for span in spans if span.name == "attempt"]
    assert {span.parent_span_id for span in attempts} == {root.span_id} and not root.parent_span_id
    assert [[event.name for event in span.events] for span in attempts] == [["spike", "rollback", "crash"], []]
    assert attempts[0].status.code == 2 and attempts[1].status.code == 0
    save = next(span for span in spans if span.name == "save")
    assert (save.start_time_unix_nano, save.end_time_unix_nano) == (126 * 10**9, 130 * 10**9)
    assert {item.key: item.value.string_value for item in save.attributes}["mtrain.checkpoint"] == "step-5"


def test_what_was_sent_is_not_sent_again(run, collector):
    write(run, "events", START, SAVED, FINISHED)
    lines(run, 1, 2)
    for _ in range(2):
        sending(run, OpenTelemetry(), name="opentelemetry").run()
    assert Counter(span.name for span in received(collector)) == {"save": 1, "evaluation": 2, "attempt": 1, "run": 1}


def test_a_span_whose_sending_was_not_noted_keeps_its_id(run, collector):
    write(run, "events", START, SAVED, FINISHED)
    for _ in range(2):
        sending(run, OpenTelemetry(), name="opentelemetry").run()
        (run.folder / "opentelemetry.json").unlink()  # killed before it was written
    assert set(Counter(span.span_id for span in received(collector)).values()) == {2}


def test_a_collector_that_is_not_there_is_named(run, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    write(run, "events", START, FINISHED)
    told: list[str] = []
    sent = sending(run, OpenTelemetry(), name="opentelemetry", told=told, follow=False)
    sent.run()
    assert sent.lacks == "opentelemetry: the collector took no spans; track.log may say why" and len(told) == 1
    assert json.loads((run.folder / "opentelemetry.json").read_bytes())["events"] == 1, "the start has no span"
