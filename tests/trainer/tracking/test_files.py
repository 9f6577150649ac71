"""What trackers are sent: whole lines once, numbers by name, alerts of events, and the run's id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mdata import DamageError
from trainer.tracking.files import TRACKING, Alerts, Tail, numbers, run_id, tracking_file


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_line_that_is_cut_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []  # there is no file yet
    append(path, '{"step": 1}\n{"step": 2, "loss"')
    assert tail.read() == [{"step": 1}]
    assert tail.read() == []
    append(path, ': 3}\n{"step": 4}\n')
    assert tail.read() == [{"step": 2, "loss": 3}, {"step": 4}] and tail.damaged == []


def test_a_line_that_is_no_json_object_is_named_and_nothing_else_is_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st{"step": 2}\n\n[]\n\xff\n{"step": 3}\n')
    tail = Tail(path)
    assert tail.read() == [{"step": 1}, {"step": 3}]
    assert tail.damaged == [12, 29, 32]


def test_a_file_that_was_replaced_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    tail = Tail(path)
    assert len(tail.read()) == 2
    (tmp_path / "new").write_text('{"step": 1}\n{"step": 9}\n')
    (tmp_path / "new").rename(path)
    assert tail.read() == [{"step": 1}, {"step": 9}]


def test_lines_come_some_at_a_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(25)))
    tail, sizes, steps = Tail(path), [], []
    while lines := tail.read(10):
        sizes.append(len(lines))
        steps += [line["step"] for line in lines]
    assert sizes == [10, 10, 5] and steps == list(range(25))


def test_numbers_have_the_names_of_their_objects():
    line = {
        "step": 3,
        "time_s": 1.0,
        "loss": 2,
        "mfu": None,
        "ok": True,
        "text": "x",
        "valid": {"a": 1.5, "b": {"c": 2}},
    }
    assert numbers(line) == {"loss": 2.0, "valid/a": 1.5, "valid/b/c": 2.0}


def test_events_become_alerts():
    alerts = Alerts()
    events = [
        {"event": "start", "step": 0, "time_s": 1.0},
        {"event": "saved", "step": 2},
        {"event": "spike", "step": 3, "loss": 9.0},
        {"event": "start", "step": 2, "time_s": 2.0},  # it was killed
        {"event": "stopped", "step": 4},
        {"event": "start", "step": 4},
        {"event": "stopped", "saved": False},
        {"event": "start", "step": 4},
        {"event": "failed", "error": "out of memory"},
        {"event": "start", "step": 4},
        {"event": "finished", "step": 5},
    ]
    told = [alert for event in events for alert in alerts.of(event)]
    kinds = ["start", "spike", "crash", "start", "stop", "start", "stop", "start", "crash", "start", "finish"]
    assert [alert.kind for alert in told] == kinds
    assert [told[4].text, told[6].text] == ["stopped after step 4", "stopped"]
    assert told[8].text == "failed: out of memory" and told[1].facts["loss"] == 9.0
    assert not alerts.running and alerts.ended == "finish"


def test_the_id_is_drawn_once_and_moves_with_the_checkpoint(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir(), second.mkdir()
    drawn = run_id(first)
    assert run_id(first) == drawn and len(drawn.id) == 12
    stored = tracking_file(first)[TRACKING]
    assert run_id(second, stored=stored) == drawn and tracking_file(second)[TRACKING] == stored
    assert run_id(tmp_path / "a", stored=b"not read: the folder has one") == drawn
    assert tracking_file(tmp_path) == {}


def test_another_id_is_another_run_in_trackers(tmp_path):
    drawn = run_id(tmp_path)
    given = run_id(tmp_path, wanted="mine")
    assert given.id == "mine" and given.origin != drawn.origin
    assert run_id(tmp_path, wanted="mine") == given == run_id(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"id": 1, "origin": "a"}', b'{"id": "", "origin": "a"}', b"\xff"])
def test_a_damaged_id_is_named(tmp_path, content):
    (tmp_path / TRACKING).write_bytes(content)
    with pytest.raises(DamageError, match="does not name the run in trackers"):
        run_id(tmp_path)
    assert (tmp_path / TRACKING).read_bytes() == content


def test_the_file_is_json(tmp_path):
    drawn = run_id(tmp_path)
    assert json.loads((tmp_path / TRACKING).read_bytes()) == {"id": drawn.id, "origin": drawn.origin}
