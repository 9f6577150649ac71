"""`mtrain launch`, `status`, `tail` and `stop`: a run in the background, a batch file, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path

import pytest
import yaml

from cli import mtrain_launch
from cli.mtrain import main
from tests.cli.test_help import RUN
from tests.trainer.launching.jobs import calls, programs
from trainer.launching.job import load_job


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def slurm(here, monkeypatch):
    """Programs of Slurm that accept everything; the job waits while the file `queue` says so."""
    env = programs(
        here / "bin", sbatch="echo 7", squeue=f"cat {here}/queue 2>/dev/null; exit 0", scontrol="", scancel=""
    )
    monkeypatch.setenv("PATH", env["PATH"])
    return here / "bin"


def launch_slurm(*words, run=("run.toml", "--nproc", "1")):
    return main(["launch", "slurm", *words, "--", *run])


@pytest.mark.slow
def test_a_run_in_the_background_is_followed_stopped_and_continued(here, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["launch", "local", "--", "run.toml", "train.steps=99999"]
    assert main(words) == 0 and "trains in the background" in capfd.readouterr().out
    try:
        late = time.monotonic() + 120
        metrics = here / "runs/first/metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes()):
            assert time.monotonic() < late, (here / "runs/first/job/log.txt").read_text()
            time.sleep(0.2)
        assert main(["status", "runs/first"]) == 0 and "runs/first: running, step " in capfd.readouterr().out
        assert main(words) == 0 and "is already waiting or running; nothing was started" in capfd.readouterr().out
        assert main([*words, "optimizer.lr=0.1"]) == 2
        told = capfd.readouterr().err
        assert "found: words: run.toml train.steps=99999 optimizer.lr=0.1" in told and "try: mtrain stop" in told
    finally:
        assert main(["stop", "runs/first"]) == 0
    assert "asked to save and end" in capfd.readouterr().out
    assert main(["tail", "runs/first", "--follow"]) == 0  # until it has ended
    assert "stopped by SIGTERM after step" in capfd.readouterr().out
    assert main(["status", "runs/first", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["condition"] == "stopped" and facts["end"]["code"] == 75 and facts["step"] > 0
    assert main(["stop", "runs/first"]) == 0 and "nothing to stop" in capfd.readouterr().out
    assert main([*words[:-1], f"train.steps={facts['step']}", "optimizer.decay_steps=99999"]) == 0
    assert main(["tail", "runs/first/job", "--follow"]) == 0
    assert main(["status", "runs/first"]) == 0 and "runs/first: done" in capfd.readouterr().out
    assert load_job(here / "runs/first").launches == 2


def test_a_batch_file_is_printed_and_not_submitted(slurm, capsys):
    options = ["--nodes", "2", "--gpus", "4", "--account", "lm", "--time", "60", "--sbatch=--exclusive", "--env", "A=b"]
    assert launch_slurm(*options, "--print", run=["run.toml", "mesh.tp=2"]) == 0
    text = capsys.readouterr().out
    for line in ("--nodes=2", "--gpus-per-node=4", "--account=lm", "--time=60", "--exclusive", "--signal=B:TERM@300"):
        assert f"#SBATCH {line}\n" in text
    assert "export A=b\n" in text and not any(call.startswith("sbatch") for call in calls(slurm))
    assert "tp = 2\n" in Path("runs/first/job/run.toml").read_text() and not Path("runs/first/job/job.json").exists()


@pytest.mark.parametrize("limit", ["0", "0:00", "UNLIMITED"])
def test_no_time_limit_is_none_that_is_too_short(limit, slurm, capsys):
    assert launch_slurm("--time", limit, "--print") == 0
    assert f"#SBATCH --time={limit}\n" in capsys.readouterr().out


def test_with_fewer_nodes_the_layout_is_the_one_that_the_run_shrinks_to(slurm, here, capsys):
    words = ["--nodes", "1-2", "--print"]
    run = ["run.toml", "--nproc", "1", "mesh.tp=2"]
    assert launch_slurm(*words, run=run) == 2 and "run.toml on 1 x 1 rank" in capsys.readouterr().err
    assert launch_slurm(*words, run=[*run, "run.on_lost_node=shrink"]) == 0
    assert "\nexport MTRAIN_PLANNED_RANKS=2\n" in capsys.readouterr().out


def test_a_job_is_submitted_once(slurm, here, capsys):
    assert launch_slurm("--nodes", "4", "--qos", "high") == 0
    assert "Slurm job 7 is queued; see mtrain status" in capsys.readouterr().out
    script = here / "runs/first/job/batch.sh"
    assert [call for call in calls(slurm) if "sbatch" in call] == [f"sbatch --parsable --qos=high {script}"]
    (here / "queue").write_text("PENDING|Resources||1:00\n")
    assert launch_slurm("--nodes", "4", "--qos", "high") == 0 and "nothing was started" in capsys.readouterr().out
    assert main(["status", "runs/first"]) == 0
    assert "waiting, step 0\nSlurm job 7: PENDING Resources, 0 restarts\n" in capsys.readouterr().out
    assert launch_slurm("--nodes", "2") == 2
    assert "found: nodes: 2 2\n  expected: nodes: 4 4\n" in capsys.readouterr().err
    (here / "queue").write_text("")
    assert launch_slurm("--nodes", "2") == 0 and load_job(here / "runs/first").launches == 2


def test_hosts_that_the_run_found_unfit_are_excluded_from_a_new_job(slurm, here, capsys):
    (here / "runs/first").mkdir(parents=True)
    path = here / "runs/first/exclude_hosts.txt"
    path.write_text("n5\nn9\n")
    assert launch_slurm("--exclude", "n[1-2]", "--qos", "high") == 0
    assert f"excluding n5, n9, listed in {path};" in capsys.readouterr().err
    script = here / "runs/first/job/batch.sh"
    assert "#SBATCH '--exclude=n[1-2],n5,n9'\n" in script.read_text()
    (submitted,) = (call for call in calls(slurm) if "sbatch" in call)
    assert submitted == f"sbatch --parsable --qos=high --exclude=n[1-2],n5,n9 {script}"


@pytest.mark.parametrize(
    ("words", "run", "message"),
    [
        (["slurm", "--nodes", "3", "--gpus", "1"], ["run.toml"], "run.toml on 3 x 1 rank: "),
        (["slurm", "--nodes", "2-3", "--gpus", "1"], ["run.toml"], "run.toml on 3 x 1 rank: "),
        (["slurm", "--nodes", "2", "--gpus", "1"], ["run.toml", "mesh.tp=4"], "run.toml on 2 x 1 rank has 2 problems"),
        (
            ["slurm", "--nodes", "3-4", "--gpus", "1"],
            ["run.toml", "run.on_lost_node=shrink"],
            "3 of 4 ranks would be left",
        ),
        (["slurm"], ["run.toml"], "the number of ranks of a node is not known"),
        (["slurm", "--gpus", "2"], ["run.toml", "--nproc", "1"], "two numbers of ranks of a node"),
        (["slurm", "--gpus", "2", "--nodes", "0"], ["run.toml"], "--nodes 0"),
        (["slurm", "--gpus", "2", "--nodes", "3-2"], ["run.toml"], "--nodes 3-2"),
        (["slurm", "--gpus", "1", "--env", "A"], ["run.toml"], "--env A"),
        (["slurm", "--gpus", "1", "--cpus", "0"], ["run.toml"], "--cpus 0"),
        (["slurm", "--gpus", "1", "--kind", "trainjob"], ["run.toml"], "--kind does not apply to slurm"),
        (["slurm", "--gpus", "1", "--container-mounts", "a:b"], ["run.toml"], "needs --container-image"),
        (["slurm", "--gpus", "1"], ["run.toml", "trian.steps=1"], "there is no section [trian]"),
        (["slurm", "--gpus", "1"], ["none.toml"], "none.toml"),
        (["slurm", "--gpus", "1", "--time", "6"], ["run.toml"], "--time 6 leaves no time to train"),
        (["slurm", "--gpus", "1", "--time", "0-2", "--grace", "7200"], ["run.toml"], "--time 0-2 leaves no time"),
        (["slurm", "--gpus", "1", "--time", "6:00"], ["run.toml"], "--time 6:00 leaves no time"),
        (
            ["slurm", "--gpus", "1", "--sbatch", "mem=4G"],
            ["run.toml"],
            "mem=4G is not an option of sbatch: these begin with a dash",
        ),
        (["local", "--nodes", "2"], ["run.toml"], "--nodes does not apply to local"),
        (["ray", "--gpus", "1", "--nodes", "1-2"], ["run.toml"], "a fixed number is needed on Ray\n  try: --nodes 2"),
        (["ray", "--gpus", "1", "--time", "60"], ["run.toml"], "--time does not apply to ray"),
        (["slurm", "--gpus", "1", "--address", "a:1"], ["run.toml"], "--address does not apply to slurm"),
        (["local", "--time", "60"], ["run.toml"], "--time does not apply to local\n  expected: launch slurm"),
        (["local"], [], "no run to launch"),
        (["local"], ["run.toml", "mesh.tp=3", "--nproc", "3"], "mesh.tp=3"),
        (["k8s", "--gpus", "1"], ["run.toml"], "--container-image is missing"),
        (["k8s", "--gpus", "1", "--nodes", "1-2", "--container-image", "i"], ["run.toml"], "fixed number of pods"),
        (
            ["k8s", "--gpus", "1", "--kind", "trainjob", "--grace", "9", "--container-image", "i"],
            ["run.toml"],
            "--grace: a TrainJob has no such field",
        ),
    ],
)
def test_what_cannot_start_is_refused_before_anything_is_written(slurm, here, capsys, words, run, message):
    assert main(["launch", *words, "--", *run]) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
    assert not (here / "runs").exists() and not any(call.startswith("sbatch") for call in calls(slurm))


def test_a_job_without_a_record_is_ended(slurm, here, monkeypatch):
    """No command would find it, and another launch would start a second one."""
    started = []

    def full(job):
        if job.id:
            started.append(job)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mtrain_launch, "save_job", full)
    assert launch_slurm("--nodes", "2") == 5
    assert "scancel 7" in calls(slurm)
    assert main(["launch", "local", "--", "run.toml"]) == 5
    late = time.monotonic() + 60
    while started[1].is_same_process() and time.monotonic() < late:
        os.waitpid(int(started[1].id), os.WNOHANG)
        time.sleep(0.05)
    assert [job.engine for job in started] == ["slurm", "local"] and not started[1].is_same_process()
    assert not (here / "runs/first").exists()


def test_what_slurm_refuses_leaves_nothing(slurm, here, capsys):
    programs(slurm, sbatch='echo "sbatch: error: Invalid account or account/partition combination" >&2; exit 1')
    assert launch_slurm("--account", "x") == 2
    assert "Slurm rejected the job\n  found: sbatch: error: Invalid account" in capsys.readouterr().err
    assert not (here / "runs/first").exists()


def test_slurm_that_is_not_here_is_said(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    assert launch_slurm() == 2
    assert "sbatch is not installed on this machine" in capsys.readouterr().err
    assert not (here / "runs/first").exists()


def test_ray_that_is_not_here_is_said_and_leaves_nothing(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["launch", "ray", "--", "run.toml", "--nproc", "1"]) == 2
    assert "Ray is not installed here" in capsys.readouterr().err and not (here / "runs/first").exists()


def test_a_job_folder_of_another_run_is_refused(slurm, here, capsys):
    assert launch_slurm() == 0
    (here / "runs/first").rename(here / "runs/second")
    for words in (["status", "runs/second"], ["launch", "local", "--", "run.toml", "run.folder=runs/second"]):
        assert main(words) == 2
        assert "runs/second/job is the job folder of another run" in capsys.readouterr().err


def test_manifests_are_printed_and_nothing_is_written(here, capsys, monkeypatch):
    """Also where this machine lacks a tracker's library, which the image may have."""
    monkeypatch.setattr("trainer.tracking.trackers.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    words = ["launch", "k8s", "--nodes", "2", "--gpus", "1", "--container-image", "i", "--name", "x"]
    assert main([*words, "--", "run.toml", "train.steps=5", 'track.to=["wandb"]']) == 0
    facts = yaml.safe_load(capsys.readouterr().out)
    assert facts["kind"] == "JobSet" and not (here / "runs").exists()
    assert (
        main(
            [*words, "--kind", "trainjob", "--print", "--json", "--no-check", "--", "run.toml", "data.blend=elsewhere"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["spec"]["trainer"]["command"][-1] == "data.blend=elsewhere"


@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_a_run_without_the_dashes_is_refused_with_them(here, capsys, engine):
    assert main(["launch", engine, "run.toml", "train.steps=5"]) == 2
    assert "try: mtrain launch ENGINE [options] -- run.toml ...:" in capsys.readouterr().err


def test_a_run_that_was_not_launched_has_no_log_and_is_not_stopped(here, capsys):
    run = here / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    for word in ("tail", "stop"):
        assert main([word, "run"]) == 2 and "run was not started by mtrain launch" in capsys.readouterr().err
    assert main(["status", "run"]) == 0 and capsys.readouterr().out == "run: stopped, step 0\n"
