"""The tasks that score a run while it trains: `[evaluate] tasks`, each "TASK=FILE".

They are the tasks of `mtrain eval` with its defaults; each yields a few numbers, for curves over the steps. All files
are read when the run starts, so that a missing or broken one does not end a run after days.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mdata
from mdata import MdataError, UsageError
from mdata.progress import SILENT, Progress
from trainer.tasks.lambada import lambada, read_passages
from trainer.tasks.perplexity import perplexity
from trainer.tasks.score import Scorer
from trainer.tasks.wikitext import read_text, wikitext

KINDS = ("lambada", "lambada-strict", "wikitext103", "perplexity")


class FixedTask(NamedTuple):
    """A task and its file; of a perplexity, its corpus or blend."""

    kind: str
    data: str


def read_tasks(texts: Sequence[str], *, tokenizer: bool) -> list[FixedTask]:
    """The tasks of a configuration, after checking that their files can be read.

    Args:
        tokenizer: whether the data of the run has one; text tasks need it.

    Raises:
        UsageError, BadInputError: a task is unknown or listed twice, or its file is missing or of another kind.
    """
    tasks = list[FixedTask]()
    for text in texts:
        kind, _, data = text.partition("=")
        if kind not in KINDS or not data:
            raise UsageError(
                f"evaluate.tasks has {text!r}", expected=f"TASK=FILE, where TASK is one of {', '.join(KINDS)}"
            )
        if kind in [task.kind for task in tasks]:
            raise UsageError(
                f"evaluate.tasks has {kind} twice", fix="list it once; perplexity of several corpora takes a blend"
            )
        tasks.append(FixedTask(kind, data))
        if kind == "perplexity":
            mdata.open_blend(data, evaluation=True)
            continue
        if not tokenizer:
            raise UsageError(
                f"evaluate.tasks: {kind} needs a tokenizer, and the data of the run has none",
                fix="record one in the manifests of its corpora (mdata adopt), or leave the task out",
            )
        if kind == "wikitext103":
            read_text(Path(data))
        else:
            read_passages(Path(data))
    return tasks


def task_problems(texts: Sequence[str], *, tokenizer: bool) -> list[MdataError]:
    """What `read_tasks` would raise for each task alone, and for all of them."""
    problems: dict[str, MdataError] = {}
    for some in (*([text] for text in texts), texts):
        try:
            read_tasks(some, tokenizer=tokenizer)
        except MdataError as error:
            problems.setdefault(str(error), error)
    return list(problems.values())


def score_tasks(tasks: Sequence[FixedTask], scorer: Scorer, *, progress: Progress = SILENT) -> dict[str, float]:
    """Numbers by name, on all ranks: accuracies of LAMBADA, adjusted perplexity of WikiText, perplexity of corpora.

    A corpus without tokens has none.
    """
    numbers: dict[str, float] = {}
    for task in tasks:
        numbers |= _numbers(task, scorer, progress)
    return numbers


def _numbers(task: FixedTask, scorer: Scorer, progress: Progress) -> Mapping[str, float]:
    if task.kind == "wikitext103":
        facts = wikitext(scorer, Path(task.data), progress=progress)
        return {"wikitext103 perplexity": facts["adjusted_ppl"]}
    if task.kind == "perplexity":
        corpora = perplexity(scorer, task.data, progress=progress)["corpora"]
        return {f"{name} perplexity": facts["ppl"] for name, facts in corpora.items() if facts["ppl"] is not None}
    facts = lambada(scorer, Path(task.data), strict=task.kind == "lambada-strict", progress=progress)
    return {f"{task.kind} accuracy": facts["accuracy"]}
