"""The layout does not change the function: gradients, losses and updates of every layout against one rank.

The numerics policy (CONTRIBUTING.md): fp64 gradients agree within 1e-10 x max(largest of the parameter, 1e-3 x largest
of the model); fp32 losses of 20 steps within 1e-4 relative.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import assemble, check_same_gradients, layouts, logical, microbatches, reduced, small_config
from tests.trainer.shapes import SHAPES
from trainer.config.sections import MeshSection

# (ranks, tp, sequence parallel, micro batch)
LAYOUTS = [(1, 1, False, 2), (2, 2, False, 1), (2, 2, True, 2), (2, 1, False, 1), (4, 2, True, 1), (4, 2, False, 2)]


def _config(name, tp, sequence_parallel, micro_batch, **kwargs):
    config = small_config(name, **kwargs)
    return replace(
        config,
        mesh=MeshSection(tp=tp, sequence_parallel=sequence_parallel),
        train=replace(config.train, micro_batch=micro_batch),
    )


def _gradients(context, config):
    """Reduced gradients of one step as the optimizer sees them, and the loss."""
    engine = layouts(context, config)
    batches = microbatches(engine, 0)
    totals = engine.add_gradients(batches)
    from trainer.parallel.collectives import all_reduce_

    totals = all_reduce_(totals, engine.dp)
    return totals.tolist(), reduced(engine, totals[1])


def _whole_gradients(config, ranks):
    results = run_ranks(_gradients, ranks, config)
    losses = {tuple(totals) for totals, _ in results}
    return losses, assemble([part for _, parts in results for part in parts])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: "-".join(map(str, v)))
@pytest.mark.parametrize("name", SHAPES)
def test_fp64_gradients_equal_those_of_one_rank(name, layout):
    ranks, tp, sequence_parallel, micro_batch = layout
    (alone,), expected = _whole_gradients(_config(name, 1, False, 1), 1)
    losses, got = _whole_gradients(_config(name, tp, sequence_parallel, micro_batch), ranks)
    for total in losses:
        np.testing.assert_allclose(total, alone, rtol=1e-12)
    check_same_gradients(got, expected)


def _twenty_losses(context, config):
    engine = layouts(context, config)
    return [engine.step(microbatches(engine, step), 1e-2).read().loss for step in range(20)]


@pytest.mark.parametrize(
    "layout",
    [
        (4, 2, True, 2),
        *(pytest.param(x, marks=pytest.mark.soak) for x in ((2, 2, False, 1), (2, 2, True, 1), (2, 1, False, 2))),
    ],
)
def test_fp32_losses_of_twenty_steps_agree(layout):
    ranks, tp, sequence_parallel, micro_batch = layout
    (alone,) = run_ranks(_twenty_losses, 1, _config("llama", 1, False, 1, dtype="fp32"))
    assert alone[-1] < alone[0] - 0.01, "the test trains on something"
    for losses in run_ranks(_twenty_losses, ranks, _config("llama", tp, sequence_parallel, micro_batch, dtype="fp32")):
        np.testing.assert_allclose(losses, alone, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "wide"])
def test_tp_4_equals_one_rank(name):
    """As many ranks as heads; the last ones hold mostly padding of the vocabulary."""
    (_,), expected = _whole_gradients(_config(name, 1, False, 1), 1)
    for sequence_parallel in (False, True):
        _, got = _whole_gradients(_config(name, 4, sequence_parallel, 2), 4)
        check_same_gradients(got, expected)


def _initial_weights(context, config):
    engine = layouts(context, config)
    return logical(engine.optimizer.owned, engine.optimizer.state["weight"])


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 2), (2, 1)])
def test_main_weights_of_bf16_start_unrounded(ranks, tp):
    (exact,) = run_ranks(_initial_weights, 1, _config("llama", 1, False, 1, dtype="fp32"))
    got = run_ranks(_initial_weights, ranks, _config("llama", tp, False, 1, dtype="bf16"))
    whole = assemble([part for parts in got for part in parts])
    for name, values in assemble(exact).items():
        np.testing.assert_array_equal(whole[name], values, err_msg=name)


def test_bf16_trains_with_fp32_main_weights():
    (losses,) = run_ranks(_twenty_losses, 1, _config("llama", 1, False, 2, dtype="bf16"))
    (exact,) = run_ranks(_twenty_losses, 1, _config("llama", 1, False, 2, dtype="fp32"))
    assert losses != exact
    np.testing.assert_allclose(losses, exact, rtol=2e-2)


def _small_step(context, dtype):
    """Dtypes of the main tensors, and the shares of weights that a tiny step moved: main ones, and the model's."""
    engine = layouts(context, _config("llama", 1, False, 1, dtype=dtype))
    main, model = engine.optimizer.state["weight"], engine.buffers.parameters.values
    before, rounded = main.clone(), model.clone()
    engine.step(microbatches(engine, 0), 1e-6)
    dtypes = {str(x.dtype) for x in (*engine.optimizer.state.values(), engine.buffers.gradients.values)}
    return dtypes, (main != before).double().mean().item(), (model != rounded).double().mean().item()


