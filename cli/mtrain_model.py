"""Shared by the commands that use a model: their arguments, and opening it on all ranks.

Not a command itself.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mdata.errors import UsageError, counted
from mdata.progress import SILENT
from mdata.util.commands import command_line
from trainer.parallel.placement import Placement, find_placement

from .console import Console, ReaderGone
from .mtrain_options import launched

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from trainer.tasks.loaded_model import Model


WORDS = "words.json"  # the command line of ranks, in the folder of their reports


def add_model_arguments(parser: argparse.ArgumentParser, *, dp: bool) -> None:
    """The model, and how ranks share it.

    Args:
        dp: whether ranks beyond tp x pp divide the work; otherwise all share the layers.
    """
    group = add_folder_arguments(parser)
    if dp:
        group.add_argument(
            "--tp",
            type=int,
            default=1,
            metavar="N",
            help="tensor-parallel ranks, of several (default: 1)",
        )
    share = "each --tp x --pp ranks share a model" if dp else "all share layers"
    group.add_argument(
        "--pp",
        type=int,
        default=1,
        metavar="N",
        help=f"pipeline ranks, of several (default: 1, {share})",
    )
    group.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes to start on this machine, one per rank (default: 1, or those of torchrun or Slurm)",
    )


def add_folder_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The model alone; returns the group of its options."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder or a checkpoint in it, a Hugging Face folder, or a checkpoint of Megatron-LM",
    )
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--checkpoint",
        default="latest",
        metavar="NAME",
        help='checkpoint of a run folder, such as "step-400" (default: latest)',
    )
    group.add_argument(
        "--tokenizer", default="", metavar="FOLDER", help="folder with the tokenizer (default: that of MODEL)"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="model.KEY=VALUE",
        help="setting that a Megatron-LM checkpoint does not record",
    )
    group.add_argument(
        "--dtype",
        default="",
        choices=("fp32", "bf16", "fp16"),
        help="dtype to compute in (default: that of the run; for other folders that of the weights, on a CPU fp32)",
    )
    group.add_argument(
        "--weights",
        default="",
        choices=("fp8",),
        help="keep linear layers and experts in FP8, in half the memory of bf16 (default: in --dtype)",
    )
    return group


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    """The template of conversations with the model."""
    parser.add_argument(
        "--chat-template",
        metavar="NAME",
        help='"tokenizer", "chatml", "plain" or a Jinja file (default: that of the run\'s conversations, otherwise the '
        "tokenizer's own, otherwise ChatML)",
    )


def ran_on_ranks(arguments: argparse.Namespace, console: Console, *, command: str) -> bool:
    """Run this command line on the ranks of --nproc; False: it is for this process, which is one of them or alone."""
    if launched(arguments.nproc) is not None or arguments.nproc in (None, 1):
        return False
    from trainer.run.launch import launch

    _refuse_layout(arguments, arguments.nproc, tp=getattr(arguments, "tp", None), command=command)
    with tempfile.TemporaryDirectory(prefix="mtrain-") as folder:
        Path(folder, WORDS).write_text(json.dumps(list(console.words)), encoding="utf-8")
        launch([*command_line("mtrain_rank"), folder, "--command"], nproc=arguments.nproc, reports=Path(folder))
    return True


@contextmanager
def opened(arguments: argparse.Namespace, console: Console, *, command: str) -> Iterator[Model]:
    """The model on this rank; the ranks leave each other at the end."""
    with each_opened(arguments, console, command=command, checkpoints=[arguments.checkpoint]) as models:
        yield next(models)


@contextmanager
def each_opened(
    arguments: argparse.Namespace, console: Console, *, command: str, checkpoints: Sequence[str]
) -> Iterator[Iterator[Model]]:
    """The models of several checkpoints, one after another: each is read when it is asked for."""
    from trainer.checkpoint.location import location_of
    from trainer.parallel.mesh import Mesh
    from trainer.parallel.world import join_world, leave_at_the_end, lost_ranks_named
    from trainer.tasks.loaded_model import Model

    place = find_placement(os.environ) or Placement()
    tp = getattr(arguments, "tp", None)
    _refuse_layout(arguments, place.world_size, tp=tp, command=command)
    mesh = Mesh(place.world_size, place.world_size // arguments.pp if tp is None else tp, pp=arguments.pp)

    def read(checkpoint: str) -> Model:
        with console.progress() as progress:
            return Model.load(
                location_of(arguments.model),
                world=world,
                checkpoint=checkpoint,
                tokenizer=arguments.tokenizer,
                settings=arguments.set,
                dtype=arguments.dtype,
                weights=arguments.weights,
                progress=progress if world.is_main else SILENT,
            )

    with _ended_together(place, console) as store:
        world = join_world(mesh, placement=place, store=store)
        with lost_ranks_named(world):
            yield map(read, checkpoints)
    leave_at_the_end(console.note)


@contextmanager
def _ended_together(place: Placement, console: Console) -> Iterator[Store | None]:
    """The store of several ranks, which all end when one of them fails in the block."""
    from trainer.parallel.world import another_connection, open_store
    from trainer.run.shared_end import ended_together

    if place.world_size == 1:
        yield None
        return

    store = open_store(place, tell=console.note)
    own = another_connection(store)
    with ended_together(own, rank=place.rank, world_size=place.world_size, end=console.end, success=ReaderGone):
        yield store


def _refuse_layout(arguments: argparse.Namespace, world_size: int, *, tp: int | None, command: str) -> None:
    """Refuse numbers that do not divide the number of ranks."""
    wanted = [("--tp", 1 if tp is None else tp), ("--pp", arguments.pp)]
    shares = wanted[0][1] * arguments.pp
    if all(value >= 1 for _, value in wanted) and world_size % shares == 0:
        return
    given = " ".join(f"{name} {value}" for name, value in wanted if value != 1) or "--pp 1"
    ranks = max(2, shares)
    flags = f"--pp {max(2, arguments.pp)}" if tp is None else f"--tp {max(1, tp)} --pp {max(1, arguments.pp)}"
    raise UsageError(
        f"{given} cannot divide the layers over {counted(world_size, 'rank')}",
        expected="a divisor of the number of ranks, at least 1",
        fix=f"mtrain {command} {arguments.model} --nproc {ranks} {flags}, or leave them out",
    )
