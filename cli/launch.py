r"""Run a command of mdata in parts: on this machine, as Slurm array jobs, or on a Ray cluster.

preprocess is run in parts, which are then merged; clean, extract and decontaminate in parts; dedup in stages, one
after the other, each in tasks. Run the same command again to start what is missing. State and logs are in PREFIX.job
or FOLDER.job; see mdata status, mdata tail.

Examples:
  mdata launch local --parts 8 --at-once 2 -- preprocess --input web.jsonl --output-prefix big \
      --tokenizer-type ByteTokenizer --append-eod
  mdata launch slurm --parts 64 --cpus 8 --partition long -- dedup --input text \
      --output text-repeats --verify 0.7
"""

from __future__ import annotations

import argparse

import mdata
from mdata.errors import counted
from mdata.launching.job_folder import MERGE, Job, JobPhase, discard_unstarted, launching, save_job
from mdata.launching.plan_launch import plan_dedup, plan_launch, plan_text_job
from mdata.progress import Progress
from mdata.util.machine_limits import usable_cores

from . import clean, decontaminate, dedup, extract, preprocess
from .console import Console, Parser

TAKES_COMMAND = True
Steps = list[tuple[JobPhase, list[int]]]


def add_arguments(parser: Parser) -> None:
    """The engine and its resources; the command follows after --."""
    add = parser.add_argument
    parser.no_option = "mdata launch ENGINE --parts N -- preprocess ...: the command and its options follow after --"
    parser.usage = (
        f"{parser.prog} local|slurm|ray --parts N [options] -- preprocess|dedup|clean|extract|decontaminate"
        " --input PATH ..."
    )
    add("engine", choices=("local", "slurm", "ray"), help="what runs the parts")
    add("--parts", type=int, required=True, metavar="N", help="number of parts")
    add("--cpus", type=int, metavar="N", help="CPUs per part (local: all cores / --at-once; otherwise 4)")
    add("--at-once", type=int, metavar="N", help="maximum number of parts running at once (local: 1)")
    add(
        "--merge",
        choices=("reference", "copy", "none"),
        default="reference",
        help="of preprocess: how to merge the parts, see mdata merge (default: reference)",
    )
    add("--ranges", type=int, default=0, metavar="N", help="of dedup: tasks that match keys (default: bands + 1)")
    add("--address", default="auto", metavar="A", help="ray: address of the cluster (default: that of this node)")
    add_slurm_options(parser)


def add_slurm_options(parser: Parser) -> None:
    """What a site asks of a job; `slurm_options` gives it as options for sbatch."""
    add = parser.add_argument_group("slurm").add_argument
    add("--account", metavar="NAME", help="account to charge")
    add("--partition", metavar="NAME", help="partition, or several separated by commas")
    add("--qos", metavar="NAME", help="quality of service")
    add("--time", metavar="T", help="time limit, such as 2:00:00 or 7-0")
    add("--exclude", metavar="HOSTS", help="nodes to exclude, such as n[3-5],n9")
    other = "any other option: --sbatch=--exclusive"
    add("--sbatch", action="append", type=_sbatch_option, default=[], metavar="OPTION", help=other)


def _sbatch_option(text: str) -> str:
    """An option of sbatch; a word without a dash would be the script."""
    if not text.startswith("-"):
        raise argparse.ArgumentTypeError(f"{text} is not an option of sbatch: these begin with a dash")
    return text


