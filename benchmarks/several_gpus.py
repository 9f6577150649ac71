"""Training speed on several GPUs of one host: layouts of published shapes, each a separate torchrun.

    python benchmarks/several_gpus.py [--rows llama3b-32k-cp2 ...] [--rounds 1] [--out FILE.json]

A row is a shape, a layout and the microbatches of a rank; see ROWS. Tokens/s are per GPU: medians of four-step blocks,
one wait for the device after each. Weights are drawn on the device, tokens are random and lie there.

Where data-parallel ranks communicate, `exposed` is the part of a step in which nothing else runs meanwhile: the step,
minus one with those collectives left out, over the step. `kept_bytes` are those of a parameter between two steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.one_gpu import CHUNK_STEPS, SHAPES, our_step, random_batches, random_engine, run_config
from trainer.config.sections import RunConfig
from trainer.optim import gathers, reducer
from trainer.parallel.collectives import Group, Pending
from trainer.parallel.mesh import mesh_of
from trainer.parallel.world import join_world
from trainer.plan.plan import make_plan

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
# name -> (ranks, sequence length, micro batch, microbatches of a rank, model, keys of the sections below)
ROWS: dict[str, tuple[int, int, int, int, dict[str, Any], dict[str, Any]]] = {
    "llama7b-dp2": (2, 4096, 1, 8, LLAMA7B, {}),
    "llama7b-dp2-in-turn": (2, 4096, 1, 8, LLAMA7B, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    "llama7b-dp2-fp8": (2, 4096, 1, 8, LLAMA7B, {"fp8": "delayed"}),
    "llama7b-dp2-gradients": (2, 4096, 1, 8, LLAMA7B, {"sharding": "gradients"}),
    "llama7b-dp2-parameters": (2, 4096, 1, 8, LLAMA7B, {"sharding": "parameters"}),
    "llama7b-dp2-parameters-2x4": (2, 4096, 2, 4, LLAMA7B, {"sharding": "parameters"}),
    "llama3b-dp2-none": (2, 4096, 1, 8, SHAPES["llama3b"][3], {"sharding": "none"}),
    "llama7b-tp2": (2, 4096, 1, 16, LLAMA7B, {"tp": 2, "sequence_parallel": True}),
    "llama7b-tp2-symmetric": (
        2,
        4096,
        1,
        16,
        LLAMA7B,
        {"tp": 2, "sequence_parallel": True, "tensor_parallel": "symmetric_memory"},
    ),
    "gpt1.3b-tp2": (2, 2048, 4, 4, SHAPES["gpt1.3b"][3], {"tp": 2, "sequence_parallel": True}),
    "gpt1.3b-tp2-symmetric": (
        2,
        2048,
        4,
        4,
        SHAPES["gpt1.3b"][3],
        {"tp": 2, "sequence_parallel": True, "tensor_parallel": "symmetric_memory"},
    ),
    "llama7b-pp2": (2, 4096, 1, 16, LLAMA7B, {"pp": 2}),
    "llama7b-pp2-interleaved": (2, 4096, 1, 16, LLAMA7B, {"pp": 2, "schedule": "interleaved", "virtual_pipeline": 4}),
    "llama7b-pp2-zb_h1": (2, 4096, 1, 16, LLAMA7B, {"pp": 2, "schedule": "zb_h1"}),
    "llama7b-pp2-zb_v": (2, 4096, 1, 16, LLAMA7B, {"pp": 2, "schedule": "zb_v"}),
    "llama3b-32k-cp2": (2, 32768, 1, 2, SHAPES["llama3b"][3], {"cp": 2}),
    "llama3b-32k-tp2": (2, 32768, 1, 2, SHAPES["llama3b"][3], {"tp": 2, "sequence_parallel": True}),
}
SECTIONS = ("mesh", "optimizer", "precision", "kernels")  # whose keys a row may set; of one name, the first
CHUNKS, WARMUP_CHUNKS = 4, 1


def row_config(name: str) -> RunConfig:
    """The run of a row."""
    ranks, length, micro_batch, microbatches, model, keys = ROWS[name]
    config = run_config("llama1b")
    changed: dict[str, Any] = {name: getattr(config, name) for name in SECTIONS}
    for key, value in keys.items():
        name = next(name for name in SECTIONS if key in type(changed[name]).__dataclass_fields__)
        changed[name] = dataclasses.replace(changed[name], **{key: value})
    mesh = changed["mesh"]
    batch = micro_batch * microbatches * ranks // (mesh.tp * mesh.cp * mesh.pp)
    train = dataclasses.replace(config.train, sequence_length=length, micro_batch=micro_batch, global_batch=batch)
    return dataclasses.replace(config, model=type(config.model)(**model), train=train, **changed)


def measure(name: str) -> dict[str, Any]:
    """One rank of a row."""
    config, ranks = row_config(name), ROWS[name][0]
    world = join_world(mesh_of(config, ranks))
    plan = make_plan(config, ranks, facts=None)
    engine = random_engine(config, plan, world)
    batches = [batch.on_context_rank(engine.cp) for batch in random_batches(plan, world.device)]
    step = our_step(engine, batches)
    seconds = statistics.median([chunk_seconds(step) for _ in range(CHUNKS)][WARMUP_CHUNKS:])
    found = {
        "row": name,
        "tokens_per_s_per_gpu": round(plan.tokens_per_step / ranks / seconds),
        "step_s": round(seconds, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss": round(engine.step(batches, 1e-4).read().loss, 4),
        "main": world.is_main,
    }
    engine.optimizer.gathers.release()
    found["kept_bytes"] = round(torch.cuda.memory_allocated() / plan.parameters_per_rank, 2)
    if engine.world.groups["data"].size > 1:
        with without_data_parallel_collectives():
            alone = statistics.median([chunk_seconds(step) for _ in range(CHUNKS - 1)])
        found["exposed"] = round(1 - alone / seconds, 4)
    return found


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
        (reducer, "start_reduce_scatter_", own),
        (reducer, "start_sum_", whole),
        (gathers, "start_all_gather_", whole),
    ]
    with ExitStack() as stack:
        for module, name, stub in stubs:
            stack.enter_context(patch.object(module, name, stub))
        yield


def main() -> None:
    """Measure one row as one of its ranks, or start the ranks of all rows in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", help="file for all rows as JSON")
    parser.add_argument("--row", choices=ROWS, help="measure this one; started by torchrun")
    arguments = parser.parse_args()
    if arguments.row:
        found = measure(arguments.row)
        if found.pop("main"):
            print(json.dumps(found), flush=True)
        return
    rows = []
    for name in [name for _ in range(arguments.rounds) for name in arguments.rows]:
        ranks = ROWS[name][0]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        done = subprocess.run([*command, "--row", name], capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            print(f"{name} ended with {done.returncode}", done.stderr[-3000:], sep="\n", flush=True)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
