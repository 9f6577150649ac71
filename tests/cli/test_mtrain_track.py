"""Trackers of a real run: its follower outlives a killed rank 0, and `mtrain track` sends afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.mtrain import main
from tests.helpers.posts import Posts, receiving_posts
from tests.helpers.processes import wait_until
from trainer.run.metrics import read_metrics

RUN = """
[run]
folder = "{folder}"
[model]
num_layers = 1
hidden_size = 16
num_heads = 2
vocab_size = 64
[data]
blend = "mock"
[train]
sequence_length = 16
global_batch = 4
micro_batch = 2
steps = {steps}
[optimizer]
lr = 0.01
[track]
to = ["prometheus", "webhook"]
"""


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Posts]:
    with receiving_posts() as posts:
        monkeypatch.setenv("MTRAIN_WEBHOOK_URL", f"{posts.address}/")
        yield posts


@pytest.mark.slow
def test_a_webhook_hears_of_a_killed_rank_0(tmp_path, webhook):
    folder = tmp_path / "run"
    (tmp_path / "run.toml").write_text(RUN.format(folder=folder, steps=100_000))
    command = [sys.executable, "-m", "cli.mtrain", "train", str(tmp_path / "run.toml"), "--nproc", "1"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: bool(webhook.bodies) and (folder / "metrics.prom").exists())
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: len(webhook.bodies) == 2)
    start, crash = map(json.loads, webhook.bodies)
    assert (start["event"], crash["event"]) == ("start", "crash")
    assert "its process vanished without recording why" in crash["text"]
    wait_until(lambda: "mtrain_running{" in (folder / "metrics.prom").read_text())
    wait_until(lambda: not list(folder.glob(".track-*.lock")))
    gauges = (folder / "metrics.prom").read_text()
    assert f" {float(read_metrics(folder)[-1]['step'])}\n" in gauges.split("mtrain_step{")[1]


@pytest.mark.slow
def test_a_run_waits_for_its_trackers(tmp_path, webhook, capsys):
    folder = tmp_path / "run"
    (tmp_path / "run.toml").write_text(RUN.format(folder=folder, steps=5))
    assert main(["train", str(tmp_path / "run.toml"), "--nproc", "1", "checkpoint.interval=3"]) == 0
    assert [json.loads(body)["event"] for body in webhook.bodies] == ["start", "finish"]
    assert " 5.0\n" in (folder / "metrics.prom").read_text().split("mtrain_step{")[1]
    for stored in folder.glob("checkpoints/step-*"):
        assert (stored / "tracking.json").read_bytes() == (folder / "tracking.json").read_bytes()
    # The run goes on in another folder, from its checkpoint alone.
    capsys.readouterr()
    moved = tmp_path / "moved"
    settings = [f"run.folder={moved}", f"checkpoint.folder={folder}/checkpoints", "train.steps=6"]
    assert main(["train", str(tmp_path / "run.toml"), "--nproc", "1", "optimizer.decay_steps=6", *settings]) == 0
    assert (moved / "tracking.json").read_bytes() == (folder / "tracking.json").read_bytes()
    assert {json.loads(body)["run"]["id"] for body in webhook.bodies} == {
        json.loads((moved / "tracking.json").read_bytes())["id"]
    }
    # And is sent again by hand.
    (folder / "metrics.prom").unlink()
    capsys.readouterr()
    assert main(["track", str(folder), "--to", "prometheus", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["to"] == ["prometheus"]
    assert " 5.0\n" in (folder / "metrics.prom").read_text().split("mtrain_step{")[1]


@pytest.mark.slow
def test_a_tracker_that_cannot_work_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MTRAIN_WEBHOOK_URL", raising=False)
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path / "run", steps=5))
    assert main(["train", str(tmp_path / "run.toml"), "--nproc", "1"]) == 0
    error = capsys.readouterr().err
    assert error.count("the webhook has no usable URL") == 1 and "the run continues without this tracker" in error
    assert main(["track", str(tmp_path / "run"), "--to", "webhook"]) == 2
    error = capsys.readouterr().err
    assert "the webhook has no usable URL" in error and "the run continues" not in error
    (tmp_path / "run/tracking.json").write_text("{")
    settings = ["train.steps=6", "optimizer.decay_steps=6"]
    assert main(["train", str(tmp_path / "run.toml"), "--nproc", "1", *settings]) == 0
    assert "does not name the run in trackers" in capsys.readouterr().err


def test_what_cannot_be_tracked_is_refused(tmp_path, capsys):
    assert main(["track", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["track", str(tmp_path / "none")]) == 2
    assert "nothing of that name" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text(RUN.format(folder=tmp_path, steps=5).partition("[track]")[0])
    assert main(["track", str(tmp_path)]) == 2
    assert "no tracker given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("ftp://host/secret", "the scheme 'ftp'"),
        ("host/secret", "no scheme"),
        ("https:///secret", "no host"),
        ("https://host:99999/secret", "a host or a port"),
        ("https://host:0/secret", "the port 0"),
        ("https://host/secret\n", "a space"),
    ],
)
def test_a_url_that_cannot_be_a_webhooks_is_named_before_the_start(url, fault, tmp_path, capsys):
    """With all other problems, and without what may be a secret."""
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path / "run", steps=5))
    for command in ("check", "train"):
        settings = [f"track.webhook_url={json.dumps(url)}", "train.micro_batch=3"]
        assert main([command, str(tmp_path / "run.toml"), "--nproc", "1", *settings]) == 2
        error = capsys.readouterr().err
        assert f"track.webhook_url has {fault}" in error and "train.global_batch=4 is not a multiple" in error
        assert "secret" not in error and not (tmp_path / "run").exists()


def test_a_missing_library_is_named_before_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trainer.tracking.trackers.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path / "run", steps=5))
    command, problem = ["check", str(tmp_path / "run.toml")], "the library of tracker 'wandb' is not installed"
    to = 'track.to=["wandb"]'
    assert main([*command, "--nproc", "1", to]) == 2
    assert f"track.to: {problem}" in capsys.readouterr().err
    assert main([*command, "--ranks", "2", to]) == 0, "the ranks run on other machines"
    assert f"note      on this machine: track.to: {problem}" in capsys.readouterr().out
