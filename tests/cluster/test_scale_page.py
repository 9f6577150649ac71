"""Every command of docs/howto/scale.md is run: on this machine, on Slurm and on Ray, on clusters of two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

import mdata
from mdata.launching.job_folder import load_job
from tests.cluster.kills import write_mix
from tests.cluster.test_engines import NEEDS_RAY, NEEDS_SLURM
from tests.helpers.house_rules import ROOT
from tests.helpers.ray_cluster import ray_cluster
from tests.helpers.slurm import slurm

pytestmark = pytest.mark.slow
MDATA = f'mdata() {{ "{sys.executable}" -m mdata "$@"; }}\n'


def lines(*sections):
    """The commands under these headings of the page."""
    page = (ROOT / "docs" / "howto" / "scale.md").read_text(encoding="utf-8")
    found = []
    for section in sections:
        text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        found += [
            line
            for block in re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
            for line in block.splitlines()
        ]
    assert found, "the page has no such commands"
    return found


def run(line, folder, environment=os.environ):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["bash", "-o", "pipefail", "-c", MDATA + line]
    done = subprocess.run(words, cwd=folder, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, f"{line}\n{done.stderr}"
    return done.stdout


def documents(folder, name):
    return mdata.open_corpus(folder / name / "corpus_text_document.json").num_documents


@pytest.fixture
def folder(tmp_path):
    write_mix(tmp_path / "text", 60_000)
    return tmp_path


def test_one_big_machine(folder):
    told = "".join(run(line, folder) for line in lines("One big machine"))
    assert "8 parts: 8 done; merged" in told and documents(folder, "big") > 0


def test_parts_merge_and_what_is_made_of_the_corpus(folder):
    for line in lines("Parts", "Merge", "Split, sample, shuffle"):
        run(line, folder)
    sets = [folder / f"out/set_{name}_document.json" for name in ("train", "valid", "test")]
    assert sum(mdata.open_corpus(path).num_documents for path in sets) == documents(folder, "out")
    assert mdata.open_corpus(folder / "out/mixed_document.json").num_documents == documents(folder, "out")


@NEEDS_SLURM
def test_slurm(folder):
    with slurm(folder / "slurm", nodes=2, cpus=2) as cluster:
        launch, *rest = lines("Slurm")
        run(launch, folder, cluster.environment)
        end = time.monotonic() + 120
        while not load_job(folder / "array/corpus").is_merged():
            assert time.monotonic() < end, "it takes too long"
            time.sleep(0.3)
        told = "".join(run(line, folder, cluster.environment) for line in rest)
    assert "6 parts: 6 done; merged" in told and documents(folder, "array") > 0


@NEEDS_RAY
def test_ray(folder):
    with ray_cluster(nodes=2, cpus=1) as address:
        told = "".join(run(line, folder, {**os.environ, "RAY_ADDRESS": address}) for line in lines("Ray"))
    assert "6 parts: 6 done; merged" in told and documents(folder, "tasks") > 0
