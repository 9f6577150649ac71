"""Real trackers, read back: each step once after a start that went back, cut files, and another run's id.

The libraries are those of the extra [track]; without one of them its cases are skipped. None needs a network.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.plan.test_plan import config as sound
from tests.trainer.tracking.test_follower import sending, steps, write
from trainer.config.parse import dump_config
from trainer.config.sections import TrackSection
from trainer.tracking.files import RunId
from trainer.tracking.follower import Sending, tracked_run
from trainer.tracking.trackers import TRACKERS, TrackedRun, missing_libraries, wandb_records


def tensorboard_losses(run: TrackedRun) -> Iterator[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for path in sorted((run.folder / "tensorboard").glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "loss":
                    yield event.step, float(make_ndarray(value.tensor))


def wandb_losses(run: TrackedRun) -> Iterator[tuple[int, float]]:
    """Those of all offline folders of the id, as `wandb sync` sends them."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(run.folder.glob(f"wandb/offline-run-*-{run.id.id}/*.wandb")):
        for record in map(Record.FromString, wandb_records(path.read_bytes())):
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss" in values:
                yield record.history.step.num, json.loads(values["loss"])


def mlflow_losses(run: TrackedRun) -> Iterator[tuple[int, float]]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run.folder}/mlflow.db")
    (made,) = client.search_runs([client.get_experiment_by_name("mtrain").experiment_id])
    for metric in client.get_metric_history(made.info.run_id, "loss"):
        yield metric.step, metric.value


def trackio_losses(run: TrackedRun) -> Iterator[tuple[int, float]]:
    from trackio.sqlite_storage import SQLiteStorage

    for line in SQLiteStorage.get_logs("mtrain", f"{run.name}-{run.id.id}", max_points=None):
        yield line["step"], line["loss"]


READERS = {"tensorboard": tensorboard_losses, "wandb": wandb_losses, "mlflow": mlflow_losses, "trackio": trackio_losses}


@pytest.fixture(params=READERS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if missing_libraries([request.param]):
        pytest.skip(f"{request.param} is not installed (extra [track])")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if request.param == "trackio":
        import trackio.sqlite_storage
        import trackio.utils

        for module in (trackio.utils, trackio.sqlite_storage):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    return str(request.param)


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    config = replace(sound(), track=TrackSection())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(dump_config(config))
    return tracked_run(tmp_path / "run", config)


def sent(name: str, run: TrackedRun) -> Sending:
    made = sending(run, TRACKERS[name](), name=name)
    made.run()
    assert made.lacks is None
    return made


def test_a_killed_run_continues_its_curve(name, run):
    write(run, "events", {"event": "start", "step": 0})
    write(run, "metrics", *steps(1, 9))
    sent(name, run)
    (run.folder / "metrics.jsonl").unlink()
    write(run, "events", {"event": "start", "step": 5}, {"event": "finished", "step": 12})
    write(run, "metrics", *steps(1, 12))
    sent(name, run)
    losses = list(READERS[name](run))
    assert [step for step, _ in losses] == list(range(1, 13))
    assert [loss for _, loss in losses] == pytest.approx([1 / step for step in range(1, 13)], rel=1e-6)


def test_another_runs_id_is_refused(name, run):
    if name == "wandb":
        pytest.skip("offline, W&B does not know what its server has")
    write(run, "metrics", *steps(1, 3))
    sent(name, run)
    told: list[str] = []
    other = replace(run, id=RunId(run.id.id, "another"))
    sending(other, TRACKERS[name](), name=name, told=told).run()
    assert "belongs to another run" in told[0]
    assert [step for step, _ in READERS[name](run)] == [1, 2, 3]


def test_event_files_that_a_kill_has_cut_are_continued(run):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra [track])")
    write(run, "metrics", *steps(1, 50))
    sent("tensorboard", run)
    (path,) = (run.folder / "tensorboard").glob("*tfevents*")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    sent("tensorboard", run)
    assert [step for step, _ in tensorboard_losses(run)] == list(range(1, 51))


def test_records_of_wandb_are_joined_over_blocks():
    """Built here as LevelDB's log format says: parts do not cross blocks of 32 KiB, and short ends are left empty."""
    records = [b"a" * 10, b"b" * 70_000, b"", b"c" * 32_700, b"d"]
    content = bytearray(7)
    for record in records:
        first, rest = True, record
        while first or rest:
            room = 32768 - len(content) % 32768
            if room < 7:
                content += bytes(room)
                room = 32768
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1 if not rest else 2) if first else (4 if not rest else 3)
            content += struct.pack("<IHB", 0, len(part), kind) + part
            first = False
    assert list(wandb_records(bytes(content))) == records
    for cut in (7, 20, 40_000, len(content) - 1):
        whole = list(wandb_records(bytes(content[:cut])))
        assert whole == records[: len(whole)] and len(whole) < len(records)
