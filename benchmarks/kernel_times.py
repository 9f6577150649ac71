"""Times of the implementations of each operation beside each other, on one GPU, in bf16.

    python benchmarks/kernel_times.py

For each key of the section [kernels] the implementations that this machine has, at the sizes of a Llama with 2,048
features and 8,192 tokens; then attention within sequences by flash attention and by cuDNN, the gradients of experts'
weights, and a linear layer's products in bf16 and in FP8. A time is the median of 20 readings by events, after warm-up,
over inputs that are larger than the GPU's cache; the first column is what importing and testing the library took.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.text_lengths import row_lengths
from mdata import UsageError
from trainer.config.sections import KernelsSection
from trainer.kernels import gpu
from trainer.kernels.float8 import E4M3, E5M2, Scaling
from trainer.kernels.plain import AdamConstants, AdamState, ScoreTensors, add_product
from trainer.kernels.scores import ScoreShape
from trainer.kernels.table import Kernels, choose_kernels, float8_kernels
from trainer.layers.attention import Documents

TOKENS, WIDTH, INNER = 8192, 2048, 8192
BATCH, LENGTH, HEADS, GROUPS, HEAD = 2, 4096, 32, 8, 64
UPDATED = 50_000_000  # elements
READINGS = 20
HOST_CYCLES = 80_000_000  # about 40 ms, in which the host starts all readings
NAMES = {
    "norm": ("compiled", "library", "transformer_engine", "apex"),
    "attention": ("auto", "transformer_engine"),
    "optimizer": ("compiled", "apex"),
    "weight_gradient": ("auto", "apex"),
}
# Experts, inputs, outputs and rows of 8,192 tokens: of Qwen3-30B-A3B, and of eight larger ones.
EXPERTS = {
    "128 experts' up": (128, 2048, 1536, 65536),
    "128 experts' down": (128, 768, 2048, 65536),
    "8 experts' up": (8, 2048, 11264, 16384),
    "8 experts' down": (8, 5632, 2048, 16384),
}
# Heads, their groups and width, ends of sequences among flat tokens, and whether the mask is causal.
DOCUMENTS = (37, 500, 1700, 1800, 3000, 4096, 4600, 5200, 5300, 6500, 7000, 8192)
SEQUENCES = {
    "64 rows of text": (16, 16, 64, (), False),
    "64 rows of 512": (16, 16, 64, range(512, 32769, 512), False),
    "12 documents": (32, 8, 64, DOCUMENTS, True),
    "12 documents, wide heads": (32, 8, 128, DOCUMENTS, True),
    "128 documents of 64": (16, 16, 64, range(64, 8193, 64), True),
    "one document": (32, 8, 64, (8192,), True),
}
# New tokens of each prompt, and all of them.
PROMPTS = (((4000,), (4000,)), ((500,), (4000,)), ((2048,), (16384,)), ((1000,) * 4, (1000,) * 4))
LINEARS = {"qkv": (WIDTH, 3072), "out": (WIDTH, WIDTH), "up": (WIDTH, 2 * INNER), "down": (INNER, WIDTH)}


def median_us(run: Callable[[], Any]) -> float:
    """Time on the device of one call; the device is kept busy first, so that it never waits for the host."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(READINGS)]
    torch.cuda._sleep(HOST_CYCLES)
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def draw(*size: int) -> Tensor:
    """Random bf16."""
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def norm_runs(kernels: Kernels) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Both norms, forward with the addition and backward with the gradient of the sum."""
    x, branch, dsum, dy, (weight, bias) = *(draw(TOKENS, WIDTH) for _ in range(4)), draw(2, WIDTH)
    total, _, *kept = kernels.rms_norm(x, branch, weight, None, 1e-5)
    yield "RMSNorm forward", lambda: kernels.rms_norm(x, branch, weight, None, 1e-5)
    yield "RMSNorm backward", lambda: kernels.rms_norm_backward(dsum, dy, total, weight, *kept)
    total, _, *kept = kernels.layer_norm(x, branch, weight, bias, 1e-5)
    yield "LayerNorm forward", lambda: kernels.layer_norm(x, branch, weight, bias, 1e-5)
    yield "LayerNorm backward", lambda: kernels.layer_norm_backward(dsum, dy, total, weight, *kept)


def attention_runs(kernels: Kernels) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Causal attention with fewer key-value heads."""
    q, dy = (draw(BATCH, LENGTH, HEADS, HEAD) for _ in range(2))
    k, v = (draw(BATCH, LENGTH, GROUPS, HEAD) for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()
    y = kernels.attention(q, k, v, None)
    yield "attention forward", lambda: kernels.attention(q, k, v, None)
    yield "attention backward", lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)


