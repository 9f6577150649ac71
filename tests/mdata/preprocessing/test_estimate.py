"""The estimate of --dry-run for a uniform corpus is close to the result, and nothing is written."""

from __future__ import annotations

import gzip
import importlib
import json
import lzma
import random
from dataclasses import asdict
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import mdata
from mdata import UsageError
from mdata.preprocessing.estimate import estimate
from mdata.progress import Silent
from mdata.util.machine_limits import usable_cores
from tests.helpers.failures import durable_calls
from tests.mdata.preprocessing.test_preprocess import contents, options

module = importlib.import_module("mdata.preprocessing.estimate")  # the package's name is the function's
WORDS = ["some", "words", "of", "text", "that", "come", "in", "any", "order", "1234", "\u00e9t\u00e9"]


def corpus(folder, *, rows: int = 4000, files: int = 3, packed: bool = False) -> tuple[str, ...]:
    """Documents of even sizes; one row in 40 is bad."""
    generator = random.Random(11)
    folder.mkdir(exist_ok=True)
    names = []
    for number in range(files):
        lines = [json.dumps({"text": " ".join(generator.choices(WORDS, k=30))}) for _ in range(rows // files)]
        lines[::40] = ["{}"] * len(lines[::40])
        data = "\n".join(lines).encode()
        path = folder / f"{number}.jsonl{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(data) if packed else data)
        names.append(str(path))
    return tuple(names)


def near(found: float, expected: float, share: float = 0.1) -> bool:
    return abs(found - expected) <= share * expected


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("changes", [{}, {"partitions": 3}, {"holdout": "0.3", "append_eod": True}])
def test_an_even_corpus_is_estimated_within_a_tenth(tmp_path, packed, changes):
    inputs = corpus(tmp_path / "in", packed=packed)
    given_options = options(tmp_path, input=inputs, on_error="skip", chunk_bytes=8000, workers=1, **changes)
    found = estimate(given_options)
    result = mdata.preprocess(given_options)
    whole = result.manifests["text"]
    made = list(result.manifests.values())
    if "holdout" in changes:
        shards = [manifest.shards[0] for manifest in made]
    else:
        shards = [whole.shards[0]]
    assert near(found.tokens, sum(shard.tokens for shard in shards))
    assert near(found.documents, sum(shard.documents for shard in shards))
    assert near(found.bad_rows, whole.provenance.skipped["no-key"], 0.8 if packed else 0.4)
    sizes = [path.stat().st_size for path in tmp_path.glob("out*") if path.suffix in (".bin", ".idx")]
    assert near(found.output_bytes, sum(sizes))
    assert found.input_bytes == sum(file.bytes for file in whole.provenance.inputs)
    assert 0 < found.sampled_bytes < found.input_bytes or packed
    assert found.workers == 1 and 1 <= found.best_workers <= usable_cores()
    assert found.work_s > 0 and found.wall_s > 0


@pytest.mark.parametrize("form", ["xz", "zst", "parquet"])
def test_other_streams_are_estimated_too(tmp_path, form):
    (plain,) = corpus(tmp_path / "in", files=1)
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        rows = [json.loads(line).get("text") for line in Path(plain).read_text().splitlines()]
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, row_group_size=500)
    else:
        pack = lzma.compress if form == "xz" else zstandard.compress
        path.write_bytes(pack(Path(plain).read_bytes()))
    given_options = options(tmp_path, input=(str(path),), on_error="skip", chunk_bytes=8000, workers=1)
    found = estimate(given_options)
    shard = mdata.preprocess(given_options).manifests["text"].shards[0]
    assert near(found.tokens, shard.tokens) and near(found.documents, shard.documents)


def test_a_small_input_is_seen_whole(tmp_path):
    found = estimate(options(tmp_path, chunk_bytes=64, append_eod=True))
    manifest = mdata.preprocess(options(tmp_path, append_eod=True)).manifests["text"]
    assert found.sampled_bytes == found.input_bytes
    assert (found.documents, found.tokens, found.bad_rows) == (10, manifest.shards[0].tokens, 0)
    assert asdict(found)["best_workers"] == 1


def test_several_keys_are_counted_together(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": "one", "b": "two and more"}\n' * 50)
    both, a, b = (
        estimate(options(tmp_path, input=(str(tmp_path / "x.jsonl"),), json_keys=keys))
        for keys in (("a", "b"), ("a",), ("b",))
    )
    assert both.tokens == a.tokens + b.tokens and both.documents == a.documents == 50


def test_an_empty_input_needs_nothing(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"")
    found = estimate(options(tmp_path, input=(str(tmp_path / "x.jsonl"),)))
    assert (found.documents, found.tokens, found.output_bytes, found.best_workers) == (0, 0, 0, 1)


class Count(Silent):
    def __init__(self) -> None:
        self.total, self.done, self.ended = 0, 0, False

    def begin(self, label: str, total: int | None, *, unit: str, done: int = 0) -> None:
        self.total = total

    def advance(self, amount: int, **totals: float) -> None:
        self.done += amount

    def end(self) -> None:
        self.ended = True


def test_the_disk_is_left_alone_and_the_sample_is_small(tmp_path, monkeypatch):
    inputs = corpus(tmp_path / "in", rows=9000)
    before = contents(tmp_path)
    count = Count()
    with durable_calls(monkeypatch) as calls:
        found = estimate(
            options(tmp_path / "nowhere", input=inputs, on_error="skip", chunk_bytes=4000, holdout="0.1"), count
        )
    assert calls.seen == [] and contents(tmp_path) == before and not (tmp_path / "nowhere").exists()
    assert count.ended and count.done == module._SAMPLE_CHUNKS
    assert found.sampled_bytes < found.input_bytes / 8


def test_a_slow_tokenizer_ends_the_sampling_early(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SAMPLE_S", 0.0)
    found = estimate(options(tmp_path, input=corpus(tmp_path / "in"), chunk_bytes=8000))
    assert 0 < found.sampled_bytes <= 8000


def test_standard_input_cannot_be_sampled(tmp_path):
    with pytest.raises(UsageError, match="standard input can be read only once"):
        estimate(options(tmp_path, input=("-",)))
