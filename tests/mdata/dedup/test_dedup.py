"""Duplicates: signatures against their formula, the command against all pairs, and the rows that preprocess skips."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import DamageError, ResourceError, UsageError, _core
from mdata.dedup import grouping, plan, runs, signing
from mdata.dedup.dedup import dedup, run_stage
from mdata.dedup.plan import CLUSTERS, DedupOptions, permutations
from mdata.dedup.row_set import BITS, CHUNKS, FACTS, RowSet
from mdata.rewriting.merge import merge
from mdata.sources.sections import PartNumber
from mdata.util import atomic_io
from tests.helpers.failures import durable_calls, killed_at
from tests.mdata.preprocessing.test_preprocess import options, pair
from tests.reference import dedup as slow

SHAPE = {"bands": 4, "rows": 2, "ngram": 2}


def _texts(seed: int, count: int = 60) -> list[str]:
    """Texts over a small vocabulary, some copied with changed words, cases and punctuation, some too short."""
    draw = random.Random(seed)
    vocabulary = [f"w{number}" for number in range(300)] + ["naïve", "Straße", "中文", "Ελλάδα", "İ", "½"]
    texts: list[str] = []
    for _ in range(count):
        if texts and draw.random() < 0.4:
            words = draw.choice(texts).split()
            for place in range(len(words)):
                if draw.random() < draw.choice((0.0, 0.1, 0.5)):
                    words[place] = draw.choice(vocabulary)
            text = draw.choice((" ", "  ", ", ")).join(words)
            texts.append(draw.choice((text, text.upper(), text + "!")))
        else:
            texts.append(" ".join(draw.choices(vocabulary, k=draw.choice((0, 1, 2, 8, 30)))))
    return texts


def _write(path: Path, texts: list[str], *, bad: bool = False) -> Path:
    lines = [json.dumps({"text": text}) for text in texts]
    if bad:
        lines.insert(1, "{not json")
    data = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def _removed(folder: Path) -> list[bool]:
    return [bool(flag) for rows in RowSet.open(folder).removed for flag in rows]


def test_xxh64_has_the_published_values():
    published = {b"": 0xEF46DB3751D8E999, b"a": 0xD24EC4F1A98C6E5B, b"abc": 0x44BC2CF5AD770999}
    published[b"Nobody inspects the spammish repetition"] = 0xFBCEA83C8A378BF1
    assert {text: _core.xxh64(text) for text in published} == published


@given(st.lists(st.text(st.sampled_from("aBé ß,._-1中Ω\n\tİǅ\u0301"), max_size=40), min_size=1, max_size=5))
def test_the_normal_form_is_the_words_of_berts_normalizer(texts):
    signer = _core.MinHashSigner(*permutations(8), rows=2, ngram=2)
    forms, ends, _, has_ngram = signer.sign(texts)
    begin = 0
    for text, end, has in zip(texts, ends.tolist(), has_ngram.tolist(), strict=True):
        words = slow.words_of(text)
        assert forms[begin:end].decode() == " ".join(words)
        assert bool(has) == (len(words) >= 2)
        begin = end


@pytest.mark.parametrize("unit", ["words", "characters", "given"])
@pytest.mark.parametrize("hash", ["xxhash64", "sha1-64", "sha1-32"])
def test_signatures_are_their_formula(unit, hash):
    texts = [*_texts(1, 30), " ", "b ", "  b  c ", " \n "]
    texts = [text for text in texts if slow.ngrams(text, ngram=2, unit=unit)]
    a, b = permutations(21)
    signer = _core.MinHashSigner(a, b, rows=3, ngram=2, unit=unit, hash=hash)
    keys = signer.sign(texts)[2]
    for text, found in zip(texts, keys, strict=True):
        bands = slow.signature(text, bands=7, rows=3, ngram=2, unit=unit, hash=hash)
        assert [_core.xxh64(np.array(band, np.uint64).tobytes()) for band in bands] == found.tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "more",
    [
        {"bands": 4},
        {"bands": 0},
        {"bands": 4, "verify": 0.5},
        {"bands": 4, "unit": "characters", "verify": 0.9},
        {"bands": 4, "unit": "given"},
    ],
    ids=str,
)
def test_what_is_removed_is_what_all_pairs_say(seed, more, tmp_path, monkeypatch):
    monkeypatch.setattr(signing, "RUN_DOCUMENTS", 7)
    texts = _texts(seed)
    files = [_write(tmp_path / name, part) for name, part in (("a.jsonl", texts[:25]), ("b.jsonl.gz", texts[25:]))]
    shape = SHAPE | more
    result = dedup(DedupOptions(input=files, output=tmp_path / "out", workers=2, **shape))
    groups = slow.first_of_groups(texts, **shape)
    assert _removed(tmp_path / "out") == [group != number for number, group in enumerate(groups)]
    lines = [json.loads(line) for line in (tmp_path / "out" / "clusters.jsonl").read_text().splitlines()]
    assert result.clusters == len(lines) == len({group for number, group in enumerate(groups) if group != number})
    assert result.removed == sum(len(line["removed"]) for line in lines) and result.rows == len(texts)
    assert [line["kept"][1] for line in lines if line["kept"][0].endswith("a.jsonl")] == sorted(
        {group + 1 for number, group in enumerate(groups) if group != number and group < 25}
    )
    assert not (tmp_path / "out" / ".work").exists()


def test_one_run_or_many_threads_and_parts_give_the_same_bytes(tmp_path, monkeypatch):
    texts = _texts(5, 200)
    whole = _write(tmp_path / "whole.jsonl", texts)
    found = []
    for number, (workers, run) in enumerate(((1, 1000), (4, 11), (3, 64))):
        monkeypatch.setattr(signing, "RUN_DOCUMENTS", run)
        monkeypatch.setattr(plan, "BLOCK_BYTES", 1 << 22 if number < 2 else 1 << 10)
        folder = tmp_path / f"out-{number}"
        dedup(DedupOptions(input=whole, output=folder, workers=workers, **SHAPE))
        found.append(((folder / BITS).read_bytes(), (folder / "clusters.jsonl").read_bytes()))
    assert found[0] == found[1] == found[2] and any(found[0][0])


def test_an_interrupted_run_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(signing, "RUN_DOCUMENTS", 9)
    monkeypatch.setattr(plan, "BLOCK_BYTES", 500)
    texts = _texts(7, 150)
    files = [_write(tmp_path / name, part) for name, part in (("a.jsonl", texts[:90]), ("b.jsonl.gz", texts[90:]))]
    options = DedupOptions(input=files, output=tmp_path / "out", workers=2, **SHAPE)
    dedup(DedupOptions(input=files, output=tmp_path / "whole", workers=1, **SHAPE))
    write, signed = signing._Signing._write_run, list[int]()

    def fails(task: signing._Signing, part: list[tuple[int, signing.Signed]]) -> None:
        write(task, part)
        signed.append(sum(len(chunk.kept) for _, chunk in part))
        if len(signed) in (1, 3, 4):
            raise KeyboardInterrupt

    monkeypatch.setattr(signing._Signing, "_write_run", fails)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            dedup(options)
    dedup(options)
    assert sum(signed) == len(texts)  # nothing was signed twice
    for name in (BITS, "clusters.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_finished_result_is_left_and_another_refused(tmp_path):
    path = _write(tmp_path / "a.jsonl", _texts(2))
    options = DedupOptions(input=path, output=tmp_path / "out", **SHAPE)
    first = dedup(options)
    written = (tmp_path / "out" / FACTS).stat().st_mtime_ns
    assert dedup(options) == first and (tmp_path / "out" / FACTS).stat().st_mtime_ns == written
    with pytest.raises(UsageError, match=r"other input or options\n  found: different ngram\n"):
        dedup(DedupOptions(input=path, output=tmp_path / "out", **SHAPE | {"ngram": 3}))


def test_texts_against_which_is_compared_stay(tmp_path):
    old = _write(tmp_path / "old.jsonl", ["one two three", "four five six", "four five six"])
    new = _write(tmp_path / "new.jsonl", ["Four, five, six!", "seven eight nine", "seven eight nine", ""])
    result = dedup(DedupOptions(input=new, against=[old], output=tmp_path / "out", **SHAPE))
    assert _removed(tmp_path / "out") == [True, False, True, False]
    assert (result.rows, result.removed) == (4, 2)
    lines = [json.loads(line) for line in (tmp_path / "out" / "clusters.jsonl").read_text().splitlines()]
    assert [line["removed"] for line in lines] == [[[str(new), 1]], [[str(new), 3]]], "the second of the old ones stays"


@pytest.mark.parametrize("more", [{}, {"bands": 0}], ids=str)
def test_earlier_results_with_signatures_stand_for_their_texts(more, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "BLOCK_BYTES", 900)
    monkeypatch.setattr(signing, "RUN_DOCUMENTS", 12)
    texts = _texts(31, 150)
    months: list[list[str | Path]] = [
        [_write(tmp_path / "a.jsonl", texts[:40], bad=True), _write(tmp_path / "b.jsonl.gz", texts[40:60])],
        [_parquet(tmp_path / "c.parquet", texts[60:100])],
        [_write(tmp_path / "d.jsonl", texts[100:])],
    ]
    results: list[str | Path] = [tmp_path / f"month-{number}" for number in range(3)]
    for number, files in enumerate(months):
        month = DedupOptions(input=files, output=results[number], keep_signatures=True, **SHAPE | more)
        _in_tasks(dataclasses.replace(month, against=results[:number]), 1 + number, 2)
    texts_before = [*months[0], *months[1]]
    whole = DedupOptions(input=months[2], against=texts_before, output=tmp_path / "whole", **SHAPE | more)
    assert dedup(whole).removed > 10
    for name in (BITS, CHUNKS, CLUSTERS):
        assert (Path(results[2]) / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    again = dataclasses.replace(whole, against=[results[0], *months[1]], output=tmp_path / "mixed")
    dedup(again)
    assert (tmp_path / "mixed" / BITS).read_bytes() == (tmp_path / "whole" / BITS).read_bytes()
    for file in texts_before:  # and the texts may be gone
        Path(file).unlink()
    dedup(dataclasses.replace(whole, against=results[:2], output=tmp_path / "later"))
    assert (tmp_path / "later" / BITS).read_bytes() == (tmp_path / "whole" / BITS).read_bytes()


def test_tasks_of_a_job_with_other_kinds_of_options_are_named(tmp_path):
    near = DedupOptions(input=_write(tmp_path / "a.jsonl", _texts(2)), output=tmp_path / "out", **SHAPE)
    run_stage(dataclasses.replace(near, bands=0), "sign")
    with pytest.raises(UsageError, match=r"no finished sign .*\n  found: files of a job with different bands, .*ngram"):
        run_stage(near, "match")


def test_signatures_that_do_not_fit_are_refused(tmp_path):
    path, old = _write(tmp_path / "a.jsonl", _texts(2)), tmp_path / "old"
    kept = DedupOptions(input=path, output=old, keep_signatures=True, **SHAPE)
    dedup(dataclasses.replace(kept, keep_signatures=False))
    later = DedupOptions(input=path, against=[old], output=tmp_path / "out", **SHAPE)
    with pytest.raises(UsageError, match=r"old is a result of mdata dedup without signatures\n.*signatures\.json"):
        dedup(later)
    with pytest.raises(UsageError, match="old is finished and kept no signatures"):
        dedup(kept)
    shutil.rmtree(old)
    dedup(kept)
    dedup(later)
    assert all(_removed(tmp_path / "out"))
    with pytest.raises(UsageError, match=r"out holds the result of other input or options\n  found: different earlier"):
        dedup(dataclasses.replace(later, against=()))
    with pytest.raises(UsageError, match=r"signatures of other options\n  found: bands=5\n  expected: bands=4"):
        dedup(dataclasses.replace(later, bands=5))
    with pytest.raises(UsageError, match=r"verify=0\.7 compares texts"):
        dedup(dataclasses.replace(later, verify=0.7))
    with pytest.raises(UsageError, match="substring makes no signatures"):
        dataclasses.replace(kept, substring=100)
    run, facts = next(old.glob("signatures/*/*/*.run")), old / "signatures/signatures.json"
    whole, later = run.read_bytes(), dataclasses.replace(later, output=tmp_path / "other")
    fix = r"make .*old again, or name its texts"
    for data, found in ((whole[:-1], "torn"), (bytes(reversed(whole)), "damaged\n  found: records that are")):
        run.write_bytes(data)
        with pytest.raises(DamageError, match=rf"(?s)00000\.run is {found}.*{fix}"):
            dedup(later)
    run.write_bytes(whole)
    facts.write_bytes(facts.read_bytes()[:-1])
    with pytest.raises(DamageError, match=rf"(?s)signatures\.json is damaged.*{fix}"):
        dedup(later)


def test_signatures_are_kept_wherever_the_group_stops(tmp_path, monkeypatch):
    _make_small(monkeypatch)
    path = _write(tmp_path / "a.jsonl", _texts(5, 70))

    def kept_in(name: str) -> dict[str, bytes]:
        dedup(DedupOptions(input=path, output=tmp_path / name, keep_signatures=True, workers=1, **SHAPE))
        folder = tmp_path / name
        files = (file for file in folder.glob("**/*") if file.is_file() and file.name != ".lock")
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}

    with durable_calls(monkeypatch) as calls:
        expected = kept_in("whole")
    assert sum(name.endswith(".run") for name in expected) > 2
    first = next(n for n, (name, file) in enumerate(calls.seen) if name == "rename" and f"-> {CLUSTERS}" in file)
    for at in range(first, len(calls.seen)):
        with pytest.raises(ResourceError, match="No space left"), durable_calls(monkeypatch, at):
            kept_in(f"stopped-{at}")
        assert kept_in(f"stopped-{at}") == expected


def test_no_duplicates_and_no_rows(tmp_path):
    files = [_write(tmp_path / "a.jsonl", ["a b", "c d"]), tmp_path / "b.jsonl", tmp_path / "c.jsonl"]
    for empty in files[1:]:
        empty.touch()
    result = dedup(DedupOptions(input=files, output=tmp_path / "out", **SHAPE))
    assert (result.rows, result.removed, result.clusters) == (2, 0, 0) and _removed(tmp_path / "out") == [False] * 2
    assert dedup(DedupOptions(input=files[1:], output=tmp_path / "none", **SHAPE)).rows == 0
    assert _removed(tmp_path / "none") == []


def test_bad_rows_and_texts_without_words(tmp_path):
    path = _write(tmp_path / "a.jsonl", ["...", "?!", "...", "a b c"], bad=True)
    dedup(DedupOptions(input=path, output=tmp_path / "out", **SHAPE))
    assert _removed(tmp_path / "out") == [False, False, False, True, False]  # the second row is not JSON


def test_documents_that_are_all_shorter_than_an_ngram(tmp_path):
    path = _write(tmp_path / "a.jsonl", ["a", "b", "A."])
    result = dedup(DedupOptions(input=path, output=tmp_path / "out", **SHAPE))
    assert (result.removed, _removed(tmp_path / "out")) == (1, [False, False, True])


def test_an_input_without_texts_is_refused(tmp_path):
    path = _write(tmp_path / "a.jsonl", ["a b c", "d e f"])
    with pytest.raises(UsageError, match=r"no row has a text under 'body'\n  found: 2 rows"):
        dedup(DedupOptions(input=path, output=tmp_path / "out", json_key="body", **SHAPE))


def test_recall_is_that_of_the_formula(tmp_path):
    """Pairs with a share J of common n-grams have a common band with probability 1 - (1 - J^r)^b."""
    draw, bands, rows, pairs = random.Random(3), 14, 8, 600
    signer = _core.MinHashSigner(*permutations(bands * rows), rows=rows, ngram=1)
    for share in (0.6, 0.7, 0.8, 0.9):
        common = round(2 * 200 * share / (1 + share))
        similarity = common / (2 * 200 - common)
        texts = []
        for _ in range(pairs):
            words = [f"w{draw.getrandbits(60)}" for _ in range(2 * 200 - common)]
            texts += [" ".join(words[:200]), " ".join(words[200 - common :])]
        keys = signer.sign(texts)[2]
        hits = int((keys[::2] == keys[1::2]).any(axis=1).sum())
        chance = 1 - (1 - similarity**rows) ** bands
        assert abs(hits - pairs * chance) <= 3 * (pairs * chance * (1 - chance)) ** 0.5 + 1, share


def test_records_are_joined_over_runs(tmp_path):
    runs = [np.array([[5, 0], [9, 1]], np.uint64), np.array([[5, 0], [5, 2], [7, 1]], np.uint64)]
    path = tmp_path / "runs"
    path.write_bytes(b"".join(run.tobytes() for run in runs))
    with path.open("rb") as file:
        slices = [(file.fileno(), 0, 2, 0), (file.fileno(), 32, 3, 10)]
        edges = _core.RunMerger(slices, 2, 16).edges(100, False)
        chained = _core.RunMerger(slices, 2, 16).edges(100, True)
        assert _core.RunMerger(slices, 2, 32).records(4).tolist() == [[5, 0], [5, 10], [5, 12], [7, 11]]
        assert [_core.count_below(slices[1], 2, key) for key in (0, 5, 6, 7, 8)] == [0, 0, 2, 2, 3]
    assert edges.tolist() == [[0, 10], [0, 12]] and chained.tolist() == [[0, 10], [0, 12], [10, 12]]
    parents = np.arange(13)
    _core.join_groups(parents, edges)
    assert parents[12] == parents[10] == 0 and parents[11] == 11
    with pytest.raises(IndexError):
        _core.join_groups(parents, np.array([[0, 13]], np.uint64))
    for wrong in ([1, 1], [-1, 1], [2**62, 1], [-(2**62), 1]):
        with pytest.raises(IndexError, match="after its child"):
            _core.join_groups(np.array(wrong), np.array([[0, 1]], np.uint64))


@pytest.mark.parametrize("name", ["main", "second"])
def test_what_datatrove_keeps(name, oracles, tmp_path):
    """The same for 97 % of the rows: its arithmetic is ours, its words are spaCy's."""
    folder = oracles / "oracle" / "webtext" / name
    urls = [json.loads(line)["url"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    theirs = set(json.loads((folder / "minhash_xxhash64_14x8.json").read_text())["kept"])
    dedup(DedupOptions(input=folder / "corpus.jsonl", output=tmp_path / "out"))
    ours = {url for url, removed in zip(urls, _removed(tmp_path / "out"), strict=True) if not removed}
    assert len(ours ^ theirs) <= 0.03 * len(urls)


def test_sha1_is_the_librarys():
    for size in (0, 1, 55, 56, 63, 64, 65, 200):
        data = bytes(number % 251 for number in range(size))
        for count in (1, 4, 8):
            assert _core.sha1(data, count) == int.from_bytes(hashlib.sha1(data).digest()[:count], "little")


def _parquet(path: Path, texts: list[str]) -> Path:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=5, compression="none", use_dictionary=False)
    return path


def _in_tasks(options: DedupOptions, parts: int, ranges: int) -> None:
    """All stages, each in so many tasks, the last task first."""
    counts = {"match": ranges, "group": 1}
    for stage in options.stages:
        count = counts.get(stage, parts)
        for number in range(count, 0, -1):
            run_stage(dataclasses.replace(options, shard=PartNumber(number, count)), stage)


RESULTS = (FACTS, BITS, CHUNKS, "clusters.jsonl")


@pytest.mark.parametrize("more", [{}, {"verify": 0.5}, {"bands": 0}], ids=str)
def test_any_number_of_tasks_gives_the_same_bytes(more, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "BLOCK_BYTES", 700)
    monkeypatch.setattr(signing, "RUN_DOCUMENTS", 25)
    monkeypatch.setattr(runs, "MOST_RUNS", 3)
    monkeypatch.setattr(runs, "SORTED_RECORDS", 40)
    monkeypatch.setattr(grouping, "_LINES_AT_ONCE", 7)
    texts = _texts(11, 160)
    old = _write(tmp_path / "old.jsonl", texts[:30])
    files: list[str | Path] = [
        _write(tmp_path / "a.jsonl", texts[30:110], bad=True),
        _write(tmp_path / "b.jsonl.gz", texts[110:130]),
        _parquet(tmp_path / "c.parquet", texts[130:]),
        tmp_path / "d.jsonl",
    ]
    (tmp_path / "d.jsonl").touch()
    whole = DedupOptions(input=files, against=[old], output=tmp_path / "out", workers=2, **SHAPE | more)
    result = dedup(whole)
    assert result.removed > 20
    for parts, ranges in ((2, 5), (7, 16)):
        folder = tmp_path / f"out-{parts}"
        _in_tasks(dataclasses.replace(whole, output=folder, workers=1), parts, ranges)
        for name in RESULTS:
            assert (folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), (parts, name)
        assert sorted(path.name for path in folder.iterdir()) == sorted(RESULTS)


def test_one_process_at_a_time_writes_a_part(tmp_path, monkeypatch):
    """Two would write one temporary file: the first gave it its name while the second had emptied it."""
    job = DedupOptions(input=_write(tmp_path / "a.jsonl", _texts(3)), output=tmp_path / "out", write_text=True, **SHAPE)
    dedup(dataclasses.replace(job, write_text=False))
    write, refused = atomic_io.write_all, list[str]()

    def write_all(fd, data):
        write(fd, data)
        if not refused:
            with pytest.raises(UsageError, match="another process writes this part") as caught:
                run_stage(job, "drop")
            refused.append(str(caught.value))

    monkeypatch.setattr(atomic_io, "write_all", write_all)
    run_stage(job, "drop")
    assert refused and [path.name for path in (tmp_path / "out/text").iterdir()] == ["00001-of-00001.jsonl.zst"]


def test_a_text_is_not_compared_with_itself(tmp_path, monkeypatch):
    """Its rows counted twice, as those of an input of twice its size."""
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "new.jsonl", _texts(3))
    (tmp_path / "old").mkdir()
    (tmp_path / "old/link.jsonl").symlink_to("../new.jsonl")
    for earlier in ("new.jsonl", "old"):
        with pytest.raises(UsageError, match=r"new.jsonl is both input and --against"):
            dedup(DedupOptions(input="new.jsonl", against=[earlier], output=tmp_path / "out", **SHAPE))


