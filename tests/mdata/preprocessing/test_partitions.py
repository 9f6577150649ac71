"""Partitions and the held-out share: each document goes where the twin puts it, also through the whole pipeline."""

from __future__ import annotations

import itertools
import json
import resource
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import UsageError
from mdata.corpus.origins import open_origins
from mdata.preprocessing.encode import HOLDOUT_BITS, held_out
from mdata.preprocessing.partitions import Partitions
from mdata.sources.record_batch import Column
from tests.helpers.examples import SOAK, examples, soaked
from tests.helpers.failures import assert_what_is_visible_is_true, crash_at
from tests.helpers.notes import Notes
from tests.mdata.preprocessing.test_preprocess import GOLDEN, TOKENIZER, options, pair
from tests.mdata.preprocessing.twin import pair_of
from tests.reference.preprocess import HELD_OUT, part_of, routes_of
from tests.reference.records import record


@examples(200)
@given(
    rows=st.lists(st.booleans(), max_size=40),
    first=st.integers(0, 10),
    partitions=st.integers(1, 9),
    sequential=st.booleans(),
    share=st.sampled_from(["0", "0.3", "0.50", "1"]),
)
def test_routes_are_those_of_the_twin(rows, first, partitions, sequential, share):
    """`rows` says which rows are good; those before `first` were taken by an earlier chunk."""
    kept = [row for row, good in enumerate(rows) if good and row >= first]
    texts = [[f"text {row}", "b"] if row % 3 else [] for row in kept]
    ours = Partitions(partitions, max(1, -(-len(rows) // partitions)) if sequential else None, share != "0")
    held_below = int(float(share) * 2**HOLDOUT_BITS)
    column = Column(
        [text for document in texts for text in document], np.cumsum([*map(len, texts)], dtype=int).tolist()
    )
    held = held_out((column,), held_below) if held_below else None
    found = ours.of_rows(np.array(kept, np.int64), held)
    expected = routes_of(
        list(zip(kept, texts, strict=True)), len(rows), partitions=partitions, sequential=sequential, share=share
    )
    assert [HELD_OUT if partition == partitions else partition for partition in found.tolist()] == expected
    assert all(partition in ours.numbers for partition in found.tolist())


@examples(100)
@given(num_rows=st.integers(1, 200), partitions=st.integers(1, 30))
def test_sequential_parts_are_runs_of_one_length_but_for_the_last(num_rows, partitions):
    parts = [part_of(row, num_rows, partitions=partitions, sequential=True) for row in range(num_rows)]
    assert parts == sorted(parts)
    sizes = [len(list(run)) for _, run in itertools.groupby(parts)]
    assert len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0] == -(-num_rows // partitions)
    rows = np.arange(num_rows)
    assert Partitions(partitions, -(-num_rows // partitions), False).of_rows(rows, None).tolist() == parts


def test_names_and_prefixes(tmp_path):
    plain, parts = Partitions(1, None, True), Partitions(3, 5, True)
    given_options = options(tmp_path)
    assert [plain.name("text", partition) for partition in range(2)] == ["text", "text/holdout"]
    assert [parts.name("text", partition) for partition in range(4)] == [
        *(f"text/part{i}" for i in range(3)),
        "text/holdout",
    ]
    names = [prefix.name for prefix in parts.prefixes(given_options).values()]
    assert names == [*(f"out_{i}_text_document" for i in range(3)), "out_holdout_text_document", "out_text_document"]
    assert [prefix.name for prefix in plain.prefixes(given_options).values()] == [
        "out_text_document",
        "out_holdout_text_document",
    ]
    assert (plain.step, Partitions(3, None, False).step, parts.step) == (1, 3, 1)


def several_files(folder):
    """The golden corpus with bad rows put in, cut into three files, one of them empty."""
    folder.mkdir()
    lines = (GOLDEN / "corpus.jsonl").read_text(encoding="utf-8").splitlines() * 3
    lines[4] = '{"text": 7}'
    lines[11] = ""
    lines[26] = "{"
    files = {"0.jsonl": lines[:9], "1.jsonl": [], "2.jsonl": lines[9:]}
    for name, some in files.items():
        (folder / name).write_text("\n".join(some), encoding="utf-8")
    return [folder / name for name in files]


def expected_documents(paths, *, partitions, sequential, share, eod):
    """The twin of the whole: result name -> [(sequences of ids, (file, row))]."""
    places = [
        (number, row, line)
        for number, path in enumerate(paths)
        for row, line in enumerate(path.read_bytes().splitlines(), 1)
    ]
    found = {f"part{part}": [] for part in range(partitions)} | {HELD_OUT: []}
    for at, (file, row, line) in enumerate(places):
        values = record(line, ("text",))
        if isinstance(values, str):
            continue
        texts = [values[0]] if isinstance(values[0], str) else values[0]
        (partition,) = routes_of([(at, texts)], len(places), partitions=partitions, sequential=sequential, share=share)
        sequences = [ids for ids in (TOKENIZER.encode_batch([text])[0].tolist() for text in texts) if ids]
        if sequences and eod is not None:
            sequences[-1].append(eod)
        found[partition if partition == HELD_OUT else f"part{partition}"].append((sequences, (file, row)))
    return found


@pytest.mark.parametrize(
    ("sequential", "share"), soaked(itertools.product([False, True], ["0", "0.4"]), but=[(False, "0.4"), (True, "0")])
)
@pytest.mark.parametrize(("partitions", "workers"), [(2, 2), (5, 1), (50, 1)])
def test_the_whole_engine_is_its_twin(tmp_path, partitions, sequential, share, workers):
    paths = several_files(tmp_path / "in")
    result = mdata.preprocess(
        options(
            tmp_path,
            input=tuple(map(str, paths)),
            partitions=partitions,
            keep_sequential_samples=sequential,
            holdout=share,
            append_eod=True,
            on_error="skip",
            workers=workers,
            chunk_bytes=130,
        )
    )
    expected = expected_documents(paths, partitions=partitions, sequential=sequential, share=share, eod=TOKENIZER.eod)
    if share == "0":
        assert expected.pop(HELD_OUT) == []
    assert len(result.manifests) == len(expected) + 1
    for name, documents in expected.items():
        stem = f"out_{name.removeprefix('part')}_text_document"
        assert_is(tmp_path, stem, documents, result.manifests[f"text/{name}"])
    merged = [document for name, documents in expected.items() if name != HELD_OUT for document in documents]
    assert_is(tmp_path, "out_text_document", merged, result.manifests["text"])
    bins = [pair(tmp_path, f"out_{part}_text_document")[0] for part in range(partitions)]
    assert b"".join(bins) == pair(tmp_path)[0]


def assert_is(folder, stem, documents, manifest):
    assert pair(folder, stem) == pair_of([sequences for sequences, _ in documents], code=8), stem
    origins = open_origins(folder / f"{stem}.origins")
    assert [origins.of_document(number) for number in range(len(documents))] == [place for _, place in documents]
    assert manifest.shards[0].documents == manifest.provenance.records == len(documents)
    assert manifest.provenance.skipped == {"bad-value": 1, "blank": 1, "not-json": 1}
    bins = [0] * 65
    for sequences, _ in documents:
        bins[sum(map(len, sequences)).bit_length()] += 1
    assert manifest.statistics.document_lengths == np.trim_zeros(bins, "b")
    assert mdata.verify(folder / f"{stem}.json", full=True).problems == ()


TEXTS = (
    "",
    " ",
    "x",
    "\u00e9",
    "Stra\u00dfe \U0001f642",
    "a\u0301\u00a0b",
    "\u2028",
    "one\ntwo\r\n",
    "\ufeff",
    "word " * 30,
)
BAD = (b"{", b'{"text": 3}', b'{"other": ""}', b"\xff", b'{"text": ["a", 1]}')


def random_line(random):
    if random.random() < 0.1:
        return random.choice(BAD)
    texts = ["".join(random.choices(TEXTS, k=random.choice((0, 1, 3)))) for _ in range(random.choice((0, 1, 1, 1, 3)))]
    value = texts[0] if len(texts) == 1 and random.random() < 0.9 else texts
    return json.dumps({"text": value}, ensure_ascii=random.random() < 0.5).encode()


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(4 * SOAK))
def test_random_files_are_the_twins_with_any_options_though_killed(tmp_path, seed):
    """Killed up to three times, and continued with another number of workers."""
    random, paths = Random(seed), []
    for number in range(random.choice((1, 2, 4))):
        paths.append(tmp_path / f"{number}.jsonl")
        paths[-1].write_bytes(b"\n".join(random_line(random) for _ in range(random.choice((0, 1, 20, 40)))))
    partitions, sequential = random.choice((1, 2, 5)), random.random() < 0.5
    share, append_eod = random.choice(("0", "0.4", "1")), random.random() < 0.5
    given = {
        "partitions": partitions,
        "keep_sequential_samples": sequential,
        "holdout": share,
        "append_eod": append_eod,
    }
    given |= {"input": paths, "on_error": "skip", "chunk_bytes": random.choice((60, 300)), "checkpoint_s": 0}

    def job():
        return options(tmp_path / "out", **given, workers=random.choice((1, 1, 2)))

    for _ in range(random.choice((1, 3))):
        crash_at(random.randrange(90), lambda: mdata.preprocess(job()))
        assert_what_is_visible_is_true(tmp_path / "out")
    mdata.preprocess(job())
    eod = TOKENIZER.eod if append_eod else None
    expected = expected_documents(paths, partitions=partitions, sequential=sequential, share=share, eod=eod)
    names = {name: f"out_{name.removeprefix('part')}_text_document" for name in expected}
    if share == "0":
        assert expected.pop(HELD_OUT) == []
    if partitions == 1:
        names["part0"] = "out_text_document"
    for name, documents in expected.items():
        assert pair(tmp_path / "out", names[name]) == pair_of([document for document, _ in documents], code=8), name
        origins = open_origins(tmp_path / "out" / f"{names[name]}.origins")
        assert [origins.of_document(number) for number in range(len(documents))] == [place for _, place in documents]
        assert mdata.verify(tmp_path / "out" / f"{names[name]}.json", full=True).problems == ()


def test_runs_of_rows_need_an_input_that_can_be_read_twice(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a"}))
    for inputs in (("-",), (str(tmp_path / "x.jsonl"), "-")):
        with pytest.raises(UsageError, match="stdin can be read only once"):
            mdata.preprocess(options(tmp_path, input=inputs, partitions=2, keep_sequential_samples=True))


def test_parts_that_an_earlier_run_left_are_named(tmp_path):
    """With fewer parts, or none: what is not made again, and nothing that only looks like it."""
    job = options(tmp_path, tokenizer_type="ByteTokenizer", tokenizer_model=None, workers=1)
    mdata.preprocess(replace(job, output_prefix=str(tmp_path / "out_0")))
    notes = Notes()
    mdata.preprocess(replace(job, output_prefix=str(tmp_path / "out_00"), partitions=3, holdout="0.3"), notes)
    assert notes.lines == []
    mdata.preprocess(replace(job, partitions=3, holdout="0.3", overwrite=True))
    for partitions, left in ((2, ["2", "holdout"]), (1, ["0", "1", "2", "holdout"])):
        notes = Notes()
        mdata.preprocess(replace(job, partitions=partitions, overwrite=True), notes)
        said = [line for line in notes.lines if "of an earlier run and is kept" in line]
        assert [line.partition("_text_document")[0].rpartition("out_")[2] for line in said] == left
        assert all(str(tmp_path / "out") in line and "remove its files" in line for line in said)


def test_the_names_of_many_partitions_are_computed_once(tmp_path, monkeypatch):
    """For each partition anew, 5,000 of them took minutes."""
    calls, real = [], Partitions.prefixes
    monkeypatch.setattr(Partitions, "prefixes", lambda self, options: (calls.append(1), real(self, options))[1])
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n' * 200)
    words = {"tokenizer_type": "ByteTokenizer", "tokenizer_model": None, "input": (str(tmp_path / "x.jsonl"),)}
    made = mdata.preprocess(options(tmp_path, partitions=100, **words))
    assert len(made.manifests) == 101 and len(calls) == 1
    assert {manifest.shards[0].documents for manifest in made.manifests.values()} == {2, 200}


def test_more_partitions_than_files_may_be_open(tmp_path):
    """Their files are closed between two uses; a run that was killed continues as always."""
    (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for number in range(500)))
    words = {"tokenizer_type": "ByteTokenizer", "tokenizer_model": None, "input": (str(tmp_path / "x.jsonl"),)}
    job = options(tmp_path, partitions=130, chunk_bytes=2000, workers=1, checkpoint_s=0, **words)
    killed = replace(job, output_prefix=str(tmp_path / "killed" / "out"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 250, hard))
    try:
        mdata.preprocess(job)
        assert crash_at(3000, lambda: mdata.preprocess(killed))
        assert mdata.preprocess(killed).resumed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    results = {path.name: path.read_bytes() for path in tmp_path.glob("out_*")}
    assert pair(tmp_path, "out_129_text_document")[0] == pair_of([[b"129"], [b"259"], [b"389"]], code=8)[0]
    assert len(results) == 131 * 5 and results == {p.name: p.read_bytes() for p in (tmp_path / "killed").glob("*")}


def test_the_number_of_partitions_is_bounded(tmp_path):
    with pytest.raises(UsageError, match=r"partitions=100000000\n  expected: at most 10,000, as each is a corpus"):
        mdata.preprocess(options(tmp_path, partitions=100_000_000))
