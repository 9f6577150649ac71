"""Parts in object storage are merged there, and jobs launched into it: documents, bytes and ids of one machine."""

from __future__ import annotations

import itertools
import json
from functools import partial

import pytest

import mdata
from cli.mdata import main
from mdata.corpus.documents import DocumentReader
from mdata.errors import DamageError, UsageError
from mdata.launching.job_folder import load_job
from mdata.object_storage import uploading
from mdata.object_storage.address import parse_address
from mdata.object_storage.reading import list_objects
from mdata.object_storage.uploading import put_file, remove_object
from mdata.preprocessing import uploads
from mdata.rewriting import stored_merge
from mdata.rewriting.stored_merge import merge_stored
from tests.helpers.examples import SOAK, soaked
from tests.helpers.failures import killed_at
from tests.mdata.object_storage.test_preprocess_objects import run, stored

RESULTS = (".bin", ".idx", ".json", ".origins", ".blake3")


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, count in (("a", 700), ("b", 200)):
        lines = [json.dumps({"text": f"{name} {number} " * (number % 30)}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def parts(bucket, texts, tmp_path):
    """The output prefix of three parts in storage, and that of one run on a disk."""
    for number in (1, 2, 3):
        run([texts], f"{bucket}/out/x", work_folder=str(tmp_path / "work"), shard=f"{number}/3", holdout="0.1")
    (tmp_path / "one").mkdir()
    run([texts], tmp_path / "one/x", holdout="0.1")
    return f"{bucket}/out/x", tmp_path / "one/x"


def names(bucket):
    return {one.address.key for one in list_objects(parse_address(f"{bucket}/"))}


def everything(path):
    documents = DocumentReader(mdata.open_corpus(path))
    return [(documents.corpus.document(n).tolist(), documents.origin(n)) for n in range(documents.corpus.num_documents)]


def test_by_reference_only_origins_and_manifests_are_written(bucket, parts, tmp_path):
    prefix, one = parts
    before = names(bucket)
    merged = merge_stored(prefix)
    assert [str(each.path) for each in merged] == [
        f"{prefix}_holdout_text_document.json",
        f"{prefix}_text_document.json",
    ]
    added = {f"out/x{result}_text_document{end}" for result in ("", "_holdout") for end in (".json", ".origins")}
    assert names(bucket) == before | added
    for each in merged:
        name = each.path.name
        assert main(["fetch", str(each.path), "--output", str(tmp_path / "copy")]) == 0
        assert everything(tmp_path / "copy" / name) == everything(one.with_name(name))
        assert not mdata.verify(tmp_path / "copy" / name, full=True).problems
    received = {name: stored(f"{bucket}/{name}") for name in added}
    assert all(each.there_before for each in merge_stored(prefix))
    assert received == {name: stored(f"{bucket}/{name}") for name in added}


def test_a_copy_has_the_files_and_the_id_of_one_run(bucket, parts, tmp_path):
    prefix, one = parts
    merged = merge_stored(prefix, copy=True, work_folder=tmp_path / "merging")
    for each in merged:
        stem = each.path.name.removesuffix(".json")
        for ending in RESULTS:
            assert stored(f"{bucket}/out/{stem}{ending}") == one.with_name(stem + ending).read_bytes()
    assert not list((tmp_path / "merging").iterdir())
    assert all(each.there_before for each in merge_stored(prefix, copy=True, work_folder=tmp_path / "merging"))
    with pytest.raises(UsageError, match=f"{prefix}_holdout_text_document.json already exists and is not the merged"):
        merge_stored(prefix)
    merge_stored(prefix, overwrite=True)
    assert "out/x_text_document.bin" not in names(bucket) and "out/x-00001-of-00003_text_document.bin" in names(bucket)


def test_a_copy_that_failed_while_it_uploads_continues(bucket, parts, tmp_path, monkeypatch):
    prefix, one = parts
    real, sent = uploading.put_file, []

    def fails(path, address, **more):
        sent.append(path.name)
        if len(sent) == 4:
            raise mdata.ResourceError("the network is gone")
        return real(path, address, **more)

    monkeypatch.setattr("mdata.preprocessing.uploads.put_file", fails)
    with pytest.raises(mdata.ResourceError, match="the network is gone"):
        merge_stored(prefix, copy=True, work_folder=tmp_path / "merging")
    assert not {"out/x_holdout_text_document.json", "out/x_text_document.json"} & names(bucket)
    monkeypatch.setattr("mdata.corpus.fetch.read_range", lambda *_, **__: pytest.fail("a block was fetched again"))
    for each in merge_stored(prefix, copy=True, work_folder=tmp_path / "merging"):
        stem = each.path.name.removesuffix(".json")
        assert stored(f"{bucket}/out/{stem}.bin") == one.with_name(f"{stem}.bin").read_bytes()


@pytest.mark.scaled
@pytest.mark.parametrize("copy", [False, True], ids=["reference", "copy"])
def test_a_merge_that_is_killed_before_any_call_continues(bucket, parts, tmp_path, copy):
    prefix, work = parts[0], tmp_path / "merging"
    again = partial(merge_stored, prefix, copy=copy, work_folder=work)
    before, calls = names(bucket), [(uploads, "put_file"), (uploads, "remove_object"), (stored_merge, "remove_objects")]
    again()
    expected = {name: stored(f"{bucket}/{name}") for name in names(bucket) - before}
    assert len(expected) == (10 if copy else 4) and not list(work.iterdir())
    for n in itertools.count(0, 1 if SOAK > 1 else 307 if copy else 89):
        for name in expected:
            remove_object(parse_address(f"{bucket}/{name}"))
        if not killed_at(n, again, also=calls):
            break
        there = names(bucket) - before
        for name in there:  # a manifest is there only with all that it names
            assert stored(f"{bucket}/{name}") == expected[name]
            stem = name.removesuffix(".json")
            assert stem == name or {one for one in expected if one.startswith(f"{stem}.")} <= there, n
        again()
        assert {name: stored(f"{bucket}/{name}") for name in names(bucket) - before} == expected
        assert not list(work.iterdir()), n
    assert n > 40


def test_what_an_earlier_merge_left_goes_whatever_the_name_has_in_it(bucket, texts, tmp_path):
    """Such as a pattern of names that does not match the name itself."""
    prefix, folder = f"{bucket}/out/x[1]", tmp_path / "merging" / "x[1].merge"
    for number in (1, 2):
        run([texts], prefix, work_folder=str(tmp_path / "work"), shard=f"{number}/2")
    folder.mkdir(parents=True)
    (folder / "x[1]_text_document.json").write_text("of other parts")
    (merged,) = merge_stored(prefix, work_folder=tmp_path / "merging")
    assert str(merged.path) == f"{prefix}_text_document.json" and not list((tmp_path / "merging").iterdir())


MISSING = [
    (ending, message, copy)
    for ending, message in (
        (".json", r"not all parts are finished(.|\n)*text_document: 1 of 3 are missing: 2"),
        (".bin", r"not all parts are complete\n  found: x-00002-of-00003_text_document.bin is missing"),
        (".idx", r"not all parts are complete\n  found: x-00002-of-00003_text_document.idx is missing"),
    )
    for copy in (False, True)
]


@pytest.mark.parametrize(("ending", "message", "copy"), soaked(MISSING, but=[MISSING[0], MISSING[3], MISSING[4]]))
def test_a_missing_object_of_a_part_is_named(bucket, parts, tmp_path, ending, message, copy):
    prefix, _ = parts
    remove_object(parse_address(f"{prefix}-00002-of-00003_text_document{ending}"))
    before = names(bucket)
    with pytest.raises(UsageError, match=message) as caught:
        merge_stored(prefix, work_folder=tmp_path / "merging", copy=copy)
    assert prefix in str(caught.value) and "merging" not in str(caught.value) and names(bucket) == before


def test_a_part_made_with_another_option_is_named(bucket, parts, texts, tmp_path):
    prefix, _ = parts
    how = {"work_folder": str(tmp_path / "work"), "shard": "2/3", "holdout": "0.1", "overwrite": True}
    run([texts], prefix, append_eod=True, **how)
    with pytest.raises(UsageError, match=r"these are not parts of one job\n  found: part 2: .*append_eod"):
        merge_stored(prefix)


def test_origins_that_are_damaged_are_found(bucket, parts, tmp_path):
    prefix, _ = parts
    (tmp_path / "wrong").write_bytes(stored(f"{prefix}-00003-of-00003_text_document.origins")[:-1] + b"?")
    put_file(tmp_path / "wrong", parse_address(f"{prefix}-00003-of-00003_text_document.origins"), file_hash=None)
    with pytest.raises(
        DamageError, match=r"00003-of-00003_text_document.origins: its hash does not match the manifest"
    ):
        merge_stored(prefix)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{bucket}/out/x", "--copy"], "no work folder is named for --copy"),
        (["{bucket}/nothing/x"], "no finished part was found"),
        (["s3://no-such-bucket-here/x"], "no-such-bucket-here"),
        (["https://example.invalid/x"], "mdata does not write to https://"),
        (["here/x", "--work-folder", "w"], "--work-folder w has no effect"),
    ],
)
def test_what_cannot_be_merged_is_refused_in_a_few_lines(parts, bucket, capsys, words, message):
    assert main(["merge", *(word.format(bucket=bucket) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) <= 5 and "Traceback" not in error


def launch(bucket, *words, parts=3, command=()):
    given = ["--input", "in", "--output-prefix", f"{bucket}/out/c", "--tokenizer-type", "ByteTokenizer", *command]
    return main(["launch", "local", *words, "--parts", str(parts), "--", "preprocess", *given])


@pytest.mark.parametrize("how", ["reference", pytest.param("copy", marks=pytest.mark.soak)])
def test_a_launched_job_writes_its_parts_and_the_merged_corpus_there(bucket, texts, tmp_path, monkeypatch, capsys, how):
    monkeypatch.chdir(tmp_path)
    work = ["--work-folder", "work"]
    assert launch(bucket, "--at-once", "2", "--merge", how, command=work) == 0, capsys.readouterr().err
    assert "3 of 3 parts run" in capsys.readouterr().out
    assert main(["status", "c.job"]) == 0
    assert "3 parts: 3 done; merged" in capsys.readouterr().out
    run(["in"], tmp_path / "one")
    assert main(["fetch", f"{bucket}/out/c_text_document", "--output", "copy"]) == 0
    assert everything(tmp_path / "copy/c_text_document.json") == everything(tmp_path / "one_text_document.json")
    assert not [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    capsys.readouterr()
    assert launch(bucket, "--at-once", "2", "--merge", how, command=work) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    remove_object(parse_address(f"{bucket}/out/c-00002-of-00003_text_document.idx"))
    assert load_job(tmp_path / "c.job").missing() == [2]
    assert launch(bucket, "--merge", how, command=work) == 0
    assert "1 of 3 parts run" in capsys.readouterr().out and load_job(tmp_path / "c.job").missing() == []


def test_a_launch_without_a_work_folder_is_refused_before_anything_starts(bucket, texts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert launch(bucket) == 2
    assert "no work folder is named" in capsys.readouterr().err
    assert not (tmp_path / "c.job").exists()


def test_one_work_folder_serves_parts_that_run_at_the_same_time(bucket, texts, tmp_path):
    """The tokenizer's files of one part stay while another is at work in the folder."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "tokenizer-of-another").mkdir()
    (work / ".another-part.journal").write_text("")
    run([texts], f"{bucket}/out/y", work_folder=str(work), shard="1/3")
    assert (work / "tokenizer-of-another").is_dir()
