"""`mtrain inspect`: checkpoints of both versions, a run folder, and damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.mtrain import main
from tests.trainer.checkpoint.layouts import Layout, save

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint" / "step-2"


def test_a_checkpoint_is_shown_for_people_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_version_1_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(GOLDEN), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["version"], facts["step"], len(facts["files"])) == (1, 2, 4)


def test_of_a_run_folder_the_checkpoint_to_continue_from_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run" / "checkpoints", Layout())
    assert main(["inspect", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"].endswith("step-2")


def test_damage_and_a_folder_that_is_none_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
