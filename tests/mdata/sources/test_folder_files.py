"""Which files of a folder are read, which are left out, and that this is reported."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import UsageError
from mdata.sources.folder_files import PathFilter, matches
from mdata.sources.input_files import find_inputs
from tests.helpers.examples import examples
from tests.helpers.notes import Notes

TREE = (
    "a.jsonl", "b.JSONL", "c.ndjson", "d.xls", "e.jsonl.lz4", "f.txt", ".git/x.jsonl", ".hidden.jsonl",
    "en/a.jsonl.gz", "en/old/b.jsonl", "old/c.jsonl", "r.idx", "r.bin", "r.blake3", "r.bin.blake3", "r.origins",
    "r.json", "tokenizer-0123456789abcdef/tokenizer.json", "no-result.bin",
)  # fmt: skip


@pytest.fixture
def tree(tmp_path) -> Path:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def taken(folder: Path, *inputs: object, **patterns: tuple[str, ...]) -> tuple[list[str], dict[str, int]]:
    found = find_inputs(inputs or [folder], filter=PathFilter(**patterns))
    return [str(file.path.relative_to(folder)) for file in found.files], dict(found.skipped.counts)


ALL = ["a.jsonl", "b.JSONL", "c.ndjson", "en/a.jsonl.gz", "en/old/b.jsonl", "f.txt", "old/c.jsonl"]
ALWAYS = {"hidden": 2, "own result": 7}


def test_every_name_is_taken_or_counted(tree):
    assert taken(tree) == (ALL, {**ALWAYS, "unknown ending": 3})


@pytest.mark.parametrize(
    ("patterns", "expected", "counts"),
    [
        ({"exclude": ("old",)}, [n for n in ALL if "old" not in n], {"excluded": 2, "unknown ending": 3}),
        ({"exclude": ("/old",)}, [n for n in ALL if n[:3] != "old"], {"excluded": 1, "unknown ending": 3}),
        ({"exclude": ("en/**", "*.txt")}, ["a.jsonl", "b.JSONL", "c.ndjson", "old/c.jsonl"],
         {"excluded": 2, "unknown ending": 3}),
        ({"include": ("*.gz",)}, ["en/a.jsonl.gz"], {"not included": 9}),
        ({"include": ("en/",)}, ["en/a.jsonl.gz", "en/old/b.jsonl"], {"not included": 8}),
        ({"include": ("*.xls",)}, ["d.xls"], {"not included": 9}),
        ({"include": ("en",), "exclude": ("old/",)}, ["en/a.jsonl.gz"], {"excluded": 2, "not included": 7}),
    ],
)  # fmt: skip
def test_include_and_exclude_choose_files_and_count_the_others(tree, patterns, expected, counts):
    assert taken(tree, **patterns) == (expected, {**ALWAYS, **counts})


def test_what_is_left_out_is_told_with_the_first_names(tree):
    for number in range(5):
        (tree / f"z{number}.xls").touch()
    notes = Notes()
    find_inputs([tree], progress=notes)
    (note,) = notes.lines
    for text in (
        f"8 with an unknown ending ({tree}/d.xls, {tree}/e.jsonl.lz4, {tree}/no-result.bin and 5 more)",
        f"2 that are hidden ({tree}/.git/, {tree}/.hidden.jsonl)",
        f"7 written by mdata ({tree}/tokenizer-0123456789abcdef/, ",
    ):
        assert text in note
    notes = Notes()
    find_inputs([tree / "a.jsonl"], progress=notes)
    assert notes.lines == []


def test_a_format_leaves_out_the_others(tree):
    found = find_inputs([tree], format="text")
    assert [file.path.name for file in found.files] == ["f.txt"]
    assert found.skipped.counts == {**ALWAYS, "another format": 6, "unknown ending": 3}


def test_results_in_a_pattern_are_counted_too(tree):
    assert taken(tree, str(tree / "[ar].json*")) == (["a.jsonl"], {"own result": 1})


@pytest.mark.parametrize(
    ("inputs", "patterns", "text"),
    [
        ([""], {"include": ("*.none",)}, r"no input in this folder\n  found: .*that match no --include"),
        (["a.jsonl"], {"include": ("*.gz",)}, "--include and --exclude need a folder"),
        ([""], {"include": "*.gz"}, "a sequence of patterns"),
        ([""], {"exclude": ("",)}, "a sequence of patterns"),
        ([""], {"exclude": ("[z-a]",)}, r"'\[z-a\]' is not a valid pattern"),
    ],
)
def test_patterns_that_cannot_be_meant(tree, inputs, patterns, text):
    with pytest.raises(UsageError, match=text):
        find_inputs([tree / name for name in inputs], filter=PathFilter(**patterns))


def test_an_exclude_that_fits_nothing_is_told(tree):
    notes = Notes()
    find_inputs([tree], filter=PathFilter(exclude=("*.tmp",)), progress=notes)
    assert notes.lines[1:] == ["nothing in the input matches --exclude *.tmp"]


PARTS = st.text("ab.", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
PATTERNS = st.lists(
    st.sampled_from(["a", "b", ".", "*", "?", "/", "**", "[ab]", "[!a]"]), min_size=1, max_size=6
).map("".join)  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("git")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


@examples(60)
@given(
    PATTERNS.filter(lambda p: p.strip("/") and "//" not in p and "***" not in p),
    st.lists(PARTS, min_size=1, max_size=4),
)
def test_patterns_mean_what_they_mean_to_git(repository, pattern, parts):
    (repository / ".git" / "info" / "exclude").write_text(pattern + "\n")
    words = ["git", "-C", str(repository), "check-ignore", "-q", "--no-index", "/".join(parts)]
    assert matches(pattern, parts) == (subprocess.run(words, check=False).returncode == 0)
