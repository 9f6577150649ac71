"""Text in, text out: the same bytes however the work is divided or interrupted, rows kept as they are, and refusals."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from mdata.cleaning import text_job
from mdata.cleaning.clean import Cleaner, CleanRules, clean
from mdata.cleaning.rules import GopherRules, LengthRules
from mdata.cleaning.text_job import TextJobOptions
from mdata.dedup.row_set import RowSet
from mdata.errors import BadInputError, DamageError, ResourceError, UsageError
from mdata.preprocessing.preprocess_options import PreprocessOptions
from mdata.preprocessing.run import preprocess
from tests.helpers.failures import durable_calls

RULES = CleanRules(steps=("collapse", "length", "punctuation"), length=LengthRules(min_words=3, max_characters=5000))
DROPS = CleanRules(steps=("length",), length=LengthRules(min_words=3))


def texts(count: int, seed: int = 0) -> list[str]:
    draws = random.Random(seed)
    words = ["one", "two  ", "three\n\n", "four.", "\u201cfive\u201d", "six", ""]
    return [" ".join(draws.choices(words, k=draws.randrange(12))) for _ in range(count)]


def write(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(rows)))
    return path


def run(source: object, output: Path, rules: CleanRules = RULES, **options: object) -> text_job.TextJobResult:
    return clean(TextJobOptions(input=source, output=output, **{"workers": 1, **options}), rules)  # type: ignore[arg-type]


def content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.jsonl*")))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_job, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(text_job, "_CHECKPOINT_S", 0)


def test_rows_are_those_of_the_cleaner(tmp_path):
    rows = texts(300)
    source = write(tmp_path / "a.jsonl", rows)
    removed = tmp_path / "removed.jsonl"
    result = run(source, tmp_path / "out", removed=str(removed))
    cleaned, reasons = Cleaner(RULES).clean(rows, [])
    lines = source.read_bytes().splitlines()
    wanted = []
    for number, (before, after, reason) in enumerate(zip(rows, cleaned, reasons, strict=True)):
        if not reason and before == after:
            wanted.append(lines[number])
        elif not reason:
            wanted.append(json.dumps({"id": number, "text": after}, separators=(",", ":"), ensure_ascii=False).encode())
    assert (tmp_path / "out/a.jsonl").read_bytes().splitlines() == wanted
    assert Counter(result.removed) == Counter(reason for reason in reasons if reason)
    assert (result.rows, result.kept, result.bad) == (300, len(wanted), 0) and 0 < result.changed < result.kept
    fallen = [json.loads(line) for line in removed.read_text().splitlines()]
    assert fallen == [
        {"file": str(source), "row": number + 1, "reason": reason, "text": rows[number]}
        for number, reason in enumerate(reasons)
        if reason
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.jsonl", "clean.report"]
    before = (tmp_path / "out/clean.report").read_bytes()
    assert run(source, tmp_path / "out", removed=str(removed)) == result
    assert (tmp_path / "out/clean.report").read_bytes() == before


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_bytes_do_not_depend_on_workers(tmp_path, small_chunks, compression):
    source = write(tmp_path / "a.jsonl", texts(400))
    for workers in (1, 4):
        run(source, tmp_path / str(workers), workers=workers, compression=compression, removed=f"{tmp_path}/{workers}r")
    assert content(tmp_path / "1") == content(tmp_path / "4") != b""
    assert (tmp_path / "1r").read_bytes() == (tmp_path / "4r").read_bytes()
    unpack = {"none": bytes, "gzip": gzip.decompress, "zstd": _decompressed}[compression]
    run(source, tmp_path / "plain")
    assert unpack(content(tmp_path / "1")) == content(tmp_path / "plain")


def _decompressed(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()


def test_bytes_do_not_depend_on_parts(tmp_path, small_chunks):
    rows = texts(400)
    whole = write(tmp_path / "a.jsonl", rows)
    run(whole, tmp_path / "whole")
    lines = whole.read_bytes().splitlines(keepends=True)
    for parts in (2, 7):
        folder = tmp_path / f"in{parts}"
        folder.mkdir()
        for number, part in enumerate(np.array_split(np.arange(len(lines)), parts)):
            (folder / f"{number}.jsonl").write_bytes(b"".join(lines[line] for line in part))
        run(folder, tmp_path / str(parts))
        assert content(tmp_path / str(parts)) == content(tmp_path / "whole")


@pytest.mark.parametrize("count", [1, 2, 7])
def test_parts_in_order_are_the_whole(tmp_path, small_chunks, count):
    sources = [write(tmp_path / f"{name}.jsonl", texts(150, seed)) for seed, name in enumerate("abc")]
    packed = tmp_path / "d.jsonl.gz"
    packed.write_bytes(gzip.compress(sources[0].read_bytes()))
    whole = run([*sources, packed], tmp_path / "whole", removed=str(tmp_path / "gone.jsonl"))
    parts = [
        run([*sources, packed], tmp_path / "out", shard=f"{number}/{count}", removed=str(tmp_path / f"{count}.jsonl"))
        for number in range(1, count + 1)
    ]
    found = [path.read_bytes() for path in sorted((tmp_path / "out").glob("part-*/*.jsonl"))]
    assert b"".join(found) == content(tmp_path / "whole")
    assert sum((Counter(part.removed) for part in parts), Counter()) == Counter(whole.removed)
    gone = [path.read_text().splitlines() for path in sorted(tmp_path.glob(f"{count}-*.jsonl"))]
    texts_of = [json.loads(line)["text"] for lines in gone for line in lines]
    assert texts_of == [json.loads(line)["text"] for line in (tmp_path / "gone.jsonl").read_text().splitlines()]
    with pytest.raises(UsageError, match="rows_only counts"):
        run(sources, tmp_path / "rows", DROPS, rows_only=True, shard="1/2")


@pytest.mark.parametrize("rows_only", [False, True])
def test_a_run_that_fails_anywhere_continues(tmp_path, small_chunks, monkeypatch, rows_only):
    """The disk fails at one operation after the other; runs go on until one is through."""
    sources = [write(tmp_path / f"{name}.jsonl", texts(60, seed)) for seed, name in enumerate("abc")]
    rules = DROPS if rows_only else RULES
    options = {"rows_only": rows_only, "removed": str(tmp_path / "gone.jsonl")}
    with durable_calls(monkeypatch) as calls:
        run(sources, tmp_path / "whole", rules, **options)
    gone = (tmp_path / "gone.jsonl").read_bytes()
    count = len(calls.seen)
    assert count > 50
    for first in range(0, count, 17):
        (tmp_path / "gone.jsonl").unlink()
        output, at = tmp_path / f"out{first}", first
        while not (output / "clean.report").exists():
            with durable_calls(monkeypatch, at), suppress(ResourceError):
                run(sources, output, rules, **options)
            at += 13
        for path in sorted((tmp_path / "whole").iterdir()):
            assert path.suffix == ".report" or _same(path, output / path.name)
        assert (tmp_path / "gone.jsonl").read_bytes() == gone


def _same(one: Path, other: Path) -> bool:
    if one.name == "dedup.json":
        return json.loads(one.read_bytes())["files"] == json.loads(other.read_bytes())["files"]
    return one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(("name", "options"), [("a.jsonl", {}), ("dedup.json", {"rows_only": True, "rules": DROPS})])
def test_a_file_of_someone_else_is_not_replaced(tmp_path, name, options):
    source = write(tmp_path / "a.jsonl", texts(5))
    output = tmp_path / "out"
    output.mkdir()
    (output / name).write_text("precious")
    with pytest.raises(UsageError, match=rf"out/{name} already exists, and is not replaced\n  try: another --output"):
        run(source, output, **options)
    assert (output / name).read_text() == "precious"
    assert [path.name for path in output.iterdir()] == [name]


@pytest.mark.parametrize("name", ["clean.report", ".work/state.json"])
@pytest.mark.parametrize("data", ["", '{"made_of": {', "[]"])
def test_a_damaged_record_of_a_run_is_named_and_can_be_removed(tmp_path, small_chunks, monkeypatch, name, data):
    source = write(tmp_path / "a.jsonl", texts(60))
    with durable_calls(monkeypatch) as calls:
        run(source, tmp_path / "whole")
    output = tmp_path / "out"
    with durable_calls(monkeypatch, len(calls.seen) - 5), pytest.raises(ResourceError):
        run(source, output)
    path = output / name
    assert path.exists() or name == "clean.report"
    path.write_text(data)
    with pytest.raises(DamageError, match=rf"(?s){name} is damaged.*remove it, and run the same command again"):
        run(source, output)
    path.unlink()
    run(source, output)
    assert content(output) == content(tmp_path / "whole")


KILLED = """
import sys
from mdata.cleaning import text_job
from tests.mdata.cleaning.test_text_job import RULES, run
if __name__ == "__main__":
    text_job.BLOCK_BYTES, text_job._CHECKPOINT_S = 2000, 0
    run(sys.argv[1], sys.argv[2], workers=2)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.soak)])
