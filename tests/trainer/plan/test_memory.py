"""Out of memory in every phase, from every allocator: the phase, the amount, what to change, exit code 5."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.one_gpu_options import row_config
from cli.mtrain import main
from mdata import ResourceError
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_corpora, write_jsonl
from tests.trainer.engines import layouts, small_config
from tests.trainer.plan.test_plan import config as sound
from trainer.checkpoint.background import HostCopies
from trainer.config.parse import dump_config, parse_config
from trainer.config.sections import MeshSection, PrecisionSection
from trainer.errors import OutOfMemoryError, amount_asked, is_out_of_memory, out_of_memory_in, size_text
from trainer.models.gpt.model import GPT
from trainer.optim.optimizer import Optimizer
from trainer.plan.memory import activation_bytes, explained, rank_bytes, state_bytes
from trainer.plan.plan import make_plan
from trainer.run import train as train_module
from trainer.run.engine import Engine

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.51 GiB is "
    "free. Process 7 has 138.29 GiB memory in use. Of the allocated memory 130.10 GiB is allocated by PyTorch"
)
TOO_MUCH = 1 << 50  # bytes; no address space of today has room for them


def _torch_on_a_cpu() -> None:
    torch.empty(TOO_MUCH, dtype=torch.int8)


def _numpy() -> None:
    np.empty(TOO_MUCH, dtype=np.int8)


def _cuda() -> None:
    raise torch.OutOfMemoryError(CUDA)


def _library() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    ("use", "found"),
    [
        (_torch_on_a_cpu, "tried to allocate 1.00 PiB"),
        (_numpy, "tried to allocate 1.00 PiB"),
        (_cuda, "tried to allocate 2.00 GiB, 1.51 GiB of the GPU's 139.80 GiB free, 130.10 GiB held by PyTorch"),
        (_library, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
    ],
)
def test_every_allocator_is_understood(use, found):
    with pytest.raises(ResourceError) as raised, out_of_memory_in("a phase", fix="less"):
        use()
    assert str(raised.value).startswith(f"out of memory in a phase\n  found: {found}")
    assert str(raised.value).endswith("\n  try: less")
    assert is_out_of_memory(raised.value.__cause__)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("k"), ResourceError("disk full")])
def test_other_errors_go_through(error):
    with pytest.raises(type(error)) as raised, out_of_memory_in("a phase", fix="less"):
        raise error
    assert raised.value is error


def test_the_innermost_phase_speaks_and_the_outer_adds_what_it_knows():
    config = sound(model={"vocab_size": 1000})
    plan = make_plan(config, 4, facts=None)
    inside, outside = out_of_memory_in("inside", fix="less"), out_of_memory_in("outside", fix="no")
    with pytest.raises(OutOfMemoryError) as raised, explained(config, plan, rank=3), outside, inside:
        raise MemoryError
    what, found, expected, fix = str(raised.value).splitlines()
    assert what == "rank 3 of 4: out of memory in inside"
    assert found == "  found: MemoryError" and fix == "  try: less"
    needs = size_text(state_bytes(config, plan))
    assert expected.startswith(
        f"  expected: room for {needs} of weights, gradients and optimizer state per rank, and for"
    )
    about = size_text(activation_bytes(config, plan))
    assert f"and for about {about} of activations of 2 x 32 tokens" in expected
    assert expected.endswith('recompute.mode = "none")')
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # ranks send errors to each other


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("Tried to allocate 20.00 MiB.", "20.00 MiB"),
        ("you tried to allocate 4000000000000 bytes. Error code 12", "3.64 TiB"),
        ("Unable to allocate 7.28 TiB for an array", "7.28 TiB"),
        ("no number", None),
    ],
)
def test_the_amount_is_read(text, amount):
    assert amount_asked(text) == amount


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (1 << 31, "2.00 GiB")]
)
def test_sizes_are_told_in_the_unit_that_fits(count, text):
    assert size_text(count) == text


def _held(context, config):
    engine = layouts(context, config)
    kept = (engine.buffers.parameters.values, engine.buffers.gradients.values)
    tensors = [*kept, *engine.optimizer.outside_buffers]
    return sum(t.numel() * t.element_size() for t in tensors), state_bytes(config, engine.plan)


@pytest.mark.parametrize(
    ("ranks", "tp", "dtype", "rule", "gradients", "bytes_each"),
    [
        (1, 1, "fp32", "adamw", "main", 8 + 8),
        (2, 2, "bf16", "adamw", "main", 6 + 12),
        (2, 1, "bf16", "adamw", "main", 6 + 12 / 2),
        (4, 1, "bf16", "adamw", "params", 4 + 12 / 4),
        (2, 1, "fp16", "adamw", "params", 4 + 12 / 2),
        (2, 1, "fp64", "adamw", "main", 16 + 16 / 2),
        (1, 1, "bf16", "muon", "main", None),
        (2, 1, "fp32", "muon", "main", None),
    ],
)
def test_the_state_is_what_an_engine_holds(ranks, tp, dtype, rule, gradients, bytes_each):
    """But for the padding of its buffers; under Muon of the ranks' mean, as moments of a matrix are half as many."""
    config = replace(small_config("llama", dtype=dtype), mesh=MeshSection(tp=tp))
    config = replace(config, optimizer=replace(config.optimizer, name=rule))
    config = replace(config, precision=PrecisionSection(dtype=dtype, gradients=gradients))
    results = run_ranks(_held, ranks, config)
    if rule == "muon":
        results = [(sum(held for held, _ in results) / ranks, results[0][1])]
    for held, said in results:
        assert said <= held <= 1.05 * said
        if bytes_each is not None:
            assert said == pytest.approx(bytes_each * make_plan(config, ranks, facts=None).parameters_per_rank)


