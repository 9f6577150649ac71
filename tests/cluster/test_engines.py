"""The same job on this machine, on Slurm and on Ray, with kills in between; real clusters of two nodes.

If Slurm or Ray is missing its tests are skipped and counted as skipped; `make cluster-test` installs both and runs all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mdata.launching.job_folder import load_job
from mdata.launching.job_status import job_status
from tests.cluster.kills import preprocess, run, write_mix
from tests.helpers import ray_cluster, slurm
from tests.helpers.house_rules import ROOT
from tests.helpers.processes import wait_until

NEEDS_SLURM = pytest.mark.skipif(slurm.missing() is not None, reason=slurm.missing() or "")
NEEDS_RAY = pytest.mark.skipif(ray_cluster.missing() is not None, reason=ray_cluster.missing() or "")
ENGINES = [
    "local",
    pytest.param("slurm", marks=NEEDS_SLURM),
    pytest.param("ray", marks=NEEDS_RAY),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_a_job_that_is_killed_again_and_again_is_that_of_one_run(tmp_path, name):
    run(name, tmp_path, num_bytes=4_000_000, parts=4, kills=3, seed=1, within_s=1.5)


@pytest.mark.soak
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("command", "mb"), [("dedup", 4), ("clean", 100), ("extract", 12), ("decontaminate", 100)])
def test_texts_of_a_job_that_is_killed_again_and_again_are_those_of_one_run(tmp_path, name, command, mb):
    # So many MB that parts work longer than they start, and kills hit both.
    if command == "extract":
        pytest.importorskip("resiliparse")
        pytest.importorskip("mwparserfromhell")
    run(name, tmp_path, num_bytes=mb * 10**6, parts=3, kills=6, seed=2, within_s=2.5, command=command)


@pytest.fixture
def cluster(tmp_path):
    """A Slurm whose arrays have at most three tasks."""
    with slurm.slurm(tmp_path / "slurm", nodes=2, cpus=2, max_array=4) as running:
        yield running


def launch(cluster, folder, *words):
    command = [sys.executable, "-m", "mdata", "launch", "slurm", "--cpus", "1", *words, "--", *preprocess("out/c")]
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@NEEDS_SLURM
def test_slurm_takes_arrays_of_the_sites_size_a_dependent_merge_and_nothing_twice(tmp_path, cluster):
    write_mix(tmp_path / "in", 200_000)
    cluster.run("scontrol", "update", "nodename=n[1-2]", "state=drain", "reason=test")
    first = launch(cluster, tmp_path, "--parts", "7")
    assert first.returncode == 0, first.stderr
    arrays = set(cluster.run("squeue", "-h", "-o", "%F %j").splitlines())
    # Parts 1-3, 4-6 and 7, and the merge; the same command adds nothing.
    assert len(arrays) == 4
    assert launch(cluster, tmp_path, "--parts", "7").returncode == 0
    assert set(cluster.run("squeue", "-h", "-o", "%F %j").splitlines()) == arrays
    cluster.run("scontrol", "update", "nodename=n[1-2]", "state=resume")
    wait_until(lambda: load_job(tmp_path / "out/c").is_merged())
    assert (tmp_path / "out/c_text_document.json").is_file()
    logs = {path.name for path in (tmp_path / "out/c.job/logs").iterdir()}
    assert {"part-00001.log", "part-00007.log", "merge.log"} <= logs
    done = launch(cluster, tmp_path, "--parts", "7")
    assert "nothing is left to do" in done.stdout


@NEEDS_SLURM
def test_a_part_that_is_preempted_or_near_its_limit_is_queued_again(tmp_path, cluster):
    write_mix(tmp_path / "in", 30_000_000)
    assert launch(cluster, tmp_path, "--parts", "1", "--merge", "none").returncode == 0
    job = load_job(tmp_path / "out/c")
    attempts = lambda: job_status(job).parts[0].attempt  # noqa: E731
    wait_until(lambda: job_status(job).counts.get("running"))
    (task,) = cluster.run("squeue", "-h", "-r", "-o", "%i").split()
    cluster.run("scancel", "--signal=USR1", "--batch", task)
    wait_until(lambda: attempts() >= 2 and job_status(job).counts.get("running"), 120)
    cluster.run("scontrol", "requeue", task)
    wait_until(lambda: attempts() >= 3 or 1 in job.done_parts(), 150)
    wait_until(lambda: 1 in job.done_parts(), 150)


@NEEDS_SLURM
def test_no_daemon_outlives_tests_that_are_killed(tmp_path):
    lines = ["import os, pathlib, signal, sys", "from tests.helpers.slurm import slurm"]
    lines += ["with slurm(pathlib.Path(sys.argv[1])) as cluster:", "    os.kill(os.getpid(), signal.SIGKILL)"]
    words = [sys.executable, "-c", "\n".join(lines), str(tmp_path / "slurm")]
    assert subprocess.run(words, cwd=ROOT).returncode == -signal.SIGKILL
    wait_until(lambda: not list(slurm.processes_of(tmp_path / "slurm/slurm.conf")))


@NEEDS_SLURM
def test_what_slurm_refuses_is_said(tmp_path, cluster):
    write_mix(tmp_path / "in", 20_000)
    done = launch(cluster, tmp_path, "--parts", "2", "--sbatch=--partition=none")
    assert done.returncode == 2 and "Slurm rejected the job" in done.stderr
    assert "invalid partition" in done.stderr.lower()


@NEEDS_RAY
def test_a_cluster_that_is_not_there_is_said(tmp_path):
    write_mix(tmp_path / "in", 20_000)
    words = ["launch", "ray", "--address", "127.0.0.1:1", "--parts", "2", "--", *preprocess("c")]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "mdata", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "RAY_gcs_rpc_server_reconnect_timeout_s": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5 and "no Ray cluster at 127.0.0.1:1" in done.stderr