def test_a_killed_run_continues(tmp_path, small_chunks, kills):
    source = write(tmp_path / "a.jsonl", texts(1500))
    run(source, tmp_path / "whole")
    draws, killed, number = random.Random(kills), 0, 0
    (tmp_path / "killed.py").write_text(KILLED)
    while killed < kills:
        output, number = tmp_path / f"out{number}", number + 1
        state = output / ".work/state.json"
        while not (output / "clean.report").exists():
            before = state.stat().st_mtime_ns if state.exists() else 0
            environment = {**os.environ, "PYTHONHASHSEED": str(killed), "PYTHONPATH": os.pathsep.join(sys.path)}
            words = [sys.executable, str(tmp_path / "killed.py"), str(source), str(output)]
            process = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL)
            while process.poll() is None:
                if killed < kills and state.exists() and state.stat().st_mtime_ns != before:
                    time.sleep(draws.uniform(0, 0.05))
                    process.send_signal(signal.SIGKILL)
                    killed += 1
                    break
                time.sleep(0.002)
            process.wait(120)
        assert content(output) == content(tmp_path / "whole")


def test_other_fields_and_formats(tmp_path):
    lines = [
        '{"n": 123456789012345678901234567890, "meta": {"text": "a \\u201cb\\u201d  c"}}',
        '{"meta": {"text": "it is fine"}, "x": NaN}',
        '{"meta": {"text": "it  is"}}',
    ]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines))
    run(tmp_path / "a.jsonl", tmp_path / "out", json_key="meta.text")
    found = (tmp_path / "out/a.jsonl").read_text().splitlines()
    assert (
        json.loads(found[0]) == {"n": 1.2345678901234568e29, "meta": {"text": 'a "b" c'}} or '"a \\"b\\" c"' in found[0]
    )
    assert found[1] == lines[1] and len(found) == 2
    table = pyarrow.table({"text": ["it  is so", "short"], "id": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("a plain text")
    run([tmp_path / "b.parquet", tmp_path / "c.txt"], tmp_path / "both")
    assert content(tmp_path / "both") == b'{"text":"it is so"}\n{"text":"a plain text"}\n'


def test_files_of_one_name_get_numbers(tmp_path):
    for folder in "xy":
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.jsonl", ["one two three"])
    run([tmp_path / "x", tmp_path / "y"], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.jsonl")) == ["00000-a.jsonl", "00001-a.jsonl"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_part_of_preprocess_skips_removed_rows(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(text_job, "BLOCK_BYTES", 4000)
    rows = texts(300)
    source = write(tmp_path / "a.jsonl", rows)
    if kind == "parquet":
        source = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), source, row_group_size=50)
    run(source, tmp_path / "skip", DROPS, rows_only=True)
    options = PreprocessOptions(
        input=source, output_prefix=str(tmp_path / "p"), tokenizer_type="ByteTokenizer", workers=1, chunk_bytes=4000,
        skip_rows=tmp_path / "skip",
    )  # fmt: skip
    for number in (1, 2, 3):
        preprocess(replace(options, shard=f"{number}/3"))
    manifests = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("p-*_document.json"))]
    kept = sum(not reason for reason in Cleaner(DROPS).clean(rows, [])[1])
    assert sum(shard["documents"] for manifest in manifests for shard in manifest["shards"]) == kept


