"""Decoding speed on one GPU for published shapes with random weights, ours beside its peers and beside the bound.

    python benchmarks/decode.py [--shapes llama1b llama7b] [--rows ours fp8 gpt-fast transformers] [--batches 1 64]
    python benchmarks/decode.py --nproc 2 --rows ours fp8    # tp 2
    python benchmarks/decode.py --row ours --shape llama1b --batch 1 --profile kernels.txt
    python benchmarks/decode.py --requests 10000 [--row fp8] --shape llama1b --batch 32

Rows: `ours`, the engine of `mtrain generate` (its scheduler, sampling and texts' bookkeeping are in the time); `fp8`,
the same with weights in FP8; `gather`, the same without the Triton kernel of attention; `library`, the same without
the kernel for one token; `gpt-fast`, the loop of that project in short (decode_peer.py); `transformers` with a static
cache, which it compiles itself; `transformers-batch`, its continuous batching. With --nproc N the first four divide
the model over N ranks, and the bound is that of a rank.
Batch 1 begins with 10 tokens and goes on to 1,000; other batches have prompts of 1,000 tokens, and go from 10 to 1,000
once more for the ratio of late steps to early ones. The bound is the bytes
of weights and cache over the bandwidth of a copy that is measured in the same process. --requests draws lengths of
prompts and texts, cancels every tenth, and prints by how many bytes a new token the memory of the GPU and of the
process grows after the first fifth, and how much it has grown after each eighth of the rest; an interrupt ends it
early. Each row is a process of its own (with --nproc, one for each rank) with a time limit; a line of JSON for each,
and a table last. bf16, greedy.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.decode_peer import GptFast, transformers_batches, transformers_loop
from benchmarks.one_gpu import HYBRID, MAMBA1B
from trainer.config.sections import DataSection, ModelSection, OptimizerSection, RunConfig, RunSection, TrainSection
from trainer.kernels import paged_attention, plain
from trainer.layers.linear import Linear, use_one_row_kernel
from trainer.models.family import family_of
from trainer.models.float8_layers import keep_float8_weights
from trainer.models.gpt.model import GPT
from trainer.models.gpt.shape import GPTShape
from trainer.models.mamba.shape import MambaShape
from trainer.models.stage import only_tokens
from trainer.parallel.mesh import Mesh
from trainer.parallel.params import Place
from trainer.parallel.placement import Placement, find_placement
from trainer.parallel.world import World, join_world, leave_world
from trainer.run.launch import rank_environment
from trainer.serve.free_lists import FreeLists, freeze_loaded
from trainer.tasks.engine import DecodeEngine, Request
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "tie_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": LLAMA | {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300},
    "llama1b": LLAMA
    | {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 8192}
    | {"vocab_size": 128256, "rope_theta": 500000.0, "tie_embeddings": True},
    "llama7b": LLAMA
    | {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "ffn_hidden_size": 11008, "vocab_size": 32000},
    "mamba2-1.3b": MAMBA1B,  # for ours alone
    "hybrid-8l": HYBRID,
}
OURS = ("ours", "fp8", "gather", "library")
ROWS = (*OURS, "gpt-fast", "transformers", "transformers-batch")
SHORT, LONG = 10, 1000  # tokens of a prompt, at batch 1 and at others
STEPS = 96  # of other batches, and of each measured part at batch 1
CHUNK = 2048  # tokens of a prefill
LIMIT_S = 240  # of one process


def random_model(shape: str, world: World, *, dtype: torch.dtype) -> tuple[Model, GPTShape]:
    """A model whose weights are drawn on the device."""
    config = RunConfig(
        run=RunSection(folder="unused"),
        model=ModelSection(**SHAPES[shape]),
        data=DataSection(blend="unused"),
        train=TrainSection(sequence_length=2048, global_batch=1, micro_batch=1, steps=1),
        optimizer=OptimizerSection(lr=1e-4),
    )
    family = family_of(config)
    sizes = family.shape(config, SHAPES[shape]["vocab_size"])
    tp = world.groups["tp"]
    place = Place(tp_rank=tp.rank, tp_size=tp.size)
    module = family.build(sizes, place, groups={"tp": tp}, dtype=dtype, device=world.device).eval()
    generator = torch.Generator(world.device).manual_seed(1)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    vocab = sizes.vocab_size
    return Model(module=module, world=world, vocab_size=vocab, rows=vocab, context=2048, name=shape), sizes


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes together."""
    size = 1 << (31 if device.type == "cuda" else 24)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / best_seconds(lambda: target.copy_(source), device)


