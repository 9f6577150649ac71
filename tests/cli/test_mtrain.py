"""The mtrain command: what it prints, its exit codes, and what it does not import."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.mtrain import COMMANDS, main
from cli.mtrain_train import _ending_for_good, result_text
from mdata import ResourceError, StoppedError, UsageError
from mdata.util import file_lock
from tests.helpers.processes import children_of
from tests.helpers.runs import make_config, make_corpora, write_jsonl
from trainer.config.parse import dump_config
from trainer.launching.job import END_FILE, FINAL
from trainer.run.attempt import ReplacedError, SupersededError, TooManyRestartsError
from trainer.run.metrics import read_metrics
from trainer.run.run_folder import folder_problems
from trainer.run.signals import LastTimeError, StoppedAtTimeError
from trainer.run.step_report import DivergedError
from trainer.run.train import TrainResult

RUN = """
[run]
folder = "{folder}/run"
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
vocab_size = 300
[data]
blend = "{folder}/no-such-blend.json"
[train]
sequence_length = 16
global_batch = 8
micro_batch = 2
steps = 10
[optimizer]
lr = 1e-3
"""


def test_a_rank_waits_for_rank_0_as_long_as_the_run_says(run_file, monkeypatch, capsys):
    """Under srun, where nothing listens."""
    place = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["train", run_file, "data.blend=mock", "run.join_minutes=0.005"]) == 5
    told = capsys.readouterr().err
    assert "rank 0 of 2 did not start\n  found: nothing answers at 127.0.0.1:9, for 0 s" in told
    assert "a larger run.join_minutes waits longer" in told


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path))
    return str(path)


def test_help_imports_no_torch():
    """All of them in one process, which ends at the first that imports torch, or whose help is short."""
    code = """
import contextlib, io, sys
from cli.mtrain import COMMANDS, main
for words in (["--help"], *([command.name, "--help"] for command in COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main(words)
    print(*words)
    assert "torch" not in sys.modules and len(shown.getvalue()) > 200
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr == "", result.stdout
    assert len(result.stdout.splitlines()) == len(COMMANDS) + 1


def test_check_prints_every_problem_at_once(run_file, capsys):
    assert main(["check", run_file, "--nproc", "3", "mesh.tp=3", "optimizer.warmup_steps=11"]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0] == f"mtrain: error: {run_file} has 4 problems:"
    for text in (
        "model.num_heads=4",
        "model.ffn_hidden_size (derived)=128",
        "optimizer.warmup_steps=11",
        "no-such-blend.json",
    ):
        assert any(line.startswith("  - ") and text in line for line in lines), text


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("train.batch_ramp=abc", "train.batch_ramp='abc': a ramp is three integers\n"),
        ("train.samples=100", "train.steps=10 and train.samples=100 are set; a run has one length, keep one of them\n"),
    ],
)
def test_one_mistake_is_one_problem(run_file, tmp_path, capsys, setting, problem):
    corpus = make_corpora(tmp_path, {"text": write_jsonl(tmp_path / "text.jsonl", 1)})["text"]
    assert main(["check", run_file, f"data.blend={corpus}", "model.vocab_size=0", setting]) == 2
    assert capsys.readouterr().err.startswith(f"mtrain: error: {run_file}: {problem}")


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_run_folder_that_cannot_be_made_is_told_before(run_file, capsys, monkeypatch, command):
    assert main([command, run_file, f"run.folder={run_file}/deeper"]) == 2
    assert f"run.folder='{run_file}/deeper' cannot be created: {run_file} is a file; choose" in capsys.readouterr().err
    assert main([command, run_file, "run.folder=s3://bucket/run"]) == 2
    assert "run.folder='s3://bucket/run' is an address; choose a folder, and set checkpoint." in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert main([command, run_file, "checkpoint.folder=elsewhere"]) == 2
    told = capsys.readouterr().err
    assert "run' is not writable: no permission for" in told
    assert "checkpoint.folder='elsewhere' is not writable: no permission for" in told
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY, f_blocks=1))
    assert main([command, run_file]) == 2
    assert f"is not writable: {Path(run_file).parent} is on a read-only file system; choose" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "train"])
