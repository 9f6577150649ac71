"""Interrupted runs: at every write, sync and rename, by signals, by full disks; and how they are continued.

A crash is a child process that ends by os._exit at the n-th call that reaches the disk: no handler runs, as
with kill -9.
"""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import mdata
from mdata import BadInputError, MdataError, ResourceError, UsageError
from mdata.progress import Silent
from mdata.util import atomic_io, file_lock
from tests.helpers.examples import SOAK, soaked
from tests.helpers.failures import assert_what_is_visible_is_true, crash_at, durable_calls
from tests.helpers.notes import Notes
from tests.mdata.preprocessing.test_preprocess import GOLDEN, contents, options

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("loaded_once")]


def corpus(folder: Path) -> tuple[str, ...]:
    """Three inputs: plain, packed, plain; with a bad row in each."""
    folder.mkdir(exist_ok=True)
    generator = random.Random(7)
    texts = []
    for _ in range(3):
        rows = [{"text": "x" * generator.randrange(30), "b": [f"word {i}", "z"]} for i in range(15)]
        lines = [json.dumps(row) for row in rows]
        lines.insert(generator.randrange(15), '{"text": 3}')
        texts.append("\n".join(lines).encode())
    (folder / "0.jsonl").write_bytes(texts[0])
    (folder / "1.jsonl.gz").write_bytes(gzip.compress(texts[1], mtime=0))
    (folder / "2.jsonl").write_bytes(texts[2])
    return tuple(str(folder / name) for name in ("0.jsonl", "1.jsonl.gz", "2.jsonl"))


def whole_job(inputs: tuple[str, ...], folder: Path) -> mdata.PreprocessOptions:
    """Everything that leaves files: two keys, a held-out share, a quarantine; a record after every chunk."""
    return options(
        folder,
        input=inputs,
        json_keys=("text", "b"),
        append_eod=True,
        holdout="0.3",
        on_error="quarantine",
        quarantine=str(folder / "bad.jsonl"),
        chunk_bytes=300,
        checkpoint_s=0,
        workers=1,
    )


@pytest.mark.scaled
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_crash_at_any_call_loses_nothing(tmp_path, monkeypatch, partitions):
    inputs = corpus(tmp_path / "in")

    def job(folder: Path) -> mdata.PreprocessOptions:
        return options(folder, **{**vars(whole_job(inputs, folder)), "partitions": partitions})

    with durable_calls(monkeypatch) as seen:
        mdata.preprocess(job(tmp_path / "whole"))
    expected = contents(tmp_path / "whole")
    resumed = 0
    total = len(seen.seen)
    # The last ones are cases of their own.
    points = sorted({*range(0, total, 1 if SOAK > 1 else 53), *range(total - 3, total)})
    for n in points:
        folder = tmp_path / str(n)
        assert crash_at(n, lambda folder=folder: mdata.preprocess(job(folder)))
        assert_what_is_visible_is_true(folder)
        notes = Notes()
        result = mdata.preprocess(job(folder), notes)
        resumed += result.resumed
        assert contents(folder) == expected, n
    assert total > 100 and resumed > len(points) / 2


@pytest.mark.scaled
def test_a_kill_before_each_rename_shows_no_pair_without_its_manifest(tmp_path):
    inputs = corpus(tmp_path / "in")
    mdata.preprocess(whole_job(inputs, tmp_path / "whole"))
    expected = contents(tmp_path / "whole")
    for n in itertools.count(0, 1 if SOAK > 1 else 3):
        folder = tmp_path / str(n)
        if not crash_at(n, lambda folder=folder: mdata.preprocess(whole_job(inputs, folder)), calls=["rename"]):
            break
        assert_what_is_visible_is_true(folder)
        mdata.preprocess(whole_job(inputs, folder))
        assert contents(folder) == expected, n
    assert n >= 20