def best_seconds(call: Callable[[], Any], device: torch.device, *, rounds: int = 5) -> float:
    """The shortest of some rounds, after one to warm up."""
    times = []
    for _ in range(rounds + 1):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def wait(device: torch.device) -> None:
    """Until the device has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weight_bytes(model: Model, sizes: GPTShape) -> int:
    """Bytes of a rank's weights that every token reads: all but an embedding that is not the head as well."""
    tensors = list(model.module.parameters())
    for layer in model.module.modules():
        if isinstance(layer, Linear) and layer.kept_rows is not None:
            tensors += layer.kept_rows
    embedding = 0 if sizes.tie_embeddings else model.module.embedding.weight.nbytes
    return sum(tensor.nbytes for tensor in tensors) - embedding


def cache_bytes(sizes: GPTShape, tokens: float, *, tp: int = 1, element: int = 2) -> float:
    """Bytes of keys and values of so many tokens on a rank, and of the states of a row, which are read and written."""
    layers, states = sizes.num_layers, 0.0
    if isinstance(sizes, MambaShape):
        layers = sizes.pattern.count("*")
        states = 2 * 4 * sizes.pattern.count("M") * sizes.mixer.inner * sizes.mixer.state_size / tp
    return 2 * layers * sizes.num_kv_heads / tp * sizes.head_dim * element * tokens + states


def prompts(batch: int, vocab: int) -> list[list[int]]:
    """Random ones, of equal length."""
    generator = torch.Generator().manual_seed(2)
    length = SHORT if batch == 1 else LONG
    return torch.randint(0, vocab, (batch, length), generator=generator).tolist()


