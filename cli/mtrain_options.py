"""Shared by the commands that take a run's configuration: their arguments, and reading them.

Not a command itself. `mtrain COMMAND run.toml [section.key=value ...] [--nproc N]` has one form everywhere, except that
`plan` starts nothing and has --ranks, the ranks of the whole run, instead of --nproc, those started on this machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from mdata import UsageError
from mdata.errors import counted
from trainer.config.parse import RESUME_ADVICE, ReadConfig, key_names, read_config
from trainer.config.sections import RunConfig
from trainer.parallel.placement import Placement, find_placement

from .console import Parser


def add_run_arguments(parser: Parser) -> None:
    """The configuration, its overrides, and the number of ranks to start."""
    add_config_arguments(parser)
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes to start on this machine, one per rank (default: the visible GPUs; without any, "
        "as few as [mesh] needs)",
    )


def add_config_arguments(parser: Parser) -> None:
    """The configuration and its overrides."""
    parser.settings = key_names
    parser.no_option = "section.key=value, such as train.steps=100"
    parser.resume = RESUME_ADVICE
    parser.add_argument("config", metavar="run.toml", help="the run's TOML file")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that override the file"
    )


def read_with_problems(arguments: argparse.Namespace) -> tuple[ReadConfig, int]:
    """The configuration and the number of ranks; problems of keys and values are reported later, with others."""
    read = read_run_file(arguments.config, arguments.overrides)
    return read, world_size(read.config, arguments.nproc)


def read_run_file(path: str, overrides: Sequence[str]) -> ReadConfig:
    """The configuration of a run to start or continue, with its problems.

    Among them: it is that of a run folder which `run.folder` does not name. Such a run would begin again there.
    """
    read = read_config(path, overrides)
    here, folder = Path(path).parent, read.config.run.folder
    is_in_run = Path(path).name == "config.toml" and (here / "metrics.jsonl").exists()
    is_chosen = any(text.partition("=")[0].strip() == "run.folder" for text in overrides)
    if is_in_run and not is_chosen and here.resolve() != Path(folder).resolve():
        read.problems.append(
            f"run.folder={folder!r}, but this file is in the run folder {here}, which was moved or copied, or was "
            f"named from another folder; add run.folder={here} to continue that run, or run.folder=NEW to begin one"
        )
    return read


def world_size(config: RunConfig, nproc: int | None) -> int:
    """Ranks of the run: the launcher's under torchrun or Slurm, otherwise --nproc, otherwise the default."""
    from trainer.run.launch import default_nproc

    placement = launched(nproc)
    if placement is not None:
        return placement.world_size
    return default_nproc(config) if nproc is None else nproc


def launched(nproc: int | None) -> Placement | None:
    """This process among those that torchrun or Slurm started; None: neither did.

    Raises:
        UsageError: --nproc is below 1, or not the number of ranks that they started.
    """
    if nproc is not None and nproc < 1:
        raise UsageError("--nproc is too small", found=str(nproc), expected="1 or more")
    placement = find_placement(os.environ)
    if placement is not None and nproc not in (None, placement.world_size):
        raise UsageError(
            f"--nproc {nproc} given under a launcher that has already started the ranks",
            found=counted(placement.world_size, "rank"),
            fix="leave --nproc out",
        )
    return placement