def test_checkpoints_that_cannot_be_written_are_told_before(run_file, tmp_path, capsys, monkeypatch, command):
    kept = tmp_path / "run" / "checkpoints"
    kept.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != kept)
    assert main([command, run_file, "data.blend=mock"]) == 2
    assert f"checkpoint.folder='{kept}' is not writable: no permission for {kept}" in capsys.readouterr().err
    kept.rmdir()
    kept.touch()
    assert main([command, run_file, "data.blend=mock"]) == 2
    assert f"checkpoint.folder='{kept}' cannot be created: {kept} is a file" in capsys.readouterr().err
    kept.unlink()
    kept.symlink_to(tmp_path / "nowhere")
    assert main([command, run_file, "data.blend=mock"]) == 2
    assert f"checkpoint.folder='{kept}' cannot be created: {kept} is a broken link" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
@pytest.mark.parametrize("key", ["run.folder", "checkpoint.folder"])
@pytest.mark.parametrize("words", [["check", "--ranks", "2"], ["check"], ["train", "--nproc", "1"]], ids=" ".join)
def test_a_folder_that_stores_no_files_is_told_before(run_file, capsys, words, key):
    """Root may write to /proc, and it has 0 bytes free: neither permissions nor space tell."""
    command, *options = words
    assert main([command, run_file, *options, "data.blend=mock", f"{key}=/proc/nope"]) == 2
    problem = f"{key}='/proc/nope' is not writable: /proc stores no files; choose another folder\n"
    assert capsys.readouterr().err == f"mtrain: error: {run_file}: {problem}"


@pytest.mark.parametrize("key", ["run.folder", "checkpoint.folder"])
@pytest.mark.parametrize("words", [["check"], ["train", "--nproc", "1"]], ids=" ".join)
def test_a_folder_in_which_a_run_is_alive_is_told(run_file, capsys, tmp_path, words, key):
    command, *options = words
    folder = tmp_path / "used"
    (folder / "checkpoints").mkdir(parents=True)
    with file_lock.hold(folder / ".lock"), file_lock.hold(folder / "checkpoints" / ".lock"):
        assert main([command, run_file, *options, "data.blend=mock", f"{key}={folder}"]) == 2
        problem = f"{key}='{folder}' is in use: process {os.getpid()} on {os.uname().nodename} trains there"
        err = capsys.readouterr().err
        assert problem in err and err.count("is in use") == 1
    assert main(["check", run_file, "data.blend=mock", f"{key}={folder}"]) == 0


