"""Verification finds every flipped bit, names each damaged block with its documents, and continues."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from cli.mdata import main
from mdata.corpus.documents import DocumentReader
from mdata.indexed import blocks
from tests.helpers.examples import examples
from tests.mdata.hand_made import BLOCK, make_corpus
from tests.mdata.preprocessing.test_preprocess import run


def problems(path: Path, *, full: bool = True) -> list[str]:
    return [str(problem) for problem in mdata.verify(path, full=full).problems]


@pytest.fixture
def corpus(tmp_path) -> Path:
    run(tmp_path, append_eod=True)
    return tmp_path / "out_text_document.json"


@pytest.fixture
def small(tmp_path) -> Path:
    """Three documents, one of them empty; no tokenizer."""
    return make_corpus(tmp_path, [[3], [], [2, 4]])


def flip(path: Path, place: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("name", ["x.idx", "x.json", "x.bin.blake3", "x.origins", "x.bin"])
def test_every_flipped_bit_is_found(small, name):
    path = small.parent / name
    assert problems(small) == []
    for place in range(path.stat().st_size):
        for bit in range(8):
            flip(path, place, bit)
            assert problems(small, full=name == "x.bin"), (place, bit)
            flip(path, place, bit)
    assert problems(small) == []


@pytest.mark.parametrize(
    ("name", "text", "without_full"),
    [
        ("out_text_document.bin", "out_text_document.bin: block 0 is not what was written", False),
        ("out_text_document.blake3", "document.blake3: its content was changed", True),
        ("out_text_document.idx", "out_text_document.idx: bad dtype|idx: its content was changed", True),
        ("out_text_document.json", "truncated, or not JSON|not what was written|is not a manifest|at `", True),
    ],
)
def test_a_corpus_of_preprocess(corpus, name, text, without_full):
    assert problems(corpus) == []
    flip(corpus.parent / name, 17)
    found = problems(corpus)
    assert found and all(re.search(text, problem) or "the .idx is damaged too" in problem for problem in found)
    assert bool(problems(corpus, full=False)) == without_full


def test_a_flipped_bit_of_the_tokenizer_is_found_even_where_it_decides_no_id(corpus):
    (folder,) = corpus.parent.glob("tokenizer-*")
    (path,) = folder.glob("tokenizer.json")
    text = path.read_text()
    path.write_text(text + "\n")
    (found,) = problems(corpus, full=False)
    assert "its files were changed" in found
    path.write_text(text)
    (folder / "tokenizer_config.json").write_text("{}")
    (found,) = problems(corpus)
    assert "its files were changed" in found


@pytest.mark.parametrize("name", ["x.bin", "x.bin.blake3", "x.idx", "x.origins"])
def test_a_lost_file_is_named_once(small, name):
    (small.parent / name).unlink()
    found = mdata.verify(small).problems
    assert [str(problem).splitlines()[0].partition("x.")[2] for problem in found] == [
        f"{name.removeprefix('x.')}: No such file or directory"
    ]
    assert isinstance(found[0], mdata.UsageError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_no_damage(small):
    (small.parent / "x.bin").chmod(0)
    assert {type(problem) for problem in mdata.verify(small, full=True).problems} == {mdata.UsageError}


def test_a_disk_that_fails_gives_the_block_and_not_the_end(tmp_path, monkeypatch):
    """One unreadable block: named with its documents, no damage, and the damaged one after it is found too."""
    path = make_corpus(tmp_path, [[BLOCK // 2]] * 4)
    flip(tmp_path / "x.bin", 3 * BLOCK + 5)
    real = os.preadv

    def failing(fd: int, buffers: list, offset: int) -> int:
        if offset == BLOCK:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(blocks.os, "preadv", failing)
    first, second = mdata.verify(path, full=True).problems
    assert isinstance(first, mdata.ResourceError) and isinstance(second, mdata.DamageError)
    (unreadable, _), (altered, _) = (str(problem).splitlines() for problem in (first, second))
    assert "block 1 is unreadable: Input/output error" in unreadable and unreadable.endswith("; document 1")
    assert "block 3 is not what was written" in altered and altered.endswith("; document 3")


LENGTHS = [BLOCK // 2 - 1, 1, 0, 3, BLOCK // 4, BLOCK - 3, 7, BLOCK // 2]  # uint16 tokens


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Sequences of the lengths above, two to a document: borders at, before and after those of blocks."""
    documents = [LENGTHS[i : i + 2] for i in range(0, len(LENGTHS), 2)]
    return make_corpus(tmp_path_factory.mktemp("large"), documents)


def documents_of_bytes(start: int, stop: int) -> list[int]:
    """The slow way: every document whose bytes meet [start, stop)."""
    ends = np.cumsum([2 * (a + b) for a, b in zip(LENGTHS[::2], LENGTHS[1::2], strict=True)])
    starts = np.concatenate(([0], ends[:-1]))
    return [i for i in range(len(ends)) if starts[i] < stop and ends[i] > start]


