"""Every command of the pages on starting a run is run: here, on Slurm, with two torchruns; manifests are checked."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.cluster.test_engines import NEEDS_RAY, NEEDS_SLURM
from tests.helpers.house_rules import ROOT
from tests.helpers.processes import wait_until
from tests.helpers.ray_cluster import ray_cluster
from tests.helpers.slurm import slurm
from tests.trainer.launching.test_on_kubernetes import SCHEMAS
from trainer.run.metrics import read_metrics

pytestmark = pytest.mark.slow
# A minute each; `make cluster-test` runs all.
LONG = pytest.mark.soak
# Fields of a task in SkyPilot's specification.
SKYPILOT = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run"}


def page(name):
    return (ROOT / "docs" / "howto" / f"{name}.md").read_text(encoding="utf-8")


def blocks(text, language="bash"):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(name, section):
    """The commands under a heading of a page."""
    text = page(name).partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = [line for block in blocks(text) for line in block.splitlines()]
    assert found, f"{section} of {name}.md"
    return found


# How many blocks of each language a page has; the tests below read all of them, by section or by language.
BLOCKS = {
    "one_machine": {"toml": 1, "bash": 2},
    "slurm": {"bash": 4},
    "torchrun": {"bash": 2},
    "ray": {"bash": 1},
    "kubernetes": {"bash": 2, "text": 1, "yaml": 1},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_no_block_is_left_out_by_the_tests_below(name):
    fences = re.findall(r"^```(.*)$", page(name), re.MULTILINE)
    assert Counter(fences[::2]) == BLOCKS[name] and set(fences[1::2]) == {""}


@pytest.fixture
def folder(tmp_path):
    """With the run.toml of the first page, and programs that need no installation."""
    (tmp_path / "run.toml").write_text(blocks(page("one_machine"), "toml")[0])
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (
        ("mtrain", f"-P {ROOT}/mdata/util/commands.py mtrain"),
        ("torchrun", "-m torch.distributed.run"),
    ):
        (programs / name).write_text(f'#!/bin/bash\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    return tmp_path


def environment(folder, known=os.environ):
    return {**known, "PATH": f"{folder}/bin:{known['PATH']}", "OMP_NUM_THREADS": "1", "HEAD": "127.0.0.1"}


def run(lines, folder, known=os.environ):
    """What the commands print."""
    told = ""
    for line in lines:
        words = ["bash", "-o", "pipefail", "-c", line]
        done = subprocess.run(words, cwd=folder, env=environment(folder, known), capture_output=True, text=True)
        assert done.returncode == 0 and "Traceback" not in done.stderr, f"{line}\n{done.stdout}{done.stderr}"
        told += done.stdout
    return told


def wait_for_steps(folder, number=3):
    def trained():
        return len(read_metrics(folder / "runs/first")) >= number

    wait_until(trained, 120)


def curve(folder):
    return [line["step"] for line in read_metrics(folder / "runs/first")]


@LONG
def test_one_machine(folder):
    lines = commands("one_machine", "Start, look, stop, continue")
    told = run(lines[:3], folder)
    try:
        wait_for_steps(folder)
    finally:
        told += run(lines[3:4], folder)
    wait_until(lambda: "runs/first: stopped" in run(["mtrain status runs/first"], folder), 60)
    told += run(lines[4:], folder)
    assert "asked to save and end" in told and "runs/first: done, step 100 of 100" in told
    assert curve(folder)[-1] == 100


@LONG
@NEEDS_SLURM
def test_slurm(folder):
    def here(*sections):
        """The commands for nodes with one GPU, whose names lead nowhere."""
        lines = [line for section in sections for line in commands("slurm", section)]
        return [
            line.replace("--gpus 8", "--gpus 1").replace(" -- ", " --env MASTER_ADDR=127.0.0.1 -- ") for line in lines
        ]

    with slurm(folder / "slurm", nodes=2, cpus=2) as cluster:
        told = run(here("Submit"), folder, cluster.environment)
        assert "#SBATCH --gpus-per-node=1" in told and "Slurm job 1 is queued" in told
        wait_for_steps(folder)
        told = run(here("Look, stop, continue"), folder, cluster.environment)
        assert "asked to save and end" in told and "stopped by mtrain stop" in told
        assert "Slurm job 2 is queued" in told and "runs/first: done, step 100 of 100" in told
        text = run(here("Containers"), folder, cluster.environment)
        assert f"--container-image={folder}/mtrain.sqsh" in text and not cluster.run("squeue", "-h")


@LONG
def test_torchrun(folder):
    """Two "nodes" on one machine, with one rank each."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    (line,) = commands("torchrun", "Start on each machine")
    words = [
        "bash",
        "-c",
        f"exec {line}".replace("29400", str(port)).replace("--nproc-per-node 8", "--nproc-per-node 1"),
    ]

    def start():
        with (folder / "log").open("ab") as log:
            return [
                subprocess.Popen(words, cwd=folder, env=environment(folder), stdout=log, stderr=log) for _ in range(2)
            ]

    agents = start()
    try:
        wait_for_steps(folder)
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        for agent in agents:
            agent.wait(60)
    before = curve(folder)[-1]
    assert "step " in run(commands("torchrun", "Look"), folder)
    agents = start()
    assert [agent.wait(240) for agent in agents] == [0, 0], (folder / "log").read_text()
    assert before < 100 and curve(folder)[-1] == 100 and len(curve(folder)) == len(set(curve(folder)))


