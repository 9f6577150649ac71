"""Test items are found exactly, whatever their case, punctuation and blanks; texts are reported, dropped or split."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import _core
from mdata.cleaning import decontaminate as decontaminating
from mdata.cleaning import openwebtext_ngrams, text_job
from mdata.cleaning.decontaminate import DecontaminateRules, decontaminate, split_text
from mdata.cleaning.openwebtext_ngrams import OpenWebTextNgrams, Pieces
from mdata.cleaning.text_job import TextJobOptions, TextJobResult
from mdata.dedup.row_set import RowSet
from mdata.errors import ResourceError, UsageError
from tests.helpers.failures import durable_calls
from tests.reference import decontaminate as twin
from tests.reference import text_rules

WORDS = st.sampled_from(
    ["a", "b", "A,", "it's", "its", "b.", "\u03a3a\u03a3", "\u0130", "x1", "\u4e2d", "'", "\u2019 a", "-"]
)
TEXTS = st.lists(WORDS, max_size=14).map(" ".join)
of_unicode_14 = pytest.mark.skipif(text_rules.EDITION != "14.0.0", reason="the twins ask Python")


@of_unicode_14
@given(TEXTS, st.lists(TEXTS, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_matches_are_those_of_the_twin(text, items, most, fewer):
    least = max(1, most - fewer)
    spans, hits = _core.NgramIndex(items, most, least).match(["", text])
    wanted, found = twin.match(text, items, most, least)
    merged = [tuple(span[1:]) for span in spans.tolist()]
    assert _joined(merged) == _joined(wanted) and hits.tolist() == [[1, item] for item in found]


def _joined(spans: list[tuple[int, int]]) -> set[int]:
    return {at for begin, end in spans for at in range(begin, end)}


@of_unicode_14
@given(st.text(st.sampled_from("aB\u03a3\u03c3\u0130'. _\u0301\u02b0\u00b2\u0663\U00010400\u1e9e\n"), max_size=12))
def test_words_of_openwebtext_are_those_of_python(text):
    words, begins = _core.openwebtext_words(text)
    assert ((words.split("\n") if len(begins) else []), begins.tolist()) == twin.openwebtext_words(text)


@of_unicode_14
def test_every_code_point_in_lower_case():
    codes = (_core.text_classes() & text_rules.WORD).nonzero()[0].tolist()
    for first in range(0, len(codes), 5000):
        text = " ".join(f"a{chr(code)}" for code in codes[first : first + 5000])
        words, begins = _core.openwebtext_words(text)
        assert (words.split("\n"), begins.tolist()) == twin.openwebtext_words(text)


def write(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "n": n}) + "\n" for n, text in enumerate(texts)))
    return path


def vocabulary(draws: random.Random, count: int) -> str:
    words = ("".join(draws.choices("abcdefghij", k=5)) for _ in range(count))
    return " ".join(word + "." * (number % 9 == 8) for number, word in enumerate(words))


def changed(draws: random.Random, text: str) -> str:
    """The same words in other case, with other punctuation and blanks."""
    words = [draws.choice((str.upper, str.title, str.lower))(word) for word in text.split()]
    return "".join(word + draws.choice((" ", ", ", "?  ", "\n", "; ", " -- ")) for word in words)


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, list[Path], list[int]]:
    """A corpus, two test sets, and the rows that hold a passage of 13 words or more of one of their items."""
    draws = random.Random(7)
    sets = [[vocabulary(draws, draws.randrange(8, 60)) for _ in range(30)] for _ in range(2)]
    texts, rows = [], []
    for row in range(200):
        text = vocabulary(draws, 150)
        if row % 3 == 0:
            item = draws.choice(draws.choice(sets)).split()
            size = min(len(item), draws.randrange(13, 30))
            first = draws.randrange(len(item) - size + 1)
            text = f"{text}. {changed(draws, ' '.join(item[first : first + size]))}. {vocabulary(draws, 150)}"
            rows.append(row)
        texts.append(text)
    paths = [write(tmp_path / f"{name}.jsonl", items) for name, items in zip(("one", "two"), sets, strict=True)]
    return write(tmp_path / "corpus.jsonl", texts), paths, rows


def run(source: Path, against: list[Path], output: Path, mode: str = "drop", **more: object) -> TextJobResult:
    names = ("workers", "rows_only", "removed", "on_error", "compression")
    options = TextJobOptions(
        input=source, output=output, **{"workers": 1, **{n: more.pop(n) for n in names if n in more}}
    )
    return decontaminate(options, DecontaminateRules(against=tuple(map(str, against)), mode=mode, **more))  # type: ignore[arg-type]


def rows_of(folder: Path) -> list[int]:
    return [json.loads(line)["n"] for line in (folder / "corpus.jsonl").read_text().splitlines()]


def test_all_planted_passages_are_found_and_nothing_else(planted, tmp_path):
    corpus, sets, rows = planted
    result = run(corpus, sets, tmp_path / "out")
    assert rows_of(tmp_path / "out") == [row for row in range(200) if row not in rows]
    assert sum(result.removed.values()) == len(rows)
    found = {one["name"]: one for one in result.summary["sets"]}
    assert set(found) == {"one", "two"} and sum(one["rows"] for one in found.values()) == len(rows)
    assert all(0 < one["found"] <= one["items"] == 30 for one in found.values())
    report = run(corpus, sets, tmp_path / "report", "report")
    assert report.summary == result.summary and not report.removed
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["decontaminate.report"]
    run(corpus, sets, tmp_path / "rows", rows_only=True)
    assert RowSet.open(tmp_path / "rows").removed[0].nonzero()[0].tolist() == rows


def test_split_texts_keep_what_is_far_from_a_passage(planted, tmp_path):
    corpus, sets, rows = planted
    result = run(corpus, sets, tmp_path / "out", "split", margin=20, min_characters=10)
    assert result.removed == {} and result.changed == len(rows)
    pieces = rows_of(tmp_path / "out")
    assert set(pieces) == set(range(200)) and len(pieces) > 200
    again = run(tmp_path / "out/corpus.jsonl", sets, tmp_path / "again")
    assert again.removed == {}
    rules = DecontaminateRules(against=("x",), mode="split", margin=0, min_characters=1)
    assert split_text("ab. cd ef. gh ij. kl", [(7, 9)], rules) == ["ab.", " gh ij. kl"]
    assert split_text("ab. cd ef. gh ij. kl", [(0, 2), (1, 3)], rules) == [" cd ef. gh ij. kl"]
    few = run(corpus, sets, tmp_path / "few", "split", max_pieces=0)
    assert few.removed["too-many-pieces"] > 0


def test_bytes_do_not_depend_on_workers(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(text_job, "BLOCK_BYTES", 20_000)
    corpus, sets, _ = planted
    for mode, more in (("split", {}), ("split", {"compat": "openwebtext"})):
        results = [
            run(corpus, sets, tmp_path / f"{mode}{workers}{len(more)}", mode, workers=workers, **more)
            for workers in (1, 3)
        ]
        assert results[0].removed == results[1].removed and results[0].summary == results[1].summary
        contents = [(tmp_path / f"{mode}{workers}{len(more)}/corpus.jsonl").read_bytes() for workers in (1, 3)]
        assert contents[0] == contents[1] != b""
        assert run(corpus, sets, tmp_path / f"{mode}1{len(more)}", mode, **more) == results[0]


@pytest.mark.parametrize("more", [{}, {"compat": "openwebtext"}], ids=["default", "compat"])
def test_a_run_that_fails_anywhere_continues(planted, tmp_path, monkeypatch, more):
    monkeypatch.setattr(text_job, "BLOCK_BYTES", 60_000)
    monkeypatch.setattr(text_job, "_CHECKPOINT_S", 0)
    corpus, sets, _ = planted
    with durable_calls(monkeypatch) as calls:
        whole = run(corpus, sets, tmp_path / "whole", "split", **more)
    for first in range(0, len(calls.seen), 19):
        output, at = tmp_path / f"out{first}", first
        while not (output / "decontaminate.report").exists():
            with durable_calls(monkeypatch, at), suppress(ResourceError):
                run(corpus, sets, output, "split", **more)
            at += 23
        assert run(corpus, sets, output, "split", **more) == replace(whole, folder=output)
        assert (output / "corpus.jsonl").read_bytes() == (tmp_path / "whole/corpus.jsonl").read_bytes()


def test_counts_of_a_run_that_was_killed_after_its_report_are_removed(tmp_path, monkeypatch):
    corpus, against = write(tmp_path / "corpus.jsonl", ["one two"]), write(tmp_path / "eval.jsonl", ["a b c"])
    before = decontaminating.run_text_job

    def killed(options, work, progress):
        result = before(options, work, progress)
        if work.writes:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(decontaminating, "run_text_job", killed)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, [against], tmp_path / "out", "split", compat="openwebtext")
    monkeypatch.undo()
    assert (tmp_path / "out" / decontaminating.COUNTS).exists()
    run(corpus, [against], tmp_path / "out", "split", compat="openwebtext")
    assert not (tmp_path / "out" / decontaminating.COUNTS).exists()


def test_openwebtext_leaves_frequent_ngrams_alone(tmp_path):
    item = "one two three four five six seven eight"
    texts = [f"before it all. {item.upper()}! after all. and then more."] * 3
    corpus, against = write(tmp_path / "corpus.jsonl", texts), write(tmp_path / "eval.jsonl", [item])
    small = {"margin": 1, "min_characters": 3, "compat": "openwebtext"}
    result = run(corpus, [against], tmp_path / "out", "split", **small)
    lines = (tmp_path / "out/corpus.jsonl").read_text().splitlines()
    wanted = [f'{{"text": "{piece}", "n": 0, "split_id": "eval-0000000001-000{n}"}}' for n, piece in enumerate(
        ("before it all.", " and then more."))]  # fmt: skip
    assert lines[:2] == wanted and result.summary == {"frequent": []}
    result = run(corpus, [against], tmp_path / "all", "split", key_threshold=3, **small)
    assert result.summary == {"frequent": [item]} and result.changed == 0 and result.kept == 3


def test_shorter_ngrams_at_the_end_of_openwebtexts_texts():
    """They are tried in the last words only if a text has more words than the longest n-gram."""
    ngrams = OpenWebTextNgrams.of_items(["x y", "a b c d"], most=4, least=2)
    assert ngrams.lengths == [2, 4]
    assert ngrams.free_pieces("p x y", Pieces(0, 0)) == ["p x y"]
    assert ngrams.occurring("p q r x y") == {"x y"} and ngrams.occurring("x y p q a b c d") == {"x y", "a b c d"}


def test_ngrams_of_openwebtext_in_windows_are_those_of_whole_rests(monkeypatch):
    """Of few words, so that n-grams of several lengths meet at the end of a window."""
    chance, found = random.Random(1), 0
    for _ in range(4000):
        words = chance.choices(["a", "b", "C", "x", "y", "\u0130", "a\u03a3"], k=chance.randrange(40))
        text = "".join(word + chance.choice([" ", " ", "\n", ". ", "-", "\u03a3"]) for word in words)
        items = [" ".join(chance.choices(["a", "b", "C", "\u0130"], k=chance.randint(1, 4))) for _ in range(3)]
        ngrams = OpenWebTextNgrams.of_items(items, most=chance.randint(1, 4), least=1)
        limits, results = Pieces(margin=chance.randrange(4), min_characters=1), []
        for size in (len(text) + 1, chance.randint(1, 20)):
            monkeypatch.setattr(openwebtext_ngrams, "_WINDOW", size)
            results.append((ngrams.occurring(text), ngrams.free_pieces(text, limits)))
        assert results[0] == results[1], (text, items)
        found += len(results[0][0])
    assert found > 4000


def test_what_it_refuses(tmp_path):
    corpus = write(tmp_path / "corpus.jsonl", ["a"])
    rules: dict[str, object] = {"against": (str(corpus),)}
    for options, message in (
        ({"against": ()}, "names no test set"),
        ({"ngram": 5}, "min_ngram=8, ngram=5"),
        ({"mode": "keep"}, "mode=keep"),
        ({"compat": "openwebtext"}, "OpenWebText splits"),
        ({"compat": "other", "mode": "split"}, "compat=other"),
        ({"margin": -1}, "margin is -1"),
    ):
        with pytest.raises(UsageError, match=message):
            DecontaminateRules(**(rules | options))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"two test sets have the name corpus"):
        run(corpus, [corpus, corpus], tmp_path / "out")
    assert run(corpus, [f"a={corpus}", f"b={corpus}"], tmp_path / "out").kept == 1  # type: ignore[list-item]
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match=r"the test set .*empty\.jsonl has no items\n  try: give its file"):
        run(corpus, [corpus, tmp_path / "empty.jsonl"], tmp_path / "empty")
    with pytest.raises(UsageError, match=r"rows_only lists removed rows"):
        run(corpus, [corpus], tmp_path / "out", "split", rows_only=True)
    with pytest.raises(ValueError, match=r"least <= most"):
        _core.NgramIndex(["a"], 2, 3)
    with pytest.raises(UnicodeEncodeError):
        _core.NgramIndex(["\ud800"], 2, 1)


@pytest.mark.timeout(10)
def test_many_passages_in_a_text_without_a_question_take_no_quadratic_time():
    count, sentence = 32_000, "\u0436" * 500 + "."
    passages = [(501 * number + 250, 501 * number + 260) for number in range(count)]
    assert split_text(sentence * count, passages, DecontaminateRules(against=("a",))) == []


def test_a_phrase_of_many_items_takes_no_quadratic_time():
    items = [f"answer the question in one word please now {number}" for number in range(20_000)]
    index = _core.NgramIndex(items, 8, 8)
    texts = ["answer the question in one word please now. " * 50] * 50
    spans, hits = index.match(texts)
    assert len(hits) == 50 * 20_000 and len(spans) == 50 * 50
