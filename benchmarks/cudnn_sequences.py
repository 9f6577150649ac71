"""Attention within sequences by cuDNN on a GPU: a check of each case (first), times, and training runs with it.

    python benchmarks/cudnn_sequences.py first | few | times | gpt on|off STEPS | bert-graphs on|off STEPS | bert on|off STEPS
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

import torch

from trainer.kernels import cudnn_sequences, gpu, plain
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape
from trainer.layers.attention import Documents

torch.cuda.set_device(0)
DEVICE = torch.device("cuda", 0)


def draw(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def off(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def first(few=False):
    """Case by case what works, with times of planning: each failure is told and the next goes on."""
    def attempt(name, run):
        begin = time.perf_counter()
        try:
            result = run()
            torch.cuda.synchronize()
        except BaseException as error:  # noqa: BLE001
            print(f"{name}: FAILED {type(error).__name__}: {str(error)[:600]}", flush=True)
            traceback.print_exc()
            if "CUDA error" in str(error) or "illegal" in str(error):
                raise SystemExit(1)
            return
        print(f"{name}: {result} ({time.perf_counter() - begin:.2f} s)", flush=True)

    attempt("library", lambda: cudnn_sequences._library().backend_version())
    for kind, mask, groups, strided in itertools.product(
        ("forward", "backward", "inference"), ("none", "top_left", "bottom_right"), (16, 4), (False, True)
    ):
        if few:
            break
        of_k = 64 * groups
        distances = ((16 + 2 * groups) * 64,) * 3 if strided else (1024, of_k, of_k)
        case = cudnn_sequences._Case(
            DEVICE, torch.bfloat16, 16, groups, 64, distances, 128, (512, 512), (32768, 32768), mask, 0.125, kind
        )

        def plan(case=case):
            made = cudnn_sequences._Plan(case)
            names = getattr(made._graph, "plans", None)
            return f"workspace {made._workspace_bytes / 2**20:.1f} MiB, plan {names and names[made._graph._plan_index]}"

        attempt(f"plan {kind} {mask} groups {groups} {'views' if strided else 'contiguous'}", plan)
    for dtype in (torch.bfloat16, torch.float16):
        attempt(f"differs_by {dtype}", lambda dtype=dtype: cudnn_sequences.differs_by(DEVICE, dtype))

    def parts(heads, groups, bounds, causal, layout, gaps=False):
        tokens, sizes = bounds[-1], (heads, groups, groups)
        qkv, dy = draw(1, tokens, heads + 2 * groups, 64), draw(1, tokens, heads, 64, seed=1)
        documents = Documents(
            torch.tensor(bounds, dtype=torch.int32, device="cuda"), max(b - a for a, b in itertools.pairwise(bounds))
        )
        ours, right = qkv.clone().requires_grad_(), qkv.float().requires_grad_()
        split = [x if layout == "views" else x.contiguous() for x in ours.split(sizes, dim=2)]
        places = cudnn_sequences.touching(documents.bounds, documents.longest)
        y = cudnn_sequences.attention(tuple(x.flatten(0, 1) for x in split), (places, places), causal=causal)
        if y is None:
            return "no plan"
        y = y.view(dy.shape)
        expected = plain.document_attention(*right.split(sizes, dim=2), documents, None, None, causal)
        y.backward(dy), expected.backward(dy.float())
        grads = [off(a, b) for a, b in zip(ours.grad.split(sizes, 2), right.grad.split(sizes, 2), strict=True)]
        wrong = ((y.float() - expected).abs().amax((0, 2, 3)) > 0.05).nonzero().flatten().tolist()
        return f"y {off(y, expected):.2g} dq dk dv {' '.join(f'{g:.2g}' for g in grads)} NaN {int(y.isnan().sum())} {int(ours.grad.isnan().sum())} wrong rows {wrong[:6]}"

    bounds = {
        "one": [0, 1024], "two": [0, 512, 1024], "odd": [0, 37, 301, 302, 1024], "zero first": [0, 0, 512, 1024],
        "zero inside": [0, 130, 130, 130, 1023, 1024], "zero last": [0, 512, 1024, 1024], "ones": [0, 1, 2, 3, 1024],
        "not a multiple": [0, 100, 777],
    }
    for (name, each), causal, (heads, groups), layout in itertools.product(
        bounds.items(), (True, False), ((8, 8), (8, 2)), ("contiguous", "views")
    ):
        if few and (name not in ("odd", "zero inside") or causal):
            continue
        attempt(
            f"{name} {'causal' if causal else 'all'} {heads}/{groups} {layout}",
            lambda each=each, causal=causal, heads=heads, groups=groups, layout=layout: parts(heads, groups, each, causal, layout),
        )


def timed(run, repeat=20):
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeat * 1e3)
    return statistics.median(times)


def host(run, repeat=50):
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeat):
        run()
    spent = (time.perf_counter() - begin) / repeat * 1e6
    torch.cuda.synchronize()
    return spent


def text_lengths(rows, seed=3):
    import numpy as np

    from benchmarks.text_lengths import MANUALS, row_lengths

    generator = np.random.default_rng(seed)
    made = row_lengths(generator, 512, MANUALS)
    return [int(next(made)) for _ in range(rows)]


def times():
    """us of forward; of both passes, as in docs/design/one-gpu.md, then the host's time of both."""
    def both(name, heads, groups, width, ends, causal, layout):
        bounds, sizes = [0, *ends], (heads, groups, groups)
        longest = max(b - a for a, b in itertools.pairwise(bounds))
        documents = Documents(torch.tensor(bounds, dtype=torch.int32, device="cuda"), longest)
        qkv, dy = draw(1, ends[-1], sum(sizes), width).requires_grad_(), draw(1, ends[-1], heads, width, seed=1)
        split = [x if layout == "views" else x.contiguous() for x in qkv.detach().split(sizes, dim=2)]
        split = [x.requires_grad_() for x in split]
        line = []
        for takes in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(takes)

            def forward():
                with torch.no_grad():
                    return gpu.document_attention(*split, documents, None, None, causal)

            def passes():
                y = gpu.document_attention(*split, documents, None, None, causal)
                return torch.autograd.grad(y, split, dy)

            line.append(f"{timed(forward):.0f}; {timed(passes):.0f}; host {host(passes):.0f}")
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            passes()
            line[-1] += f"; {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"
        torch.backends.cuda.enable_cudnn_sdp(True)
        print(f"| {name}, {layout} | {line[1]} | {line[0]} |", flush=True)

    print("| sequences | flash | cuDNN |\n|---|---|---|")
    lengths = text_lengths(64)
    of_text = list(itertools.accumulate(lengths))
    for layout in ("views", "contiguous"):
        both(f"64 rows of text ({of_text[-1]} tokens), 16 heads of 64", 16, 16, 64, of_text, False, layout)
        both("64 rows of 512", 16, 16, 64, list(range(512, 64 * 512 + 1, 512)), False, layout)
    documents = [37, 500, 1700, 1800, 3000, 4096, 4600, 5200, 5300, 6500, 7000, 8192]
    for layout in ("contiguous", "views"):
        both("8,192 tokens of documents, 32 heads of 64 over 8", 32, 8, 64, documents, True, layout)
    both("8,192 tokens of documents, 16 heads of 128", 16, 16, 128, documents, True, "contiguous")
    both("8,192 tokens of 128 documents of 64, 16 heads of 64", 16, 16, 64, list(range(64, 8193, 64)), True, "contiguous")
    both("one row of 8,192, 32 heads of 64 over 8", 32, 8, 64, [8192], True, "contiguous")
    q, k, v = (draw(4000, 32, 128, seed=s) for s in range(3))
    for heads, counts, lengths in (((q, k, v), (4000,), (4000,)), ((q[:500], k, v), (500,), (4000,)), ((q, k, v), (1000,) * 4, (1000,) * 4)):
        line = []
        for takes in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(takes)
            with torch.no_grad():
                run = lambda: gpu.ragged_attention(*heads, counts, lengths, ScoreShape(), ScoreTensors())  # noqa: E731
                line.append(f"{timed(run):.0f}; host {host(run):.0f}")
        torch.backends.cuda.enable_cudnn_sdp(True)
        print(f"| prompts {counts} of {lengths}, 32 heads of 128 | {line[1]} | {line[0]} |", flush=True)
    length_B = torch.tensor(text_lengths(64), dtype=torch.int32, device="cuda")
    qkv = draw(64, 512, 48, 64)
    split = [x.requires_grad_() for x in qkv.split(16, dim=2)]
    dy, line = draw(64, 512, 16, 64, seed=1), []
    for takes in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(takes)
        line.append(f"{timed(lambda: torch.autograd.grad(gpu.padded_attention(*split, length_B), split, dy)):.0f}")
    torch.backends.cuda.enable_cudnn_sdp(True)
    print(f"| padded rows 64 x 512 of text, both passes | {line[1]} | {line[0]} |")
    # What room that is not used costs.
    places = cudnn_sequences.touching(torch.tensor([0, *of_text], dtype=torch.int32, device="cuda"), 512)
    heads = tuple(draw(of_text[-1], 16, 64, seed=s).requires_grad_() for s in range(3))
    dy = draw(of_text[-1], 16, 64, seed=5)
    for longest, few in ((512, 8), (1024, 8), (4096, 8), (512, 512), (512, 4096)):
        cudnn_sequences.FEWEST_SEQUENCES = few
        room = places._replace(longest=longest)
        spent = timed(lambda: torch.autograd.grad(cudnn_sequences.attention(heads, (room, room), causal=False), heads, dy))
        print(f"room for {max(128, few)} sequences of {longest}: {spent:.0f} us of both passes", flush=True)
    cudnn_sequences.FEWEST_SEQUENCES = 8
    before = time.perf_counter()
    count = len(cudnn_sequences._plans())
    for longest in (2048, 8192):
        room = places._replace(longest=longest)
        cudnn_sequences.attention(heads, (room, room), causal=False)
    torch.cuda.synchronize()
    made = len(cudnn_sequences._plans()) - count
    print(f"{made} plans in {time.perf_counter() - before:.2f} s")


