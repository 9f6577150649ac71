"""AdamW against a readable twin, clipping, and a step as a transaction."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import assemble, held_state, layouts, logical, microbatches, small_config
from trainer.config.sections import MeshSection, OptimizerSection
from trainer.kernels.plain import AdamConstants, AdamState, SgdConstants, SgdState
from trainer.kernels.table import PLAIN, choose_kernels
from trainer.layers.base import MainGradients, add_weight_gradient
from trainer.models.gpt.model import build_gpt
from trainer.optim.optimizer import NORM_BLOCK, sum_of_squares
from trainer.parallel.params import Place

CPU = torch.device("cpu")


def slow_adamw(w, g, m, v, *, lr, wd, b1, b2, eps, steps):
    """Loshchilov and Hutter 2019, algorithm 2, element by element."""
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    corrected = (m / (1 - b1**steps)) / ((v / (1 - b2**steps)) ** 0.5 + eps)
    return w - lr * wd * w - lr * corrected, m, v


@pytest.mark.parametrize("kernels", [PLAIN, choose_kernels(CPU, torch.float64)], ids=["plain", "chosen"])
def test_adamw_equals_its_twin(kernels):
    generator = np.random.default_rng(0)
    w, m, v = (generator.random(37) for _ in range(3))
    state = [torch.from_numpy(x.copy()) for x in (w, m, v)]
    rounded, constants = torch.zeros(37, dtype=torch.bfloat16), AdamConstants(0.9, 0.95, 1e-8, 0.3)
    for steps in range(1, 6):
        g = generator.standard_normal(37)
        w, m, v = slow_adamw(w, g, m, v, lr=0.1, wd=0.3, b1=0.9, b2=0.95, eps=1e-8, steps=steps)
        numbers = torch.tensor([0.25, 0.1, 1 - 0.9**steps, 1 - 0.95**steps, steps], dtype=torch.float64)
        for applied in (False, True):  # a step that is not applied changes nothing
            gradient = torch.from_numpy(g * 4 if applied else np.full(37, np.nan))
            kernels.adamw_(AdamState(*state, rounded), gradient, numbers, torch.tensor(applied), constants)
        for got, expected in zip(state, (w, m, v), strict=True):
            # The library corrects the bias in fp32 arithmetic of the step number.
            np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12 if kernels is PLAIN else 1e-6)
        assert torch.equal(rounded, state[0].to(torch.bfloat16))


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("kernels", [PLAIN, choose_kernels(CPU, torch.float64)], ids=["plain", "chosen"])
def test_sgd_is_that_of_torch(kernels, scheduled):
    """As Megatron calls it: the weight decay is part of the gradient, and of the momentum."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(37, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.3)
    state, rounded = (start.clone(), torch.zeros_like(start)), torch.zeros(37, dtype=torch.bfloat16)
    decay = torch.tensor(0.3, dtype=torch.float64) if scheduled else 0.3
    for _ in range(5):
        theirs.grad = torch.randn(37, generator=generator, dtype=torch.float64)
        optimizer.step()
        numbers = torch.tensor([0.25, 0.1], dtype=torch.float64)
        for applied in (False, True):
            gradient = theirs.grad * 4 if applied else torch.full_like(start, torch.nan)
            kernels.sgd_(SgdState(*state, rounded), gradient, numbers, torch.tensor(applied), SgdConstants(0.9, decay))
        torch.testing.assert_close(state[0], theirs.data, rtol=1e-12, atol=0)
        assert torch.equal(rounded, state[0].to(torch.bfloat16))


def _weights_after(context, config, num_steps):
    engine = layouts(context, config)
    norms = [engine.step(microbatches(engine, step), 1e-2).read().grad_norm for step in range(num_steps)]
    optimizer = engine.optimizer
    weight, parameters = optimizer.state["weight"], engine.buffers.parameters
    for start, stop, first, _ in optimizer.owned.runs:
        held = parameters.view(start, stop)
        assert torch.equal(held, weight[first : first + stop - start].to(held.dtype))
    return norms, logical(optimizer.owned, weight)


