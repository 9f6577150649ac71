"""Duplicates: signatures against their formula, the command against all pairs, and the rows that preprocess skips."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import DamageError, UsageError, _core
from mdata.dedup import dedup as module
from mdata.dedup.dedup import DedupOptions, dedup, permutations
from mdata.dedup.row_set import BITS, FACTS, RowSet
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


def test_xxh64_has_the_published_values() -> None:
    published = {b"": 0xEF46DB3751D8E999, b"a": 0xD24EC4F1A98C6E5B, b"abc": 0x44BC2CF5AD770999}
    published[b"Nobody inspects the spammish repetition"] = 0xFBCEA83C8A378BF1
    assert {text: _core.xxh64(text) for text in published} == published


@given(st.lists(st.text(st.sampled_from("aBé ß,._-1中Ω\n\tİǅ\u0301"), max_size=40), min_size=1, max_size=5))
def test_the_normal_form_is_the_words_of_berts_normalizer(texts: list[str]) -> None:
    signer = _core.MinHashSigner(*permutations(8), rows=2, ngram=2)
    forms, ends, _, has_ngram = signer.sign(texts)
    begin = 0
    for text, end, has in zip(texts, ends.tolist(), has_ngram.tolist(), strict=True):
        words = slow.words_of(text)
        assert forms[begin:end].decode() == " ".join(words)
        assert bool(has) == (len(words) >= 2)
        begin = end


def test_signatures_are_their_formula() -> None:
    texts = [text for text in _texts(1) if len(slow.words_of(text)) >= 2]
    a, b = permutations(21)
    signer = _core.MinHashSigner(a, b, rows=3, ngram=2)
    keys = signer.sign(texts)[2]
    for text, found in zip(texts, keys, strict=True):
        bands = slow.signature(slow.words_of(text), bands=7, rows=3, ngram=2)
        assert [_core.xxh64(np.array(band, np.uint64).tobytes()) for band in bands] == found.tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bands", [4, 0])
def test_what_is_removed_is_what_all_pairs_say(
    seed: int, bands: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RUN_DOCUMENTS", 7)
    texts = _texts(seed)
    files = [_write(tmp_path / name, part) for name, part in (("a.jsonl", texts[:25]), ("b.jsonl.gz", texts[25:]))]
    shape = SHAPE | {"bands": bands}
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


def test_one_run_or_many_threads_and_parts_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = _texts(5, 200)
    whole = _write(tmp_path / "whole.jsonl", texts)
    found = []
    for number, (workers, run) in enumerate(((1, 1000), (4, 11), (3, 64))):
        monkeypatch.setattr(module, "RUN_DOCUMENTS", run)
        monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 22 if number < 2 else 1 << 10)
        folder = tmp_path / f"out-{number}"
        dedup(DedupOptions(input=whole, output=folder, workers=workers, **SHAPE))
        found.append(((folder / BITS).read_bytes(), (folder / "clusters.jsonl").read_bytes()))
    assert found[0] == found[1] == found[2] and any(found[0][0])


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUN_DOCUMENTS", 9)
    monkeypatch.setattr(module, "BLOCK_BYTES", 500)
    texts = _texts(7, 150)
    files = [_write(tmp_path / name, part) for name, part in (("a.jsonl", texts[:90]), ("b.jsonl.gz", texts[90:]))]
    options = DedupOptions(input=files, output=tmp_path / "out", workers=2, **SHAPE)
    dedup(DedupOptions(input=files, output=tmp_path / "whole", workers=1, **SHAPE))
    write, signed = module._Job._write_runs, list[int]()

    def fails(job: module._Job, state: module._State, part: list[tuple[int, module.Signed]]) -> None:
        write(job, state, part)
        signed.append(sum(len(chunk.kept) for _, chunk in part))
        if len(signed) in (1, 3, 4):
            raise KeyboardInterrupt

    monkeypatch.setattr(module._Job, "_write_runs", fails)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            dedup(options)
    dedup(options)
    assert sum(signed) == len(texts)  # nothing was signed twice
    for name in (BITS, "clusters.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_finished_result_is_left_and_another_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", _texts(2))
    options = DedupOptions(input=path, output=tmp_path / "out", **SHAPE)
    first = dedup(options)
    written = (tmp_path / "out" / FACTS).stat().st_mtime_ns
    assert dedup(options) == first and (tmp_path / "out" / FACTS).stat().st_mtime_ns == written
    with pytest.raises(UsageError, match=r"other input or options\n  found: different ngram\n"):
        dedup(DedupOptions(input=path, output=tmp_path / "out", **SHAPE | {"ngram": 3}))


def test_texts_against_which_is_compared_stay(tmp_path: Path) -> None:
    old = _write(tmp_path / "old.jsonl", ["one two three", "four five six", "four five six"])
    new = _write(tmp_path / "new.jsonl", ["Four, five, six!", "seven eight nine", "seven eight nine", ""])
    result = dedup(DedupOptions(input=new, against=[old], output=tmp_path / "out", **SHAPE))
    assert _removed(tmp_path / "out") == [True, False, True, False]
    assert (result.rows, result.removed) == (4, 2)


def test_no_duplicates_and_no_rows(tmp_path: Path) -> None:
    files = [_write(tmp_path / "a.jsonl", ["a b", "c d"]), tmp_path / "b.jsonl", tmp_path / "c.jsonl"]
    for empty in files[1:]:
        empty.touch()
    result = dedup(DedupOptions(input=files, output=tmp_path / "out", **SHAPE))
    assert (result.rows, result.removed, result.clusters) == (2, 0, 0) and _removed(tmp_path / "out") == [False] * 2
    assert dedup(DedupOptions(input=files[1:], output=tmp_path / "none", **SHAPE)).rows == 0
    assert _removed(tmp_path / "none") == []


def test_bad_rows_and_texts_without_words(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", ["...", "?!", "...", "a b c"], bad=True)
    dedup(DedupOptions(input=path, output=tmp_path / "out", **SHAPE))
    assert _removed(tmp_path / "out") == [False, False, False, True, False]  # the second row is not JSON


def test_documents_that_are_all_shorter_than_an_ngram(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", ["a", "b", "A."])
    result = dedup(DedupOptions(input=path, output=tmp_path / "out", **SHAPE))
    assert (result.removed, _removed(tmp_path / "out")) == (1, [False, False, True])


def test_an_input_without_texts_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", ["a b c", "d e f"])
    with pytest.raises(UsageError, match=r"no row has a text under 'body'\n  found: 2 rows"):
        dedup(DedupOptions(input=path, output=tmp_path / "out", json_key="body", **SHAPE))


def test_recall_is_that_of_the_formula(tmp_path: Path) -> None:
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


def test_records_are_joined_over_runs() -> None:
    runs = [np.array([[5, 0], [9, 1]], np.uint64), np.array([[5, 0], [5, 2], [7, 1]], np.uint64)]
    edges = _core.bucket_edges(runs, [0, 10])
    assert edges.tolist() == [[0, 10], [0, 12]]
    parents = np.arange(13)
    _core.join_groups(parents, edges)
    assert parents[12] == parents[10] == 0 and parents[11] == 11
    with pytest.raises(IndexError):
        _core.join_groups(parents, np.array([[0, 13]], np.uint64))


@pytest.mark.parametrize("name", ["main", "second"])
def test_what_datatrove_keeps(name: str, oracles: Path, tmp_path: Path) -> None:
    """The same for 97 % of the rows: its arithmetic is ours, its words are spaCy's."""
    folder = oracles / "oracle" / "webtext" / name
    urls = [json.loads(line)["url"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    theirs = set(json.loads((folder / "minhash_xxhash64_14x8.json").read_text())["kept"])
    dedup(DedupOptions(input=folder / "corpus.jsonl", output=tmp_path / "out"))
    ours = {url for url, removed in zip(urls, _removed(tmp_path / "out"), strict=True) if not removed}
    assert len(ours ^ theirs) <= 0.03 * len(urls)


def _preprocessed(folder: Path, inputs: list[Path], **more: object) -> mdata.PreprocessOptions:
    return options(folder, input=inputs, output_prefix=str(folder / "made"), **more)


@pytest.mark.parametrize("holdout", ["0", "0.3"])
def test_preprocess_leaves_out_the_rows(holdout: str, tmp_path: Path) -> None:
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


def test_files_that_dedup_did_not_read_are_refused(tmp_path: Path) -> None:
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


def test_damaged_results_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", ["a b", "a b", "c d"])
    dedup(DedupOptions(input=path, output=tmp_path / "out", **SHAPE))
    bits, facts = (tmp_path / "out" / name for name in (BITS, FACTS))
    for damage, match in ((b"", "another size"), (b"\x07", "is damaged")):
        before = bits.read_bytes()
        bits.write_bytes(damage)
        with pytest.raises(DamageError, match=match):
            RowSet.open(tmp_path / "out")
        bits.write_bytes(before)
    facts.write_text("{")
    with pytest.raises(DamageError, match="not readable"):
        RowSet.open(tmp_path / "out")
