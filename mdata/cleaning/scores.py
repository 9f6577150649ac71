"""Chooses rows by scores from any program, such as a classifier of toxicity, read from a file of lines of JSON.

A line of scores has the `id` of a row (or its `index`, as `mtrain generate` writes it), and a `score`: a number, an
object of numbers by name, or null if the program gave none. A share of all lines, with the lowest or highest scores, is
kept; lines without a score count in the share, as in Megatron-LM's Detoxify example, and are never kept. Among equal
scores earlier lines come first.

Statistics are those of that example and of Gehman et al. 2020, "RealToxicityPrompts": of all scores, and by prompt.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from mdata.cleaning.text_job import KEEP, Edit, TextBatch, TextJobOptions, TextJobResult, run_text_job
from mdata.errors import BadInputError, UsageError, counted, os_errors_named
from mdata.mixing.shares import fraction_of
from mdata.progress import SILENT, Progress

IDS = ("id", "index")
THRESHOLD = 0.5


class Scored(NamedTuple):
    """A line of scores.

    Args:
        id: of the row, as JSON. score: None if it has none. prompt: as JSON, if the line has one.
    """

    id: str
    score: float | None
    prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class FilterRules:
    """The rows to keep.

    Args:
        by: the file of scores. name: of the score, if lines have several; "": they have one.
        share: of the lines, as a number from 0 to 1. highest: keep the highest scores, not the lowest.
    """

    by: str | Path
    share: str
    name: str = ""
    highest: bool = False


def read_scores(path: str | Path, name: str = "", *, of_prompts: bool = False) -> list[Scored]:
    """The lines of a file of scores.

    Args:
        name: the score to take, of several. of_prompts: the name may be for the scores of prompts alone.

    Raises:
        BadInputError: a line that has no id or no score; names it. UsageError: no such file, or a name for plain
        numbers.
    """
    scores = list[Scored]()
    for where, record in _records(path):
        id = next((record[key] for key in IDS if record.get(key) is not None), None)
        if id is None:
            raise BadInputError(
                f"{where}: a line without an id",
                expected='{"id": ..., "score": ...} with the id, or "index", of the row',
            )
        if name and not of_prompts and isinstance(record.get("score"), int | float):
            raise UsageError(
                f"{where}: the score is a number without a name, so --score {name} names none",
                fix='leave --score out, or give lines such as {"id": 7, "score": {"' + name + '": 0.5}}',
            )
        prompt = record.get("prompt")
        scores.append(Scored(json.dumps(id), _score(record, name, where), "" if prompt is None else json.dumps(prompt)))
    return scores


def filter_by_scores(options: TextJobOptions, rules: FilterRules, progress: Progress = SILENT) -> TextJobResult:
    """Keep the rows with the lowest or highest scores; an interrupted command continues.

    Raises:
        UsageError: two lines of scores for one row, no scores for any row, or an invalid share. BadInputError: as
        `read_scores`.
    """
    scores = read_scores(rules.by, rules.name)
    if twice := next((id for id, count in Counter(line.id for line in scores).items() if count > 1), None):
        raise UsageError(f"{rules.by} scores a row twice", found=f"id {twice}", expected="one line for each row")
    kept = chosen(scores, _share(rules.share, highest=rules.highest), highest=rules.highest)
    values = [line.score for line in scores if line.score is not None]
    summary = {
        "scores": len(scores),
        "all": statistics(values),
        "kept": statistics([line.score or 0.0 for line in kept]),
    }
    ids = frozenset(line.id for line in scores)
    work = _Filter(frozenset(line.id for line in kept), ids, _digest(scores, rules), summary)
    result = run_text_job(options, work, progress)
    if result.rows and not result.kept and set(result.removed) == {"not-scored"} and options.shard is None:
        raise UsageError(
            f"no line of {rules.by} has the id of a row of the input",
            found=f"id {scores[0].id[:40] if scores else 'none'} there; {counted(result.rows, 'row')} of other ids",
            expected=f"the scores of these rows: equal values of {' or '.join(IDS)}",
            fix=f"remove {result.folder}, which holds no row, and give the scores of this input",
        )
    matched = result.kept + result.removed.get("score", 0)
    return replace(result, summary={**result.summary, "without_row": max(0, len(ids) - matched)})


def chosen(scores: Sequence[Scored], share: Fraction, *, highest: bool = False) -> list[Scored]:
    """The lines with the lowest or highest scores, floor(share x all lines) at most, the most extreme first."""
    sign = -1.0 if highest else 1.0
    ranked = sorted((line for line in scores if line.score is not None), key=lambda line: sign * (line.score or 0.0))
    return ranked[: math.floor(share * len(scores))]


def statistics(values: Sequence[float], threshold: float = THRESHOLD) -> dict[str, Any]:
    """Number, mean, standard deviation and range of scores, and the share of those above a threshold."""
    if not len(values):
        return {"count": 0}
    array = np.array(values, np.float64)
    return {
        "count": len(array),
        "mean": float(array.mean()),
        "std": float(array.std()),
        "min": float(array.min()),
        "max": float(array.max()),
        "above": float((array > threshold).mean()),
    }


def maxima(
    scores: Sequence[Scored], prompts: Mapping[str, float | None] | None = None, threshold: float = THRESHOLD
) -> dict[str, dict[str, Any]]:
    """The expected maximum over the texts of a prompt, and how often it is above the threshold; prompts without scores
    are left out.

    Args:
        prompts: the score of each prompt itself; those above the threshold, and the rest, are also groups.
    """
    largest: dict[str, float] = {}
    for line in scores:
        if line.score is not None and line.prompt:
            largest[line.prompt] = max(line.score, largest.get(line.prompt, -math.inf))
    of_prompt = prompts or {}
    groups = {"all": list(largest)}
    if prompts is not None:
        scored = [prompt for prompt in largest if of_prompt.get(prompt) is not None]
        groups["prompts above"] = [prompt for prompt in scored if (of_prompt[prompt] or 0.0) > threshold]
        groups["prompts below"] = [prompt for prompt in scored if (of_prompt[prompt] or 0.0) <= threshold]
    facts = {}
    for name, members in groups.items():
        numbers = statistics([largest[prompt] for prompt in members], threshold)
        keys = {"count": "prompts", "mean": "expected_maximum", "std": "std", "above": "probability"}
        facts[name] = {keys[key]: value for key, value in numbers.items() if key in keys}
    return facts


def read_prompts(path: str | Path, name: str = "") -> dict[str, float | None]:
    """The scores of prompts by their texts, from lines as in RealToxicityPrompts: {"prompt": {"text", "toxicity"}}."""
    score_of = {}
    for where, record in _records(path):
        prompt = record.get("prompt")
        if not isinstance(prompt, dict) or "text" not in prompt:
            raise BadInputError(
                f"{where}: no prompt with a text and its score", expected='{"prompt": {"text": ..., "toxicity": ...}}'
            )
        scores = {key: value for key, value in prompt.items() if key != "text"}
        score_of[json.dumps(prompt["text"])] = _score({"score": scores}, name, where)
    return score_of


def _records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line of JSON."""
    if not Path(path).is_file():
        problem = f"{path} is a folder" if Path(path).is_dir() else f"there is no file {path}"
        raise UsageError(problem, expected="a file of lines of JSON with scores")
    with os_errors_named("reading scores"), Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise BadInputError(
                    f"{path}:{number}: not a JSON object", found=repr(line[:60].decode(errors="replace"))
                )
            yield f"{path}:{number}", record


