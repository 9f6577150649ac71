"""Command lines of Megatron's preprocess_data.py, word for word, against the files that it wrote: by sha256."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from cli.mdata import main
from tests.conftest import oracle_folder

# The reference takes the files of a pattern as the file system gives them; ours are sorted, and then differ.
UNSORTED = {"part2-glob", "part2-glob-seq"}


def cases() -> list[dict]:
    """Those with tokenizers that are here and without sentence splitting."""
    path = oracle_folder() / "oracle/preprocess/cases.json"
    found = json.loads(path.read_text())["cases"] if path.is_file() else []
    types = {"GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"}
    return [case for case in found if types & set(case["options"]) and "--split-sentences" not in case["options"]]


def words_of(case: dict, folder: Path, oracles: Path) -> list[str]:
    """The case's own words; a file that is kept packed is unpacked first."""
    words = list(case["options"])
    place = words.index("--input") + 1
    if case["id"] in UNSORTED:
        order = [name if "/" in name else f"corpus/glob/{name}" for name in case["input_order"]]
        return [*words[:place], *order, *words[place + 1 :]]
    if not (oracles / words[place]).exists() and (oracles / f"{words[place]}.gz").exists():
        unpacked = folder / Path(words[place]).name
        unpacked.write_bytes(gzip.decompress((oracles / f"{words[place]}.gz").read_bytes()))
        words[place] = str(unpacked)
    return words


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
@pytest.mark.slow
def test_the_same_command_gives_the_same_bytes(tmp_path, oracles, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    for name in ("corpus", "vocab"):
        (tmp_path / name).symlink_to(oracles / name)
    assert main(["preprocess", *words_of(case, tmp_path, oracles)]) == 0
    assert case["outputs"]
    for output in case["outputs"]:
        data = (tmp_path / output["name"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == output["sha256"], output["name"]


def test_cases_are_found(oracles):
    assert len(cases()) > 40
