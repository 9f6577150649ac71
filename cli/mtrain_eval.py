"""Score a trained model: WikiText-103, LAMBADA, perplexity of corpora, and the tasks of lm-evaluation-harness.

--task wikitext103 and lambada give the numbers of Megatron-LM's tasks/main.py, where those are right. --task perplexity
reads a corpus or blend of mdata. --task mnli, qqp, race and classify score a finetuned BERT on labelled rows. --tasks
names tasks of lm-evaluation-harness, which needs the extra "eval". Of several ranks (--nproc N, or those of torchrun or
Slurm) each --tp x --pp share a model, and these groups divide the rows; the numbers stay the same.

Examples:
  mtrain eval runs/first --task wikitext103 --data wiki.test.tokens --overlap 32
  mtrain eval Llama-3.2-1B --tasks hellaswag,arc_easy --batch-size 16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdata.errors import UsageError, install_command
from mdata.progress import SILENT, Progress
from mdata.sources.labelled import TASKS as ROW_TASKS

from .console import Console
from .finetune_task import add_columns, add_on_error, columns_of
from .mtrain_model import add_model_arguments, each_opened, ran_on_ranks
from .text import count, natural

if TYPE_CHECKING:
    from trainer.tasks.loaded_model import Model

TASKS = ("wikitext103", "lambada", "perplexity", *ROW_TASKS)
# Options that only some tasks have: name -> those tasks ("harness": --tasks).
_OF = {
    "overlap": ("wikitext103",),
    "detokenizer": ("wikitext103",),
    "strict": ("lambada",),
    "max_documents": ("perplexity",),
    "num_fewshot": ("harness",),
    "limit": ("harness",),
    "include_path": ("harness",),
    "columns": ("classify",),
    "on_error": ROW_TASKS,
    "predictions": ROW_TASKS,
    "data": TASKS,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain eval --help`."""
    add_model_arguments(parser, dp=True)
    add = parser.add_argument
    add("--all-checkpoints", action="store_true", help="score every checkpoint of a run folder, oldest first")
    add("--task", choices=TASKS, help="one of mtrain's own tasks")
    add("--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness, separated by commas")
    add("--data", metavar="FILE", help="raw WikiText, LAMBADA, labelled rows, or a corpus or blend")
    add("--sequence-length", type=int, metavar="N", help="tokens of a row (default: the model's context)")
    add("--batch-size", type=int, default=8, metavar="N", help="rows computed together (default: 8)")
    add("--overlap", type=int, metavar="N", help="wikitext103: windows are shifted by N tokens (default: 32)")
    add("--detokenizer", metavar="NAME", help="wikitext103: wiki, ptb or none (default: wiki)")
    add(
        "--strict", action="store_true", default=None, help="lambada: all tokens of the last word must be the likeliest"
    )
    add("--max-documents", type=int, metavar="N", help="perplexity: the first N of each corpus (default: all)")
    add_columns(add)
    add_on_error(add)
    add("--predictions", type=Path, metavar="FILE", help="labelled rows: jsonl of predictions")
    add("--num-fewshot", type=natural, metavar="N", help="--tasks: examples before each question")
    add("--limit", type=count, metavar="N", help="--tasks: only the first N questions of each")
    add("--include-path", type=Path, metavar="DIR", help="--tasks: a folder with further tasks")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Score, and print the numbers."""
    from trainer.tasks.in_training import read_evaluations, record_evaluation

    _check(arguments)
    names = _checkpoints(arguments.model) if arguments.all_checkpoints else [arguments.checkpoint]
    rows = list[tuple[str, dict[str, Any]]]()
    if arguments.all_checkpoints:
        read_evaluations(Path(arguments.model))  # if the file is damaged, before the work
    if ran_on_ranks(arguments, console, command="eval"):
        return
    with each_opened(arguments, console, command="eval", checkpoints=names) as models:
        for model in models:
            with console.progress() as progress:
                text, facts = _scored(model, arguments, progress=progress if model.world.is_main else SILENT)
            rows.append((text, {"model": model.name, "step": model.step, **facts}))
            if arguments.all_checkpoints and model.world.is_main and model.step is not None:
                record_evaluation(Path(arguments.model), model.step, _curve_numbers(facts, arguments))
        if model.world.is_main:
            _show(rows, console, several=arguments.all_checkpoints)


def _curve_numbers(facts: dict[str, Any], arguments: argparse.Namespace) -> dict[str, float]:
    """The numbers for curves; their names say what was scored and how."""
    from trainer.tasks.in_training import numbers_of

    if arguments.task is None:
        numbers = {f"{task} {name}": value for task, of in facts["results"].items() for name, value in of.items()}
    else:
        kind = "lambada-strict" if arguments.strict else arguments.task
        numbers = numbers_of(kind, facts)
    options = [
        f"--{name.replace('_', '-')} {getattr(arguments, name)}"
        for name in ("sequence_length", "overlap", "detokenizer", "max_documents", "num_fewshot", "limit")
        if getattr(arguments, name) is not None
    ]
    settings = ", ".join([*([Path(arguments.data).name] if arguments.data else []), *options])
    return {f"{name} ({settings})" if settings else name: value for name, value in numbers.items()}


def _checkpoints(run_folder: str) -> list[str]:
    """The names of a run's checkpoints, the oldest first."""
    from trainer.checkpoint.folder import folder_name, steps_in
    from trainer.checkpoint.location import checkpoints_of

    root = checkpoints_of(Path(run_folder))
    steps = sorted(steps_in(root))
    if not steps:
        raise UsageError(
            f"there are no checkpoints in {root}", fix="--all-checkpoints needs the folder of a run (run.folder)"
        )
    return [folder_name(step) for step in steps]


