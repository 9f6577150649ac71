r"""Start a run in the background: on this machine, as a job of Slurm, on Ray; or print a manifest for Kubernetes.

After -- come the arguments of `mtrain train`. The run is checked here first, with the ranks of all nodes. Give
the same command again to continue a run that ended early; see mtrain status, mtrain tail and mtrain stop.

Examples:
  mtrain launch local -- run.toml train.steps=100
  mtrain launch slurm --nodes 4 --gpus 8 --time 24:00:00 --account lm -- run.toml mesh.tp=8
"""

from __future__ import annotations

import argparse
import os
import re
import signal
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mdata.errors import MdataError, UsageError, counted
from mdata.launching.job_folder import launching
from mdata.launching.on_ray import connected
from mdata.launching.slurm_commands import run_slurm
from mdata.util.commands import command_line
from trainer.config.parse import RESUME_ADVICE
from trainer.launching.job import RunJob, discard, load_job, prepare, save_job, start_here
from trainer.launching.run_status import is_active

from .console import Console, Parser
from .launch import add_slurm_options, slurm_options
from .mtrain_options import add_run_arguments, read_run_file, world_size

if TYPE_CHECKING:
    from trainer.config.parse import ReadConfig

TAKES_COMMAND = True
_HELD = ("this run is already being launched", "wait for that launch to finish; see `mtrain status`")


def add_arguments(parser: Parser) -> None:
    """See `mtrain launch --help`."""
    parser.no_option = "mtrain launch ENGINE [options] -- run.toml ...: what mtrain train takes follows after --"
    parser.resume = RESUME_ADVICE
    parser.usage = f"{parser.prog} local|slurm|ray|k8s [options] -- run.toml [section.key=value ...]"
    parser.add_argument("engine", choices=("local", "slurm", "ray", "k8s"), help="what starts the ranks")
    place = parser.add_argument_group("nodes (slurm, ray, k8s)").add_argument
    place("--nodes", default="1", metavar="N", help="nodes, or MIN-MAX for slurm (default: 1)")
    place(
        "--gpus", type=int, metavar="N", help="GPUs of each node, one rank on each; without GPUs: -- run.toml --nproc N"
    )
    place("--cpus", type=int, metavar="N", help="CPU cores of each rank")
    place("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the ranks")
    place("--container-image", metavar="IMAGE", help="image with mtrain on its PATH (slurm: needs pyxis)")
    place(
        "--container-mounts",
        action="append",
        default=[],
        metavar="FROM:TO",
        help="slurm: folders for pyxis; k8s: claims of persistent volumes",
    )
    place(
        "--grace", type=int, default=300, metavar="S", help="seconds to save and end before a time limit (default: 300)"
    )
    place(
        "--max-restarts",
        type=int,
        default=3,
        metavar="N",
        help="slurm: restarts in a row without a new checkpoint; k8s: in all (default: 3)",
    )
    place(
        "--print",
        action="store_true",
        help="slurm: print the batch file, do not submit it; the run's job folder is written (k8s: the default)",
    )
    place("--no-check", action="store_true", help="do not check the run here, where its files may be missing")
    add_slurm_options(parser)
    ray = parser.add_argument_group("ray").add_argument
    ray("--address", default="auto", metavar="A", help="cluster address (default: the cluster of this node)")
    kubernetes = parser.add_argument_group("k8s").add_argument
    kubernetes("--kind", choices=("jobset", "trainjob"), default="jobset", help="kind of manifest (default: jobset)")
    kubernetes("--name", metavar="NAME", help="name of the job (default: that of the run folder)")
    kubernetes("--namespace", metavar="NAME", help="namespace of the job (default: kubectl's)")


