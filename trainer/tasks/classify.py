"""Evaluates a classifier on labelled rows: accuracy, loss and predictions.

The rows are those that `mtrain finetune --task` reads. Classes are matched by their names, because published folders
order them differently from the data; unnamed classes (LABEL_0 ...) are taken to be those of the data. Ranks along dp
divide the rows, and each is computed once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import mdata
from mdata import UsageError
from mdata.errors import counted, os_errors_named
from mdata.loader.loader import collate
from mdata.progress import SILENT, Progress
from mdata.util import atomic_io
from trainer.models.stage import Microbatch
from trainer.parallel.collectives import all_reduce_
from trainer.tasks.loaded_model import Model

NAMELESS = "LABEL_"  # before the number of a class without a name in transformers


class Predicted(NamedTuple):
    """The predictions for a set: each sample's name and label (None: unknown), and fp64[n, classes] logits."""

    names: list[mdata.RowName]
    logits: Tensor
    classes: tuple[str, ...]

    def lines(self) -> Iterator[dict[str, Any]]:
        """A record of each sample."""
        shares = self.logits.softmax(-1)
        for name, best, of_class in zip(self.names, shares.argmax(-1).tolist(), shares.tolist(), strict=True):
            gold = {} if name.label is None else {"gold": self.classes[name.label]}
            shown = {label: round(share, 6) for label, share in zip(self.classes, of_class, strict=True)}
            yield {"uid": name.uid, "label": self.classes[best], **gold, "probabilities": shown}

    def score(self) -> Score:
        """Over the samples with a label."""
        places = [place for place, name in enumerate(self.names) if name.label is not None]
        labels = torch.tensor([self.names[place].label for place in places], dtype=torch.int64)
        logits = self.logits[places]
        correct = int((logits.argmax(-1) == labels).sum())
        return Score(correct, len(places), float(cross_entropy(logits, labels)) if places else None)

    def save(self, path: Path) -> None:
        """A line of JSON for each sample."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines())
        with os_errors_named("writing predictions"):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.atomic_write(path, text.encode())


class Score(NamedTuple):
    """Correct predictions among the samples with a label, and their mean loss; None without such samples."""

    correct: int
    known: int
    loss: float | None


def class_names(names: tuple[str, ...], choices: int | None) -> tuple[str, ...]:
    """The names of classes; of choices A, B, C ..., as RACE names its answers."""
    return names or tuple(chr(ord("A") + number) if number < 26 else str(number) for number in range(choices or 0))


def classify(
    model: Model,
    data: Path,
    task: Literal["mnli", "qqp", "race", "classify"],
    *,
    columns: Mapping[str, str] | None = None,
    on_error: str = "stop",
    sequence_length: int | None = None,
    batch_size: int = 8,
    progress: Progress = SILENT,
) -> tuple[dict[str, Any], Predicted]:
    """The numbers of a file, or of a folder of RACE, and the predictions; on all ranks.

    Args:
        columns, on_error: see `read_labelled`. sequence_length: tokens of a row; None: the model's context.

    Raises:
        UsageError: another kind of model, other classes, or no tokenizer. BadInputError: a bad row.
    """
    names = _classes(model, task)
    length = min(sequence_length or model.context, model.context)
    if model.tokenizer is None:
        raise UsageError(f"{model.name} has no tokenizer for the texts in {data}", fix="--tokenizer FOLDER")
    read = mdata.read_labelled(
        data, task, labels=names if task == "classify" else (), columns=columns, on_error=on_error, progress=progress
    )
    with tempfile.TemporaryDirectory(prefix="mtrain-rows-") as scratch:
        prefix = Path(scratch) / "rows"
        mdata.write_labelled({prefix: [read]}, model.tokenizer, task=task, progress=progress)
        kind = mdata.Classify(choices=read.choices)
        dataset = mdata.open_dataset(f"{prefix}.json", sequence_length=length, kind=kind, split="whole")
        classes = class_names(names, read.choices)
        logits = _logits(model, dataset, classes=len(classes), batch_size=batch_size, progress=progress)
    numbers = [None if row.label is None else _number(row.label, read, names) for row in read.rows]
    rows = [mdata.RowName(row.uid, number) for row, number in zip(read.rows, numbers, strict=True)]
    predicted = Predicted(rows, logits, classes)
    score = predicted.score()
    facts = {
        "task": task,
        "rows": len(read.rows),
        "known": score.known,
        "correct": score.correct,
        "accuracy": score.correct / score.known if score.known else None,
        "loss": score.loss,
        "skipped": dict(read.skipped),
    }
    return facts, predicted


def classify_line(facts: Mapping[str, Any]) -> str:
    """The numbers as one line for the user."""
    if facts["accuracy"] is None:
        return f"{facts['task']}: {counted(facts['rows'], 'row')} predicted; none has a label"
    right = f"{facts['correct']:,} of {facts['known']:,} rows right"
    return f"{facts['task']}: accuracy {facts['accuracy']:.4f} ({right}), loss {facts['loss']:.4f}"


def _classes(model: Model, task: str) -> tuple[str, ...]:
    """The names of the model's classes; (): it chooses."""
    if model.classes is None or (task == "race") != (model.classes == ()):
        use = "does not classify rows" if model.classes is None else "has classes" if model.classes else "chooses"
        raise UsageError(
            f"{model.name} {use}",
            found=f"--task {task}",
            expected="a model that chooses one of several rows" if task == "race" else "one that classifies rows",
            fix="mtrain finetune MODEL DATA --task makes one of a BERT",
        )
    return model.classes


