"""The cost of model options and of recomputation on one GPU: speed, and memory compared with the plan's estimate.

    python benchmarks/one_gpu_options.py [--shapes llama1b gpt1.3b] [--rows none selective ...] [--out FILE.json]

Rows: `none`, `selective`, `full`, `full-4` (chunks of four layers) and `block-8` (the first eight layers) recompute;
`documents` has rows of several documents with masks between them; `dropout` drops 10 % of the hidden features;
`deterministic` is run.deterministic; `reduced-sums` lets cuBLAS add parts of a product in bf16, which the trainer
forbids. Each row is a process of its own. Activations are what one microbatch adds to the memory that is held between
steps: at the end of its forward pass (`kept`) and at most (`peak`); the estimate is the one that `mtrain plan` prints.
Speed is measured as in one_gpu.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.one_gpu import (
    CHUNK_STEPS,
    CHUNKS,
    RUN_LIMIT_S,
    SHAPES,
    WARMUP_CHUNKS,
    our_step,
    random_batches,
    random_engine,
    run_config,
)
from trainer.config.sections import RecomputeSection, RunConfig
from trainer.models.stage import Microbatch
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import join_world
from trainer.plan.memory import activation_bytes
from trainer.plan.plan import make_plan
from trainer.run.determinism import make_deterministic

RECOMPUTE = {
    "none": RecomputeSection(),
    "selective": RecomputeSection(mode="selective"),
    "full": RecomputeSection(mode="full"),
    "full-4": RecomputeSection(mode="full", layers=4),
    "block-8": RecomputeSection(mode="full", method="block", layers=8),
}
ROWS = (*RECOMPUTE, "documents", "dropout", "deterministic", "reduced-sums")
DOCUMENT_TOKENS = (700, 90, 1200, 37)  # lengths of documents, in turn


def row_config(name: str, shape: str) -> RunConfig:
    """The run of a row."""
    config = run_config(shape)
    if name in RECOMPUTE:
        return dataclasses.replace(config, recompute=RECOMPUTE[name])
    if name == "deterministic":
        return dataclasses.replace(config, run=dataclasses.replace(config.run, deterministic=True))
    if name == "reduced-sums":
        return config
    if name == "documents":
        return dataclasses.replace(config, data=dataclasses.replace(config.data, document_masks=True))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_dropout=0.1))


def with_documents(batch: Microbatch) -> Microbatch:
    """The same tokens as documents of the lengths above."""
    rows, length = batch.tokens_BS.shape
    bounds = {0, *range(0, rows * length + 1, length)}
    at, turn = 0, 0
    while (at := at + DOCUMENT_TOKENS[turn % len(DOCUMENT_TOKENS)]) < rows * length:
        bounds.add(at)
        turn += 1
    ends = torch.tensor(sorted(bounds), dtype=torch.int32)
    lengths = ends.diff()
    starts = torch.repeat_interleave(ends[:-1], lengths)
    positions_BS = (torch.arange(rows * length) - starts).view(rows, length)
    device = batch.tokens_BS.device
    return dataclasses.replace(
        batch, bounds=ends.to(device), longest=int(lengths.max()), positions_BS=positions_BS.to(device)
    )


def measure_row(name: str, shape: str) -> dict[str, Any]:
    """Speed and memory of one row."""
    config = row_config(name, shape)
    make_deterministic(config)
    plan, world = make_plan(config, 1, facts=None), join_world(Mesh(1))
    if name == "reduced-sums":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    batches = random_batches(plan, world.device)
    if name == "documents":
        batches = [with_documents(batch) for batch in batches]
    if name == "dropout":
        numbers = torch.arange(plan.micro_batch, device=world.device)
        batches = [dataclasses.replace(batch, samples_B=numbers + i) for i, batch in enumerate(batches)]
    engine = random_engine(config, plan, world)
    step = our_step(engine, batches)
    for _ in range(2):
        step()
    times = []
    for _ in range(CHUNKS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CHUNK_STEPS):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / CHUNK_STEPS)
    peak = torch.cuda.max_memory_allocated()
    return {
        "row": name,
        "shape": shape,
        "tokens_per_s": round(plan.tokens_per_step / statistics.median(times[WARMUP_CHUNKS:])),
        "peak_gib": round(peak / 2**30, 2),
        "estimate_gib": round(activation_bytes(config, plan) / 2**30, 3),
        **activations(engine.model, batches[0]),
    }


def activations(model: Any, batch: Microbatch) -> dict[str, float]:
    """GiB that one microbatch adds: after its forward pass, and at most until the end of its backward pass."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    loss, *_ = model((), batch)
    kept, forward = torch.cuda.memory_allocated() - held, torch.cuda.max_memory_allocated() - held
    torch.autograd.backward(loss)
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - held
    return {name: round(value / 2**30, 3) for name, value in (("kept", kept), ("forward", forward), ("peak", most))}


def main() -> None:
    """Measure one row, or each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama1b"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--out", help="file for all rows as JSON")
    parser.add_argument("--row", choices=ROWS, help="measure this one alone, in this process")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure_row(arguments.row, arguments.shapes[0])))
        return
    found = []
    for shape in arguments.shapes:
        for name in arguments.rows:
            command = ["timeout", RUN_LIMIT_S, sys.executable, __file__, "--row", name, "--shapes", shape]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name} {shape} ended with {done.returncode}", done.stderr[-2000:], sep="\n", flush=True)
                continue
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(done.stdout.splitlines()[-1], flush=True)
            if arguments.out:
                Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