# Options of one engine: name -> the engines that have it.
_ENGINES = {
    "nodes": ("slurm", "ray", "k8s"),
    "gpus": ("slurm", "ray", "k8s"),
    "cpus": ("slurm", "ray", "k8s"),
    "env": ("slurm", "ray", "k8s"),
    "container_image": ("slurm", "k8s"),
    "container_mounts": ("slurm", "k8s"),
    "grace": ("slurm", "k8s"),
    "max_restarts": ("slurm", "k8s"),
    "print": ("slurm", "k8s"),
    "account": ("slurm",),
    "partition": ("slurm",),
    "qos": ("slurm",),
    "time": ("slurm",),
    "exclude": ("slurm",),
    "sbatch": ("slurm",),
    "address": ("ray",),
    "kind": ("k8s",),
    "name": ("k8s",),
    "namespace": ("k8s",),
}


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Check the run, then start, submit or print it."""
    words, run = _command(arguments.command)
    _check_options(arguments)
    read = read_run_file(run.config, run.overrides)
    job = _job(arguments, words, run, read)
    if arguments.engine == "k8s":
        _check_run(arguments, run, read, job, console)
        _print_manifest(arguments, words, job, console)
        return
    if _is_launched(job, console):
        return
    _check_run(arguments, run, read, job, console)
    is_new = not job.folder.exists()
    try:
        with launching(job.folder, held=_HELD):
            if _is_launched(job, console):  # by another launch, meanwhile
                return
            stored_job = load_job(Path(job.run_folder))
            job = replace(job, launches=stored_job.launches + 1 if stored_job else 1)
            said, job = _launch(arguments, run, read, job, console)
    except BaseException:
        if is_new:
            discard(job)
        raise
    if arguments.print:
        console.result(said, {"batch": said, "folder": str(job.folder)})
    else:
        console.result(f"{job.run_folder}: {said}; see mtrain status {job.run_folder}", asdict(job))


def _is_launched(job: RunJob, console: Console) -> bool:
    """Whether the same job waits or runs already, which is said."""
    stored_job = load_job(Path(job.run_folder))
    if stored_job is None or not is_active(stored_job):
        return False
    stored_job.refuse_other(job)
    place = (
        f"Slurm job {stored_job.id}"
        if stored_job.engine == "slurm"
        else f"process {stored_job.id} on {stored_job.host}"
    )
    console.result(f"{job.run_folder}: {place} is already waiting or running; nothing was started", asdict(stored_job))
    return True


def _command(words: list[str]) -> tuple[list[str], argparse.Namespace]:
    """The words after --, and what they mean to `mtrain train`."""
    if words[:2] == ["mtrain", "train"]:
        words = words[2:]
    parser = Parser(prog="mtrain train")
    add_run_arguments(parser)
    parser.words = words
    if not words:
        raise UsageError("no run to launch", expected="-- run.toml and its overrides, after the options of launch")
    return words, parser.parse_intermixed_args(words)


def _check_options(arguments: argparse.Namespace) -> None:
    defaults = Parser()
    add_arguments(defaults)
    for name, engines in _ENGINES.items():
        value, option = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value != defaults.get_default(name) and arguments.engine not in engines:
            raise UsageError(
                f"{option} does not apply to {arguments.engine}", expected=f"launch {' or '.join(engines)}"
            )
        if isinstance(value, int) and not isinstance(value, bool) and value < (name == "cpus"):
            raise UsageError(f"{option} {value}", expected="at least 1" if name == "cpus" else "0 or more")
    if wrong := [variable for variable in arguments.env if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", variable)]:
        raise UsageError(f"--env {wrong[0]}", expected="NAME=VALUE")
    if arguments.engine == "k8s" and not arguments.container_image:
        raise UsageError("--container-image is missing", expected="an image with mtrain, which the pods run")
    limit = _seconds(arguments.time)
    if limit is not None and limit <= arguments.grace + 60:  # Slurm sends the signal up to a minute early
        raise UsageError(
            f"--time {arguments.time} leaves no time to train",
            found=f"a signal to save --grace {arguments.grace} s before the limit",
            fix="a longer --time, or a shorter --grace",
        )
    fixed = [name for name in ("grace", "max_restarts") if getattr(arguments, name) != defaults.get_default(name)]
    if arguments.kind == "trainjob" and fixed:
        option = f"--{fixed[0].replace('_', '-')}"
        raise UsageError(f"{option}: a TrainJob has no such field", expected="a setting of the cluster's runtime")
    if arguments.container_mounts and not arguments.container_image:
        raise UsageError("--container-mounts needs --container-image")


def variables(pairs: list[str]) -> dict[str, str]:
    """NAME=VALUE of each --env."""
    return dict(pair.split("=", 1) for pair in pairs)


def _seconds(limit: str | None) -> int | None:
    """The seconds of a time limit in Slurm's forms, "60", "1:30:00", "2-12"; None: none, or one that Slurm checks."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit or "")
    if match is None:
        return None
    days, *numbers = (int(text) if text else 0 for text in match.groups())
    if match[1] is None and match[4] is None:  # minutes:seconds
        numbers = [0, *numbers[:2]]
    hours, minutes, seconds = numbers
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None  # Slurm takes 0 for no limit


def _job(arguments: argparse.Namespace, words: list[str], run: argparse.Namespace, read: ReadConfig) -> RunJob:
    """The job, not yet started."""
    least, _, most = arguments.nodes.partition("-")
    if not (least.isdecimal() and (most or least).isdecimal() and 1 <= int(least) <= int(most or least)):
        raise UsageError(f"--nodes {arguments.nodes}", expected="a number from 1, or MIN-MAX such as 3-4")
    if most and arguments.engine != "slurm":
        reason = (
            "a JobSet has a fixed number of pods" if arguments.engine == "k8s" else "a fixed number is needed on Ray"
        )
        raise UsageError(f"--nodes {arguments.nodes}: {reason}", fix=f"--nodes {most}")
    if arguments.engine == "local":
        ranks = world_size(read.config, run.nproc)
    else:
        ranks = run.nproc or arguments.gpus or 0
        if ranks < 1 or (run.nproc and arguments.gpus and run.nproc != arguments.gpus):
            raise UsageError(
                "the number of ranks of a node is not known" if ranks < 1 else "two numbers of ranks of a node",
                found=f"--gpus {arguments.gpus} and --nproc {run.nproc}" if ranks else None,
                expected="--gpus N, one rank on each; or, on nodes without GPUs, --nproc N after run.toml",
            )
    return RunJob(
        engine=arguments.engine,
        words=tuple(words),
        cwd=str(Path.cwd()),
        run_folder=str(Path(read.config.run.folder or "run").resolve()),
        nodes=(int(least), int(most or least)),
        ranks_per_node=ranks,
    )


