"""A command of Megatron-LM's `tasks/main.py` as a line of `mtrain eval` or `mtrain finetune --task`.

WIKITEXT103 and LAMBADA are scored; MNLI, QQP and RACE finetune a BERT, or with `--epochs 0` score one. Its other tasks
are refused by name. Arguments of the model are not needed, because the checkpoint has them; arguments that nobody knows
are refused, all at once.
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
FINETUNED = ("MNLI", "QQP", "RACE")
_OWN = (
    Flag(name="--task", kind="text"),
    Flag(name="--valid-data", kind="texts"),
    Flag(name="--overlapping-eval", kind="int", default="32"),
    Flag(name="--strict-lambada", kind="switch"),
    Flag(name="--epochs", kind="int"),
    Flag(name="--pretrained-checkpoint", kind="text"),
    Flag(name="--keep-last", kind="switch"),
    Flag(name="--train-data", kind="texts"),
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
        yield f"--task is missing; {PROGRAM} needs one of {', '.join((*TASKS, *FINETUNED))}"
    elif task not in (*TASKS, *FINETUNED):
        yield f"--task {task} has no counterpart; mtrain has {', '.join((*TASKS, *FINETUNED))}"
    if _finetunes(a):
        for name in ("--train-data", "--valid-data", "--micro-batch-size", "--lr"):
            if not a[name]:
                yield f"{name} is missing"
        if not (a["--pretrained-checkpoint"] or a["--load"]):
            yield "--pretrained-checkpoint is missing: mtrain finetune begins with a trained BERT"
        return
    for name in ("--epochs", "--pretrained-checkpoint", "--keep-last", "--train-data"):
        if name in a and task not in FINETUNED:
            yield f"{name} is for {', '.join(FINETUNED)}"
    files = a["--valid-data"] or ()
    if len(files) != 1 and task not in FINETUNED:
        yield f"--valid-data names {len(files)} files; mtrain eval scores one"
    elif not files:
        yield "--valid-data is missing"
    if a["--load"] is None:
        yield "--load is missing: mtrain eval scores a trained model"


def _finetunes(a: Given) -> bool:
    return a["--task"] in FINETUNED and a["--epochs"] != 0


def _finetuning(a: Given, ranks: int | None) -> str:
    """The line of `mtrain finetune`; a step has one microbatch of each data-parallel rank, as in Megatron-LM."""
    tp, pp = (a[f"--{name}-model-parallel-size"] or 1 for name in ("tensor", "pipeline"))
    micro, data_parallel = a["--micro-batch-size"], max(1, (ranks or 1) // (tp * pp))
    batch = a["--global-batch-size"] or micro * data_parallel
    words = ["mtrain", "finetune", a["--pretrained-checkpoint"] or a["--load"], ",".join(a["--train-data"])]
    words += [f"train.global_batch={batch}", f"train.micro_batch={micro}"]
    words += [f"mesh.{name}={size}" for name, size in (("tp", tp), ("pp", pp)) if size > 1]
    settings = {
        "--lr-warmup-fraction": "optimizer.warmup_fraction",
        "--weight-decay": "optimizer.weight_decay",
        "--clip-grad": "optimizer.clip_norm",
        "--hidden-dropout": "model.hidden_dropout",
        "--attention-dropout": "model.attention_dropout",
        "--seed": "run.seed",
    }
    words += [f"{key}={a[name]:g}" for name, key in settings.items() if name in a]
    words += ["--task", a["--task"].lower(), "--valid", ",".join(a["--valid-data"])]
    words += ["--epochs", str(a["--epochs"])] if a["--epochs"] else []
    words += ["--lr", f"{a['--lr']:g}"]
    words += ["--sequence-length", str(a["--seq-length"])] if "--seq-length" in a else []
    words += [word for name in ("fp16", "bf16") if f"--{name}" in a for word in ("--precision", name)]
    words += ["--gpus", str(ranks)] if ranks and ranks > 1 else []
    words += ["--tokenizer", "tokenizer"] if "--vocab-file" in a else []
    words += ["--folder", a["--save"]] if a["--save"] else []
    return shlex.join(words)


def _command(a: Given, ranks: int | None) -> str:
    if _finetunes(a):
        return _finetuning(a, ranks)
    return "\n".join(_evaluating(a, ranks, file) for file in a["--valid-data"])


def _evaluating(a: Given, ranks: int | None, file: str) -> str:
    task = TASKS.get(a["--task"]) or a["--task"].lower()
    words = ["mtrain", "eval", str(a["--load"]), "--task", task, "--data", file]
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
    vocabulary = "vocab.txt" if a["--task"] in FINETUNED else "vocab.json"
    names = {"--vocab-file": vocabulary, "--merge-file": "merges.txt", "--tokenizer-model": "tokenizer.model"}
    files = [f"{a.texts[name].partition(' ')[2]} as {kept}" for name, kept in names.items() if name in a]
    if files:
        yield f"tokenizer is a folder with {' and '.join(files)}"
    if _finetunes(a):
        yield "accuracy is that of every row, which tasks/main.py computes on one data-parallel rank alone"
        if "--keep-last" not in a:
            yield "the last rows of an epoch are read too, as with --keep-last"
    if "--overlapping-eval" in a and "--seq-length" in a and a["--overlapping-eval"] > a["--seq-length"]:
        yield "an overlap beyond the sequence leaves tokens out; mtrain eval refuses it"