def test_steps_too_small_for_bf16_are_kept_in_the_main_weights():
    ((dtypes, main, model),) = run_ranks(_small_step, 1, "bf16")
    assert dtypes == {"torch.float32"}
    assert main > 0.5 and model < 0.05
    ((dtypes, *_),) = run_ranks(_small_step, 1, "fp64")
    assert dtypes == {"torch.float64"}


def _held(context, config):
    from trainer.run.metrics import held_parameters

    engine = layouts(context, config)
    real = {n: tuple(p.shape) for n, p in engine.model.named_parameters()}
    facts = held_parameters(engine.optimizer, engine.executor.stages)
    assert {p["name"]: tuple(p["shape"]) for p in facts["parameters"]} == real
    return facts


def test_each_rank_holds_its_half_of_what_is_split():
    (whole,) = run_ranks(_held, 1, _config("llama", 1, False, 1))
    halves = run_ranks(_held, 2, _config("llama", 2, True, 1))
    # The vocabulary of 250 is cut at 128 rows, so the halves differ by the 6 rows of padding, twice (untied).
    rows = 6 * 32 * 2
    assert [h["split_parameters"] for h in halves] == [
        (whole["split_parameters"] + rows) // 2,
        (whole["split_parameters"] - rows) // 2,
    ]
    assert {h["copied_parameters"] for h in halves} == {whole["copied_parameters"]}


def _fp16(context, steps, precision):
    """Losses, loss scales, which steps were applied, and how many."""
    config = small_config("llama", dtype="fp16")
    config = replace(
        config,
        mesh=MeshSection(tp=context.world),
        precision=replace(config.precision, **precision),
        optimizer=replace(config.optimizer, clip_norm=1.0),
    )
    engine = layouts(context, config)
    reports = [engine.step(microbatches(engine, step), 1e-2).read() for step in range(steps)]
    return (
        [r.loss for r in reports],
        [r.loss_scale for r in reports],
        [r.applied for r in reports],
        engine.optimizer.steps,
    )


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_fp16_finds_its_loss_scale_and_trains(ranks):
    """From a scale at which every gradient overflows: steps are skipped on all ranks until it has come down."""
    (exact,) = run_ranks(_twenty_losses, 1, _config("llama", 1, False, 1, dtype="fp32"))
    found = run_ranks(_fp16, ranks, 40, {"initial_loss_scale": 2.0**32})
    losses, scales, applied, steps = found[0]
    assert all(other == found[0] for other in found)
    skipped = applied.count(False)
    assert 3 < skipped < 30 and applied[-5:] == [True] * 5 and steps == 40 - skipped
    assert scales[:3] == [2.0**32, 2.0**32, 2.0**31], "two overflows, then each halves it"
    assert min(losses[-5:]) < losses[0] - 0.01 and abs(losses[0] - exact[0]) < 0.02


def test_a_constant_scale_of_fp16_changes_nothing_but_rounding():
    (low,) = run_ranks(_fp16, 1, 6, {"loss_scale": 1024.0})
    (high,) = run_ranks(_fp16, 1, 6, {"loss_scale": 4096.0})
    assert low[1] == [1024.0] * 6 and all(low[2]) and all(high[2])
    np.testing.assert_allclose(low[0], high[0], rtol=2e-3)