def test_a_disk_that_does_not_tell_its_size_may_store_files(tmp_path, monkeypatch):
    """As some FUSE mounts."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=0))
    assert list(folder_problems(make_config(tmp_path / "run", blend="mock", valid=[]))) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_megatron_is_not_taken_for_a_new_run(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    config = make_config(tmp_path, blend="mock", valid=[])
    (problem,) = folder_problems(config)
    assert "holds a checkpoint of Megatron-LM" in problem and f"checkpoint.init_from='{tmp_path}'" in problem
    weights = dataclasses.replace(config.checkpoint, init_from=str(tmp_path))
    assert list(folder_problems(dataclasses.replace(config, checkpoint=weights))) == []
    (tmp_path / "checkpoints").mkdir()  # of an earlier start, which continues
    assert list(folder_problems(config)) == []


def test_the_best_of_no_validation_are_a_problem(run_file, capsys):
    words = ["check", run_file, "data.blend=mock", "checkpoint.keep_best=2"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "keep_best=2 would keep nothing: the data has no validation set and without train.eval_interval" in told
    assert told.endswith("set checkpoint.keep_best=0\n"), "mock data takes no data.valid"


def test_check_as_json(run_file, capsys):
    assert main(["check", run_file, "--json", "mesh.tp=3", "--nproc", "3"]) == 2
    facts = json.loads(capsys.readouterr().out)
    assert facts["world_size"] == 3 and len(facts["problems"]) == 3


@pytest.mark.parametrize("command", ["check", "check --ranks 1", "train", "launch local --"])
def test_the_configuration_of_a_run_that_was_moved_does_not_begin_it_again(tmp_path, capsys, command):
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "config.toml").write_text(RUN.format(folder=tmp_path))
    (moved / "metrics.jsonl").touch()
    assert main([*command.split(), str(moved / "config.toml"), "data.blend=mock"]) == 2
    assert f"add run.folder={moved} to continue that run, or run.folder=NEW" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_configuration_in_the_folder_of_its_run_continues_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text(RUN.format(folder="."))
    (tmp_path / "run/metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["check", "run/config.toml", "data.blend=mock"]) == 0
    monkeypatch.chdir(tmp_path / "run")
    assert main(["check", "config.toml", "data.blend=mock"]) == 2
    assert main(["check", "config.toml", "data.blend=mock", "run.folder=../other"]) == 0


def test_a_wrong_size_of_a_cache_that_is_not_used_is_one_problem(run_file, capsys):
    assert main(["check", run_file, "data.cache_size=many", "data.cache=none"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "cache_size" in line]
    assert len(lines) == 1 and 'data.cache_size="many" has no effect without data.cache' in lines[0]
    assert main(["check", run_file, "data.cache_size=many", "data.cache=blocks"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "cache_size" in line]
    assert len(lines) == 1 and "cache_size 'many' cannot be used" in lines[0]


@pytest.mark.parametrize("command", ["check", "plan", "train"])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train.stepps=3"], "there is no key train.stepps; did you mean steps?"),
        (["steps=3"], "'steps=3' is not an override"),
        (["resume=true"], "'resume=true' is not an override; leave it out: the same command continues"),
        (["checkpoint.resume_from=x"], "there is no key checkpoint.resume_from; leave it out: the same command"),
        (["--RANKS", "0"], "--RANKS is too small\n  found: 0"),
        (["--RNAKS", "2"], "--RANKS?"),
        (["--steps", "3"], "unrecognized arguments: --steps 3\n  try: train.steps=VALUE?"),
    ],
)
def test_a_wrong_word_is_told_in_a_few_lines(run_file, capsys, command, words, text):
    option = "ranks" if command == "plan" else "nproc"
    spelled = {"RANKS": option, "RNAKS": option[0] + option[2] + option[1] + option[3:]}
    for name, spelling in spelled.items():
        words, text = [word.replace(name, spelling) for word in words], text.replace(name, spelling)
    assert main([command, run_file, "data.blend=mock", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and text in err and len(err.splitlines()) <= 4


@pytest.mark.parametrize("command", ["check", "plan", "train"])
def test_the_configuration_alone_is_required(capsys, command):
    assert main([command]) == 2
    assert "error: the following arguments are required: run.toml\n" in capsys.readouterr().err


def test_a_missing_file_is_told(tmp_path, capsys):
    assert main(["train", str(tmp_path / "no.toml")]) == 2
    assert "cannot read the configuration" in capsys.readouterr().err


def test_nproc_cannot_contradict_a_launcher(run_file, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["check", run_file, "--nproc", "2"]) == 2
    assert "--nproc 2 given under a launcher that has already started the ranks" in capsys.readouterr().err


def test_a_plan_without_its_data_says_so(run_file, capsys):
    assert main(["plan", run_file, "--ranks", "2", "mesh.tp=2"]) == 0
    out, err = capsys.readouterr()
    numbers, *kernels = out.split("\n\n")
    rows = dict(line.rsplit(maxsplit=1) for line in numbers.splitlines())
    assert rows["  recomputation"] == "none" and any(name.startswith("  activations of a microbatch") for name in rows)
    assert kernels[0].startswith("kernels on a ") and kernels[0].splitlines()[0].endswith(", as on this machine")
    assert "  attention: PyTorch's scaled_dot_product_attention; causal attention over whole rows" in kernels[1]
    assert rows["heads per rank"] == "2" and rows["tokens per step"] == "128"
    assert rows["vocabulary"] == "300" and rows["  padded"] == "512"
    assert err.startswith("mtrain: warning: planned without the data: ")


@pytest.mark.parametrize(
    ("pattern", "absent"),
    [
        ("MM", {"head size", "hidden size of the MLP", "heads per rank", "key and value heads per rank"}),
        ("*E", {"hidden size of the MLP"}),
        ("*-", set()),
    ],
)
def test_a_plan_names_no_sizes_of_layers_that_are_not_there(run_file, pattern, absent, capsys):
    mixers = ["model.family=mamba", "model.position=none", f"model.mamba.pattern={pattern}", "model.mamba.head_dim=8"]
    mixers += ["model.moe.num_experts=4", "model.moe.top_k=2"] if "E" in pattern else []
    assert main(["plan", run_file, "--ranks", "1", "model.num_layers=2", "model.mamba.num_groups=1", *mixers]) == 0
    names = {line.rsplit(maxsplit=1)[0] for line in capsys.readouterr().out.split("\n\n")[0].splitlines()}
    possible = {"head size", "hidden size of the MLP", "heads per rank", "key and value heads per rank"}
    assert possible - names == absent


def test_a_plan_of_changing_batches(run_file, capsys):
    assert main(["plan", run_file, "--ranks", "2", "train.batch_schedule=0:4 256:8"]) == 0
    numbers = capsys.readouterr().out.split("\n\n")[0]
    rows = dict(line.rsplit(maxsplit=1) for line in numbers.splitlines())
    names = ("samples per step", "  in the first step", "  number of sizes")
    assert [rows[name] for name in names] == ["8", "4", "2"]


def test_a_plan_as_json(run_file, capsys):
    assert main(["plan", run_file, "--json", "--ranks", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_microbatches"] == 4 and facts["shape"]["padded_vocab_size"] == 384
    assert facts["activation_bytes"] > 0 and facts["state_bytes"] > 0 and facts["kernels"]["cpu"]


def test_a_plan_lists_the_layouts_of_gpus(run_file, capsys):
    words = ["plan", run_file, "--gpus", "8", "--memory", "80", "--device", "H200", "train.global_batch=16"]
    assert main(words) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head == "8 x H200 of 80 GiB on 1 node; estimates"
    assert columns.split()[:6] == ["tp", "cp", "pp", "dp", "bubble", "tokens/s"]
    works = [row for row in rows if row.split()[-1].startswith("train.micro_batch=")]
    assert works and all(math.prod(map(int, row.split()[:4])) == 8 for row in rows)
    assert len(works) < len(rows) and "model.num_heads" in rows[-1], "those that do not work say why"
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["layouts"]
    pasted = works[0].split("  ")[-1].split()
    assert main(["plan", run_file, "--ranks", "8", "train.global_batch=16", "--json", *pasted]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {name: plan[name] for name in ("tp", "cp", "pp", "dp", "micro_batch")} == {
        name: facts[0][name] for name in ("tp", "cp", "pp", "dp", "micro_batch")
    }
    assert len(facts) == len(rows) and facts[0]["tokens_per_s"] >= facts[1]["tokens_per_s"] > 0
    assert set(facts[0]["time_s"]) >= {"products", "attention", "tensor_parallel"} and not facts[0]["problem"]
    assert main([*words, "--json", "--link", "4.5"]) == 0  # a hundredth of an H200's
    slow = json.loads(capsys.readouterr().out)["layouts"]
    shared, slowly = (next(one for one in each if one["tp"] == 2 and one["time_s"]) for each in (facts, slow))
    assert slowly["time_s"]["tensor_parallel"] > shared["time_s"]["tensor_parallel"] > 0  # most of it is starts


def test_what_no_layout_mends_is_an_error_and_no_table(run_file, capsys):
    with Path(run_file).open("a") as file:
        file.write("[mesh]\ntp = 3\n")  # another one is found
    assert main(["plan", run_file, "--gpus", "8", "run.folder="]) == 2
    out, err = capsys.readouterr()
    assert not out and err.splitlines()[-1].startswith(f"mtrain: error: {run_file}: run.folder is empty; set it to")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--memory", "80"], "--memory needs --gpus N"),
        (["--gpus", "6", "--nodes", "4"], "the GPUs cannot be divided over the machines"),
        (["--gpus", "0"], "--gpus is too small\n  found: 0\n  expected: 1 or more"),
        (["--gpus", "8", "--schedule"], "--schedule draws one layout, and --gpus lists all of them\n  try: leave"),
        (
            ["--gpus", "8", "mesh.tp=4", "train.micro_batch=2", "train.steps=5"],
            "--gpus tries every mesh, microbatch and recomputation, so mesh.tp=4 train.micro_batch=2 has no effect"
            "\n  try: leave it out, or plan one layout: mtrain plan RUN "
            "--ranks 8 mesh.tp=4 train.micro_batch=2 train.steps=5\n",
        ),
        (["--gpus", "8", "--device", "T4"], "unknown --device T4"),
        (["--gpus", "8", "--memory", "-1"], "--memory is -1.0"),
        (["--gpus", "8", "--network", "nan"], "--network is nan"),
        (["--gpus", "8", "--link", "0"], "--link is 0"),
        (["--gpus", "8", "--launch", "-1"], "--launch is -1"),
        (["--link", "64"], "--link needs --gpus N"),
        (["--gpus", "8", "--ranks", "8"], "--ranks plans one layout, and --gpus lists all of them"),
        (["--layouts"], "--layouts needs --ranks N or --gpus N"),
        (["--layouts", "--gpus", "0"], "--gpus is too small"),
        (["--ranks", "0"], "--ranks is too small\n  found: 0"),
    ],
)
def test_hardware_that_cannot_be(words, text, run_file, capsys):
    assert main(["plan", run_file, *words]) == 2
    assert capsys.readouterr().err.startswith(f"mtrain: error: {text.replace('RUN', run_file)}")


def test_a_plan_without_data_or_vocabulary_is_refused(run_file, capsys):
    assert main(["plan", run_file, "model.vocab_size=0"]) == 2
    assert "no-such-blend.json" in capsys.readouterr().err


def test_generate_and_report_want_a_run(tmp_path, capsys):
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "is not a model that mtrain can read" in capsys.readouterr().err
    (tmp_path / "checkpoints").mkdir()
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert "there is no checkpoint 'latest'" in err and "try: give the folder of a run that has trained" in err
    (tmp_path / "checkpoints").rmdir()
    assert main(["generate", str(tmp_path), "--top-p", "2"]) == 2
    assert "top_p=2.0" in capsys.readouterr().err
    for name in ("mix.json", "corpus.idx"):
        (tmp_path / name).touch()
        data = str(tmp_path / name).removesuffix(".idx")
        assert main(["report", data]) == 2
        assert f"try: if it is a corpus or blend, mdata report {data}\n" in capsys.readouterr().err
    for name, fix in (
        ("run.toml", "give the folder of a run, which"),
        ("corpus.bin", f"if it is a corpus or blend, mdata report {tmp_path}/corpus\n"),
    ):
        (tmp_path / name).touch()
        assert main(["report", str(tmp_path / name)]) == 2
        assert f"{name} is a file, not a run folder\n  try: {fix}" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main(["report", str(tmp_path / "plan.json"), str(tmp_path / "mix.json")]) == 2
    assert f"mix.json is a file, not a run folder\n  try: mtrain report {tmp_path}\n" in capsys.readouterr().err


@pytest.mark.parametrize("pp", ["2", "0", "-1"])
def test_generate_says_how_to_start_pipeline_ranks(pp, tmp_path, capsys):
    """The command has no key of a mesh."""
    assert main(["generate", str(tmp_path), "--pp", pp]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"mtrain: error: --pp {pp} cannot divide the layers over 1 rank\n")
    assert f"try: mtrain generate {tmp_path} --nproc 2 --pp 2, or leave them out" in message
    assert "mesh." not in message


def test_the_result_says_what_to_do_next(tmp_path):
    checkpoint, folder = tmp_path / "step-9", str(tmp_path / "a run")
    result = TrainResult(9, 1.23456, {"prose": 2.0}, {"late": 3.0}, checkpoint)
    nothing = dataclasses.replace(result, loss=float("nan"))
    assert result_text(nothing, folder).startswith("step 9, none of its tokens counts in the loss")
    assert "generate" not in result_text(result, folder), "data without a tokenizer"
    Path(folder).mkdir()
    Path(folder, "tokenizer_facts.json").touch()
    text = result_text(result, folder)
    assert text.splitlines() == [
        "step 9, training loss 1.2346 nats per token",
        "validation loss prose: 2.0000",
        "test loss late: 3.0000",
        f"checkpoint: {checkpoint}",
        f"next: mtrain generate '{folder}'",
    ]
    assert result_text(result, folder, kind="chat").endswith(f"next: mtrain chat '{folder}'")
    encoder = result_text(result, folder, family="bert")
    assert encoder.endswith(f"next: mtrain generate '{folder}' --prompt 'The capital of [MASK] is Paris.'")
    again = result_text(TrainResult(9, None, {}, {}, checkpoint), "runs/a")
    expected = "step 9 is already done; to train further, raise train.steps and optimizer.decay_steps"
    assert again.splitlines()[0] == expected
    again = result_text(TrainResult(9, None, {}, {}, checkpoint), "runs/a", unit="tokens")
    assert again.splitlines()[0] == expected.replace("steps", "tokens")


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two corpora and run.toml: tp 2 with sequence parallelism."""
    folder = tmp_path_factory.mktemp("mtrain")
    texts = {name: write_jsonl(folder / f"{name}.jsonl", seed) for seed, name in enumerate(("train", "valid"))}
    corpora = make_corpora(folder, texts)
    config = make_config(folder / "run", blend=corpora["train"], valid=[corpora["valid"]], steps=6)
    (folder / "run.toml").write_text(dump_config(config))
    return folder