def _number(label: int, read: mdata.LabelledFile, names: Sequence[str]) -> int:
    """The number of the data's label among the model's classes."""
    if not names or tuple(names) == read.labels or all(name.startswith(NAMELESS) for name in names):
        return label
    wanted = read.labels[label].lower()
    lower = [name.lower() for name in names]
    if wanted not in lower:
        raise UsageError(
            f"the model has no class {read.labels[label]!r} of the data",
            found=f"classes {', '.join(names)}",
            expected=", ".join(read.labels),
            fix="name the model's classes as the data does (id2label of config.json, model.bert.labels)",
        )
    return lower.index(wanted)


def _logits(model: Model, dataset: mdata.Dataset, *, classes: int, batch_size: int, progress: Progress) -> Tensor:
    """fp64[n, classes], on all ranks."""
    dp, count = model.world.groups["dp"], len(dataset)
    table = torch.zeros(count, classes, dtype=torch.float64, device=model.world.device)
    progress.begin("classify", count, unit="rows")
    for number, first in enumerate(range(0, count, batch_size)):
        samples = np.arange(first, min(first + batch_size, count))
        if number % dp.size == dp.rank:
            batch = collate(dataset, samples)
            table[samples] = model.class_logits(_microbatch(batch.rows.fields, model.world.device)).double()
        progress.advance(len(samples))
    progress.end()
    return all_reduce_(table, dp).cpu()


def _microbatch(fields: Mapping[str, np.ndarray], device: torch.device) -> Microbatch:
    """Rows without the padding that they have in common."""
    length = fields["text"].shape[-1]
    text, types, real = (fields[name].reshape(-1, length) for name in ("text", "types", "padding_mask"))
    lengths = real.sum(1)
    longest = int(lengths.max())
    tokens, types_BS = (torch.from_numpy(x[:, :longest].copy()).to(device) for x in (text, types))
    nothing = torch.zeros(0, device=device)
    return Microbatch(
        tokens_BS=tokens,
        labels_BS=nothing,
        loss_mask_BS=nothing,
        types_BS=types_BS,
        lengths_B=torch.from_numpy(lengths.astype(np.int32)).to(device),
        choices=fields["text"].shape[1] if fields["text"].ndim == 3 else None,
    )
