"""Print every problem of a run's configuration at once, with its data, its mesh and its newest checkpoint.

Nothing is started or written. Exit code 0: the run can start; if it would resume from a checkpoint, that and the
settings that differ from the checkpoint are printed. 2: it cannot start; each problem says which values conflict and
what to change. 4: the data or the checkpoint is damaged. 5: GPU memory or disk space is too small. With --ranks N, one
step of N ranks, which need not exist, is run without a GPU: this checks every shape, message and collective, and the
memory of each rank (--memory). Too little disk space, or a run folder that this machine may not write, is then only a
note: the ranks run on other machines.

Examples:
  mtrain check run.toml --nproc 8
  mtrain check run.toml --ranks 1024 --memory 80 mesh.tp=8
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mdata import ResourceError, UsageError
from mdata.errors import counted
from trainer.config.parse import ReadConfig
from trainer.errors import size_text

from .console import Console, Parser
from .mtrain_options import add_run_arguments, read_run_file, read_with_problems

if TYPE_CHECKING:
    from trainer.plan.plan import Plan
    from trainer.run.launch import Survey
    from trainer.run.rehearsal import Rehearsal
    from trainer.run.resume import Start


def add_arguments(parser: Parser) -> None:
    """See `mtrain check --help`."""
    add_run_arguments(parser)
    parser.add_argument("--ranks", type=int, metavar="N", help="rehearse a step of N ranks, on any number of machines")
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="with --ranks: GiB of each GPU, of which a rank may need 94 %%"
    )


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Check, and raise the problems."""
    from trainer.run.launch import survey

    read, world_size = _read(arguments)
    for line in read.moved:
        console.note(line)
    result = survey(read, world_size, elsewhere=arguments.ranks is not None)
    if result.problems and not console.json:
        raise result.error(arguments.config)
    facts = {
        "config": arguments.config,
        "world_size": world_size,
        "problems": result.problems,
        "nearest_layout": result.nearest,
    }
    lines: list[str] = []
    if result.start:
        facts |= start_facts(result.start)
        lines += start_lines(result.start)
    lacks: list[str] = []
    if result.start and not result.problems:
        plan = _plan(result.start, result, world_size)
        rows, more = _rehearsed(result.start, result, plan) if arguments.ranks is not None else ([], {})
        here = [f"problem: {text}" for text in result.here] or [*_lacks_disk(result.start, plan)]
        lacks = [*_lacks_memory(more, arguments.memory)]
        if arguments.ranks is None:
            lacks += here
        else:  # the ranks may run on other machines, with larger disks
            rows += [f"note      on this machine: {text.removeprefix('problem: ')}" for text in here]
        lines, facts = [*lines, *rows, *lacks], facts | more | {"lacks": lacks, "lacks_here": here}
    ranks = "--nproc" if arguments.ranks is None else "--ranks"
    verdict = "too little memory or disk" if lacks else "no problems"
    console.result("\n".join([f"{arguments.config}: {verdict} with {ranks} {world_size}", *lines]), facts)
    return result.kind.exit_code if result.problems else ResourceError.exit_code if lacks else 0


def _read(arguments: argparse.Namespace) -> tuple[ReadConfig, int]:
    if arguments.ranks is None:
        if arguments.memory is not None:
            raise UsageError("--memory needs --ranks N", fix="add --ranks, or leave --memory out")
        return read_with_problems(arguments)
    if arguments.memory is not None and not 0 < arguments.memory < float("inf"):
        raise UsageError(f"--memory is {arguments.memory}", expected="a number above 0, in GiB per GPU")
    if arguments.nproc is not None or arguments.ranks < 1:
        raise UsageError(
            "--ranks is the number of ranks of the whole run, on all machines",
            found=f"--ranks {arguments.ranks}" + (f", --nproc {arguments.nproc}" if arguments.nproc else ""),
            expected="1 or more, and no --nproc",
        )
    return read_run_file(arguments.config, arguments.overrides), arguments.ranks


def _plan(start: Start, result: Survey, world_size: int) -> Plan:
    from trainer.plan.plan import make_plan

    done = start.done
    return make_plan(start.config, world_size, facts=result.facts, done_steps=done.steps, done_samples=done.samples)


