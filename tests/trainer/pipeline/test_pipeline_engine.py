"""The pipeline does not change the function: gradients and losses of every schedule against one rank.

The numerics policy is that of tests/trainer/run/test_parallel.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.examples import soaked
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    assemble,
    check_same_gradients,
    layouts,
    logical,
    microbatches,
    small_config,
    step_gradients,
    whole_gradients,
)
from trainer.config.sections import MeshSection, RecomputeSection, RunConfig
from trainer.errors import LostRankError

LAYERS = 5


def _config(name: str, *, micro_batch: int = 1, dtype: str = "fp64", dropout: float = 0.0, **mesh: Any) -> RunConfig:
    recompute = RecomputeSection(mode=mesh.pop("recompute", "none"))
    tied, layers = mesh.pop("tied", None), mesh.pop("layers", LAYERS)
    config = small_config(name, dtype=dtype)
    model = replace(config.model, num_layers=layers, hidden_dropout=dropout)
    if tied is not None:
        model = replace(model, tie_embeddings=tied)
    train = replace(config.train, micro_batch=micro_batch)
    return replace(config, model=model, train=train, mesh=MeshSection(**mesh), recompute=recompute)


PIPELINES = {
    "1f1b": (2, "llama", {"pp": 2}),
    "1f1b, 4 stages, by hand, tied": (4, "gpt2", {"pp": 4, "layers_per_stage": (2, 1, 1, 1)}),
    "gpipe, balanced, dropout": (
        2,
        "gpt2",
        {"pp": 2, "schedule": "gpipe", "stage_balance": "flops", "dropout": 0.3},
    ),
    "gpipe, data parallel": (4, "gpt2", {"pp": 2, "schedule": "gpipe", "micro_batch": 2}),
    "1f1b, sequence parallel": (4, "gpt2", {"pp": 2, "tp": 2, "sequence_parallel": True, "recompute": "selective"}),
    "interleaved": (2, "llama", {"pp": 2, "schedule": "interleaved", "recompute": "full"}),
    "interleaved, tied, dropout": (2, "gpt2", {"pp": 2, "schedule": "interleaved", "dropout": 0.3}),
    "interleaved, 4 ranks": (4, "gpt2", {"pp": 4, "schedule": "interleaved", "layers": 8}),
    "context parallel": (4, "llama", {"pp": 2, "cp": 2, "schedule": "zb_h1"}),
    "zb_h1": (2, "llama", {"pp": 2, "schedule": "zb_h1", "tp": 1}),
    "zb_h1, tied, sequence parallel": (4, "gpt2", {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb_h1"}),
    "zb_v, tied": (2, "gpt2", {"pp": 2, "schedule": "zb_v", "recompute": "full", "dropout": 0.3}),
    "zb_v, tensor parallel": (4, "llama", {"pp": 2, "tp": 2, "schedule": "zb_v", "layers_per_stage": (1, 2, 1, 1)}),
}


OFTEN = ["1f1b, 4 stages, by hand, tied", "gpipe, balanced, dropout", "interleaved", "context parallel", "zb_v, tied"]


@pytest.mark.parametrize("case", soaked(PIPELINES, but=OFTEN))
def test_fp64_gradients_equal_those_of_one_rank(case):
    ranks, name, options = PIPELINES[case]
    alone = {key: value for key, value in options.items() if key in ("dropout", "tied", "layers")}
    expected_totals, expected_loss, expected = whole_gradients(_config(name, **alone), 1)
    totals, evaluated, got = whole_gradients(_config(name, **options), ranks)
    np.testing.assert_allclose(totals, expected_totals, rtol=1e-12)
    np.testing.assert_allclose(evaluated, expected_loss, rtol=1e-12)
    check_same_gradients(got, expected)


def _steps(context: Any, config: RunConfig) -> Any:
    engine = layouts(context, config)
    losses = [engine.step(microbatches(engine, step), 1e-2).read().loss for step in range(4)]
    return losses, logical(engine.optimizer.owned, engine.optimizer.state["weight"])


def test_schedules_give_equal_bits():
    """Gradients are summed in the order of microbatches in each of them."""
    runs = {}
    for schedule in ("1f1b", "gpipe", "zb_h1"):
        found = run_ranks(_steps, 2, _config("llama", pp=2, schedule=schedule, dtype="fp32"))
        runs[schedule] = found[0][0], assemble([part for _, parts in found for part in parts])
    losses, weights = runs["1f1b"]
    assert len(set(losses)) == len(losses), "it trains on something"
    for schedule, (other, others) in runs.items():
        assert other == losses, schedule
        for name, values in weights.items():
            np.testing.assert_array_equal(others[name], values, err_msg=f"{schedule} {name}")


def test_interleaved_stages_give_the_bits_of_as_many_ranks():
    """Four stages on two ranks and on four: gradients of each stage are summed in the order of microbatches in both."""
    found = {}
    for ranks, schedule in ((4, "1f1b"), (2, "interleaved"), (2, "zb_v")):
        config = _config("llama", pp=ranks, schedule=schedule, layers=4, dtype="fp32")
        (losses, *_), parts = zip(
            *((totals, held) for totals, _, held in run_ranks(step_gradients, ranks, config)), strict=True
        )
        found[schedule] = losses, assemble([part for held in parts for part in held])
    losses, gradients = found["1f1b"]
    assert all(np.abs(values).max() > 0 for values in gradients.values())
    for schedule, (other, others) in found.items():
        assert other == losses, schedule
        for name, values in gradients.items():
            np.testing.assert_array_equal(others[name], values, err_msg=f"{schedule} {name}")


def _crossed(context: Any, config: RunConfig) -> str:
    """What the second rank says if it takes the first two activations, of equal shapes, in the wrong order."""
    engine = layouts(context, config)
    engine.executor.wait_s, engine.executor._runs = 3.0, 1  # not as long as in a first step
    batches = microbatches(engine, 0)
    schedule = engine._training(len(batches))
    if context.rank == 1:
        swapped = {0: 1, 1: 0}
        actions = [
            action._replace(microbatch=swapped.get(action.microbatch, action.microbatch))
            if action.is_message
            else action
            for action in schedule.actions[1]
        ]
        crossed = replace(schedule, actions=(schedule.actions[0], tuple(actions)))
        engine._training = lambda _: crossed  # type: ignore[assignment]
    try:
        engine.add_gradients(batches)
    except (AssertionError, LostRankError) as error:
        return str(error)
    return ""


def test_crossed_messages_of_equal_shapes_are_an_error():
    _, said = run_ranks(_crossed, 2, _config("llama", pp=2))
    assert "waited for 1RECV_F" in said and "was sent the message" in said
