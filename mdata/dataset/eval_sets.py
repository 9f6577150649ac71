"""The finite sets that a training run is evaluated on: which sets, their names, and which samples are read.

Validation and test sets are chosen in the same way: the corpora given by path, otherwise the sets named in the blend's
manifest, otherwise the blend's own part of the split, if it has one. A corpus given by path is read completely, in file
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from mdata.blend.overlap import check_apart
from mdata.blend.same_tokenizer import REFUSE, way_out
from mdata.dataset.dataset import Dataset
from mdata.dataset.dataset_options import MegatronOrder
from mdata.errors import DamageError, UsageError, errors_wanted_by
from mdata.order.data_split import parse_split
from mdata.progress import SILENT, Progress

EvaluationSplit = Literal["valid", "test"]
_SPLITS: tuple[str, ...] = get_args(EvaluationSplit)


def evaluation_sets(
    train: Dataset,
    split: EvaluationSplit,
    *,
    paths: Sequence[str | Path] = (),
    num_samples: int | None = None,
    allow_overlap: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Dataset]:
    """Name -> set, read with the options of the training data.

    Args:
        train: the training data.
        split: "valid" or "test".
        paths: corpora instead of those that the blend names; named after their files, a blend after its manifest.
        num_samples: in Megatron's order: how many samples to build for.
        allow_overlap: `paths` may contain training documents.
        progress: receives a note on arrays that are built.

    Raises:
        UsageError: a set that cannot be read with the training's options, was made with another tokenizer, or contains
            training documents; or a name that occurs twice.
        DamageError: a set is not the one that the blend recorded.
    """
    order, asked = train.options.order, None
    if isinstance(order, MegatronOrder):
        # Megatron keeps the last partial sample of validation only, whether it is a part of the blend or a separate
        # corpus.
        order, asked = replace(order, keep_partial=order.keep_partial and split == "valid"), num_samples
    unknown = train.tokenizer_unknown
    options = replace(train.options, split="whole", num_samples=asked, order=order, tokenizer_unknown=unknown)
    if paths:
        opened = [
            (Path(path), Dataset.from_options(path, options, progress=progress, evaluation=True)) for path in paths
        ]
        sets = _by_path(opened, split)
        if not allow_overlap:
            trained = [part.corpus for part in train.components]
            named = {f"data.{split}": [part.corpus for dataset in sets.values() for part in dataset.components]}
            check_apart(trained, named, allow="data.allow_overlap = true")
    else:
        of_blend = train.valid_sets if split == "valid" else train.test_sets
        sets = {}
        for name, (path, _) in of_blend.items():
            with errors_wanted_by(f"{_KINDS[split]} set {name} of the blend"):
                sets[name] = Dataset.from_options(path, options, progress=progress)
        _check_ids(sets, of_blend, split=split)
    if not sets and parse_split(train.options.split_shares)[1 + _SPLITS.index(split)] > 0:
        sets = {split: train.read_as(replace(options, split=split), progress=progress)}
    for name, dataset in sets.items():
        _check_tokenizer(f"{_KINDS[split]} corpus {name}", dataset, train)
    return sets


_KINDS = {"valid": "validation", "test": "test"}


def samples_asked(limit: int, *, steps: int, interval: int = 0) -> int | None:
    """How many samples of a set Megatron's order is built for: `limit` for each evaluation, or None for one epoch.

    Args:
        limit: samples per evaluation; 0: all.
        steps: of training. interval: steps between evaluations; 0: one evaluation, at the end.
    """
    return (steps // interval + 1 if interval else 1) * limit or None


def evaluated_samples(dataset: Dataset, limit: int) -> npt.NDArray[np.int64]:
    """The samples of a set that an evaluation reads: int64[n], `limit` of them spread evenly over the set; 0: all."""
    total = dataset.num_samples
    assert total is not None, "sets to be evaluated are finite"
    count = min(limit, total) if limit else total
    return np.arange(count, dtype=np.int64) * total // count


def _by_path(opened: Sequence[tuple[Path, Dataset]], split: str) -> dict[str, Dataset]:
    sets: dict[str, Dataset] = {}
    for path, dataset in opened:
        name = dataset.components[0].name if len(dataset.components) == 1 else path.stem
        if name in sets:
            raise UsageError(
                f"data.{split} holds two sets called {name}",
                found=", ".join(str(path) for path, _ in opened),
                fix="name each once, or rename the files of one",
            )
        sets[name] = dataset
    return sets


def _check_tokenizer(set_text: str, dataset: Dataset, train: Dataset) -> None:
    if dataset.fingerprint == train.fingerprint:
        return
    found, expected = (
        f"tokenizer {each.fingerprint}" if each.fingerprint else "no tokenizer recorded" for each in (dataset, train)
    )
    if None not in (dataset.fingerprint, train.fingerprint):
        raise UsageError(
            f"{set_text} was made with a different tokenizer than the training data",
            found=found,
            expected=expected,
            fix="preprocess it again with the tokenizer of the training data",
        )
    if train.tokenizer_unknown == REFUSE:
        silent = dataset if dataset.fingerprint is None else train
        raise UsageError(
            f"{set_text}: either it or the training data does not record its tokenizer",
            found=found,
            expected=expected,
            fix=way_out(silent.components[0].corpus.place),
        )


def _check_ids(sets: Mapping[str, Dataset], named: Mapping[str, tuple[Path, str]], *, split: str) -> None:
    for name, (path, expected_id) in named.items():
        if expected_id not in (sets[name].blend_id, *sets[name].corpus_ids):
            raise DamageError(
                f"{_KINDS[split]} set {name} is not the one that was named ({path})",
                found=f"id {sets[name].corpus_ids[0]}",
                expected=f"id {expected_id}",
                fix=f"put it back, or name the sets in data.{split}",
            )
