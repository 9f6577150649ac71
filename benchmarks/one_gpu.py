"""Training speed of one GPU on published shapes, ours beside plain PyTorch under torch.compile, in turns.

    python benchmarks/one_gpu.py [--shapes llama1b gpt1.3b llama3b] [--rounds 2] [--out one_gpu.json]
    python benchmarks/one_gpu.py --row ours --shapes llama1b --profile kernels.txt

Each row is a process of its own; a table of medians and their ratio comes last. Our step is the trainer's own
(`Engine.step`: forward, backward, norm, clipping, update); only the data is left out, seeded random tokens that lie on
the device. Time counts from one wait for the device to the next. bf16, 4 to 8 microbatches a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.one_gpu_peer import peer_step
from trainer.config.sections import (
    DataSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import World, join_world
from trainer.pipeline.executor import Microbatch
from trainer.plan.plan import Plan, make_plan
from trainer.run.engine import Engine

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "rope_theta": 500000.0, "vocab_size": 128256}
GPT = {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": True, "vocab_size": 50432}
LLAMA1B = LLAMA | {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 8192}
LLAMA3B = LLAMA | {"num_layers": 28, "hidden_size": 3072, "num_heads": 24, "num_kv_heads": 8, "ffn_hidden_size": 8192}
GPT1B = GPT | {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "ffn_hidden_size": 8192}
# name -> (sequence length, micro batch, microbatches, model section)
SHAPES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama1b": (4096, 2, 4, LLAMA1B),
    "gpt1.3b": (2048, 4, 4, GPT1B),
    "llama3b": (4096, 1, 8, LLAMA3B),
}
STEPS, WARMUP = 12, 4


def run_config(shape: str) -> RunConfig:
    """A run of the shape in bf16, its embedding tied to its head."""
    length, micro_batch, microbatches, model = SHAPES[shape]
    batch = micro_batch * microbatches
    return RunConfig(
        run=RunSection(folder="unused"),
        model=ModelSection(**model),
        data=DataSection(blend="unused"),
        train=TrainSection(sequence_length=length, global_batch=batch, micro_batch=micro_batch, steps=1000),
        optimizer=OptimizerSection(lr=1e-4),
        precision=PrecisionSection(dtype="bf16"),
    )


def random_engine(config: RunConfig, plan: Plan, world: World) -> Engine:
    """An engine whose weights are drawn on the device, which takes no time."""
    engine = Engine(config, plan, world=world, fresh=False)
    generator = torch.Generator(world.device).manual_seed(1)
    for slot in engine.layout.slots:
        spec, weight = slot.spec, engine.optimizer.state["weight"][slot.start : slot.start + slot.spec.numel]
        weight.normal_(0.0, spec.std, generator=generator) if spec.std else weight.fill_(spec.fill)
    engine.optimizer.publish()
    return engine


def random_batches(plan: Plan, device: torch.device) -> list[Microbatch]:
    """One step's microbatches of random tokens; every token counts."""
    generator = torch.Generator(device).manual_seed(2)
    size = (plan.micro_batch, plan.sequence_length + 1)
    texts = (torch.randint(0, 32000, size, device=device, generator=generator) for _ in range(plan.num_microbatches))
    return [Microbatch(t[:, :-1], t[:, 1:], torch.ones(t[:, 1:].shape, device=device)) for t in texts]


def measure_row(name: str, shape: str, profile: str | None) -> dict[str, Any]:
    """Steps of ours or of the peer."""
    began = time.perf_counter()
    config = run_config(shape)
    plan, world = make_plan(config, 1, facts=None), join_world(Mesh(1))
    batches = random_batches(plan, world.device)
    if name == "ours":
        engine = random_engine(config, plan, world)
        step: Callable[[], float] = lambda: engine.step(batches, 1e-4).loss  # noqa: E731
    else:
        step = peer_step(plan.shape, [(b.tokens_BS, b.labels_BS) for b in batches])
    times, losses, ready = [], [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(step())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        ready.append(time.perf_counter() - began)
    if profile:
        Path(profile).write_text(kernel_table(step))
    return {
        "row": name,
        "shape": shape,
        "tokens_per_s": round(plan.tokens_per_step / statistics.median(times[WARMUP:])),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_step_s": round(ready[0], 1),
        "loss": [round(losses[0], 4), round(losses[-1], 4)],
    }


def kernel_table(step: Callable[[], float]) -> str:
    """The kernels of one step by their time, and the longest times in which none ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels: dict[str, list[float]] = {}
    gaps, end = [], None
    for event in sorted(events, key=lambda event: event.time_range.start):
        kernels.setdefault(event.name, []).append(event.device_time)
        gaps.append((event.time_range.start - (end or event.time_range.start), event.name))
        end = max(end or 0, event.time_range.end)
    spent = sorted(((sum(t), len(t), name) for name, t in kernels.items()), reverse=True)
    lines = [f"{sum(t for t, _, _ in spent) / 1e3:.1f} ms of kernels, {sum(g for g, _ in gaps) / 1e3:.1f} ms of gaps"]
    lines += [
        f"{total / 1e3:8.2f} ms {count:5d} x {total / count:9.1f} us  {name[:120]}" for total, count, name in spent
    ]
    lines += [f"{gap:8.1f} us before {name[:120]}" for gap, name in sorted(gaps, reverse=True)[:20]]
    return "\n".join(lines) + "\n"


def measure_in_turns(shapes: list[str], rounds: int) -> list[dict[str, Any]]:
    """A process a row, ours and the peer's in turns."""
    rows = []
    for shape in shapes:
        for _ in range(rounds):
            for name in ("ours", "peer"):
                command = [sys.executable, __file__, "--row", name, "--shapes", shape]
                output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                rows.append(json.loads(output.splitlines()[-1]))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over the rounds."""
    lines = [
        "| shape | ours, tokens/s | GiB | first step, s | torch.compile | GiB | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        found = {
            name: [
                statistics.median(row[key] for row in rows if (row["row"], row["shape"]) == (name, shape))
                for key in ("tokens_per_s", "peak_gib", "first_step_s")
            ]
            for name in ("ours", "peer")
        }
        (ours, memory, first), (peer, peer_memory, _) = found["ours"], found["peer"]
        lines.append(
            f"| {shape} | {ours:,.0f} | {memory} | {first} | {peer:,.0f} | {peer_memory} | {ours / peer:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure one row, or all of them in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", help="file for all rows as JSON")
    parser.add_argument("--row", choices=["ours", "peer"], help="measure this one alone, in this process")
    parser.add_argument("--profile", help="with --row: file for a table of kernels")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure_row(arguments.row, arguments.shapes[0], arguments.profile)))
        return
    rows = measure_in_turns(arguments.shapes, arguments.rounds)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
