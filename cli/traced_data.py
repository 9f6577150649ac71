"""The options by which `mdata trace` and `mdata stage` open data: a run folder, or a corpus or blend with its options.

A run folder records all options, so only the current path of its data can be given with it. Other options of a dataset
are given as --option NAME=VALUE.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import mdata
from mdata.dataset.dataset_options import OPTION_KEYS
from mdata.loader.batch_sizes import BatchSizes, constant, ramp_up
from mdata.tracing.cyclic_steps import CyclicSteps
from mdata.tracing.run_folder import is_run
from mdata.tracing.run_steps import Steps, StepSpan
from mdata.util.config_text import parse_toml
from mdata.util.option_synonyms import nearest

from .console import Console
from .text import add_allow_outside

_READ = ("seed", "order", "kind", "split", "split_shares", "num_samples", "allow_outside")
_SAMPLER = ("global_batch", "rampup_batch_size", "micro_batch", "dp", "dataloader_type", "no_data_sharding")
_CACHE = ("cache", "cache_size")  # of `mdata stage` alone
_BY_HAND = ("sequence_length", *_READ, *_CACHE, "option", *_SAMPLER)
_OF_RUN = ("blend", "validation", "test")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """How data is read without a run folder, and where a run folder's data is now."""
    data = parser.add_argument_group("a run folder whose data has moved, or data without a run folder")
    data.add_argument("--blend", metavar="PATH", help="run folder: where its data is now")
    data.add_argument("--validation", metavar="NAME", help="run folder: a validation set instead of the training set")
    data.add_argument("--test", metavar="NAME", help="run folder: a test set instead of the training set")
    data.add_argument("--sequence-length", type=int, metavar="S", help="tokens per sample")
    data.add_argument("--seed", type=int, metavar="N", help="random seed of the order (default: 1234)")
    data.add_argument("--order", help="order of samples: native or megatron")
    data.add_argument("--kind", help="kind of samples")
    data.add_argument("--split", metavar="NAME", help="set of samples: train, valid, test or whole (default: train)")
    data.add_argument(
        "--split-shares", metavar="A,B,C", help="shares of training, validation and test (default: 100,0,0)"
    )
    data.add_argument("--num-samples", type=int, metavar="N", help="megatron: samples that the run was built for")
    data.add_argument(
        "--option",
        action="append",
        metavar="NAME=VALUE",
        help="any other key of mdata.DatasetOptions.from_keys; VALUE as in TOML: 8, true, [5, 6, 7]",
    )
    add_allow_outside(data, default=None)
    data.add_argument("--global-batch", type=int, metavar="N", help="samples per step")
    data.add_argument(
        "--rampup-batch-size",
        type=int,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="Megatron's ramp of the global batch",
    )
    data.add_argument("--micro-batch", type=int, metavar="N", help="samples per forward pass of a rank")
    data.add_argument("--dp", type=int, metavar="N", help="data-parallel ranks")
    data.add_argument(
        "--dataloader-type", choices=["single", "cyclic"], help="Megatron's dataloader type; cyclic shuffles each epoch"
    )
    data.add_argument(
        "--no-data-sharding", action="store_true", default=None, help="cyclic: shuffle samples across ranks"
    )


def open_tracer(arguments: argparse.Namespace, console: Console) -> mdata.Tracer:
    """The data as the training reads it.

    Raises:
        UsageError: conflicting options, or data that cannot be opened.
    """
    by_hand = [name for name in _BY_HAND if getattr(arguments, name, None) is not None]
    with console.progress() as progress:
        if is_run(arguments.path):
            if by_hand:
                raise mdata.UsageError(
                    f"{arguments.path} is a run folder, which already records how its data is read",
                    found=", ".join("--" + name.replace("_", "-") for name in by_hand),
                )
            of_run = {name: getattr(arguments, name) for name in _OF_RUN}
            return mdata.trace_run(arguments.path, **of_run, progress=progress)
        for name in _OF_RUN:
            if getattr(arguments, name) is not None:
                raise mdata.UsageError(f"{arguments.path} is not a run folder, so --{name} does not apply")
        options = _options(arguments)
        dataset = mdata.Dataset.from_options(arguments.path, options, progress=progress)
    sizes = _sizes(arguments)
    if arguments.dataloader_type == "cyclic":
        return mdata.Tracer(dataset, _shuffled(arguments, dataset, sizes))
    if sizes is None:
        return mdata.Tracer(dataset)
    if dataset.num_samples is None and arguments.num_samples is not None:
        raise mdata.UsageError("the native order has no number of samples", fix="--until-step, or leave it out")
    span = StepSpan(sizes=sizes, micro_batch=arguments.micro_batch, dp_size=arguments.dp)
    return mdata.Tracer(
        dataset, Steps([span], seed=options.seed, in_order=isinstance(options.order, mdata.MegatronOrder))
    )


def _options(arguments: argparse.Namespace) -> mdata.DatasetOptions:
    """The options given by hand."""
    if arguments.sequence_length is None:
        path = arguments.path
        # Not pathlib, which raises for a path that is too long.
        exists = any(os.path.exists(path + ending) for ending in ("", ".json", ".idx"))  # noqa: PTH110
        if "://" not in path and not exists:
            raise mdata.UsageError(f"there is no {path}", expected="a run folder, or the path of a blend or corpus")
        raise mdata.UsageError(
            f"{arguments.path} is not a run folder, and no option says how to read it",
            expected="the folder of a run (it has a data.json), or data with at least --sequence-length",
        )
    names = [name for name in (*_READ, *_CACHE) if getattr(arguments, name, None) is not None]
    options: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    for word in arguments.option or ():
        name, equals, value = word.partition("=")
        if not equals or name not in OPTION_KEYS:
            close = nearest(name, OPTION_KEYS)
            raise mdata.UsageError(f"--option {word}", expected="NAME=VALUE", fix=f"{close}=...?" if close else None)
        options[name] = _value(value)
    # Whether corpora may be read together is a matter of the run; here it is only told what is read.
    usual = {"sequence_length": arguments.sequence_length, "tokenizer_unknown": "ok"}
    return mdata.DatasetOptions.from_keys(usual | options)


def _value(text: str) -> Any:
    """A TOML value; any other text is a string."""
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text
    return tuple(value) if isinstance(value, list) else value


def _sizes(arguments: argparse.Namespace) -> BatchSizes | None:
    size, ramp = arguments.global_batch, arguments.rampup_batch_size
    if size is None:
        if ramp or arguments.micro_batch is not None or arguments.dp is not None:
            raise mdata.UsageError("steps need --global-batch")
        return None
    return ramp_up(ramp[0], ramp[1], samples=ramp[2], size=size) if ramp else constant(size)


def _shuffled(arguments: argparse.Namespace, dataset: mdata.Dataset, sizes: BatchSizes | None) -> CyclicSteps:
    """The steps of Megatron's random sampler."""
    if sizes is None or arguments.micro_batch is None or arguments.dp is None:
        raise mdata.UsageError(
            "a shuffled epoch needs the number of ranks", fix="--global-batch, --micro-batch and --dp"
        )
    if dataset.num_samples is None:
        fix = "--order megatron --num-samples N, or a validation set (--split)"
        raise mdata.UsageError("the native order has no end, and no epochs to shuffle", fix=fix)
    span = StepSpan(sizes=sizes, micro_batch=arguments.micro_batch, dp_size=arguments.dp)
    return CyclicSteps(span, num_samples=dataset.num_samples, sharded=not arguments.no_data_sharding)
