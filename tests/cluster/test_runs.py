"""A training run on a real Slurm of this machine: submitted, preempted, near its limit, stopped; the losses stay.

Runs are two or four ranks on the CPU, each on a node of its own. If Slurm is missing the tests are skipped;
`make cluster-test` installs it, and runs them: they take minutes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from tests.cluster.test_engines import NEEDS_SLURM
from tests.helpers.processes import wait_until
from tests.helpers.slurm import slurm
from trainer.run.metrics import read_events, read_metrics

pytestmark = [NEEDS_SLURM, pytest.mark.soak]
RUN = """
[run]
folder = "runs/first"
[model]
num_layers = 2
hidden_size = 16
num_heads = 2
vocab_size = 300
[data]
blend = "mock"
[train]
sequence_length = 16
global_batch = 8
micro_batch = 1
steps = 60
log_interval = 1
[optimizer]
lr = 1e-3
[checkpoint]
interval = 5
"""
LONGER = ["train.steps=400", "checkpoint.interval=50"]
# Names of the nodes lead nowhere on loopback.
ENV = ["--env", "MASTER_ADDR=127.0.0.1", "--env", "OMP_NUM_THREADS=1", "--env", "PYTHONDONTWRITEBYTECODE=1"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=4, cpus=2) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of the same run without a scheduler, by number of ranks and settings."""
    known = {}

    def losses(ranks, run=()):
        key = (ranks, *run)
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            (folder / "run.toml").write_text(RUN)
            words = ["train", "run.toml", "--nproc", str(ranks), *run]
            done = mtrain(folder, *words, env={**os.environ, "OMP_NUM_THREADS": "1"})
            assert done.returncode == 0, done.stderr
            known[key] = steps_of(folder)
        return known[key]

    return losses


@pytest.fixture
def here(tmp_path, cluster):
    (tmp_path / "run.toml").write_text(RUN)
    yield tmp_path
    cluster.run("scancel", "--user=root")
    wait_until(lambda: not cluster.run("squeue", "-h"), 60)
    assert not ranks_of(tmp_path), "ranks live on"


