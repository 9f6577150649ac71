"""Do CUDA graphs give the bits of passes that are computed anew? Many layouts, on the GPUs of this machine.

    torchrun --nproc-per-node=4 benchmarks/cuda_graphs.py [--steps 50] [--layouts "tp 2" ...] [--out FILE.json]

Each layout that fits the number of ranks is trained twice from the same weights with `run.deterministic`, graphs off
and on; without it torch.compile alone changes bits, when it replaces a kernel for one shape by one for all of them:
losses and gradient norms of all steps must be equal, and so must the optimizer's state and the last checkpoint. In
between there are an evaluation, a step with fewer microbatches, a step with a gradient that is not finite, which is
skipped, and a checkpoint that is written while the next steps run. A layout that cannot be recorded is listed with its
reason. Prints a line for each layout; exits 1 if one differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import PrefixStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bert_t5 import Shape, padded_rows
from benchmarks.one_gpu import random_engine
from trainer.checkpoint.folder import latest_checkpoint
from trainer.checkpoint.format import RunState
from trainer.checkpoint.load import verify_checkpoint
from trainer.checkpoint.location import checkpoints_folder
from trainer.config.parse import dump_config
from trainer.config.sections import (
    BertSection,
    CheckpointSection,
    DataSection,
    KernelsSection,
    LoRASection,
    MambaSection,
    MeshSection,
    MLASection,
    ModelSection,
    MoESection,
    MTPSection,
    OptimizerSection,
    PrecisionSection,
    RecomputeSection,
    RunConfig,
    RunSection,
    T5SamplesSection,
    T5Section,
    TrainSection,
)
from trainer.models.stage import Microbatch
from trainer.parallel.collectives import gather_objects
from trainer.parallel.mesh import mesh_of
from trainer.parallel.placement import Placement, find_placement
from trainer.parallel.world import World, join_world, leave_world, open_store
from trainer.plan.kernel_choice import why_not_recorded
from trainer.plan.plan import make_plan
from trainer.run.data import DocumentPlaces, in_few_sizes
from trainer.run.determinism import make_deterministic
from trainer.run.engine import Engine
from trainer.run.saving import Saver

LLAMA: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_hidden_size": 1536,
    "vocab_size": 8192,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "tie_embeddings": False,
}
GPT: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_heads": 8,
    "ffn_hidden_size": 2048,
    "vocab_size": 8192,
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "bias": True,
}
BERT = GPT | {"family": "bert", "bert": BertSection(norm="pre", binary_head=True), "activation": "gelu_erf"}
T5 = GPT | {
    "family": "t5",
    "num_layers": 4,  # both stacks are compiled, for each size
    "t5": T5Section(encoder_layers=2, relative_buckets=32, relative_distance=128),
    "position": "relative",
    "norm": "rmsnorm",
    "activation": "relu",
    "bias": False,
    "attention_scale": 1.0,
}
MOE = LLAMA | {"moe": MoESection(num_experts=8, top_k=2, ffn_hidden_size=512, shared_ffn_hidden_size=512)}
LATENT = MOE | {
    "num_kv_heads": None,
    "mla": MLASection(q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
    "mtp": MTPSection(num_layers=1),
    "moe": MoESection(num_experts=8, top_k=2, ffn_hidden_size=512, score="sigmoid", expert_bias=True),
}
HYBRID = LLAMA | {"family": "mamba", "mamba": MambaSection(pattern="M*-MM*-M", num_groups=2)}
SP = {"sequence_parallel": True}
# name -> (ranks, model, keys of any section)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, LLAMA, {}),
    "one, gpt, tied": (1, GPT | {"tie_embeddings": True}, {}),
    "one, fp16": (1, LLAMA, {"dtype": "fp16"}),
    "one, fp32, means of microbatches": (1, GPT, {"dtype": "fp32", "loss_average": "megatron"}),
    "one, fp8": (1, LLAMA, {"fp8": "delayed"}),
    "one, fp8 current": (1, LLAMA, {"fp8": "current"}),
    "one, selective": (1, LLAMA, {"mode": "selective"}),
    "one, full": (1, LLAMA, {"mode": "full"}),
    "one, dropout": (1, GPT | {"hidden_dropout": 0.1}, {}),
    "one, alibi": (1, GPT | {"position": "alibi"}, {}),
    "one, window": (1, LLAMA | {"window": 128}, {}),
    "one, beside": (1, LLAMA, {"overlap_passes": "on"}),
    "one, dropout, full, beside": (1, LLAMA | {"hidden_dropout": 0.1}, {"mode": "full", "overlap_passes": "on"}),
    "one, documents": (1, LLAMA, {"document_masks": True}),
    "one, documents, fp32": (1, LLAMA, {"document_masks": True, "dtype": "fp32"}),
    "one, documents, full": (1, LLAMA, {"document_masks": True, "mode": "full"}),
    "one, sgd": (1, LLAMA, {"name": "sgd"}),
    "one, muon": (1, LLAMA, {"name": "muon"}),
    "one, bert": (1, BERT, {"micro_batch": 4}),
    "one, bert, dropout": (1, BERT | {"hidden_dropout": 0.1}, {"micro_batch": 4, "mode": "full"}),
    "one, t5": (1, T5, {"micro_batch": 4}),
    "one, t5, dropout": (1, T5 | {"hidden_dropout": 0.1}, {"micro_batch": 4, "mode": "full"}),
    "one, experts": (1, MOE, {}),
    "one, experts, full": (1, MOE, {"mode": "full"}),
    "one, experts by bias, latent attention, later tokens": (1, LATENT, {}),
    "one, hybrid": (1, HYBRID, {}),
    "one, hybrid, full": (1, HYBRID, {"mode": "full"}),
    "one, lora": (1, LLAMA | {"lora": LoRASection(rank=8)}, {"init_from": "unused"}),
    "ep 2, experts": (2, MOE, {"ep": 2}),
    "tp 2, experts": (2, MOE, {"tp": 2, **SP}),
    "pp 2, zb_v, experts by bias, latent attention, later tokens": (2, LATENT, {"pp": 2, "schedule": "zb_v"}),
    "tp 2, hybrid": (2, HYBRID, {"tp": 2, **SP}),
    "cp 2, hybrid": (2, HYBRID, {"cp": 2}),
    "pp 2, t5": (2, T5, {"micro_batch": 4, "pp": 2}),
    "tp 2": (2, LLAMA, {"tp": 2}),
    "tp 2, sequence parallel": (2, LLAMA, {"tp": 2, **SP}),
    "tp 2, sequence parallel, fp8": (2, LLAMA, {"tp": 2, **SP, "fp8": "delayed"}),
    "tp 2, documents": (2, LLAMA, {"tp": 2, **SP, "document_masks": True}),
    "pp 2, documents": (2, LLAMA, {"pp": 2, "document_masks": True}),
    "cp 2, documents": (2, LLAMA, {"cp": 2, "document_masks": True}),
    "cp 2": (2, LLAMA, {"cp": 2}),
    "dp 2": (2, LLAMA, {}),
    "dp 2, none": (2, LLAMA, {"sharding": "none"}),
    "pp 2, 1f1b, tied": (2, GPT | {"tie_embeddings": True}, {"pp": 2}),
    "pp 2, interleaved": (2, LLAMA, {"pp": 2, "schedule": "interleaved"}),
    "pp 2, zb_h1": (2, LLAMA, {"pp": 2, "schedule": "zb_h1"}),
    "pp 2, zb_v, tied": (2, LLAMA | {"tie_embeddings": True}, {"pp": 2, "schedule": "zb_v"}),
    "pp 2, fp16": (2, LLAMA, {"pp": 2, "dtype": "fp16"}),
    "dp 2, fp16": (2, LLAMA, {"dtype": "fp16"}),
    "dp 2, fp8": (2, LLAMA, {"fp8": "delayed"}),
    "dp 2, fp8 current": (2, LLAMA, {"fp8": "current"}),
    "cp 2, fp16": (2, LLAMA, {"cp": 2, "dtype": "fp16"}),
    "tp 2, fp16": (2, LLAMA, {"tp": 2, **SP, "dtype": "fp16"}),
    "tp 2, sequence parallel, beside": (2, LLAMA, {"tp": 2, **SP, "overlap_passes": "on"}),
    "tp 2, fp8, beside": (2, LLAMA, {"tp": 2, **SP, "fp8": "delayed", "overlap_passes": "on"}),
    "cp 2, beside": (2, LLAMA, {"cp": 2, "overlap_passes": "on"}),
    "dp 2, beside": (2, LLAMA, {"overlap_passes": "on"}),
    "tp 4, sequence parallel, beside": (4, LLAMA, {"tp": 4, **SP, "overlap_passes": "on"}),
    "tp 2, dp 2, beside": (4, LLAMA, {"tp": 2, **SP, "overlap_passes": "on"}),
    "tp 4, sequence parallel": (4, LLAMA, {"tp": 4, **SP}),
    "tp 2, dp 2": (4, LLAMA, {"tp": 2, **SP}),
    "tp 2, pp 2, zb_v": (4, LLAMA, {"tp": 2, **SP, "pp": 2, "schedule": "zb_v"}),
    "tp 2, pp 2, interleaved": (4, GPT, {"tp": 2, **SP, "pp": 2, "schedule": "interleaved"}),
    "pp 4, zb_v": (4, LLAMA, {"pp": 4, "schedule": "zb_v"}),
    "cp 2, tp 2": (4, LLAMA, {"cp": 2, "tp": 2, **SP}),
    "dp 2, pp 2, zb_h1": (4, LLAMA, {"pp": 2, "schedule": "zb_h1"}),
    "pp 4, fp16": (4, LLAMA, {"pp": 4, "dtype": "fp16"}),
    "dp 2, pp 2, fp16": (4, LLAMA, {"pp": 2, "dtype": "fp16"}),
    "cp 2, tp 2, fp16": (4, LLAMA, {"cp": 2, "tp": 2, **SP, "dtype": "fp16"}),
}
SECTIONS: dict[str, Any] = {
    "checkpoint": CheckpointSection(keep=1),
    "data": DataSection(blend="unused"),
    "mesh": MeshSection(),
    "optimizer": OptimizerSection(lr=1e-3),
    "precision": PrecisionSection(dtype="bf16"),
    "kernels": KernelsSection(),
    "recompute": RecomputeSection(),
}
LENGTH, DECODER, GLOBAL_BATCH = 512, 256, 16


def run_config(model: dict[str, Any], keys: dict[str, Any]) -> RunConfig:
    """A run of a layout."""
    train = TrainSection(sequence_length=LENGTH, global_batch=GLOBAL_BATCH, micro_batch=1, steps=1000)
    changed = SECTIONS | {"train": train}
    for key, value in keys.items():
        name = next(name for name, section in changed.items() if key in type(section).__dataclass_fields__)
        changed[name] = dataclasses.replace(changed[name], **{key: value})
    kind = "gpt" if (family := model.get("family", "gpt")) == "mamba" else family
    of_kind = {"t5": T5SamplesSection(decoder_length=DECODER)} if kind == "t5" else {}
    changed["data"] = dataclasses.replace(changed["data"], kind=kind, **of_kind)
    run = RunSection(folder="unused", deterministic=True)
    return RunConfig(run=run, model=ModelSection(**model), **changed)


def random_rows(engine: Engine, step: int) -> list[Microbatch]:
    """This rank's rows of a seeded global batch."""
    plan, dp, device = engine.plan, engine.dp, engine.world.device
    if (kind := engine.config.data.kind) != "gpt":
        return _padded_rows(engine, step, decoder=DECODER if kind == "t5" else 0)
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, plan.vocab_size, (GLOBAL_BATCH, LENGTH + 1), generator=generator).to(device)
    mask = (torch.rand((GLOBAL_BATCH, LENGTH), generator=generator) < 0.9).float().to(device)
    numbers = torch.arange(GLOBAL_BATCH, device=device)
    rows = numbers.view(plan.num_microbatches, dp.size, plan.micro_batch)[:, dp.rank]
    batches = [
        Microbatch(
            tokens_BS=text[r, :-1], labels_BS=text[r, 1:], loss_mask_BS=mask[r], samples_B=r + step * GLOBAL_BATCH
        )
        for r in rows
    ]
    if engine.config.data.document_masks:
        batches = [_of_documents(batch, engine, seed=int(batch.samples_B[0])) for batch in batches]
    return [batch.on_context_rank(engine.cp) for batch in batches]


