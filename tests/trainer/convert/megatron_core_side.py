"""A program of Megatron-Core on the CPU: logits and training steps of a checkpoint, for test_megatron_core.py.

Run by the interpreter of an environment that has megatron-core 0.16.1; it imports nothing of ours. Arguments: a JSON
file with {"checkpoint", "kind": "torch_dist" or "mp_rank" or "weights", "model", "data", "steps", "adam", "save",
"out"}; with "corpus" in place of "data" for samples of a .bin/.idx pair in Megatron's order, and then "schedule". A
"model" has a "family" if it is not a GPT.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore")
os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}


def without_gpu():
    """What Megatron-Core asks of CUDA without looking for it; dropout is 0, so that random states are not needed."""
    import contextlib

    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    make = torch.tensor
    torch.tensor = lambda *values, device=None, **how: make(*values, device=None if device == "cuda" else device, **how)
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


def with_layer_norm():
    """Apex's function by torch: Megatron's own norm whose weights are stored less 1 needs it, and adds the 1 itself."""
    import types

    class FusedLayerNormAffineFunction:
        @staticmethod
        def forward(x, weight, bias, shape, eps, memory_efficient=False):
            return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

        apply = forward

    for name in ("apex", "apex.normalization", "apex.normalization.fused_layer_norm"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    sys.modules[name].FusedLayerNormAffineFunction = FusedLayerNormAffineFunction


def build(told):
    """A model of the local layers, one process."""
    if told.get("layernorm_zero_centered_gamma"):
        with_layer_norm()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    family, encoder_layers = told.pop("family", "gpt"), told.pop("encoder_layers", 0)
    activation = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[told.pop("activation")]
    outer = {key: told.pop(key) for key in ("vocab_size", "max_sequence_length", "position_embedding_type")}
    outer |= {key: told.pop(key) for key in ("rotary_base", "share_embeddings_and_output_weights") if key in told}
    config = TransformerConfig(
        activation_func=activation, use_cpu_initialization=True, bias_activation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        **told,
    )  # fmt: skip
    if family == "bert":
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.models.bert.bert_model import BertModel

        return BertModel(config, 2, bert_layer_local_spec, **outer)
    if family == "t5":
        from megatron.core.models.T5.t5_model import T5Model
        from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec

        specs = encoder_model_with_local_spec(), decoder_model_with_local_spec()
        return T5Model(config, dataclasses.replace(config, num_layers=encoder_layers), *specs, **outer)
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    return GPTModel(config, spec, **outer)


def make_optimizer(model, adam):
    """Megatron's optimizer of fp32 around torch's AdamW: matrices decay, vectors do not."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    def kind(p):
        own = "decoupled" in adam and getattr(p, "is_embedding_or_output_parameter", False)
        return p.dim() > 1, own

    groups = []
    for decays, own in dict.fromkeys(((True, False), (True, "decoupled" in adam), (False, False))):
        found = [p for p in model.parameters() if kind(p) == (decays, own)]
        marks = {"is_expert_parallel": False, "wd_mult": float(decays), "lr_mult": 1.0, "is_decoupled_lr": False}
        marks |= adam["decoupled"] if own else {}
        groups.append({"params": found, "weight_decay": adam["weight_decay"] * decays, **marks})
    inner = torch.optim.AdamW(groups, lr=adam["lr"], betas=tuple(adam["betas"]), eps=adam["eps"])

    def init_state(optimizer, config=None):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not optimizer.state[p]:
                    zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}

    return FP32Optimizer(inner, OptimizerConfig(optimizer="adam", lr=adam["lr"]), init_state)


def load(told, model, optimizer):
    """Read a checkpoint as Megatron-Core reads it; all that was in it beside the tensors."""
    from megatron.core import dist_checkpointing

    path = Path(told["checkpoint"])
    if told["kind"] == "weights":
        from safetensors.torch import load_file

        model.load_state_dict(load_file(path), strict=False)
        return {}
    folder = path / f"iter_{int((path / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    if told["kind"] == "mp_rank":
        torch.serialization.add_safe_globals([argparse.Namespace])
        state = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=True)
        model.load_state_dict(state["model"], strict=True)
        return state
    wanted = {"model": model.sharded_state_dict()}
    if optimizer is not None:
        wanted["optimizer"] = optimizer.sharded_state_dict(wanted["model"], is_loading=True)
    found = dist_checkpointing.load(
        wanted, str(folder), strict="raise_all" if told.get("strict") else "assume_ok_unexpected"
    )
    model.load_state_dict(found["model"], strict=True)
    if optimizer is not None:
        optimizer.load_state_dict(found["optimizer"])
    return found