def mtrain(folder, *words, env):
    command = [sys.executable, "-P", str(Path(__file__).parents[2] / "mdata/util/commands.py"), "mtrain", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def launch(cluster, folder, *words, nodes="2", run=()):
    options = ["--nodes", nodes, *ENV, *words]
    command = ["launch", "slurm", *options, "--json", "--", "run.toml", "--nproc", "1", *run]
    done = mtrain(folder, *command, env=cluster.environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["id"]


def status(cluster, folder):
    done = mtrain(folder, "status", "runs/first", "--json", env=cluster.environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def steps_of(folder):
    """(step, loss) of each line of the curve."""
    return [(line["step"], line["loss"]) for line in read_metrics(folder / "runs/first")]


def step(folder):
    return max((number for number, _ in steps_of(folder)), default=0)


def log(folder):
    return (folder / "runs/first/job/log.txt").read_text()


def ranks_of(folder):
    """Processes of ranks of a run in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train" in words and str(folder).encode() in b" ".join(words) and b"mtrain" in words:
            found.append(int(path.parent.name))
    return found


@contextmanager
def suspended(folder):
    """All ranks are stopped during the block, as if a step took as long."""
    ranks = [pid for pid in ranks_of(folder) if Path(f"/proc/{pid}/comm").read_text() != "srun\n"]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)


def wait_for_end(cluster, folder, seconds=240):
    wait_until(lambda: not cluster.run("squeue", "-h"), seconds)
    return status(cluster, folder)


def test_a_run_that_is_preempted_twice_has_the_losses_of_an_undisturbed_one(cluster, here, undisturbed):
    job = launch(cluster, here, nodes="4", run=["train.steps=60"])
    for seen in (7, 25):
        wait_until(lambda seen=seen: step(here) >= seen, 120)
        assert cluster.run("scontrol", "requeue", job) == ""  # SIGTERM, and 2 s later SIGKILL: a save may fit, or not
        wait_until(lambda: status(cluster, here)["condition"] == "waiting", 60)
    found = wait_for_end(cluster, here)
    assert (found["condition"], found["step"], found["end"]["code"]) == ("done", 60, 0), log(here)
    assert log(here).count(f" of Slurm job {job} on ") == 3
    assert steps_of(here) == undisturbed(4)


def test_a_run_near_its_time_limit_saves_and_is_queued_again(cluster, here, undisturbed):
    job = launch(cluster, here, "--time", "1:00:00")
    wait_until(lambda: step(here) >= 3, 120)
    cluster.run("scancel", "--batch", "--signal=TERM", job)  # what --signal=B:TERM@300 sends, at this moment
    wait_until(lambda: "ended with exit code 75; the job is queued again" in log(here), 60)
    found = wait_for_end(cluster, here)
    assert found["condition"] == "done" and steps_of(here) == undisturbed(2), log(here)


def test_a_run_whose_time_is_up_saves_and_goes_on_in_another_attempt(cluster, here, undisturbed):
    """Of two minutes, of which a run keeps one for its save."""
    job = launch(cluster, here, "--time", "2", "--grace", "1")
    wait_until(lambda: step(here) >= 7, 120)
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job)
    limit_s = datetime.fromisoformat(re.search(r" EndTime=(\S+)", shown)[1]).timestamp()
    with suspended(here):
        time.sleep(max(0.0, limit_s - 60 - time.time()))
    wait_until(lambda: "attempt 0 ended with exit code 75; the job is queued again" in log(here), 60)
    assert time.time() < limit_s
    (stopped,) = (event for event in read_events(here / "runs/first") if event["event"] == "stopped")
    assert stopped["saved"] and "the time limit of the Slurm job" in log(here)
    found = wait_for_end(cluster, here)
    assert found["condition"] == "done" and steps_of(here) == undisturbed(2), log(here)


def test_a_lost_rank_is_started_again_and_a_broken_run_is_not(cluster, here, undisturbed):
    launch(cluster, here)
    wait_until(lambda: step(here) >= 7, 120)
    os.kill(ranks_of(here)[-1], signal.SIGKILL)
    wait_until(lambda: "the job is queued again" in log(here), 120)
    found = wait_for_end(cluster, here)
    assert found["condition"] == "done" and steps_of(here) == undisturbed(2), log(here)
    (here / "runs/first/checkpoints/step-60/index.json").write_text("{")
    launch(cluster, here, "--no-check", run=["train.steps=70"])
    found = wait_for_end(cluster, here)
    assert found["condition"] == "failed" and found["end"]["code"] == 4 and found["restarts"] == 0, log(here)


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_run_that_loses_a_node_goes_on_elsewhere(cluster, here, undisturbed, place):
    """The first has the batch script and rank 0: Slurm queues the job again. Without the last, the ranks end first."""
    launch(cluster, here)
    wait_until(lambda: step(here) >= 7, 120)
    nodes = cluster.run("scontrol", "show", "hostnames", status(cluster, here)["slurm"]["nodes"]).split()
    name = nodes[0 if place == "first" else -1]
    cluster.kill_node(name)
    try:
        wait_until(lambda: log(here).count("mtrain: attempt 1 of Slurm job") == 1, 240)
        found = wait_for_end(cluster, here)
    finally:
        cluster.start_node(name)
    assert found["condition"] == "done" and steps_of(here) == undisturbed(2), log(here)


def test_ranks_that_outlive_their_slurmd_write_nothing_more(cluster, here, undisturbed):
    """Both slurmd die alone. Slurm starts the job on other nodes, while script and ranks of the first start live on."""
    job = launch(cluster, here)
    wait_until(lambda: step(here) >= 7, 120)
    nodes = cluster.run("scontrol", "show", "hostnames", status(cluster, here)["slurm"]["nodes"]).split()
    claim = (here / "runs/first/attempt.json").read_bytes()
    with suspended(here):  # so that they are not done before their job starts again
        for name in nodes:
            cluster.kill_node(name, ranks=False)
        wait_until(lambda: (here / "runs/first/attempt.json").read_bytes() != claim, 240)
    try:
        found = wait_for_end(cluster, here)
        wait_until(lambda: not ranks_of(here), 60)
    finally:
        for name in nodes:
            cluster.start_node(name)
    assert found["condition"] == "done" and steps_of(here) == undisturbed(2), log(here)
    # Its own srun has given up by then, and prints nothing of it.
    assert "a newer attempt of this run has taken over" in (here / f"runs/first/job/end-{job}-0").read_text()
    assert not (here / "runs/first/job/restarts").exists()
    assert log(here).count(f" of Slurm job {job} on ") == 2 and "is queued again" not in log(here)


def test_a_batch_host_whose_slurmd_dies_alone_leaves_the_job_to_the_next_start(cluster, here, undisturbed):
    """Slurm ends the ranks of the other node, and with them that of the batch host."""
    launch(cluster, here, run=LONGER)
    wait_until(lambda: step(here) >= 7, 120)
    name = cluster.run("scontrol", "show", "hostnames", status(cluster, here)["slurm"]["nodes"]).split()[0]
    cluster.kill_node(name, ranks=False)
    try:
        cluster.run("scontrol", "update", f"nodename={name}", "state=down", "reason=test")  # in place of its time-out
        found = wait_for_end(cluster, here, 600)
        wait_until(lambda: not ranks_of(here), 60)
    finally:
        cluster.start_node(name)
    assert found["condition"] == "done" and found["restarts"] == 1, log(here)
    assert steps_of(here) == undisturbed(2, LONGER), log(here)


@pytest.mark.timeout(1800)  # six starts
def test_one_run_survives_all_of_it(cluster, here, undisturbed):
    """Of four nodes it has three: preempted twice, a node lost, a slurmd lost alone, and the time limit."""
    run = ["train.global_batch=12", "train.steps=1500", "checkpoint.interval=20"]
    job = launch(cluster, here, "--time", "4", "--grace", "1", nodes="3", run=run)

    def wait_for_start(number):
        """The job has trained some steps in this start of the run; the nodes that it has."""

        def trains():
            starts = [event["step"] for event in read_events(here / "runs/first") if event["event"] == "start"]
            return len(starts) >= number and step(here) >= starts[-1] + 3

        wait_until(trains, 240)
        return cluster.run("scontrol", "show", "hostnames", status(cluster, here)["slurm"]["nodes"]).split()

    for number in (1, 2):
        wait_for_start(number)
        cluster.run("scontrol", "requeue", job)
    *_, last = wait_for_start(3)
    cluster.kill_node(last)
    first, *_ = wait_for_start(4)
    cluster.start_node(last)
    cluster.kill_node(first, ranks=False)
    cluster.run("scontrol", "update", f"nodename={first}", "state=down", "reason=test")  # in place of its time-out
    wait_for_start(5)
    cluster.start_node(first)
    shown = cluster.run("scontrol", "--oneliner", "show", "job", job)
    limit_s = datetime.fromisoformat(re.search(r" EndTime=(\S+)", shown)[1]).timestamp()
    with suspended(here):
        time.sleep(max(0.0, limit_s - 60 - time.time()))
    found = wait_for_end(cluster, here, 400)
    assert found["condition"] == "done" and steps_of(here) == undisturbed(3, run), log(here)
    *_, stopped = (event for event in read_events(here / "runs/first") if event["event"] == "stopped")
    assert stopped["saved"] and "the time limit of the Slurm job" in log(here)
    assert log(here).count(f" of Slurm job {job} on ") >= 6


def test_a_run_with_two_numbers_of_nodes_goes_on_with_fewer(cluster, here, undisturbed):
    job = launch(cluster, here, nodes="2-4")
    wait_until(lambda: step(here) >= 7, 120)
    cluster.run("scontrol", "update", "nodename=n[1-2]", "state=drain", "reason=test")
    try:
        cluster.run("scontrol", "requeue", job)
        wait_until(lambda: log(here).count("mtrain: attempt 1 of Slurm job") == 1, 120)
        found = wait_for_end(cluster, here)
    finally:
        cluster.run("scontrol", "update", "nodename=n[1-2]", "state=resume")
    starts = [event for event in read_events(here / "runs/first") if event["event"] == "start"]
    assert found["condition"] == "done" and [event["world_size"] for event in starts] == [4, 2], log(here)
    for (number, loss), (expected_number, expected) in zip(steps_of(here), undisturbed(4), strict=True):
        assert number == expected_number and abs(loss - expected) <= 1e-4 * expected


def test_a_run_that_shrinks_takes_the_nearest_layout_for_three_nodes(cluster, here, undisturbed):
    run = ["train.global_batch=12", "train.steps=400", "mesh.tp=2"]
    job = launch(cluster, here, nodes="3-4", run=[*run, "run.on_lost_node=shrink"])
    wait_until(lambda: step(here) >= 7, 120)
    cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    try:
        cluster.run("scontrol", "requeue", job)
        wait_until(lambda: log(here).count("mtrain: attempt 1 of Slurm job") == 1, 120)
        found = wait_for_end(cluster, here)
    finally:
        cluster.run("scontrol", "update", "nodename=n2", "state=resume")
    starts = [event for event in read_events(here / "runs/first") if event["event"] == "start"]
    assert found["condition"] == "done" and [event["world_size"] for event in starts] == [4, 3], log(here)
    assert "3 of 4 ranks are left: the run goes on with them" in log(here) and "works: mesh.tp=1" in log(here)
    for (number, loss), (expected_number, expected) in zip(steps_of(here), undisturbed(4, run), strict=True):
        assert number == expected_number and abs(loss - expected) <= 1e-3 * expected


def test_a_run_that_waits_for_lost_nodes_starts_again_with_all(cluster, here, undisturbed):
    job = launch(cluster, here, nodes="2-4", run=[*LONGER, "run.on_lost_node=wait"])
    wait_until(lambda: step(here) >= 7, 120)
    cluster.run("scontrol", "update", "nodename=n[1-2]", "state=drain", "reason=test")
    try:
        cluster.run("scontrol", "requeue", job)
        wait_until(lambda: "attempt 1 ended with exit code 75; the job is queued again" in log(here), 120)
        time.sleep(10)  # in which it would start on the two nodes that are left
        assert status(cluster, here)["condition"] == "waiting", log(here)
    finally:
        cluster.run("scontrol", "update", "nodename=n[1-2]", "state=resume")
    found = wait_for_end(cluster, here)
    starts = [event for event in read_events(here / "runs/first") if event["event"] == "start"]
    assert found["condition"] == "done" and [event["world_size"] for event in starts] == [4, 4], log(here)
    assert 'run.on_lost_node="wait"' in log(here) and steps_of(here) == undisturbed(4, LONGER)


def test_a_run_is_stopped_and_the_same_command_continues_it(cluster, here, undisturbed):
    first = launch(cluster, here, run=LONGER)
    wait_until(lambda: step(here) >= 3, 120)
    assert launch(cluster, here, run=LONGER) == first, "a second job of the same run"
    done = mtrain(here, "stop", first, env=cluster.environment)
    assert done.returncode == 0 and "asked to save and end" in done.stdout
    found = wait_for_end(cluster, here)
    assert found["condition"] == "stopped" and found["step"] < 400 and "stopped by mtrain stop" in log(here)
    second = launch(cluster, here, run=LONGER)
    assert second != first
    assert wait_for_end(cluster, here)["condition"] == "done" and steps_of(here) == undisturbed(2, LONGER)


def test_a_waiting_job_leaves_the_queue(cluster, here):
    cluster.run("scontrol", "update", "nodename=n[1-4]", "state=drain", "reason=test")
    try:
        job = launch(cluster, here)
        found = status(cluster, here)
        assert found["condition"] == "waiting" and found["slurm"]["state"] == "PENDING"
        assert mtrain(here, "stop", job, env=cluster.environment).returncode == 0
        assert not cluster.run("squeue", "-h")
    finally:
        cluster.run("scontrol", "update", "nodename=n[1-4]", "state=resume")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "none"], "invalid partition specified: none"),
        (["--partition", "lm", "--account", "none"], "Invalid account or account/partition combination specified"),
        (["--exclude", "n9"], "Invalid node name specified"),
        (["--time", "soon"], "Invalid --time specification"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words(cluster, here, words, message):
    command = ["launch", "slurm", *words, "--no-check", "--", "run.toml", "--nproc", "1"]
    done = mtrain(here, *command, env=cluster.environment)
    assert done.returncode == 2 and "Slurm rejected the job" in done.stderr
    assert message.lower() in done.stderr.lower() and len(done.stderr.splitlines()) <= 4
    assert not (here / "runs/first").exists()
