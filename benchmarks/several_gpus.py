"""Training speed on several GPUs of one host: layouts of published shapes, each a separate torchrun.

    python benchmarks/several_gpus.py [--rows llama7b-tp2 ...] [--rounds 1] [--peers] [--out FILE.json]
    python benchmarks/several_gpus.py --rows llama7b-tp2 --profile FOLDER
    python benchmarks/several_gpus.py --rows llama7b-tp2 --forecast H100

A row is a shape, a layout and the microbatches of a rank; see ROWS. Tokens/s are per GPU: medians of two-step blocks,
one wait for the device after each. Weights are drawn on the device, tokens are random and lie there. With --peers each
row that megatron-core can run is followed by it, rows with experts by each of its two dispatchers, and a table comes
last. "llama5b" and "llama4b" are the first 24 and 20 layers of Llama-2-7B, for GPUs of 80 GB; "llama8b" is Llama-3's,
"llama70b-16l" begins Llama-2-70B, "qwen3moe-32l" Qwen3-30B-A3B. --forecast prints what `mtrain plan` expects of rows.

With --graphs each row of ours is run twice, with `kernels.cuda_graphs` off and on; the second is called "NAME+graphs".
"NAME+overlap" also sets `kernels.overlap_passes`. The peer of zero-bubble rows runs its interleaved schedule.
With --narrow layers have the smallest widths and rows 256 tokens, so that the GPUs have next to nothing to do: the step
is then the time that the host needs to launch one, with the latency of its collectives.

Where data-parallel ranks communicate, `exposed` is the part of a step in which nothing else runs meanwhile: the step,
minus one with those collectives left out, over the step; `exposed_dispatch` is the same of the collectives that bring
tokens to experts and back (those of counts and choices stay). `alone` is the part of a profiled step in which
communication runs and no other kernel, or no kernel at all, `idle` that of the latter: with --idle or experts, of ours
and of the peer. `kept_bytes` are those of a parameter between two steps. `launch_us` is the host's time to launch an
addition of two small tensors, and to launch a small sum over all ranks: the slowest rank's, in the process of the row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_peer import Megatron, megatron_step
from benchmarks.one_gpu import (
    SHAPES,
    busy_times,
    kernel_events,
    kernel_table,
    our_step,
    random_batches,
    random_engine,
    run_config,
)
from trainer.config.sections import RunConfig
from trainer.layers import dispatch
from trainer.optim import data_parallel
from trainer.parallel.collectives import Group, Pending, gather_objects
from trainer.parallel.mesh import mesh_of
from trainer.parallel.world import join_world
from trainer.plan.devices import DEVICES, GIB, LAUNCH_S, Device, device_named
from trainer.plan.memory import activation_bytes, state_bytes
from trainer.plan.plan import Plan, make_plan
from trainer.plan.step_time import Rates, step_time

LLAMA7B = SHAPES["llama1b"][3] | {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_heads": 32,
    "num_kv_heads": 32,
    "ffn_hidden_size": 11008,
    "vocab_size": 32000,
    "tie_embeddings": False,
    "rope_theta": 10000.0,
}
LLAMA8B = SHAPES["llama1b"][3] | {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_heads": 32,
    "ffn_hidden_size": 14336,
    "tie_embeddings": False,
}
LLAMA70B = LLAMA7B | {  # its first 16 layers of 80
    "num_layers": 16,
    "hidden_size": 8192,
    "num_heads": 64,
    "num_kv_heads": 8,
    "ffn_hidden_size": 28672,
}
QWEN3MOE = SHAPES["qwen3moe-4l"][3] | {"num_layers": 32, "tie_embeddings": False}  # of 48
LLAMA5B, LLAMA4B = LLAMA7B | {"num_layers": 24}, LLAMA7B | {"num_layers": 20}
QWEN3MOE_SHARED = SHAPES["qwen3moe-4l"][3] | {
    "moe": dataclasses.replace(SHAPES["qwen3moe-4l"][3]["moe"], shared_ffn_hidden_size=1536)
}
SP: dict[str, Any] = {"sequence_parallel": True}
BUFFER = {"expert_dispatch": "all_to_all", "expert_buffer": 1.5}
# name -> (ranks, sequence length, micro batch, microbatches of a rank, model, keys of the sections below)
ROWS: dict[str, tuple[int, int, int, int, dict[str, Any], dict[str, Any]]] = {
    "llama7b-dp2": (2, 4096, 1, 8, LLAMA7B, {}),
    "llama7b-dp2-in-turn": (2, 4096, 1, 8, LLAMA7B, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    "llama7b-dp2-fp8": (2, 4096, 1, 8, LLAMA7B, {"fp8": "delayed"}),
    "llama7b-dp2-gradients": (2, 4096, 1, 8, LLAMA7B, {"sharding": "gradients"}),
    "llama7b-dp2-parameters": (2, 4096, 1, 8, LLAMA7B, {"sharding": "parameters"}),
    "llama7b-dp2-parameters-2x4": (2, 4096, 2, 4, LLAMA7B, {"sharding": "parameters"}),
    "gpt124m-dp2": (2, 1024, 12, 8, SHAPES["gpt124m"][3], {}),
    "llama1b-dp2": (2, 4096, 2, 4, SHAPES["llama1b"][3], {}),
    "llama3b-dp2-none": (2, 4096, 1, 8, SHAPES["llama3b"][3], {"sharding": "none"}),
    "llama7b-tp2": (2, 4096, 1, 16, LLAMA7B, {"tp": 2, "sequence_parallel": True}),
    "gpt1.3b-tp2": (2, 2048, 4, 4, SHAPES["gpt1.3b"][3], {"tp": 2, "sequence_parallel": True}),
    "llama4b-dp2": (2, 4096, 1, 8, LLAMA4B, {}),
    "llama4b-dp2-in-turn": (2, 4096, 1, 8, LLAMA4B, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    "llama4b-dp2-fp8": (2, 4096, 1, 8, LLAMA4B, {"fp8": "delayed"}),
    "llama4b-dp2-gradients": (2, 4096, 1, 8, LLAMA4B, {"sharding": "gradients"}),
    "llama4b-dp2-parameters": (2, 4096, 1, 8, LLAMA4B, {"sharding": "parameters"}),
    "llama5b-pp2": (2, 4096, 1, 16, LLAMA5B, {"pp": 2}),
    "llama5b-pp2-interleaved": (2, 4096, 1, 16, LLAMA5B, {"pp": 2, "schedule": "interleaved", "virtual_pipeline": 4}),
    "llama5b-pp2-zb_h1": (2, 4096, 1, 16, LLAMA5B, {"pp": 2, "schedule": "zb_h1"}),
    "llama5b-pp2-zb_v": (2, 4096, 1, 16, LLAMA5B, {"pp": 2, "schedule": "zb_v"}),
    "llama7b-pp2": (2, 4096, 1, 16, LLAMA7B, {"pp": 2}),
    "llama7b-pp2-interleaved": (2, 4096, 1, 16, LLAMA7B, {"pp": 2, "schedule": "interleaved", "virtual_pipeline": 4}),
    "llama7b-pp2-zb_h1": (2, 4096, 1, 16, LLAMA7B, {"pp": 2, "schedule": "zb_h1"}),
    "llama7b-pp2-zb_v": (2, 4096, 1, 16, LLAMA7B, {"pp": 2, "schedule": "zb_v"}),
    "llama7b-dp4": (4, 4096, 1, 8, LLAMA7B, {}),
    "llama7b-dp4-gradients": (4, 4096, 1, 8, LLAMA7B, {"sharding": "gradients"}),
    "llama7b-dp4-parameters": (4, 4096, 1, 8, LLAMA7B, {"sharding": "parameters"}),
    "llama4b-dp4": (4, 4096, 1, 8, LLAMA4B, {}),
    "llama5b-pp4-zb_v": (4, 4096, 1, 16, LLAMA5B, {"pp": 4, "schedule": "zb_v"}),
    "llama7b-tp4": (4, 4096, 1, 16, LLAMA7B, {"tp": 4, "sequence_parallel": True}),
    "llama7b-tp2-dp2": (4, 4096, 1, 8, LLAMA7B, {"tp": 2, "sequence_parallel": True}),
    "llama7b-tp2-dp2-in-turn": (
        4,
        4096,
        1,
        8,
        LLAMA7B,
        {"tp": 2, "sequence_parallel": True, "overlap_grad_reduce": False, "overlap_param_gather": False},
    ),
    "llama7b-tp2-pp2": (4, 4096, 1, 16, LLAMA7B, {"tp": 2, "sequence_parallel": True, "pp": 2}),
    "llama7b-tp2-pp2-interleaved": (
        4,
        4096,
        1,
        16,
        LLAMA7B,
        {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "interleaved", "virtual_pipeline": 4},
    ),
    "llama7b-tp2-pp2-zb_h1": (
        4,
        4096,
        1,
        16,
        LLAMA7B,
        {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb_h1"},
    ),
    "llama7b-tp2-pp2-zb_v": (
        4,
        4096,
        1,
        16,
        LLAMA7B,
        {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb_v"},
    ),
    "llama7b-pp4-zb_v": (4, 4096, 1, 16, LLAMA7B, {"pp": 4, "schedule": "zb_v"}),
    "llama3b-32k-cp4": (4, 32768, 1, 2, SHAPES["llama3b"][3], {"cp": 4}),
    "llama3b-32k-cp2-tp2": (4, 32768, 1, 2, SHAPES["llama3b"][3], {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "llama3b-32k-tp4": (4, 32768, 1, 2, SHAPES["llama3b"][3], {"tp": 4, "sequence_parallel": True}),
    "llama3b-32k-cp2": (2, 32768, 1, 2, SHAPES["llama3b"][3], {"cp": 2}),
    "llama3b-32k-tp2": (2, 32768, 1, 2, SHAPES["llama3b"][3], {"tp": 2, "sequence_parallel": True}),
    "llama1b-128k-cp2": (2, 131072, 1, 1, SHAPES["llama1b"][3], {"cp": 2}),  # needs GPUs of 139 GiB, as the next does
    "llama1b-128k-tp2": (2, 131072, 1, 1, SHAPES["llama1b"][3], {"tp": 2, "sequence_parallel": True}),
    "mixtral8x1b-ep2": (2, 4096, 2, 4, SHAPES["mixtral8x1b"][3], {"ep": 2}),
    "mixtral8x1b-tp2": (2, 4096, 2, 8, SHAPES["mixtral8x1b"][3], {"tp": 2, "sequence_parallel": True}),
    "mixtral8x1b-ep2-sent": (2, 4096, 2, 4, SHAPES["mixtral8x1b"][3], {"ep": 2, "expert_dispatch": "all_to_all"}),
    "mixtral8x1b-ep4": (4, 4096, 2, 4, SHAPES["mixtral8x1b"][3], {"ep": 4}),
    "mixtral8x1b-ep4-gathered": (4, 4096, 2, 4, SHAPES["mixtral8x1b"][3], {"ep": 4, "expert_dispatch": "gather"}),
    "mixtral8x1b-ep2-tp2": (4, 4096, 2, 8, SHAPES["mixtral8x1b"][3], {"ep": 2, "tp": 2, "sequence_parallel": True}),
    "qwen3moe-4l-ep2": (2, 4096, 2, 4, SHAPES["qwen3moe-4l"][3], {"ep": 2}),
    "qwen3moe-4l-tp2": (2, 4096, 2, 8, SHAPES["qwen3moe-4l"][3], {"tp": 2, "sequence_parallel": True}),
    "qwen3moe-4l-ep2-sent": (2, 4096, 2, 4, SHAPES["qwen3moe-4l"][3], {"ep": 2, "expert_dispatch": "all_to_all"}),
    "qwen3moe-4l-ep2-gather-buffer": (
        2,
        4096,
        2,
        4,
        SHAPES["qwen3moe-4l"][3],
        {"ep": 2, **BUFFER, "expert_dispatch": "gather"},
    ),
    "qwen3moe-4l-ep2-buffer": (2, 4096, 2, 4, SHAPES["qwen3moe-4l"][3], {"ep": 2, **BUFFER}),
    "qwen3moe-4l-shared-ep2": (2, 4096, 2, 4, QWEN3MOE_SHARED, {"ep": 2}),
    "qwen3moe-4l-shared-ep2-sent": (2, 4096, 2, 4, QWEN3MOE_SHARED, {"ep": 2, "expert_dispatch": "all_to_all"}),
    "qwen3moe-4l-shared-ep2-buffer": (2, 4096, 2, 4, QWEN3MOE_SHARED, {"ep": 2, **BUFFER}),
    "qwen3moe-4l-ep4": (4, 4096, 2, 4, SHAPES["qwen3moe-4l"][3], {"ep": 4}),
    "qwen3moe-4l-ep4-sent": (4, 4096, 2, 4, SHAPES["qwen3moe-4l"][3], {"ep": 4, "expert_dispatch": "all_to_all"}),
    "qwen3moe-4l-ep4-gather-buffer": (
        4,
        4096,
        2,
        4,
        SHAPES["qwen3moe-4l"][3],
        {"ep": 4, **BUFFER, "expert_dispatch": "gather"},
    ),
    "qwen3moe-4l-ep4-buffer": (4, 4096, 2, 4, SHAPES["qwen3moe-4l"][3], {"ep": 4, **BUFFER}),
    "qwen3moe-4l-ep2-tp2": (4, 4096, 2, 8, SHAPES["qwen3moe-4l"][3], {"ep": 2, "tp": 2, "sequence_parallel": True}),
    "qwen3moe-4l-ep4-tp2": (
        4,
        4096,
        2,
        8,
        SHAPES["qwen3moe-4l"][3],
        {"ep": 4, "etp": 1, "tp": 2, "sequence_parallel": True},
    ),
    "llama8b-tp2-pp2-dp2": (8, 4096, 1, 16, LLAMA8B, {"tp": 2, **SP, "pp": 2, "schedule": "zb_v"}),
    "llama8b-tp2-pp2-dp2-fp8": (8, 4096, 1, 16, LLAMA8B, {"tp": 2, **SP, "pp": 2, "fp8": "delayed"}),
    "llama8b-tp2-pp2-dp2-1f1b": (8, 4096, 1, 16, LLAMA8B, {"tp": 2, **SP, "pp": 2}),
    "llama8b-dp8": (8, 4096, 1, 8, LLAMA8B, {}),
    "llama8b-dp8-parameters": (8, 4096, 1, 8, LLAMA8B, {"sharding": "parameters"}),
    "llama8b-tp8": (8, 4096, 1, 16, LLAMA8B, {"tp": 8, **SP}),
    "llama8b-tp8-fp8": (8, 4096, 1, 16, LLAMA8B, {"tp": 8, **SP, "fp8": "delayed"}),
    "qwen3moe-32l-ep8": (8, 4096, 1, 8, QWEN3MOE, {"ep": 8}),
    "llama8b-tp4-dp2": (8, 4096, 1, 16, LLAMA8B, {"tp": 4, **SP}),
    "llama8b-pp4-tp2": (8, 4096, 1, 16, LLAMA8B, {"tp": 2, **SP, "pp": 4, "schedule": "zb_v"}),
    "llama8b-128k-cp4-tp2": (8, 131072, 1, 2, LLAMA8B, {"cp": 4, "tp": 2, **SP, "mode": "full"}),
    "llama70b-16l-tp8": (8, 4096, 1, 16, LLAMA70B, {"tp": 8, **SP}),
    "llama70b-16l-tp8-fp8": (8, 4096, 1, 16, LLAMA70B, {"tp": 8, **SP, "fp8": "delayed"}),
    "qwen3moe-32l-ep4-tp2": (8, 4096, 1, 16, QWEN3MOE, {"ep": 4, "tp": 2, **SP}),
}
# The same work of each rank, or the same of all, on more and more ranks.
ROWS |= {f"llama3b-weak-{n}": (n, 4096, 1, 8, SHAPES["llama3b"][3], {}) for n in (1, 2, 4, 8)}
ROWS |= {f"llama3b-strong-{n}": (n, 4096, 1, 64 // n, SHAPES["llama3b"][3], {}) for n in (1, 2, 4, 8)}
SECTIONS = (
    "mesh",
    "optimizer",
    "precision",
    "kernels",
    "recompute",
)  # whose keys a row may set; of one name, the first
LAUNCHES, LAUNCH_ROUNDS = 200, 5  # fewer than the launches that a device queues
CHUNKS, CHUNK_STEPS, WARMUP_CHUNKS = 3, 2, 2  # graphs are recorded in the second step
NARROW_TOKENS = 256
RUN_LIMIT_S = "180"  # of the ranks of one row


def row_config(name: str, *, narrow: bool = False) -> RunConfig:
    """The run of a row, or the same with next to nothing to compute; with graphs or overlap if its name says so."""
    name, _, launches = name.partition("+")
    ranks, length, micro_batch, microbatches, model, keys = ROWS[name]
    if narrow:
        length = NARROW_TOKENS
        model = model | {"hidden_size": 16 * model["num_heads"], "ffn_hidden_size": 512, "vocab_size": 1024}
    config = run_config("llama1b")
    changed: dict[str, Any] = {name: getattr(config, name) for name in SECTIONS}
    graphs, overlap = "on" if launches else "off", "on" if launches == "overlap" else "off"
    for key, value in (keys | {"cuda_graphs": graphs, "overlap_passes": overlap}).items():
        name = next(name for name in SECTIONS if key in type(changed[name]).__dataclass_fields__)
        changed[name] = dataclasses.replace(changed[name], **{key: value})
    mesh = changed["mesh"]
    batch = micro_batch * microbatches * ranks // (mesh.tp * mesh.cp * mesh.pp)
    train = dataclasses.replace(config.train, sequence_length=length, micro_batch=micro_batch, global_batch=batch)
    return dataclasses.replace(config, model=type(config.model)(**model), train=train, **changed)


def forecast(names: Sequence[str], device: Device, *, launch: float) -> str:
    """What `mtrain plan` expects of rows: tokens/s of a GPU, the share of its peak rate, and GiB.

    Args:
        launch: seconds in which the host launches a kernel.
    """
    lines = ["| row | tokens/s | MFU | GiB |", "|---|---|---|---|"]
    for name in names:
        config = row_config(name)
        plan = make_plan(config, ROWS[name.partition("+")[0]][0], facts=None)
        seconds = step_time(config, plan, Rates(device=device, gpus_per_node=8, launch=launch)).total
        tokens = plan.tokens_per_step / plan.world_size / seconds
        gib = (state_bytes(config, plan) + activation_bytes(config, plan)) / GIB
        lines.append(f"| {name} | {tokens:,.0f} | {tokens * plan.flops_per_token / device.flops:.1%} | {gib:.1f} |")
    return "\n".join(lines)


def peers_of(name: str) -> dict[str, Megatron]:
    """What megatron-core runs beside a row, by name; none where it has no such layout, or has run it in another row."""
    keys = dict(ROWS[name.partition("+")[0]][5])
    keys.pop("sequence_parallel", None)  # it divides the sequence wherever tp > 1
    schedule, chunks = keys.pop("schedule", "1f1b"), keys.pop("virtual_pipeline", 1)
    mesh = {axis: keys.pop(axis, 1) for axis in ("tp", "pp", "cp", "ep")} | {"etp": keys.pop("etp", 0)}
    fp8 = keys.pop("fp8", "")
    if schedule in ("zb_h1", "zb_v"):
        chunks = 4
    if keys or ROWS[name.partition("+")[0]][4]["num_layers"] % (mesh["pp"] * chunks):
        return {}
    peer = Megatron(optimizer="distributed", fp8=fp8, chunks=chunks, **mesh)
    if mesh["ep"] == 1:
        return {"megatron-core": peer}
    gathering = dataclasses.replace(peer, dispatcher="allgather")
    return {"megatron-core": peer, "megatron-core-allgather": gathering}


def measure(name: str, *, peer: str, narrow: bool, profile: str, chunks: int, idle: bool) -> dict[str, Any]:
    """One rank of a row, of ours or of a peer."""
    config, ranks = row_config(name, narrow=narrow), ROWS[name.partition("+")[0]][0]
    plan = make_plan(config, ranks, facts=None)
    how: dict[str, Any] = {"profile": profile, "chunks": chunks, "idle": idle or plan.ep > 1}
    return measure_peer(name, peer, plan, **how) if peer else measure_ours(name, config, plan, **how)


def measure_peer(name: str, peer: str, plan: Plan, *, profile: str, chunks: int, idle: bool) -> dict[str, Any]:
    """One rank of megatron-core."""
    rank, row = int(os.environ["RANK"]), peers_of(name)[peer]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    texts = [(batch.tokens_BS, batch.labels_BS) for batch in random_batches(plan, device)]
    step = megatron_step(row, plan.shape, texts)
    seconds = step_seconds(step, chunks)
    peaks: list[int] = [0] * plan.world_size
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated())
    found = {
        "row": name,
        "of": peer,
        **speed(plan, seconds),
        "peak_gib": round(max(peaks) / 2**30, 2),
        "loss": round(float(step()), 4),
        "launch_us": launch_times(device),
        "main": rank == 0,
    }
    if idle:
        found |= waits_of(step)
    write_profile(profile, f"{peer}-{name}", rank, step)
    return found


def measure_ours(name: str, config: RunConfig, plan: Plan, *, profile: str, chunks: int, idle: bool) -> dict[str, Any]:
    """One rank of ours."""
    world = join_world(mesh_of(config, plan.world_size), overlap_passes=config.kernels.overlap_passes == "on")
    engine = random_engine(config, plan, world)
    batches = [batch.on_context_rank(engine.cp) for batch in random_batches(plan, world.device)]
    step = our_step(engine, batches)
    seconds = step_seconds(step, chunks)
    found: dict[str, Any] = {
        "row": name,
        "of": "mtrain",
        **speed(plan, seconds),
        "peak_gib": round(max(gather_objects(torch.cuda.max_memory_allocated(), engine.everyone)) / 2**30, 2),
        "reserved_gib": round(max(gather_objects(torch.cuda.max_memory_reserved(), engine.everyone)) / 2**30, 2),
        "loss": round(engine.step(batches, 1e-4).read().loss, 4),
        "launch_us": launch_times(world.device),
        "main": world.is_main,
    }
    if idle:
        found |= waits_of(step)
    if plan.ep > 1:
        with without_dispatch():
            undispatched = step_seconds(step, chunks)
        found["exposed_dispatch"] = round(1 - undispatched / seconds, 4)
    write_profile(profile, name, world.rank, step)
    engine.optimizer.gathers.release()
    found["kept_bytes"] = round(torch.cuda.memory_allocated() / plan.parameters_per_rank, 2)
    if engine.world.groups["data"].size > 1:
        with without_data_parallel_collectives():
            alone = step_seconds(step, chunks)
        found["exposed"] = round(1 - alone / seconds, 4)
    return found


def speed(plan: Plan, seconds: float) -> dict[str, Any]:
    """The speed of one GPU."""
    return {
        "tokens_per_s_per_gpu": round(plan.tokens_per_step / plan.world_size / seconds),
        "step_s": round(seconds, 4),
    }


def launch_times(device: torch.device) -> list[float]:
    """Microseconds of the host for an elementwise kernel and for a sum over all ranks, of the slowest rank."""
    x, y = torch.zeros(256, device=device), torch.zeros(256, device=device)
    found = []
    for launch in (lambda: x.add_(y), lambda: dist.all_reduce(x)):
        rounds = []
        for _ in range(LAUNCH_ROUNDS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            rounds.append((time.perf_counter() - start) / LAUNCHES * 1e6)
        found.append(statistics.median(rounds))
    slowest = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [round(one, 2) for one in slowest.tolist()]


def write_profile(folder: str, name: str, rank: int, step: Callable[[], Any]) -> None:
    """A table of the kernels of one step of the first rank, into a folder if one is given."""
    if folder:
        kernels = kernel_table(step)  # each rank takes part in the step
        if rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"{name}.txt".replace("+", "-")).write_text(kernels)


def waits_of(step: Callable[[], Any]) -> dict[str, float]:
    """The parts of a profiled step in which communication runs alone or nothing, and in which nothing runs."""
    length, busy, computing = busy_times(kernel_events(step))
    return {"alone": round(1 - computing / length, 4), "idle": round(1 - busy / length, 4)}


def step_seconds(step: Callable[[], Any], chunks: int) -> float:
    """Seconds of a step: the median of some blocks after those that warm up."""
    return statistics.median([chunk_seconds(step) for _ in range(WARMUP_CHUNKS + chunks)][WARMUP_CHUNKS:])


def chunk_seconds(step: Callable[[], Any]) -> float:
    """Seconds of a step, over a few."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CHUNK_STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CHUNK_STEPS


