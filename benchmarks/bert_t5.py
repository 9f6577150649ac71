"""Training speed of BERT and T5 on one GPU, ours compared with its peers, in turns.

    python benchmarks/bert_t5.py [--shapes bert-large t5-base ...] [--rows full text] [--rounds 2] [--out FILE.json]
    python benchmarks/bert_t5.py --run ours --shapes bert-large --rows text --profile kernels.txt
    python benchmarks/bert_t5.py --rows text --lengths CORPUS.idx     # documents as long as those of another corpus
    python benchmarks/bert_t5.py --tiny              # small models on a CPU: whether it runs

Runs: `ours`; `ours+graphs`, the same with CUDA graphs and tokens in few sizes; `transformers`, under torch.compile with
PyTorch's attention; `megatron` where megatron-core and Transformer Engine are installed. A peer runs the shapes that it
has: transformers the post-norm BERT and the T5 of relative positions, megatron-core the pre-norm BERT and the T5 of
learned positions (`bert-large-pre`, `t5-220m`), of the same sizes. `full`: every row is full. `text`: rows as the
samplers cut them from real text (text_lengths.py), 10 % of them with a shorter target. Each run computes logits of
masked tokens only, has no dropout, and is a process of its own; a table of medians and of our speed over each peer's
comes last. What a step is, and how it is timed, stands in one_gpu.py; here the steps differ, so that lengths vary as in
training. Nothing else may run on the machine: between small kernels ours waits for the host.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bert_t5_peers import megatron_step, transformers_step
from benchmarks.megatron_peer import is_installed
from benchmarks.one_gpu import (
    CHUNK_STEPS,
    CHUNKS,
    FAILED_LINES,
    RUN_LIMIT_S,
    WARMUP_CHUNKS,
    kernel_table,
    random_engine,
    seconds_of_process,
)
from benchmarks.text_lengths import MANUALS, TextLengths, corpus_lengths, row_lengths
from trainer.config.parse import parse_config
from trainer.config.sections import RunConfig
from trainer.models.stage import EncoderTokens, Microbatch
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import join_world
from trainer.plan.plan import Plan, make_plan
from trainer.run.data import TOKENS_MULTIPLE, predicted_tokens, real_tokens
from trainer.run.step_report import PendingReport


class Shape(NamedTuple):
    """A published model, and how many rows a microbatch of it has."""

    preset: str
    micro_batch: int
    peer: str
    length: int = 512
    decoder: int = 0  # tokens of a decoder's row; 0: the model has none
    microbatches: int = 2


SHAPES = {
    "bert-large": Shape("bert-large", 64, "transformers"),
    "bert-large-pre": Shape("megatron-bert-345m", 64, "megatron"),
    "t5-base": Shape("t5-base", 64, "transformers", decoder=114),
    "t5-220m": Shape("megatron-t5-220m", 64, "megatron", decoder=114),
    "bert-base": Shape("bert-base", 128, "transformers"),
}
TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "head_dim": 32, "ffn_hidden_size": 128, "vocab_size": 512}
RUNS = ("ours", "ours+graphs", "transformers", "megatron")
ROWS = ("full", "text")
MASKED = 0.15


def run_config(shape: Shape, *, tiny: bool, graphs: bool = False) -> RunConfig:
    """A run of the shape: in bf16, or of its small form in fp32."""
    bert = not shape.decoder
    tables: dict[str, dict[str, Any]] = {
        "run": {"folder": "unused"},
        "model": {"preset": shape.preset, **(TINY if tiny else {})},
        "data": {"blend": "mock", "kind": "bert"} if bert else {
            "blend": "mock", "kind": "t5", "t5": {"decoder_length": shape.decoder}
        },
        "train": {
            "sequence_length": shape.length, "global_batch": shape.micro_batch * shape.microbatches,
            "micro_batch": shape.micro_batch, "steps": 1000,
        },
        "optimizer": {"lr": 1e-4},
        "precision": {"dtype": "fp32" if tiny else "bf16"},
        "kernels": {"cuda_graphs": "on" if graphs else "off"},
    }  # fmt: skip
    if tiny and not bert:
        tables["model"]["num_layers"] = 4
    config, problems = parse_config(tables)
    assert config is not None and not problems, problems
    return config


def small(shape: Shape) -> Shape:
    """A shape for a CPU."""
    return shape._replace(length=64, decoder=16 if shape.decoder else 0, micro_batch=4)


def batches_of(
    shape: Shape, rows: str, text: TextLengths, vocabulary: int, device: torch.device, *, few_sizes: bool = False
) -> list[list[Microbatch]]:
    """The microbatches of each step of a chunk, seeded, on the device; `few_sizes` as in `to_device`."""
    generator = np.random.default_rng(3)
    lengths = row_lengths(generator, shape.length, text) if rows == "text" else itertools.repeat(shape.length)
    how = {"shape": shape, "vocabulary": vocabulary, "device": device, "few_sizes": few_sizes}
    return [
        [
            padded_rows(generator, np.array([next(lengths) for _ in range(shape.micro_batch)]), **how)
            for _ in range(shape.microbatches)
        ]
        for _ in range(CHUNK_STEPS)
    ]


def padded_rows(
    generator: np.random.Generator,
    lengths: np.ndarray,
    shape: Shape,
    vocabulary: int,
    device: torch.device,
    *,
    few_sizes: bool,
) -> Microbatch:
    """A microbatch of BERT, or of T5 if the shape has a decoder, with rows of these lengths."""
    make = _spans if shape.decoder else _pairs
    return make(generator, lengths, shape, vocabulary, device, few_sizes)


def _pairs(
    generator: np.random.Generator,
    lengths: np.ndarray,
    shape: Shape,
    vocabulary: int,
    device: torch.device,
    few_sizes: bool,
) -> Microbatch:
    size = (len(lengths), shape.length)
    place = np.arange(shape.length)
    real = place < lengths[:, None]
    order = np.where(real, generator.random(size), 2.0).argsort(axis=1).argsort(axis=1)
    loss = ((order < np.maximum(1, np.round(MASKED * lengths))[:, None]) & real).astype(np.float32)
    types = (real & (place >= lengths[:, None] // 2)).astype(np.int64)
    told = predicted_tokens(loss, TOKENS_MULTIPLE if device.type == "cuda" else 1, few_sizes=few_sizes)
    tokens, labels = (generator.integers(0, vocabulary, size) for _ in range(2))
    multiple = TOKENS_MULTIPLE if device.type == "cuda" else 16
    real = real_tokens(lengths, shape.length, multiple, device, few_sizes=few_sizes)
    told_lengths = None if (lengths == shape.length).all() else torch.from_numpy(lengths.astype(np.int32)).to(device)
    moved = [torch.from_numpy(x).to(device) for x in (tokens, labels, loss, types, told)]
    return Microbatch(
        tokens_BS=moved[0],
        labels_BS=moved[1],
        loss_mask_BS=moved[2],
        types_BS=moved[3],
        predicted_M=moved[4],
        real=real,
        lengths_B=told_lengths,
        swapped_B=torch.from_numpy(generator.integers(0, 2, len(lengths))).to(device),
    )


def _spans(
    generator: np.random.Generator,
    lengths: np.ndarray,
    shape: Shape,
    vocabulary: int,
    device: torch.device,
    few_sizes: bool,
) -> Microbatch:
    decoded = np.maximum(2, np.round(lengths * shape.decoder / shape.length)).astype(np.int32)
    read = generator.integers(0, vocabulary, (len(lengths), shape.length))
    tokens, labels = (generator.integers(0, vocabulary, (len(lengths), shape.decoder)) for _ in range(2))
    loss = (np.arange(shape.decoder) < decoded[:, None]).astype(np.float32)
    numbers = (tokens, labels, loss, decoded, read, lengths.astype(np.int32))
    moved, multiple = [torch.from_numpy(x).to(device) for x in numbers], TOKENS_MULTIPLE if device.type == "cuda" else 8
    read_real = real_tokens(lengths, shape.length, multiple, device, few_sizes=few_sizes)
    return Microbatch(
        tokens_BS=moved[0],
        labels_BS=moved[1],
        loss_mask_BS=moved[2],
        lengths_B=moved[3],
        encoder=EncoderTokens(moved[4], moved[5], read_real),
        real=real_tokens(decoded, shape.decoder, multiple, device, few_sizes=few_sizes),
    )


def share_of_text(batches: list[list[Microbatch]]) -> float:
    """The share of tokens that are no padding, those of both stacks together."""
    parts = []
    for batch in itertools.chain(*batches):
        stacks = [(batch.tokens_BS, batch.lengths_B)] + ([batch.encoder[:2]] if batch.encoder else [])
        parts += [(tokens.numel() if n is None else int(n.sum()), tokens.numel()) for tokens, n in stacks]
    return sum(real for real, _ in parts) / sum(size for _, size in parts)


def measure(name: str, which: str, rows: str, text: TextLengths, *, tiny: bool, profile: str | None) -> dict[str, Any]:
    """Steps of ours or of a peer, in this process."""
    shape = small(SHAPES[which]) if tiny else SHAPES[which]
    graphs = name == "ours+graphs" and not tiny
    config = run_config(shape, tiny=tiny, graphs=graphs)
    plan, world = make_plan(config, 1, facts=None), join_world(Mesh(1))
    device = world.device
    batches = batches_of(shape, rows, text, min(plan.shape.vocab_size, 30_000), device, few_sizes=graphs)
    step = _stepper(name, config, plan, world, batches)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    chunks, warmup = (2, 0) if tiny else (CHUNKS, WARMUP_CHUNKS)
    times, losses = [], [float(step())]
    sync()
    ready = seconds_of_process()
    for _ in range(chunks):
        start = time.perf_counter()
        found = [step() for _ in range(CHUNK_STEPS)]
        sync()
        times.append((time.perf_counter() - start) / CHUNK_STEPS)
        losses.append(float(found[-1]))
    if profile:
        Path(profile).write_text(kernel_table(step))
    return {
        "run": name,
        "shape": which,
        "rows": rows,
        "samples_per_s": round(shape.micro_batch * shape.microbatches / statistics.median(times[warmup:]), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else 0,
        "first_step_s": round(ready, 1),
        "text": round(share_of_text(batches), 3),
        "loss": [round(losses[0], 4), round(losses[-1], 4)],
    }


def _stepper(
    name: str, config: RunConfig, plan: Plan, world: Any, batches: list[list[Microbatch]]
) -> Callable[[], float]:
    """A function that trains a step, on the batches of one step after the other."""
    if not name.startswith("ours"):
        return (transformers_step if name == "transformers" else megatron_step)(plan.shape, batches)
    engine, turn, running = random_engine(config, plan, world), itertools.cycle(batches), deque[PendingReport]()

    def step() -> float:
        running.append(engine.step(next(turn), 1e-4))
        return running.popleft().read().loss if len(running) > 1 else float("nan")

    return step


def measure_in_turns(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A process for each run, in turns. A run that fails is shown and left out of later rounds."""
    failed = set()
    for shape, rows, _, name in itertools.product(arguments.shapes, arguments.rows, range(arguments.rounds), RUNS):
        if name not in ("ours", "ours+graphs", SHAPES[shape].peer) or (name, shape, rows) in failed:
            continue
        if name == "megatron" and not (is_installed() or (arguments.tiny and importlib.util.find_spec("megatron"))):
            continue
        command = ["timeout", RUN_LIMIT_S, sys.executable, __file__, "--run", name, "--shapes", shape, "--rows", rows]
        command += ["--tiny"] * arguments.tiny + (["--lengths", arguments.lengths] if arguments.lengths else [])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            failed.add((name, shape, rows))
            lines = done.stderr.splitlines()[-FAILED_LINES:]
            print(f"{name} {shape} {rows} ended with {done.returncode}", *lines, sep="\n", flush=True)
            continue
        yield json.loads(done.stdout.splitlines()[-1])


