"""The sbatch file: its options, and what it does at each end of its ranks; bash runs it with stand-ins for Slurm."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mdata.errors import ResourceError, UsageError
from mdata.launching.slurm_commands import squeue
from tests.trainer.launching.jobs import a_job, calls, programs
from trainer.launching.job import prepare
from trainer.launching.on_slurm import (
    SlurmOptions,
    SlurmState,
    batch_text,
    run_folder_of,
    slurm_restarts,
    slurm_state,
    stop_in_slurm,
    submit,
)


def options_of(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def srun_of(text):
    (line,) = (line for line in text.splitlines() if line.startswith("srun "))
    return shlex.split(line.removesuffix(" &"))


def test_the_options_of_the_job_are_repeated_for_srun(tmp_path):
    job = a_job(tmp_path, cwd="/data/my runs", run_folder="/data/my runs/runs/a")
    text = batch_text(job, SlurmOptions(gpus=4, cpus=6, site=["--account=lm", "--time=60"]), checkpoints=None)
    assert options_of(text) == [
        "--job-name=a", "'--chdir=/data/my runs'", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4",
        "--cpus-per-task=6", "'--output=/data/my runs/runs/a/job/log.txt'", "--open-mode=append", "--requeue",
        "--no-kill=off", "--signal=B:TERM@300", "--account=lm", "--time=60",
    ]  # fmt: skip
    words = srun_of(text)
    assert words[:7] == [
        "srun", "--nodes=$SLURM_JOB_NUM_NODES", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=6",
        "--kill-on-bad-exit=1", "--no-kill=off",
    ]  # fmt: skip
    python, isolated, program = words[8:11]
    assert Path(python).is_absolute() and isolated == "-P" and Path(program).is_absolute()
    assert words[11:] == ["mtrain", "train", "/data/my runs/runs/a/job/run.toml"]


def test_with_two_numbers_of_nodes_slurm_takes_as_many_as_there_are(tmp_path):
    job = a_job(tmp_path, nodes=(2, 4))
    for options, asked in (
        (SlurmOptions(), ["--mincpus=4"]),
        (SlurmOptions(gpus=4, cpus=6), ["--mincpus=24", "--gpus-per-node=4"]),
    ):
        text = batch_text(job, options, checkpoints=None)
        assert options_of(text)[2 : 3 + len(asked)] == ["--nodes=2-4", *asked]
        assert "--ntasks-per-node=4" in srun_of(text) and "ntasks" not in "".join(options_of(text))


# What pyxis 0.15 and later publish in `srun --help`, with the form of the value. A path has a slash: pyxis takes every
# image for one of a registry unless it begins with "/" or ".".
PYXIS = {
    "--container-image": r"(/|\./).*|([^@/]+@)?([^#/]+#)?[a-z0-9][\w./-]*(:[\w.-]+)?",
    "--container-mounts": r"[^:,]+:[^:,]+(:[\w+]+)?(,[^:,]+:[^:,]+(:[\w+]+)?)*",
    "--container-workdir": r"/.*",
    "--container-env": r"\w+(,\w+)*",
    "--container-name": r".+",
    "--container-save": r".+",
    "--container-unshare": r"(net|ipc|uts)(,(net|ipc|uts))*",
}  # and some without a value, such as --container-mount-home


def test_a_container_gets_its_own_mtrain_and_options_that_pyxis_publishes(tmp_path):
    mounts, env = ["/data:/data", "/code:/code:ro+rprivate"], {"NCCL_DEBUG": "WARN", "A": "b=c"}
    options = SlurmOptions(container_image="a.sqsh", container_mounts=mounts, env=env)
    text = batch_text(a_job(tmp_path), options, checkpoints=None)
    words = srun_of(text)
    container = dict(word.split("=", 1) for word in words[6:10])
    assert container == {
        "--container-image": f"{tmp_path}/a.sqsh",
        "--container-workdir": str(tmp_path),
        "--container-mounts": "/data:/data,/code:/code:ro+rprivate",
        "--container-env": "NCCL_DEBUG,A",
    }
    assert all(re.fullmatch(PYXIS[name], value) for name, value in container.items())
    assert words[10:12] == ["mtrain", "train"] and "--container" not in "".join(options_of(text))


@pytest.mark.parametrize(
    "image", ["nvcr.io#nvidia/pytorch:26.01-py3", "ubuntu", "docker://me@host#a/b", "/images/a.sqsh"]
)
def test_an_image_of_a_registry_or_with_a_full_path_stays_as_it_is(tmp_path, image):
    text = batch_text(a_job(tmp_path), SlurmOptions(container_image=image), checkpoints=None)
    assert [word for word in srun_of(text) if word.startswith("--container")] == [
        f"--container-image={image}", f"--container-workdir={tmp_path}",
    ]  # fmt: skip


OPTIONS = SlurmOptions(env={"A": "b c"}, max_restarts=2, site=["--exclude=n[8-9]"])


@pytest.fixture
def run(tmp_path):
    """Runs the batch script; `srun` is the body of a program. Returns the exit code and the calls."""
    job = a_job(tmp_path)
    prepare(job, "")
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()

    def run(srun, *, kill_after=None, restarts=0, options=OPTIONS, **more):
        bin_folder = tmp_path / "bin"
        said = 'echo "JobId=7 Restarts=$SLURM_RESTART_COUNT BatchFlag=1"'
        scripts = {"scontrol": said, "squeue": "echo NONE", "scancel": "touch stopped", "srun": srun, **more}
        env = programs(bin_folder, **scripts)
        env |= {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "SLURM_JOB_NUM_NODES": "2", "RANK": "3"}
        text = batch_text(job, options, checkpoints=checkpoints)
        process = subprocess.Popen(["bash", "-c", text], cwd=tmp_path, env=env)
        if kill_after is not None:
            late = time.monotonic() + 30
            while not (tmp_path / kill_after).exists():
                assert time.monotonic() < late
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
        return process.wait(30), calls(bin_folder)

    return run


def test_srun_gets_its_resources_and_what_pyxis_publishes_word_by_word(run, tmp_path):
    options = SlurmOptions(
        gpus=4,
        cpus=6,
        container_image="my images/a.sqsh",
        container_mounts=["/data:/data", "/my code:/code:ro"],
        env={"NCCL_DEBUG": "WARN", "A": "b c"},
    )
    code, _ = run(f'printf "%s\\n" "$@" > {tmp_path}/words; echo "$A" > {tmp_path}/variable', options=options)
    words = (tmp_path / "words").read_text().splitlines()
    assert code == 0 and words == [
        "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=6", "--kill-on-bad-exit=1",
        "--no-kill=off", "--export=ALL", f"--container-image={tmp_path}/my images/a.sqsh",
        f"--container-workdir={tmp_path}", "--container-mounts=/data:/data,/my code:/code:ro",
        "--container-env=NCCL_DEBUG,A", "mtrain", "train", f"{tmp_path}/runs/first/job/run.toml",
    ]  # fmt: skip
    container = dict(word.split("=", 1) for word in words if word.startswith("--container"))
    assert all(re.fullmatch(PYXIS[name], value) for name, value in container.items())
    assert (tmp_path / "variable").read_text() == "b c\n"


def requeues(told):
    return told.count("scontrol requeue 7")


def test_the_ranks_get_the_variables_and_not_those_of_a_launcher(run, tmp_path):
    code, _ = run('echo "$A|$RANK|$SLURM_JOB_END_TIME|$MTRAIN_END_FILE" > seen')
    end_file = tmp_path / "runs/first/job/end-7-0"
    assert code == 0 and (tmp_path / "seen").read_text() == f"b c|||{end_file}\n"


@pytest.mark.parametrize(("code", "again"), [(0, 0), (1, 0), (2, 0), (4, 0), (5, 1), (75, 1), (130, 0), (137, 1)])
def test_a_requeue_follows_from_the_exit_code(run, code, again):
    ended, told = run(f"exit {code}")
    assert (ended, requeues(told)) == (code, again)


def test_the_first_rank_that_failed_decides(run):
    assert run('echo "2 rank 3 on b" > $MTRAIN_END_FILE; exit 137')[0] == 2
    code, told = run('echo "75 rank 3 on b" > $MTRAIN_END_FILE; exit 143', restarts=1)
    assert code == 75 and requeues(told) == 1


def test_an_end_that_would_come_again_is_no_requeue(run):
    code, told = run('echo "75 rank 0 on a" > $MTRAIN_END_FILE; touch $MTRAIN_END_FILE-final; exit 75')
    assert code == 75 and requeues(told) == 0


@pytest.mark.parametrize("code", [5, 75])
def test_restarts_without_a_new_checkpoint_end_the_job(run, tmp_path, code):
    counts = [requeues(run(f"exit {code}", restarts=number)[1]) for number in range(3)]
    assert counts == [1, 2, 2]
    (tmp_path / "checkpoints/latest").write_text("step-10\n")
    assert requeues(run(f"exit {code}", restarts=3)[1]) == 3


def test_with_checkpoints_in_storage_the_curve_tells_whether_a_restart_came_further(tmp_path):
    text = batch_text(a_job(tmp_path), SlurmOptions(), checkpoints=None)
    (line,) = (line for line in text.splitlines() if "reached=" in line)
    path = tmp_path / "runs/first/metrics.jsonl"
    path.parent.mkdir(parents=True)
    for written, reached in (("", "7 "), ('{"step": 4, "loss": 1}\n{"step": 5, "loss": 2}\n', '7 {"step": 5')):
        path.write_text(written)
        done = subprocess.run(["bash", "-c", f'SLURM_JOB_ID=7\n{line}\nprintf "%s" "$reached"'], capture_output=True)
        assert done.stdout.decode() == reached


def test_hosts_that_the_run_found_unfit_are_excluded_from_the_next_start(run, tmp_path):
    assert not [call for call in run("exit 75")[1] if "update" in call]
    (tmp_path / "runs/first/exclude_hosts.txt").write_text("n3\nn5\n")
    told = run("exit 75", restarts=1)[1]
    assert told[-2:] == ["scontrol requeue 7", "scontrol update JobId=7 ExcNodeList=n[8-9],n3,n5"]


def test_a_run_that_waits_for_a_lost_node_asks_for_as_many_as_before(run):
    """Four ranks on a node: --nodes 2-3 would start on two again."""
    told = run("echo 12 > $MTRAIN_END_FILE-ranks; exit 75")[1]
    assert told[-2:] == ["scontrol requeue 7", "scontrol update JobId=7 NumNodes=3"]
    assert not [call for call in run("exit 75", restarts=1)[1][len(told) :] if "NumNodes" in call]


def test_sigterm_is_handed_on_and_the_exit_code_is_that_of_the_ranks(run):
    srun = "touch started; while [ ! -e stopped ]; do sleep 0.05; done; sleep 0.2; exit 75"
    code, told = run(srun, kill_after="started")
    assert code == 75 and "scancel --signal=TERM 7" in told and requeues(told) == 1


def test_a_script_that_outlived_its_slurmd_leaves_the_job_alone(run, tmp_path):
    later = 'echo "JobId=7 Restarts=12 BatchFlag=1"'
    code, told = run("exit 5", restarts=1, scontrol=later)
    assert code == 5 and not requeues(told)
    srun = "touch started; sleep 0.5; exit 75"
    code, told = run(srun, restarts=1, scontrol=later, kill_after="started")
    assert code == 75 and not [call for call in told if "requeue" in call or "scancel" in call]
    assert not (tmp_path / "runs/first/job/restarts").exists(), "it counts as a restart of the job"


def test_a_run_that_was_stopped_is_not_started_again(run, tmp_path):
    code, told = run(f"touch {tmp_path}/runs/first/job/stop; exit 75")
    assert code == 0 and not requeues(told)
    before = len(told)
    code, told = run("exit 75", restarts=1)
    assert code == 0 and not any(call.startswith("srun") for call in told[before:])


def test_the_end_time_is_asked_for_where_slurm_does_not_say_it(run, tmp_path):
    run('echo "$SLURM_JOB_END_TIME" > seen', date="echo 1700000000")
    assert (tmp_path / "seen").read_text() == "1700000000\n"


def test_what_slurm_says_of_a_job(tmp_path, monkeypatch):
    env = programs(
        tmp_path / "bin",
        squeue='[ $2 = --jobs=8 ] && echo "slurm_load_jobs error: Invalid job id specified" >&2 && exit 1\n'
        '[ $2 = --jobs=9 ] && echo "Unable to contact slurm controller" >&2 && exit 1\n'
        'echo "RUNNING|None|n[1-2]|1:00:00"',
        scontrol='echo "JobId=7 Restarts=3 Command=/x/runs/first/job/batch.sh WorkDir=/x"',
        scancel="",
    )
    monkeypatch.setenv("PATH", env["PATH"])
    state = slurm_state("7")
    assert state == SlurmState("RUNNING", "None", "n[1-2]", "1:00:00") and not state.waits
    assert slurm_restarts("7") == 3 and slurm_state("8") is None and str(run_folder_of("7")) == "/x/runs/first"
    with pytest.raises(ResourceError, match="squeue failed\n  found: Unable to contact"):
        slurm_state("9")
    stop_in_slurm(a_job(tmp_path), state)
    stop_in_slurm(a_job(tmp_path), SlurmState("PENDING", "Resources", "", ""))
    assert calls(tmp_path / "bin")[-2:] == ["scancel --batch --signal=TERM 7", "scancel 7"]


@pytest.mark.parametrize("answer", ["RUNNING", "RUNNING|None|n1|1:00|7", "Welcome to this site", "\\377"])
def test_an_answer_of_squeue_that_cannot_be_read_is_shown(tmp_path, monkeypatch, answer):
    """Another program of that name, or a line of the site's own: the job may be there or not."""
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", squeue=f"printf '{answer}\\n'")["PATH"])
    expected = (
        r"a line of squeue cannot be read\n  found: .*\n  expected: what `squeue --noheader --jobs=7 '--format=%T"
    )
    with pytest.raises(ResourceError, match=expected):
        slurm_state("7")
    with pytest.raises(ResourceError, match="a line of squeue cannot be read"):
        squeue("--array", fields=("%F", "%K"))
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", squeue="printf '\\n12|N/A\\n13|4\\n'")["PATH"])
    assert squeue("--array", fields=("%F", "%K")) == [["12", "N/A"], ["13", "4"]]


