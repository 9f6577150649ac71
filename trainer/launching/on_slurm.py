"""A training run as one Slurm job: the sbatch file, and the job's state in Slurm.

The batch script is bash, because it runs outside of a container, where mtrain may not be installed. It starts one srun
with a task per rank, passes SIGTERM on to the ranks, and asks for a requeue when the run ended with exit code 75, or
failed in a way that a restart may fix. A lost node ends the whole job (--no-kill=off), which Slurm itself requeues
(--requeue).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mdata.errors import ResourceError
from mdata.launching.slurm_commands import batch_script, run_slurm, sbatch, squeue, write_script
from mdata.util.commands import command_line
from trainer.launching.job import END_FILE, FINAL, JOB, PLANNED_RANKS, RANKS, RunJob
from trainer.run.excluded_hosts import EXCLUDED

_SCRIPT_NAME = "batch.sh"
_EXCLUDE = "--exclude="
_SQUASHFS = (".sqsh", ".sqfs", ".squashfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """How a run is placed.

    Args:
        gpus: of each node; None: none.
        cpus: of each rank; None: as the site gives.
        site: for sbatch: ["--partition=long"].
        env: variables of each rank.
        container_image, container_mounts: for pyxis; a squashfs file, relative to `job.cwd`, or an enroot address.
        grace_s: from the signal to the time limit.
        max_restarts: in a row without a new checkpoint.
    """

    gpus: int | None = None
    cpus: int | None = None
    site: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    container_image: str | None = None
    container_mounts: Sequence[str] = ()
    grace_s: int = 300
    max_restarts: int = 3


@dataclass(frozen=True, slots=True)
class SlurmState:
    """A job that is queued or running: Slurm's state and reason, its nodes, the time left."""

    state: str
    reason: str
    nodes: str
    time_left: str

    @property
    def waits(self) -> bool:
        """Whether none of its ranks is running."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")


def excluding(site: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Options for sbatch that exclude more hosts, as one option, since sbatch only reads the last. Pure."""
    given = [option.partition("=")[2] for option in site if option.startswith(_EXCLUDE)]
    others = [option for option in site if not option.startswith(_EXCLUDE)]
    return [*others, _EXCLUDE + ",".join([*given, *hosts])] if hosts else list(site)


def batch_text(job: RunJob, options: SlurmOptions, *, checkpoints: Path | None) -> str:
    """The text of the sbatch file.

    Args:
        checkpoints: their folder, where `latest` names the newest; None: in object storage; then metrics.jsonl shows
            whether an attempt made progress.
    """
    least, most = job.nodes
    gpus = [f"--gpus-per-node={options.gpus}"] if options.gpus else []
    cpus = [f"--cpus-per-task={options.cpus}"] if options.cpus else []
    resources = [f"--ntasks-per-node={job.ranks_per_node}", *gpus, *cpus]
    if least == most:
        asked = [f"--nodes={most}", *resources]
    else:  # with a number of tasks Slurm would stop at the fewest nodes that hold them
        asked = [f"--nodes={least}-{most}", f"--mincpus={job.ranks_per_node * (options.cpus or 1)}", *gpus]
    head = [
        f"--job-name={Path(job.run_folder).name}",
        f"--chdir={job.cwd}",
        *asked,
        f"--output={job.log}",
        "--open-mode=append",
        "--requeue",
        "--no-kill=off",
        f"--signal=B:TERM@{options.grace_s}",
        *options.site,
    ]
    srun = ["srun", '--nodes="$SLURM_JOB_NUM_NODES"', *resources]
    srun += ["--kill-on-bad-exit=1", "--no-kill=off", "--export=ALL"]
    if options.container_image:
        srun += [*map(shlex.quote, _container(job, options)), "mtrain"]
    else:
        srun += [shlex.join(command_line("mtrain"))]
    srun += ["train", shlex.quote(str(job.config))]
    variables = {**options.env, PLANNED_RANKS: str(most * job.ranks_per_node)}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    metrics = shlex.quote(str(Path(job.run_folder, "metrics.jsonl")))
    reached = f"tail -n 1 {metrics} | cut -d, -f1"
    if checkpoints is not None:
        reached = f"cat {shlex.quote(str(checkpoints / 'latest'))}"
    return batch_script(
        head,
        _SCRIPT.format(
            exports="".join(f"{line}\n" for line in exports),
            job=shlex.quote(str(job.folder)),
            end_file=END_FILE,
            final=FINAL,
            ranks=RANKS,
            ranks_per_node=job.ranks_per_node,
            srun=" ".join(srun),
            reached=reached,
            excluded=shlex.quote(str(Path(job.run_folder, EXCLUDED))),
            exclude=" ".join(
                shlex.quote(option.partition("=")[2]) for option in options.site if option.startswith(_EXCLUDE)
            ),
            max_restarts=options.max_restarts,
        ),
    )