@examples(40)
@given(st.sets(st.integers(0, 2 * sum(LENGTHS) - 1), min_size=1, max_size=4), st.integers(1, 4))
def test_damaged_blocks_and_their_documents(large, places, threads):
    path = large.with_name("x.bin")
    for place in places:
        flip(path, place)
    try:
        found = mdata.verify(large, full=True, threads=threads)
    finally:
        for place in places:
            flip(path, place)
    bad = {place // BLOCK for place in places}
    assert {n for run in found.damaged for n in range(run.first, run.last + 1)} == bad
    assert len(found.problems) == len(found.damaged) == len([n for n in bad if n - 1 not in bad])
    for blocks_ in found.damaged:
        (documents,) = blocks_.documents or ()
        assert list(range(documents[0], documents[1] + 1)) == documents_of_bytes(blocks_.start, blocks_.stop)


def test_a_cut_bin_names_the_blocks_that_are_gone(large):
    path = large.with_name("x.bin")
    data = path.read_bytes()
    path.write_bytes(data[: 2 * BLOCK + 1])
    found = mdata.verify(large, full=True)
    path.write_bytes(data)
    assert [(run.first, run.last) for run in found.damaged] == [(2, len(data) // BLOCK)]
    assert any("x.bin is not the one that x.json describes" in str(problem) for problem in found.problems)
    assert problems(large) == []


def test_documents_of_the_second_shard_count_on(tmp_path):
    """Numbers of documents are those of the corpus, as `mdata cat` takes them."""
    import msgspec

    from mdata.manifest.io import load_manifest, save_manifest

    first = load_manifest(make_corpus(tmp_path, [[3], [4]], name="a"))
    second = load_manifest(make_corpus(tmp_path, [[5], [6]], name="b"))
    both = msgspec.structs.replace(first, shards=[*first.shards, *second.shards], provenance=None)
    save_manifest(both, tmp_path / "both.json")
    flip(tmp_path / "b.bin", 0)
    (problem,) = problems(tmp_path / "both.json")
    what, remedy = problem.splitlines()
    assert what.endswith("b.bin: block 0 is not what was written (bytes 0 to 22); documents 2 to 3")
    assert remedy == "  try: copy it again from where it is intact, or make the corpus again"


@pytest.mark.parametrize("documents", [[], [[]], [[0], []]])
def test_a_corpus_without_tokens(tmp_path, documents):
    path = make_corpus(tmp_path, documents)
    assert (tmp_path / "x.bin").read_bytes() == (tmp_path / "x.bin.blake3").read_bytes() == b""
    found = mdata.verify(path, full=True)
    assert found.problems == () and found.bin_bytes == 0
    (tmp_path / "x.bin").write_bytes(b"\0")
    assert len(problems(path)) == 1


def test_a_bare_pair_says_that_nothing_is_known_of_its_bytes(small):
    small.unlink()
    found = mdata.verify(small.with_suffix(""), full=True)
    assert found.problems == () and found.unhashed == (str(small.with_suffix("")),)


def test_a_blend_verifies_its_corpora(corpus):
    mix = corpus.parent / "mix.json"
    mdata.make_blend([str(corpus)], mix)
    found = mdata.verify(mix, full=True)
    assert found.checked == (str(mix), str(corpus))
    assert found.problems == () and found.bin_bytes > 0
    run(corpus.parent, overwrite=True)
    (problem,) = problems(mix)
    assert "is not the corpus that was blended" in problem
    corpus.unlink()
    corpus.with_suffix(".idx").unlink()
    (problem,) = problems(mix)
    assert "No such file" in problem


@pytest.mark.parametrize("name", ["x", "x.json"])
def test_verifying_what_is_not_there_is_a_usage_error(tmp_path, name):
    with pytest.raises(mdata.UsageError, match=f"/{name}"):
        mdata.verify(tmp_path / name)


def rows_of_table() -> list[tuple[str, int, str]]:
    """(pair, exit code, words of the message) of each row of damaged_pairs.md."""
    cells = [
        line.split("|")
        for line in Path(__file__).with_name("damaged_pairs.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    return [(row[1].strip(" `"), int(row[3]), row[4].strip(" `")) for row in cells]


@pytest.mark.parametrize(("name", "code", "words"), rows_of_table())
def test_the_table_of_damages_is_true(oracles, capsys, name, code, words):
    assert main(["verify", "--full", str(oracles / "hostile/binidx" / name)]) == code
    out, err = capsys.readouterr()
    assert words in (err if code else out) and "Traceback" not in err


def test_the_table_of_damages_has_every_pair(oracles):
    there = {path.stem for path in (oracles / "hostile/binidx").iterdir()}
    assert sorted(name for name, _, _ in rows_of_table()) == sorted(there)


@pytest.mark.parametrize("sidecar", ["x.origins", "x.bin.blake3"])
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin", "../elsewhere", "pipe"])
def test_a_sidecar_is_a_regular_file_of_the_folder(tmp_path, sidecar, target):
    """A device has no end; what a stranger's manifest names is not to be read from all over the machine."""
    small = tmp_path / "corpus"
    small.mkdir()
    path = make_corpus(small, [[3], [2, 4]])
    (small / sidecar).rename(tmp_path / "elsewhere")
    os.mkfifo(small / "pipe")
    (small / sidecar).symlink_to(target)
    (found,) = problems(path)
    assert "outside its folder" in found or "not a regular file" in found
    if sidecar == "x.origins":
        with pytest.raises(mdata.UsageError, match=r"outside its folder|not a regular file"):
            DocumentReader(mdata.open_corpus(path))
    (small / sidecar).unlink()
    (tmp_path / "elsewhere").rename(small / sidecar)
    assert problems(path) == []