def _rehearsed(start: Start, surveyed: Survey, plan: Plan) -> tuple[list[str], dict[str, Any]]:
    """The rehearsal as text and as JSON types."""
    from trainer.plan.memory import rank_bytes
    from trainer.run.rehearsal import rehearse
    from trainer.run.saving import checkpoint_bytes

    config = start.config
    result = rehearse(config, plan)
    totals = [rank.total for rank in rank_bytes(config, plan, buffer_bytes=result.kept_bytes)]
    needed = checkpoint_bytes(config, plan)
    facts = {
        "rehearsal": dataclasses.asdict(result),
        "bytes_per_pipeline_rank": totals,
        "checkpoint_bytes": needed,
    }
    return [*_rehearsal_lines(plan, result, surveyed, totals), f"save      {size_text(needed)} per checkpoint"], facts


def _lacks_memory(facts: dict[str, Any], memory: float | None) -> Iterator[str]:
    """Whether the machines have too little memory."""
    from trainer.plan.memory import USABLE

    needed = facts.get("bytes_per_pipeline_rank", [])
    if memory is None or max(needed) <= (usable := int(USABLE * memory * 2**30)):
        return
    yield (
        f"problem: pipeline rank {needed.index(max(needed))} needs {size_text(max(needed))}, more than the "
        f"{size_text(usable)} ({USABLE:.0%}) of --memory {memory:g} that a run can use; mtrain plan with --gpus and "
        f"--memory {memory:g} lists the layouts that fit"
    )


def _lacks_disk(start: Start, plan: Plan) -> Iterator[str]:
    """Whether the next checkpoint does not fit."""
    from trainer.checkpoint.location import checkpoints_folder
    from trainer.checkpoint.save import check_target
    from trainer.run.saving import checkpoint_bytes

    if start.done.steps >= plan.steps:
        return
    try:
        check_target(checkpoints_folder(start.config), checkpoint_bytes(start.config, plan))
    except ResourceError as error:
        yield f"problem: {error}"


def _rehearsal_lines(plan: Plan, result: Rehearsal, surveyed: Survey, totals: list[int]) -> list[str]:
    facts, matched, least, most = surveyed.facts, result.matched, min(totals), max(totals)
    tokens = counted(facts.num_tokens, "token") if facts is not None and facts.num_tokens else "unlimited tokens"
    bubble = name = ""
    if plan.pp > 1:
        step, name = plan.pipeline.timeline(plan.num_microbatches), f"{plan.pipeline.schedule}, "
        bubble = f", bubble {step.bubble:.1%}, ranks idle for up to {max(step.idle) / step.step:.1%} of a step"
    return [
        f"data      {tokens} for training, {plan.num_samples * plan.sequence_length:,} of them are read",
        f"shapes    tp {plan.tp} x cp {plan.cp} x dp {plan.dp} x pp {plan.pp} hold the {plan.num_parameters:,} "
        f"parameters, {min(result.parameters):,} to {max(result.parameters):,} on a rank",
        f"schedule  {name}{counted(plan.num_microbatches, 'microbatch', 'microbatches')}{bubble}; "
        f"{counted(matched.messages, 'message')} on {counted(matched.links, 'link')} and "
        f"{counted(matched.collectives, 'collective')} of {counted(matched.groups, 'group')} match",
        f"memory    {size_text(most)} on pipeline rank {totals.index(most)}"
        + (f", {size_text(least)} on pipeline rank {totals.index(least)}" if plan.pp > 1 else "")
        + ", activations estimated",
    ]


def start_lines(start: Start) -> list[str]:
    """Text: where the run continues, and which settings differ from the checkpoint's."""
    from trainer.plan.lengths import given_lengths, run_length

    if start.folder is None:
        return list(start.notes)
    done = start.done
    steps = run_length(start.config.train, steps=done.steps, samples=done.samples).steps
    if done.steps >= steps:
        ((unit, amount),) = given_lengths(start.config.train).items()
        return [f"nothing is left to do: {start.folder} is at step {done.steps} of train.{unit}={amount}"]
    return [f"continues from {start.folder}; {done.steps} of {steps} steps are done", *start.notes]


def start_facts(start: Start) -> dict[str, object]:
    """The same as JSON types."""
    return {
        "checkpoint": str(start.folder) if start.folder else None,
        "step": start.done.steps,
        "changed": {name: {"before": before, "now": now} for name, (before, now) in start.changes.items()},
        "notes": list(start.notes),
    }
