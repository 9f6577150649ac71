"""The only door to mdata: which corpora a run reads, what they say about themselves, and its batches.

`open_data` opens the training blend and the validation corpora by name and checks that they were made with one
tokenizer. `facts` is what plan.check compares with the model, before any GPU is touched; a foreign corpus without a
manifest has no facts, so every batch's ids are checked instead. Everything on this side is numpy; `to_device` is
where it becomes torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import mdata
from mdata import UsageError
from trainer.collectives import Axis
from trainer.config import RunConfig
from trainer.executor import Microbatch
from trainer.plan import DataFacts, Plan, batch_sizes


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run.

    Args:
        train: unbounded in the native order; in Megatron's as many samples as the run reads, or some more.
        valid: name -> finite; in the native order in file order.
        facts: what the training data says about itself.
    """

    train: mdata.Dataset
    valid: Mapping[str, mdata.Dataset]
    facts: DataFacts


def open_data(config: RunConfig, *, progress: mdata.Progress = mdata.SILENT) -> RunData:
    """Open what the configuration names.

    Args:
        config: of the run.
        progress: hears of arrays that are built.

    Raises:
        UsageError: a file is missing, a corpus is too short, or two corpora have different tokenizers.
    """
    train = _open(config, config.data.blend, split="train", progress=progress)
    valid = _validation_sets(config, progress) or _named_sets(config, train, progress)
    if not valid and _share(config.data.split, 1) > 0:
        valid = {"valid": _open(config, config.data.blend, split="valid", progress=progress)}
    for name, dataset in valid.items():
        if None not in (dataset.fingerprint, train.fingerprint) and dataset.fingerprint != train.fingerprint:
            raise UsageError(
                f"validation corpus {name} was made with another tokenizer than {config.data.blend}",
                found=f"tokenizer {dataset.fingerprint}",
                expected=f"tokenizer {train.fingerprint}",
                fix="preprocess it again with the tokenizer of the training data",
            )
    facts = DataFacts(
        vocab_size=train.vocab_size,
        largest_id=_largest([train, *valid.values()]),
        eod=train.eod,
        fingerprint=train.fingerprint,
        num_tokens=sum(c.num_tokens for c in train.components),
        components=tuple((c.name, c.num_tokens) for c in train.components),
        num_samples=train.num_samples,
    )
    return RunData(train, valid, facts)


def training_batches(
    data: RunData,
    config: RunConfig,
    *,
    plan: Plan,
    dp: Axis,
    consumed: int,
    progress: mdata.Progress = mdata.SILENT,
) -> mdata.Loader:
    """This rank's microbatches of every step from `consumed` samples on, read ahead.

    `progress` hears it when a step has to be waited for. Ranks along the tensor axis read the same rows, each for
    itself: the file comes from the disk once a node (docs/design/loader.md).
    """
    batches = mdata.BatchPlan(
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        dp_rank=dp.rank,
        dp_size=dp.size,
        seed=config.run.seed,
        sizes=batch_sizes(config),
    )
    return mdata.Loader(data.train, batches, consumed=consumed, prefetch=config.data.prefetch, progress=progress)


def validation_samples(dataset: mdata.Dataset, limit: int) -> np.ndarray:
    """The samples that a validation reads: all, or `limit` of them spread evenly over the set: int64[n]."""
    total = dataset.num_samples
    assert total is not None, "validation sets are finite"
    count = min(limit, total) if limit else total
    return np.arange(count, dtype=np.int64) * total // count


def validation_batches(
    dataset: mdata.Dataset, samples: np.ndarray, *, micro_batch: int, dp: Axis
) -> Iterator[mdata.Batch]:
    """This rank's share of a validation set, in batches of at most micro_batch."""
    mine = samples[dp.rank :: dp.size]
    for first in range(0, len(mine), micro_batch):
        yield mdata.collate(dataset, mine[first : first + micro_batch])


def to_device(batch: mdata.Batch, device: torch.device, *, vocab_size: int) -> Microbatch:
    """Check the ids and move one microbatch to the device.

    Raises:
        UsageError: an id lies outside the model's vocabulary (only a foreign corpus can bring one).
    """
    text = batch.rows.text  # tokens and labels are views of it: one look, and one copy
    largest = int(text.max())
    if largest >= vocab_size or int(text.min()) < 0:
        raise UsageError(
            f"a batch holds a token id outside the model's vocabulary (samples {batch.samples.tolist()[:8]})",
            found=f"largest id {largest}",
            expected=f"0 to {vocab_size - 1}",
            fix="set model.vocab_size to the vocabulary that the corpus was made with",
        )
    moved, mask = (torch.from_numpy(part).to(device, non_blocking=True) for part in (text, batch.loss_mask))
    return Microbatch(moved[:, :-1], moved[:, 1:], mask)


def _open(config: RunConfig, path: str, *, split: str, progress: mdata.Progress = mdata.SILENT) -> mdata.Dataset:
    data = config.data
    options = mdata.DatasetOptions(
        sequence_length=config.train.sequence_length,
        seed=config.run.seed,
        split=split,
        split_shares=data.split,
        order=data.order,
        num_samples=_num_samples(config, split) if data.order == "megatron" else None,
        kind=data.kind,
        shuffle_block=data.shuffle_block,
        cache=data.cache or None,
    )
    return mdata.open_dataset(path, options, progress=progress)


def _num_samples(config: RunConfig, split: str) -> int | None:
    """How many samples Megatron asks for: all that the run, or its validations, read; None: one epoch."""
    train = config.train
    if split == "train":
        return train.steps * train.global_batch
    validations = train.steps // train.eval_interval + 1 if train.eval_interval else 1
    return validations * train.eval_samples or None


def _validation_sets(config: RunConfig, progress: mdata.Progress) -> dict[str, mdata.Dataset]:
    """Name -> set; a single corpus is called as its files are, a blend by its manifest."""
    sets: dict[str, mdata.Dataset] = {}
    for path in config.data.valid:
        dataset = _open(config, path, split="whole", progress=progress)
        name = dataset.components[0].name if len(dataset.components) == 1 else Path(path).stem
        if name in sets:
            raise UsageError(
                f"data.valid holds two sets called {name}",
                found=", ".join(config.data.valid),
                fix="name each once, or rename the files of one",
            )
        sets[name] = dataset
    return sets


def _named_sets(config: RunConfig, train: mdata.Dataset, progress: mdata.Progress) -> dict[str, mdata.Dataset]:
    """The validation sets that the blend's manifest names.

    Raises:
        DamageError: one is not what was named.
    """
    sets: dict[str, mdata.Dataset] = {}
    for name, (path, known) in train.valid_sets.items():
        sets[name] = _open(config, str(path), split="whole", progress=progress)
        if known not in (sets[name].blend_id, *sets[name].corpus_ids):
            raise mdata.DamageError(
                f"validation set {name} of {config.data.blend} is not the one that was named ({path})",
                found=f"id {sets[name].corpus_ids[0]}",
                expected=f"id {known}",
                fix="put it back, or name the sets in data.valid",
            )
    return sets


def _share(split: str, index: int) -> float:
    return mdata.parse_split(split)[index]


def _largest(datasets: list[mdata.Dataset]) -> int | None:
    known = [d.largest_id for d in datasets if d.largest_id is not None]
    return max(known) if known else None
