"""Checkpoints that Megatron-Core 0.16.1 itself reads and writes; skipped where its environment is not named.

MTRAIN_MEGATRON_PYTHON names the interpreter of an environment with megatron-core, psutil and torch; nothing of ours is
imported there. What it runs is megatron_core_side.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.mtrain import main
from tests.helpers.corpora import write_pair
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import microbatch, save_engine
from trainer.checkpoint.format import RunState
from trainer.config.parse import dump_config
from trainer.config.sections import OptimizerSection, RunSection, T5SamplesSection
from trainer.convert.compare import logits_of
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.model_keys import model_config
from trainer.models.stage import EncoderTokens
from trainer.parallel.mesh import mesh_of
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine

PYTHON = os.environ.get("MTRAIN_MEGATRON_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="MTRAIN_MEGATRON_PYTHON is not set (make megatron-test sets it)")
SIDE = Path(__file__).with_name("megatron_core_side.py")
ADAM = {"lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "clip": 1.0}
STEPS, ROWS, LENGTH, DECODER = 20, 4, 16, 10
MODELS = {
    "llama": (
        {"num_kv_heads": 2, "ffn_hidden_size": 40, "tie_embeddings": False, "position": "rope"},
        {
            "num_query_groups": 2, "ffn_hidden_size": 40, "normalization": "RMSNorm", "add_bias_linear": False,
            "gated_linear_unit": True, "activation": "silu", "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": False,
        },
    ),
    "gpt2": (
        {
            "position": "learned", "norm": "layernorm", "activation": "gelu_erf", "bias": True,
            "ffn_hidden_size": 64, "tie_embeddings": True,
        },
        {
            "ffn_hidden_size": 64, "normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False,
            "activation": "gelu", "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": True,
        },
    ),
}  # fmt: skip
MODELS["gpt2_1p"] = tuple(
    {**keys, more: True}
    for keys, more in zip(MODELS["gpt2"], ("norm_zero_centered", "layernorm_zero_centered_gamma"), strict=True)
)
# What Megatron-LM's trainer would have put beside it.
ARGUMENTS = {
    "llama": {"position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm", "num_query_groups": 2},
    "gpt2": {"position_embedding_type": "learned_absolute", "bias_gelu_fusion": False},
}
ARGUMENTS["gpt2_1p"] = ARGUMENTS["gpt2"] | {"apply_layernorm_1p": True}


# Models of other families: the same three, and as many layers in each stack.
OTHERS = {
    "bert": (
        {"family": "bert", "position": "learned", "norm": "layernorm", "activation": "gelu_erf", "bias": True,
         "ffn_hidden_size": 64, "bert": {"norm": "pre"}},
        {"family": "bert", "ffn_hidden_size": 64, "activation": "gelu", "position_embedding_type": "learned_absolute",
         "share_embeddings_and_output_weights": True},
    ),
    "t5": (
        {"family": "t5", "position": "learned", "norm": "layernorm", "activation": "gelu_erf", "bias": True,
         "ffn_hidden_size": 64, "num_layers": 5, "t5": {"encoder_layers": 3, "head_bias": True}},
        {"family": "t5", "ffn_hidden_size": 64, "activation": "gelu", "position_embedding_type": "learned_absolute",
         "share_embeddings_and_output_weights": True, "encoder_layers": 3},
    ),
}  # fmt: skip
MODELS_OF_ALL = {**MODELS, **OTHERS}
ARGUMENTS["bert"] = ARGUMENTS["gpt2"] | {"bert_binary_head": True}
ARGUMENTS["t5"] = ARGUMENTS["gpt2"] | {
    "num_layers": 3, "encoder_num_layers": 3, "decoder_num_layers": 2, "encoder_seq_length": LENGTH,
    "decoder_seq_length": DECODER,
}  # fmt: skip


def _config(name):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "vocab_size": 128, "max_position": LENGTH}
    config = model_config({**sizes, **MODELS_OF_ALL[name][0]}, where="", context=LENGTH)
    return _with_decoder(config) if name == "t5" else config


def _with_decoder(config):
    """Its length is an option of the data."""
    return replace(config, data=replace(config.data, t5=T5SamplesSection(decoder_length=DECODER)))


def _theirs(name):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 128}
    rotary = {"rotary_base": 10000} if name in MODELS else {}
    return {**sizes, "max_sequence_length": LENGTH, **rotary, **MODELS_OF_ALL[name][1]}


def _arguments(name):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "padded_vocab_size": 128}
    keys = MODELS_OF_ALL[name][0]
    sizes |= {"ffn_hidden_size": keys["ffn_hidden_size"], "max_position_embeddings": LENGTH}
    sizes |= {"seq_length": LENGTH, "global_batch_size": ROWS}
    sizes["untie_embeddings_and_output_weights"] = not keys.get("tie_embeddings", True)
    return {**sizes, "add_bias_linear": name != "llama", **ARGUMENTS[name]}


def _side(folder, told):
    """Run their program; what it wrote."""
    path = folder / "told.json"
    path.write_text(json.dumps({**told, "out": str(folder / "out")}))
    done = subprocess.run([PYTHON, SIDE, path], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "out"


def _data(folder, name="gpt2"):
    generator = torch.Generator().manual_seed(3)
    length = DECODER if name == "t5" else LENGTH
    ids = torch.randint(128, (STEPS, ROWS, length + 1), generator=generator)
    fields = {"tokens": ids[..., :-1].contiguous(), "labels": ids[..., 1:].contiguous()}
    if name in OTHERS:
        own, read = (torch.randint(3, n + 1, (STEPS, ROWS, 1), generator=generator) for n in (length, LENGTH))
        fields["padding_mask"] = (torch.arange(length) < own).long()
        fields["mask"] = fields["padding_mask"].float()
    if name == "bert":
        fields["mask"] *= torch.rand(ids[..., :-1].shape, generator=generator) < 0.4
        fields["types"] = fields["padding_mask"] * (torch.arange(length) >= own // 2)
        fields["swapped"] = torch.randint(2, (STEPS, ROWS), generator=generator)
    if name == "t5":
        fields["encoder"] = torch.randint(128, (STEPS, ROWS, LENGTH), generator=generator)
        fields["encoder_mask"] = (torch.arange(LENGTH) < read).long()
    torch.save(fields, folder / "data.pt")
    return folder / "data.pt"


def _microbatches(rows):
    """A step's rows, one in each."""
    for row in range(ROWS):
        of = {name: x[row : row + 1] for name, x in rows.items()}
        batch = microbatch(of["tokens"], of["labels"], of.get("mask", torch.ones(1, LENGTH)))
        if "padding_mask" in of:
            batch = replace(batch, lengths_B=of["padding_mask"].sum(1).int())
        if "types" in of:
            batch = replace(batch, types_BS=of["types"], swapped_B=of["swapped"])
        if "encoder" in of:
            batch = replace(batch, encoder=EncoderTokens(of["encoder"], of["encoder_mask"].sum(1).int()))
        yield batch


