"""Training speed on one GPU for published shapes, ours compared with its peers, in turns.

    python benchmarks/one_gpu.py [--shapes llama1b gpt1.3b llama3b] [--rows ours torch] [--rounds 2] [--out FILE.json]
    python benchmarks/one_gpu.py --row ours --shapes llama1b --profile kernels.txt

Shapes mamba2-1.3b and hybrid-8l have mixers: their peers are `mamba-ssm` and `fla` (mamba_peer.py). `ours-mamba-ssm` is
our step with the peer's scan and convolution, and `ours-plain` our step with the plain ones.

Rows: `ours`, with `-fp8` delayed, `-fp8-current` current and `-fp8-blocks` blockwise scaling, each also with
`-graphs` behind its name, recorded as CUDA graphs; `torch`, plain PyTorch under torch.compile; `megatron` and its
variants, where megatron-core and Transformer Engine are installed; `nanogpt`, nanoGPT's compiled loop, only where it
is named (PYTHONPATH has its folder), for gpt124m and gpt124m-one-row, whose kernels are over before the host has
launched the next. Each run of a row is a process of its own; a table of medians and of our speed over each peer's
comes last. Our step is the trainer's own (`Engine.step`: forward, backward, norm, clipping, update); only the data is
left out, seeded random tokens that lie on the device. Time is that of four steps at once, with one wait for the
device after them: losses are tensors until then, ours are read a step later, as the trainer does it. The first step
counts from the start of its process: cold in the first round, with the compilers' caches filled after it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.mamba_peer import SCANS, mamba_step
from benchmarks.mamba_peer import is_installed as has_scan
from benchmarks.megatron_peer import ROWS as MEGATRON_ROWS
from benchmarks.megatron_peer import is_installed, megatron_step
from benchmarks.one_gpu_peer import nanogpt_step, peer_step
from trainer.config.sections import (
    DataSection,
    KernelsSection,
    MambaSection,
    ModelSection,
    MoESection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.models.stage import Microbatch
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import World, join_world
from trainer.plan.plan import Plan, make_plan
from trainer.run.engine import Engine
from trainer.run.step_report import PendingReport

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "rope_theta": 500000.0, "vocab_size": 128256}
GPT = {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": True, "vocab_size": 50432}
LLAMA1B = LLAMA | {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 8192}
LLAMA3B = LLAMA | {"num_layers": 28, "hidden_size": 3072, "num_heads": 24, "num_kv_heads": 8, "ffn_hidden_size": 8192}
GPT124M = GPT | {"vocab_size": 50304, "num_layers": 12, "hidden_size": 768, "num_heads": 12, "bias": False}
GPT1B = GPT | {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "ffn_hidden_size": 8192}
# Eight experts of which two compute a token: 1.0 billion active parameters of 3.5. 2,048 tokens for each expert.
MIXTRAL1B = LLAMA | {"num_layers": 12, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8}
MIXTRAL1B |= {"ffn_hidden_size": 5632, "vocab_size": 32000, "moe": MoESection(num_experts=8, top_k=2)}
# Four layers of Qwen3-30B-A3B, which has 48: 128 experts, eight for a token. 512 tokens for each expert.
QWEN3MOE = LLAMA | {"num_layers": 4, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128}
QWEN3MOE |= {"ffn_hidden_size": 6144, "vocab_size": 151936, "qk_norm": True, "norm_epsilon": 1e-6}
QWEN3MOE |= {"moe": MoESection(num_experts=128, top_k=8, ffn_hidden_size=768, balance_factor=1e-3)}
MAMBA1B = {"family": "mamba", "position": "none", "norm": "rmsnorm", "num_layers": 48, "hidden_size": 2048}
MAMBA1B |= {"num_heads": 1, "vocab_size": 50288, "mamba": MambaSection(num_groups=1, chunk_size=256)}
# Eight layers of the form and width of Nemotron-H-8B, which has 52.
HYBRID = {"family": "mamba", "position": "none", "norm": "rmsnorm", "activation": "squared_relu", "num_layers": 8}
HYBRID |= {"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "ffn_hidden_size": 21504}
HYBRID |= {"vocab_size": 131072, "mamba": MambaSection(pattern="M-M-M*M-", num_groups=8)}
MIXED = ("mamba2-1.3b", "hybrid-8l")
# name -> (sequence length, micro batch, microbatches, model section)
SHAPES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "gpt124m": (1024, 12, 8, GPT124M),
    "gpt124m-one-row": (1024, 1, 8, GPT124M),
    "llama1b": (4096, 2, 4, LLAMA1B),
    "gpt1.3b": (2048, 4, 4, GPT1B),
    "llama3b": (4096, 1, 8, LLAMA3B),
    "mixtral8x1b": (4096, 2, 4, MIXTRAL1B),
    "qwen3moe-4l": (4096, 2, 4, QWEN3MOE),
    "mamba2-1.3b": (4096, 2, 4, MAMBA1B),
    "hybrid-8l": (4096, 1, 8, HYBRID),
}
CHUNKS, CHUNK_STEPS, WARMUP_CHUNKS = 7, 4, 1
# row of ours -> precision.fp8
OUR_ROWS: dict[str, Literal["none", "delayed", "current", "blockwise"]] = {
    "ours": "none",
    "ours-plain": "none",
    "ours-mamba-ssm": "none",
    "ours-fp8": "delayed",
    "ours-fp8-current": "current",
    "ours-fp8-blocks": "blockwise",
}
# row of ours -> kernels.scan
OUR_SCANS: dict[str, Literal["plain", "mamba_ssm"]] = {
    "ours-plain": "plain",
    "ours-mamba-ssm": "mamba_ssm",
}
GRAPHS = "-graphs"  # behind the name of a row of ours
ROWS = (*OUR_ROWS, *(row + GRAPHS for row in OUR_ROWS), "torch", "nanogpt", *MEGATRON_ROWS, *SCANS)
FAILED_LINES = 30  # of a failed process, shown
RUN_LIMIT_S = "300"  # of one process


def run_config(shape: str, row: str = "ours") -> RunConfig:
    """A run of the shape in bf16, its embedding tied to its head; with FP8 where the row of ours has it."""
    length, micro_batch, microbatches, model = SHAPES[shape]
    batch, graphs = micro_batch * microbatches, "on" if row.endswith(GRAPHS) else "off"
    row = row.removesuffix(GRAPHS)
    return RunConfig(
        run=RunSection(folder="unused"),
        model=ModelSection(**model),
        data=DataSection(blend="unused"),
        train=TrainSection(sequence_length=length, global_batch=batch, micro_batch=micro_batch, steps=1000),
        optimizer=OptimizerSection(lr=1e-4),
        precision=PrecisionSection(dtype="bf16", fp8=OUR_ROWS.get(row, "none")),
        kernels=KernelsSection(scan=OUR_SCANS.get(row, "auto"), cuda_graphs=graphs),
    )


def random_engine(config: RunConfig, plan: Plan, world: World) -> Engine:
    """An engine whose weights are drawn on the device, which takes no time."""
    engine = Engine(config, plan, world=world, fresh=False)
    generator = torch.Generator(world.device).manual_seed(1)
    trained = engine.optimizer.holds["weight"], engine.optimizer.state["weight"]
    for held, values in (trained, (engine.buffers.frozen, engine.buffers.parameters.values)):
        for slot, first, stop, at in held.parameters():
            spec, weight = slot.spec, values[at : at + stop - first]
            if spec.spread is not None:  # of any distribution: only its time counts
                weight.uniform_(0.1, 0.5, generator=generator)
                continue
            weight.normal_(0.0, spec.std, generator=generator) if spec.std else weight.fill_(spec.fill)
    engine.optimizer.publish()
    return engine


def random_batches(plan: Plan, device: torch.device) -> list[Microbatch]:
    """One step's microbatches of random tokens; every token counts."""
    generator, most = torch.Generator(device).manual_seed(2), min(32000, plan.shape.vocab_size)
    size = (plan.micro_batch, plan.sequence_length + 1)
    texts = (torch.randint(0, most, size, device=device, generator=generator) for _ in range(plan.num_microbatches))
    return [
        Microbatch(tokens_BS=t[:, :-1], labels_BS=t[:, 1:], loss_mask_BS=torch.ones(t[:, 1:].shape, device=device))
        for t in texts
    ]


