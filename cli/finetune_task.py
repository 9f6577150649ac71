"""`mtrain finetune --task`: labelled rows as corpora of the run, and the settings of a classifier of them.

Shared by the commands that read labelled rows; not a command itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mdata import UsageError
from mdata.errors import counted
from mdata.sources.labelled import NUM_CHOICES, TASKS, LabelledFile, Task, labels_in, read_labelled, sources_in

from .console import Console, Parser

if TYPE_CHECKING:
    from mdata.tokenizers.base.tokenizer import Tokenizer
    from trainer.convert.model_folder import ModelFolder

DROPOUT = 0.1
COLUMNS = ("label", "text", "text_pair", "id")


class TaskData(NamedTuple):
    """The corpora of a task in the run's folder, by their manifests, and what its model predicts."""

    train: str
    valid: list[str]
    test: list[str]
    labels: tuple[str, ...]

    @property
    def choices(self) -> int | None:
        """Rows of a sample of which one is right; None: rows have a class."""
        return None if self.labels else NUM_CHOICES

    def data_keys(self) -> dict[str, Any]:
        """[data] of the run."""
        keys: dict[str, Any] = {"blend": self.train, "kind": "classify"}
        keys |= {"classify": {"choices": self.choices}} if self.choices else {}
        return keys | {name: paths for name, paths in (("valid", self.valid), ("test", self.test)) if paths}

    def model_keys(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """[model] of the run, from that of the weights that it begins with."""
        head = {"task": "classify", "labels": list(self.labels)} if self.labels else {"task": "choice"}
        of_family = {name: value for name, value in keys.get("bert", {}).items() if name not in ("task", "labels")}
        return {"hidden_dropout": DROPOUT, **keys, "bert": {**of_family, **head}}


def add_task_arguments(parser: Parser, add_of_data: Any) -> None:
    """How labelled rows are read; options of other data, too, are given to `add_of_data`."""
    add = parser.add_argument_group("labelled rows").add_argument
    add(
        "--task",
        choices=TASKS,
        help="finetune a BERT on rows of MNLI, QQP or RACE, or of your own (classify: tsv with a header, or jsonl)",
    )
    add("--test", metavar="DATA", help="rows without labels, which are predicted at the end")
    add("--labels", metavar="NAMES", help="--task classify: its classes, as A,B (default: those in the training data)")
    add_columns(add)
    add_on_error(add_of_data)


def add_columns(add: Any) -> None:
    """Which columns or keys labelled rows have."""
    add(
        "--columns",
        metavar="NAMES",
        help="--task classify: columns or keys of other names, as label=stars,text=review,text_pair=title,id=key",
    )


def add_on_error(add: Any) -> None:
    """What happens to bad rows."""
    add(
        "--on-error",
        choices=("stop", "skip"),
        default=None,
        help="a bad row stops (default), or is skipped and counted",
    )


def columns_of(text: str | None) -> dict[str, str]:
    """The columns that --columns names."""
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    if wrong := [name for name, sign, column in pairs if name not in COLUMNS or not sign or not column]:
        raise UsageError(
            f"--columns {text}", found=f"{wrong[0]!r}", expected=f"NAME=COLUMN with NAME one of {', '.join(COLUMNS)}"
        )
    return {name: column for name, _, column in pairs}


def check_task_options(arguments: argparse.Namespace) -> None:
    """Refuse options of labelled rows where no task is given, and those of one task for another."""
    of_task = {"test": None, "labels": "classify", "columns": "classify"}
    for name, task in of_task.items():
        if getattr(arguments, name, None) is not None and arguments.task not in ((task,) if task else TASKS):
            needs = f"--task {task}" if task else f"--task, one of {', '.join(TASKS)}"
            raise UsageError(f"--{name.replace('_', '-')} is for labelled rows", fix=f"give {needs}, or leave it out")


def prepare_task(
    arguments: argparse.Namespace, model: ModelFolder, folder: Path, overwrite: bool, console: Console
) -> TaskData:
    """Read the rows and tokenize them into the folder by the model's tokenizer, or find that done."""
    from mdata.rewriting.labelled import write_labelled

    task: Task = arguments.task
    train, valid, test = _sources(arguments, task)
    columns = columns_of(arguments.columns)
    named = tuple(arguments.labels.split(",")) if arguments.labels else ()
    labels = named or (labels_in(train, columns) if task == "classify" else ())
    classes = model.family.classes(model.config) or ()
    if task == "classify" and not named and sorted(classes) == sorted(labels):
        labels = classes  # its head goes on
    tokenizer = _tokenizer(arguments, model)

    def read(path: Path, *, to_train: bool = False) -> LabelledFile:
        return read_labelled(
            path,
            task,
            labels=labels,
            columns=columns,
            on_error=arguments.on_error or "stop",
            to_train=to_train,
            progress=progress,
        )

    with console.progress() as progress:
        files = [read(path, to_train=True) for path in train]
        sets: dict[Path, Sequence[LabelledFile]] = {folder / "train": files}
        of_split: dict[str, list[str]] = {}
        for split, paths in (("valid", valid), ("test", test)):
            named_files = [read(path) for path in paths]
            if len({file.name for file in named_files}) < len(named_files):
                raise UsageError(
                    f"--{split} names two sets with the same name",
                    found=", ".join(map(str, paths)),
                    fix="rename a file",
                )
            for file in named_files:
                write_labelled(
                    {folder / split / file.name: [file]},
                    tokenizer,
                    task=task,
                    overwrite=overwrite,
                    progress=progress,
                )
            of_split[split] = [f"{folder / split / file.name}.json" for file in named_files]
        write_labelled(sets, tokenizer, task=task, overwrite=overwrite, progress=progress)
    rows = sum(len(file.rows) for file in files)
    kind = f"classes {', '.join(files[0].labels)}" if files[0].labels else f"{NUM_CHOICES} choices"
    console.note(f"{counted(rows, 'row')} to train on, with {kind}; tokenized into {folder} by the model's tokenizer")
    return TaskData(f"{folder / 'train'}.json", of_split["valid"], of_split["test"], files[0].labels)


def _sources(arguments: argparse.Namespace, task: Task) -> tuple[tuple[Path, ...], tuple[Path, ...], tuple[Path, ...]]:
    """Training, validation and test data; options win over what a folder holds."""
    sources = [sources_in(Path(path), task) for path in arguments.data.split(",")]
    train = tuple(path for of_data in sources for path in of_data.train)
    valid, test = (
        tuple(Path(path) for path in (text or "").split(",") if path) for text in (arguments.valid, arguments.test)
    )
    valid = valid or tuple(path for of_data in sources for path in of_data.valid)
    return train, valid, test or tuple(path for of_data in sources for path in of_data.test)


def _tokenizer(arguments: argparse.Namespace, model: ModelFolder) -> Tokenizer:
    from mdata.tokenizers.registry import build_tokenizer

    if model.tokenizer is None:
        raise UsageError(
            f"{arguments.model} has no tokenizer for the texts in {arguments.data}",
            fix="--tokenizer FOLDER with the one that the model was trained with",
        )
    name, files, options, _ = model.tokenizer
    return build_tokenizer(name, files, options=options)