def _show(rows: Sequence[tuple[str, dict[str, Any]]], console: Console, *, several: bool) -> None:
    if not several:
        console.result(*rows[0])
        return
    lines = [f"step {facts['step']:,}: {line}" for text, facts in rows for line in text.splitlines()]
    console.result("\n".join(lines), {"checkpoints": [facts for _, facts in rows]})


def _scored(model: Model, arguments: argparse.Namespace, *, progress: Progress) -> tuple[str, dict[str, Any]]:
    common: dict[str, Any] = {"batch_size": arguments.batch_size, "progress": progress}
    if arguments.tasks is not None:
        return _harness(model, arguments, common)
    common["sequence_length"] = arguments.sequence_length
    if arguments.task == "wikitext103":
        from trainer.tasks.wikitext import detokenizer_by_path, wikitext, wikitext_line

        kind = arguments.detokenizer or "wiki"
        theirs = detokenizer_by_path(arguments.data)
        if arguments.detokenizer is None and theirs not in (None, kind):
            progress.note(f"the text is detokenized as wiki; Megatron-LM takes {theirs}, because of the file's path")
        overlap = 32 if arguments.overlap is None else arguments.overlap
        facts = wikitext(model, Path(arguments.data), overlap=overlap, detokenizer=kind, **common)
        return wikitext_line(facts), facts
    if arguments.task == "lambada":
        from trainer.tasks.lambada import lambada, lambada_line

        facts = lambada(model, Path(arguments.data), strict=bool(arguments.strict), **common)
        for key, label in (
            ("cut", "passages without their beginning"),
            ("without_context", "words without context"),
            ("blank_lines", "blank lines"),
        ):
            if facts[key]:
                progress.note(f"{label}: {facts[key]:,}")
        return lambada_line(facts), facts
    if arguments.task in ROW_TASKS:
        from trainer.tasks.classify import classify, classify_line

        common |= {"columns": columns_of(arguments.columns), "on_error": arguments.on_error or "stop"}
        facts, predicted = classify(model, Path(arguments.data), arguments.task, **common)
        if arguments.predictions is not None and model.world.is_main:
            predicted.save(arguments.predictions)
        return classify_line(facts), facts
    from trainer.tasks.perplexity import perplexity, perplexity_text

    facts = perplexity(model, arguments.data, max_documents=arguments.max_documents, **common)
    return perplexity_text(facts), facts


def _harness(model: Model, arguments: argparse.Namespace, common: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    from trainer.tasks.harness import evaluate_tasks

    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    scores = evaluate_tasks(
        model,
        names,
        max_length=arguments.sequence_length,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        include_path=arguments.include_path,
        **common,
    )
    results = {
        task: {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, int | float)}
        for task, metrics in scores["results"].items()
    }
    lines = [f"{task}: {name} {value:.4f}" for task, metrics in results.items() for name, value in metrics.items()]
    return "\n".join(lines), {"tasks": names, "results": results}


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together, before a model is opened."""
    from importlib.util import find_spec

    if arguments.all_checkpoints and arguments.checkpoint != "latest":
        raise UsageError("--checkpoint and --all-checkpoints are both given", fix="leave one of them out")
    if (arguments.task is None) == (arguments.tasks is None):
        raise UsageError(
            "nothing to score" if arguments.task is None else "--task and --tasks are both given",
            expected=f"--task, one of {', '.join(TASKS)}; or --tasks with names of lm-evaluation-harness",
        )
    task = arguments.task or "harness"
    idle = [
        f"--{name.replace('_', '-')} is for {', '.join('--tasks' if kind == 'harness' else kind for kind in of)}"
        for name, of in _OF.items()
        if getattr(arguments, name) is not None and task not in of
    ]
    if idle:
        raise UsageError("; ".join(idle), fix="leave it out")
    if task in TASKS and arguments.data is None:
        raise UsageError(f"--task {task} needs --data", fix="mtrain eval --help")
    if arguments.batch_size < 1:
        raise UsageError(f"--batch-size {arguments.batch_size} is below 1")
    if task == "harness" and find_spec("lm_eval") is None:
        raise UsageError("--tasks needs lm-evaluation-harness, which is not installed", fix=install_command("eval"))
