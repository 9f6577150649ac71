"""Mistakes of users: results as input, links, lost sidecars, scripts without a __main__ guard, wrong types."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mdata
from mdata import BadInputError, ResourceError, UsageError
from mdata.preprocessing.worker_pool import WorkerPool
from mdata.sources.chunk import chunks
from mdata.sources.record_batch import ReadSpec
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.base.tokenizer_folder import write_folder
from mdata.tokenizers.registry import load_tokenizer
from tests.mdata.preprocessing.test_preprocess import GOLDEN, contents, options
from tests.mdata.sources.inputs import find_files


def lines(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_an_input_is_never_overwritten_by_a_result(tmp_path):
    path = lines(tmp_path / "out_text_document.json", "one")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is an input and would be overwritten"):
        mdata.preprocess(options(tmp_path, input=(str(path),)))
    assert path.read_bytes() == before


def test_results_beside_the_input_are_not_input(tmp_path):
    lines(tmp_path / "in" / "x.jsonl", "one", "two")
    for _ in range(2):
        result = mdata.preprocess(options(tmp_path / "in", input=(str(tmp_path / "in"),)))
        assert [file.path for file in result.manifests["text"].provenance.inputs] == [str(tmp_path / "in" / "x.jsonl")]
    assert result.finished_before


@pytest.mark.parametrize("name", ["out_text_document.json", "out_text_document.bin", "device"])
def test_a_quarantine_is_a_file_of_its_own(tmp_path, name):
    if name == "device":
        os.mkfifo(tmp_path / name)
    job = options(tmp_path, on_error="quarantine", quarantine=str(tmp_path / name))
    with pytest.raises(UsageError, match=r"is one of the results|is not a regular file"):
        mdata.preprocess(job)


def test_links_in_a_folder_are_followed_once(tmp_path):
    lines(tmp_path / "other" / "y.jsonl", "linked")
    lines(tmp_path / "in" / "x.jsonl", "plain")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    result = mdata.preprocess(options(tmp_path, input=(str(tmp_path / "in"),)))
    assert result.manifests["text"].shards[0].documents == 2
    (tmp_path / "in" / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"gone\.jsonl"):
        mdata.preprocess(options(tmp_path / "again", input=(str(tmp_path / "in"),)))


@pytest.mark.parametrize("lost", ["out_text_document.origins", "out_text_document.blake3", "tokenizer"])
def test_a_lost_sidecar_is_made_again(tmp_path, lost):
    job = options(tmp_path)
    mdata.preprocess(job)
    whole = contents(tmp_path)
    if lost == "tokenizer":
        (path,) = tmp_path.glob("tokenizer-*/tokenizer.json")
        path.unlink()
    else:
        (tmp_path / lost).unlink()
    assert not mdata.preprocess(job).finished_before
    assert contents(tmp_path) == whole


def test_a_finished_result_with_too_many_bad_rows_is_refused_later(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\nbad\n')
    mdata.preprocess(options(tmp_path, input=(str(path),), on_error="skip"))
    with pytest.raises(BadInputError, match="too many bad rows"):
        mdata.preprocess(options(tmp_path, input=(str(path),), on_error="skip", max_errors="0"))


def test_a_tokenizer_folder_has_one_writer_at_a_time(tmp_path):
    files = {f"{i}.json": str(i).encode() * 1000 for i in range(5)}
    with ThreadPoolExecutor(4) as threads:
        for round in range(20):
            folder = tmp_path / str(round)
            list(threads.map(lambda _, folder=folder: write_folder(folder, files), range(4)))
            assert contents(folder) == files


def test_workers_that_never_began_are_named():
    tokenizer = load_tokenizer(TokenizerSpec(type="ByteTokenizer"))
    (file,) = find_files((str(GOLDEN / "corpus.jsonl"),))
    work = chunks([file], 1 << 20, spec=ReadSpec())
    with WorkerPool(2) as pool:
        pool._fork_server.process.kill()
        pool._fork_server.process.join()
        with pytest.raises(ResourceError, match=r"(?s)a worker process died while it read .*found: signal 9"):
            list(pool.encode(work, tokenizer, spec=None))


def _in_a_daemon(folder: str) -> int:
    job = options(Path(folder), workers=2, chunk_bytes=100)
    return mdata.preprocess(job).manifests["text"].shards[0].documents


def test_a_process_that_may_start_none_does_the_work_itself(tmp_path):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_in_a_daemon, (str(tmp_path),)) == 10


def test_a_script_needs_no_guard(tmp_path):
    (tmp_path / "run.py").write_text(
        "import sys, mdata\n"
        "mdata.preprocess(mdata.PreprocessOptions(input=(sys.argv[1],), output_prefix=sys.argv[2],\n"
        "    tokenizer_type='ByteTokenizer', workers=2, chunk_bytes=100))\n"
        "print('once')\n"
    )
    words = [str(GOLDEN / "corpus.jsonl"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), *words], capture_output=True, text=True, cwd=GOLDEN.parents[1]
    )
    assert (done.stdout, done.stderr, done.returncode) == ("once\n", "", 0)


def test_one_input_may_be_a_text_or_a_path(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one"}\n')
    for number, input in enumerate((path, str(path), [path])):
        prefix = str(tmp_path / str(number))
        (manifest,) = mdata.preprocess(options(tmp_path, input=input, output_prefix=prefix)).manifests.values()
        assert manifest.provenance.records == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"workers": "2"}, "workers='2'"),
        ({"workers": True}, "workers=True"),
        ({"holdout": 0.1}, "holdout=0.1"),
        ({"holdout": "0." + "1" * 5000}, r"holdout=0\.1{58}\n.*at most 30 digits"),
        ({"max_errors": "0." + "1" * 5000 + "%", "on_error": "skip"}, r"max_errors=0\.1{58}\n.*at most 30"),
        ({"max_errors": "1" * 5000, "on_error": "skip"}, r"max_errors=1{60}\n.*at most 18 digits"),
        ({"max_errors": 5, "on_error": "skip"}, "max_errors=5"),
        ({"output_prefix": Path("x")}, "output_prefix="),
        ({"max_record_bytes": 1e6}, "max_record_bytes=1000000.0"),
        ({"text_documents": "line"}, "text_documents='line'"),
        ({"input": b"x.jsonl"}, "input=b'x.jsonl'"),
        ({"input": 5}, "input=5"),
        ({"json_keys": "text"}, "json_keys='text'"),
        ({"input": ("",)}, "an input has no name"),
    ],
)
def test_wrong_types_are_refused_by_name(tmp_path, changes, text):
    with pytest.raises(UsageError, match=text):
        mdata.preprocess(options(tmp_path, **changes))
    assert contents(tmp_path) == {}
