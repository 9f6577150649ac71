"""The time to draw a model's initial weights, each rank its own share of them.

    torchrun --nproc-per-node 2 benchmarks/draw_weights.py --ranks 2 [--preset llama2-7b]

Prints the seconds of each rank from the start of `Engine(...)` until its parameters are on the device.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.config.parse import parse_config
from trainer.parallel.collectives import gather_objects
from trainer.parallel.mesh import mesh_of
from trainer.parallel.world import join_world
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine


def main() -> None:
    """Build the engine of a fresh run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama2-7b")
    parser.add_argument("--ranks", type=int, required=True)
    arguments = parser.parse_args()
    tables = {
        "run": {"folder": "unused"},
        "model": {"preset": arguments.preset},
        "data": {"blend": "mock"},
        "train": {"sequence_length": 4096, "global_batch": 8 * arguments.ranks, "micro_batch": 1, "steps": 1},
        "optimizer": {"lr": 1e-4},
        "precision": {"dtype": "bf16"},
    }
    config, problems = parse_config(tables)
    assert config is not None, problems
    world = join_world(mesh_of(config, arguments.ranks))
    plan = make_plan(config, arguments.ranks, facts=None)
    start = time.perf_counter()
    Engine(config, plan, world=world)
    torch.cuda.synchronize()
    seconds = gather_objects(time.perf_counter() - start, world.groups["world"])
    if world.is_main:
        print(f"{arguments.preset}, {plan.num_parameters:,} parameters: {[round(s, 1) for s in seconds]} s")


if __name__ == "__main__":
    main()