def table(runs: list[dict[str, Any]]) -> str:
    """Medians over the rounds, and ours divided by each."""
    lines = [
        "| shape | rows | text | run | samples/s | runs | GiB | first step, s | ours / run | memory, ours / run |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape, rows in dict.fromkeys((run["shape"], run["rows"]) for run in runs):
        of = {}
        for run in runs:
            if (run["shape"], run["rows"]) == (shape, rows):
                of.setdefault(run["run"], []).append(run)
        speeds = {name: statistics.median(run["samples_per_s"] for run in each) for name, each in of.items()}
        memory = {name: max(run["peak_gib"] for run in each) for name, each in of.items()}
        for name, each in of.items():
            numbers = " ".join(f"{run['samples_per_s']:,}" for run in each)
            ratio = f"{speeds['ours'] / speeds[name]:.3f}" if "ours" in speeds else ""
            more = f"{memory['ours'] / memory[name]:.2f}" if memory.get("ours") and memory[name] else ""
            first = statistics.median(run["first_step_s"] for run in each)
            lines.append(
                f"| {shape} | {rows} | {each[0]['text']:.0%} | {name} | {speeds[name]:,.1f} | {numbers} "
                f"| {memory[name]} | {first} | {ratio} | {more} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure one run, or all of them in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--lengths", metavar="CORPUS.idx", help="a corpus of sentences; default: manual pages")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU")
    parser.add_argument("--out", help="file for all runs as JSON")
    parser.add_argument(
        "--run", choices=RUNS, help="measure this one alone, in this process, on the first shape and rows"
    )
    parser.add_argument("--profile", help="with --run: file for a table of kernels")
    arguments = parser.parse_args()
    if arguments.run:
        first = (arguments.run, arguments.shapes[0], arguments.rows[0])
        text = corpus_lengths(Path(arguments.lengths)) if arguments.lengths else MANUALS
        print(json.dumps(measure(*first, text, tiny=arguments.tiny, profile=arguments.profile)))
        return
    runs = []
    for run in measure_in_turns(arguments):
        runs.append(run)
        print(json.dumps(run), flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(runs, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