def step_losses(engine, batches_of_steps, tokens):
    steps = int(sys.argv[3])
    losses, norms, times = [], [], []
    for number in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        report = engine.step(batches_of_steps[number % len(batches_of_steps)], 1e-4).read()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        losses.append(round(float(report.loss), 4))
        norms.append(round(float(report.grad_norm), 3))
        print(number, losses[-1], norms[-1], f"{times[-1] * 1e3:.1f} ms", flush=True)
        if not math.isfinite(losses[-1]):
            print("the loss is not finite", flush=True)
    print(
        json.dumps(
            {
                "tokens_per_s": round(tokens / statistics.median(times[steps // 3 :])),
                "plans": len(cudnn_sequences._plans()),
                "without": sum(p is None for p in cudnn_sequences._plans().values()),
                "works": [f"{k[1]} {v}" for k, v in cudnn_sequences._trials().items()],
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                "losses": losses,
                "norms": norms[:10],
            }
        ),
        flush=True,
    )


def gpt():
    from dataclasses import replace

    from benchmarks import one_gpu
    from trainer.parallel.mesh import Mesh
    from trainer.parallel.world import join_world
    from trainer.plan.plan import make_plan

    length, micro, microbatches, model = one_gpu.SHAPES["llama1b"]
    one_gpu.SHAPES["small"] = (length, micro, microbatches, model | {"num_layers": 4, "vocab_size": 32768})
    config = one_gpu.run_config("small")
    plan, world = make_plan(config, 1, facts=None), join_world(Mesh(1))
    engine = one_gpu.random_engine(config, plan, world)
    generator = torch.Generator().manual_seed(5)

    def documents(batch):
        rows, columns = batch.tokens_BS.shape
        ends = []
        for row in range(rows):
            at = 0
            while at < columns:
                at = min(columns, at + int(torch.randint(37, 1200, (1,), generator=generator)))
                ends.append(row * columns + at)
        bounds = torch.tensor([0, *ends], dtype=torch.int32)
        token = torch.arange(rows * columns, dtype=torch.int32)
        begin = bounds[torch.searchsorted(bounds, token, right=True) - 1]
        positions = (token - begin).view(rows, columns).long().cuda()
        return replace(batch, positions_BS=positions, bounds=bounds.cuda(), longest=int(bounds.diff().max()))

    steps = [[documents(batch) for batch in one_gpu.random_batches(plan, world.device)] for _ in range(6)]
    step_losses(engine, steps, plan.tokens_per_step)


def bert(graphs):
    from benchmarks import bert_t5
    from benchmarks.one_gpu import random_engine
    from benchmarks.text_lengths import MANUALS
    from trainer.parallel.mesh import Mesh
    from trainer.parallel.world import join_world
    from trainer.plan.plan import make_plan

    shape = bert_t5.SHAPES["bert-large"]
    config = bert_t5.run_config(shape, tiny=False, graphs=graphs)
    plan, world = make_plan(config, 1, facts=None), join_world(Mesh(1))
    batches = bert_t5.batches_of(shape, "text", MANUALS, 30_000, world.device, few_sizes=graphs)
    engine = random_engine(config, plan, world)
    step_losses(engine, batches, plan.tokens_per_step)


if __name__ == "__main__":
    what = sys.argv[1]
    warnings.simplefilter("always", RuntimeWarning)
    if "off" in sys.argv:
        torch.backends.cuda.enable_cudnn_sdp(False)
    run = {"first": first, "few": lambda: first(True), "times": times, "gpt": gpt, "bert": lambda: bert(False), "bert-graphs": lambda: bert(True)}
    run[what]()