def test_what_slurm_refuses_is_said_in_its_words(tmp_path, monkeypatch):
    job = a_job(tmp_path, id="")
    prepare(job, "")
    refusal = 'echo "sbatch: error: invalid partition specified: none" >&2; exit 1'
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", sbatch=refusal)["PATH"])
    with pytest.raises(UsageError, match=r"Slurm rejected the job\n  found: sbatch: error: invalid partition"):
        submit(job, "#!/bin/bash\n", options=["--partition=none"])
    programs(tmp_path / "bin", sbatch='echo "12;cluster"')
    assert submit(job, "#!/bin/bash\n", options=["--partition=none"]).id == "12"
    assert calls(tmp_path / "bin")[-1] == f"sbatch --parsable --partition=none {job.folder}/batch.sh"
    programs(tmp_path / "bin", sbatch='echo "Welcome to the cluster."; echo 13')
    assert submit(job, "#!/bin/bash\n", options=[]).id == "13"
    programs(tmp_path / "bin", sbatch='echo "Submitted, see the portal"')
    with pytest.raises(ResourceError, match=r"sbatch printed no job id\n  found: Submitted, see the portal\n"):
        submit(job, "#!/bin/bash\n", options=[])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="sbatch is not installed on this machine"):
        submit(job, "#!/bin/bash\n", options=[])