def make_scheduler(optimizer, schedule):
    """Megatron's learning rate and weight decay; counted in samples, as its trainer does."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    fixed = {
        "init_lr": 0.0,
        "wd_incr_steps": 0,
        "wd_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": True,
    }
    return OptimizerParamScheduler(optimizer, **fixed, **schedule)


def read_samples(corpus):
    """The samples of a run, as its data loader reads them: tokens and labels [steps, rows, length]."""
    import numpy
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    about = {"eod": 127, "pad": -1, "vocab_size": 128, "unique_identifiers": {"class": "none"}}
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=corpus["seed"], sequence_length=corpus["length"], blend=([corpus["prefix"]], None), split="1,0,0",
        path_to_cache=corpus["cache"], tokenizer=type("Tokenizer", (), about)(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    low = IndexedDataset(corpus["prefix"])
    count = corpus["steps"] * corpus["rows"]
    documents = numpy.arange(len(low), dtype=numpy.int32)
    samples = gpt_dataset.GPTDataset(low, corpus["prefix"], documents, count, Split.train, config)
    found = {name: torch.stack([samples[i][name] for i in range(count)]) for name in ("tokens", "labels")}
    return {name: rows.view(corpus["steps"], corpus["rows"], -1) for name, rows in found.items()}


def save(folder, model, optimizer, *, step, arguments, kind, scheduler=None):
    """Write a checkpoint as Megatron-LM's trainer writes it."""
    from megatron.core import dist_checkpointing

    inner = Path(folder) / f"iter_{step:07d}"
    common = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": step}
    if scheduler is not None:
        common["opt_param_scheduler"] = scheduler.state_dict()
    if kind == "mp_rank":
        (inner / "mp_rank_00").mkdir(parents=True)
        state = {"model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict(), **common}
        torch.save(state, inner / "mp_rank_00" / "model_optim_rng.pt")
    else:
        inner.mkdir(parents=True)
        state = {"model": model.sharded_state_dict()}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"])
        dist_checkpointing.save(state | common, str(inner))
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(step))


def forward(model, tokens):
    """Logits fp32[B, S, V]."""
    length = tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, torch.arange(length).expand_as(tokens), hidden)


def losses(model, rows):
    """(what is trained on, the mean loss of tokens) of a batch."""
    if "encoder" in rows:
        real, later = rows["encoder_mask"] < 0.5, torch.ones(len(rows["tokens"][0]), len(rows["tokens"][0])).triu(1) > 0
        written = (rows["mask"] < 0.5)[:, None, None]
        hidden = real[:, None, None]
        masks = hidden | hidden.mT, later | written, hidden | written.mT
        logits = model(rows["encoder"], rows["tokens"], *masks)
    elif "types" in rows:
        logits, pairs = model(rows["tokens"], rows["padding_mask"], tokentype_ids=rows["types"])
    else:
        logits = forward(model, rows["tokens"])
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows["labels"].flatten(), reduction="none")
    mask = rows.get("mask", torch.ones(rows["labels"].shape)).flatten()
    mean = (each * mask).sum() / mask.sum()
    return mean + torch.nn.functional.cross_entropy(pairs, rows["swapped"]) if "types" in rows else mean, mean


def step(model, optimizer, rows, *, clip):
    """One update; the loss before it."""
    inner = optimizer.optimizer
    inner.zero_grad()
    total, loss = losses(model, rows)
    total.backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    for p in model.parameters():
        p.grad.mul_(min(1.0, clip / (norm + 1e-6)))
    inner.step()
    return loss.item()


def main():
    told = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    without_gpu()
    model = build(told["model"])
    optimizer = make_optimizer(model, told["adam"]) if told.get("adam") else None
    scheduler = make_scheduler(optimizer, told["schedule"]) if told.get("schedule") else None
    found = load(told, model, optimizer) if told.get("checkpoint") else {}
    if scheduler is not None:
        if found:
            scheduler.load_state_dict(found["opt_param_scheduler"])
            assert found["args"].consumed_train_samples == told["steps"][0] * told["corpus"]["rows"]
        scheduler.step(0)
    data = read_samples(told["corpus"]) if told.get("corpus") else torch.load(told["data"], weights_only=True)
    if optimizer is None:
        with torch.no_grad():
            torch.save(forward(model, data["tokens"]), told["out"])
        return
    first, last = told["steps"]
    found = []
    for number in range(first, last):
        rows = {name: x[number] for name, x in data.items()}
        found.append(step(model, optimizer, rows, clip=told["adam"]["clip"]))
        if scheduler is not None:
            scheduler.step(len(rows["tokens"]))
        if number + 1 == told.get("save_at"):
            how = {"arguments": told["arguments"], "kind": told["kind"], "scheduler": scheduler}
            save(told["save"], model, optimizer, step=number + 1, **how)
    Path(told["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