def _wide(**sections):
    model = {"vocab_size": 1024, "num_layers": 4, "bias": True, "norm": "layernorm"}
    return sound(**{"mesh": {"tp": 1}, "model": model, "precision": {"dtype": "bf16"}, **sections})


def test_a_rank_needs_all_that_a_step_uses():
    """By hand: FP8 weights and their transposes, shared memory of tp ranks, whole buckets, and activations."""

    def needs(ranks, **sections):
        run = _wide(**sections)
        plan = make_plan(run, ranks, facts=None)
        (rank,) = rank_bytes(run, plan)
        assert rank.total == rank.state + activation_bytes(run, plan) and rank.activations > 0
        return rank.state, plan

    alone, plan = needs(1)
    attention, mlp = 64 * (64 + 32 + 32 + 64), 3 * 64 * 192
    float8 = {"dtype": "bf16", "fp8": "delayed"}
    assert needs(1, precision=float8)[0] - alone == 2 * 4 * (attention + mlp)
    assert needs(1, precision={**float8, "fp8_first_last_bf16": 1})[0] - alone == 2 * 2 * (attention + mlp)
    assert needs(1, optimizer={"sharding": "parameters"})[0] == alone, "nobody to share with"
    whole, turns = plan.parameters_per_rank, {"overlap_grad_reduce": False, "overlap_param_gather": False}
    largest = 1024 * 64  # the embedding, which is also the head
    sharded = needs(4, optimizer={"sharding": "parameters", **turns})[0]
    assert sharded == pytest.approx(18 * whole / 4 + (4 + 2) * largest, rel=1e-3)


# GiB that one microbatch added at most, on an H200 in bf16: rows of benchmarks/one_gpu_options.py.
MEASURED = {
    ("llama1b", "none"): 9.883,
    ("llama1b", "selective"): 6.883,
    ("llama1b", "full"): 1.829,
    ("llama1b", "full-4"): 2.817,
    ("llama1b", "block-8"): 5.719,
    ("gpt1.3b", "none"): 12.334,
    ("gpt1.3b", "selective"): 7.834,
    ("gpt1.3b", "full"): 2.126,
}


@pytest.mark.parametrize(("shape", "row"), MEASURED)
def test_the_estimate_of_activations_is_what_a_gpu_held(shape, row):
    config = row_config(row, shape)
    estimate = activation_bytes(config, make_plan(config, 1, facts=None)) / 2**30
    assert estimate == pytest.approx(MEASURED[shape, row], rel=0.01)


PIPELINES, EXPERTS = "pipeline_model_parallel_size", "num_experts"


