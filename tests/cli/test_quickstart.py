"""`make quickstart` without the install: its commands, its folder, and one small run of the whole job."""

from __future__ import annotations

import functools
import itertools
import json
import shlex
import subprocess
import sys

import pytest

from cli import quickstart, quickstart_text
from cli.console import Console
from mdata.errors import UsageError
from mdata.progress import SILENT
from trainer.config.parse import load_config

SMALL = ["train.steps=4", "optimizer.warmup_steps=2", "train.eval_samples=8"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_shipped_run_reads_what_the_commands_write():
    words = quickstart.commands(["--nproc", "2"], [])
    written = {word for line in words for flag, word in itertools.pairwise(line) if flag == "--output-prefix"}
    written = {f"{prefix}_text_document.json" for prefix in written}
    config = load_config(quickstart.CONFIG)
    assert set(config.data.valid) <= written
    blend = next(line for line in words if line[1] == "blend")
    assert config.data.blend == blend[-1]
    assert {word for word in blend if word.endswith("document.json")} <= written
    assert config.run.folder == words[-1][-1]
    assert config.mesh.tp == 2 and config.mesh.sequence_parallel


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 8])
def test_machine_words_are_valid_overrides(num_gpus):
    option, nproc, *overrides = quickstart.machine_words(num_gpus)
    config = load_config(quickstart.CONFIG, overrides)
    assert option == "--nproc" and int(nproc) == config.mesh.tp == (1 if num_gpus == 1 else 2)
    assert config.precision.dtype == ("bf16" if num_gpus else "fp32")
    assert not (config.mesh.sequence_parallel and config.mesh.tp == 1)


def test_the_folder_is_made_anew_and_others_are_refused(tmp_path):
    quickstart.make_folder()
    (tmp_path / "quickstart" / "half-made").touch()
    quickstart.make_folder()
    assert [path.name for path in (tmp_path / "quickstart").iterdir()] == ["made-by-make-quickstart"]
    quickstart.MARK.unlink()
    quickstart.make_folder()  # an empty folder is nobody's
    quickstart.MARK.unlink()
    (tmp_path / "quickstart" / "mine").touch()
    with pytest.raises(UsageError, match=r"quickstart already exists and was not made by the quickstart"):
        quickstart.make_folder()
    assert (tmp_path / "quickstart" / "mine").exists()


def test_the_exit_code_of_a_failing_command_passes_through(monkeypatch, capsys):
    run = []

    def gather(folder, progress):
        assert progress is not SILENT
        return {"code-train": 1}

    monkeypatch.setattr(quickstart_text, "gather", gather)
    monkeypatch.setattr(quickstart, "count_gpus", lambda: 0)
    real = subprocess.run

    def recorded(words, **options):
        run.append(words)
        return real(words, **options)

    monkeypatch.setattr(subprocess, "run", recorded)
    arguments = type("Arguments", (), {"overrides": []})()
    assert quickstart.main(arguments, Console("mdata")) == 2
    assert len(run) == 1, "nothing runs after a failure"
    assert "this command ended with exit code 2: mdata train-tokenizer" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_job_in_small(tmp_path, monkeypatch, capfd):
    small = functools.partial(quickstart_text.gather, limits={"code": 2_000_000, "prose": 800_000})
    monkeypatch.setattr(quickstart_text, "gather", small)
    monkeypatch.setattr(quickstart, "count_gpus", lambda: 0)
    arguments = type("Arguments", (), {"overrides": SMALL})()
    assert quickstart.main(arguments, Console("mdata")) == 0
    out, err = capfd.readouterr()
    shown = [shlex.split(line[2:]) for line in err.splitlines() if line.startswith("$ ")]
    assert [line[:2] for line in shown] == [line[:2] for line in quickstart.commands([], [])]
    run = tmp_path / "quickstart" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 4 and set(lines[-1]["valid"]) == {"code-valid", "prose-valid"}
    assert "Witten-Bell bigram" in out and "It made:" in out
    assert "Witten-Bell bigram" in (run / "report.html").read_text()
    assert len((run / "generated.jsonl").read_text().splitlines()) == len(quickstart.PROMPTS)
    ranks = json.loads((run / "ranks.json").read_text())
    assert len(ranks) == 2 and ranks[0]["split_parameters"] == ranks[1]["split_parameters"]


def test_it_is_a_command_with_help():
    words = [sys.executable, "-m", "cli.quickstart", "--help"]
    answer = subprocess.run(words, capture_output=True, text=True, cwd=quickstart.CONFIG.parent.parent)
    assert answer.returncode == 0 and "section.key=value" in answer.stdout