def mtrain(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cli.mtrain", *words]
    pipe = subprocess.PIPE
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@pytest.mark.slow
def test_a_run_of_two_ranks_gives_its_result_as_json(real_run, capfd):
    code = main(["train", str(real_run / "run.toml"), "--nproc", "2", "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    facts = json.loads(out)
    assert facts["step"] == 6 and list(facts["valid"]) == ["valid"]
    assert Path(facts["checkpoint"]).is_dir()
    steps = [line.split(" | ")[0] for line in err.splitlines() if not line.startswith("mtrain: ")]
    assert steps == [f"step {step}/6" for step in range(1, 7)]
    assert err.count(" parameters in fp32 on 2 ranks (tp 2 x dp 1, sequence parallel), cpu") == 1
    assert [line["step"] for line in read_metrics(real_run / "run")] == list(range(1, 7))
    assert len(json.loads((real_run / "run" / "ranks.json").read_text())) == 2


@pytest.mark.soak  # in `make test` those of tests/cli/test_mtrain_tasks.py
def test_a_run_of_two_ranks_has_no_error_if_the_reader_of_its_result_has_gone(real_run, tmp_path):
    folder = tmp_path / "run"
    process = mtrain("train", str(real_run / "run.toml"), "--nproc", "2", f"run.folder={folder}", "train.steps=1")
    assert process.stdout and process.stderr
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(120) == 0 and "error" not in errors
    assert (folder / "checkpoints" / "step-1").is_dir()


@pytest.mark.slow
def test_a_failing_rank_says_why_once(real_run, tmp_path, capfd):
    blocked = tmp_path / "run" / ".lock"
    blocked.mkdir(parents=True)
    code = main(["train", str(real_run / "run.toml"), "--nproc", "2", f"run.folder={blocked.parent}"])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(f"mtrain: error: {blocked}: Is a directory")
    assert len(err.splitlines()) <= 4


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_no_rank(real_run, tmp_path):
    folder = tmp_path / "run"
    process = mtrain("train", str(real_run / "run.toml"), "--nproc", "2", f"run.folder={folder}", "train.steps=99999")
    while len(read_metrics(folder)) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = children_of(process.pid)
    assert len(children) >= 2
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    newest = (folder / "checkpoints" / "latest").read_text()
    goes_on = f"the same command continues from {folder}/checkpoints/{newest}\n"
    assert (process.returncode, out) == (130, "")
    assert err.endswith(f"\n{goes_on}mtrain: interrupted\n") and "Traceback" not in err
    assert newest == f"step-{read_metrics(folder)[-1]['step']}"
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert not list(folder.rglob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGTERM, 75, "stopped by SIGTERM"),
        (signal.SIGKILL, 5, "mtrain: error: rank 1 was killed by SIGKILL\n  try: "),
    ],
)
@pytest.mark.soak  # in `make test` those of tests/trainer/run/test_launch.py and of `mtrain serve`
def test_a_rank_that_is_ended_from_outside_is_told(real_run, tmp_path, number, code, text):
    """Whatever the rank that lost it complains of."""
    folder = tmp_path / "run"
    process = mtrain("train", str(real_run / "run.toml"), "--nproc", "2", f"run.folder={folder}", "train.steps=99999")
    while len(read_metrics(folder)) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = children_of(process.pid)
    (rank,) = (pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(rank, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, ""), err
    assert text in err and "this is a bug in" not in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "nproc", "text"),
    [
        pytest.param(signal.SIGTERM, 75, "2", "error: stopped by", marks=pytest.mark.soak),
        (signal.SIGINT, 130, "1", "interrupted"),
    ],
)
def test_a_run_without_an_interval_is_saved_when_it_is_stopped(number, code, nproc, text, real_run, tmp_path):
    """The command alone gets the signal, as from a scheduler, and says so; the same command then does the rest."""
    folder = tmp_path / "run"
    words = ["train", str(real_run / "run.toml"), "--nproc", nproc, f"run.folder={folder}", f"mesh.tp={nproc}"]
    words += ["mesh.sequence_parallel=false", "checkpoint.interval=0", "checkpoint.minutes=0"]
    process = mtrain(*words, "train.steps=99999")
    while len(read_metrics(folder)) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, ""), err
    (saved,) = (folder / "checkpoints").glob("step-*")
    before = read_metrics(folder)
    step = int(saved.name.removeprefix("step-"))
    assert before[-1]["step"] == step and f"\nthe same command continues from {saved}\nmtrain: {text}" in err
    assert main([*words, f"train.steps={step + 1}"]) == 0
    assert read_metrics(folder)[:-1] == before and read_metrics(folder)[-1]["step"] == step + 1