def _trained(context, config, data, *, first, last, load, save):
    """Losses of our steps; the checkpoint is `save`'s."""
    found = torch.load(data, weights_only=True)
    optimizer = OptimizerSection(lr=ADAM["lr"], weight_decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, clip_norm=1.0)
    config = replace(
        config,
        optimizer=optimizer,
        train=replace(config.train, global_batch=ROWS, steps=STEPS),
        run=RunSection(folder="unused", seed=9),
    )
    world = context.join(mesh_of(config, context.world))
    engine = Engine(config, make_plan(config, context.world, facts=None), world=world, fresh=load is None)
    if load is not None:
        engine.load(load)
    losses = []
    for number in range(first, last):
        batches = list(_microbatches({name: x[number] for name, x in found.items()}))
        losses.append(engine.step(batches, ADAM["lr"]).read().loss)
        if save is not None and number + 1 == STEPS // 2:
            run = RunState(number + 1, 40, "", {}, number + 1, dump_config(config))
            save_engine(engine, save / "checkpoints", run=run)
    return losses


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ["adam", "distributed", "mp_rank"])
def test_they_open_ours_with_equal_logits(name, form, tmp_path):
    data = _data(tmp_path)
    run_ranks(_ours_begun, 1, _config(name), data, tmp_path / "run")
    kind = "mp_rank" if form == "mp_rank" else "torch_dist"
    options = ConvertOptions(to=kind, **({} if form == "mp_rank" else {"optimizer_form": form}))
    convert(tmp_path / "run", tmp_path / "theirs", options=options)
    tokens = torch.load(data, weights_only=True)["tokens"][0]
    torch.save({"tokens": tokens}, tmp_path / "tokens.pt")
    told = {"checkpoint": str(tmp_path / "theirs"), "kind": kind, "model": _theirs(name)}
    found = torch.load(_side(tmp_path, {**told, "data": str(tmp_path / "tokens.pt")}))
    ours = logits_of(open_model(tmp_path / "run"), tokens)
    assert (found - ours).abs().max() < 2e-6 * max(1.0, ours.abs().max())


def _ours_begun(context, config, data, folder):
    return _trained(context, config, data, first=0, last=STEPS, load=None, save=folder)