def measure_row(name: str, shape: str, profile: str | None, chunks: int = CHUNKS) -> dict[str, Any]:
    """Steps of ours or of a peer, in so many chunks."""
    config = run_config(shape, name)
    plan, world = make_plan(config, 1, facts=None), join_world(Mesh(1))
    batches = random_batches(plan, world.device)
    if name.removesuffix(GRAPHS) in OUR_ROWS:
        engine = random_engine(config, plan, world)
        step: Callable[[], Any] = our_step(engine, batches)
    else:
        texts = [(batch.tokens_BS, batch.labels_BS) for batch in batches]
        if name in SCANS:
            step = mamba_step(name, plan.shape, texts)
        else:
            steps = {"torch": peer_step, "nanogpt": nanogpt_step}
            make = steps.get(name) or partial(megatron_step, MEGATRON_ROWS[name])
            step = make(plan.shape, texts)
    times, losses = [], [float(step())]
    torch.cuda.synchronize()
    ready = seconds_of_process()
    for _ in range(chunks):
        start = time.perf_counter()
        found = [step() for _ in range(CHUNK_STEPS)]
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / CHUNK_STEPS)
        losses.append(float(found[-1]))
    if profile:
        Path(profile).write_text(kernel_table(step))
    return {
        "row": name,
        "shape": shape,
        "tokens_per_s": round(plan.tokens_per_step / statistics.median(times[WARMUP_CHUNKS:])),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "first_step_s": round(ready, 1),
        "loss": [round(losses[0], 4), round(losses[-1], 4)],
    }