@pytest.mark.scaled
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_call_is_typed_and_loses_nothing(tmp_path, monkeypatch, code):
    inputs = corpus(tmp_path / "in")
    with durable_calls(monkeypatch) as seen:
        mdata.preprocess(whole_job(inputs, tmp_path / "whole"))
    expected = contents(tmp_path / "whole")
    step = 1 if SOAK > 1 else 29
    for n in range(0, len(seen.seen), step):
        folder = tmp_path / str(n)
        with durable_calls(monkeypatch, n, code=code), pytest.raises(ResourceError, match=os.strerror(code)):
            mdata.preprocess(whole_job(inputs, folder))
        assert_what_is_visible_is_true(folder)
        mdata.preprocess(whole_job(inputs, folder))
        assert contents(folder) == expected, (n, seen.seen[n])


class InterruptAt(Notes):
    """Ctrl-C when the n-th chunk was taken."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def stages(self, **seconds: float) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_an_interrupt_at_any_chunk_loses_nothing(tmp_path):
    inputs = corpus(tmp_path / "in")
    mdata.preprocess(whole_job(inputs, tmp_path / "whole"))
    expected = contents(tmp_path / "whole")
    for n in range(1, 8):
        folder = tmp_path / str(n)
        notes = InterruptAt(n)
        with pytest.raises(KeyboardInterrupt):
            mdata.preprocess(whole_job(inputs, folder), notes)
        assert any("rows kept for the next run: " in line for line in notes.lines)
        notes = Notes()
        assert mdata.preprocess(whole_job(inputs, folder), notes).resumed
        assert any("continuing an earlier run" in line for line in notes.lines)
        assert contents(folder) == expected


def interrupted(job: mdata.PreprocessOptions, chunks: int = 4) -> None:
    with pytest.raises(KeyboardInterrupt):
        mdata.preprocess(job, InterruptAt(chunks))


def lines_of(job: mdata.PreprocessOptions) -> tuple[bool, str]:
    notes = Notes()
    return mdata.preprocess(job, notes).resumed, "\n".join(notes.lines)


def test_what_changed_is_named_and_starts_anew(tmp_path):
    inputs = corpus(tmp_path / "in")
    changes = {"append_eod": False, "json_keys": ("text", "b"), "holdout": "0.2", "max_record_bytes": 1 << 20}
    for name, value in changes.items():
        folder = tmp_path / name
        interrupted(whole_job(inputs, folder))
        job = options(folder, **{**vars(whole_job(inputs, folder)), name: value})
        resumed, said = lines_of(job)
        if name == "json_keys":
            assert resumed
        else:
            assert not resumed and f"{name} was " in said and "starting from the beginning" in said


def test_another_tokenizer_is_named_in_one_short_line(tmp_path):
    inputs = corpus(tmp_path / "in")
    interrupted(whole_job(inputs, tmp_path / "out"))
    changes = {"tokenizer_type": "ByteTokenizer", "tokenizer_model": None}
    resumed, said = lines_of(options(tmp_path / "out", **{**vars(whole_job(inputs, tmp_path / "out")), **changes}))
    assert not resumed and len(said.splitlines()[0]) < 200
    assert "tokenizer was " in said and "..., is " in said


def test_options_that_do_not_decide_content_may_change(tmp_path):
    inputs = corpus(tmp_path / "in")
    mdata.preprocess(whole_job(inputs, tmp_path / "whole"))
    folder = tmp_path / "out"
    interrupted(whole_job(inputs, folder))
    job = options(folder, **{**vars(whole_job(inputs, folder)), "workers": 2, "checkpoint_s": 5.0})
    resumed, _ = lines_of(job)
    assert resumed and contents(folder) == contents(tmp_path / "whole")


def test_an_input_that_only_looks_new_is_compared_and_continued(tmp_path):
    inputs = corpus(tmp_path / "in")
    folder = tmp_path / "out"
    interrupted(whole_job(inputs, folder))
    os.utime(inputs[0], (1, 1))
    resumed, said = lines_of(whole_job(inputs, folder))
    assert resumed and "reading" in said and "to see whether it changed" in said
    manifest = mdata.load_manifest(folder / "out_text_document.json")
    assert manifest.provenance.inputs[0].modified_ns == 10**9


def test_a_changed_input_of_the_same_size_and_time_needs_verify_input(tmp_path):
    inputs = corpus(tmp_path / "in")
    path = Path(inputs[0])
    facts = path.stat()
    for verify in (False, True):
        folder = tmp_path / str(verify)
        before = path.read_bytes()
        interrupted(whole_job(inputs, folder))
        path.write_bytes(before.replace(b"word 1", b"WORD 1"))
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        job = options(folder, **{**vars(whole_job(inputs, folder)), "verify_input": verify})
        resumed, said = lines_of(job)
        assert resumed is not verify
        assert ("has changed since" in said) is verify
        path.write_bytes(before)
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_a_mended_row_is_continued_after(tmp_path):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(90)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([*lines[:70], '{"text": 7}', *lines[71:]]))
    job = options(tmp_path / "out", input=(str(path),), chunk_bytes=100, workers=1)
    with pytest.raises(BadInputError, match=r"in\.jsonl:71: key 'text' holds a number"):
        mdata.preprocess(job)
    path.write_text("\n".join([*lines[:70], '{"text": "seven"}', *lines[71:]]))
    assert lines_of(job)[0]
    mdata.preprocess(options(tmp_path / "whole", input=(str(path),), chunk_bytes=100))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_finished_run_has_nothing_to_do(tmp_path):
    inputs = corpus(tmp_path / "in")
    job = whole_job(inputs, tmp_path / "out")
    mdata.preprocess(job)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    notes = Notes()
    assert mdata.preprocess(job, notes).finished_before
    assert "nothing is tokenized again" in notes.lines[-1]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert mdata.preprocess(replace(job, overwrite=True)).finished_before


def test_a_named_engine_replaces_the_result_of_another(tmp_path):
    """For results that a fast engine got wrong; without --overwrite the engine is no reason."""
    job = whole_job(corpus(tmp_path / "in"), tmp_path / "out")
    mdata.preprocess(replace(job, engine="gigatoken"))
    manifest = tmp_path / "out" / "out_text_document.json"
    assert json.loads(manifest.read_text())["notes"] == {"engine": "gigatoken"}
    before, notes = contents(tmp_path / "out"), Notes()
    exact = replace(job, engine="tokenizers")
    assert mdata.preprocess(exact).finished_before
    assert mdata.preprocess(replace(job, overwrite=True)).finished_before
    assert not mdata.preprocess(replace(exact, overwrite=True), notes).finished_before
    assert any("will be replaced: engine was gigatoken, is tokenizers" in line for line in notes.lines)
    assert mdata.preprocess(replace(exact, overwrite=True)).finished_before
    after = contents(tmp_path / "out")
    assert {name for name in after if after[name] != before[name]} <= {name for name in after if name.endswith(".json")}


def test_a_named_engine_does_not_continue_what_another_began(tmp_path):
    """With --overwrite; without it the run is continued, since the ids are the same."""
    job = whole_job(corpus(tmp_path / "in"), tmp_path / "out")
    exact = replace(job, engine="tokenizers")
    for overwrite in (False, True):
        assert crash_at(100, lambda: mdata.preprocess(replace(job, engine="gigatoken")), removals=True)
        notes = Notes()
        assert mdata.preprocess(replace(exact, overwrite=overwrite), notes).resumed != overwrite
        assert any("not continued: engine was gigatoken, is tokenizers" in line for line in notes.lines) == overwrite
        shutil.rmtree(tmp_path / "out")


def test_a_named_engine_replaces_partitions_and_what_is_merged_of_them(tmp_path):
    job = replace(whole_job(corpus(tmp_path / "in"), tmp_path / "out"), partitions=2)
    mdata.preprocess(replace(job, engine="gigatoken"))
    exact = replace(job, engine="tokenizers", overwrite=True)
    mdata.preprocess(exact)
    notes = {path.name: json.loads(path.read_text())["notes"] for path in (tmp_path / "out").glob("*_document.json")}
    assert all(note == {"engine": "tokenizers"} for note in notes.values())
    assert {"out_0_text_document.json", "out_text_document.json"} <= notes.keys()
    assert mdata.preprocess(exact).finished_before


def test_other_results_are_replaced_only_when_that_is_asked_for(tmp_path):
    """Of other options, other input, another program, or of nobody knows whom; the quarantine file too."""
    inputs, folder = corpus(tmp_path / "in"), tmp_path / "out"
    job = whole_job(inputs, folder)
    mdata.preprocess(job)
    before = contents(folder)
    others = {
        r"out_text_document\.json: append_eod was True, is False": replace(job, append_eod=False),
        "it was made from 3 inputs; this command gives 2": replace(job, input=inputs[:2]),
        "the input was .*0\\.jsonl, is .*other": replace(job, input=(str(tmp_path / "other.jsonl"), *inputs[1:])),
        "tokenizer was ": replace(job, tokenizer_type="ByteTokenizer", tokenizer_model=None),
    }
    shutil.copy(inputs[1], tmp_path / "other.jsonl.gz")
    shutil.copy(inputs[0], tmp_path / "other.jsonl")
    for said, other in others.items():
        with pytest.raises(UsageError, match=rf"{said}(.|\n)*try: .*--overwrite"):
            mdata.preprocess(other)
        assert contents(folder) == before
    (other,) = [other for said, other in others.items() if "append_eod" in said]
    notes = Notes()
    assert not mdata.preprocess(replace(other, overwrite=True), notes).finished_before
    assert any("will be replaced: append_eod was True, is False" in line for line in notes.lines)
    assert mdata.preprocess(other).finished_before


@pytest.mark.parametrize("names", [("x.bin", "x.idx"), ("x.idx",), ("x.bin",), ("x.json",), ("bad.jsonl",)])
def test_files_of_unknown_origin_are_not_replaced(tmp_path, names):
    """A pair of Megatron's own tool, whose names ours are; what is left of one; rows that another run kept."""
    inputs = corpus(tmp_path / "in")
    job = whole_job(inputs, tmp_path / "out")
    (tmp_path / "out").mkdir()
    there = {re.sub("^x", "out_b_document", name): b"precious" for name in names}
    for name, data in there.items():
        (tmp_path / "out" / name).write_bytes(data)
    with pytest.raises(UsageError, match="other results already exist"):
        mdata.preprocess(job)
    assert contents(tmp_path / "out") == there
    mdata.preprocess(replace(job, overwrite=True))
    mdata.preprocess(whole_job(inputs, tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_finished_run_in_a_folder_that_cannot_be_written_is_finished(tmp_path, monkeypatch):
    job = whole_job(corpus(tmp_path / "in"), tmp_path / "out")
    mdata.preprocess(job)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing needs to be written here")

    for module, name in ((file_lock, "hold"), (file_lock, "open_locked"), (atomic_io, "atomic_write")):
        monkeypatch.setattr(module, name, refuse)
    assert mdata.preprocess(job).finished_before


def test_damage_of_a_finished_run_is_mended_by_running_again(tmp_path):
    inputs = corpus(tmp_path / "in")
    job = whole_job(inputs, tmp_path / "out")
    mdata.preprocess(job)
    expected = contents(tmp_path / "out")
    for name in expected:
        path = tmp_path / "out" / name
        if name.endswith((".json", ".jsonl")) or "/" in name:
            continue
        for data in (None, path.read_bytes()[:-1]):
            path.unlink() if data is None else path.write_bytes(data)
            notes = Notes()
            assert not mdata.preprocess(job, notes).finished_before, name
            assert any("will be written again" in line for line in notes.lines)
            assert contents(tmp_path / "out") == expected
    path = tmp_path / "out" / "out_text_document.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="truncated, or not JSON"):  # whose it is, nobody can say
        mdata.preprocess(job)
    mdata.preprocess(replace(job, overwrite=True))
    assert contents(tmp_path / "out") == expected


def test_a_lost_file_in_the_making_starts_anew(tmp_path):
    inputs = corpus(tmp_path / "in")
    mdata.preprocess(whole_job(inputs, tmp_path / "whole"))
    folder = tmp_path / "out"
    interrupted(whole_job(inputs, folder))
    (folder / ".out_b_document.lengths.partial").unlink()
    _, said = lines_of(whole_job(inputs, folder))
    assert "cannot be continued" in said
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_second_run_names_the_first(tmp_path):
    inputs = corpus(tmp_path / "in")
    job = whole_job(inputs, tmp_path / "out")

    class Again(Silent):
        asked = False

        def advance(self, amount: int, **totals: float) -> None:
            if not self.asked:
                self.asked = True
                with pytest.raises(
                    UsageError, match=rf"another run is writing there\n  found: process {os.getpid()} on "
                ):
                    mdata.preprocess(job)

    again = Again()
    mdata.preprocess(job, again)
    assert again.asked


def test_a_lock_of_a_dead_process_is_taken_over(tmp_path):
    inputs = corpus(tmp_path / "in")
    job = whole_job(inputs, tmp_path / "out")
    assert crash_at(40, lambda: mdata.preprocess(job))
    lock = tmp_path / "out" / ".out_text+b.lock"
    assert lock.read_text().startswith("process ")
    mdata.preprocess(job)
    assert not lock.exists()


def test_where_locks_are_unknown_the_holder_is_judged_by_its_life(tmp_path, monkeypatch):
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(file_lock.fcntl, "flock", no_locks)
    path = tmp_path / "lock"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host = os.uname().nodename
    path.write_text(f"process {child.pid} on {host}")
    with pytest.raises(UsageError, match=f"process {child.pid} on"), file_lock.hold(path):
        pass
    child.communicate(b"\n")
    with file_lock.hold(path):
        pass
    path.write_text("process 1 on another-host")
    with pytest.raises(UsageError, match="another-host"), file_lock.hold(path):
        pass


COMMAND = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(GOLDEN / "tokenizer")]


def command(inputs: str, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-c", "from cli.mdata import main; raise SystemExit(main())", "preprocess"),
        *("--input", inputs, "--output-prefix", str(folder / "out"), "--workers", "2", "--append-eod"),
        *COMMAND,
    ]


@pytest.mark.parametrize(
    ("stop", "code"),
    soaked(
        [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
        but=[(signal.SIGTERM, 75), (signal.SIGKILL, -9)],
    ),
)
def test_signals_stop_a_run_that_then_continues(tmp_path, stop, code):
    """A whole process with workers; it is stopped when its first files are there."""
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps({"text": f"some words {i} of text " * 40}) + "\n" for i in range(12_000)))
    whole, folder = tmp_path / "whole", tmp_path / "out"
    subprocess.run(command(str(source), whole), check=True, capture_output=True)
    process = subprocess.Popen(command(str(source), folder), stderr=subprocess.PIPE, text=True)
    partial = folder / ".out_text_document.bin.partial"
    while process.poll() is None and not (partial.exists() and partial.stat().st_size > 3_000_000):
        time.sleep(0.01)
    process.send_signal(stop)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert "Traceback" not in said
    assert not (folder / "out_text_document.bin").exists()
    again = subprocess.run(command(str(source), folder), check=True, capture_output=True, text=True)
    # A stop in the middle of an append keeps what the last record kept: in this short run, nothing.
    assert ("continuing an earlier run" in again.stderr) is ("rows kept for the next run: " in said)
    assert contents(folder) == contents(whole)


@contextmanager
def stdin_of(data: bytes, folder: Path) -> Iterator[None]:
    (folder / "stdin").write_bytes(data)
    before = os.dup(0)
    with (folder / "stdin").open("rb") as file:
        os.dup2(file.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(before, 0)
            os.close(before)


def test_standard_input_is_compared_on_the_way(tmp_path):
    data = b"".join(json.dumps({"text": f"line {i}"}).encode() + b"\n" for i in range(60))
    for name, fed, error in (
        ("same", data, None),
        ("other", data.replace(b"line 2", b"LINE 2"), "differs from what was read"),
    ):
        job = options(tmp_path / name, input=("-",), chunk_bytes=100, checkpoint_s=0, workers=1)
        with stdin_of(data, tmp_path):
            interrupted(job)
        with stdin_of(fed, tmp_path):
            if error:
                with pytest.raises(MdataError, match=error):
                    mdata.preprocess(job)
            else:
                assert mdata.preprocess(job).resumed
