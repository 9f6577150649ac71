"""Command lines of Megatron's preprocess_data.py, word for word, against the files that it wrote: by sha256."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from cli.mdata import main
from tests.conftest import oracle_folder

pytestmark = pytest.mark.usefixtures("loaded_once")

# The reference takes the files of a pattern as the file system gives them; ours are sorted, and then differ.
UNSORTED = {"part2-glob", "part2-glob-seq"}


# The reference stops half way and has to be run again; its second run is the case "split-gpt2-small".
HALF_WAY = "split-first-run"
# What the fork leaves behind where it fails: no .idx for all keys but the last, none for BERT with --append-eod.
FORK_FAILS = {"bertu-edge-eod", "gpt2-keys3", "part2-keys", HALF_WAY}


def read(name: str) -> list[dict]:
    """The cases of one file; none where there is no oracle data."""
    path = oracle_folder() / "oracle/preprocess" / name
    return json.loads(path.read_text())["cases"] if path.is_file() else []


def cases() -> list[dict]:
    """Today's reference."""
    return [case for case in read("cases.json") if case["id"] != HALF_WAY]


def fork_cases() -> list[dict]:
    """The fork of 2023: the same command lines with its own outputs, or equal ones."""
    today = {case["id"]: case for case in read("cases.json")}
    found = [case for case in read("fork_2023.json") if case["id"] not in FORK_FAILS]
    return [{**today[case["id"]], "outputs": case.get("outputs", today[case["id"]]["outputs"])} for case in found]


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
    check(tmp_path, oracles, monkeypatch, case=case, more=[])


@pytest.mark.parametrize("case", fork_cases(), ids=lambda case: case["id"])
@pytest.mark.slow
def test_the_older_fork_gave_the_same_bytes(tmp_path, oracles, monkeypatch, case):
    check(tmp_path, oracles, monkeypatch, case=case, more=["--compat", "megatron-2023"])


def check(tmp_path, oracles, monkeypatch, *, case, more):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NLTK_DATA", str(oracles / "vocab/nltk_data"))
    for name in ("corpus", "vocab"):
        (tmp_path / name).symlink_to(oracles / name)
    assert main(["preprocess", *words_of(case, tmp_path, oracles), *more]) == 0
    assert case["outputs"]
    for output in case["outputs"]:
        data = (tmp_path / output["name"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == output["sha256"], output["name"]


def test_cases_are_found(oracles):
    assert (len(cases()), len(fork_cases())) == (87, 31)
