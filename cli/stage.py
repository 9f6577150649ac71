"""Fetch ahead what a node will read of corpora in object storage: blocks, checked, in the cache of the run.

  mdata stage s3://corpora/mix.json --cache /scratch/cache --sequence-length 4096 --global-batch 512 --steps 1:501
  mdata stage mix.json --cache /scratch/cache --sequence-length 4096 --global-batch 512 --micro-batch 4 --dp 64
      --ranks 8:16 --steps 1:5001
  mdata stage mix.json --cache /scratch/cache --sequence-length 4096 --samples 0:100000
  mdata stage runs/first --steps 5001:10001 --ranks 8:16

PATH is data and how it is read, or the folder of a run, whose cache is used. Ranges end before their last number; steps
are counted from 1, samples and ranks from 0. Ranks are data-parallel ones: those of the node. What is there already is
compared with its hash and not fetched again.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import numpy as np

import mdata
from cli.console import Console
from cli.traced_data import add_data_arguments, open_tracer
from mdata.util.arrays import Int64s

_SAMPLES_AT_ONCE = 4096
_OF_RANKS = ("micro_batch", "dp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is to be there, where, and how data is read where no run says it."""
    parser.add_argument(
        "path", metavar="PATH", help="a run folder, or a blend, corpus or prefix, at an address or here"
    )
    what = parser.add_argument_group("what to fetch (one of --steps and --samples)")
    what.add_argument("--steps", metavar="A:B", help="what steps A to B - 1 read, from 1")
    what.add_argument("--samples", metavar="A:B", help="what samples A to B - 1 read, from 0")
    what.add_argument("--ranks", metavar="A:B", help="of steps: only the rows of these data-parallel ranks, from 0")
    parser.add_argument("--cache", metavar="FOLDER", help="the cache, as data.cache of the run")
    parser.add_argument(
        "--cache-size", metavar="SIZE", help='most that blocks take there, as data.cache_size: "500 GiB"'
    )
    add_data_arguments(parser)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `mdata.dataset.staging.stage` and say what came of it."""
    if (arguments.steps is None) == (arguments.samples is None):
        raise mdata.UsageError("mdata stage takes one of --steps and --samples", fix="--steps 1:1001")
    _refuse_idle(arguments)
    tracer = open_tracer(arguments, console)
    from mdata.dataset.staging import stage

    with console.progress() as progress:
        result = stage(tracer.dataset, _batches(arguments, tracer), progress=progress)
    there, fetched = (count / 2**30 for count in (result.num_bytes, result.fetched_bytes))
    facts = {"samples": result.samples, "blocks": result.blocks, "bytes": result.num_bytes}
    console.result(
        f"{result.samples:,} samples read {result.blocks:,} blocks of 4 MiB, {there:,.2f} GiB, which are in the cache; "
        f"{fetched:,.2f} GiB of them were fetched now",
        facts | {"fetched_bytes": result.fetched_bytes},
    )


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Refuse options that change nothing beside the others."""
    needs = dict.fromkeys(("global_batch", "rampup_batch_size", "ranks", *_OF_RANKS, "dataloader_type"), "steps")
    if arguments.steps is not None:
        needs = {} if arguments.dataloader_type == "cyclic" else dict.fromkeys(_OF_RANKS, "ranks")
    needs |= {} if arguments.dataloader_type == "cyclic" else {"no_data_sharding": "dataloader-type cyclic"}
    for name, other in needs.items():
        if getattr(arguments, name) is not None and getattr(arguments, other.partition("-")[0], None) is None:
            option = f"--{name.replace('_', '-')}"
            raise mdata.UsageError(f"{option} has no effect without --{other}", fix=f"leave it out, or give --{other}")


def _batches(arguments: argparse.Namespace, tracer: mdata.Tracer) -> Iterator[Int64s]:
    """The samples, some at a time."""
    if arguments.samples is not None:
        first, stop = _range("--samples", arguments.samples, least=0)
        for begin in range(first, stop, _SAMPLES_AT_ONCE):
            yield np.arange(begin, min(begin + _SAMPLES_AT_ONCE, stop))
        return
    first, stop = _range("--steps", arguments.steps, least=1)
    ranks = [None] if arguments.ranks is None else range(*_range("--ranks", arguments.ranks, least=0))
    for step in range(first, stop):
        for rank in ranks:
            yield tracer.step(step, dp_rank=rank)


def _range(option: str, text: str, *, least: int) -> tuple[int, int]:
    """A and B of "A:B"."""
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if found is None or not least <= int(found[1]) < int(found[2]):
        raise mdata.UsageError(f"{option} {text}", expected=f"A:B, from {least} on, and B above A, such as {least}:100")
    return int(found[1]), int(found[2])
