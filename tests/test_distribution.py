"""The distribution's name: one place says it, and nothing tells users to install somebody else's package."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from mdata import errors
from mdata.version import DISTRIBUTION
from tests.helpers.house_rules import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
# What our texts tell users and developers to install besides us.
OTHERS = {
    "accelerate", "atheris", "boto3", "causal-conv1d", "datasketch", "datatrove", "huggingface_hub", "jinja2",
    "lightning", "mamba-ssm", "megatron-core", "nltk", "nvidia-cudnn-frontend", "psutil", "pycld2", "pyyaml", "ray",
    "rensa", "torch", "torchdata", "xxhash",
}  # fmt: skip
_INSTALLS = re.compile(r"pip3? (?:install|wheel)((?:[ \t]+[\"']?[\w.\[\],=<>{}/\"'-]+)+)")
_OPTIONS_WITH_VALUE = ("-c", "-r", "--constraint", "--wheel-dir", "--index-url")
_WORDS_AFTER = {"and", "if", "in", "installs", "on", "or", "takes", "through", "with"}


def names_installed(text: str) -> list[str]:
    """The names of packages that the `pip install` commands in a text would take from an index; "." is a checkout."""
    names = []
    for command in _INSTALLS.finditer(text):
        words = command[1].split()
        while words and words[0] not in _WORDS_AFTER:
            word = words.pop(0)
            if word in _OPTIONS_WITH_VALUE:
                words = words[1:]
            elif not word.startswith("-"):
                names.append(re.split(r"==|[\[<>=]", word.strip("\"',.") or ".")[0] or ".")
            if word.endswith((",", ".")) and word != ".":
                break
    return names


_MAY_INSTALL = re.compile(r"pip|mtrain\[|mdata\[|\.\[[a-z]")


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _texts():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.suffix == ".py" and not name.startswith("tests/"):
            if not _MAY_INSTALL.search(path.read_text()):
                continue  # most files; reading their trees is the time of this test
            for node in ast.walk(_parsed(path)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{name}:{node.lineno}", node.value
                elif isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                    yield f"{name}:{node.lineno}", "".join(map(str, parts))
        elif path.suffix in (".md", ".txt", ".toml") or path.name in ("Makefile", "CMakeLists.txt"):
            yield name, path.read_text()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('fix: pip install "mdata[gpu]", or', ["mdata"]),
        ("`pip install 'mdata[ray]'` on all", ["mdata"]),
        ('pip install jinja2 (or "x")', ["jinja2"]),
        ("pip install --quiet -c constraints.txt megatron-core==0.16.1 psutil\n", ["megatron-core", "psutil"]),
        ('pip install ".[objects]" in', ["."]),
        ("pip install .   through", ["."]),
        ("pip install lightning accelerate`. Seen", ["lightning", "accelerate"]),
    ],
)
def test_names_are_found_in_commands(text, names):
    assert names_installed(text) == names


def test_every_package_that_a_text_installs_is_ours_or_known():
    seen = set()
    for place, text in _texts():
        for name in names_installed(text):
            assert name in {".", "{}", PROJECT["name"], *OTHERS}, f"{place} installs {name}"
            seen.add(name)
        for extra in re.findall(r"(?:\.|mdata-mtrain)\[([a-z,]+)\]", text):
            assert set(extra.split(",")) <= EXTRAS, f"{place} has no extra {extra}"
        if not place.startswith(("tests/", "CHANGELOG")):
            assert not re.search(r"[\"'`]mdata\[[a-z]+\]", text), place
    assert {".", "jinja2", "boto3", "nltk"} <= seen


def test_the_command_to_install_an_extra(monkeypatch, tmp_path):
    assert PROJECT["name"] == DISTRIBUTION
    assert errors.install_command("gpu") == f'pip install ".[gpu]" in {ROOT}'
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages/mdata/errors.py"))
    assert errors.install_command("gpu") == 'pip install "mdata-mtrain[gpu]"'


def test_every_extra_that_is_asked_for_exists():
    calls = [
        node
        for path in (*ROOT.glob("mdata/**/*.py"), *ROOT.glob("trainer/**/*.py"), *ROOT.glob("cli/*.py"))
        if "install_command" in path.read_text()
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install_command"
    ]
    assert len(calls) >= 4
    assert {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)} <= EXTRAS
