"""Rows chosen by a file of scores, their statistics, and the commands `mdata filter` and `mdata scores`."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from cli.mdata import main
from mdata import BadInputError, UsageError
from mdata.cleaning.scores import Scored, chosen, maxima, read_prompts, read_scores, statistics


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_share_is_of_all_lines_and_equal_scores_keep_their_order():
    scores = [Scored(str(n), score) for n, score in enumerate([0.5, None, 0.1, 0.5, 0.3, None, 0.9])]
    assert [one.id for one in chosen(scores, Fraction("0.5"))] == ["2", "4", "0"]  # 3 of 7 lines
    assert [one.id for one in chosen(scores, Fraction("0.5"), highest=True)] == ["6", "0", "3"]
    assert len(chosen(scores, Fraction(1))) == 5 and not chosen(scores, Fraction(0))


def test_statistics_by_prompt():
    assert statistics([0.2, 0.6]) == pytest.approx(
        {"count": 2, "mean": 0.4, "std": 0.2, "min": 0.2, "max": 0.6, "above": 0.5}
    )
    scores = [Scored("0", 0.2, "a"), Scored("1", 0.6, "a"), Scored("2", None, "b"), Scored("3", 0.1, "c"),
              Scored("4", None, "c"), Scored("5", 0.9, "d")]  # fmt: skip
    found = maxima(scores, {"a": 0.7, "c": 0.0, "d": None})
    assert found["all"] == pytest.approx(
        {"prompts": 3, "expected_maximum": 1.6 / 3, "std": 0.3299832, "probability": 2 / 3}
    )
    assert [found[f"prompts {name}"]["prompts"] for name in ("above", "below")] == [1, 1]
    assert found["prompts below"]["expected_maximum"] == 0.1


def test_rows_are_filtered_and_lines_stay_as_they_are(tmp_path, capsys):
    rows = [{"index": n, "text": f"text  {n}", "more": [n]} for n in range(6)]
    source = write(tmp_path / "samples.jsonl", [*rows, {"index": 9, "text": "never scored"}])
    by = [{"index": n, "score": {"bad": None if n == 1 else (n * 7 % 6) / 10, "good": 0}} for n in (3, 1, 5, 0, 4, 2)]
    scores = write(tmp_path / "scores.jsonl", by)
    words = ["filter", "--input", source, "--by", scores, "--score", "bad", "--output", str(tmp_path / "out")]
    assert main([*words, "--keep-lowest", "0.5"]) == 0
    kept = [n for n in range(6) if n != 1 and (n * 7 % 6) / 10 <= 0.3]
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert (tmp_path / "out/samples.jsonl").read_text().splitlines() == [lines[n] for n in kept]
    said = capsys.readouterr().out
    assert "3 of 7 rows kept" in said and "3  score\n" in said and "1  not-scored\n" in said
    assert "scores, kept: 3, mean 0.1667" in said
    assert main([*words, "--keep-lowest", "0.5"]) == 0 and "3 of 7 rows kept" in capsys.readouterr().out
    assert main([*words, "--keep-highest", "0.2"]) == 2 and "holds the result of other" in capsys.readouterr().err
    assert main(["scores", scores, "--score", "bad"]) == 0
    assert "6 lines, 1 without a score" in capsys.readouterr().out


def test_scores_without_a_row_are_counted(tmp_path, capsys):
    source = write(tmp_path / "a.jsonl", [{"id": n, "text": "a"} for n in range(2)])
    by = write(tmp_path / "s.jsonl", [{"id": n, "score": n} for n in range(1, 6)])
    words = ["filter", "--input", source, "--by", by, "--keep-lowest", "1", "--output", str(tmp_path / "out")]
    assert main(words) == 0 and f"4 lines of {by} with an id that no row has" in capsys.readouterr().out


def test_what_scores_cannot_be_is_named(tmp_path):
    for row, error, reason in (
        ({"score": 1}, BadInputError, r"x:1: a line without an id"),
        ({"id": 1}, BadInputError, r"x:1: a line without a score"),
        ({"id": 1, "score": "low"}, BadInputError, r"x:1: the score is not a number"),
        ({"id": 1, "score": float("nan")}, BadInputError, r"the score is not a number"),
        ({"id": 1, "score": 10**400}, BadInputError, r"the score is not a number\n  found: 1000"),
        ({"id": 1, "score": {"a": 1, "b": 2}}, UsageError, r"several scores\n  found: a, b"),
        ([1], BadInputError, r"not a JSON object"),
    ):
        with pytest.raises(error, match=reason):
            read_scores(write(tmp_path / "x", [row]))
    with pytest.raises(BadInputError, match="no score 'c'"):
        read_scores(write(tmp_path / "x", [{"id": 1, "score": {"a": 1}}]), "c")
    (tmp_path / "x").write_text("[" * 100_000)
    with pytest.raises(BadInputError, match=r"x:1: not a JSON object"):
        read_scores(tmp_path / "x")
    plain = write(tmp_path / "x", [{"id": 1, "score": None}, {"id": 2, "score": 0.5}])
    with pytest.raises(UsageError, match=r"x:2: the score is a number without a name, so --score c names none"):
        read_scores(plain, "c")
    assert [line.score for line in read_scores(plain, "c", of_prompts=True)] == [None, 0.5]
    with pytest.raises(UsageError, match="there is no file"):
        read_scores(tmp_path / "none")
    with pytest.raises(BadInputError, match=r"no prompt with a text(.|\n)*toxicity"):
        read_prompts(write(tmp_path / "x", [{"prompt": "a"}]))


@pytest.mark.parametrize(
    ("rows", "scores", "share", "reason"),
    [
        ([{"id": 1, "text": "a"}], [{"id": 1, "score": 1}] * 2, "0.5", "scores a row twice"),
        ([{"id": 1, "text": "a"}], [{"id": 1, "score": 1}], "50%", "--keep-lowest is 50%"),
        ([{"id": 1, "text": "a"}], [{"id": 1, "score": 1}], "1e-999999999", "--keep-lowest is 1e-9999"),
        ([{"text": "a"}], [{"id": 1, "score": 1}], "1", "has no id"),
        ([{"id": "1", "text": "a"}], [{"id": 1, "score": 1}], "1", "found: id 1 there; 1 row of other ids"),
    ],
)
def test_what_cannot_be_filtered_is_said(tmp_path, capsys, rows, scores, share, reason):
    source, by = write(tmp_path / "a.jsonl", rows), write(tmp_path / "s.jsonl", scores)
    words = ["filter", "--input", source, "--by", by, "--keep-lowest", share, "--output", str(tmp_path / "out")]
    assert main(words) == 2 and reason in capsys.readouterr().err
