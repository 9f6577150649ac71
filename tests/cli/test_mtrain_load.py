"""`checkpoint.load = "latest-valid"` from the command line: whatever is damaged, the newest valid one is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.mtrain import main
from tests.helpers.runs import make_config, make_corpora, write_jsonl
from trainer.config.parse import dump_config
from trainer.run.metrics import read_events, read_metrics

WORDS = ["--nproc", "1", "mesh.tp=1", "mesh.sequence_parallel=false", "checkpoint.load=latest-valid"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run.toml of a run with checkpoints of its steps 2 and 4, as far as it goes."""
    folder = tmp_path_factory.mktemp("load")
    corpus = make_corpora(folder, {"text": write_jsonl(folder / "text.jsonl", 1)})["text"]
    config = make_config(folder / "run", blend=corpus, valid=[], steps=4)
    (folder / "run.toml").write_text(dump_config(config))
    assert main(["train", str(folder / "run.toml"), *WORDS, "checkpoint.interval=2", "train.eval_interval=0"]) == 0
    return folder / "run.toml"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    shutil.move(path, path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no side index": (lambda folder: (folder / "rank-00000.json").unlink(), "rank-00000.json"),
    "a short file": (
        lambda folder: (path := folder / "rank-00000.safetensors").write_bytes(path.read_bytes()[:-5]),
        "rank-00000.safetensors",
    ),
    "a foreign file": (lambda folder: (folder / "rank-00009.json").touch(), "rank-00009.json"),
    "a flipped byte of the index": (lambda folder: flip(folder / "index.json", 99), "index.json"),
    "no index": (lambda folder: (folder / "index.json").unlink(), "index.json"),
    "a link": (lambda folder: link(folder / "rank-00000.safetensors"), "rank-00000.safetensors"),
    "a flipped byte of a slice": (lambda folder: flip(folder / "rank-00000.safetensors", -1), "rank-00000.safetensors"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_latest_valid_passes_over_a_damaged_checkpoint(kind, stopped, tmp_path, capsys):
    run = shutil.copytree(stopped.parent / "run", tmp_path / "run")
    damage, named = DAMAGE[kind]
    damage(run / "checkpoints" / "step-4")
    words = [str(stopped), *WORDS, f"run.folder={run}", "train.eval_interval=0"]
    assert main(["check", *words]) == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert f"continues from {run}/checkpoints/step-2; 2 of 4 steps are done" in told
    assert named in told and "using step-2, the newest valid checkpoint" in told
    assert main(["train", *words, "--json"]) == 0, capsys.readouterr().err
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 4 and [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4]
    assert [event["step"] for event in read_events(run) if event["event"] == "start"][-1] == 2


@pytest.mark.parametrize("command", ["check", "train"])
def test_where_none_is_valid_all_are_named(command, stopped, tmp_path, capsys):
    run = shutil.copytree(stopped.parent / "run", tmp_path / "run")
    for step, kind in ((4, "no index"), (2, "a flipped byte of a slice")):
        DAMAGE[kind][0](run / "checkpoints" / f"step-{step}")
    assert main([command, str(stopped), *WORDS, f"run.folder={run}"]) == 4
    told = capsys.readouterr().err
    assert f"no checkpoint in {run}/checkpoints is valid" in told and "latest-valid" not in told
    assert "step-4/index.json is damaged" in told and "step-2/rank-00000.safetensors is damaged" in told
    assert len(told.strip().splitlines()) <= 4
