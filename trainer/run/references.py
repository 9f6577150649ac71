"""The reference model of DPO: log probabilities of all conversations under the first weights, computed once.

They are stored in reference.npz in the run folder, with a hash of the weights and the identities of the data sets: a
run that continues reads them; a first start reads them only if both match. Conversations have numbers that depend on
corpus, split and packing alone (mdata/samples/chat.py), so they fit any order of samples, epoch and layout.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

import mdata
from mdata import DamageError
from mdata.errors import os_errors_named
from mdata.progress import Progress
from mdata.util import atomic_io
from trainer.checkpoint.save import together
from trainer.config.sections import RunConfig
from trainer.parallel.collectives import all_reduce_
from trainer.parallel.world import World
from trainer.run.data import References, RunData, rounds_of_pairs
from trainer.run.engine import Engine
from trainer.run.evaluating import without_loss

FILE, _FACTS, _DOING = "reference.npz", "facts", "the reference's log probabilities"


def needs_first_weights(config: RunConfig, data: RunData, world: World) -> bool:
    """Whether the run folder lacks the log probabilities of its data; the same answer on all ranks."""
    return together(
        world.groups["world"],
        lambda: world.is_main and _stored(config, _sets(data), weights=None) is None,
        doing=f"reading {_DOING}",
    )[0]


def references(config: RunConfig, data: RunData, *, engine: Engine, is_first: bool, progress: Progress) -> References:
    """Read them, or compute them by the engine and write them.

    Args:
        is_first: whether the engine has the first weights; otherwise the file exists.
    """
    world, sets = engine.world, _sets(data)
    if world.is_main and (left_out := data.train.pairs_left_out):
        length = config.train.sequence_length
        progress.note(f"DPO: pairs that are longer than a row of {length:,} tokens are left out: {left_out:,}")
    weights = engine.weights_hash() if is_first else None
    values = together(
        world.groups["world"],
        lambda: _stored(config, sets, weights=weights) if world.is_main else None,
        doing=f"reading {_DOING}",
    )[0]
    if values is None:
        assert weights is not None, "nothing is stored, so the first weights were loaded"
        pairs = sum(sum(dataset.conversation_counts) for dataset in sets.values()) // 2
        if world.is_main:
            progress.note(f"DPO: log probabilities of {pairs:,} pairs under the first weights are computed")
        values = {name: _computed(dataset, engine) for name, dataset in sets.items()}
        together(
            world.groups["world"],
            lambda: _store(config, values, weights=weights) if world.is_main else None,
            doing=f"writing {_DOING}",
        )
    return References(values)


def _sets(data: RunData) -> dict[str, mdata.Dataset]:
    return {dataset.data_id: dataset for dataset in (data.train, *data.valid.values(), *data.test.values())}


def _stored(
    config: RunConfig, sets: Mapping[str, mdata.Dataset], *, weights: str | None
) -> dict[str, list[np.ndarray]] | None:
    """The values in the run folder if they are of these data and weights (None: any)."""
    path = Path(config.run.folder) / FILE
    with os_errors_named(f"reading {_DOING}"):
        content = path.read_bytes() if path.exists() else None
    if content is None:
        return None
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            facts: dict[str, Any] = json.loads(bytes(arrays[_FACTS]))
            if not sets.keys() <= facts["data"].keys() or weights not in (None, facts["weights"]):
                return None
            return {name: [arrays[key] for key in facts["data"][name]] for name in sets}
    except (ValueError, KeyError, OSError, EOFError, BadZipFile) as error:
        fix = "delete it: it is computed again from the first weights"
        raise DamageError(f"{path} is damaged", found=str(error)[:200], fix=fix) from error


def _store(config: RunConfig, values: Mapping[str, list[np.ndarray]], *, weights: str | None) -> None:
    arrays = {f"{n}.{part}": array for n, parts in enumerate(values.values()) for part, array in enumerate(parts)}
    data = {name: [f"{n}.{part}" for part in range(len(parts))] for n, (name, parts) in enumerate(values.items())}
    facts = np.frombuffer(json.dumps({"weights": weights, "data": data}).encode(), np.uint8)
    content = io.BytesIO()
    np.savez(content, **{_FACTS: facts, **arrays})  # type: ignore[arg-type]  # a parameter of newer versions
    with os_errors_named(f"writing {_DOING}"):
        atomic_io.atomic_write(Path(config.run.folder) / FILE, content.getvalue())


def _computed(dataset: mdata.Dataset, engine: Engine) -> list[np.ndarray]:
    """log p of every conversation of a data set, on all ranks; for each component, float64[its conversations]."""
    plan, dp, device = engine.plan, engine.dp, engine.world.device
    values = [np.zeros(count) for count in dataset.conversation_counts]
    rounds = rounds_of_pairs(dataset, micro_batch=plan.micro_batch, together=engine.evaluated_together, dp=dp)
    for component, batches in rounds:
        moved = [engine.conversations(batch) for batch, _ in batches]
        moved = [batch if counts else without_loss(batch) for batch, (_, counts) in zip(moved, batches, strict=True)]
        numbers = [batch.rows.conversations for batch, _ in batches]
        sums = engine.conversation_sums(moved, [0 if of_batch is None else len(of_batch) for of_batch in numbers])
        for of_batch, (_, counts), nats in zip(numbers, batches, sums, strict=True):
            if counts:
                values[component][of_batch] = -nats
    return [all_reduce_(torch.from_numpy(part).to(device), dp).cpu().numpy() for part in values]
