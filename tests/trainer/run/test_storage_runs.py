"""Runs whose checkpoints are in object storage: continued bit for bit, killed, refused, and read by the commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mdata
from cli.mtrain import main
from mdata.object_storage import stores, uploading
from mdata.tracing.run_record import has_record, read_record
from tests.helpers.examples import soaked
from tests.helpers.house_rules import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_config, make_mix
from tests.trainer.run.one_rank import alone, curve, events
from trainer.checkpoint.folder import whole_checkpoints
from trainer.checkpoint.load import verify_checkpoint
from trainer.checkpoint.location import ObjectFolder, location_of
from trainer.checkpoint.stored_files import ObjectFiles, listed
from trainer.config.parse import dump_config
from trainer.config.sections import CheckpointSection, MeshSection, OptimizerSection, RunConfig
from trainer.parallel.mesh import Mesh
from trainer.run.metrics import read_metrics
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")

SECRETS = ("AKIDTOBEHIDDEN", "secrettobehidden")


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return {**make_mix(folder, ["first", "second", "held"]), "mix": folder / "mix.json"}


@pytest.fixture
def config_of(mix: dict[str, Path], tmp_path: Path) -> Any:
    def made(name: str, root: ObjectFolder | str = "", **keys: Any) -> RunConfig:
        config = make_config(tmp_path / name, blend=mix["mix"], valid=[mix["held"]], steps=6, eval_interval=None)
        optimizer = OptimizerSection(lr=1e-2, min_lr=1e-4, warmup_steps=1)
        keys = {"interval": 2, "keep": 9, "folder": str(root), **keys}
        return replace(config, mesh=MeshSection(), optimizer=optimizer, checkpoint=CheckpointSection(**keys))

    return made


@pytest.fixture
def root(bucket: str, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.01)
    found = location_of(f"{bucket}/run")
    assert isinstance(found, ObjectFolder)
    return found


def steps(root: ObjectFolder) -> list[str]:
    return [folder.name for folder in whole_checkpoints(root)]


def until(config: RunConfig, step: int) -> RunConfig:
    return replace(config, train=replace(config.train, exit_interval=step))


def test_a_run_goes_on_bit_for_bit_on_a_machine_that_has_nothing_of_it(server, root, config_of, tmp_path):
    """While the network fails; the objects hold what a disk's files would."""
    straight = config_of("straight")
    alone(straight)
    server.share = 0.02
    alone(until(config_of("first", root), 3))
    assert steps(root) == ["step-3", "step-2"]
    other = config_of("second", root)
    alone(other)
    server.share = 0.0
    assert curve(other) == curve(straight)[2:], "that of step 3 as well: the new folder does not have it"
    assert not list(tmp_path.glob("first/checkpoints*")) and steps(root) == [f"step-{step}" for step in (6, 4, 3, 2)]
    files = ObjectFiles(root / "step-6")
    for path in tmp_path.glob("straight/checkpoints/step-6/rank-*"):
        assert files.read(path.name) == path.read_bytes()
    assert "tokenizer_facts.json" in files.names()
    assert not any(name.startswith(".") for name in listed(root))
    expected = mdata.trace_run(straight.run.folder)
    for place in (other.run.folder, f"{root}/step-6", f"{root}/step-3/"):
        tracer = mdata.trace_run(place)
        for step in range(1, 7):
            assert tracer.step(step).tolist() == expected.step(step).tolist()
    assert read_record(Path(other.run.folder)) == read_record(f"{root}/step-6")
    assert has_record(f"{root}/step-6") and not has_record(f"{root}/nothing")
    server.denied = {"HEAD"}  # as for an object that is not there, in a bucket that may not be listed
    assert not has_record(f"{root}/nothing")


