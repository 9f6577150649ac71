"""Finding a rank from its launcher's variables, and errors if they are wrong."""

from __future__ import annotations

import pytest

from mdata import UsageError
from trainer.parallel.placement import Placement, find_placement, planned_hosts, slurm_hosts

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
STEP = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
}


def test_torchrun_says_the_place_of_a_rank():
    assert find_placement(TORCHRUN) == Placement(rank=5, world_size=8, local_rank=1, local_world_size=4)


def test_torchrun_wins_inside_a_slurm_job():
    place = find_placement({**STEP, **TORCHRUN})
    assert place is not None and place.rank == 5


def test_a_script_that_sets_rank_under_srun_keeps_slurms_local_rank():
    """Without LOCAL_RANK each rank would take the first GPU of its machine."""
    place = find_placement({**STEP, "RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "head", "MASTER_PORT": "77"})
    assert place == Placement(
        rank=3, world_size=8, local_rank=1, local_world_size=8, init_method="tcp://head:77", own_device=True
    )


def test_a_rank_beyond_the_last_one_is_refused():
    """It would wait for others until the end of run.join_minutes."""
    with pytest.raises(UsageError, match=r"rank 5 of 2\s+expected: a rank from 0 to 1"):
        find_placement(TORCHRUN | {"WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="rank 16 of 16"):
        find_placement(STEP | {"SLURM_PROCID": "16"})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_ranks_of_mpirun_are_refused(name):
    with pytest.raises(UsageError, match=rf"mpirun\s+found: {name}=4"):
        find_placement({name: "4"})
    assert find_placement({name: "1"}) is None
    assert find_placement(STEP | {name: "4"}) is not None, "srun sets it for MPI"


def test_a_slurm_step():
    assert find_placement(STEP) == Placement(
        rank=9,
        world_size=16,
        local_rank=1,
        local_world_size=8,
        init_method=f"tcp://gpu003:{20000 + 31002 % 12000}",
        own_device=True,
    )
    place = find_placement({**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "77"})
    assert place is not None and place.init_method == "tcp://head:77"


def test_the_script_of_a_slurm_job_is_alone():
    assert find_placement({}) is None
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1000"}
    assert find_placement(script) is None


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7 node8"),
        ("gpu[003-005,9],login", "gpu003 gpu004 gpu005 gpu9 login"),
        ("gpu[3,5]", "gpu3 gpu5"),
        ("gpu[8-11]", "gpu8 gpu9 gpu10 gpu11"),
        ("gpu[a-b,1]", "gpua-b gpu1"),
        ("a[1-2]b[07-09]", "a1b07 a1b08 a1b09 a2b07 a2b08 a2b09"),
        ("", ""),
    ],
)
def test_the_hosts_of_a_nodelist(nodelist, hosts):
    assert slurm_hosts(nodelist) == hosts.split()


def test_ranks_are_on_the_hosts_in_blocks():
    assert planned_hosts(STEP) == ["gpu003"] * 8 + ["gpu004"] * 8
    assert planned_hosts({"SLURM_STEP_NODELIST": "a[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}) == [
        "a1", "a1", "a2", "a2", "a3",
    ]  # fmt: skip
    assert planned_hosts(STEP | {"SLURM_DISTRIBUTION": "cyclic:block"}) == planned_hosts({}) == []


@pytest.mark.parametrize("value", ["x", "-1", ""])
def test_a_variable_that_is_no_number_is_named(value):
    with pytest.raises(UsageError, match=f"variable RANK is not usable\n  found: '{value}'"):
        find_placement({**TORCHRUN, "RANK": value})


def test_a_missing_variable_is_named():
    with pytest.raises(UsageError, match="SLURM_NTASKS is not usable\n  found: nothing"):
        find_placement({"SLURM_PROCID": "0"})
