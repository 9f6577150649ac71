"""Finetuning on one GPU, packed rows of conversations: ours beside transformers, accelerate and peft, in turns.

    python benchmarks/finetune.py [--lora 16] [--shape llama1b] [--rows ours peer peer-compiled] [--rounds 2]

Rows: `ours` with documents that do not attend to each other; `peer`, the loop that trl's SFTTrainer runs (transformers'
model with SDPA, accelerate's bf16, fused AdamW, clipping by the norm) on the same rows as one document each;
`peer-compiled`, the same under torch.compile; `peer-checkpointing`, with trl's default of recomputing each layer;
`peer-padded`, a conversation a row, sorted by length. --lora 0 trains all weights, the peer's in fp32 under autocast.
Lengths are drawn from a log-normal distribution; rows are packed by first fit. Counted are real tokens alone, so bounds
between documents cost ours nothing in the count. Each run is a process of its own; a table of medians comes last. A
process prints the time of each step as it ends, so one that is cut off leaves its steps. --row NAME --turn FILE has one
row in this process, and times steps only while it holds the lock of FILE, so that other rows may compile meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.one_gpu import LLAMA, LLAMA1B, LLAMA3B, kernel_table, our_step, random_engine
from trainer.config.sections import (
    DataSection,
    LoRASection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.models.stage import Microbatch
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import join_world
from trainer.plan.plan import make_plan

TINY = LLAMA | {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 128}
# name -> (tokens of a row, rows of a microbatch, microbatches, model section)
SHAPES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama1b": (4096, 2, 4, LLAMA1B),
    "llama3b": (4096, 1, 8, LLAMA3B),
    "tiny": (256, 2, 2, TINY | {"vocab_size": 1000}),  # for a CPU
}
PEERS = ("peer", "peer-compiled", "peer-checkpointing", "peer-padded")
WARMUP_STEPS, STEPS = 3, 8
MEDIAN, SPREAD, SHORTEST = 0.12, 0.8, 8  # tokens of a conversation: the median in rows, the sigma of its logarithm
FAILED_LINES, RUN_LIMIT_S = 30, "400"


def conversations(shape: str) -> list[list[list[int]]]:
    """The lengths of the conversations of each row of each microbatch: first fit, the longest first."""
    length, rows, microbatches, _ = SHAPES[shape]
    drawn = np.random.default_rng(3).lognormal(np.log(MEDIAN * length), SPREAD, 4 * rows * microbatches * 8)
    room: list[tuple[int, list[int]]] = []
    for size in sorted(np.clip(drawn.astype(int), SHORTEST, length).tolist(), reverse=True):
        fits = next((i for i, (left, _) in enumerate(room) if left >= size), None)
        left, row = (length, []) if fits is None else room.pop(fits)
        room.append((left - size, [*row, size]))
    chosen = np.random.default_rng(4).permutation(len(room))[: rows * microbatches]
    packed = [room[i][1] for i in chosen]
    return [packed[first : first + rows] for first in range(0, len(packed), rows)]


def config_of(shape: str, lora: int) -> RunConfig:
    """A run in bf16, on a CPU in fp32."""
    length, rows, microbatches, model = SHAPES[shape]
    on_gpu = torch.cuda.is_available()
    return RunConfig(
        run=RunSection(folder="unused"),
        model=ModelSection(**model, lora=LoRASection(rank=lora) if lora else None),
        data=DataSection(blend="mock"),
        train=TrainSection(sequence_length=length, global_batch=rows * microbatches, micro_batch=rows, steps=1000),
        optimizer=OptimizerSection(lr=1e-4),
        precision=PrecisionSection(dtype="bf16" if on_gpu else "fp32"),
    )


def our_batches(shape: str, device: torch.device) -> list[Microbatch]:
    """Packed rows with the bounds of their conversations; the rest of a row has no loss."""
    length = SHAPES[shape][0]
    batches = []
    for rows in conversations(shape):
        tokens_BS, ends, mask = _tokens(len(rows), length, device), [0], torch.zeros(len(rows), length)
        positions = torch.zeros(len(rows), length, dtype=torch.int64)
        for number, row in enumerate(rows):
            parts = [*row, *([length - sum(row)] if sum(row) < length else [])]
            positions[number] = torch.cat([torch.arange(part) for part in parts])
            ends += [ends[-1] + end for end in np.cumsum(parts).tolist()]
            mask[number, : sum(row)] = 1
        batches.append(
            Microbatch(
                tokens_BS=tokens_BS,
                labels_BS=tokens_BS.roll(-1, 1),
                loss_mask_BS=mask.to(device),
                positions_BS=positions.to(device),
                bounds=torch.tensor(ends, dtype=torch.int32, device=device),
                longest=max(max(row) for row in rows),
            )
        )
    return batches


def _tokens(rows: int, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(2)
    return torch.randint(0, 900, (rows, length), device=device, generator=generator)


def peer_batches(shape: str, *, padded: bool, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) of each microbatch: whole rows, or a conversation in each row, padded to the longest."""
    length, rows, _, _ = SHAPES[shape]
    if not padded:
        batches = []
        for some in conversations(shape):
            tokens = _tokens(len(some), length, device)
            labels = tokens.clone()
            for number, row in enumerate(some):
                labels[number, sum(row) :] = -100
            batches.append((tokens, labels))
        return batches
    sizes = sorted((size for some in conversations(shape) for row in some for size in row), reverse=True)
    batches = []
    while sizes:
        some = sizes[: max(1, rows * length // sizes[0])]
        sizes = sizes[len(some) :]
        tokens = _tokens(len(some), some[0], device)
        labels = tokens.clone()
        for number, size in enumerate(some):
            labels[number, size:] = -100
        batches.append((tokens, labels))
    return batches


def peer_step(name: str, shape: str, lora: int, device: torch.device) -> tuple[Callable[[], Any], float]:
    """A step of the peer, and the share of its tokens that is padding."""
    import accelerate
    import transformers

    config = config_of(shape, lora)
    model_section = config.model
    on_gpu = device.type == "cuda"
    theirs = transformers.LlamaConfig(
        vocab_size=model_section.vocab_size,
        hidden_size=model_section.hidden_size,
        num_hidden_layers=model_section.num_layers,
        num_attention_heads=model_section.num_heads,
        num_key_value_heads=model_section.num_kv_heads,
        intermediate_size=model_section.ffn_hidden_size,
        max_position_embeddings=SHAPES[shape][0],
        rope_theta=model_section.rope_theta,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with device:
        dtype = torch.bfloat16 if lora and on_gpu else torch.float32
        model: Any = transformers.AutoModelForCausalLM.from_config(theirs, dtype=dtype)
    if name == "peer-checkpointing":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    if lora:
        import peft

        settings = peft.LoraConfig(
            r=lora, lora_alpha=2 * lora, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, settings)
    accelerator = accelerate.Accelerator(mixed_precision="bf16" if on_gpu else "no", cpu=not on_gpu)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
    model, optimizer = accelerator.prepare(model, optimizer)
    run = torch.compile(model) if name == "peer-compiled" else model
    model.train()
    batches = peer_batches(shape, padded=name == "peer-padded", device=device)
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    padding = 1 - count / sum(labels.numel() for _, labels in batches)

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for tokens, labels in batches:
            # As trl gives it: the sum over the tokens of the step is divided by their number.
            loss = run(input_ids=tokens, labels=labels, num_items_in_batch=count).loss
            accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, padding


def measure_row(name: str, shape: str, lora: int, profile: str | None, turn: str | None) -> dict[str, Any]:
    """Real tokens per second and peak memory of one row. Steps are printed as they end."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    real = sum(sum(row) for rows in conversations(shape) for row in rows)
    padding = 1 - real / (SHAPES[shape][0] * sum(map(len, conversations(shape))))
    if name == "ours":
        config = config_of(shape, lora)
        plan = make_plan(config, 1, facts=None)
        engine = random_engine(config, plan, join_world(Mesh(1)))
        step: Callable[[], Any] = our_step(engine, our_batches(shape, device))
    else:
        step, padding = peer_step(name, shape, lora, device)
    _print_step(name, lora, "first", _seconds_of(step, device))  # compiles
    with _turn(turn):
        for number in range(WARMUP_STEPS - 1):
            _print_step(name, lora, f"warm-up {number + 2}", _seconds_of(step, device))
        times = []
        for number in range(STEPS):
            times.append(_seconds_of(step, device))
            _print_step(name, lora, str(number + 1), times[-1])
    if profile:
        Path(profile).write_text(kernel_table(step))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "row": name,
        "lora": lora,
        "real_tokens_per_s": round(real / statistics.median(times)),
        "slowest_step": round(real / max(times)),
        "peak_gib": round(peak, 2),
        "padding": round(padding, 3),
        "loss": round(float(step()), 4),
    }


def _print_step(name: str, lora: int, number: str, seconds: float) -> None:
    print(f"{name} lora {lora} step {number}: {seconds:.4f} s", flush=True)


def _seconds_of(step: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


@contextlib.contextmanager
def _turn(path: str | None) -> Iterator[None]:
    """Hold the lock of this file, for as long as steps are timed."""
    if path is None:
        yield
        return
    with Path(path).open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over the rounds, and ours divided by each."""
    names = dict.fromkeys(row["row"] for row in rows)
    speeds = {name: statistics.median(row["real_tokens_per_s"] for row in rows if row["row"] == name) for name in names}
    lines = ["| row | real tokens/s | GiB | padding | ours / row |", "|---|---|---|---|---|"]
    for name in names:
        one = next(row for row in rows if row["row"] == name)
        ratio = f"{speeds['ours'] / speeds[name]:.3f}" if "ours" in speeds else ""
        lines.append(f"| {name} | {speeds[name]:,.0f} | {one['peak_gib']} | {one['padding']:.1%} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Measure one row, or all of them in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama1b")
    parser.add_argument("--lora", type=int, default=16, help="rank of adapters; 0: all weights")
    parser.add_argument("--rows", nargs="+", choices=("ours", *PEERS), help="default: all whose packages are installed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", help="file for all runs as JSON")
    parser.add_argument("--row", choices=("ours", *PEERS), help="measure this one alone, in this process")
    parser.add_argument("--profile", help="with --row: file for a table of kernels")
    parser.add_argument("--turn", help="with --row: file whose lock is held while steps are timed")
    arguments = parser.parse_args()
    shape, lora = arguments.shape, arguments.lora
    if arguments.row:
        print(json.dumps(measure_row(arguments.row, shape, lora, arguments.profile, arguments.turn)))
        return
    needed = ("transformers", "accelerate", *(["peft"] if lora else []))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing and not arguments.rows:
        print(f"only ours, because {' and '.join(missing)} cannot be imported")
    names = arguments.rows or ["ours", *([] if missing else PEERS)]
    rows: list[dict[str, Any]] = []
    for name in [name for _ in range(arguments.rounds) for name in names]:
        command = ["timeout", RUN_LIMIT_S, sys.executable, __file__, "--row", name, "--shape", shape]
        done = subprocess.run([*command, "--lora", str(lora)], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name} ended with {done.returncode}", *done.stderr.splitlines()[-FAILED_LINES:], sep="\n")
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
