r"""Fetch the blocks that a node will read from object storage into its cache, before the job or while it runs.

PATH is a run folder, or a corpus or blend together with the options of the run. Ranges A:B end before B; steps are
counted from 1, samples and ranks from 0. --dp-ranks are the data-parallel ranks of the node. Blocks already in the
cache are checked and not fetched again. For the size of a cache see docs/howto/storage.md.

Examples:
  mdata stage runs/first --steps 5001:10001 --dp-ranks 8:16
  mdata stage s3://corpora/mix.json --cache /scratch/cache --sequence-length 4096 --global-batch 512 \
      --steps 1:501
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import numpy as np

import mdata
from mdata.errors import counted
from mdata.util.arrays import Int64s

from .console import Console
from .traced_data import add_data_arguments, open_tracer

_SAMPLES_AT_ONCE = 4096
_OF_RANKS = ("micro_batch", "dp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The samples, the cache, and how data is read without a run folder."""
    parser.add_argument(
        "path", metavar="PATH", help="a run folder, or the path or address of a blend, corpus or prefix"
    )
    group = parser.add_argument_group("what to fetch (either --steps or --samples)")
    group.add_argument("--steps", metavar="A:B", help="blocks of steps A to B - 1; the first step is 1")
    group.add_argument("--samples", metavar="A:B", help="blocks of samples A to B - 1; the first sample is 0")
    group.add_argument(
        "--dp-ranks", metavar="A:B", help="with --steps: only the rows of data-parallel ranks A to B - 1"
    )
    parser.add_argument("--cache", metavar="FOLDER", help="cache folder (data.cache of the run)")
    parser.add_argument(
        "--cache-size", metavar="SIZE", help='size limit of the cache (data.cache_size of the run), such as "500 GiB"'
    )
    add_data_arguments(parser)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `mdata.dataset.staging.stage` and print the result."""
    if (arguments.steps is None) == (arguments.samples is None):
        raise mdata.UsageError("give either --steps or --samples", fix="--steps 1:1001")
    _refuse_idle(arguments)
    tracer = open_tracer(arguments, console)
    from mdata.dataset.staging import stage

    with console.progress() as progress:
        result = stage(tracer.dataset, _batches(arguments, tracer), progress=progress)
    there, fetched = (count / 1e6 for count in (result.num_bytes, result.fetched_bytes))
    facts = {"samples": result.samples, "blocks": result.blocks, "bytes": result.num_bytes}
    console.result(
        f"{counted(result.samples, 'sample')} read {counted(result.blocks, 'block')} ({there:,.1f} MB), "
        f"all in the cache; {fetched:,.1f} MB were fetched now",
        facts | {"fetched_bytes": result.fetched_bytes},
    )


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Refuse options that change nothing together with the others."""
    needs = dict.fromkeys(("global_batch", "rampup_batch_size", "dp_ranks", *_OF_RANKS, "dataloader_type"), "steps")
    if arguments.steps is not None:
        needs = {} if arguments.dataloader_type == "cyclic" else dict.fromkeys(_OF_RANKS, "dp-ranks")
    needs |= {} if arguments.dataloader_type == "cyclic" else {"no_data_sharding": "dataloader-type cyclic"}
    for name, other in needs.items():
        if getattr(arguments, name) is not None and getattr(arguments, other.replace("-", "_"), None) is None:
            option = f"--{name.replace('_', '-')}"
            raise mdata.UsageError(f"{option} has no effect without --{other}", fix=f"leave it out, or give --{other}")


def _batches(arguments: argparse.Namespace, tracer: mdata.Tracer) -> Iterator[Int64s]:
    """The sample numbers, in batches."""
    if arguments.samples is not None:
        first, stop = _range("--samples", arguments.samples, least=0)
        for begin in range(first, stop, _SAMPLES_AT_ONCE):
            yield np.arange(begin, min(begin + _SAMPLES_AT_ONCE, stop))
        return
    first, stop = _range("--steps", arguments.steps, least=1)
    ranks = [None] if arguments.dp_ranks is None else range(*_range("--dp-ranks", arguments.dp_ranks, least=0))
    for step in range(first, stop):
        for rank in ranks:
            yield tracer.step(step, dp_rank=rank)


def _range(option: str, text: str, *, least: int) -> tuple[int, int]:
    """A and B of "A:B"."""
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if match is None or not least <= int(match[1]) < int(match[2]):
        raise mdata.UsageError(f"{option} {text}", expected=f"A:B with A >= {least} and B > A, such as {least}:100")
    return int(match[1]), int(match[2])