def test_removed_rows_can_be_skipped(tmp_path):
    rows = texts(200)
    source = write(tmp_path / "a.jsonl", rows)
    result = run(source, tmp_path / "out", DROPS, rows_only=True)
    removed = RowSet.open(tmp_path / "out").removed[0]
    _, reasons = Cleaner(DROPS).clean(rows, [])
    assert removed.tolist() == [bool(reason) for reason in reasons]
    assert sum(result.removed.values()) == removed.sum() > 0
    assert not list((tmp_path / "out").glob("*.jsonl"))


def test_bad_rows_are_handled_as_in_preprocess(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n{"text": "\\ud800 two three"}\n{"a": 1}\n')
    with pytest.raises(BadInputError, match=r"a.jsonl:2: .*surrogate"):
        run(tmp_path / "a.jsonl", tmp_path / "out")
    bad = tmp_path / "bad.jsonl"
    result = run(tmp_path / "a.jsonl", tmp_path / "out", on_error="quarantine", quarantine=str(bad))
    assert (result.rows, result.kept, result.bad) == (3, 1, 2)
    assert [json.loads(line)["kind"] for line in bad.read_text().splitlines()] == ["surrogate", "no-key"]
    result = run(tmp_path / "a.jsonl", tmp_path / "where", on_error="skip", where="text = 'x'")
    assert (result.filtered, result.bad, result.kept) == (3, 0, 0)


def test_an_input_whose_name_is_not_utf_8_is_named_in_lists_of_rows(tmp_path):
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    source.write_text('{"text": "one two three"}\n{"text": "one"}\n{"a": 1}\n')
    removed, bad = tmp_path / "removed", tmp_path / "bad"
    run(source, tmp_path / "out", DROPS, removed=str(removed), on_error="quarantine", quarantine=str(bad))
    for path, row in ((removed, 2), (bad, 3)):
        (line,) = map(json.loads, path.read_text().splitlines())
        assert (line["file"], line["row"]) == (f"{tmp_path}/\\xff.jsonl", row)


def test_one_long_document_and_an_empty_one(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "word " * 2_000_000}) + '\n{"text": ""}\n')
    rules = CleanRules(steps=("gopher-repetition", "gopher"))
    result = run(tmp_path / "a.jsonl", tmp_path / "out", rules)
    assert dict(result.removed) == {"gopher-max-words": 1, "gopher-min-words": 1}


