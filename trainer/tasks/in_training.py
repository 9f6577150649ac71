"""The tasks that score a run during training, `[evaluate] tasks`, each "TASK=FILE"; and the scores of its checkpoints.

Prompts, `[evaluate] prompts`, are answered too; for a corpus of conversations with its chat template. The tasks
are those of `mtrain eval` with its defaults; each yields a few numbers, for curves over the steps. All files
are read when the run starts, so that a missing or broken one does not end a run after days. `mtrain eval RUN
--all-checkpoints` writes its numbers to evaluations.json in the run folder; the report draws both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mdata
from mdata import DamageError, MdataError, UsageError
from mdata.chat.loss_spans import Template
from mdata.chat.prompt import answer_ends, answer_prompt
from mdata.chat.templates import recorded_template
from mdata.errors import counted
from mdata.util import atomic_io
from trainer.tasks.lambada import lambada, read_passages
from trainer.tasks.loaded_model import prompt_ids
from trainer.tasks.perplexity import perplexity
from trainer.tasks.score import Scorer
from trainer.tasks.wikitext import read_wikitext, wikitext

EVALUATIONS = "evaluations.json"
KINDS = ("lambada", "lambada-strict", "wikitext103", "perplexity")


class Prompt(NamedTuple):
    """A text, the ids that the model continues, and those that end its answer."""

    text: str
    ids: tuple[int, ...]
    ends: frozenset[int]


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
            read_wikitext(Path(data))
        else:
            read_passages(Path(data))
    return tasks


def read_prompts(texts: Sequence[str], dataset: mdata.Dataset, tokenizer: mdata.Tokenizer | None) -> list[Prompt]:
    """The prompts of a configuration.

    Args:
        dataset: the training data; if they are conversations, a prompt is the first turn of the user.

    Raises:
        UsageError: no tokenizer, a chat template that is not known, or a prompt that leaves no room for an answer.
    """
    if not texts:
        return []
    if tokenizer is None:
        fix = "record one in the manifests of its corpora (mdata adopt), or leave evaluate.prompts out"
        raise UsageError("evaluate.prompts needs a tokenizer, and the data of the run has none", fix=fix)
    prompts = []
    template = _template_of(dataset, tokenizer) if isinstance(dataset.options.kind, mdata.Chat) else None
    for text in texts:
        if template is None:
            ids, ends = prompt_ids(tokenizer, text, bos=tokenizer.bos), frozenset[int]()
        else:
            ids, ends = answer_prompt(template, tokenizer, [("user", text)]), answer_ends(template, tokenizer)
        if not 0 < len(ids) < (room := dataset.options.sequence_length):
            found, expected = (
                f"{counted(len(ids), 'token')}: {text[:60]!r}",
                f"1 to {counted(room - 1, 'token')}, so that a row has room",
            )
            raise UsageError("evaluate.prompts has a prompt of another length", found=found, expected=expected)
        prompts.append(Prompt(text, tuple(ids), ends or frozenset(() if tokenizer.eod is None else (tokenizer.eod,))))
    return prompts


def _template_of(dataset: mdata.Dataset, tokenizer: mdata.Tokenizer) -> Template:
    """The chat template that made the data.

    Raises:
        UsageError: corpora have different ones, or none; or it is not stored.
    """
    made = [part.corpus.manifest.provenance for part in dataset.components]
    options = [provenance.options if provenance else {} for provenance in made]
    fingerprints = {str((each.get("chat_template") or {}).get("fingerprint")) for each in options}
    recorded = recorded_template(options[0])
    if recorded is not None and recorded.is_stored and len(fingerprints) == 1:
        template = recorded.of(tokenizer, date=options[0].get("chat_date"))
        if template.fingerprint in fingerprints:
            return template
    names = sorted({each.name for each in map(recorded_template, options) if each is not None})
    raise UsageError(
        "evaluate.prompts needs the chat template of the data",
        found=f"{len(fingerprints)} templates: {', '.join(names)}"
        if len(fingerprints) > 1
        else f"template {names[0]!r}, which is not stored with them"
        if names
        else "data that does not name it",
        expected="one template of all corpora, stored with them",
        fix="tokenize again, or leave evaluate.prompts out",
    )


def task_problems(texts: Sequence[str]) -> list[MdataError]:
    """The errors that `read_tasks` raises for each task alone, and for all together."""
    problems: dict[str, MdataError] = {}
    for some in (*([text] for text in texts), texts):
        try:
            read_tasks(some, tokenizer=True)
        except MdataError as error:
            problems.setdefault(str(error), error)
    return list(problems.values())


def score_tasks(tasks: Sequence[FixedTask], scorer: Scorer) -> dict[str, float]:
    """Numbers by name, on all ranks: accuracies of LAMBADA, adjusted perplexity of WikiText, perplexity of corpora.

    A corpus without tokens has none.
    """
    numbers: dict[str, float] = {}
    for task in tasks:
        numbers |= _numbers(task, scorer)
    return numbers


def _numbers(task: FixedTask, scorer: Scorer) -> Mapping[str, float]:
    if task.kind == "wikitext103":
        return numbers_of(task.kind, wikitext(scorer, Path(task.data)))
    if task.kind == "perplexity":
        return numbers_of(task.kind, perplexity(scorer, task.data))
    strict = task.kind == "lambada-strict"
    return numbers_of(task.kind, lambada(scorer, Path(task.data), strict=strict))


def numbers_of(kind: str, facts: Mapping[str, Any]) -> dict[str, float]:
    """The numbers for curves among the facts of a task, by name."""
    if kind == "wikitext103":
        return {"wikitext103 perplexity": facts["adjusted_ppl"]}
    if kind == "perplexity":
        corpora = facts["corpora"].items()
        return {f"{name} perplexity": corpus["ppl"] for name, corpus in corpora if corpus["ppl"] is not None}
    return {f"{kind} accuracy": facts["accuracy"]}


def read_evaluations(run_folder: Path) -> dict[str, dict[int, float]]:
    """The numbers of checkpoints by name and step; {}: no checkpoint was scored.

    Raises:
        DamageError: the file is not readable.
    """
    path = run_folder / EVALUATIONS
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_bytes())
        return {name: {int(step): float(value) for step, value in curve.items()} for name, curve in table.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(
            f"{path} is not as mtrain wrote it", found=str(error), fix="remove it and score again"
        ) from error


def record_evaluation(run_folder: Path, step: int, numbers: Mapping[str, float]) -> None:
    """Add the numbers of one checkpoint to the file, replacing older ones of the same names."""
    table = read_evaluations(run_folder)
    for name, value in numbers.items():
        table.setdefault(name, {})[step] = value
    text = json.dumps({name: dict(sorted(curve.items())) for name, curve in table.items()}, indent=1)
    atomic_io.atomic_write(run_folder / EVALUATIONS, text.encode())