@LONG
@NEEDS_RAY
def test_ray(folder):
    """Two nodes of one CPU; at last a rank is killed, which ends the run, and the same command continues it."""
    with ray_cluster(nodes=2, cpus=1) as address:
        start, look, stop, again, follow, look_again = (
            line.replace("--gpus 8", f"--address {address}").replace("run.toml", "run.toml --nproc 1 train.steps=300")
            for line in commands("ray", "Start, look, stop, continue")
        )
        run([start], folder)
        wait_for_steps(folder)
        assert "running" in run([look], folder)
        told = run([stop], folder)
        wait_until(lambda: "runs/first: stopped" in run([look], folder), 60)
        before = curve(folder)[-1]
        assert "asked to save and end" in told and before < 300
        run([again], folder)
        wait_until(lambda: curve(folder)[-1] > before + 3, 120)
        config = str(folder / "runs/first/job/run.toml").encode()
        paths = [path for path in Path("/proc").glob("[0-9]*/cmdline") if config in path.read_bytes().split(b"\0")]
        assert len(paths) == 2
        os.kill(int(paths[-1].parent.name), signal.SIGKILL)
        wait_until(lambda: "runs/first: failed" in run([look], folder), 120)
        assert "lost its connection" in run([look], folder)
        run([again], folder)
        assert "runs/first: done, step 300 of 300" in run([follow, look_again], folder)
    assert len(curve(folder)) == len(set(curve(folder))) == 300


def test_kubernetes(folder):
    lines = [line.replace("cd /data", f"cd {folder}") for section in ("Print and apply", "Kubeflow Trainer")
             for line in commands("kubernetes", section)]  # fmt: skip
    run(lines, folder)
    for name, kind in (("first.yaml", "JobSet"), ("first-trainjob.yaml", "TrainJob")):
        facts = yaml.safe_load((folder / name).read_text())
        assert facts["kind"] == kind
        jsonschema.validate(facts, {**SCHEMAS["manifests"][kind], "$defs": SCHEMAS["$defs"]})
    job_set = yaml.safe_load((folder / "first.yaml").read_text())
    (replicated,) = job_set["spec"]["replicatedJobs"]
    apply, logs = blocks(page("kubernetes"), "text")[0].splitlines()
    assert apply == "kubectl apply -f first.yaml"
    # JobSet names the jobs that it makes after itself, the kind of job, and a number.
    assert logs == f"kubectl logs -f job/{job_set['metadata']['name']}-{replicated['name']}-0"


@LONG
def test_skypilot(folder):
    (text,) = blocks(page("kubernetes"), "yaml")
    task = yaml.safe_load(text)
    assert set(task) <= SKYPILOT and task["num_nodes"] == 2
    assert set(task["file_mounts"]["/data"]) <= {"source", "name", "store", "mode", "persistent"}
    assert task["file_mounts"]["/data"]["mode"] in ("MOUNT", "COPY", "MOUNT_CACHED")
    # On one node with one rank: the command is torchrun's, but for the bucket.
    known = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_RANK": "0"}
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    line = task["run"].replace("s3://my-bucket/first", "checkpoints train.steps=2").replace("29500", str(port))
    run([line], folder, {**os.environ, **known, "SKYPILOT_NODE_IPS": "127.0.0.1\n"})
    assert (folder / "checkpoints/step-2").is_dir()