def optimizer_runs(kernels: Kernels) -> Iterator[tuple[str, Callable[[], Any]]]:
    """AdamW over 50 million elements."""
    weight, first, gradient = (torch.randn(UPDATED, device="cuda") for _ in range(3))
    state = AdamState(weight, first, torch.rand_like(weight), weight.bfloat16())
    numbers = torch.tensor([1.0, 1e-4, 0.1, 0.05, 1.0], device="cuda")
    applied, constants = torch.tensor(True, device="cuda"), AdamConstants(0.9, 0.95, 1e-8, 0.1)
    yield "AdamW", lambda: kernels.adamw_(state, gradient, numbers, applied, constants)


def weight_gradient_runs(kernels: Kernels) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The weight's gradient of each linear layer, added to fp32."""
    for name, (inputs, outputs) in LINEARS.items():
        target, dy, x = torch.zeros(outputs, inputs, device="cuda"), draw(TOKENS, outputs), draw(TOKENS, inputs)
        yield f"weight's gradient of {name}", lambda t=target, dy=dy, x=x: kernels.add_product(t, dy, x_NI=x)


RUNS = {
    "norm": norm_runs,
    "attention": attention_runs,
    "optimizer": optimizer_runs,
    "weight_gradient": weight_gradient_runs,
}


def sequence_lines() -> Iterator[str]:
    """Attention within sequences, forward and both passes; heads are views of one projection."""
    for name, (heads, groups, width, given, causal) in SEQUENCES.items():
        rows = row_lengths(np.random.default_rng(3), 512)
        bounds = [0, *(given or itertools.accumulate(next(rows) for _ in range(64)))]
        longest = max(end - first for first, end in itertools.pairwise(bounds))
        documents = Documents(torch.tensor(bounds, dtype=torch.int32, device="cuda"), longest)
        parts = draw(1, bounds[-1], heads + 2 * groups, width).split((heads, groups, groups), dim=2)
        qkv, dy = [x.requires_grad_() for x in parts], draw(1, bounds[-1], heads, width)
        attend = partial(gpu.document_attention, documents=documents, scale=None, ends=None, causal=causal)
        forward = partial(torch.no_grad()(attend), *qkv)

        def passes(qkv: list[Tensor] = qkv, dy: Tensor = dy, attend: Callable[..., Tensor] = attend) -> Any:
            return torch.autograd.grad(attend(*qkv), qkv, dy)

        yield f"{name} ({bounds[-1]} tokens): {_by_both(forward, passes)}"
    for counts, lengths in PROMPTS:
        q, k, v = draw(sum(counts), 32, 128), *draw(2, sum(lengths), 8, 128).unbind()
        tensors = ScoreTensors()
        attend = torch.no_grad()(partial(gpu.ragged_attention, q, k, v, counts, lengths, ScoreShape(), tensors))
        yield f"{counts} of {lengths} tokens of prompts: {_by_both(attend)}"


def _by_both(*runs: Callable[[], Any]) -> str:
    """Times of the device and of the host, and the memory that the last takes."""
    of_kernels = []
    for kernel, by_cudnn in (("flash", False), ("cuDNN", True)):
        torch.backends.cuda.enable_cudnn_sdp(by_cudnn)
        times = "; ".join(f"{median_us(run):.0f} (host {host_us(run):.0f})" for run in runs)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        runs[-1]()
        of_kernels.append(f"{kernel} {times} us {(torch.cuda.max_memory_allocated() - held) / 2**20:.0f} MiB")
    torch.backends.cuda.enable_cudnn_sdp(True)
    return ", ".join(of_kernels)


def host_us(run: Callable[[], Any]) -> float:
    """Time in which the host starts one call."""
    torch.cuda.synchronize()
    torch.cuda._sleep(HOST_CYCLES)
    start = time.perf_counter()
    for _ in range(READINGS):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / READINGS * 1e6


