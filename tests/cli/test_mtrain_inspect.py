"""`mtrain inspect`: checkpoints of both versions, a run folder, and damage."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from cli.mtrain import main
from cli.mtrain_inspect import checkpoint_facts, checkpoint_text
from tests.trainer.checkpoint.layouts import Layout, save
from trainer.checkpoint.format import Index, RunState

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint" / "step-2"


def test_a_checkpoint_is_shown_for_people_and_as_json(tmp_path, capsys):
    folder = save(tmp_path, Layout(tp=2))
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "step 2, 2 samples consumed" in text and "tokenizer/vocab.json" in text and "embedding.weight" in text
    assert main(["inspect", str(folder), "--verify", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["version"], facts["verified"], facts["states"].keys()) == (
        2,
        True,
        {"weight", "exp_avg", "exp_avg_sq"},
    )
    assert facts["tensors"]["embedding.weight"] == {"shape": [250, 8], "dtype": "F32", "slices": 2}
    assert facts["tensors"]["exp_avg_sq/embedding.weight"] == {"shape": [250, 8], "dtype": "F32", "slices": 2}
    assert "exp_avg_sq/embedding.weight" not in text
    assert "configuration: with --json" in text


def test_all_that_resuming_needs_is_shown(tmp_path, capsys):
    run = RunState(
        4, 8, data_id="id", data={"order": "native", "corpora": [["a", 1]] * 99}, optimizer_steps=6, config="",
        skipped_samples=1, float8={"layer": [[1.0, 2.0, 3.0]]}, schedule_steps=2, schedule_samples=-3, moment_steps=5,
    )  # fmt: skip
    facts = checkpoint_facts(tmp_path, Index(run, {}, {}, hashed=True), verified=False)
    assert {field.name for field in fields(RunState)} - {"versions"} <= facts.keys()
    assert (facts["float8"], facts["schedule_samples"]) == (run.float8, -3)
    lines = checkpoint_text(facts).splitlines()
    assert "  order native" in lines and any(line.startswith('  corpora [["a", 1], ') for line in lines)
    assert "skipped_samples 1, schedule_steps 2, schedule_samples -3, moment_steps 5" in lines
    assert max(len(line.replace(str(tmp_path), "")) for line in lines) < 120


@pytest.mark.parametrize("loss", ["2.5", None, [2.5], {}])
def test_a_loss_that_is_no_number_is_not_shown(loss, tmp_path):
    """What a step measured may be anything in a checkpoint of strangers."""
    run = RunState(4, 8, data_id="id", data={}, optimizer_steps=4, config="", measured={"loss": loss})
    text = checkpoint_text(checkpoint_facts(tmp_path, Index(run, {}, {}, hashed=True), verified=False))
    assert text.splitlines()[0].endswith("4 updates applied")


def test_a_file_and_a_step_that_is_not_there_are_told(tmp_path, capsys):
    (tmp_path / "r.toml").touch()
    assert main(["inspect", str(tmp_path / "r.toml")]) == 2
    assert "r.toml is a file\n  expected: a checkpoint" in capsys.readouterr().err
    save(tmp_path / "run" / "checkpoints", Layout())
    words = ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf", "--checkpoint", "step-999"]
    assert main(words) == 2
    assert "step-999\n  expected: step-2\n" in capsys.readouterr().err


def test_version_1_is_shown(capsys):
    assert main(["inspect", str(GOLDEN), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["version"], facts["step"], len(facts["files"])) == (1, 2, 4)


def test_of_a_run_folder_the_checkpoint_to_continue_from_is_shown(tmp_path, capsys):
    save(tmp_path / "run" / "checkpoints", Layout())
    assert main(["inspect", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"].endswith("step-2")


def test_damage_and_a_folder_that_is_none_are_told(tmp_path, capsys):
    folder = save(tmp_path, Layout())
    path = folder / "rank-00000.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert main(["inspect", str(folder)]) == 0, "the indexes are right"
    assert main(["inspect", str(folder), "--verify"]) == 4
    assert "rank-00000.safetensors is damaged" in capsys.readouterr().err
    shutil.rmtree(folder)
    (tmp_path / "latest").unlink()
    assert main(["inspect", str(tmp_path)]) == 2
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