def _check_run(
    arguments: argparse.Namespace, run: argparse.Namespace, read: ReadConfig, job: RunJob, console: Console
) -> None:
    """Find every problem before anything waits in a queue, for the least and the most nodes."""
    from trainer.config.parse import AFTERWARDS, problems_error

    if arguments.no_check:
        if read.problems:
            raise problems_error(run.config, read.problems, fix=AFTERWARDS)
        return
    from trainer.run.launch import preflight
    from trainer.run.lost_nodes import shrunk_to

    most = job.nodes[1] * job.ranks_per_node
    with console.progress() as progress:
        for nodes in dict.fromkeys(job.nodes):
            ranks = nodes * job.ranks_per_node
            checked = read
            if ranks < most and read.config.run.on_lost_node == "shrink" and not read.problems:
                config, _ = shrunk_to(read.config, ranks, f"{ranks} of {most} ranks would be left")
                checked = replace(read, config=config)
            where = (
                f"{run.config} on {nodes} x {counted(job.ranks_per_node, 'rank')}"
                if job.engine != "local"
                else run.config
            )
            local = arguments.engine == "local"  # otherwise the ranks say at their start what their machines lack
            preflight(checked, ranks, where=where, progress=progress, needs_libraries=local)


def _launch(
    arguments: argparse.Namespace, run: argparse.Namespace, read: ReadConfig, job: RunJob, console: Console
) -> tuple[str, RunJob]:
    """Start or submit the job; what to say, and the job with its id."""
    from trainer.config.parse import dump_config

    if arguments.engine == "local":
        prepare(job, dump_config(read.config))
        nproc = ["--nproc", str(job.ranks_per_node)]
        job = start_here(job, [*command_line("mtrain"), "train", str(job.config), *nproc])
        _record(job)
        return f"process {job.id} trains in the background", job
    if arguments.engine == "ray":
        with connected(arguments.address):  # what is wrong is said here and now
            prepare(job, dump_config(read.config))
        save_job(job)
        words = [f"--address={arguments.address}", f"--gpus={arguments.gpus or 0}", f"--cpus={arguments.cpus or 1}"]
        words += [f"--env={pair}" for pair in arguments.env]
        job = start_here(job, [*command_line("mtrain_ray"), job.run_folder, *words])
        _record(job)
        return f"process {job.id} waits for Ray's nodes, then trains on them", job
    from trainer.checkpoint.location import checkpoints_folder
    from trainer.launching.on_slurm import SlurmOptions, batch_text, excluding, submit
    from trainer.run.excluded_hosts import EXCLUDED, excluded_hosts

    folder, hosts = checkpoints_folder(read.config), excluded_hosts(Path(job.run_folder))
    if hosts:
        console.note(
            f"excluding {', '.join(hosts)}, listed in {Path(job.run_folder, EXCLUDED)}; remove repaired hosts there"
        )
    options = SlurmOptions(
        gpus=arguments.gpus,
        cpus=arguments.cpus,
        site=excluding(slurm_options(arguments), hosts),
        env=variables(arguments.env),
        container_image=arguments.container_image,
        container_mounts=arguments.container_mounts,
        grace_s=arguments.grace,
        max_restarts=arguments.max_restarts,
    )
    text = batch_text(job, options, checkpoints=folder.absolute() if isinstance(folder, Path) else None)
    prepare(job, dump_config(read.config))
    if arguments.print:
        return text, job
    job = submit(job, text, options=options.site)
    _record(job)
    return f"Slurm job {job.id} is queued", job


def _record(job: RunJob) -> None:
    """Save the record of a job that was started; it is ended if there is none, since no command would find it."""
    try:
        save_job(job)
    except BaseException:
        with suppress(MdataError, OSError):
            if job.engine == "slurm":
                run_slurm(["scancel", job.id])
            else:
                os.killpg(int(job.id), signal.SIGTERM)
        raise


def _print_manifest(arguments: argparse.Namespace, words: list[str], job: RunJob, console: Console) -> None:
    from trainer.launching.on_kubernetes import KubernetesOptions, manifest, yaml_text

    options = KubernetesOptions(
        name=arguments.name or Path(job.run_folder).name,
        namespace=arguments.namespace,
        image=arguments.container_image,
        claims=arguments.container_mounts,
        env=variables(arguments.env),
        gpus=arguments.gpus,
        cpus=arguments.cpus,
        grace_s=arguments.grace,
        max_restarts=arguments.max_restarts,
    )
    facts = manifest(job, words, options, kind=arguments.kind)
    console.result(yaml_text(facts), facts)
