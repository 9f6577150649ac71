"""Linear layers in FP8: their numbers, the source of scales, and that only training changes them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mdata import UsageError
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import GLOBAL_BATCH, SEQUENCE, layouts, microbatches, save_engine, small_config
from trainer.config.sections import MeshSection, PrecisionSection, RecomputeSection, TrainSection
from trainer.kernels.float8 import (
    BLOCK,
    E4M3,
    E5M2,
    LARGEST,
    float8_product,
    float8_quantize,
    float8_rows,
    float8_rows_product,
)
from trainer.kernels.table import PLAIN
from trainer.layers.base import Parallel
from trainer.layers.dispatch import Dispatch
from trainer.layers.experts import Experts
from trainer.layers.float8_scaling import Float8Kernels, Float8Recipe, Float8Scaling
from trainer.layers.linear import FEW, Float8RowsKernels, Linear
from trainer.layers.shapes import MLPShape
from trainer.models.float8_layers import keep_float8_weights
from trainer.parallel.collectives import Group

TOKENS, WIDTH, MICROBATCHES = 32, 16, 8
ALONE = Parallel(Group.single("tp"), sequence_parallel=False)
EVERYONE = Group.single("world")
KERNELS = Float8Kernels(float8_quantize, float8_product)
YES, NO, CPU = torch.tensor(True), torch.tensor(False), torch.device("cpu")


def _draw(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _scaling(kernels: Float8Kernels = KERNELS, **recipe: Any) -> Float8Scaling:
    return Float8Scaling(("a", "b"), Float8Recipe(**({"delayed": True} | recipe)), kernels=kernels, device=CPU)


def _layer(scaling: Float8Scaling, *, column: bool = True) -> Linear:
    layer = Linear(WIDTH, 3 * WIDTH, parallel=ALONE, bias=True, column=column).bfloat16()
    layer.weight.data.copy_(_draw(1000, *layer.weight.shape))
    layer.bias.data.copy_(_draw(1001, *layer.bias.shape))
    layer.main_gradients.tensors |= {name: torch.zeros(p.shape) for name, p in layer.named_parameters()}
    layer.float8 = scaling.of("b")
    return layer


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a matrix is after rounding with a scale of its own, in fp64."""
    scale = LARGEST[dtype] / x.float().abs().max()
    return (x.float() * scale).to(dtype).double() / scale.double()


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("gradients", [E4M3, E5M2])
def test_a_layer_computes_with_the_rounded_matrices_and_adds_in_fp32(column, again, gradients):
    layer = _layer(_scaling(delayed=False, input_again=again, gradients=gradients), column=column)
    weight, expected = _rounded(layer.weight, E4M3), torch.zeros(layer.weight.shape, dtype=torch.float64)
    for i in range(MICROBATCHES):
        x, dy = _draw(2 * i, TOKENS, WIDTH).requires_grad_(), _draw(2 * i + 1, TOKENS, 3 * WIDTH)
        y = layer(x)
        y.backward(dy)
        rounded_x, rounded_dy = _rounded(x.detach(), E4M3), _rounded(dy, gradients)
        torch.testing.assert_close(y.double(), rounded_x @ weight.t() + layer.bias.double(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(x.grad.double(), rounded_dy @ weight, rtol=1e-2, atol=1e-2)
        expected += rounded_dy.t() @ rounded_x
    got = layer.main_gradients.tensors["weight"]
    assert layer.weight.grad is None
    assert (got - expected).abs().max() / expected.abs().max() < 1e-6


def test_blocks_of_a_large_value_do_not_round_the_others_to_zero():
    """One scale for a matrix loses what is 2^-18 of its largest value; a block of its own keeps it."""
    x, errors = _draw(0, TOKENS, 2 * BLOCK), {}
    x[:, BLOCK:] *= 2.0**-18
    for blocks in (False, True):
        scaling = _scaling(delayed=False, blocks=blocks)
        layer = Linear(2 * BLOCK, WIDTH, parallel=ALONE, bias=False, column=True).bfloat16()
        layer.weight.data.copy_(_draw(1, WIDTH, 2 * BLOCK))
        layer.weight.data[:, :BLOCK] = 0
        layer.float8 = scaling.of("a")
        with torch.no_grad():
            exact = x.double() @ layer.weight.double().t()
            errors[blocks] = float((layer(x).double() - exact).norm() / exact.norm())
    assert errors[True] < 0.05 < 0.5 < errors[False]


def test_a_layer_without_main_gradients_gives_ordinary_ones():
    layer = _layer(_scaling(delayed=False))
    layer.main_gradients.tensors.clear()
    x, dy = _draw(0, TOKENS, WIDTH), _draw(1, TOKENS, 3 * WIDTH)
    layer(x).backward(dy)
    expected = _rounded(dy, E5M2).t() @ _rounded(x, E4M3)
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(layer.bias.grad, dy.sum(0), rtol=1e-2, atol=1e-1)


def test_a_weight_is_rounded_once_for_all_microbatches_of_a_step():
    rounded = []

    def counted(x, dtype, **how):
        rounded.append(tuple(x.shape))
        return float8_quantize(x, dtype, **how)

    scaling = _scaling(Float8Kernels(counted, float8_product))
    layer = _layer(scaling)
    for _ in range(2):
        for i in range(3):
            layer(_draw(i, TOKENS, WIDTH)).sum().backward()
        scaling.update(YES, EVERYONE)
    assert rounded.count(tuple(layer.weight.shape)) == 2 and len(rounded) == 2 + 2 * 2 * 3


@pytest.mark.parametrize("blocks", [False, True])
def test_a_kept_weight_is_rounded_anew_at_the_same_address(blocks):
    """CUDA graphs read it there, whoever rounded it first."""
    scaling, weight_OI = _scaling(delayed=False, blocks=blocks), torch.rand(32, 16)
    layer = scaling.of("a")
    for kept_first in (True, False):
        weight_OI += 1
        scaling.forget_weights()
        rounded = None if kept_first else layer.weight(weight_OI)
        layer.keep_weight(weight_OI)
        kept = layer.weight(weight_OI)
        expected = float8_quantize(weight_OI, E4M3, scaling=scaling.scaling(0, "weight", record=False), columns=True)
        assert rounded is not kept
        pairs = zip(kept.tensors(), expected.tensors(), strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        addresses = [x.data_ptr() for x in kept.tensors()]
        if kept_first:
            before = addresses
    assert addresses == before


@pytest.mark.parametrize("most_recent", [False, True])
def test_scales_are_those_of_the_largest_values_of_the_last_steps(most_recent):
    scaling = _scaling(history=3, margin=1, gradients=E4M3, most_recent=most_recent)
    layer = _layer(scaling)
    sizes = [1.0, 8.0, 2.0, 1.0, 0.5]
    for step, size in enumerate(sizes):
        for i in range(2):
            layer(_draw(i, TOKENS, WIDTH) * size).backward(_draw(2, TOKENS, 3 * WIDTH) * size)
        scaling.update(NO if step == 1 else YES, EVERYONE)
        largest = max(float(_draw(i, TOKENS, WIDTH).abs().max()) for i in range(2))
        seen = [s for j, s in enumerate(sizes[: step + 1]) if j != 1][-3:]  # a skipped step leaves nothing
        seen = seen[-1:] if most_recent else seen
        assert scaling.scaling(1, "input", record=False).scale_1.item() == pytest.approx(
            448 / (largest * max(seen)) / 2
        )
        gradient = float(_draw(2, TOKENS, 3 * WIDTH).abs().max()) * max(seen)
        assert scaling.scaling(1, "gradient", record=False).scale_1.item() == pytest.approx(448 / gradient / 2)
    assert scaling.scaling(0, "input", record=False).scale_1.item() == 1.0  # a layer that nobody used


def test_values_that_are_not_finite_are_not_remembered():
    scaling = _scaling()
    layer = _layer(scaling)
    for factor, expected in ((float("inf"), 1.0), (1.0, 448 / float(_draw(0, TOKENS, WIDTH).abs().max()))):
        layer(_draw(0, TOKENS, WIDTH) * factor)
        scaling.update(YES, EVERYONE)
        assert scaling.scaling(1, "input", record=False).scale_1.item() == pytest.approx(expected)


def test_a_history_is_cut_filled_up_and_begun_anew():
    scaling = _scaling(history=2)
    rows = [[float(i), 1.0, 1.0] for i in (5, 7, 9)]
    scaling.load({"b": rows})
    assert scaling.history_HL3[:, 1, 0].tolist() == [5.0, 7.0] and not scaling.history_HL3[:, 0].any()
    assert scaling.to_numbers() == {"a": [[0.0] * 3] * 2, "b": rows[:2]}
    longer = _scaling(history=4)
    longer.load(scaling.to_numbers())
    assert longer.history_HL3[:, 1, 0].tolist() == [5.0, 7.0, 0.0, 0.0]
    longer.load({})
    assert longer.scaling(1, "input", record=False).scale_1 is None


def _config(
    fp8: str = "delayed", *, wide: bool = False, tp: int = 1, sequence_parallel: bool = False, **recompute: Any
) -> Any:
    """`wide`: with sizes that are multiples of a block on each of two ranks."""
    rows, batch = (BLOCK // SEQUENCE, 2 * BLOCK // SEQUENCE) if wide else (1, GLOBAL_BATCH)
    config = small_config(
        "llama",
        precision=PrecisionSection(dtype="bf16", fp8=fp8),  # type: ignore[arg-type]
        mesh=MeshSection(tp=tp, sequence_parallel=sequence_parallel),
        train=TrainSection(sequence_length=SEQUENCE, global_batch=batch, micro_batch=rows, steps=20),
        recompute=RecomputeSection(**recompute),
    )
    if not wide:
        return config
    sizes = {"hidden_size": 2 * BLOCK, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "ffn_hidden_size": 2 * BLOCK}
    model, optimizer = dataclasses.replace(config.model, **sizes), dataclasses.replace(config.optimizer, lr=1e-3)
    return dataclasses.replace(config, model=model, optimizer=optimizer)


def _trained(context: Any, config: Any, steps: int, evaluations: bool = False) -> tuple[list[float], list[float], Any]:
    """(losses, weights, history) of some steps, with evaluations between them or not."""
    engine, losses = layouts(context, config), []
    for step in range(steps):
        losses.append(engine.step(microbatches(engine, step), config.optimizer.lr).read().loss)
        if evaluations:  # of other texts, before and after the weights are rounded anew
            engine.evaluate(microbatches(engine, 100 + step))
    return losses, engine.optimizer.state["weight"].tolist(), engine.float8 and engine.float8.to_numbers()


@pytest.mark.parametrize(
    ("wide", "change"),
    [
        pytest.param(False, {"evaluations": True}, id="evaluation"),
        pytest.param(False, {"mode": "selective"}, id="selective"),
        pytest.param(False, {"mode": "full", "layers": 1}, id="full of 1"),
        pytest.param(False, {"mode": "full", "layers": 2}, id="full of 2"),
        pytest.param(True, {"mode": "selective"}, id="selective, blockwise"),
    ],
)
def test_recomputing_and_evaluating_change_no_bit(wide, change):
    """Trap 13: both pass through the layers once more; neither may move what the scales are made of."""
    recompute = {key: value for key, value in change.items() if key != "evaluations"}
    config = functools.partial(_config, "blockwise" if wide else "delayed", wide=wide)
    expected = run_ranks(_trained, 1, config(), 3)[0]
    got = run_ranks(_trained, 1, config(**recompute), 3, bool(change.get("evaluations")))[0]
    assert got == expected


def test_training_in_fp8_follows_training_in_bf16():
    for wide, ways in ((False, ("delayed", "current")), (True, ("blockwise",))):
        exact = np.array(run_ranks(_trained, 1, _config("none", wide=wide), 6)[0][0])
        for fp8 in ways:
            losses, _, history = run_ranks(_trained, 1, _config(fp8, wide=wide), 6)[0]
            assert np.abs(losses - exact).max() < 0.05
            assert bool(history) == (fp8 == "delayed")


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.soak), True])
def test_blocks_are_the_same_on_two_ranks(sequence_parallel):
    """No block is cut by tensor parallelism, so losses are those of one rank up to roundings."""
    alone = run_ranks(_trained, 1, _config("blockwise", wide=True), 4)[0]
    both = run_ranks(_trained, 2, _config("blockwise", wide=True, tp=2, sequence_parallel=sequence_parallel), 4)
    assert np.abs(np.array(both[0][0]) - alone[0]).max() < 0.05


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_that_share_a_layer_see_one_scale(sequence_parallel):
    """The largest values are those of all ranks; the losses those of one rank up to roundings."""
    alone = run_ranks(_trained, 1, _config(), 4)[0]
    both = run_ranks(_trained, 2, _config(tp=2, sequence_parallel=sequence_parallel), 4)
    assert both[0][2] == both[1][2]
    assert np.abs(np.array(both[0][0]) - alone[0]).max() < 0.05
    for name, rows in alone[2].items():  # of the first step, which begins with the same weights
        (x, weight, _), (expected_x, expected_weight, _) = both[0][2][name][3], rows[3]
        assert weight == expected_weight and x == pytest.approx(expected_x, rel=0.05), name


def _continued(context: Any, folder: str) -> tuple[Any, Any]:
    from pathlib import Path

    from trainer.checkpoint.format import RunState

    config = _config()
    first = layouts(context, config)
    for step in range(2):
        first.step(microbatches(first, step), 1e-2)
    state = RunState(step=2, consumed_samples=8, data_id="0" * 64, data={}, optimizer_steps=2, config="")
    saved = save_engine(first, Path(folder), run=state)
    second = layouts(context, config, fresh=False)
    second.load(saved)
    return tuple(
        (engine.step(microbatches(engine, 2), 1e-2).read().loss, engine.optimizer.state["weight"].tolist())
        for engine in (first, second)
    )


def test_a_checkpoint_keeps_the_history(tmp_path):
    first, second = run_ranks(functools.partial(_continued, folder=str(tmp_path)), 1)[0]
    assert first == second


ROWS = Float8RowsKernels(float8_rows, float8_rows_product)


def _kept(context: Any, column: bool) -> tuple[Any, ...]:
    """This rank's part of a layer whose weight is kept in FP8: its values, its scales, and what it gives."""
    world = context.join()
    group = Group("tp", world.world_size, world.rank, world.groups["world"].group)
    whole, x = _draw(1, 32, 32).float(), _draw(2, 5, 32).float()
    mine = slice(32 // group.size * group.rank, 32 // group.size * (group.rank + 1))
    part = whole[mine] if column else whole[:, mine]
    parallel = Parallel(group, sequence_parallel=False)
    layer = Linear(part.shape[1], part.shape[0], parallel=parallel, bias=True, column=column)
    layer.weight.data.copy_(part)
    layer.bias.data.fill_(0.5)
    layer.keep_rows(ROWS)
    assert [name for name, _ in layer.named_parameters()] == ["bias"] and layer.kept_rows is not None
    with torch.no_grad():
        y = layer(x if column else x[:, mine])
    return layer.kept_rows.values_RC.float(), layer.kept_rows.inverse_R1, y


@pytest.mark.parametrize("column", [True, False])
def test_a_weight_that_is_kept_in_fp8_is_the_same_on_any_number_of_ranks(column):
    ((values, inverse, y),) = run_ranks(_kept, 1, column)
    exact = _draw(2, 5, 32).float() @ _draw(1, 32, 32).float().t() + 0.5
    assert 0 < (y - exact).norm() / exact.norm() < 0.05
    parts = run_ranks(_kept, 2, column)
    assert torch.equal(torch.cat([part[0] for part in parts], dim=0 if column else 1), values)
    if column:
        assert torch.equal(torch.cat([part[1] for part in parts]), inverse)
        assert torch.equal(torch.cat([part[2] for part in parts], dim=1), y)
    else:
        assert all(torch.equal(part[1], inverse) for part in parts)
        assert (parts[0][2] - y).norm() / y.norm() < 0.05, "each rank scales the part of a token that it has"


def _kept_experts(context: Any) -> tuple[Any, ...]:
    """This rank's part of two experts whose weights are kept in FP8: values and scales, and what they give."""
    world = context.join()
    tp = Group("tp", world.world_size, world.rank, world.groups["world"].group)
    dispatch = Dispatch(Parallel(tp, sequence_parallel=False), {})
    layer = Experts(MLPShape(width=32, inner=48, activation="gelu", bias=True), 2, dispatch, kernels=PLAIN)
    mine = slice(48 // tp.size * tp.rank, 48 // tp.size * (tp.rank + 1))
    layer.up.data.copy_(_draw(1, 2, 48, 32)[:, mine])
    layer.down.data.copy_(_draw(2, 2, 32, 48)[:, :, mine])
    for bias in (layer.up_bias, layer.down_bias):
        bias.data.fill_(0.25)
    x, chosen, weights = _draw(3, 5, 32).float(), torch.tensor([[0], [1], [1], [0], [1]]), torch.full((5, 1), 0.5)
    with torch.no_grad():
        exact = layer(x, chosen, weights, all_computed=True)
        layer.keep_rows(ROWS)
        y = layer(x, chosen, weights, all_computed=True)
    assert [name for name, _ in layer.named_parameters()] == ["up_bias", "down_bias"]
    kept = {name: (rows.values_RC.float(), rows.inverse_R1) for name, rows in layer.kept_rows.items()}
    return kept, y, exact


def test_weights_of_experts_that_are_kept_in_fp8_are_the_same_on_any_number_of_ranks():
    ((kept, y, exact),) = run_ranks(_kept_experts, 1)
    assert 0 < (y - exact).norm() / exact.norm() < 0.05
    parts = run_ranks(_kept_experts, 2)
    assert all(torch.equal(part[0]["down"][1], kept["down"][1]) for part in parts), "scales of all inputs"
    for name, dim in (("up", 1), ("down", 2)):
        assert torch.equal(torch.cat([part[0][name][0] for part in parts], dim), kept[name][0])
    assert torch.equal(torch.cat([part[0]["up"][1] for part in parts], 1), kept["up"][1])
    assert (parts[0][1] - y).norm() / y.norm() < 0.05, "each rank scales the part of a row that it has"


def test_a_kernel_for_few_tokens_gets_no_more_of_them():
    counts = []

    def few(x, rows, *, dtype):
        counts.append(len(x))
        return float8_rows_product(float8_rows(x), rows, dtype=dtype)

    layer = Linear(32, 16, parallel=ALONE, bias=False, column=True)
    layer.weight.data.copy_(_draw(1, 16, 32))
    layer.keep_rows(ROWS._replace(few=few))
    x = _draw(2, FEW + 1, 32).float()
    with torch.no_grad():
        torch.testing.assert_close(torch.cat((layer(x[:FEW]), layer(x[FEW:]))), layer(x), rtol=1e-6, atol=1e-6)
    assert counts == [FEW, 1]


def test_weights_that_a_gpu_cannot_keep_in_fp8_are_refused():
    gpu, layer = torch.device("cuda"), Linear(32, 24, parallel=ALONE, bias=False, column=True)
    with pytest.raises(UsageError, match="need --dtype bf16, not float32"):
        keep_float8_weights(layer, device=gpu)
    with pytest.raises(UsageError, match=r"24 outputs and 32 inputs on a rank(.|\n)*multiples of 16"):
        keep_float8_weights(layer.bfloat16(), device=gpu)
    with pytest.raises(UsageError, match="those of linear layers, and the model has none"):
        keep_float8_weights(nn.Linear(16, 16), device=CPU)
