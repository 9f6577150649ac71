"""Train a model on this machine's devices, or join the ranks that torchrun or srun started.

On several machines, start it on each rank:

  torchrun --nproc-per-node 8 --no-python mtrain train run.toml
  srun mtrain train run.toml

Every problem of the configuration is reported before a rank is started. Ctrl-C and SIGTERM end a run after the current
step, with a checkpoint (exit code 130 or 75); a second Ctrl-C ends it at once. After a stop, a kill or the loss of a
machine, the same command continues from the last checkpoint.

Examples:
  mtrain train run.toml
  mtrain train run.toml --nproc 4 train.steps=100 mesh.tp=2
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mdata.errors import MdataError, StoppedError
from mdata.util.commands import command_line
from trainer.checkpoint.folder import latest_checkpoint
from trainer.checkpoint.location import checkpoints_folder
from trainer.errors import rank_here
from trainer.launching.job import PLANNED_RANKS, record_end, refuse_restart, wait_for_ranks
from trainer.parallel.placement import Placement, find_placement

from .console import Console, Parser
from .mtrain_options import add_run_arguments, read_with_problems

if TYPE_CHECKING:
    from trainer.config.sections import DataSection, RunConfig
    from trainer.run.train import TrainResult


def add_arguments(parser: Parser) -> None:
    """See `mtrain train --help`."""
    add_run_arguments(parser)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Check, then train in this process or start ranks; say how it ended if `mtrain launch` asks."""
    from trainer.run.launch import explained_end

    try:
        _train(arguments, console)
    except BaseException as error:
        _, code, message = explained_end(error, rank=_rank())
        record_end(os.environ, code=code, who=_who(), message=message)
        raise
    if _rank() == 0:
        record_end(os.environ, code=0, who=_who())


def _rank() -> int:
    return (find_placement(os.environ) or Placement()).rank


def _who() -> str:
    return rank_here(_rank())


def _train(arguments: argparse.Namespace, console: Console) -> None:
    from trainer.parallel.world import check_not_ended
    from trainer.run.launch import preflight
    from trainer.run.lost_nodes import after_lost_node

    read, world_size = read_with_problems(arguments)
    placement = find_placement(os.environ)
    if placement is not None and not read.problems:
        check_not_ended(os.environ)
        tell = console.note if placement.rank == 0 else lambda text: None
        planned = int(os.environ.get(PLANNED_RANKS, 0))
        with _ending_for_good():
            config = after_lost_node(read.config, world_size, env=os.environ, planned=planned, tell=tell)
        read = dataclasses.replace(read, config=config)
    log_format = read.config.run.log_format
    if placement is None or placement.rank == 0:
        for line in read.moved:
            console.note(line)
    with console.progress(log_format=log_format) as progress:
        preflight(read, world_size, where=arguments.config, progress=progress)
    config = read.config
    try:
        if world_size == 1 or placement is not None:
            train_here(config, console)
        else:
            _train_on_ranks(config, world_size, console)
    except (KeyboardInterrupt, StoppedError):
        console.note(_where_it_goes_on(config))
        raise


def _where_it_goes_on(config: RunConfig) -> str:
    """What the same command will do next, for a user who has stopped it."""
    try:
        newest = latest_checkpoint(checkpoints_folder(config))
    except MdataError as error:
        return f"the same command cannot continue: {error}"
    if newest is not None:
        return f"the same command continues from {newest}"
    return "no checkpoint was written yet; the same command starts at step 1"


def train_here(config: RunConfig, console: Console, *, end: Callable[[BaseException], None] | None = None) -> None:
    """Train as one rank of the world that the environment names; rank 0 shows progress and the result.

    Other ranks only show notes: only the rank itself knows that its disk stalls.

    Args:
        end: ends this process with an error of the watchdog, while the main thread waits; does not return.
    """
    from trainer.parallel.mesh import mesh_of
    from trainer.parallel.world import join_world, leave_at_the_end, open_store
    from trainer.plan.lengths import given_lengths
    from trainer.run.determinism import make_deterministic
    from trainer.run.metrics import plain
    from trainer.run.rank_times import RankTimes
    from trainer.run.train import train
    from trainer.run.watchdog import watching

    from .progress import RankNotes

    place = find_placement(os.environ) or Placement()
    make_deterministic(config)
    mesh, overlap = mesh_of(config, place.world_size), config.kernels.overlap_passes == "on"
    join_s = 60 * config.run.join_minutes
    with _ending_for_good(), console.progress(log_format=config.run.log_format) as progress:
        listener = progress if place.rank == 0 else RankNotes(progress, place.rank)
        if place.world_size == 1:
            world = join_world(mesh, placement=place)
            result = train(config, world, progress=listener)
        else:
            store, ended = open_store(place, join_s=join_s, tell=listener.note), end or partial(_end, console)
            times = RankTimes()
            with watching(place, store, end=ended, tell=listener.note, join_s=join_s, times=times) as watchdog:
                world = join_world(mesh, placement=place, store=store, join_s=join_s, overlap_passes=overlap)
                watchdog.joined(world)
                result = train(config, world, progress=listener, watch=watchdog.note, ranks=times)
    if world.is_main:
        facts = plain({**dataclasses.asdict(result), "checkpoint": str(result.checkpoint)})
        (unit,) = given_lengths(config.train)
        of_run = {"unit": unit, "family": config.model.family, "kind": config.data.kind}
        of_run["options"] = _options_of_data(config.data)
        console.result(result_text(result, config.run.folder, **of_run), facts)
    leave_at_the_end(console.note)


