"""The losses of a run's evaluation sets, and the progress of an evaluation.

Every data-parallel rank reads its share of the samples; the sums are reduced once per set. All ranks compute the same
number of microbatches, because gathering sharded parameters is a collective: a rank with fewer samples ends with one
whose loss does not count. The progress of training shows how many samples are left, beside its steps: an evaluation has
no separate progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

import mdata
from mdata.dataset.eval_sets import evaluated_samples
from mdata.loader.loader import collate
from mdata.progress import Progress
from trainer.models.stage import Microbatch
from trainer.run.data import evaluation_batches, to_device
from trainer.run.engine import Engine


def evaluate_sets(
    engine: Engine, splits: Mapping[str, Mapping[str, mdata.Dataset]], *, limit: int, progress: Progress
) -> dict[str, dict[str, float]]:
    """Mean loss of each set, nats per token, on all ranks.

    Args:
        splits: split -> name -> set. limit: samples of a set to read, spread evenly over it; 0: all.
        progress: receives `to_evaluate`, the remaining samples over all ranks.
    """
    chosen = {
        (split, name): evaluated_samples(dataset, limit)
        for split, sets in splits.items()
        for name, dataset in sets.items()
    }
    left = sum(map(len, chosen.values()))
    losses: dict[str, dict[str, float]] = {split: {} for split in splits}

    def read(split: str, name: str) -> Iterator[Microbatch]:
        nonlocal left
        samples, plan, dp = chosen[split, name], engine.plan, engine.dp
        missing = -(-len(samples[:: dp.size]) // plan.micro_batch)  # of rank 0, which has the most
        for batch in evaluation_batches(splits[split][name], samples, micro_batch=plan.micro_batch, dp=dp):
            yield to_device(batch, engine.world.device, vocab_size=plan.vocab_size, cp=engine.cp)
            missing -= 1
            left = max(0, left - len(batch.samples) * dp.size)
            progress.advance(0, to_evaluate=left)
        if missing:
            any_batch = collate(splits[split][name], samples[:1])
            yield without_loss(to_device(any_batch, engine.world.device, vocab_size=plan.vocab_size, cp=engine.cp))

    for split, name in chosen:
        losses[split][name] = engine.evaluate(read(split, name))
    if chosen:
        progress.advance(0, to_evaluate=0)
    return losses


def without_loss(batch: Microbatch) -> Microbatch:
    """The microbatch with a loss of 0 from 0 tokens."""
    tokens = None if batch.loss_tokens is None else torch.zeros_like(batch.loss_tokens)
    return replace(batch, loss_mask_BS=torch.zeros_like(batch.loss_mask_BS), loss_tokens=tokens)