def _of_documents(batch: Microbatch, engine: Engine, *, seed: int) -> Microbatch:
    """The rows as documents of 1 to 256 tokens."""
    (rows, length), generator = batch.tokens_BS.shape, np.random.default_rng(seed)
    ends = np.cumsum(generator.integers(1, 257, size=rows * length))
    bounds = np.unique([0, *ends[ends < rows * length], *range(0, rows * length + 1, length)]).astype(np.int32)
    positions = (np.arange(rows * length) - np.repeat(bounds[:-1], np.diff(bounds))).reshape(rows, length)
    places = DocumentPlaces(positions, bounds, int(np.diff(bounds).max()))
    if engine.executor.graphs is not None:
        places = in_few_sizes(places, length)
    tensors = {"positions_BS": torch.from_numpy(places.positions), "bounds": torch.from_numpy(places.bounds)}
    moved = {name: tensor.to(batch.tokens_BS.device) for name, tensor in tensors.items()}
    return dataclasses.replace(batch, longest=places.longest, **moved)


def _padded_rows(engine: Engine, step: int, *, decoder: int) -> list[Microbatch]:
    """The same of BERT or T5, whose rows have other lengths in each step; the last ones are full.

    Of T5, where each pair of sizes of the two stacks is recorded, they add up to one of two numbers.
    """
    generator, rows = np.random.default_rng(step), engine.plan.micro_batch
    shape = Shape("", rows, "", length=LENGTH, decoder=decoder)
    how = {"shape": shape, "vocabulary": engine.plan.vocab_size, "device": engine.world.device, "few_sizes": True}
    batches = []
    for i in range(engine.plan.num_microbatches):
        is_full = i + 1 == engine.plan.num_microbatches
        if is_full:
            lengths = np.full(rows, LENGTH)
        elif decoder:
            lengths = generator.permutation(np.linspace(LENGTH // 16, LENGTH, rows, dtype=int)) // (1 + i % 2)
        else:
            lengths = generator.integers(LENGTH // 16, LENGTH + 1, rows)
        samples_B = torch.arange(rows, device=engine.world.device) + step * GLOBAL_BATCH + i * rows
        batches.append(dataclasses.replace(padded_rows(generator, lengths, **how), samples_B=samples_B))
    return batches


class Trained(NamedTuple):
    """What a layout's steps gave on one rank.

    Args:
        numbers: losses, norms and whether the step was applied. state: of the optimizer.
        saved: hashes of the tensors of the last checkpoint.
        beside_saves: steps that were launched while a checkpoint was being written.
        grown_gib: the growth of the GPU's memory over the second half. seconds: of all steps.
        waits: where launching the last step made the host wait for the GPU, as FILE:LINE.
    """

    numbers: list[float]
    state: dict[str, torch.Tensor]
    saved: dict[str, Any]
    beside_saves: int
    grown_gib: float
    seconds: float
    waits: list[str]


def trained(config: RunConfig, world: World, steps: int) -> Trained:
    """Train a layout for some steps; checkpoints go into a temporary folder that all ranks of this host see."""
    with tempfile.TemporaryDirectory() if world.is_main else nullcontext("") as own:
        folder = gather_objects(own, world.groups["world"])[0]
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, folder=folder))
        return _trained(config, world, steps)


def _trained(config: RunConfig, world: World, steps: int) -> Trained:
    engine = random_engine(config, make_plan(config, world.world_size, facts=None), world)
    numbers, middle, beside, waits, began = [], 0, 0, list[str](), time.perf_counter()
    with Saver(config, engine, extras={}, tell=lambda kind, facts, text: None) as saver:
        for step in range(steps):
            batches = random_rows(engine, step)
            if step % 10 == 5:
                numbers.append(engine.evaluate(batches))
            if step % 10 == 6:
                batches = batches[: len(batches) // 2]
            overflow = overflowing(engine) if step % 10 == 7 else nullcontext()
            with overflow, noted_waits(waits) if step == steps - 1 else nullcontext():
                pending = engine.step(batches, 1e-3)
            beside += saver.in_flight
            report = pending.read()
            numbers += [report.loss, report.grad_norm, float(report.applied)]
            if step % 10 == 8:
                saver.begin(_position(engine, step))
            middle = torch.cuda.memory_reserved() if step == steps // 2 else middle
        saver.finish()
        seconds = time.perf_counter() - began
    newest = latest_checkpoint(checkpoints_folder(config))
    saved = {} if newest is None else verify_checkpoint(newest).tensors
    engine.optimizer.gathers.release()
    grown = (torch.cuda.memory_reserved() - middle) / 2**30
    state = {name: values.clone() for name, values in engine.optimizer.state.items()}
    gather_objects(None, world.groups["world"])  # every rank has read the checkpoint before its folder goes
    return Trained(numbers, state, dict(saved), beside, grown, seconds, waits)


def _position(engine: Engine, step: int) -> RunState:
    """After this step, as far as it says which state the checkpoint holds."""
    done = {"step": step + 1, "consumed_samples": (step + 1) * GLOBAL_BATCH, "optimizer_steps": engine.optimizer.steps}
    return RunState(**done, data_id="", data={}, config=dump_config(engine.config))


@contextmanager
def overflowing(engine: Engine) -> Iterator[None]:
    """The gradient of a step in this block is not finite."""
    reducer, gradients = engine.optimizer.reducer, engine.buffers.gradients.values
    finish = reducer.finish

    def poisoned() -> None:
        finish()
        gradients.fill_(float("inf"))

    reducer.finish = poisoned  # type: ignore[method-assign]
    try:
        yield
    finally:
        reducer.finish = finish  # type: ignore[method-assign]


@contextmanager
def noted_waits(places: list[str]) -> Iterator[None]:
    """Note where the host waits for the GPU in this block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = (one for one in caught if "called a synchronizing" in str(one.message))
    places += [f"{Path(one.filename).name}:{one.lineno}" for one in waits]


def compare(config: RunConfig, world: World, steps: int) -> dict[str, Any]:
    """A run trained with and without graphs."""
    off, on = (dataclasses.replace(config.kernels, cuda_graphs=how) for how in ("off", "on"))
    off = dataclasses.replace(off, overlap_passes="off")
    computing, recording = (dataclasses.replace(config, kernels=kernels) for kernels in (off, on))
    if reason := why_not_recorded(config, sharing=make_plan(computing, world.world_size, facts=None).sharing):
        return {"not recorded": reason}
    found = []
    for each in (computing, recording):
        found.append(trained(each, world, steps))
        gc.collect()
        torch.cuda.empty_cache()
    computed, replayed = found
    same_numbers = torch.equal(torch.tensor(computed.numbers).nan_to_num(), torch.tensor(replayed.numbers).nan_to_num())
    differing = {
        key: [int((values != other).sum()), int(values.isnan().sum()), int(other.isnan().sum())]
        for key, values in computed.state.items()
        if not torch.equal(values, other := replayed.state[key])
    }
    pairs = enumerate(zip(computed.numbers, replayed.numbers, strict=True))
    return {
        "equal": same_numbers and not differing and computed.saved == replayed.saved,
        "differing values, NaN, NaN": differing,
        "first difference": next((i for i, (a, b) in pairs if a != b == b), -1),
        "finite": sum(1 for number in computed.numbers if number == number),
        "saved tensors": len(computed.saved),
        "same checkpoint": computed.saved == replayed.saved,
        "steps beside saves": [one.beside_saves for one in found],
        "loss": [computed.numbers[0], computed.numbers[-3]],
        "grown_gib": round(replayed.grown_gib, 3),
        "seconds": [round(one.seconds, 1) for one in found],
        "waits": [Counter(one.waits) for one in found],
    }


def main(words: Sequence[str] | None = None) -> int:
    """All layouts that fit the ranks of this launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--out", help="file for all results as JSON")
    arguments = parser.parse_args(words)
    results, failed = [], False
    make_deterministic(run_config(LLAMA, {}))
    place = find_placement(os.environ) or Placement()
    store = open_store(place) if place.world_size > 1 else None
    for name in arguments.layouts:
        ranks, model, keys = LAYOUTS[name]
        if ranks != place.world_size:
            continue
        own = PrefixStore(name, store) if store else None
        answer = {"layout": name} | compare_on_all_ranks(run_config(model, keys), place, own, arguments.steps)
        failed |= not answer["equal on all ranks"]
        results.append(answer)
        if place.rank == 0:
            print(json.dumps(answer), flush=True)
            if arguments.out:
                Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


def compare_on_all_ranks(config: RunConfig, place: Placement, store: PrefixStore | None, steps: int) -> dict[str, Any]:
    """What `compare` gives on the first rank, and what it gives on ranks whose bits differ."""
    beside = config.kernels.overlap_passes == "on"
    world = join_world(mesh_of(config, place.world_size), placement=place, store=store, overlap_passes=beside)
    answers = gather_objects(compare(config, world, steps), world.groups["world"])
    leave_world()
    bad = [(rank, answer) for rank, answer in enumerate(answers) if not answer.get("equal", True)]
    return answers[0] | {"equal on all ranks": not bad, "others": bad[1:] if len(bad) > 1 else bad}


if __name__ == "__main__":
    sys.exit(main())