@pytest.mark.parametrize(
    ("ranks", "tp", "sequence_parallel", "rule"),
    [(2, 1, False, "adamw"), (4, 1, False, "adamw"), (4, 2, True, "adamw"), (4, 2, True, "sgd")],
)
def test_sharded_updates_equal_those_of_one_rank(ranks, tp, sequence_parallel, rule):
    """fp64: weights after three steps, and the norm that clipping used."""
    config = small_config("gpt2", optimizer=OptimizerSection(lr=1e-2, name=rule))
    ((norms, parts),) = run_ranks(_weights_after, 1, config, 3)
    expected = assemble(parts)
    layout = replace(config, mesh=MeshSection(tp=tp, sequence_parallel=sequence_parallel))
    results = run_ranks(_weights_after, ranks, layout, 3)
    for got_norms, _ in results:
        np.testing.assert_allclose(got_norms, norms, rtol=1e-10)
    got = assemble([part for _, parts in results for part in parts])
    for name, reference in expected.items():
        np.testing.assert_allclose(got[name], reference, rtol=0, atol=1e-8, err_msg=name)


def _clipped(context, clip_norm):
    config = small_config("llama")
    engine = layouts(context, replace(config, optimizer=OptimizerSection(lr=1e-2, clip_norm=clip_norm)))
    result = engine.step(microbatches(engine, 0), 1e-2).read()
    return result.grad_norm, engine.optimizer.state["exp_avg"].norm().item()


def test_clipping_scales_the_gradient_to_the_norm_asked_for():
    ((norm, free),) = run_ranks(_clipped, 1, 0.0)
    ((same, clipped),) = run_ranks(_clipped, 1, norm / 4)
    assert same == norm
    assert free == pytest.approx(0.1 * norm)  # exp_avg starts as (1 - beta1) times the gradient
    assert clipped == pytest.approx(free / 4)