def expert_gradient_lines() -> Iterator[str]:
    """The gradients of experts' weights, added to fp32: by torch's grouped product and an addition, by our kernel."""
    for name, (experts, inputs, outputs, rows) in EXPERTS.items():
        target = torch.zeros(experts, outputs, inputs, device="cuda")
        dy, x = draw(rows, outputs), draw(rows, inputs)
        share = torch.rand(experts, device="cuda").add(0.5)  # loads of 0.5 to 1.5 times the mean
        end_E = (share.cumsum(0) / share.sum() * rows).int()
        runs: dict[str, Callable[..., None]] = {"torch": gpu.add_with_torch}
        if gpu.adds_with_triton(target.device):
            blocks = (gpu.GRADIENT_BLOCK, (128, 128), (64, 256))
            runs |= {f"Triton {o} x {i}": partial(gpu.add_with_triton, block=(o, i)) for o, i in blocks}
        calls = {what: partial(run, target, dy, x_MI=x, end_E=end_E) for what, run in runs.items()}
        yield f"gradients of {name} us: {', '.join(f'{what} {median_us(call):.0f}' for what, call in calls.items())}"


def float8_lines() -> Iterator[str]:
    """A linear layer's parts in FP8 beside its products in bf16."""
    start = time.perf_counter()
    quantize, product = float8_kernels(torch.device("cuda"))
    yield f"FP8: import and self-test {time.perf_counter() - start:.1f} s"
    for name, (inputs, outputs) in LINEARS.items():
        x, dy, weight = draw(TOKENS, inputs), draw(TOKENS, outputs), draw(outputs, inputs)
        main, one = torch.zeros(outputs, inputs, device="cuda"), torch.ones(1, device="cuda")
        x8, w8 = (quantize(m, E4M3, scaling=Scaling(one, one), columns=True) for m in (x, weight))
        g8 = quantize(dy, E5M2, scaling=Scaling(one, one), columns=True)
        rows, columns = ([getattr(matrix, side) for matrix in (x8, w8, g8)] for side in ("rows", "columns"))
        runs: dict[str, Callable[[], Any]] = {
            "bf16 forward": lambda x=x, w=weight: x @ w.t(),
            "bf16 input": lambda dy=dy, w=weight: dy @ w,
            "bf16 weight": lambda main=main, dy=dy, x=x: add_product(main, dy, x_NI=x),
            "FP8 forward": lambda r=rows: product(r[0], r[1], dtype=torch.bfloat16, fast=True),
            "FP8 input": lambda r=rows, c=columns: product(r[2], c[1], dtype=torch.bfloat16),
            "input, fast": lambda r=rows, c=columns: product(r[2], c[1], dtype=torch.bfloat16, fast=True),
            "FP8 weight": lambda c=columns, m=main: product(c[2], c[0], dtype=torch.float32, out=m, add=True),
            "weight, fast": lambda c=columns, m=main: product(
                c[2], c[0], dtype=torch.float32, out=m, add=True, fast=True
            ),
            "round x": lambda x=x, one=one: quantize(x, E4M3, scaling=Scaling(one, one), columns=True),
            "round dy": lambda dy=dy, one=one: quantize(dy, E5M2, scaling=Scaling(one, one), columns=True),
            "by its own scale": lambda x=x: quantize(x, E4M3, scaling=Scaling(None, None), columns=True),
        }
        yield f"{name} us: " + ", ".join(f"{what} {median_us(run):.0f}" for what, run in runs.items())


def main() -> None:
    """Print a line for each operation and implementation."""
    device = torch.device("cuda")
    for group, names in NAMES.items():
        for name in names:
            start = time.perf_counter()
            try:
                kernels = choose_kernels(device, torch.bfloat16, KernelsSection(**{group: name}))
            except UsageError as error:
                print(error, flush=True)
                continue
            ready = time.perf_counter() - start
            with torch.no_grad() if group != "attention" else torch.enable_grad():
                times = ", ".join(f"{what} {median_us(run):.0f}" for what, run in RUNS[group](kernels))
            print(f"{group} {name} ({ready:.1f} s) us: {times}", flush=True)
    for line in sequence_lines():
        print(line, flush=True)
    with torch.no_grad():
        for line in itertools.chain(expert_gradient_lines(), float8_lines()):
            print(line, flush=True)


if __name__ == "__main__":
    main()
