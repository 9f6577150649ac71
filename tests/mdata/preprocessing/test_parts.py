"""Parts of a job: in order they are the whole, whatever their number; unsupported options are refused by name."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest
from blake3 import blake3

import mdata
from mdata.corpus.documents import DocumentReader
from mdata.errors import BadInputError, StoppedError, UsageError
from mdata.preprocessing.estimate import estimate
from mdata.preprocessing.parts import parse_shard, part_prefix
from mdata.progress import Silent
from mdata.sources.sections import PartNumber
from tests.reference.indexed import read_pair

pytestmark = pytest.mark.usefixtures("loaded_once")


def write_mix(folder):
    """Plain, packed and plain text, an empty file, and lines of all lengths."""
    folder.mkdir()
    lines = [json.dumps({"text": f"line {number} " * (number % 7)}) + "\n" for number in range(300)]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[:20]).encode(), mtime=0))
    (folder / "c.jsonl").write_text("")
    (folder / "d.txt").write_text("one\n\ntwo\n" * 50)
    (folder / "e.jsonl").write_text("".join(lines[40:60]))
    return folder


def job(folder, **more):
    return mdata.PreprocessOptions(
        input=(str(folder / "in"),),
        output_prefix=str(folder / "out/c"),
        tokenizer_type="ByteTokenizer",
        workers=1,
        chunk_bytes=500,
        append_eod=True,
        **more,
    )


def make_parts(options, count):
    return [mdata.preprocess(replace(options, shard=f"{number}/{count}")) for number in range(1, count + 1)]


def documents(prefix):
    """Each as its sequences."""
    sequences, boundaries = read_pair(prefix)
    return [sequences[first:last] for first, last in itertools.pairwise(boundaries)]


@pytest.mark.parametrize("more", [{}, {"holdout": "0.3"}], ids=["plain", "holdout"])
def test_the_parts_in_order_are_the_whole(tmp_path, more):
    write_mix(tmp_path / "in")
    mdata.preprocess(replace(job(tmp_path, **more), output_prefix=str(tmp_path / "one/c")))
    for count in (1, 3, 50):
        make_parts(job(tmp_path, **more), count)
        for result in ("text", *(["holdout_text"] if more else [])):
            found = []
            for number in range(1, count + 1):
                prefix = tmp_path / "out" / part_prefix("c", PartNumber(number, count))
                found += documents(prefix.with_name(f"{prefix.name}_{result}_document"))
            assert found == documents(tmp_path / f"one/c_{result}_document")


def test_a_part_records_the_sections_that_it_read(tmp_path):
    write_mix(tmp_path / "in")
    (whole,) = mdata.preprocess(replace(job(tmp_path), output_prefix=str(tmp_path / "one/c"))).manifests.values()
    inputs = [
        file
        for result in make_parts(job(tmp_path), 5)
        for manifest in result.manifests.values()
        for file in manifest.provenance.inputs
    ]
    for file in whole.provenance.inputs:
        same = [one for one in inputs if one.path == file.path]
        assert sum(one.rows for one in same) == file.rows
        if len(same) == 1:
            assert same[0] == file
            continue
        bounds = [(one.section.start, one.section.stop) for one in same]
        assert [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), file.bytes]
        assert {one.section.total for one in same} == {file.bytes}
        assert blake3(bytes.fromhex("".join(one.section.pieces for one in same))).hexdigest() == file.hash


def test_rows_of_a_section_count_from_its_beginning_and_are_named_so(tmp_path):
    write_mix(tmp_path / "in")
    (result,) = [mdata.preprocess(replace(job(tmp_path), shard="2/3"))]
    (path,) = result.paths.values()
    corpus = mdata.open_corpus(path)
    first = DocumentReader(corpus).origin(0)
    section = corpus.manifest.provenance.inputs[0].section
    assert first == (f"{tmp_path / 'in/a.jsonl'} [{section.start}:{section.stop}]", 1)
    assert not mdata.verify(path).problems


class StopsAfter(Silent):
    """Stops the run when some chunks are written."""

    def __init__(self, chunks):
        self.left, self.notes = chunks, []

    def advance(self, amount, **totals):
        self.left -= 1
        if self.left == 0:
            raise StoppedError("stopped")

    def note(self, text):
        self.notes.append(text)


@pytest.mark.parametrize("before_end", [1, 2, 4, 9])
def test_a_part_that_was_stopped_continues_to_the_same_bytes(tmp_path, before_end):
    """Its journal has what a whole run does not need: the pieces of a section that is closed already."""
    write_mix(tmp_path / "in")
    options = replace(job(tmp_path), shard="2/2", checkpoint_s=0)
    counter = StopsAfter(0)
    straight = mdata.preprocess(replace(options, output_prefix=str(tmp_path / "other/c")), counter)
    with pytest.raises(StoppedError):
        mdata.preprocess(options, StopsAfter(-counter.left - before_end))
    listener = StopsAfter(0)
    resumed = mdata.preprocess(options, listener)
    assert resumed.resumed and any("continuing an earlier run" in note for note in listener.notes)
    plain = [
        {**msgspec.to_builtins(manifest), "checksum": ""}
        for result in (resumed, straight)
        for manifest in result.manifests.values()
    ]
    assert plain[0] == plain[1]
    assert mdata.preprocess(options).finished_before


def test_another_list_of_inputs_is_another_job(tmp_path):
    write_mix(tmp_path / "in")
    options = replace(job(tmp_path), shard="1/4")
    mdata.preprocess(options)
    (tmp_path / "in/f.jsonl").write_text('{"text": "more"}\n')
    with pytest.raises(UsageError, match="the list of inputs was"):
        mdata.preprocess(options)
    mdata.preprocess(replace(options, overwrite=True))


def test_bad_rows_of_a_part_are_named_by_section_and_go_to_a_file_of_its_own(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "good"}\n{"no": 1}\n' * 100)
    with pytest.raises(BadInputError, match=r"a\.jsonl \[1000:2000\]:\d"):
        mdata.preprocess(replace(job(tmp_path), shard="2/3"))
    quarantined = replace(job(tmp_path), on_error="quarantine", quarantine=str(tmp_path / "bad.jsonl"))
    results = make_parts(quarantined, 3)
    files = sorted(path.name for path in tmp_path.glob("bad*"))
    assert files == [f"bad-0000{number}-of-00003.jsonl" for number in (1, 2, 3)]
    assert sum(sum(m.provenance.skipped.values()) for r in results for m in r.manifests.values()) == 100


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"partitions": 2}, "--shard cannot be combined with --partitions"),
        ({"max_errors": "5%", "on_error": "skip"}, "--shard cannot be combined with --max-errors 5%"),
        ({"input": ("-",)}, "standard input cannot be divided"),
        ({"shard": "0/4"}, "shard=0/4"),
        ({"shard": "5/4"}, "shard=5/4"),
        ({"shard": "1/100000"}, "N at most 99999"),
        ({"shard": "third"}, "shard=third"),
    ],
)
def test_what_a_part_cannot_do_is_refused_by_name(tmp_path, more, message):
    write_mix(tmp_path / "in")
    with pytest.raises(UsageError, match=message):
        mdata.preprocess(replace(job(tmp_path), **{"shard": "1/4", **more}))
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_an_estimate_is_of_the_whole(tmp_path):
    write_mix(tmp_path / "in")
    with pytest.raises(UsageError, match="--dry-run cannot be combined with --shard 1/4"):
        estimate(replace(job(tmp_path), shard="1/4"))


def test_the_number_of_a_part_is_read_as_a_number():
    assert parse_shard("003/64") == PartNumber(3, 64)


def test_the_command_line(tmp_path):
    write_mix(tmp_path / "in")
    words = ["preprocess", "--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "o")]
    words += ["--tokenizer-type", "ByteTokenizer", "--shard", "2/2", "--workers", "1"]
    subprocess.run([sys.executable, "-m", "mdata", *words], check=True, capture_output=True)
    assert (tmp_path / "o-00002-of-00002_text_document.json").is_file()
