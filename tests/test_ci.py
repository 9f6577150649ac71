"""CI, wheels, the container, hooks and the citation say what the Makefile, pyproject.toml and the version say."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from mdata.version import DISTRIBUTION, __version__
from tests.helpers.house_rules import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
TARGETS = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
PYTHONS = ["3.11", "3.12", "3.13"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def steps(workflow: Any) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_of_the_makefile_and_pinned_actions(path):
    workflow = load(f".github/workflows/{path.name}")
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # "on" is a boolean of YAML 1.1
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v[\d.]+", step["uses"]), step
            checkout = step["uses"].startswith("actions/checkout@")
            assert not checkout or step["with"] == {"persist-credentials": False}, step
        for line in step.get("run", "").splitlines():
            program, target, *variables = line.split()
            assert program == "make" and target in TARGETS, line
            assert all(re.fullmatch(r"[A-Z]+=\S+", variable) for variable in variables), line


def test_ci_tests_every_python_that_the_project_supports():
    assert load(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == PYTHONS
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: Python :: 3." in text]
    assert named == PYTHONS and PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "README.md").read_text()
    built = PYPROJECT["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{python.replace('.', '')}-*" for python in PYTHONS]


def test_wheels_are_built_for_both_architectures():
    workflow = load(".github/workflows/wheels.yml")
    assert workflow["jobs"]["wheels"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    wheels = PYPROJECT["tool"]["cibuildwheel"]
    assert {f"manylinux-{machine}-image" for machine in ("x86_64", "aarch64")} <= wheels.keys()
    assert any(step.get("uses", "").startswith("pypa/cibuildwheel@") for step in steps(workflow))


def test_hooks_run_the_tools_of_the_venv():
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        words = hook["entry"].split()
        assert hook["language"] == "system"
        assert words[:2] == ["make", "types"] or (words[:3] == [".venv/bin/python", "-m", "ruff"]), words
        assert words[0] != "make" or words[1] in TARGETS


def test_the_container_copies_files_that_exist_and_installs_an_extra():
    text = (ROOT / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists(), source
    settings = dict(re.findall(r"^ARG (\w+)=(\S+)", text, re.MULTILINE))
    assert settings["PYTHON"] in PYTHONS and settings["EXTRAS"] in PROJECT["optional-dependencies"]
    assert f"docker build -t {DISTRIBUTION} ." in text


def test_the_citation_is_that_of_the_project():
    citation = load("CITATION.cff")
    assert citation["version"] == __version__ and citation["license"] == PROJECT["license"]
    assert citation["authors"] == [{"name": "the mdata developers"}] == PROJECT["authors"]


def test_the_changelog_has_the_version():
    assert re.search(rf"^## {re.escape(__version__)}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
