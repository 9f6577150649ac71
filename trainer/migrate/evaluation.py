"""A command of Megatron-LM's `tasks/main.py` as a line of `mtrain eval`.

WIKITEXT103 and LAMBADA have a counterpart; its other tasks are refused by name. Arguments of the model are not needed,
because the checkpoint has them; arguments that nobody knows are refused, all at once.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType

from trainer.migrate.arguments import Given, read_arguments
from trainer.migrate.flags import Flag, flag_table
from trainer.migrate.launcher import launched_ranks
from trainer.migrate.lexer import ShellError
from trainer.migrate.shell import Work, read_commands

PROGRAM = "tasks/main.py"
TASKS: Mapping[str, str] = MappingProxyType({"WIKITEXT103": "wikitext103", "LAMBADA": "lambada"})
_FINETUNING = "finetunes a classifier or a retriever, which mtrain does not"
_OWN = (
    Flag(name="--task", kind="text"),
    Flag(name="--valid-data", kind="texts"),
    Flag(name="--overlapping-eval", kind="int", default="32"),
    Flag(name="--strict-lambada", kind="switch"),
    *(
        Flag(name=name, kind=kind, use="refused", note=_FINETUNING)
        for name, kind in (
            ("--epochs", "text"),
            ("--pretrained-checkpoint", "text"),
            ("--keep-last", "switch"),
            ("--train-data", "texts"),
        )
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """The line of mtrain, what the user has to know of it, and what is refused, one line each."""

    command: str
    notes: tuple[str, ...]
    refused: tuple[str, ...]


def find_evaluation(text: str, arguments: Sequence[str] = ()) -> Evaluation | None:
    """The evaluation that a command line or script starts; None: it starts none, or several.

    Args:
        arguments: the script's own arguments, `$1` and on.
    """
    try:
        commands = list(read_commands(text, arguments, work=Work()))
    except (ShellError, RecursionError):
        return None  # the reader of training runs says why
    evaluations = [command for command in commands if any(_is_main(word) for word in command)]
    if len(evaluations) != 1:
        return None
    at = next(place for place, word in enumerate(evaluations[0]) if _is_main(word))
    ranks, _ = launched_ranks(evaluations[0][:at], text)
    table = {**flag_table(), **{flag.name: flag for flag in _OWN}}
    given = read_arguments(evaluations[0][at + 1 :], table)
    problems = [problem.replace("pretrain_gpt.py", PROGRAM) for problem in given.problems]
    problems += list(_refused(given))
    return Evaluation("" if problems else _command(given, ranks), tuple(_notes(given)), tuple(problems))


def _is_main(word: str) -> bool:
    return PurePath(word).parts[-2:] == ("tasks", "main.py")


def _refused(a: Given) -> Iterator[str]:
    task = a["--task"]
    if task is None:
        yield f"--task is missing; {PROGRAM} needs one of {', '.join(TASKS)}"
    elif task not in TASKS:
        yield f"--task {task} has no counterpart; mtrain eval has {' and '.join(TASKS)}"
    for flag in _OWN:
        if flag.use == "refused" and flag.name in a:
            yield f"{flag.name} {flag.note}"
    files = a["--valid-data"] or ()
    if len(files) != 1:
        yield f"--valid-data names {len(files)} files; mtrain eval scores one"
    if a["--load"] is None:
        yield "--load is missing: mtrain eval scores a trained model"


def _command(a: Given, ranks: int | None) -> str:
    words = ["mtrain", "eval", str(a["--load"]), "--task", TASKS[a["--task"]], "--data", a["--valid-data"][0]]
    if a["--task"] == "WIKITEXT103" and "--overlapping-eval" in a:
        words += ["--overlap", str(max(1, a["--overlapping-eval"]))]
    if a["--strict-lambada"] and a["--task"] == "LAMBADA":
        words.append("--strict")
    if "--seq-length" in a:
        words += ["--sequence-length", str(a["--seq-length"])]
    if "--micro-batch-size" in a:
        words += ["--batch-size", str(a["--micro-batch-size"])]
    words += [word for name in ("fp16", "bf16") if f"--{name}" in a for word in ("--dtype", name)]
    if "--vocab-file" in a or "--tokenizer-model" in a:
        words += ["--tokenizer", "tokenizer"]
    sizes = [("--tp", a["--tensor-model-parallel-size"]), ("--pp", a["--pipeline-model-parallel-size"])]
    words += [word for name, size in sizes if size and size > 1 for word in (name, str(size))]
    started = ["torchrun", "--nproc-per-node", str(ranks), "--no-python"] if ranks and ranks > 1 else []
    return shlex.join([*started, *words])


def _notes(a: Given) -> Iterator[str]:
    names = {"--vocab-file": "vocab.json", "--merge-file": "merges.txt", "--tokenizer-model": "tokenizer.model"}
    files = [f"{a.texts[name].partition(' ')[2]} as {kept}" for name, kept in names.items() if name in a]
    if files:
        yield f"tokenizer is a folder with {' and '.join(files)}"
    if "--overlapping-eval" in a and "--seq-length" in a and a["--overlapping-eval"] > a["--seq-length"]:
        yield "an overlap beyond the sequence leaves tokens out; mtrain eval refuses it"
