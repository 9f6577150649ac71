"""This process's place among the ranks, as torchrun's variables give it, otherwise Slurm's.

A pure function of the environment, so that it is tested without starting anything. Imports no torch; `world.py` joins
the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mdata import UsageError

LAUNCHERS = "start through torchrun, srun or mtrain train --nproc N"
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of Open MPI and MPICH
FIRST_PORT, NUM_PORTS = 20000, 12000  # below the range from which systems assign ports


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The position that a launcher gave this process.

    Args:
        rank, world_size: among all ranks.
        local_rank, local_world_size: among the ranks of this machine.
        init_method: how the ranks find each other, in the form of torch.distributed.
        own_device: the launcher shows each rank only its own GPU, as number 0.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str = "env://"
    own_device: bool = False


def find_placement(env: Mapping[str, str]) -> Placement | None:
    """The placement given by torchrun or Slurm; None if neither started this process.

    Raises:
        UsageError: the launcher's variables are incomplete, not numbers, or contradict each other; another launcher has
            started several processes.
    """
    place = _started(env)
    if place is not None and place.rank >= place.world_size:
        found, expected = f"rank {place.rank} of {place.world_size}", f"a rank from 0 to {place.world_size - 1}"
        raise UsageError(
            "the launcher's variables contradict each other", found=found, expected=expected, fix=LAUNCHERS
        )
    for name in MPI_SIZES:  # each process would train alone, in one folder
        if place is None and env.get(name, "1") not in ("", "1"):
            raise UsageError("ranks cannot be started by mpirun", found=f"{name}={env[name]}", fix=LAUNCHERS)
    return place


def _started(env: Mapping[str, str]) -> Placement | None:
    # The script of an sbatch job and a shell of salloc also carry a job's size, but are one process: only a
    # step started by srun has SLURM_STEP_NUM_TASKS.
    in_step = "SLURM_PROCID" in env and ("SLURM_STEP_NUM_TASKS" in env or "SLURM_JOB_ID" not in env)
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return _slurm_placement(env) if in_step else None
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if in_step and "LOCAL_RANK" not in env:  # a script sets RANK=$SLURM_PROCID; not all ranks are to share one GPU
        return replace(_slurm_placement(env), rank=rank, world_size=size)
    return Placement(
        rank=rank,
        world_size=size,
        local_rank=_number(env, "LOCAL_RANK", "0"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", "1"),
    )


def launcher_holds_store(env: Mapping[str, str]) -> bool:
    """Whether the store is in torchrun's process; otherwise it is in rank 0's."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def planned_hosts(env: Mapping[str, str]) -> list[str]:
    """The machine of each rank if Slurm places ranks in blocks; []: not started by Slurm, or placed otherwise."""
    if env.get("SLURM_DISTRIBUTION", "block").partition(":")[0] != "block":
        return []
    counts = list[int]()
    for count, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    hosts = slurm_hosts(env.get("SLURM_STEP_NODELIST", ""))
    return [host for host, count in zip(hosts, counts, strict=False) for _ in range(count)]


def slurm_hosts(nodelist: str) -> list[str]:
    """The machines of a Slurm node list, in order: "gpu[003-004,9],login" -> gpu003, gpu004, gpu9, login."""
    hosts = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for place, text in enumerate(re.split(r"\[([^\]]*)\]", part)):  # every second one was in brackets
            numbers = list(_numbers_of(text)) if place % 2 else [text]
            names = [name + number for name in names for number in numbers]
        hosts += names
    return hosts


def _numbers_of(ranges: str) -> Iterator[str]:
    """ "003-005,9" -> 003, 004, 005, 9."""
    for text in ranges.split(","):
        first, _, last = text.partition("-")
        if first.isdecimal() and last.isdecimal():
            yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
        else:
            yield text


def _slurm_placement(env: Mapping[str, str]) -> Placement:
    job = _number(env, "SLURM_JOB_ID", "0") * 31 + _number(env, "SLURM_STEP_ID", "0")
    job += _number(env, "SLURM_RESTART_COUNT", "0") * 7  # ranks of an earlier attempt may still hold its port
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    host = env.get("MASTER_ADDR") or next(iter(slurm_hosts(nodelist)), "localhost")
    port = _number(env, "MASTER_PORT", str(FIRST_PORT + job % NUM_PORTS))
    tasks_per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Placement(
        rank=_number(env, "SLURM_PROCID"),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"),
        local_rank=_number(env, "SLURM_LOCALID", "0"),
        local_world_size=int(tasks_per_node[0]) if tasks_per_node else 1,
        init_method=f"tcp://{host}:{port}",
        own_device=True,
    )


def _number(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    if text is None or not text.isdecimal():
        shown = "nothing" if text is None else repr(text)
        problem = f"the launcher's variable {name} is not usable"
        raise UsageError(problem, found=shown, expected="a number", fix=LAUNCHERS)
    return int(text)
