"""What the collectives of tensor parallelism cost on CPU ranks: ours against gloo's own.

    python benchmarks/collectives.py [--ranks 2] [--kib 512]

Each function runs in turn on all ranks, several hundred times in one process group, for a message of the size that
one layer of the quickstart's model sends. Prints median and 90th percentile in ms, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trainer.parallel.collectives import Group, all_gather, reduce_scatter

CALLS, WARM_UP = 300, 20


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kib", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # the last rank to leave removes the store itself
        mp.spawn(measure, args=(f"{folder}/store", arguments.ranks, arguments.kib), nprocs=arguments.ranks)


def measure(rank: int, store: str, ranks: int, kib: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    axis = Group("tp", ranks, rank, dist.group.WORLD)
    whole = torch.randn(ranks * 64, kib * 4 // ranks)  # kib KiB of fp32
    part = whole[:64].clone()
    gathered, scattered = torch.empty_like(whole), torch.empty_like(part)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all-gather": (
            lambda: all_gather(part, axis),
            lambda: dist.all_gather_into_tensor(gathered, part),
        ),
        "reduce-scatter": (
            lambda: reduce_scatter(whole, axis),
            lambda: dist.reduce_scatter_tensor(scattered, whole),
        ),
    }
    for name, (ours, theirs) in pairs.items():
        (our_median, our_tail), (their_median, their_tail) = timed(ours), timed(theirs)
        if rank == 0:
            print(
                f"{name:16} ours {our_median:.2f} ms (p90 {our_tail:.2f})   gloo {their_median:.2f} ms "
                f"(p90 {their_tail:.2f})   ours/gloo {our_median / their_median:.2f}",
                flush=True,
            )
    dist.destroy_process_group()


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Median and 90th percentile of a call, in ms."""
    seconds = []
    for number in range(WARM_UP + CALLS):
        began = time.perf_counter()
        call()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=10)[-1] * 1e3


if __name__ == "__main__":
    main()
