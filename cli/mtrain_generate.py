"""Continue prompts with the model of a run.

The same command gives the same text, on any number of ranks that torchrun or Slurm starts. Without --prompt the model
starts a new document.

Examples:
  mtrain generate runs/first --prompt 'Once upon a time' --max-tokens 100
  mtrain generate runs/first --prompt '1 + 1 =' --greedy --checkpoint step-400
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from mdata.errors import UsageError

from .console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain generate --help`."""
    parser.add_argument("run_folder", type=Path, help="a run folder written by mtrain train")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="at most this many new tokens (default: 64)"
    )
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="softmax temperature (default: 0.8)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="nucleus sampling threshold (default: 0.95)"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="random seed (default: 1234)")
    parser.add_argument(
        "--pp",
        type=int,
        default=1,
        metavar="N",
        help="pipeline ranks, if torchrun starts several ranks (default: 1, tensor-parallel only)",
    )
    parser.add_argument(
        "--checkpoint", default="latest", metavar="NAME", help='checkpoint, such as "step-400" (default: latest)'
    )


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Generate, and print each prompt with its continuation."""
    from mdata.progress import SILENT
    from trainer.parallel.mesh import Mesh
    from trainer.parallel.world import Placement, find_placement, join_world, leave_world
    from trainer.tasks.generate import generate
    from trainer.tasks.sampling import Sampling

    sampling = Sampling(
        max_tokens=arguments.max_tokens,
        greedy=arguments.greedy,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    place = find_placement(os.environ) or Placement()
    _refuse_pipeline(arguments, place.world_size)
    tp = place.world_size // arguments.pp
    world = join_world(Mesh(place.world_size, tp, pp=arguments.pp), placement=place)
    with console.progress() as progress:
        texts = generate(
            arguments.run_folder,
            arguments.prompt or [""],
            sampling=sampling,
            world=world,
            from_checkpoint=arguments.checkpoint,
            progress=progress if world.is_main else SILENT,
        )
    leave_world()
    if world.is_main:
        parts = [f"{generated.prompt}{generated.text}" for generated in texts]
        console.result("\n\n".join(parts), {"texts": [dataclasses.asdict(generated) for generated in texts]})
    return 0


def _refuse_pipeline(arguments: argparse.Namespace, world_size: int) -> None:
    """Refuse a number of pipeline ranks that does not divide the number of ranks that torchrun or Slurm started."""
    if arguments.pp > 0 and world_size % arguments.pp == 0:
        return
    ranks = max(2, arguments.pp)
    raise UsageError(
        f"--pp {arguments.pp} cannot divide the layers over {world_size} rank{'s' * (world_size > 1)}",
        expected="a divisor of the number of ranks that torchrun or Slurm starts, at least 1",
        fix=(
            f"torchrun --nproc-per-node {ranks} --no-python mtrain generate {arguments.run_folder} --pp {ranks}, "
            "or leave --pp out"
        ),
    )