def slurm_options(arguments: argparse.Namespace) -> list[str]:
    """The options for sbatch."""
    names = ("account", "partition", "qos", "time", "exclude")
    given = [f"--{name}={value}" for name in names if (value := getattr(arguments, name)) is not None]
    return [*given, *arguments.sbatch]


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Plan the job, start missing parts, and print the job's folder."""
    for name in ("parts", "cpus", "at_once"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise mdata.UsageError(f"--{name.replace('_', '-')} {getattr(arguments, name)}", expected="at least 1")
    if arguments.engine != "slurm" and (idle := slurm_options(arguments)):
        raise mdata.UsageError(
            f"{idle[0].partition('=')[0]} does not apply to {arguments.engine}", expected="launch slurm"
        )
    with console.progress() as progress:
        job = _plan(arguments, progress)
        with launching(job.folder):
            save_job(job)
            steps = job.to_run()
            if not steps:
                said = f"all {_count(job)} are done; nothing is left to do"
            else:
                said = _launch(arguments, job, steps, progress=progress)
    started = [number for phase, numbers in steps if phase.name != "merge" for number in numbers]
    console.result(f"{job.folder}: {said}", _facts(job, started))


def _launch(arguments: argparse.Namespace, job: Job, steps: Steps, *, progress: Progress) -> str:
    try:
        return _start(arguments, job, steps, progress=progress)
    except BaseException:
        discard_unstarted(job)
        raise


def _plan(arguments: argparse.Namespace, progress: Progress) -> Job:
    """The job of the command."""
    words = arguments.command
    text_jobs = {"clean": clean, "extract": extract, "decontaminate": decontaminate}
    commands = {"preprocess": preprocess, "dedup": dedup, **text_jobs}
    command = commands.get(words[0]) if words else None
    if command is None:
        raise mdata.UsageError(
            f"{' '.join(words[:1]) or 'no command'} cannot be launched",
            expected=f"-- and one of {', '.join(commands)}, with its options",
        )
    parser = Parser(prog=f"mdata {words[0]}")
    command.add_arguments(parser)
    parser.words = words[1:]
    parsed = parser.parse_intermixed_args(words[1:])
    if words[0] == "dedup":
        if parsed.stage:
            raise mdata.UsageError(f"{parsed.stage} is one stage", expected="all of dedup", fix="leave the stage out")
        return plan_dedup(
            words, dedup.options_of(parsed), num_parts=arguments.parts, ranges=arguments.ranges, progress=progress
        )
    if text_job := text_jobs.get(words[0]):
        job, work = text_job.work_of(parsed)
        return plan_text_job(words, job, work, num_parts=arguments.parts, progress=progress)
    if parsed.dry_run:
        raise mdata.UsageError("--dry-run writes nothing, so there are no parts to launch", fix="run it by itself")
    options = preprocess.options_of(parsed)[0]
    return plan_launch(words, options, num_parts=arguments.parts, merge=arguments.merge, progress=progress)


def _start(arguments: argparse.Namespace, job: Job, steps: Steps, *, progress: Progress) -> str:
    started = sum(len(numbers) for phase, numbers in steps if phase.name != "merge")
    if arguments.engine == "slurm":
        from mdata.launching.on_slurm import submit

        made = submit(job, steps, cpus=arguments.cpus or 4, at_once=arguments.at_once, options=slurm_options(arguments))
        ids = ", ".join([*made.arrays, *([made.merge] if made.merge else [])])
        return f"{started} of {_count(job)} are queued; Slurm's jobs: {ids}"
    if arguments.engine == "ray":
        from mdata.launching.on_ray import run_on_ray

        run_on_ray(job, steps, address=arguments.address, cpus=arguments.cpus or 4, progress=progress)
    else:
        from mdata.launching.on_processes import run_here

        at_once = arguments.at_once or 1
        cpus = arguments.cpus or max(1, usable_cores() // at_once)
        run_here(job, steps, at_once=at_once, cpus=cpus, progress=progress)
    return f"{started} of {_count(job)} run; all are done"


def _count(job: Job) -> str:
    """How many tasks a job has besides its merge, for messages."""
    counts = [len(phase.numbers) for phase in job.phases if phase.name != "merge"]
    return counted(sum(counts), "part" if len(counts) == 1 else "task")


def _facts(job: Job, started: list[int]) -> dict[str, object]:
    merge = {} if job.merge == "none" and not job.results else {"merge_log": str(job.log(MERGE))}
    return {"job": str(job.folder), "parts": job.num_parts, "started": started, **merge}