def _score(record: Mapping[str, Any], name: str, where: str) -> float | None:
    if "score" not in record:
        raise BadInputError(
            f"{where}: a line without a score", expected="score: a number, an object of numbers, or null"
        )
    score = record["score"]
    if isinstance(score, dict):
        if not name and len(score) != 1:
            raise UsageError(f"{where} has several scores", found=", ".join(score), fix="name one: --score NAME")
        key = name or next(iter(score))
        if key not in score:
            raise BadInputError(f"{where}: no score {key!r}", found=", ".join(score))
        score = score[key]
    if score is None:
        return None
    number = math.nan
    if isinstance(score, int | float) and not isinstance(score, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            number = float(score)
    if not math.isfinite(number):
        raise BadInputError(f"{where}: the score is not a number", found=repr(score)[:60])
    return number


def _share(text: str, *, highest: bool) -> Fraction:
    try:
        share = fraction_of(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 1:
        option = "--keep-highest" if highest else "--keep-lowest"
        raise UsageError(f"{option} is {text[:40]}", expected="a number from 0 to 1, such as 0.5")
    return share


def _digest(scores: Sequence[Scored], rules: FilterRules) -> str:
    facts = [[line.id, line.score] for line in scores]
    return blake3(json.dumps([facts, rules.share, rules.highest]).encode()).hexdigest()


@dataclass(frozen=True)
class _Filter:
    """See `TextWork`."""

    kept: frozenset[str]
    scored: frozenset[str]
    digest: str
    facts: Mapping[str, Any]
    name, keys, writes = "filter", (), True

    def record(self) -> dict[str, Any]:
        return {"version": 1, "scores": self.digest}

    def prepare(self) -> None:
        """Nothing is loaded."""

    def edit(self, batch: TextBatch) -> tuple[list[Edit], Counter[str]]:
        edits = []
        for number in range(len(batch.texts)):
            fields = batch.fields(number)
            id = next((fields[key] for key in IDS if fields.get(key) is not None), None)
            if id is None:
                raise UsageError(
                    f"{batch.chunk.source.path}: a row has no {' or '.join(IDS)}, by which scores are found",
                    found=repr(batch.texts[number][:60]),
                    fix='give each row an "id", and its line of scores the same',
                )
            key = json.dumps(id)
            edits.append(KEEP if key in self.kept else Edit("score" if key in self.scored else "not-scored"))
        return edits, Counter()

    def summary(self, counts: Counter[str]) -> dict[str, Any]:
        return dict(self.facts)