def our_row(row: str, shape: str, batch: int, profile: str | None) -> dict[str, Any]:
    """The engine; tokens/s of its steps."""
    place = find_placement(os.environ) or Placement()
    world = join_world(Mesh(place.world_size, place.world_size), placement=place)
    device, tp = world.device, place.world_size
    model, sizes = random_model(shape, world, dtype=torch.bfloat16)
    use_variant(row, model.module, device)
    new = LONG + 4 - SHORT
    if batch > 1:
        new = STEPS + 16 + batch * LONG // CHUNK  # after the steps with prompts, all rows run in STEPS of them
    engine = DecodeEngine(model, max_batch=batch, prefill_chunk=CHUNK, longest=2048)
    rules, texts = Sampling(greedy=True), prompts(batch, sizes.vocab_size)

    def begin(texts: list[list[int]], tokens: int) -> None:
        for number, text in enumerate(texts):
            engine.add(Request(str(number), text, rules, max_tokens=tokens))

    def finish() -> None:
        while engine.busy:
            engine.step()
        wait(device)

    begin(texts, 8)
    finish()  # compiles and records
    long_texts = prompts(max(batch, 4), sizes.vocab_size)[:batch]
    prefills = list[float]()
    for _ in range(3):
        begin(long_texts, 1)
        wait(device)
        start = time.perf_counter()
        finish()
        prefills.append(time.perf_counter() - start)
    prefill_s = min(prefills)
    begin(texts, new)
    steps, found, log_probs = timed_steps(engine, batch)
    facts: dict[str, Any] = {
        "kernel": device.type == "cuda"
        and paged_attention.works(
            device,
            torch.bfloat16,
            heads=sizes.num_heads // tp,
            groups=sizes.num_kv_heads // tp,
            width=sizes.head_dim,
        ),
        "graphs": engine._decoder.records,
        "cache_gib": round(engine._decoder.cache_bytes / 2**30, 1),
        "prefill_tokens_per_s": round(batch * LONG / prefill_s),
        "forward_tokens_per_s": round(forward_rate(model, passes=max(1, batch // 2))),
        "log_prob_difference": log_prob_difference(model, texts[0], found["0"], log_probs),
    }
    weights = weight_bytes(model, sizes)
    if batch == 1:
        from_start = steps
    else:
        begin([text[:SHORT] for text in texts], LONG + 4 - SHORT)
        from_start, _, _ = timed_steps(engine, batch)
    early, late = (statistics.median(part) for part in (from_start[:STEPS], from_start[-STEPS:]))
    middles = SHORT + STEPS / 2, LONG - STEPS / 2
    bounds = [weights + batch * cache_bytes(sizes, tokens, tp=tp) for tokens in middles]
    facts["ms_early_late"] = [round(1e3 * early, 3), round(1e3 * late, 3)]
    facts["late_over_early"] = round(late / early, 3)
    facts["late_over_early_of_bound"] = round(bounds[1] / bounds[0], 3)
    rank_bytes = weights + batch * cache_bytes(sizes, len(texts[0]) + new / 2, tp=tp)
    facts |= rates(rank_bytes, batch, statistics.fmean(steps), device)
    if profile:
        begin(texts, 24)
        for _ in range(max(8, -(-batch * len(texts[0]) // CHUNK) + 4)):
            engine.step()
        Path(profile).write_text(kernel_table(lambda: [engine.step() for _ in range(8)]))
    return facts


def timed_steps(engine: DecodeEngine, batch: int) -> tuple[list[float], dict[str, list[int]], list[float]]:
    """Run to the end: seconds of the steps in which all rows decode, tokens of each row, log probabilities of row 0."""
    tokens: dict[str, list[int]] = {}
    log_probs, ends, counts = list[float](), list[float](), list[int]()
    while engine.busy:
        told = engine.step()
        for token in told:
            tokens.setdefault(token.id, []).append(token.token)
            log_probs += [token.logprob] if token.id == "0" else []
        ends.append(time.perf_counter())
        counts.append(len(told))
    # Of a step that is told by the next one, and with no prompt in either.
    full = [all(count == batch for count in part) for part in zip(counts, counts[1:], counts[2:], strict=False)]
    steps = [
        after - before for (before, after), is_full in zip(itertools.pairwise(ends), full, strict=False) if is_full
    ]
    return steps, tokens, log_probs


def rates(rank_bytes: float, batch: int, step_s: float, device: torch.device) -> dict[str, Any]:
    """Tokens/s, and those that the bandwidth of a copy allows for the bytes that a rank reads in a step."""
    speed = bandwidth(device)
    bound = batch * speed / rank_bytes
    return {
        "tokens_per_s": round(batch / step_s, 1),
        "ms_per_step": round(step_s * 1e3, 3),
        "copy_gb_per_s": round(speed / 1e9),
        "bound_tokens_per_s": round(bound, 1),
        "of_bound": round(batch / step_s / bound, 3),
    }


def use_variant(row: str, module: GPT, device: torch.device) -> None:
    """Change a model as a row needs it."""
    if row == "fp8":
        keep_float8_weights(module, device=device)
    elif row == "gather":
        for block in module.blocks.values():
            kernels = dataclasses.replace(block.attention.kernels, paged_attention=plain.paged_attention)
            block.attention.kernels = kernels
    if row in ("ours", "gather"):
        use_one_row_kernel(module, device=device)


def memory_slopes(row: str, shape: str, batch: int, requests: int) -> dict[str, Any]:
    """Bytes a token by which memory grows over the last four fifths of many requests."""
    world = join_world(Mesh(1), placement=Placement())
    device = world.device
    # PyTorch keeps what it compiled for each shape of a product in bf16 on a CPU.
    model, sizes = random_model(shape, world, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    use_variant(row, model.module, device)
    engine, generator = DecodeEngine(model, max_batch=batch, longest=512), random.Random(1)
    engine.warm_up()  # as a rank of `mtrain serve` does
    freeze_loaded()
    free_lists = FreeLists()
    samples: dict[str, list[tuple[int, int]]] = {"rss": [], "allocated": [], "reserved": []}
    tokens = 0
    with contextlib.suppress(KeyboardInterrupt):  # what was seen until then
        for number in range(requests):
            ids = [generator.randrange(sizes.vocab_size) for _ in range(generator.randint(1, 200))]
            rules = Sampling(temperature=generator.choice([0.0, 1.0]), top_p=generator.choice([0.9, 1.0]), seed=number)
            count = generator.randint(1, 60)
            engine.add(Request(str(number), ids, rules, max_tokens=count, top_logprobs=number % 3))
            free_lists.count(1)
            if number % 10 == 0:
                engine.cancel(str(number - 3))
            while engine.load().waiting >= batch or (number + 1 == requests and engine.busy):
                tokens += sum(token.token >= 0 for token in engine.step())
            if number % 50 == 0 and number >= requests // 5:
                statm = Path("/proc/self/statm").read_text().split()
                samples["rss"].append((tokens, int(statm[1]) * os.sysconf("SC_PAGE_SIZE")))
                if device.type == "cuda":
                    samples["allocated"].append((tokens, torch.cuda.memory_allocated()))
                    samples["reserved"].append((tokens, torch.cuda.memory_reserved()))
    growth: dict[str, Any] = {"requests": number + 1, "tokens": tokens}
    for name, points in samples.items():
        if points:
            growth[f"{name}_bytes_per_token"] = round(statistics.linear_regression(*zip(*points, strict=True)).slope, 4)
            sizes = [size for _, size in points]
            growth[f"{name}_kib"] = [(sizes[i * (len(sizes) - 1) // 8] - sizes[0]) >> 10 for i in range(9)]
    return growth


@torch.no_grad()
def forward_rate(model: Model, *, passes: int) -> float:
    """Tokens/s of so many of training's forward passes through the blocks, each of two rows of 1,000 tokens.

    In one go and with random tokens, since a GPU at its limit of power is faster in a short burst, and with tokens
    that are all the same, than with the prompts.
    """
    device = model.world.device
    tokens = torch.tensor(prompts(2, model.vocab_size), device=device)

    def run() -> None:
        for _ in range(passes):
            model.module._through_blocks((), only_tokens(tokens))

    return passes * tokens.numel() / best_seconds(run, device, rounds=3)


def log_prob_difference(model: Model, prompt: list[int], new: list[int], log_probs: list[float]) -> float:
    """The largest difference between the engine's log probabilities and those of a pass over the whole row."""
    whole = [*prompt, *new]
    scores = model.score([whole]).log_prob_BS[0, len(prompt) - 1 :].tolist()
    return round(max(abs(a - b) for a, b in zip(scores, log_probs, strict=True)), 4)


def kernel_table(call: Callable[[], Any]) -> str:
    """Where the time of the device goes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
        torch.cuda.synchronize()
    return str(found.key_averages().table(sort_by="cuda_time_total", row_limit=40))


def peer_row(row: str, shape: str, batch: int) -> dict[str, Any]:
    """Seconds a step of a peer: the difference between a long and a short generation."""
    world = join_world(Mesh(1), placement=Placement())
    device = world.device
    model, sizes = random_model(shape, world, dtype=torch.bfloat16)
    weights = weight_bytes(model, sizes)
    ids = torch.tensor(prompts(batch, sizes.vocab_size), device=device)
    batched = row == "transformers-batch"
    few, many = 8, 8 + (24 if batched else 3 * STEPS if batch == 1 else STEPS)
    if row == "gpt-fast":
        run = GptFast(model.module, sizes, batch=batch, length=2048).run
    else:
        del model
        torch.cuda.empty_cache()
        run = transformers_batches(sizes, device, most=many) if batched else transformers_loop(sizes, device)
    run(ids, many)  # compiles, and makes what is kept
    rounds = 1 if batched else 2
    short, long = (best_seconds(lambda count=count: run(ids, count), device, rounds=rounds) for count in (few, many))
    rank_bytes = weights + batch * cache_bytes(sizes, ids.shape[1] + many / 2)
    return rates(rank_bytes, batch, (long - short) / (many - few), device)


def in_processes(row: str, shape: str, batch: int, nproc: int) -> dict[str, Any]:
    """A row in a process of its own, or in one for each rank, of which the first prints it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    command = [sys.executable, __file__, "--row", row, "--shape", shape, "--batch", str(batch)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe, ranks = subprocess.PIPE, list[subprocess.Popen[str]]()
    for rank in range(nproc):
        environment = rank_environment(rank, nproc, store.port) if nproc > 1 else None
        ranks.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        return {"failed": f"longer than {LIMIT_S} s"}
    finally:
        for rank in ranks:
            rank.kill()
    lines = outputs[0][0].strip().splitlines()
    if any(rank.returncode for rank in ranks) or not lines:
        return {"failed": "\n".join((err or out)[-1500:] for out, err in outputs)}
    warned = [line for line in outputs[0][1].splitlines() if "without CUDA graphs" in line]
    return {**json.loads(lines[-1]), **({"warned": warned} if warned else {})}


def main() -> int:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama1b", "llama7b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", default=["ours", "gpt-fast", "transformers"], choices=ROWS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--nproc", type=int, default=1, help="ranks along tp, of our rows")
    parser.add_argument("--row", choices=ROWS, help="only this one, in this process")
    parser.add_argument("--shape", default="llama1b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--profile", help="with --row ours: write the table of kernels here")
    parser.add_argument("--requests", type=int, help="the growth of memory over so many requests")
    arguments = parser.parse_args()
    if arguments.requests:
        row = arguments.row or "ours"
        print(json.dumps(memory_slopes(row, arguments.shape, arguments.batch, arguments.requests)), flush=True)
        leave_world()
        return 0
    if arguments.row:
        call = (arguments.row, arguments.shape, arguments.batch)
        try:
            facts = our_row(*call, arguments.profile) if arguments.row in OURS else peer_row(*call)
        except Exception:
            traceback.print_exc()
            os._exit(1)  # threads of transformers' continuous batching stay
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(facts), flush=True)
        leave_world()
        os._exit(0)
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    table = []
    for shape in arguments.shapes:
        for batch in arguments.batches:
            for name in arguments.rows:
                nproc = arguments.nproc if name in OURS else 1
                facts = in_processes(name, shape, batch, nproc)
                row = f"{name} tp{nproc}" if nproc > 1 else name
                print(json.dumps({"shape": shape, "batch": batch, "row": row, **facts}), flush=True)
                told = facts.get("tokens_per_s", "failed"), facts.get("of_bound", "")
                table.append(
                    f"| {shape} | {batch} | {row} | {told[0]} | {facts.get('bound_tokens_per_s', '')} | {told[1]} |"
                )
    print("| shape | batch | row | tokens/s | bound | of the bound |\n|---|---|---|---|---|---|")
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
