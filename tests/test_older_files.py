"""Files that mdata 0.0.1 wrote are read, verified, traced and continued as they were then.

tests/golden/written_by_0.0.1/make.sh says how they were made; later code reads them and never makes them again.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shlex
import tarfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch

import cli.mdata
import cli.mtrain
from mdata.tracing.legacy_run import legacy_record
from mdata.tracing.run_record import read_record
from mdata.tracing.run_steps import Steps
from tests.helpers.ranks import run_ranks
from trainer.config.parse import load_config
from trainer.parallel.mesh import mesh_of
from trainer.run.metrics import read_events, read_metrics
from trainer.run.train import train

GOLDEN = Path(__file__).parent / "golden" / "written_by_0.0.1"
MADE_IN = "/tmp/older"  # job folders name the folder in which their commands were given
COMMANDS = {"mdata": cli.mdata.main, "mtrain": cli.mtrain.main}

# Settings of each pair of steps, as in make.sh: tensor parallel, pipeline, sharded over data parallel ranks, one rank.
LAYOUTS = {
    4: (2, ["mesh.pp=2"]),
    6: (2, ["optimizer.sharding=parameters"]),
    8: (1, []),
    10: (2, ["mesh.tp=2", "mesh.sequence_parallel=true"]),
}


def unpack(folder: Path) -> None:
    with lzma.open(GOLDEN / "files.tar.xz") as stream, tarfile.open(fileobj=stream) as archive:
        archive.extractall(folder, filter="data")
    for path in folder.glob("*.job/job.json"):
        path.write_text(path.read_text().replace(MADE_IN, str(folder)))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, for tests that change none of them."""
    folder = tmp_path_factory.mktemp("older")
    unpack(folder)
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The files, for one test."""
    unpack(tmp_path)
    return tmp_path


def records(text: str) -> list[Any]:
    """The objects of a command's --json: one, or one a line."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def only_known(new: Any, old: Any) -> Any:
    """`new` without keys that did not exist then."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: only_known(value, old[key]) for key, value in new.items() if key in old}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [only_known(a, b) for a, b in zip(new, old, strict=True)]
    return new


def test_commands_say_what_they_said(shared, capsys, monkeypatch):
    """inspect of corpora, blends and checkpoints; cat; trace of the run, of blends and of other kinds and orders."""
    monkeypatch.chdir(shared)
    paths = sorted((shared / "said").iterdir(), key=lambda path: int(path.name))
    assert len(paths) == 50
    for path in paths:
        command, _, said = path.read_text().partition("\n")
        program, *words = shlex.split(command)
        assert COMMANDS[program](words) == 0, command
        expected, got = records(said), records(capsys.readouterr().out)
        assert only_known(got, expected) == expected, command


def test_corpora_and_blends_are_intact(shared, capsys, monkeypatch):
    monkeypatch.chdir(shared)
    manifests = sorted(shared.glob("*.json"))
    assert len(manifests) == 21
    for path in manifests:
        assert cli.mdata.main(["verify", "--full", path.name]) == 0, path
    capsys.readouterr()
    for step in (2, 4, 6, 8):
        assert cli.mtrain.main(["inspect", "--verify", f"run/checkpoints/step-{step}"]) == 0


def test_a_job_makes_the_part_that_it_lost(own, capfd, monkeypatch):
    """The same command finds the job of then, makes one part and merges what one process would have made."""
    monkeypatch.chdir(own)
    assert cli.mdata.main(["status", "prose.job", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["counts"] == {"done": 2}
    job = json.loads(Path("lost.job/job.json").read_text())
    assert (
        cli.mdata.main(["launch", "local", "--parts", "2", "--cpus", "1", "--merge", "copy", "--", *job["words"]]) == 0
    )
    assert "1 of 2 parts run" in capfd.readouterr().out
    for line in Path("lost.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256(Path(name).read_bytes()).hexdigest() == digest


def run_before(folder: Path, step: int) -> Path:
    """The run folder as it was after a step: without later checkpoints and lines."""
    checkpoints = folder / "run" / "checkpoints"
    for path in checkpoints.glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            path.rename(folder / path.name)
    (checkpoints / "latest").write_text(f"step-{step}")
    return folder / "run"


def _continue(context: Any, folder: Path, settings: list[str]) -> None:
    with chdir(folder):
        config = load_config("run.toml", settings)
        train(config, context.join(mesh_of(config, context.world)))


@pytest.mark.parametrize("step", LAYOUTS)
def test_a_run_continues_from_a_checkpoint_of_another_layout(own, step):
    """Two more steps in the layout of then; the last pair ran after the archive was made."""
    run = run_before(own, step - 2)
    ranks, settings = LAYOUTS[step]
    run_ranks(_continue, ranks, own, settings)
    (start,) = [event for event in read_events(run)[-10:] if event["event"] == "start" and event["step"] == step - 2][
        -1:
    ]
    assert start["checkpoint"] == f"step-{step - 2}"
    expected, got = (
        {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}
        for lines in (map(json.loads, (own / "expected.jsonl").read_text().splitlines()), read_metrics(run))
    )
    machine = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    # Also processors of one capability may round products differently: 7.5e-8 was seen.
    tolerance = 1e-6 if machine == (own / "machine.txt").read_text().strip() else 1e-5
    assert max(got) == step
    for number in (step - 1, step):
        assert got[number] == pytest.approx(expected[number], rel=tolerance, abs=0), number
    # The run has a data.json from now on, with the steps that it did without one.
    steps = [Steps([span.steps for span in one.spans], seed=0) for one in (read_record(run), legacy_record(run))]
    for number in range(1, step + 1):
        assert len({(one.bounds(number), one.batch_shape(number)) for one in steps}) == 1, number
    assert steps[0].batch_shape(2) == (2, 1)
