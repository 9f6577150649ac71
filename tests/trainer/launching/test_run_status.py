"""How a run stands, from files and from what Slurm says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mdata.errors import ResourceError, UsageError
from tests.trainer.launching.jobs import a_job, calls, programs
from trainer.launching.job import END_FILE, prepare, record_end, save_job
from trainer.launching.run_status import METRICS, ask_to_stop, is_active, run_of, run_status


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A squeue that prints a file."""
    body = f"cat {tmp_path}/queue"
    env = programs(tmp_path / "bin", squeue=body, scontrol="echo Restarts=2", scancel="")
    monkeypatch.setenv("PATH", env["PATH"])
    (tmp_path / "queue").write_text("")
    return tmp_path / "queue"


@pytest.fixture
def job(tmp_path):
    job = a_job(tmp_path)
    prepare(job, "")
    save_job(job)
    return job


def condition(job):
    return run_status(Path(job.run_folder), job).condition


def test_a_job_of_slurm_waits_runs_and_ends(slurm, job, tmp_path):
    slurm.write_text("PENDING|Resources||1:00\n")
    assert condition(job) == "waiting" and is_active(job)
    slurm.write_text("RUNNING|None|n1|1:00\n")
    assert condition(job) == "silent"
    folder = Path(job.run_folder)
    lines = [{"step": 9, "loss": 2.5, "tokens_per_s": 10.0}, {"step": 10, "loss": None, "tokens_per_s": 11.0}]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
    (folder / "plan.json").write_text('{"steps": 20}')
    status = run_status(folder, job)
    assert (status.condition, status.step, status.steps, status.loss, status.restarts) == ("running", 10, 20, None, 2)
    slurm.write_text("")
    assert condition(job) == "stopped" and not is_active(job)  # killed: nothing says how it ended
    for number, (code, expected) in enumerate([(75, "stopped"), (2, "failed"), (0, "done")]):
        record_end({END_FILE: str(job.folder / f"end-7-{number}")}, code=code, who="rank 0 on n1", message="text")
        os.utime(job.folder / f"end-7-{number}", (number, number))
        assert condition(job) == expected
    assert run_status(folder, job).restarts == 2


def test_stop_takes_a_job_from_the_queue_or_ends_its_ranks(slurm, job, tmp_path):
    assert not ask_to_stop(job) and not job.stop_mark.exists()
    slurm.write_text("PENDING|Resources||1:00\n")
    assert ask_to_stop(job) and calls(tmp_path / "bin")[-1] == "scancel 7"
    slurm.write_text("RUNNING|None|n1|1:00\n")
    assert ask_to_stop(job) and calls(tmp_path / "bin")[-1] == "scancel --batch --signal=TERM 7"
    assert job.stop_mark.exists()
    prepare(job, "")
    assert not job.stop_mark.exists(), "the next launch would not start"


@pytest.mark.parametrize("ended", [True, False])
def test_a_job_that_ends_while_it_is_stopped_is_no_error(slurm, job, tmp_path, ended):
    slurm.write_text("RUNNING|None|n1|1:00\n")
    clear = f"> {slurm}; " if ended else ""
    programs(tmp_path / "bin", scancel=f'{clear}echo "Invalid job id specified" >&2; exit 1')
    if ended:
        assert not ask_to_stop(job)
    else:
        with pytest.raises(ResourceError, match="scancel failed"):
            ask_to_stop(job)


def test_a_local_process_is_ended_on_its_host_only(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ticks = int(Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    known = {"engine": "local", "id": str(process.pid), "host": os.uname().nodename, "started_ticks": ticks}
    job = a_job(tmp_path, **known)
    assert not ask_to_stop(a_job(tmp_path, **{**known, "started_ticks": ticks + 1})), "a later process of its number"
    with pytest.raises(UsageError, match="was launched on elsewhere"):
        ask_to_stop(a_job(tmp_path, **{**known, "host": "elsewhere"}))
    assert process.poll() is None and is_active(job) and condition(job) == "silent"
    assert ask_to_stop(job) and process.wait(10) == -15
    assert condition(job) == "stopped"


def test_a_run_without_a_job_is_known_by_its_lock_and_metrics(tmp_path):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "plan.json").write_text('{"steps": 20}')
    assert run_of(str(tmp_path)) == (tmp_path, None) and run_status(tmp_path, None).condition == "stopped"
    (tmp_path / METRICS).write_text('{"step": 20, "loss": 1.0}\n')
    assert run_status(tmp_path, None).condition == "done"
    assert time.time() - (tmp_path / METRICS).stat().st_mtime < 60


def test_a_run_is_named_by_its_folder_its_job_or_slurms_number(tmp_path, job, monkeypatch):
    folder = Path(job.run_folder)
    assert run_of(str(folder)) == run_of(str(folder / "job")) == (folder, job)
    with pytest.raises(UsageError, match="x is not a run folder\n  found: nothing of that name"):
        run_of(str(tmp_path / "x"))
    shown = f'echo "JobId=7 Command={folder}/job/batch.sh"'
    env = programs(tmp_path / "bin", scontrol=f'[ $4 = 7 ] && {shown} || {{ echo "Invalid job id" >&2; exit 1; }}')
    monkeypatch.setenv("PATH", env["PATH"])
    assert run_of("7") == (folder, job)
    with pytest.raises(UsageError, match="Slurm knows no job 8 that mtrain launch submitted"):
        run_of("8")