def test_the_state_is_megatrons_by_its_own_formula(oracles):
    """Theirs leaves out biases and positions. Its activations are those of other layers: ours are measured instead."""
    told = json.loads((oracles / "oracle" / "model" / "memory.json").read_text())
    rows = [row for row in told["rows"] if not {PIPELINES, EXPERTS} & set(row["changed"])]
    assert len(rows) == 4 and sum("data_parallel_size" in row["changed"] for row in rows) == 2
    for row in rows:
        settings = told["base"] | row["changed"]
        tp, dp = settings["tensor_model_parallel_size"], settings["data_parallel_size"]
        untied, vocab_size, width = (
            settings[key] for key in ("untie_embeddings_and_output_weights", "padded_vocab_size", "hidden_size")
        )
        model = {
            "num_layers": settings["num_layers"],
            "hidden_size": width,
            "num_heads": settings["num_attention_heads"],
            "num_kv_heads": settings["num_query_groups"],
            "ffn_hidden_size": settings["ffn_hidden_size"],
            "vocab_size": vocab_size,
            "position": "rope",
            "bias": False,
            "norm": settings["normalization"].lower(),
            "activation": "swiglu" if settings["swiglu"] else "gelu",
            "tie_embeddings": not untied,
        }
        config = sound(model=model, mesh={"tp": tp, "sequence_parallel": tp > 1}, train={"micro_batch": 1})
        config = replace(config, precision=PrecisionSection(dtype="bf16"))
        plan = make_plan(config, tp * dp, facts=None)
        padding = (plan.padded_vocab_size - vocab_size) * width * (2 if untied else 1) // tp
        each = 6 + 12 / dp
        assert state_bytes(config, plan) == row["weight_and_optimizer_bytes"] + padding * each, row["changed"]


PHASES = {
    "setting up the model and its optimizer": (Optimizer, "publish"),
    "the forward and backward passes": (GPT, "forward"),
    "the optimizer's update": (Optimizer, "_update"),
    "the forward pass of an evaluation": (Engine, "evaluate"),
    "copying the state for a checkpoint": (HostCopies, "take"),
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    corpus = make_corpora(folder, {"text": write_jsonl(folder / "text.jsonl", 1)})["text"]
    tables = {
        "run": {"folder": str(folder / "run")},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
        "data": {"blend": str(corpus), "valid": [str(corpus)], "allow_overlap": True},
        "train": {"sequence_length": 16, "global_batch": 2, "micro_batch": 2, "steps": 1},
        "optimizer": {"lr": 1e-2},
    }
    config, problems = parse_config(tables)
    assert config is not None, problems
    (folder / "run.toml").write_text(dump_config(config))
    return folder / "run.toml"


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_of_a_run_is_named(phase, run_file, tmp_path, monkeypatch, capsys):
    owner, name = PHASES[phase]
    if name == "evaluate":
        real = GPT.forward
        monkeypatch.setattr(
            GPT, "forward", lambda self, *a, **k: real(self, *a, **k) if torch.is_grad_enabled() else _torch_on_a_cpu()
        )
    else:
        monkeypatch.setattr(owner, name, lambda *a, **k: _torch_on_a_cpu())
    code = main(["train", str(run_file), f"run.folder={tmp_path}/run", "--nproc", "1"])
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    begin = next(i for i, line in enumerate(err) if line.startswith("mtrain: error"))
    assert (code, err[begin]) == (5, f"mtrain: error: out of memory in {phase}")
    assert err[begin + 1] == "  found: tried to allocate 1.00 PiB"
    assert err[begin + 2].startswith("  expected: room for ") and err[begin + 3].startswith("  try: ")


def test_a_gpu_out_of_memory_names_the_keys_with_estimates(run_file, tmp_path, monkeypatch, capsys):
    """What was asked for and held, the plan's estimate, and for each key what the activations would be."""
    monkeypatch.setattr(GPT, "forward", lambda *a, **k: _cuda())
    words = ["train", str(run_file), f"run.folder={tmp_path}/run", "--nproc", "1", "train.global_batch=6"]
    assert main([*words, "train.micro_batch=6", "recompute.mode=selective"]) == 5
    err = capsys.readouterr().err
    _, found, expected, fix = err[err.index("mtrain: error") :].splitlines()
    assert (
        found
        == "  found: tried to allocate 2.00 GiB, 1.51 GiB of the GPU's 139.80 GiB free, 130.10 GiB held by PyTorch"
    )
    assert "of weights, gradients and optimizer state per rank, and for about" in expected
    settings = re.findall(r"(\S+) \(activations: about ([\d.]+) KiB\)", fix)
    assert [setting for setting, _ in settings] == ["train.micro_batch=3", "recompute.mode=full"]
    now = float(re.search(r"for about ([\d.]+) KiB of activations of 6 x 16 tokens", expected)[1])
    assert all(float(less) < now for _, less in settings)


def test_a_model_that_no_machine_can_hold(run_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_module, "check_target", lambda *_: None)  # its checkpoint fits on no disk either
    words = ["train", str(run_file), f"run.folder={tmp_path}/run", "--nproc", "1", "model.hidden_size=10000000"]
    assert main(words) == 5
    err = capsys.readouterr().err
    assert "out of memory in setting up the model and its optimizer\n  found: " in err
    assert " PiB of weights, gradients" in err
