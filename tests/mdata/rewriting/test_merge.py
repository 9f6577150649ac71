"""Parts merged: one run's documents by reference, its very files as a copy; what must not be merged is named."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from cli.mdata import main
from mdata.corpus.documents import DocumentReader
from mdata.errors import BadInputError, DamageError, UsageError
from mdata.preprocessing import plan
from mdata.rewriting import merge as merging
from mdata.rewriting.found_parts import as_ranges
from mdata.rewriting.merge import merge
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.examples import examples
from tests.helpers.failures import durable_calls
from tests.mdata.preprocessing.test_parts import job, make_parts, write_mix

RESULTS = (".bin", ".idx", ".json", ".origins", ".blake3")


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch):
    loaded = {}

    def load(spec, *, on_files_read=None):
        return loaded.setdefault(repr(spec), load_tokenizer(spec, on_files_read=on_files_read))

    monkeypatch.setattr(plan, "load_tokenizer", load)


def files_of(prefix):
    return {ending: prefix.with_name(prefix.name + ending).read_bytes() for ending in RESULTS}


def whole_run(folder, **more):
    return mdata.preprocess(replace(job(folder, **more), output_prefix=str(folder / "one/c")))


def everything(path):
    """All documents with their origins."""
    corpus = mdata.open_corpus(path)
    documents = DocumentReader(corpus)
    return [(corpus.document(n).tolist(), documents.origin(n)) for n in range(corpus.num_documents)]


@pytest.mark.parametrize("count", [1, 4, 20])
def test_a_copy_is_the_files_of_one_run(tmp_path, count):
    write_mix(tmp_path / "in")
    more = {"holdout": "0.2", "on_error": "skip"}
    (tmp_path / "in/a.jsonl").open("a").write('{"no": 1}\n' * 9)
    whole_run(tmp_path, **more)
    make_parts(job(tmp_path, **more), count)
    merged = merge(str(tmp_path / "out/c"), copy=True)
    assert [one.path.name for one in merged] == ["c_holdout_text_document.json", "c_text_document.json"]
    for name in ("c_text_document", "c_holdout_text_document"):
        assert files_of(tmp_path / "out" / name) == files_of(tmp_path / "one" / name)
    assert mdata.preprocess(job(tmp_path, **more)).finished_before
    assert all(one.there_before for one in merge(str(tmp_path / "out/c"), copy=True))


def test_by_reference_nothing_is_copied_and_the_documents_are_those_of_one_run(tmp_path):
    write_mix(tmp_path / "in")
    whole_run(tmp_path)
    make_parts(job(tmp_path), 7)
    (merged,) = merge(str(tmp_path / "out/c"))
    assert not list((tmp_path / "out").glob("c_text_document.bin")) and len(merged.manifest.shards) == 7
    assert everything(merged.path) == everything(tmp_path / "one/c_text_document.json")
    one = mdata.load_manifest(tmp_path / "one/c_text_document.json")
    assert merged.manifest.provenance.inputs == one.provenance.inputs
    assert merged.manifest.statistics == one.statistics
    assert not mdata.verify(merged.path, full=True).problems
    assert merge(str(tmp_path / "out/c"))[0].there_before


def test_parquet_that_is_cut_by_row_groups(tmp_path):
    (tmp_path / "in").mkdir()
    table = pa.table({"text": [f"row {n} " * (n % 5) for n in range(500)]})
    pq.write_table(table, tmp_path / "in/a.parquet", row_group_size=40)
    whole_run(tmp_path)
    make_parts(job(tmp_path), 6)
    merge(str(tmp_path / "out/c"), copy=True)
    one, copied = files_of(tmp_path / "one/c_text_document"), files_of(tmp_path / "out/c_text_document")
    assert all(one[ending] == copied[ending] for ending in RESULTS if ending != ".json")
    assert json.loads(one[".json"])["id"] == json.loads(copied[".json"])["id"]


def test_more_parts_than_units_leave_empty_parts(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "one"}\n')
    make_parts(job(tmp_path), 5)
    (merged,) = merge(str(tmp_path / "out/c"))
    assert len(merged.manifest.shards) == 1 and mdata.open_corpus(merged.path).num_documents == 1
    (tmp_path / "in/a.jsonl").write_text("")
    make_parts(job(tmp_path, overwrite=True), 5)
    (merged,) = merge(str(tmp_path / "out/c"), overwrite=True)
    assert mdata.open_corpus(merged.path).num_documents == 0


def refused(folder, pattern, **more):
    before = sorted(path.name for path in (folder / "out").iterdir())
    with pytest.raises(UsageError, match=pattern) as caught:
        merge(str(folder / "out/c"), **more)
    assert sorted(path.name for path in (folder / "out").iterdir()) == before
    return str(caught.value)


def test_missing_parts_are_named(tmp_path):
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path), 6)
    for number in (2, 3, 5):
        (tmp_path / f"out/c-0000{number}-of-00006_text_document.json").unlink()
    told = refused(tmp_path, "not all parts are finished")
    assert "text_document: 3 of 6 are missing: 2-3,5" in told and "--shard 2/6" in told


@pytest.mark.parametrize("copy", [False, True])
def test_a_pair_that_is_lost_after_a_merge_is_named_and_nothing_is_changed(tmp_path, copy):
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path, holdout="0.2"), 3)
    merge(str(tmp_path / "out/c"))
    (tmp_path / "out/c-00002-of-00003_text_document.bin").unlink()
    with (tmp_path / "out/c-00003-of-00003_text_document.bin").open("ab") as file:
        file.write(b"more")
    told = refused(tmp_path, "not all parts are complete", copy=copy, overwrite=True)
    assert "c-00002-of-00003_text_document.bin is missing; c-00003-of-00003_text_document.bin has" in told


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("column", [1, 2], ids=["file", "row"])
def test_origins_that_changed_are_not_carried_into_the_whole(tmp_path, copy, column):
    """Neither as a number of an input that there is not, nor as a row that looks like any other."""
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path), 3)
    sidecar = tmp_path / "out/c-00002-of-00003_text_document.origins"
    runs = np.fromfile(sidecar, "<i8")
    runs[3 + column] += 99
    runs.tofile(sidecar)
    with pytest.raises(DamageError, match=r"c-00002-of-00003_text_document\.origins: its content was changed"):
        merge(str(tmp_path / "out/c"), copy=copy)
    assert not (tmp_path / "out/c_text_document.json").exists()


def test_another_number_of_parts_is_named(tmp_path):
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path), 3)
    mdata.preprocess(replace(job(tmp_path), shard="1/2"))
    told = refused(tmp_path, "the job was divided in several ways")
    assert "1 of 2, 3 of 3" in told and "--parts" in told
    refused(tmp_path, "1 of 2 are missing: 2", parts=2)
    assert merge(str(tmp_path / "out/c"), parts=3)[0].num_parts == 3


def test_parts_of_another_tokenizer_option_or_input_are_named(tmp_path):
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path), 5)
    mdata.preprocess(replace(job(tmp_path, overwrite=True), shard="2/5", append_eod=False))
    mdata.preprocess(
        replace(
            job(tmp_path, overwrite=True),
            shard="3/5",
            tokenizer_type="NullTokenizer",
            tokenizer_options=(("vocab_size", 300),),
            on_error="skip",
        )
    )
    (tmp_path / "in/f.jsonl").write_text('{"text": "new"}\n')
    mdata.preprocess(replace(job(tmp_path, overwrite=True), shard="5/5"))
    told = refused(tmp_path, "these are not parts of one job")
    assert "part 2: append_eod was True, is False" in told
    assert "part 3: " in told and "part 5: the list of inputs was" in told and "part 4" not in told


def test_a_file_that_changed_between_two_parts_is_named(tmp_path):
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path), 4)
    text = (tmp_path / "in/a.jsonl").read_text()
    (tmp_path / "in/a.jsonl").write_text(text.replace("line 250", "LINE 250").replace("line 30 ", "LINE 30 "))
    with pytest.raises(UsageError, match="has changed since"):
        mdata.preprocess(replace(job(tmp_path), shard="1/4"))
    mdata.preprocess(replace(job(tmp_path, overwrite=True), shard="1/4"))
    told = refused(tmp_path, r"a\.jsonl is not what part 3 read")
    assert "make part 3 again, with --overwrite" in told
    mdata.preprocess(replace(job(tmp_path, overwrite=True), shard="3/4"))
    merge(str(tmp_path / "out/c"), copy=True)
    whole_run(tmp_path)
    assert files_of(tmp_path / "out/c_text_document") == files_of(tmp_path / "one/c_text_document")


def test_what_is_there_already_is_not_replaced(tmp_path):
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path), 2)
    mdata.preprocess(replace(job(tmp_path), append_eod=False))
    for copy in (False, True):
        refused(tmp_path, "already exists and is not the merged corpus", copy=copy)
    (merged,) = merge(str(tmp_path / "out/c"), overwrite=True)
    assert not (tmp_path / "out/c_text_document.bin").exists() and not mdata.verify(merged.path).problems
    (copied,) = merge(str(tmp_path / "out/c"), copy=True, overwrite=True)
    assert everything(copied.path) == everything(copied.path) and len(copied.manifest.shards) == 1


def test_bad_rows_of_all_parts_are_counted_against_the_limit(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "good"}\n{"no": 1}\n' * 100)
    make_parts(job(tmp_path, on_error="skip", max_errors="40"), 4)
    with pytest.raises(BadInputError, match="100 of 200 rows"):
        merge(str(tmp_path / "out/c"))
    with pytest.raises(BadInputError, match="100 of 200 rows"):
        merge(str(tmp_path / "out/c"), max_errors="49.9%")
    with pytest.raises(UsageError, match="max_errors=half\n  expected: a number of rows"):
        merge(str(tmp_path / "out/c"), max_errors="half")
    merge(str(tmp_path / "out/c"), max_errors="50%")


@pytest.mark.parametrize("copy", [False, True], ids=["reference", "copy"])
def test_a_merge_that_fails_anywhere_leaves_nothing_finished(tmp_path, monkeypatch, copy):
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path), 2)
    path = tmp_path / "out/c_text_document.json"
    with durable_calls(monkeypatch) as calls:
        merge(str(tmp_path / "out/c"), copy=copy)
    made = path.read_bytes()
    for number in range(len(calls.seen)):
        for one in (tmp_path / "out").glob("c_text_document*"):
            one.unlink()
        with durable_calls(monkeypatch, number), pytest.raises(mdata.MdataError):
            merge(str(tmp_path / "out/c"), copy=copy)
        # A manifest that is there is true; hidden files are taken over by the next merge.
        assert not path.exists() or path.read_bytes() == made
        merge(str(tmp_path / "out/c"), copy=copy, overwrite=True)
        assert path.read_bytes() == made and not mdata.verify(path, full=True).problems
    assert len(calls.seen) > 5


def test_parts_beside_their_whole_are_left_out_of_a_folder(tmp_path):
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path), 3)
    for copy in (True, False):
        merge(str(tmp_path / "out/c"), copy=copy, overwrite=True)
        blend = mdata.make_blend([str(tmp_path / "out")], tmp_path / f"{copy}.json")
        assert [part.path for part in blend.manifest.components] == ["out/c_text_document.json"]
    (tmp_path / "out/c_text_document.json").unlink()
    assert len(mdata.make_blend([str(tmp_path / "out")], tmp_path / "parts.json").manifest.components) == 3


@examples(200)
@given(numbers=st.sets(st.integers(1, 60)))
def test_ranges_say_the_numbers(numbers):
    runs = [list(map(int, run.split("-"))) for run in as_ranges(sorted(numbers)).split(",") if run]
    assert [number for run in runs for number in range(run[0], run[-1] + 1)] == sorted(numbers)


def test_the_blocks_of_runs_are_joined_in_any_size(tmp_path, monkeypatch):
    write_mix(tmp_path / "in")
    whole_run(tmp_path, holdout="0.5")
    make_parts(job(tmp_path, holdout="0.5"), 3)
    monkeypatch.setattr(merging, "_RUNS_AT_ONCE", 3)
    merge(str(tmp_path / "out/c"), copy=True)
    assert files_of(tmp_path / "out/c_text_document") == files_of(tmp_path / "one/c_text_document")


def test_the_command_line(tmp_path, capsys):
    write_mix(tmp_path / "in")
    make_parts(job(tmp_path), 3)
    assert main(["merge", str(tmp_path / "out/c"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["corpora"]
    assert row["parts"] == 3 and not row["there_before"]
    assert main(["merge", str(tmp_path / "out/c"), "--copy"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "out/c")]) == 0
    assert "nothing was done" in capsys.readouterr().err
