"""What ranks of test_meshes.py compute; in a file of its own, so that none of them draws the rows, a second of CPU."""

from __future__ import annotations

from typing import Any

from tests.trainer.engines import layouts, microbatches, reduced, with_documents
from trainer.config.sections import RunConfig
from trainer.parallel.collectives import all_reduce_


def gradients(context: Any, config: RunConfig, documents: bool) -> Any:
    """(loss and tokens, gradients of one step as the optimizer sees them)."""
    engine = layouts(context, config)
    batches = microbatches(engine, 0)
    if documents:
        batches = with_documents(batches)
    totals = engine.add_gradients(batches)
    for axis in ("pp", "data"):
        all_reduce_(totals, engine.world.groups[axis])
    return totals.tolist(), reduced(engine, totals[1])


def train_steps(context: Any, config: RunConfig, documents: bool, steps: int) -> list[float]:
    """At a rate that does not amplify rounding: at 1e-2 some rows part by 1.7e-4, and by 5e-13 in fp64."""
    engine, losses = layouts(context, config), []
    for step in range(steps):
        batches = microbatches(engine, step % 4)
        losses.append(engine.step(with_documents(batches) if documents else batches, 3e-3).read().loss)
    return losses
