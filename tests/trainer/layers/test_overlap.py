"""Tensor parallelism in backward: the input's gradient travels while the weight's product is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import layouts, small_config
from trainer.config.sections import MeshSection, RunConfig
from trainer.layers import base
from trainer.parallel.collectives import Pending


def _events(context: Any, config: RunConfig) -> list[str]:
    """What a block's column-parallel layer does in backward: begins a sum, multiplies, waits for the sum."""
    engine = layouts(context, config)
    events: list[str] = []
    begun: dict[int, Pending] = {}
    wait = Pending.wait

    def noted(real: Any) -> Any:
        def start(*args: Any) -> Pending:
            pending = real(*args)
            begun[id(pending)] = pending
            events.append("begins")
            return pending

        return start

    def waited(self: Pending) -> torch.Tensor:
        if begun.pop(id(self), None) is not None:
            events.append("waits")
        return wait(self)

    up = next(iter(engine.model.blocks.values())).mlp.up
    add_product = up.main_gradients.add_product

    def product(*args: Any, **options: Any) -> None:
        events.append("product")
        add_product(*args, **options)

    tokens = 8 // (2 if config.mesh.sequence_parallel else 1)
    x_ND = torch.ones(tokens, config.model.hidden_size, dtype=up.weight.dtype, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_reduce_scatter", "start_all_reduce_"):
            patch.setattr(base, name, noted(getattr(base, name)))
        patch.setattr(Pending, "wait", waited)
        patch.setattr(up.main_gradients, "add_product", product)
        up(x_ND).sum().backward()
    return events


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_sum_of_the_inputs_gradient_begins_before_the_weights_product_and_ends_after_it(sequence_parallel):
    mesh = MeshSection(tp=2, sequence_parallel=sequence_parallel)
    for events in run_ranks(_events, 2, replace(small_config("llama"), mesh=mesh)):
        assert events == ["begins", "product", "waits"]