def _decayed(context):
    """Weights after and before a step whose gradient is zero: decay alone moves them, by the factor 1 - lr wd."""
    config = replace(small_config("gpt2"), optimizer=OptimizerSection(lr=0.1, weight_decay=0.5))
    engine = layouts(context, config)
    optimizer = engine.optimizer
    optimizer.gathers.release()
    optimizer.state["weight"].fill_(2.0)
    optimizer.step(0.1, torch.ones(1, dtype=torch.float64))
    return logical(optimizer.owned, optimizer.state["weight"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_weight_decay_is_for_matrices_only(ranks):
    whole = assemble([part for parts in run_ranks(_decayed, ranks) for part in parts])
    assert {values.ndim for values in whole.values()} == {1, 2}
    for name, values in whole.items():
        np.testing.assert_allclose(values, 2.0 * (0.95 if values.ndim == 2 else 1.0), rtol=1e-12, err_msg=name)


def _scheduled(context):
    """Two steps of a gradient of zero, with weight decays of their own."""
    section = OptimizerSection(lr=0.1, weight_decay_schedule="linear", weight_decay_end=0.3)
    engine = layouts(context, small_config("gpt2", optimizer=section))
    engine.optimizer.gathers.release()
    engine.optimizer.state["weight"].fill_(2.0)
    for decay in (0.5, 0.25):
        engine.optimizer.step(0.1, torch.ones(1, dtype=torch.float64), weight_decay=decay)
    return logical(engine.optimizer.owned, engine.optimizer.state["weight"])


def test_a_weight_decay_may_change_from_step_to_step():
    whole = assemble([part for parts in run_ranks(_scheduled, 1) for part in parts])
    for name, values in whole.items():
        np.testing.assert_allclose(values, 2.0 * (0.95 * 0.975 if values.ndim == 2 else 1.0), rtol=1e-12, err_msg=name)


def _with_rates(context, config, pairs):
    """Weights after two steps, for each (optimizer.embedding_lr, learning rates of a step)."""
    found = []
    for own, (rate, embedding_rate) in pairs:
        engine = layouts(context, replace(config, optimizer=replace(config.optimizer, embedding_lr=own)))
        for step in range(2):
            engine.step(microbatches(engine, step), rate, embedding_rate=embedding_rate)
        found.append(logical(engine.optimizer.owned, engine.optimizer.state["weight"]))
    return found


@pytest.mark.parametrize(
    ("kind", "rule", "ranks", "mesh"),
    [
        ("gpt2", "adamw", 2, MeshSection(pp=2)),
        ("llama", "adamw", 4, MeshSection(tp=2, sequence_parallel=True)),
        ("llama", "muon", 2, MeshSection()),
        ("gpt2", "sgd", 2, MeshSection()),
    ],
)
def test_embedding_and_head_have_a_rate_of_their_own(kind, rule, ranks, mesh):
    """A rate of 0 keeps them as they are, and nothing else; the same rate changes nothing; in other layouts too."""
    config = small_config(kind, optimizer=OptimizerSection(lr=1e-2, name=rule))
    pairs = [(None, (1e-2, None)), (1e-2, (1e-2, 1e-2)), (1e-2, (1e-2, 0.0)), (1e-2, (0.0, 0.0)), (1e-2, (1e-2, 2e-2))]
    (results,) = run_ranks(_with_rates, 1, config, pairs)
    same, alike, still, first, faster = map(assemble, results)
    own = {"embedding.weight"} if kind == "gpt2" else {"embedding.weight", "head.weight"}
    assert own <= same.keys()
    for name, values in same.items():
        assert np.array_equal(alike[name], values), name
        assert np.array_equal(still[name], first[name]) == (name in own), name
        assert name not in own or not np.array_equal(faster[name], values), name
    shared = run_ranks(_with_rates, ranks, replace(config, mesh=mesh), pairs[-1:])
    parts = [part for (held,) in shared for part in held]
    for name, values in assemble(parts).items():
        np.testing.assert_allclose(values, faster[name], rtol=0, atol=1e-8, err_msg=name)


def _half_sums(context, dtype, gradients):
    config = small_config("llama", dtype=dtype)
    precision = replace(config.precision, gradients=gradients, initial_loss_scale=2.0**16)
    engine = layouts(context, replace(config, precision=precision, mesh=MeshSection(tp=min(2, context.world))))
    report = engine.step(microbatches(engine, 0), 1e-2).read()
    held = engine.buffers.gradients.values.dtype, engine.optimizer.state["exp_avg"].dtype
    return report.applied, report.grad_norm, held, logical(engine.optimizer.owned, engine.optimizer.state["exp_avg"])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_in_half_precision_are_those_of_fp32_rounded(dtype):
    """On one rank and on tp 2 x dp 2; moments stay fp32, and a loss scale does not show in them."""
    ((applied, norm, held, parts),) = run_ranks(_half_sums, 1, dtype, "main")
    assert applied and held == (torch.float32, torch.float32)
    expected, bound = assemble(parts), 0.03 if dtype == "bf16" else 4e-3
    for ranks in (1, 4):
        results = run_ranks(_half_sums, ranks, dtype, "params")
        for applied, got, held, _ in results:
            assert applied and got == pytest.approx(norm, rel=bound)
            assert held == ({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], torch.float32)
        for name, values in assemble([part for *_, parts in results for part in parts]).items():
            reference = expected[name]
            assert np.linalg.norm(values - reference) <= 2 * bound * max(np.linalg.norm(reference), 1e-3), name


def test_the_norm_of_a_block_may_exceed_what_fp16_holds():
    flat = torch.full((4 * NORM_BLOCK + 3,), 6e4, dtype=torch.float16)
    assert sum_of_squares([flat]).item() == pytest.approx(flat.double().square().sum().item(), rel=1e-6)


def _norm_and_reference(context, loss_average):
    """The step's norm, and that of autograd's own gradient of its mean, of a model without main gradients."""
    config = small_config("llama")
    engine = layouts(context, replace(config, train=replace(config.train, loss_average=loss_average)))
    batches = microbatches(engine, 0)
    batches[1].loss_mask_BS[:, 3:] = 0
    batches[2].loss_mask_BS.zero_()
    model = build_gpt(engine.plan.shape, Place(), groups={"tp": engine.tp}, dtype=torch.float64, device=CPU)
    engine.optimizer.gathers.whole()
    model.load_state_dict(engine.model.state_dict())
    losses = [model((), batch)[0] for batch in batches]
    counts = [b.loss_mask_BS.sum().item() for b in batches]
    tokens = sum(counts)
    means = [loss / max(count, 1) for loss, count in zip(losses, counts, strict=True)]
    mean = sum(losses) / tokens if loss_average == "token" else sum(means) / len(means)
    gradients = torch.autograd.grad(mean, list(model.parameters()))
    expected = sum(g.square().sum().item() for g in gradients) ** 0.5
    report = engine.step(batches, 1e-2).read()
    return report.grad_norm, expected, report.loss, sum(losses).item() / tokens, report.num_tokens, tokens


@pytest.mark.parametrize("loss_average", ["token", "megatron"])
def test_the_gradient_is_that_of_the_mean_over_tokens_or_of_microbatch_means(loss_average):
    """One microbatch has few tokens with loss, one has none; what is reported is the mean over tokens in both."""
    ((norm, expected, loss, mean, counted, tokens),) = run_ranks(_norm_and_reference, 1, loss_average)
    assert norm == pytest.approx(expected, rel=1e-10)
    assert loss == pytest.approx(mean, rel=1e-12)
    assert counted == tokens < 4 * 16


def test_the_norm_of_a_large_gradient_is_that_of_fp64():
    """1e8 elements, of one size and with a few large ones; the whole, and cut as layouts cut."""
    base = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    base[:3] = torch.tensor([300.0, -2e3, 1e-9])
    exact = 96 * base.double().square().sum().item()
    flat = base.repeat(96)
    for cuts in ([0, len(flat)], [0, 128, 5_000_064, 77_000_064, len(flat)]):
        parts = [flat[a:b] for a, b in itertools.pairwise(cuts)]
        assert sum_of_squares(parts).item() == pytest.approx(exact, rel=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, NORM_BLOCK - 1, NORM_BLOCK, 3 * NORM_BLOCK + 5])
def test_a_sum_of_squares_takes_every_element(length, dtype):
    flat = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=dtype)
    got = sum_of_squares([flat])
    assert got.dtype == torch.float64
    bound = 2e-7 if dtype == torch.float32 else 1e-14
    assert got.item() == pytest.approx(flat.double().square().sum().item(), rel=bound)
    if length:
        flat[-1] = float("inf")
        assert sum_of_squares([flat]).item() == float("inf")


