"""The follower: each step once whatever fails, alerts of a killed run, a tracker that hangs, and who may send."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdata import UsageError
from mdata.util import file_lock
from tests.helpers.posts import Posts, receiving_posts
from tests.helpers.processes import wait_until
from tests.trainer.plan.test_plan import config as sound
from trainer.config.parse import dump_config
from trainer.config.sections import TrackSection
from trainer.run.metrics import read_events
from trainer.tracking import follower
from trainer.tracking.files import Alert, AlertKind, Alerts
from trainer.tracking.follower import FollowerTimes, Sending, send, told_lines, tracked_run
from trainer.tracking.trackers import OtherRunError, TrackedRun, Tracker, Webhook, prometheus_text, webhook_body

FAST = FollowerTimes(poll_s=0.005, patience_s=0.3, pauses_s=(0.005,))


class Store:
    """What a tracker's server has, and how often it fails."""

    def __init__(self, *, fails: int = 0) -> None:
        self.steps: list[int] = []
        self.values: dict[int, Mapping[str, float]] = {}
        self.alerts: list[str] = []
        self.closed: list[AlertKind | None] = []
        self.fails = fails


class Recording(Tracker):
    """Keeps steps only when it is flushed, and fails now and then, sometimes when a part is stored already."""

    def __init__(self, store: Store) -> None:
        self.store, self.taken = store, list[tuple[int, Mapping[str, float]]]()

    def open(self, run: TrackedRun) -> None:
        self.taken = []

    def last_step(self) -> int:
        return max(self.store.steps, default=0)

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        self.taken.append((step, values))

    def event(self, alert: Alert) -> None:
        self.store.alerts.append(alert.kind)

    def flush(self) -> None:
        fails, self.store.fails = self.store.fails > 0, self.store.fails - 1
        stored = self.taken[: len(self.taken) // 2] if fails else self.taken
        for step, values in stored:
            self.store.steps.append(step)
            self.store.values[step] = values
        self.taken = []
        if fails:
            raise RuntimeError("the server is away")

    def close(self, ended: AlertKind | None) -> None:
        self.store.closed.append(ended)


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    config = sound()
    (tmp_path / "config.toml").write_text(dump_config(config))
    return tracked_run(tmp_path, config)


def write(run: TrackedRun, name: str, *lines: dict[str, object]) -> None:
    with (run.folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def steps(first: int, last: int) -> list[dict[str, object]]:
    return [{"step": step, "loss": 1.0 / step, "time_s": float(step)} for step in range(first, last + 1)]


def sending(run: TrackedRun, tracker: Tracker, *, name: str = "made", alive: bool = False, **options) -> Sending:
    told: list[str] = options.pop("told", [])
    return Sending(name, tracker, run, alive=lambda: alive, tell=told.append, times=FAST, **options)


def test_a_finished_run_is_sent_whole(run):
    write(run, "events", {"event": "start", "step": 0}, {"event": "finished", "step": 30})
    write(run, "metrics", *steps(1, 30))
    store = Store()
    sent = sending(run, Recording(store))
    sent.run()
    assert store.steps == list(range(1, 31)) and store.values[4] == {"loss": 0.25}
    assert store.alerts == ["start", "finish"] and store.closed == ["finish"] and sent.lacks is None


def test_a_tracker_that_fails_gets_each_step_once_and_is_named_once(run):
    write(run, "events", {"event": "start", "step": 0}, {"event": "finished", "step": 2500})
    write(run, "metrics", *steps(1, 2500))
    store, told = Store(fails=4), []
    sent = sending(run, Recording(store), alive=True, told=told)
    sent.run()
    assert store.steps == list(range(1, 2501)) and sent.lacks is None
    (text,) = told
    assert text.startswith("made: the server is away\n  the run continues") and "mtrain track" in text
    assert store.alerts == ["start", "finish"]


def test_it_gives_up_after_the_run_and_says_so(run):
    write(run, "events", {"event": "start", "step": 0})
    write(run, "metrics", *steps(1, 4))
    sent = sending(run, Recording(Store(fails=10**6)))
    sent.run()
    assert sent.lacks == "made: the server is away"


def test_a_tracker_that_never_worked_is_not_waited_for(run, monkeypatch):
    class NoKey(Recording):
        def open(self, run: TrackedRun) -> None:
            raise RuntimeError("no key")

    store = Store()
    monkeypatch.setattr(follower, "TRACKERS", {"bad": lambda: NoKey(Store()), "good": lambda: Recording(store)})
    write(run, "events", {"event": "start", "step": 0}, {"event": "finished", "step": 3})
    write(run, "metrics", *steps(1, 3))
    patient = FollowerTimes(poll_s=0.005, patience_s=1e6, pauses_s=(1e6,))  # rank 0 waits for the follower meanwhile
    lacks = send(run, ["bad", "good"], alive=lambda: True, tell=lambda text: None, follow=True, times=patient)
    assert lacks == ["bad: no key"] and store.steps == [1, 2, 3]


def test_a_run_that_goes_back_continues_its_curve(run):
    """Killed at step 9, it goes on from step 5: the tracker has 6 to 9 already."""
    write(run, "events", {"event": "start", "step": 0})
    write(run, "metrics", *steps(1, 9))
    store = Store()
    sending(run, Recording(store)).run()
    (run.folder / "metrics.jsonl").unlink()
    write(run, "events", {"event": "start", "step": 5}, {"event": "finished", "step": 12})
    write(run, "metrics", *steps(1, 12))
    sending(run, Recording(store)).run()
    assert store.steps == list(range(1, 13))
    assert store.alerts == ["start", "crash", "start", "finish"] and store.closed == ["crash", "finish"]


def test_a_run_that_returns_from_a_spike_neither_crashes_nor_starts(run):
    """It is the same process; between the two lines it may be killed."""
    spike, back = {"event": "spike", "step": 9}, {"event": "rollback", "step": 9, "checkpoint": "step-5"}
    write(run, "events", {"event": "start", "step": 0}, spike, back)
    killed = Store()
    sending(run, Recording(killed)).run()
    assert killed.alerts == ["start", "spike", "crash"] and killed.closed == ["crash"]
    write(run, "events", {"event": "start", "step": 5, "rolled_back": True}, {"event": "finished", "step": 12})
    store = Store()
    alerts = Alerts()
    assert [alert.kind for event in read_events(run.folder) for alert in alerts.of(event)] == [
        "start",
        "spike",
        "finish",
    ]
    sending(run, Recording(store)).run()
    assert store.closed == ["finish"]


def test_an_older_run_that_has_done_all_its_steps_is_no_crash(run):
    write(run, "events", {"event": "start", "step": 0})
    write(run, "metrics", *steps(1, 4))
    (run.folder / "plan.json").write_text('{"steps": 4}')
    store = Store()
    sending(run, Recording(store)).run()
    assert store.alerts == ["start"] and store.closed == ["finish"]


def test_it_follows_a_run_until_its_process_is_gone(run):
    write(run, "events", {"event": "start", "step": 0})
    store, alive = Store(), [True]
    sent = Sending("made", Recording(store), run, alive=lambda: alive[0], tell=lambda text: None, times=FAST)
    thread = threading.Thread(target=sent.run)
    thread.start()
    for step in range(1, 6):
        write(run, "metrics", *steps(step, step))
        wait_until(lambda step=step: store.steps[-1:] == [step])
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote
    alive[0] = False
    thread.join(10)
    assert store.steps == [1, 2, 3, 4, 5] and store.alerts == ["start", "crash"] and store.closed == ["crash"]


def test_a_run_without_a_sign_of_life_is_told_of_once(run):
    write(run, "events", {"event": "start", "step": 0})
    write(run, "metrics", *steps(1, 3))
    store, now, rounds = Store(), [0.0], [0]

    def alive() -> bool:
        rounds[0] += 1
        now[0] += 400.0
        return rounds[0] < 9

    Sending("made", Recording(store), run, alive=alive, tell=lambda text: None, times=FAST, clock=lambda: now[0]).run()
    assert store.alerts == ["start", "hang", "crash"]


def test_another_runs_id_is_named_and_nothing_is_sent(run):
    class Foreign(Recording):
        def open(self, run: TrackedRun) -> None:
            run.check_origin("W&B", "someone")

    write(run, "metrics", *steps(1, 3))
    store, told = Store(), []
    sending(run, Foreign(store), alive=True, told=told).run()
    assert store.steps == [] and "belongs to another run" in told[0] and "continues without this tracker" in told[0]
    with pytest.raises(OtherRunError, match=r"set another track\.id"):
        run.check_origin("W&B", "someone")
    run.check_origin("W&B", run.id.origin)


def test_damaged_lines_are_named(run):
    write(run, "metrics", *steps(1, 2))
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": {"step": 3}\n')
    write(run, "metrics", *steps(4, 4))
    store, told = Store(), []
    sending(run, Recording(store), told=told).run()
    assert store.steps == [1, 2, 4] and "lines that are not JSON objects, at byte" in told[0] and len(told) == 1


@pytest.fixture
def server() -> Iterator[Posts]:
    with receiving_posts() as posts:
        yield posts


def events_of(posts: Posts) -> list[str]:
    return [json.loads(body)["event"] for body in posts.bodies]


def with_webhook(run: TrackedRun, **track: object) -> TrackedRun:
    settings: Any = {"to": ("webhook",), **track}
    config = replace(sound(run={"folder": str(run.folder)}), track=TrackSection(**settings))
    (run.folder / "config.toml").write_text(dump_config(config))
    return tracked_run(run.folder, config)


def test_a_webhook_is_told_at_least_once_and_not_again(run, server):
    run = with_webhook(run, webhook_url=server.address)
    write(run, "events", {"event": "start", "step": 0}, {"event": "spike", "step": 3})
    for _ in range(2):
        sending(run, Webhook(), name="webhook").run()
    assert events_of(server) == ["start", "spike", "crash"]
    write(run, "events", {"event": "start", "step": 3}, {"event": "stopped", "step": 4})
    sending(run, Webhook(), name="webhook").run()
    assert events_of(server) == ["start", "spike", "crash", "start", "stop"]
    got = [json.loads(body) for body in server.bodies]
    assert got[0]["run"]["id"] == run.id.id and got[1]["facts"] == {"event": "spike", "step": 3}
    assert json.loads((run.folder / "webhook.json").read_bytes()) == {"events": 4, "running": False}


def test_a_follower_that_begins_late_tells_what_was_before_a_rollback(run, server):
    run = with_webhook(run, webhook_url=server.address)
    back = {"event": "start", "step": 2, "rolled_back": True}
    write(run, "events", {"event": "start", "step": 0}, {"event": "spike", "step": 3}, back, {"event": "finished"})
    sending(run, Webhook(), name="webhook").run()
    assert events_of(server) == ["start", "spike", "finish"]


def test_a_webhook_that_hangs_delays_no_other_tracker(run, server, monkeypatch):
    server.hangs += [60.0] * 100
    monkeypatch.setattr("trainer.tracking.trackers.WEBHOOK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(follower, "WEBHOOK_TIMEOUT_S", 0.05)
    run = with_webhook(run, webhook_url=server.address)
    write(run, "events", {"event": "start", "step": 0}, {"event": "finished", "step": 9})
    write(run, "metrics", *steps(1, 9))
    told: list[str] = []
    lacks = send(run, ["webhook", "prometheus"], alive=lambda: False, tell=told.append, follow=True, times=FAST)
    assert lacks == ["webhook: timed out"] and not server.bodies
    assert 'mtrain_step{run="' in (run.folder / "metrics.prom").read_text()
    assert len(told) == 1 and server.address not in told[0]


def test_alerts_that_nobody_wants_are_not_sent(run, server):
    run = with_webhook(run, webhook_url=server.address, webhook_on=("crash",), webhook_form="slack")
    write(run, "events", {"event": "start", "step": 0}, {"event": "failed", "error": "out of memory"})
    sending(run, Webhook(), name="webhook").run()
    body = json.loads(*server.bodies)
    assert list(body) == ["text"] and "failed: out of memory" in body["text"] and run.name in body["text"]


def test_a_webhook_without_an_address_is_named(run, monkeypatch):
    monkeypatch.delenv("MTRAIN_WEBHOOK_URL", raising=False)
    told: list[str] = []
    sending(with_webhook(run), Webhook(), name="webhook", told=told).run()
    assert told[0].startswith("webhook: the webhook has no usable URL")
    alert = Alert(kind="hang", text="x", step=None, time_s=0.0, facts={})
    assert set(webhook_body(run, alert)) == {"event", "text", "step", "time", "run", "facts"}


def test_one_process_sends_to_a_tracker(run):
    write(run, "metrics", *steps(1, 3))
    with file_lock.hold(run.folder / ".track-prometheus.lock"):
        (lacks,) = send(run, ["prometheus"], alive=lambda: False, tell=print, follow=False, times=FAST)
        assert lacks.startswith("another process is sending this run to prometheus")
    assert send(run, ["prometheus"], alive=lambda: False, tell=print, follow=False, times=FAST) == []


def test_secrets_stay_here(run):
    run = with_webhook(run, webhook_url="http://h/secret")
    assert "track.webhook_url" not in run.config and run.config["train.steps"] == 100
    assert run.name == run.folder.name


def test_lines_for_the_user_are_told_from_those_of_libraries():
    text = "wandb: syncing\nmtrain: track: wandb: no key\n  the run goes on\n* Trackio\nmtrain: track: done\n"
    assert list(told_lines(text)) == ["track: wandb: no key\n  the run goes on", "track: done"]


def test_gauges_have_labels():
    text = prometheus_text({"loss": 2.5, 'valid/a"b': 1.0, "valid/c": 2.0}, {"run": "r"}).decode()
    assert text == (
        '# TYPE mtrain_loss gauge\nmtrain_loss{run="r"} 2.5\n'
        '# TYPE mtrain_valid gauge\nmtrain_valid{run="r",name="a\\"b"} 1.0\nmtrain_valid{run="r",name="c"} 2.0\n'
    )


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError):
        tracked_run(tmp_path)