LIMITED = """
import resource, sys
from mdata.cleaning.clean import CleanRules, clean
from mdata.cleaning.rules import LengthRules
from mdata.cleaning.text_job import TextJobOptions
for step in ("punctuation", "length", "gopher", "gopher-repetition", "c4", "paragraphs", "fineweb", "collapse"):
    gib = 5 if step == "gopher-repetition" else 3  # 70 bytes for each word and symbol, 4.2 GB for 60 million of them
    resource.setrlimit(resource.RLIMIT_AS, (gib << 30, resource.RLIM_INFINITY))
    options = TextJobOptions(input=sys.argv[1], output=sys.argv[2] + step, workers=1, max_record_bytes=1 << 30)
    print(clean(options, CleanRules(steps=(step,), length=LengthRules(min_words=1))).rows)
"""
PIECES = ("one two three four five. ", "a b ", "[", "'", "\u00e9", "\n", "- \u2026\n", "1.,")


@pytest.mark.parametrize(("piece", "mb"), [("a b ", 1), *(pytest.param(x, 60, marks=pytest.mark.soak) for x in PIECES)])
def test_memory_for_a_long_document_is_bounded(tmp_path, piece, mb):
    """In each step alone: the first that removes it would keep it from the others."""
    text = piece * (mb * 10**6 // len(piece.encode()))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    words = [sys.executable, "-c", LIMITED, str(tmp_path / "a.jsonl"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250)
    assert (found.returncode, found.stdout) == (0, "1\n" * 8), found.stderr


def test_what_it_refuses(tmp_path):
    source = write(tmp_path / "a.jsonl", texts(5))
    with pytest.raises(UsageError, match=r"no step gopherr"):
        CleanRules(steps=("gopherr",))
    with pytest.raises(UsageError, match=r"has no step"):
        CleanRules(steps=())
    with pytest.raises(UsageError, match=r"gopher-min-words is nan"):
        CleanRules(steps=("gopher",), gopher=GopherRules(min_words=float("nan")))
    with pytest.raises(UsageError, match=r"these steps change them: punctuation, collapse"):
        run(source, tmp_path / "out", rows_only=True)
    with pytest.raises(UsageError, match=r"cannot read standard input"):
        run("-", tmp_path / "out")
    with pytest.raises(UsageError, match=r"removed=.* would be an input"):
        run(source, tmp_path / "out", removed=str(tmp_path / "out/removed.jsonl"))
    content = source.read_bytes()
    with pytest.raises(UsageError, match=r"a\.jsonl already exists, and is not replaced\n  try: another file; or"):
        run(source, tmp_path / "out", removed=str(source))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=r"pipe already exists"):
        run(source, tmp_path / "out", on_error="quarantine", quarantine=str(pipe))
    assert source.read_bytes() == content and pipe.is_fifo()
    run(source, tmp_path / "out")
    with pytest.raises(UsageError, match=r"(?s)result of other input or options.*different clean"):
        run(source, tmp_path / "out", DROPS)
    with pytest.raises(UsageError, match=r"is in the output folder"):
        run(tmp_path / "out/a.jsonl", tmp_path / "out")