def _container(job: RunJob, options: SlurmOptions) -> list[str]:
    """Options of pyxis for srun. It takes any name without a slash for an image in a registry."""
    image = options.container_image or ""
    image = str(Path(job.cwd, image)) if image.endswith(_SQUASHFS) else image
    container = [f"--container-image={image}", f"--container-workdir={job.cwd}"]
    if options.container_mounts:
        container.append(f"--container-mounts={','.join(options.container_mounts)}")
    if options.env:  # otherwise those of the image would count
        container.append(f"--container-env={','.join(options.env)}")
    return container


# Exit codes: 75 stopped on request; 5 out of a resource, or a rank was lost; above 128 killed (130: Ctrl-C).
_SCRIPT = """
# Variables of the shell that submitted this would be taken for a launcher's.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
{exports}job={job}
attempt=${{SLURM_RESTART_COUNT:-0}}
export {end_file}="$job/end-$SLURM_JOB_ID-$attempt"
if [ -z "$SLURM_JOB_END_TIME" ]; then
    end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)
    [ -n "$end" ] && end=$(date --date="$end" +%s 2>/dev/null) && export SLURM_JOB_END_TIME=$end
fi
echo "mtrain: attempt $attempt of Slurm job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"
[ -e "$job/stop" ] && exit 0

# If slurmd dies alone, this script and its ranks live on while the job is started again elsewhere.
is_current() {{ scontrol --oneliner show job "$SLURM_JOB_ID" | grep -qw "Restarts=$attempt"; }}

# Before the time limit, and for mtrain stop: the ranks save and end.
trap 'is_current && scancel --signal=TERM "$SLURM_JOB_ID"' TERM
{srun} &
ranks=$!
wait "$ranks"
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; done  # a signal interrupts wait
wait "$ranks"
code=$?
[ -s "${end_file}" ] && read -r code _ < "${end_file}"  # of the first rank that ended

again=
if [ "$code" -eq 75 ] && [ -e "$job/stop" ]; then
    echo "mtrain: stopped by mtrain stop"
    exit 0
elif {{ [ "$code" -eq 5 ] || [ "$code" -eq 75 ] || {{ [ "$code" -gt 128 ] && [ "$code" -ne 130 ]; }}; }} &&
    [ ! -e "${end_file}{final}" ] && is_current; then
    reached="$SLURM_JOB_ID $({reached} 2>/dev/null)"
    echo "$reached" >> "$job/restarts"
    [ "$(grep -cxF "$reached" "$job/restarts")" -le {max_restarts} ] && again=yes
fi
echo "mtrain: attempt $attempt ended with exit code $code${{again:+; the job is queued again}}"
trap '' TERM  # a requeue ends this script
if [ -n "$again" ] && scontrol requeue "$SLURM_JOB_ID"; then
    hosts=$(cat {excluded} 2>/dev/null)  # the run found them unfit
    excluded=$(printf '%s\\n' {exclude} $hosts | paste -sd,)
    [ -n "$hosts" ] && scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$excluded"
    # run.on_lost_node = "wait": of --nodes MIN-MAX Slurm would take at once what is left.
    [ -s "${end_file}{ranks}" ] && read -r wanted < "${end_file}{ranks}" &&
        scontrol update JobId="$SLURM_JOB_ID" NumNodes=$((wanted / {ranks_per_node}))
fi
exit "$code"
"""


def submit(job: RunJob, text: str, *, options: Sequence[str]) -> RunJob:
    """Write the sbatch file and submit it; returns the job with its id.

    Args:
        job: prepared. options: of the site, repeated on the command line, where no environment variable overrides them.

    Raises:
        UsageError: Slurm is not here, or rejects the job. ResourceError: Slurm does not answer.
    """
    script = job.folder / _SCRIPT_NAME
    write_script(script, text)
    return replace(job, id=sbatch(options, script), host="", started_ticks=0)


def slurm_state(job_id: str) -> SlurmState | None:
    """Slurm's state of a job; None if it is neither queued nor running.

    Raises:
        UsageError: Slurm is not here. ResourceError: it does not answer.
    """
    try:
        rows = squeue(f"--jobs={job_id}", fields=("%T", "%r", "%N", "%L"))
    except ResourceError as error:
        if "Invalid job id" in str(error):  # ended some time ago
            return None
        raise
    return SlurmState(*rows[0]) if rows else None


def slurm_restarts(job_id: str) -> int:
    """How often a queued or running job was requeued."""
    match = re.search(r"\bRestarts=(\d+)", run_slurm(["scontrol", "--oneliner", "show", "job", job_id]))
    return int(match[1]) if match else 0


def run_folder_of(job_id: str) -> Path | None:
    """The run folder of one of our jobs that Slurm still knows; None if it knows none."""
    try:
        shown = run_slurm(["scontrol", "--oneliner", "show", "job", job_id])
    except ResourceError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    match = re.search(rf"\bCommand=(/.*?)/{JOB}/{_SCRIPT_NAME}(?:\s|$)", shown)
    return Path(match[1]) if match else None


def stop_in_slurm(job: RunJob, state: SlurmState) -> None:
    """Remove a queued job from the queue; make the batch script of a running one end its ranks."""
    if state.waits:
        run_slurm(["scancel", job.id])
    else:
        run_slurm(["scancel", "--batch", "--signal=TERM", job.id])
