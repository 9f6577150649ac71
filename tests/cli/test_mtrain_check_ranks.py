"""`mtrain check --ranks`: a rehearsal of ranks that do not exist here; missing memory gives exit code 5."""

from __future__ import annotations

import json

import pytest

from cli.mtrain import main
from tests.cli.test_mtrain import RUN, run_file  # noqa: F401 (a fixture)
from trainer.kernels import apex
from trainer.plan import kernel_choice

MOCK = ["data.blend=mock", "model.num_layers=4", "mesh.tp=2", "mesh.pp=2"]


def test_sixteen_ranks_are_rehearsed(run_file, capsys):  # noqa: F811
    assert main(["check", run_file, "--ranks", "16", *MOCK, "train.global_batch=16"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("no problems with --ranks 16")
    assert [row.split()[0] for row in rows] == ["data", "shapes", "schedule", "memory", "save"]
    assert "tp 2 x cp 1 x dp 4 x pp 2" in rows[1] and "32 messages on 16 links" in rows[2]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_step_of_deepseek_v3_is_rehearsed_at_2048_ranks(tmp_path, capsys):
    """Experts over ep, attention over tp with sequence parallelism, and a further layer on the last of 16 stages."""
    path = tmp_path / "v3.toml"
    path.write_text(
        '[run]\nfolder = "v3"\n[model]\npreset = "deepseek-v3"\n[data]\nblend = "mock"\n[optimizer]\nlr = 2.2e-4\n'
        "[mesh]\ntp = 2\nsequence_parallel = true\npp = 16\nep = 32\netp = 1\n"
        "[train]\nsequence_length = 4096\nglobal_batch = 1024\nmicro_batch = 1\nsteps = 10\n"
        '[precision]\ndtype = "bf16"\n[recompute]\nmode = "full"\n'
    )
    assert main(["check", str(path), "--ranks", "2048", "--memory", "80"]) == 0
    rows = capsys.readouterr().out
    assert "no problems with --ranks 2048" in rows and "dp 64 x pp 16 hold the 682,636,472,320 parameters" in rows


FP8 = ["precision.fp8=delayed", "precision.dtype=bf16", "model.hidden_size=64"]
TP = ["mesh.tp=2", "mesh.sequence_parallel=true"]


@pytest.mark.parametrize(
    "settings",
    [
        *([f"optimizer.sharding={name}"] for name in ("none", "state", "gradients", "parameters")),
        ["optimizer.sharding=parameters", "mesh.schedule=zb_v", "precision.dtype=bf16"],
        ["optimizer.sharding=gradients", "mesh.schedule=interleaved", "train.global_batch=16"],
        FP8,
        [*FP8, "optimizer.sharding=parameters", "precision.gradients=params"],
        [*TP, "precision.dtype=bf16"],
    ],
    ids=" ".join,
)
def test_a_rehearsal_needs_the_memory_that_the_plan_says(
    settings,
    run_file,  # noqa: F811
    capsys,
):
    """But for the padding of buffers, which a rehearsal counts."""
    words = [run_file, "data.blend=mock", "model.num_layers=4", "model.vocab_size=2000", "mesh.pp=2", *settings]
    assert main(["check", *words, "--ranks", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["plan", *words, "--ranks", "8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    planned, activations = plan["bytes_per_pipeline_rank"], plan["activation_bytes_per_stage"]
    states = [total - more for total, more in zip(planned, activations, strict=True)]
    assert max(states) == plan["state_bytes"] and min(activations) > 0
    for rehearsed, total, state in zip(found["bytes_per_pipeline_rank"], planned, states, strict=True):
        assert total <= rehearsed <= total + 0.03 * state


def test_what_is_lacking_is_told(
    run_file,  # noqa: F811
    capsys,
    monkeypatch,
):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"total": 1000, "free": 1000}))
    assert main(["check", run_file, "--ranks", "4", *MOCK, "--memory", "0.0001", "--json"]) == 5
    facts = json.loads(capsys.readouterr().out)
    (memory,), (disk,) = facts["lacks"], facts["lacks_here"]
    assert "GiB" not in memory.split(";")[0] and "(94%) of --memory 0.0001 that a run can use" in memory
    assert "a checkpoint does not fit" in disk
    # The disk is this machine's, the ranks are another's.
    assert main(["check", run_file, "--ranks", "4", *MOCK]) == 0
    told = capsys.readouterr().out
    assert "no problems" in told and "\nnote      on this machine: a checkpoint does not fit" in told
    assert main(["check", run_file, "data.blend=mock", "--nproc", "2"]) == 5
    head, disk = capsys.readouterr().out.splitlines()[:2]
    assert head.endswith("too little memory or disk with --nproc 2") and "a checkpoint does not fit" in disk


def test_a_folder_that_only_this_machine_cannot_write_is_a_note(
    run_file,  # noqa: F811
    capsys,
    monkeypatch,
):
    """An address, which no machine can write as a run folder, is a problem."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main(["check", run_file, "--ranks", "4", *MOCK, "run.folder=/lustre/a"]) == 0
    assert (
        "\nnote      on this machine: run.folder='/lustre/a' is not writable: no permission" in capsys.readouterr().out
    )
    assert main(["check", run_file, "data.blend=mock", "--nproc", "2", "run.folder=/lustre/a"]) == 2
    assert main(["check", run_file, "--ranks", "4", *MOCK, "run.folder=s3://bucket/a"]) == 2
    assert "is an address" in capsys.readouterr().err


def test_a_rehearsal_and_a_list_of_layouts_have_the_same_limit(
    run_file,  # noqa: F811
    capsys,
):
    """CUDA, NCCL and fragmentation take a part of the memory that a data sheet names."""
    words = [run_file, "data.blend=mock", "model.hidden_size=512"]
    assert main(["check", *words, "--ranks", "1", "--json"]) == 0
    (needed,) = json.loads(capsys.readouterr().out)["bytes_per_pipeline_rank"]
    for part, code in ((0.95, 5), (0.93, 0)):  # of the memory
        memory = ["--memory", str(needed / part / 2**30)]
        assert main(["check", *words, "--ranks", "1", *memory]) == code, part


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--memory", "80"], "--memory needs --ranks N"),
        (["--ranks", "4", "--memory", "-1"], "--memory is -1.0\n  expected: a number above 0, in GiB per GPU"),
        (["--ranks", "4", "--memory", "nan"], "--memory is nan"),
        (["--ranks", "0"], "--ranks is the number of ranks of the whole run"),
        (["--ranks", "4", "--nproc", "4"], "--ranks is the number of ranks of the whole run"),
        (["--ranks", "3", "mesh.tp=2"], "3 ranks are not a multiple of mesh.tp=2"),
    ],
)
def test_ranks_that_cannot_be(words, text, tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path))
    assert main(["check", str(path), "data.blend=mock", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_named_kernel_needs_its_library_where_the_run_is(run_file, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(kernel_choice, "_module", lambda name, key: f"no_such_{name}")
    words = [run_file, "data.blend=mock", "kernels.scan=triton", "kernels.norm=apex"]
    refusals = []
    for command in ("check", "train"):
        assert main([command, *words]) == 2
        refusals.append(capsys.readouterr().err)
    assert refusals[0] == refusals[1], "before a rank is started"
    for key, name in (("scan", "triton"), ("norm", "apex")):
        assert f'kernels.{key}="{name}" cannot be used: no_such_{name} is not installed' in refusals[0]
    assert main(["check", *words, "--ranks", "2"]) == 0
    assert "note      on this machine: kernels.norm=" in capsys.readouterr().out


def test_the_extensions_of_apex_are_those_that_kernels_ask_for():
    assert kernel_choice.APEX_MODULES == apex.EXTENSIONS