def _on_ranks(context: Any, config: RunConfig, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    # Checkpoints in storage need no disk that ranks share.
    own = f"-{context.rank}" if config.checkpoint.folder else ""
    mine = replace(config, run=replace(config.run, folder=f"{config.run.folder}{own}"))
    train(mine, context.join(Mesh(context.world, config.mesh.tp)))


def aws() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def test_two_ranks_without_a_shared_disk_and_then_another_layout(root, config_of):
    straight, config = config_of("straight"), config_of("ranks", root)
    run_ranks(_on_ranks, 2, straight, {})
    run_ranks(_on_ranks, 2, until(config, 3), aws())
    assert verify_checkpoint(root / "step-3").files.keys() == {f"rank-0000{rank}.safetensors" for rank in (0, 1)}
    run_ranks(_on_ranks, 2, replace(config, run=replace(config.run, folder=f"{config.run.folder}-new")), aws())
    one, other = Path(straight.run.folder), Path(f"{config.run.folder}-new-0")
    losses = [[(line["step"], line["loss"]) for line in read_metrics(folder)] for folder in (one, other)]
    assert losses[1] == losses[0][2:]
    alone(replace(config_of("alone", root), train=replace(config.train, steps=8)))
    assert steps(root)[0] == "step-8" and verify_checkpoint(root / "step-8").files.keys() == {"rank-00000.safetensors"}


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_an_upload_that_fails_is_a_save_that_failed(server, root, config_of, monkeypatch, policy):
    monkeypatch.setattr(stores, "RETRIES", 0)
    monkeypatch.setattr(uploading, "TRIES", 1)
    config = config_of("run", root, on_failure=policy)
    real = uploading.put_stream

    def put_stream(content: Any, address: Any, **options: Any) -> None:
        server.denied = {"PUT"} if "step-4" in address.key else set()
        try:
            real(content, address, **options)
        finally:
            server.denied = set()

    for module in ("save", "object_folder"):
        monkeypatch.setattr(f"trainer.checkpoint.{module}.put_stream", put_stream)
    if policy == "stop":
        with pytest.raises(mdata.UsageError, match=r"the checkpoint of step 4 was not written.*are intact") as e:
            alone(config)
        told = str(e.value)
        assert steps(root) == ["step-2"]
    else:
        told = " ".join(alone(config).lines)
        assert steps(root) == ["step-6", "step-2"]
    assert "refuses these credentials" in told and not any(secret in told for secret in SECRETS)
    assert [event["step"] for event in events(config, "save failed")] == [4]
    assert not any(name.startswith(("step-4", ".step-4")) for name in listed(root))


def write_config(config: RunConfig, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(dump_config(config))
    return str(folder / "run.toml")


KILLED_AT = [("step-4/rank-00000.safetensors", []), ("run/latest", ["step-4"])]


@pytest.mark.parametrize(("at", "left"), soaked(KILLED_AT, but=KILLED_AT[1:]))
def test_a_run_that_is_killed_while_it_uploads_goes_on_bit_for_bit(server, root, config_of, tmp_path, at, left):
    """kill -9 before the first checkpoint is there, and between its index and `latest`."""
    straight, config = config_of("straight"), config_of("run", root, interval=4)
    alone(straight)
    command = [sys.executable, "-m", "cli.mtrain", "train", write_config(config, tmp_path / "given"), "--nproc", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def drops(method: str, path: str) -> bool:
        if kills := method == "PUT" and path.endswith(at):
            process.send_signal(signal.SIGKILL)
            process.wait()
        return kills

    server.drops = drops
    output, _ = process.communicate(timeout=60)
    server.drops = lambda method, path: False
    assert process.returncode == -signal.SIGKILL, output
    assert steps(root) == left
    notes = alone(config)
    assert any("latest is missing; using the newest intact checkpoint, step-4" in line for line in notes.lines) == bool(
        left
    )
    assert curve(config) == curve(straight) and steps(root) == ["step-6", "step-4"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_commands_read_addresses_and_no_secret_is_written_anywhere(root, config_of, tmp_path, capsys):
    config = config_of("run", root)
    given, said = write_config(config, tmp_path / "given"), []

    def mtrain(*words: str) -> str:
        code, text = run(capsys, *words)
        said.append(text)
        assert code == 0, text
        return text

    mtrain("check", given, "--nproc", "1")
    assert listed(root) == {}, "the object by which writing was tried is gone"
    mtrain("train", given, "--nproc", "1")
    assert f"checkpoint: {root}/step-6" in said[-1]
    for words in ((str(root), "--verify"), (f"{root}/step-6",), (config.run.folder,)):
        assert f"{root}/step-6: step 6, 24 samples" in mtrain("inspect", *words)
    assert json.loads(mtrain("inspect", str(root), "--json"))["path"] == f"{root}/step-6"
    assert "nothing is left to do" in mtrain("check", given, "--nproc", "1")
    mtrain("generate", config.run.folder, "--prompt", "The", "--max-tokens", "3")
    for source, target in ((f"{root}/step-4", "four"), (str(root), "six"), (config.run.folder, "last")):
        mtrain("convert", source, str(tmp_path / target), "--to", "mtrain", "--check")
    held = [verify_checkpoint(tmp_path / name / "checkpoints" / "step-6") for name in ("six", "last")]
    assert held[0].tensors == held[1].tensors
    first = config_of("again", init_from=f"{root}/step-6", init_optimizer=True, init_schedule=True, init_data=True)
    local = replace(first, run=replace(first.run, folder=str(tmp_path / "locally")))
    for one in (first, replace(local, checkpoint=replace(local.checkpoint, init_from=str(tmp_path / "six")))):
        alone(replace(one, train=replace(one.train, steps=9)))
    assert curve(first) == curve(local) and len(curve(first)) == 3
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    written += [ObjectFiles(root).read(name) for name in listed(root)]
    for secret in SECRETS:
        assert not any(secret in text for text in said) and not any(secret.encode() in data for data in written)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"folder": "s3://nosuchbucket/run"}, "there is no bucket nosuchbucket"),
        ({"folder": "https://host/run"}, "checkpoint.folder: .*does not write to https://"),
        ({"folder": "s3://key:hidden@bucket/run"}, "checkpoint.folder: .*user name, query or fragment"),
        (
            {"folder": "ftp://host/run"},
            r"checkpoint.folder: .*not write to ftp://\n.*begins with s3://, gs:// or az://\n",
        ),
        ({"folder": "hf://datasets/a/b"}, "checkpoint.folder: .*does not write to hf://"),
        ({"folder": "/dev/null"}, "checkpoint.folder='/dev/null' cannot be created: /dev/null is a file"),
        ({"init_from": "hf://org/model"}, r"checkpoint.init_from: .*not read from hf://\n.*http.*\n.*with hf download"),
        (
            {"init_from": "ftp://host/run"},
            r"not read from ftp://\n.*begins with s3://, gs://, az://, http:// or https://\n",
        ),
        ({"init_from": "s3://nosuchbucket/run"}, "checkpoint.init_from = s3://nosuchbucket/run.*no bucket"),
        ({"folder": "denied"}, "refuses these credentials"),
    ],
)
def test_what_cannot_work_is_told_before_training(server, root, config_of, tmp_path, capsys, keys, message):
    if keys == {"folder": "denied"}:
        keys, server.denied = {"folder": str(root)}, {"PUT"}
    given = write_config(config_of("run", **keys), tmp_path / "given")
    for command in ("check", "train"):
        code, text = run(capsys, command, given, "--nproc", "1")
        assert code == 2 and re.search(message, text), text
        assert len(text.strip().splitlines()) <= 5 and "hidden" not in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_result_is_not_converted_into_storage(root, capsys):
    code, text = run(capsys, "convert", "run", f"{root}/x", "--to", "hf")
    assert code == 2 and "expected: a folder on a disk" in text