@pytest.mark.slow
def test_a_damaged_checkpoint_is_exit_4(real_run, tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["train", str(real_run / "run.toml"), "--nproc", "1", f"run.folder={folder}", "mesh.tp=1"]
    words += ["mesh.sequence_parallel=false", "train.eval_samples=2", "optimizer.min_lr=1e-5"]
    assert main([*words, "train.steps=1"]) == 0 and main([*words, "train.steps=2"]) == 0
    path = folder / "checkpoints" / "step-2" / "rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    capsys.readouterr()
    assert main([*words, "train.steps=3"]) == 4
    error = capsys.readouterr().err
    assert f"mtrain: error: {path} is damaged" in error and "write step-1 into" in error
    (folder / "checkpoints" / "latest").write_text("step-1")
    assert main([*words, "train.steps=3"]) == 0


def test_a_plan_draws_its_schedule(run_file, capsys):
    words = ["plan", run_file, "--ranks", "2", "mesh.pp=2", "--schedule"]
    assert main(words) == 0
    out = capsys.readouterr().out
    lines = out.split("\n\n")[1].splitlines()
    assert lines[0] == "schedule 1f1b, 4 microbatches"
    assert lines[1].startswith("rank 0 | F0 F1 ") and lines[2].startswith("rank 1 | .  F0 ")
    assert lines[3].startswith("bubble: ") and lines[4].startswith("rank 0: 1 layer, ")
    idle = re.findall(r"idle (\S+%)", out)
    assert len(idle) == 2 and f"is idle for {max(idle, key=lambda text: float(text[:-1]))} of the step" in lines[3]
    assert main([*words[:-1], "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["parameters_per_stage"]) == 2 and facts["bubble"] > 0


@pytest.mark.parametrize(
    ("error", "for_good"),
    [
        (StoppedAtTimeError("at its time"), True),
        (LastTimeError("at run.exit_at"), True),
        (SupersededError("by another job"), True),
        (TooManyRestartsError("three"), True),
        (DivergedError("ten skipped steps"), True),
        (ReplacedError("by the same job"), False),
        (StoppedError("by SIGTERM, which torchrun sends before a restart"), False),
        (UsageError("the lock is held, for as long as torchrun waits for its ranks"), False),
        (ResourceError("a rank is lost"), False),
    ],
)
def test_only_what_would_end_again_keeps_a_launcher_from_starting_ranks_again(error, for_good, tmp_path, monkeypatch):
    left = list[BaseException]()
    monkeypatch.setenv(END_FILE, str(tmp_path / "end"))
    monkeypatch.setattr("trainer.parallel.world.end_for_good", lambda env, error: left.append(error))
    with pytest.raises(type(error)), _ending_for_good():
        raise error
    assert left == [error] * for_good
    # At Slurm's time limit the batch script queues the job again.
    assert (tmp_path / f"end{FINAL}").exists() == (for_good and type(error) is not StoppedAtTimeError)