@pytest.mark.parametrize("name", MODELS_OF_ALL)
def test_they_go_on_from_ours(name, tmp_path):
    data = _data(tmp_path, name)
    (ours,) = run_ranks(_ours_begun, 1, _config(name), data, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "theirs", options=ConvertOptions(to="torch_dist", optimizer_form="adam"))
    told = {"checkpoint": str(tmp_path / "theirs"), "kind": "torch_dist", "model": _theirs(name), "adam": ADAM}
    out = _side(tmp_path, {**told, "data": str(data), "steps": [STEPS // 2, STEPS]})
    theirs = json.loads(out.read_text())
    assert max(abs(a - b) for a, b in zip(ours[STEPS // 2 :], theirs, strict=True)) < 1e-4


def _ours_on(context, config, data, folder):
    return _trained(context, config, data, first=STEPS // 2, last=STEPS, load=folder, save=None)


@pytest.mark.parametrize("kind", ["torch_dist", "mp_rank"])
@pytest.mark.parametrize("name", MODELS_OF_ALL)
def test_ours_goes_on_from_theirs(name, kind, tmp_path):
    data = _data(tmp_path, name)
    told = {"model": _theirs(name), "adam": ADAM, "data": str(data), "steps": [0, STEPS], "kind": kind}
    told |= {"save_at": STEPS // 2, "save": str(tmp_path / "theirs"), "arguments": _arguments(name)}
    theirs = json.loads(_side(tmp_path, told).read_text())
    convert(tmp_path / "theirs", tmp_path / "run", options=ConvertOptions(to="mtrain"))
    folder = tmp_path / "run" / "checkpoints" / f"step-{STEPS // 2}"
    assert open_model(folder).states == ("weight", "exp_avg", "exp_avg_sq")
    config = open_model(folder).config
    (ours,) = run_ranks(_ours_on, 1, _with_decoder(config) if name == "t5" else config, data, folder)
    assert max(abs(a - b) for a, b in zip(ours, theirs[STEPS // 2 :], strict=True)) < 1e-4


# A run of Megatron-LM on .bin/.idx, in its own order.
WORDS = {
    "llama": "--group-query-attention --num-query-groups 2 --ffn-hidden-size 40 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights",
    "gpt2": "--ffn-hidden-size 64 --position-embedding-type learned_absolute",
}
WORDS["gpt2_1p"] = WORDS["gpt2"] + " --apply-layernorm-1p"
RUN = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 3e-3 --min-lr 3e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 4 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --split 1,0,0 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
    "--log-interval 1 --save-interval 10"
)
SCHEDULE = {
    "max_lr": 3e-3, "min_lr": 3e-4, "lr_warmup_steps": 4 * ROWS, "lr_decay_steps": STEPS * ROWS,
    "lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1,
}  # fmt: skip


@pytest.fixture
def corpus(tmp_path):
    """561 tokens: 20 steps of 64 are more than two epochs."""
    numbers = np.random.Generator(np.random.PCG64(5))
    lengths = [[int(n)] for n in numbers.integers(3, 40, 30)]
    total = sum(length for (length,) in lengths)
    write_pair(tmp_path / "text", lengths, tokens=numbers.integers(0, 127, total))
    told = {"prefix": str(tmp_path / "text"), "cache": str(tmp_path / "cache"), "length": LENGTH, "seed": 1234}
    return told | {"steps": STEPS, "rows": ROWS}


def _our_losses(name, corpus, folder, *words):
    """Train as the command line of Megatron-LM says; step -> loss."""
    command = f"{RUN} {WORDS[name]} --data-path {corpus['prefix']} --save {folder} {' '.join(words)}"
    config = Path(f"{folder}.toml")
    with config.open("w") as file, contextlib.redirect_stdout(file):
        assert main(["config", "--from-megatron", command]) == 0
    assert main(["train", str(config)]) == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


DECOUPLED = {"max_lr": 2e-2, "min_lr": 1e-3}
WITH_DECOUPLED = ["--decoupled-lr", "2e-2", "--decoupled-min-lr", "1e-3"]


@pytest.mark.parametrize("own", [{}, {"decoupled": DECOUPLED}], ids=["", "decoupled"])
@pytest.mark.parametrize("name", MODELS)
def test_ours_goes_on_with_a_run_of_theirs_on_its_own_files(name, own, corpus, tmp_path):
    """Moments, learning rates and place in the data: init_from is the folder that Megatron-Core wrote at step 10."""
    half = STEPS // 2
    told = {"model": _theirs(name), "adam": ADAM | own, "corpus": corpus, "schedule": SCHEDULE, "steps": [0, STEPS]}
    arguments = _arguments(name) | {"iteration": half, "consumed_train_samples": half * ROWS}
    told |= {"save_at": half, "save": str(tmp_path / "theirs"), "arguments": arguments, "kind": "torch_dist"}
    theirs = json.loads(_side(tmp_path, told).read_text())
    words = ["--load", str(tmp_path / "theirs"), *(WITH_DECOUPLED if own else [])]
    ours = _our_losses(name, corpus, tmp_path / "ours", *words)
    assert list(ours) == list(range(half + 1, STEPS + 1))
    assert max(abs(ours[step] - theirs[step - 1]) for step in ours) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_theirs_goes_on_with_a_run_of_ours_on_its_own_files(name, corpus, tmp_path):
    """Without --decoupled-lr: 0.16.1 cannot tell its own group from the other one in a checkpoint."""
    half = STEPS // 2
    ours = _our_losses(name, corpus, tmp_path / "ours")
    saved = tmp_path / "ours" / "checkpoints" / f"step-{half}"
    convert(saved, tmp_path / "theirs", options=ConvertOptions(to="torch_dist", optimizer_form="adam"))
    told = {"model": _theirs(name), "adam": ADAM, "corpus": corpus, "schedule": SCHEDULE, "steps": [half, STEPS]}
    told |= {"checkpoint": str(tmp_path / "theirs"), "kind": "torch_dist"}
    theirs = json.loads(_side(tmp_path, told).read_text())
    assert max(abs(ours[half + 1 + number] - loss) for number, loss in enumerate(theirs)) < 1e-4