@contextmanager
def _ending_for_good() -> Iterator[None]:
    """Let a launcher that restarts ranks know where starting again would be wrong, or would end in the same way."""
    from trainer.parallel.world import end_for_good
    from trainer.run.attempt import ReplacedError, SupersededError, TooManyRestartsError
    from trainer.run.lost_nodes import LostNodeError, NodesAwaitedError
    from trainer.run.signals import LastTimeError, StoppedAtTimeError
    from trainer.run.step_report import DivergedError

    try:
        yield
    except ReplacedError:
        raise
    except NodesAwaitedError as error:
        wait_for_ranks(os.environ, error.world_size)
        raise
    except (StoppedAtTimeError, LostNodeError, SupersededError, TooManyRestartsError, DivergedError) as error:
        end_for_good(os.environ, error)
        # At Slurm's time limit the job is queued again.
        if isinstance(error, LastTimeError) or not isinstance(error, StoppedAtTimeError):
            refuse_restart(os.environ)
        raise


def _end(console: Console, error: BaseException) -> None:
    """End this process at once, from a thread, with an error of the watchdog; also where it cannot be printed."""
    from trainer.run.launch import explained_end

    _, code, message = explained_end(error, rank=_rank())
    try:
        record_end(os.environ, code=code, who=_who(), message=message)
        console.error(message)
    finally:
        os._exit(code)


def result_text(
    result: TrainResult,
    folder: str,
    *,
    unit: str = "steps",
    family: str = "gpt",
    kind: str = "gpt",
    options: str = "",
) -> str:
    """The state of the run as text.

    Args:
        unit: of the run's length. family: of the model. kind: of its samples.
        options: that the next command needs, as `_options_of_data` gives them.
    """
    if result.loss is None:
        longer = f"raise train.{unit} and optimizer.decay_{unit}"
        lines = [f"step {result.step} is already done; to train further, {longer}"]
    else:
        per = {"pairs": "pair", "classify": "row"}.get(kind, "token")
        loss = f"training loss {result.loss:.4f} nats per {per}"
        lines = [
            f"step {result.step}, {loss if result.loss == result.loss else 'none of its tokens counts in the loss'}"
        ]
    lines += [f"validation loss {name}: {loss:.4f}" for name, loss in result.valid.items()]
    lines += [f"test loss {name}: {loss:.4f}" for name, loss in result.test.items()]
    lines.append(f"checkpoint: {result.checkpoint}")
    if result.goodput is not None:
        lines.append(result.goodput.text())
    quoted = shlex.quote(folder)
    if kind == "classify":
        lines += [
            f"predictions: {folder}/predictions",
            f"next: mtrain eval {quoted} {options or '--task NAME --data FILE'}",
        ]
    elif Path(folder, "tokenizer_facts.json").is_file():  # not of mock data, or data without a manifest
        command = "chat" if kind in ("chat", "pairs") else "generate"
        blank = {"bert": "[MASK]", "t5": "<extra_id_0>"}.get(family)  # these models need a prompt
        more = f"--prompt 'The capital of {blank} is Paris.'" if blank else options
        lines.append(f"next: mtrain {command} {quoted} {more}".rstrip())
    return "\n".join(lines)


def _options_of_data(data: DataSection) -> str:
    """The options of mtrain eval for labelled rows: the first validation set, or the training data; "": none known."""
    from mdata import open_blend

    if data.kind != "classify":
        return ""
    try:
        corpora = open_blend(data.valid[0] if data.valid else data.blend, allow_outside=data.allow_outside).corpora
    except MdataError:  # the training has ended well, whatever became of its data
        return ""
    made = corpora[0].manifest.provenance
    if made is None or "task" not in made.options or not made.inputs:
        return ""
    paths = [file.path for file in made.inputs]
    source = paths[0] if len(paths) == 1 else os.path.commonpath(paths)  # RACE has a file for each passage
    words = ["--task", str(made.options["task"]), "--data", source]
    if isinstance(columns := made.options.get("columns"), Mapping):
        words += ["--columns", ",".join(f"{name}={column}" for name, column in columns.items())]
    return shlex.join([*words, *(["--on-error", "skip"] if made.skipped else [])])


def _train_on_ranks(config: RunConfig, world_size: int, console: Console) -> None:
    from trainer.config.parse import dump_config
    from trainer.run.launch import launch

    with tempfile.TemporaryDirectory(prefix="mtrain-") as folder:
        Path(folder, "config.toml").write_text(dump_config(config), encoding="utf-8")
        options = ("json", "quiet", "verbose")
        words = [*command_line("mtrain_rank"), folder, *(f"--{name}" for name in options if getattr(console, name))]
        launch(words, nproc=world_size, reports=Path(folder))
