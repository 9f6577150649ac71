"""Command lines of Megatron's preprocess_data.py, word for word after the program's name, give its bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cli.mdata import main
from mdata import durable
from mdata.preprocess import job
from tests.conftest import oracle_folder

TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")
WITH_THEIR_WORKERS = ("gpt2-en-eod-w2", "part2-keys", "part3-tiny")  # the others run in this process, for time


def cases() -> list[Any]:
    path = oracle_folder() / "oracle/preprocess/cases.json"
    if not path.is_file():
        return []
    made = json.loads(path.read_text())["cases"]
    return [case for case in made if set(TYPES) & set(case["options"]) and "--split-sentences" not in case["options"]]


def words_of(case: dict[str, Any]) -> list[str]:
    """The options; a glob, whose order was the folder's there, as the files in that order; other workers."""
    words = list(case["options"])
    place = words.index("--input") + 1
    if "input_order" in case:
        words[place : place + 1] = case["input_order"]
    if case["id"] not in WITH_THEIR_WORKERS:
        words[words.index("--workers") + 1] = "1"
    return words


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    return {}


@pytest.fixture
def quick(monkeypatch, loaded):
    """Each tokenizer is loaded and checked once for all cases, and nothing waits for the disk."""
    load = job.load_tokenizer

    def once(spec: Any) -> Any:
        if repr(spec) not in loaded:
            loaded[repr(spec)] = load(spec)
        return loaded[repr(spec)]

    monkeypatch.setattr(job, "load_tokenizer", once)
    monkeypatch.setattr(durable, "sync", lambda fd: None)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
@pytest.mark.usefixtures("quick")
def test_the_same_command_gives_the_same_bytes(oracles, tmp_path, monkeypatch, capsys, case):
    for name in ("corpus", "vocab"):
        (tmp_path / name).symlink_to(oracles / name)
    if "prepare" in case:  # gunzip -k
        import gzip

        (tmp_path / "corpus").unlink()
        (tmp_path / "corpus").mkdir()
        packed = oracles / f"{case['input']}.gz"
        (tmp_path / case["input"]).write_bytes(gzip.decompress(packed.read_bytes()))
    monkeypatch.chdir(tmp_path)
    assert main(["preprocess", *words_of(case)]) == 0, capsys.readouterr().err
    for output in case["outputs"]:
        content = Path(output["name"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == output["sha256"], output["name"]
    found = {str(path) for path in Path("out").glob("*.bin")}
    assert found == {output["name"] for output in case["outputs"] if output["name"].endswith(".bin")}


def test_all_cases_of_this_part_are_here(oracles):
    assert len(cases()) == 46