def our_step(engine: Engine, batches: list[Microbatch]) -> Callable[[], float]:
    """A step as the loop of a run takes it: the loss is that of the step before, read while this one runs."""
    running: deque[PendingReport] = deque()

    def step() -> float:
        running.append(engine.step(batches, 1e-4))
        return running.popleft().read().loss if len(running) > 1 else float("nan")

    return step


def seconds_of_process() -> float:
    """Wall time since this process began, imports included. Linux."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def kernel_table(step: Callable[[], Any]) -> str:
    """The kernels of one step by their time, and the longest times in which none ran."""
    events = kernel_events(step)
    kernels: dict[str, list[float]] = {}
    gaps, end = [], None
    for event in sorted(events, key=lambda event: event.time_range.start):
        kernels.setdefault(event.name, []).append(event.device_time)
        gaps.append((event.time_range.start - (end or event.time_range.start), event.name))
        end = max(end or 0, event.time_range.end)
    spent = sorted(((sum(t), len(t), name) for name, t in kernels.items()), reverse=True)
    length, busy, computing = busy_times(events)
    idle, communication, total = ((length - busy), (busy - computing), sum(t for t, _, _ in spent))
    lines = [
        f"{length / 1e3:.1f} ms: {idle / 1e3:.1f} without kernels, {communication / 1e3:.1f} of communication alone; "
        f"{total / 1e3:.1f} ms of kernels"
    ]
    lines += [
        f"{total / 1e3:8.2f} ms {count:5d} x {total / count:9.1f} us  {name[:120]}" for total, count, name in spent
    ]
    lines += [f"{gap:8.1f} us before {name[:120]}" for gap, name in sorted(gaps, reverse=True)[:20]]
    return "\n".join(lines) + "\n"


def kernel_events(step: Callable[[], Any]) -> list[Any]:
    """The kernels of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    on_device = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event for event in on_device if not event.name.startswith("nccl:")]  # these repeat kernels


def busy_times(events: list[Any]) -> tuple[float, float, float]:
    """Microseconds: of all, of those in which a kernel runs, and one that is no communication."""
    length = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    return length, covered(events), covered([event for event in events if not event.name.startswith("nccl")])


def covered(events: list[Any]) -> float:
    """Microseconds in which at least one of these kernels runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def rows_of(shape: str, chosen: list[str] | None) -> list[str]:
    """Those that are measured for a shape."""
    if chosen:
        return chosen
    if shape in MIXED:
        return ["ours", *(name for name in SCANS if has_scan(name))]
    return ["ours", "torch", *(["megatron"] if is_installed() else [])]


def measure_in_turns(shapes: list[str], chosen: list[str] | None, rounds: int) -> Iterator[dict[str, Any]]:
    """A process for each run of a row, in turns. A row that fails is shown and left out of later rounds."""
    failed = set()
    for shape in shapes:
        for turn in [name for _ in range(rounds) for name in rows_of(shape, chosen)]:
            if (turn, shape) in failed:
                continue
            command = ["timeout", RUN_LIMIT_S, sys.executable, __file__, "--row", turn, "--shapes", shape]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                failed.add((turn, shape))
                lines = done.stderr.splitlines()[-FAILED_LINES:]
                print(f"{turn} {shape} ended with {done.returncode}", *lines, sep="\n", flush=True)
                continue
            yield json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over the rounds, and ours divided by each, a row in FP8 into ours in FP8."""
    lines = [
        "| shape | row | tokens/s | runs | GiB | first step, s: cold | later | ours / row |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["shape"] == shape:
                found.setdefault(row["row"], []).append(row)
        speeds = {name: statistics.median(run["tokens_per_s"] for run in runs) for name, runs in found.items()}
        for name, runs in found.items():
            each = " ".join(f"{run['tokens_per_s']:,}" for run in runs)
            memory = max(run["peak_gib"] for run in runs)
            cold, *later = (run["first_step_s"] for run in runs)
            warm = statistics.median(later) if later else ""
            ours = "ours-fp8" if "fp8" in name else "ours"
            ratio = f"{speeds[ours] / speeds[name]:.3f}" if ours in speeds else ""
            lines.append(f"| {shape} | {name} | {speeds[name]:,.0f} | {each} | {memory} | {cold} | {warm} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Measure one row, or all of them in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: ours, torch, and megatron where installed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", help="file for all runs as JSON")
    parser.add_argument("--row", choices=ROWS, help="measure this one alone, in this process")
    parser.add_argument("--chunks", type=int, default=CHUNKS, help="with --row: groups of four steps")
    parser.add_argument("--profile", help="with --row: file for a table of kernels")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure_row(arguments.row, arguments.shapes[0], arguments.profile, arguments.chunks)))
        return
    rows = []
    for row in measure_in_turns(arguments.shapes, arguments.rows, arguments.rounds):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