@pytest.mark.parametrize("parts", [1, 3])
def test_the_rows_that_stay_are_written_byte_for_byte(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "BLOCK_BYTES", 700)
    texts = _texts(11, 120)
    old = _write(tmp_path / "old.jsonl", texts[:20])
    files: list[str | Path] = [
        _write(tmp_path / "a.jsonl", texts[20:80], bad=True),
        _write(tmp_path / "b.jsonl.gz", texts[80:100]),
        _parquet(tmp_path / "c.parquet", texts[100:]),
    ]
    whole = DedupOptions(input=files, against=[old], output=tmp_path / "out", write_text=True, workers=2, **SHAPE)
    _in_tasks(whole, parts, 2) if parts > 1 else dedup(whole)
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines() + gzip.decompress(
        (tmp_path / "b.jsonl.gz").read_bytes()
    ).splitlines()
    lines += [json.dumps({"text": text}, ensure_ascii=False, separators=(",", ":")).encode() for text in texts[100:]]
    expected = [line for line, is_removed in zip(lines, _removed(tmp_path / "out"), strict=True) if not is_removed]
    made = sorted((tmp_path / "out/text").iterdir())
    assert [path.name for path in made] == [f"{n:05}-of-{parts:05}.jsonl.zst" for n in range(1, parts + 1)]
    found = b"".join(
        zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read() for path in made
    )
    assert found.splitlines() == expected and len(expected) < len(lines) - 10
    before = [path.stat().st_mtime_ns for path in made]
    assert run_stage(dataclasses.replace(whole, shard=PartNumber(1, parts)), "drop") == dedup(
        dataclasses.replace(whole, write_text=False)
    )
    assert [path.stat().st_mtime_ns for path in made] == before
    with pytest.raises(UsageError, match="parts of another division"):
        run_stage(dataclasses.replace(whole, shard=PartNumber(1, 2)), "drop")
    made[0].unlink()
    with (tmp_path / "a.jsonl").open("r+b") as file:
        file.seek(20)
        file.write(b"~")
    with pytest.raises(UsageError, match="different inputs"):
        run_stage(dataclasses.replace(whole, shard=PartNumber(1, parts)), "drop")


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[DedupOptions, dict[str, bytes], list[tuple[str, str]]]:
    """Options, the results of an undisturbed run, and its calls that change the disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    texts = _texts(21, 60)
    files: list[str | Path] = [
        _write(folder / name, part) for name, part in (("a.jsonl", texts[:40]), ("b.jsonl.gz", texts[40:]))
    ]
    made = DedupOptions(input=files, output=folder / "out", workers=1, verify=0.4, **SHAPE)
    with pytest.MonkeyPatch.context() as patch:
        _make_small(patch)
        with durable_calls(patch) as calls:
            _in_tasks(made, 2, 2)
    return made, {name: (folder / "out" / name).read_bytes() for name in RESULTS}, calls.seen


def _make_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "BLOCK_BYTES", 900)
    patch.setattr(signing, "RUN_DOCUMENTS", 12)
    patch.setattr(runs, "MOST_RUNS", 3)
    patch.setattr(runs, "SORTED_RECORDS", 40)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(5, 55))])
def test_stages_that_are_killed_anywhere_give_the_same_result(seed, undisturbed, tmp_path, monkeypatch):
    made, expected, calls = undisturbed
    _make_small(monkeypatch)
    options, draw = dataclasses.replace(made, output=tmp_path / "out"), random.Random(seed)
    kills = 0
    while killed_at(draw.randrange(len(calls)), lambda: _in_tasks(options, 2, 2)):
        kills += 1
    assert {name: (tmp_path / "out" / name).read_bytes() for name in RESULTS} == expected
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left - {".lock"} == set(RESULTS)  # a lock that nobody holds


@pytest.mark.parametrize("renamed", ["00001.run", "sign-00001-of-00002.json", "edges", "dedup.json"])
def test_a_kill_before_or_after_the_last_file_of_a_stage(renamed, undisturbed, tmp_path, monkeypatch):
    made, expected, calls = undisturbed
    _make_small(monkeypatch)
    options = dataclasses.replace(made, output=tmp_path / "out")
    at = max(n for n, (name, file) in enumerate(calls) if name == "rename" and file.endswith(f"-> {renamed}"))
    with pytest.raises(ResourceError, match="No space left"), durable_calls(monkeypatch, at + 1):
        _in_tasks(options, 2, 2)
    _in_tasks(options, 2, 2)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in RESULTS} == expected


def test_a_full_disk_in_a_merge_is_said_and_the_command_continues(undisturbed, tmp_path, monkeypatch):
    made, expected, calls = undisturbed
    _make_small(monkeypatch)
    options = dataclasses.replace(made, output=tmp_path / "out")
    at = next(n for n, (name, file) in enumerate(calls) if name == "write" and ".merged" in file)
    with pytest.raises(ResourceError, match="No space left on device"), durable_calls(monkeypatch, at):
        _in_tasks(options, 2, 2)
    _in_tasks(options, 2, 2)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in RESULTS} == expected


def test_parts_of_other_options_are_named_and_not_taken(tmp_path):
    path = _write(tmp_path / "a.jsonl", _texts(2))
    options = DedupOptions(input=path, output=tmp_path / "out", **SHAPE)
    for number in (1, 2):
        run_stage(dataclasses.replace(options, shard=PartNumber(number, 2)), "sign")
    other = dataclasses.replace(options, bands=5)
    with pytest.raises(
        UsageError, match=r"no finished sign of this input and these options\n  found: .*different bands"
    ):
        run_stage(other, "match")
    run_stage(dataclasses.replace(other, shard=PartNumber(1, 2)), "sign")
    with pytest.raises(
        UsageError, match=r"1 of 2 tasks of sign are not done\n.*different bands\n.*sign-00002-of-00002"
    ):
        run_stage(dataclasses.replace(other, parts=2), "match")
    run_stage(dataclasses.replace(options, shard=PartNumber(1, 1)), "sign")
    with pytest.raises(UsageError, match=r"several divisions of sign\n  found: 1, 2\n.*--parts"):
        run_stage(options, "match")
    run_stage(dataclasses.replace(options, parts=2), "match")
    with pytest.raises(UsageError, match=r"match-00001-of-00001\.json was made of other parts"):
        run_stage(dataclasses.replace(options, parts=1), "group")
    assert run_stage(dataclasses.replace(options, parts=2), "group") == dedup(options)
    with pytest.raises(UsageError, match="no stage sets without --verify"):
        run_stage(options, "sets")


def test_a_share_of_one_is_that_of_one_point_zero(tmp_path):
    path = _write(tmp_path / "a.jsonl", ["a b"])
    made = [DedupOptions(input=path, output=tmp_path / "out", verify=verify) for verify in (1, 1.0)]
    assert len({plan.DedupJob(one).name for one in made}) == 1


def test_texts_that_share_every_band_are_linear_work(tmp_path):
    """Four words have the smallest values of 20,000, one under each permutation, and stand in every text."""
    a, b = permutations(4)
    words = [f"x{number}" for number in range(20_000)]
    hashes = np.array([_core.xxh64(word.encode()) for word in words], np.uint64)
    with np.errstate(over="ignore"):
        values = (hashes[:, None] * a + b) % np.uint64(slow.PRIME)
    common, draw = " ".join(words[number] for number in values.argmin(axis=0).tolist()), random.Random(1)
    texts = [f"{common} " + " ".join(draw.sample(words, 30)) for _ in range(60)]
    path = _write(tmp_path / "a.jsonl", [*texts, texts[-1] + " end"])
    options = DedupOptions(input=path, output=tmp_path / "out", bands=4, rows=1, ngram=1, verify=0.8)
    for stage in options.stages[:-1]:
        run_stage(options, stage)
    (done,) = (tmp_path / "out/.work").glob("*/verify-00001-of-00001.json")
    assert json.loads(done.read_bytes()) == {"compared": 2 * 60 - 1, "count": 1}
    run_stage(options, "group")
    assert _removed(tmp_path / "out") == [False] * 60 + [True]
    unverified = dataclasses.replace(options, output=tmp_path / "all", verify=0)
    assert dedup(unverified).removed == 60


def _in_process(code: str, *words: str, hash_seed: str = "0") -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": hash_seed}
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr


_STAGES = """
import resource, sys
from mdata.dedup.dedup import DedupOptions, run_stage
output, megabytes, stages, *inputs = sys.argv[1:]
# Of what numpy and other libraries take when they are loaded, nothing counts.
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
limit = used + (int(megabytes) << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
options = DedupOptions(input=inputs, output=output, bands=2, rows=2, ngram=2, verify=0.5, workers=1)
for stage in stages.split():
    run_stage(options, stage)
"""


def test_the_seed_of_pythons_hashes_changes_no_byte(tmp_path):
    path = _write(tmp_path / "a.jsonl", _texts(4))
    for seed in ("1", "2"):
        _in_process(_STAGES, str(tmp_path / seed), "4000", "sign match sets verify group", str(path), hash_seed=seed)
    for name in RESULTS:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.mark.soak
def test_memory_of_each_stage_is_bounded(tmp_path):
    """Each document is there twice, so that pairs are as many as documents."""
    count = 1_500_000
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for _ in range(2):
            file.writelines(f'{{"text": "a{number} b c{number}"}}\n' for number in range(count))
    out = str(tmp_path / "out")
    for stage, megabytes in (("sign", 250), ("match", 128), ("sets", 300), ("verify", 250), ("group", 24 + 200)):
        _in_process(_STAGES, out, str(megabytes), stage, str(path))
    assert sum(_removed(tmp_path / "out")) == count


@pytest.mark.soak
@pytest.mark.parametrize("piece", ["one two three four five ", "a", "\u4e2d", "\u00e9 ", "..."])
def test_a_document_of_60_mb_is_compared(piece, tmp_path):
    text = piece * (60_000_000 // len(piece.encode()))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for _ in "ab"))
    _in_process(_STAGES, str(tmp_path / "out"), "3000", "sign match sets verify group", str(tmp_path / "a.jsonl"))
    assert _removed(tmp_path / "out") == [False, True]


def test_lone_surrogates_and_single_words(tmp_path):
    lines = ['{"text": "\\ud800 a b c"}'] * 2 + [
        json.dumps({"text": text}) for text in ("Word", "word", "", "", "other")
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    dedup(DedupOptions(input=tmp_path / "a.jsonl", output=tmp_path / "out", **SHAPE))
    # A row with a lone surrogate is a bad row, and left to preprocess; single and no words are compared as a whole.
    assert _removed(tmp_path / "out") == [False, False, False, True, False, True, False]


def _preprocessed(folder: Path, inputs: list[Path], **more: object) -> mdata.PreprocessOptions:
    return options(folder, input=inputs, output_prefix=str(folder / "made"), **more)


@pytest.mark.parametrize("holdout", ["0", "0.3"])
def test_preprocess_leaves_out_the_rows(holdout, tmp_path):
    texts = [text for text in _texts(4, 80) if text]
    parts = texts[:50], texts[50:]
    names = "a.jsonl", "b.jsonl.gz"
    files = [_write(tmp_path / name, part, bad=True) for name, part in zip(names, parts, strict=True)]
    dedup(DedupOptions(input=files, output=tmp_path / "out", **SHAPE))
    removed, kept = RowSet.open(tmp_path / "out").removed, list[Path]()
    for number, (part, rows) in enumerate(zip(parts, removed, strict=True)):
        of_texts = [rows[0], *rows[2:]]  # the second row is bad
        left = [text for text, is_removed in zip(part, of_texts, strict=True) if not is_removed]
        kept.append(_write(tmp_path / f"kept-{number}.jsonl", left))
    for name in ("skipping", "kept"):
        (tmp_path / name).mkdir()
    more = {"on_error": "skip", "holdout": holdout}
    made = mdata.preprocess(_preprocessed(tmp_path / "skipping", files, skip_rows=tmp_path / "out", **more))
    mdata.preprocess(_preprocessed(tmp_path / "kept", kept, **more))
    stems = sorted(path.stem for path in (tmp_path / "kept").glob("*.bin"))
    assert len(stems) == (1 if holdout == "0" else 2)
    for stem in stems:
        assert pair(tmp_path / "skipping", stem) == pair(tmp_path / "kept", stem)
    filtered = {manifest.provenance.filtered for manifest in made.manifests.values() if manifest.provenance}
    assert filtered == {sum(int(rows.sum()) for rows in removed)}


@pytest.fixture
def divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that parts of a job divide, with their repeats found."""
    monkeypatch.setattr(plan, "BLOCK_BYTES", 700)
    texts = [text for text in _texts(4, 120) if text]
    files = [_write(tmp_path / "a.jsonl", texts[:70], bad=True), _parquet(tmp_path / "b.parquet", texts[70:])]
    dedup(DedupOptions(input=files, output=tmp_path / "out", **SHAPE))
    return files


def test_parts_of_preprocess_leave_out_the_rows_of_their_sections(divided, tmp_path):
    more = {"on_error": "skip", "skip_rows": tmp_path / "out", "chunk_bytes": 700}
    (tmp_path / "one").mkdir()
    mdata.preprocess(_preprocessed(tmp_path / "one", divided, **more))
    (tmp_path / "parts").mkdir()
    for number in range(1, 5):
        mdata.preprocess(_preprocessed(tmp_path / "parts", divided, shard=f"{number}/4", **more))
    (merged,) = merge(str(tmp_path / "parts/made"), copy=True)
    assert pair(tmp_path / "one", "made_text_document") == pair(tmp_path / "parts", "made_text_document")
    provenance = merged.manifest.provenance
    assert provenance is not None and provenance.filtered == sum(_removed(tmp_path / "out")) > 10


@pytest.mark.parametrize(("name", "shard"), [("a.jsonl", "1/7"), ("b.parquet", "7/7")])
def test_a_changed_section_is_refused(name, shard, divided, tmp_path):
    path = tmp_path / name
    if name == "a.jsonl":
        path.write_text(path.read_text().replace("w1", "w2"))  # the same size
    else:
        size, texts = path.stat().st_size, pq.read_table(path)["text"].to_pylist()
        _parquet(path, [text.replace("w1", "w2") for text in texts])
        assert path.stat().st_size == size
    more = {"on_error": "skip", "skip_rows": tmp_path / "out", "chunk_bytes": 700, "shard": shard}
    with pytest.raises(UsageError, match=rf"{name} is not the file that mdata dedup read"):
        mdata.preprocess(_preprocessed(tmp_path, divided, **more))


def test_sections_without_chunks_or_of_damaged_ones_are_refused(divided, tmp_path):
    chunks = tmp_path / "out" / CHUNKS
    more = {"on_error": "skip", "skip_rows": tmp_path / "out", "chunk_bytes": 700, "shard": "1/7"}
    chunks.write_bytes(chunks.read_bytes()[:-1])
    chunks.write_bytes(bytes(8) + chunks.read_bytes()[8:])
    with pytest.raises(DamageError, match=r"chunks\.bin is damaged"):
        mdata.preprocess(_preprocessed(tmp_path, divided, **more))
    chunks.unlink()
    with pytest.raises(UsageError, match=r"has no chunks\.bin"):
        mdata.preprocess(_preprocessed(tmp_path, divided, **more))


def test_files_that_dedup_did_not_read_are_refused(tmp_path):
    path = _write(tmp_path / "a.jsonl", ["a b", "a b", "c d"])
    dedup(DedupOptions(input=path, output=tmp_path / "out", **SHAPE))
    other = _write(tmp_path / "b.jsonl", ["a b"])
    for inputs in ([other], [path, other]):
        with pytest.raises(UsageError, match="does not say which rows"):
            mdata.preprocess(_preprocessed(tmp_path, inputs, skip_rows=tmp_path / "out"))
    path.write_text(path.read_text().replace("c d", "d c"))  # the same size
    with pytest.raises(UsageError, match="is not the file that mdata dedup read"):
        mdata.preprocess(_preprocessed(tmp_path, [path], skip_rows=tmp_path / "out"))
    path.write_text(path.read_text() * 2)
    with pytest.raises(UsageError, match="has changed"):
        mdata.preprocess(_preprocessed(tmp_path, [path], skip_rows=tmp_path / "out"))
    with pytest.raises(UsageError, match="finished"):
        mdata.preprocess(_preprocessed(tmp_path, [path], skip_rows=tmp_path))
    assert not list(tmp_path.glob("made*"))


def test_damaged_results_are_refused(tmp_path):
    path = _write(tmp_path / "a.jsonl", ["a b", "a b", "c d"])
    options = DedupOptions(input=path, output=tmp_path / "out", **SHAPE)
    dedup(options)
    bits, facts = (tmp_path / "out" / name for name in (BITS, FACTS))
    whole = facts.read_bytes()
    for damage, match in ((b"", "another size"), (b"\x07", "is damaged")):
        before = bits.read_bytes()
        bits.write_bytes(damage)
        with pytest.raises(DamageError, match=match):
            RowSet.open(tmp_path / "out")
        bits.write_bytes(before)
    facts.write_text("{")
    with pytest.raises(DamageError, match=r"(?s)dedup\.json is damaged.*make .*out again"):
        RowSet.open(tmp_path / "out")
    with pytest.raises(DamageError, match=r"(?s)dedup\.json is damaged.*remove it, and run the same command again"):
        dedup(options)
    facts.unlink()
    dedup(options)
    assert facts.read_bytes() == whole