@contextmanager
def without_data_parallel_collectives() -> Iterator[None]:
    """Gradients are not summed and parameters not gathered: each rank goes on with what it has, in place of others'."""

    def own(buffer: Tensor, group: Group) -> Pending:
        return Pending(buffer.unflatten(0, (group.size, -1))[group.rank])

    def whole(buffer: Tensor, group: Group, own: Tensor | None = None) -> Pending:
        if own is not None and own.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
            buffer.unflatten(0, (group.size, -1)).copy_(own)
        return Pending(buffer)

    stubs = [
        (data_parallel, "start_reduce_scatter_", own),
        (data_parallel, "start_sum_", whole),
        (data_parallel, "start_all_gather_", whole),
    ]
    with ExitStack() as stack:
        for module, name, stub in stubs:
            stack.enter_context(patch.object(module, name, stub))
        yield


@contextmanager
def without_dispatch() -> Iterator[None]:
    """Tokens do not travel to experts, nor their results back: each rank computes as much, of what it has itself.

    Choices and weights of tokens, which are no bf16, are exchanged as before: they decide how much that is.
    """

    def gathered(x: Tensor, group: Group) -> Tensor:
        return x.repeat(group.size, *[1] * (x.dim() - 1))

    def cut(x: Tensor, group: Group) -> Tensor:
        return x.unflatten(0, (group.size, -1))[group.rank]

    def resized(x: Tensor, *, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
        size = sum(receive)
        return x[:size] if size <= len(x) else torch.cat((x, x.new_zeros(size - len(x))))

    def only_bf16(real: Callable[..., Any], stub: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *args, **names: (stub if x.dtype == torch.bfloat16 else real)(x, *args, **names)

    stubs: dict[str, Callable[..., Any]] = {
        "all_gather": gathered,
        "start_all_gather": lambda x, group: Pending(gathered(x, group)),
        "reduce_scatter": cut,
        "all_to_all": resized,
        "start_all_to_all": lambda x, **sizes: Pending(resized(x, **sizes)),
    }
    with ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(patch.object(dispatch, name, only_bf16(getattr(dispatch, name), stub)))
        yield


def torchrun(name: str, words: Sequence[str], *, peer: str) -> dict[str, Any] | None:
    """A row of ours or of the peer in processes of its own; None if it failed; its stderr is then printed."""
    launcher = ["timeout", "--foreground", "--kill-after=45", RUN_LIMIT_S]
    launcher += [sys.executable, "-m", "torch.distributed.run"]
    shape = ROWS[name.partition("+")[0]]
    launcher += ["--standalone", f"--nproc-per-node={shape[0]}", __file__, "--row", name]
    command = [*launcher, *(["--peer", peer] if peer else []), *words]
    # Megatron's own scripts set it, so that collectives are launched in turn with the products that they overlap.
    turns = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if peer and {"tp", "cp"} & shape[5].keys() else {}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | turns)
    if done.returncode:
        print(
            f"{name}{f' of {peer}' if peer else ''} ended with {done.returncode}",
            done.stderr[-5000:],
            sep="\n",
            flush=True,
        )
        return None
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"row"')))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Medians of the rounds, and our speed over each peer's where both were measured."""
    lines = [
        "| row | of | tokens/s | GiB | exposed | dispatch | alone | idle | launch | sum | loss | ratio |",
        "|---|" + "---|" * 11,
    ]
    for name in dict.fromkeys(row["row"] for row in rows):
        ours = None
        for of in dict.fromkeys(row["of"] for row in rows if row["row"] == name):
            found = [row for row in rows if (row["row"], row["of"]) == (name, of)]
            speed = statistics.median(row["tokens_per_s_per_gpu"] for row in found)
            ours = speed if of == "mtrain" else ours
            cells = [name, of, f"{speed:,.0f}", f"{max(row['peak_gib'] for row in found)}"]
            for key in ("exposed", "exposed_dispatch", "alone", "idle"):
                shares = [row[key] for row in found if key in row]
                cells.append(f"{statistics.median(shares):.1%}" if shares else "")
            cells += [f"{statistics.median(row['launch_us'][i] for row in found)} us" for i in (0, 1)]
            cells.append(f"{found[-1]['loss']:.3f}")
            cells.append(f"{ours / speed:.3f}" if ours and of != "mtrain" else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure one row as one of its ranks, or start the ranks of all rows in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[f"{n}{end}" for n in ROWS for end in ("", "+graphs", "+overlap")])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peers", action="store_true", help="megatron-core after each row that it can run")
    parser.add_argument("--narrow", action="store_true", help="the same rows with next to nothing to compute")
    parser.add_argument("--profile", default="", help="folder for a table of kernels of the first rank")
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="timed blocks of two steps")
    parser.add_argument("--idle", action="store_true", help="profile a step of each row for its idle time")
    parser.add_argument("--out", help="file for all rows as JSON")
    parser.add_argument("--graphs", action="store_true", help="each row also with CUDA graphs")
    parser.add_argument(
        "--forecast", choices=[d.name for d in DEVICES], help="print what is expected on this GPU; no run"
    )
    parser.add_argument(
        "--launch", type=float, default=LAUNCH_S * 1e6, help="with --forecast: us of a launch, launch_us"
    )
    parser.add_argument("--row", help="measure this one; started by torchrun")
    parser.add_argument("--peer", default="", help="with --row: which of its peers")
    arguments = parser.parse_args()
    if device := device_named(arguments.forecast or ""):
        print(forecast(arguments.rows or list(ROWS), device, launch=arguments.launch * 1e-6))
        return
    if arguments.row:
        how: dict[str, Any] = {"narrow": arguments.narrow, "profile": arguments.profile, "chunks": arguments.chunks}
        found = measure(arguments.row, peer=arguments.peer, idle=arguments.idle, **how)
        if found.pop("main"):
            print(json.dumps(found), flush=True)
        return
    words = ["--profile", arguments.profile, "--chunks", str(arguments.chunks)]
    words += [f"--{name}" for name in ("narrow", "idle") if getattr(arguments, name)]
    rows = []
    for name in [name for _ in range(arguments.rounds) for name in arguments.rows or ROWS]:
        runs = [(name, ""), *([(f"{name}+graphs", "")] if arguments.graphs else [])]
        for run, peer in [*runs, *((name, peer) for peer in peers_of(name) if arguments.peers)]:
            found = torchrun(run, words, peer=peer)
            if found is None:
                continue
            rows.append(found)
            print(json.dumps(found), flush=True)
            if arguments.out:
                Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
