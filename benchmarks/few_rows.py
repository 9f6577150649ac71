"""Products of one to four tokens with the weights of a Llama, which decoding consists of, on one GPU.

    python benchmarks/few_rows.py [--tokens 1 2 4] [--shapes llama1b llama7b]

For each linear layer of a shape: PyTorch's product in bf16, PyTorch's in FP8 with the rounding of tokens before it, and
the kernel of trainer/kernels/few_rows.py in bf16 and FP8 by tiles (outputs x inputs of a program, stages, warps). Each
time is that of a CUDA graph of products with different matrices, together larger than the cache, divided by their
number; beside it the share of the bandwidth of a copy that the weight's bytes reach.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.decode import bandwidth, best_seconds
from trainer.kernels import few_rows
from trainer.kernels.few_rows import Tile
from trainer.kernels.float8 import Float8Rows, float8_rows, scaled_mm_rows_product

LAYERS = {  # inputs, outputs
    "tiny": {"out": (64, 48)},
    "llama1b": {"qkv": (2048, 3072), "out": (2048, 2048), "up": (2048, 16384), "down": (8192, 2048)},
    "llama7b": {"qkv": (4096, 12288), "out": (4096, 4096), "up": (4096, 22016), "down": (11008, 4096)},
}
TILES = (Tile(), Tile(4, 1024, 1), Tile(2, 1024), Tile(2, 2048), Tile(8, 512), Tile(8, 1024, 3), Tile(4, 2048, 3, 8))
TILES += (Tile(1, 2048), Tile(16, 512), Tile(2, 512, 4, 2), Tile(4, 512, 6, 2))
BYTES = 256 << 20  # of all matrices of a graph
GRAPHS = 9


def each_us(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Time of a call, of all in one CUDA graph."""

    def run_all() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return 1e6 * best_seconds(run_all, device, rounds=1) / len(calls)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            run_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    times = []
    for _ in range(GRAPHS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times) / len(calls)


def calls_of(x: Tensor, weights: Sequence[Tensor], rows: Sequence[Float8Rows]) -> dict[str, list[Callable[[], Any]]]:
    """Products with each matrix, by the name of the implementation."""
    on_gpu = x.is_cuda
    quantize = torch.compile(float8_rows) if on_gpu else float8_rows
    result: dict[str, list[Callable[[], Any]]] = {
        "bf16 PyTorch": [lambda w=w: F.linear(x, w) for w in weights],
        "FP8 PyTorch": [lambda r=r: scaled_mm_rows_product(quantize(x), r, dtype=torch.bfloat16) for r in rows],
    }
    for tile in TILES:
        name = f"{tile.outputs}x{tile.inputs} {tile.stages} {tile.warps}"
        result[f"bf16 {name}"] = [
            lambda w=w, tile=tile: few_rows.launch(x, w, None, dtype=torch.bfloat16, tile=tile) for w in weights
        ]
        result[f"FP8 {name}"] = [
            lambda r=r, tile=tile: few_rows.launch(x, *r, dtype=torch.bfloat16, tile=tile) for r in rows
        ]
    return result


def main() -> int:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--shapes", nargs="+", default=["llama1b", "llama7b"], choices=LAYERS)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    copy = bandwidth(device)
    print(f"copy {copy / 1e9:.0f} GB/s, torch {torch.__version__}", flush=True)
    for shape in arguments.shapes:
        for layer, (inputs, outputs) in LAYERS[shape].items():
            count = max(2, BYTES // (2 * inputs * outputs)) if device.type == "cuda" else 2
            weights = [0.02 * torch.randn(outputs, inputs, device=device).bfloat16() for _ in range(count)]
            rows = [float8_rows(weight) for weight in weights]
            for tokens in arguments.tokens:
                x = torch.randn(tokens, inputs, device=device).bfloat16()
                for name, calls in calls_of(x, weights, rows).items():
                    try:
                        us = each_us(calls, device)
                    except Exception as error:  # a tile that does not compile; the others go on
                        print(f"{shape} {layer} {tokens} {name}: {type(error).__name__}: {error}"[:300], flush=True)
                        continue
                    share = inputs * outputs * (1 if "FP8" in name else 2) / copy / us * 1e6
                    print(f"{shape:8} {layer:5} {tokens} tokens  {name:18} {us:8.2f} us  {share:5.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