def _skip(context, poison):
    engine = layouts(context, replace(small_config("llama"), mesh=MeshSection(tp=2)))
    before = held_state(engine)
    split = next(slot for slot in engine.layout.slots if not slot.spec.copies)
    finish = engine.optimizer.reducer.finish

    def poisoned():
        finish()
        engine.buffers.gradients.values[split.start] = float("nan")

    with pytest.MonkeyPatch.context() as patch:
        if context.rank == poison:
            patch.setattr(engine.optimizer.reducer, "finish", poisoned)
        report = engine.step(microbatches(engine, 0), 1e-2).read()
    unchanged = all(torch.equal(before[name], x) for name, x in held_state(engine).items())
    after = engine.step(microbatches(engine, 0), 1e-2).read()
    return report.applied, unchanged, engine.optimizer.steps, after.applied


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank():
    assert run_ranks(_skip, 2, 1) == [(False, True, 1, True)] * 2


def _weights_over(context, name, stale):
    """Weights after three steps whose first writes go over what the gradients' buffer holds by then."""
    engine = layouts(context, replace(small_config(name), mesh=MeshSection(tp=context.world)))
    for step in range(3):
        if step:
            slots = engine.layout.slots
            for slot in slots:  # padding is nobody's and stays zero
                engine.buffers.gradients.values[slot.start : slot.start + slot.spec.numel] = stale
        engine.step(microbatches(engine, step), 1e-2)
    return engine.optimizer.state["weight"].clone()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_the_step_before_left_in_the_gradients_does_not_count(name, ranks):
    for kept, poisoned in zip(
        run_ranks(_weights_over, ranks, name, 0.0), run_ranks(_weights_over, ranks, name, float("nan")), strict=True
    ):
        assert torch.equal(kept, poisoned) and kept.isfinite().all()


def test_a_gradient_that_backward_did_not_come_to_is_zero():
    gradients = MainGradients()
    gradients.tensors |= {"weight": torch.full((2, 2), torch.nan), "bias": torch.full((2,), torch.nan)}
    gradients.forget()
    add_weight_gradient(gradients, "weight", dy_NO=torch.ones(1, 2), x_NI=torch.ones(1, 2))
    add_weight_gradient(gradients, "weight", dy_NO=torch.ones(1, 2), x_NI=torch.ones(1, 2))
    gradients.settle()
    assert gradients.tensors["weight"].tolist() == [[2, 2], [2, 2]] and not gradients.tensors["bias"].any()
