"""How fast are checkpoints saved and loaded, compared with the speed of their disk?

    torchrun --nproc-per-node R benchmarks/checkpoint_rates.py --out DIR [--preset llama3.2-1b] [--rounds 2]

In each round every rank writes a file of its share's size, reads it and removes it, all past the page cache: the rate
of the disk. Then all ranks save a checkpoint of a preset's initial state, its page cache is
dropped, and they load it. GB/s of all ranks together, from a barrier to the last rank's end; the state's size is that
of weights and moments in fp32, the host memory that of rank 0. With --layout mesh.tp=2 and the like the state has
another layout. DIR should be on the disk that checkpoints are meant for, with room for two of them.

A 7B model on two GPUs (81 GB): torchrun --nproc-per-node 2 benchmarks/checkpoint_rates.py --out DIR --preset llama2-7b
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer.checkpoint.format import RunState
from trainer.checkpoint.save import Target, save_checkpoint
from trainer.config.parse import dump_config, parse_config
from trainer.parallel.collectives import gather_objects
from trainer.parallel.mesh import mesh_of
from trainer.parallel.world import join_world
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine

BLOCK = 32 << 20


def build(preset: str, ranks: int, layout: list[str]) -> tuple[Engine, str]:
    """The engine of a fresh run, and its configuration as TOML."""
    tables: dict[str, Any] = {
        "run": {"folder": "unused"},
        "model": {"preset": preset},
        "data": {"blend": "mock"},
        "train": {"sequence_length": 1024, "global_batch": 8 * ranks, "micro_batch": 1, "steps": 1},
        "optimizer": {"lr": 1e-4},
        "precision": {"dtype": "bf16" if torch.cuda.is_available() else "fp32"},
    }
    for word in layout:
        key, value = word.split("=")
        table, name = key.split(".")
        tables.setdefault(table, {})[name] = json.loads(value)
    config, problems = parse_config(tables)
    assert config is not None, problems
    world = join_world(mesh_of(config, ranks))
    return Engine(config, make_plan(config, ranks, facts=None), world=world), dump_config(config)


def drop_cache(folder: Path) -> None:
    """Forget the page cache of all files in a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, size: int) -> None:
    """Bytes that nothing can compress, past the page cache."""
    block = mmap.mmap(-1, BLOCK)
    block.write(np.random.default_rng(0).bytes(BLOCK))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for _ in range(size // BLOCK):
        os.write(fd, block)
    os.fsync(fd)
    os.close(fd)


def read_file(path: Path) -> None:
    """Read all of it into one block, past the page cache."""
    block = mmap.mmap(-1, BLOCK)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    while os.readv(fd, [block]):
        pass
    os.close(fd)


def main() -> None:
    """Measure the rounds and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files, which are removed")
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layout", nargs="*", default=[], help="keys of the configuration, such as mesh.tp=2")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    engine, config = build(arguments.preset, ranks, arguments.layout)
    group, rank, is_main = engine.everyone, engine.world.rank, engine.world.is_main
    share = sum(tensor.nbytes for tensor in engine.optimizer.state.values())
    total = sum(gather_objects(share, group))
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    def rate(action: Callable[[], object]) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        gather_objects(None, group)
        began = time.perf_counter()
        action()
        return total / 1e9 / max(gather_objects(time.perf_counter() - began, group))

    def drop() -> None:
        if is_main:
            drop_cache(folder)
        gather_objects(None, group)

    for number in range(arguments.rounds):
        own = folder / f"disk-{rank}"
        disk_write = rate(partial(write_file, own, share))
        drop()
        disk_read = rate(partial(read_file, own))
        own.unlink()
        run = RunState(number + 1, number + 1, "0" * 64, {}, number + 1, config)
        target = Target(folder, engine.with_scale(run), "measured")
        save = rate(partial(save_checkpoint, target, engine.shard, state=engine.optimizer.state, world=group))
        drop()
        saved = target.root / target.name
        load = rate(partial(engine.load, saved))
        gather_objects(None, group)
        if is_main:
            shutil.rmtree(saved)
            (folder / "latest").unlink()
            rates = {
                "gb": total / 1e9,
                "disk_write": disk_write,
                "save": save,
                "save_of_disk": save / disk_write,
                "disk_read": disk_read,
                "load": load,
                "load_of_disk": load / disk_read,
                "peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
            }
            found = {"preset": arguments.preset, "ranks": ranks}
            found |= {name: float(f"{value:.3g}") for name, value in rates.items()}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
