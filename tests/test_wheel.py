"""The wheel, installed where nothing else of ours is: what it adds, and commands beside modules of the user's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mdata.version import DISTRIBUTION, __version__
from tests.helpers.house_rules import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = """
[model]
num_layers = 1
hidden_size = 64
num_heads = 4
[train]
sequence_length = 16
global_batch = 2
micro_batch = 1
steps = 2
[optimizer]
lr = 0.1
[data]
blend = "mix.json"
[run]
folder = "run"
"""


def _installed(folder: Path, *words: str) -> Path:
    """A new environment with what pip installs, which finds our libraries behind it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    words = ("install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", *words)
    others = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    tools = {**os.environ, "PYTHONPATH": os.pathsep.join(others)} if "--editable" in words else None
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *words], check=True, env=tools)
    site = next(folder.glob("lib/python*/site-packages"))
    # Plain paths, whose own .pth files are not followed: those would find the checkout.
    (site / "zz_libraries.pth").write_text("\n".join(others) + "\n")
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built in the folder in which the checkout was built, so that C++ is compiled once."""
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("wheel")
    words = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    return _installed(tmp_path_factory.mktemp("environment"), str(wheel))


@pytest.fixture
def at_work(environment, tmp_path, monkeypatch):
    """Runs a command of the environment in a folder with modules whose names are ours."""
    for name in ("cli", "trainer", "mdata", "mdata_mtrain"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name}.py of the user was imported')\n")
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "__init__.py").write_text("raise SystemExit('utils of the user was imported')\n")
    rows = [json.dumps({"text": f"{number} words and words"}) for number in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def run(command: str) -> str:
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    return run


def test_the_wheel_adds_the_packages_that_the_readme_names_and_no_cli(environment):
    site = next(environment.glob("lib/python*/site-packages"))
    added = {path.name for path in site.iterdir() if path.suffix != ".pth"}
    named = re.search(r"adds the import packages ((?:`\w+`(?:, | and )?)+)", (ROOT / "README.md").read_text())
    assert named is not None
    information = f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"
    assert added == {*re.findall(r"`(\w+)`", named[1]), information} and "cli" not in added


def test_the_wheel_runs_on_other_machines(wheel):
    """The extension links only against what every Linux of some age has."""
    pytest.importorskip("auditwheel")
    done = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tag = re.search(r'following platform tag:\s+"(\w+)"', done.stdout)
    assert tag is not None and tag[1].startswith("manylinux_"), done.stdout


def test_the_sdist_holds_docs_and_tests(tmp_path):
    pytest.importorskip("scikit_build_core")
    build = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    top = f"{DISTRIBUTION.replace('-', '_')}-{__version__}"
    assert path.name == f"{top}.tar.gz"
    with tarfile.open(path) as archive:
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert {name for name in tracked if not name.startswith(".ci/")} <= names
    kinds = ("docs/", "tests/", "mdata_cpp/", "fuzz/", "benchmarks/")
    assert all(any(name.startswith(kind) for name in names) for kind in kinds)
    assert not any(name.startswith((".venv/", "build/", ".git/")) for name in names)


def test_commands_beside_modules_of_the_same_names(at_work, tmp_path):
    at_work("mdata train-tokenizer --input in.jsonl --vocab-size 300 --output tokenizer")
    options = "--tokenizer-type ByteTokenizer --append-eod --input in.jsonl"
    at_work(f"mdata preprocess {options} --output-prefix c --workers 2")
    at_work("mdata blend 1 c_text_document.json --output mix.json")
    at_work(f"mdata launch local --parts 2 -- preprocess {options} --output-prefix parts/c")
    assert Path("parts/c_text_document.json").exists()
    at_work("mtrain launch local -- run.toml --nproc 2")  # starts `mtrain train`
    at_work("mtrain tail run --follow")
    assert "run: done, step 2 of 2" in at_work("mtrain status run")
    shutil.rmtree(tmp_path / "run")
    torchrun = f"{sys.executable} -P -m torch.distributed.run --nproc-per-node 1 --no-python"
    at_work(f"{torchrun} mtrain train run.toml")
    assert "step-2: step 2, 4 samples" in at_work("mtrain inspect run")
    at_work("python -P -m mdata inspect c_text_document.json")


def test_an_editable_install_runs_the_checkout(tmp_path, monkeypatch):
    pytest.importorskip("scikit_build_core")
    folder = _installed(tmp_path / "environment", "--editable", str(ROOT))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    mock = RUN.replace('"mix.json"', '"mock"').replace("[train]", "vocab_size = 300\n[train]")
    (tmp_path / "run.toml").write_text(mock)
    for command, ranks in (("mtrain", 1), ("python -m cli.mtrain", 2)):
        out = f"run.folder={tmp_path}/{len(command)}"
        words = f"{folder / 'bin'}/{command} train {tmp_path}/run.toml {out} --nproc {ranks}"
        done = subprocess.run(words.split(), cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    where = "import mdata_mtrain.cli.console as c, mdata; print(c.__file__, mdata.__file__)"
    done = subprocess.run([folder / "bin/python", "-P", "-c", where], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ROOT / "cli/console.py"), str(ROOT / "mdata/__init__.py")]
