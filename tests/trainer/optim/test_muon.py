"""Muon against torch's own, and on any layout against one rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import assemble
from trainer.kernels.table import PLAIN
from trainer.optim.muon import HeldPart, Matrix, orthogonal_update, share_out
from trainer.parallel.collectives import Group
from trainer.parallel.mesh import Mesh

MATRICES = [Matrix("square", 8, 8), Matrix("tall", 12, 4), Matrix("flat", 4, 20), Matrix("zero", 4, 4)]


def exactly_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T of the singular value decomposition: what Newton-Schulz comes near to."""
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vt


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 40), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_keeps_the_singular_vectors_and_makes_the_values_alike(shape, dtype):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = PLAIN.orthogonalize(matrix, dtype)
    assert found.shape == matrix.shape and found.dtype == matrix.dtype
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.3
    exact = exactly_orthogonal(matrix)
    assert (found * exact).sum() / (found.norm() * exact.norm()) > 0.97
    assert torch.equal(PLAIN.orthogonalize(torch.zeros(shape), dtype), torch.zeros(shape))


def test_steps_are_those_of_torch():
    """torch.optim.Muon with the scale of Moonlight; its products are in bf16."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn((12, 20), generator=generator)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    weight, first, rounded = start.clone().view(-1), torch.zeros(240), torch.zeros(240, dtype=torch.bfloat16)
    matrix, yes, rate = [Matrix("m", 12, 20)], torch.tensor(True), torch.tensor(0.02)
    parts, axes = [HeldPart(0, (0, 0), (12, 20), 0)], [Group.single("tp")]
    for _ in range(4):
        theirs.grad = torch.randn((12, 20), generator=generator)
        optimizer.step()
        for applied in (~yes, yes):
            gradient = (4 * theirs.grad if applied else torch.full((12, 20), torch.nan)).view(-1)
            direction = PLAIN.muon_direction_(first, gradient, torch.tensor(0.25), applied, 0.95)
            how = {"parts": parts, "groups": axes, "kernels": PLAIN, "dtype": torch.bfloat16}
            update = orthogonal_update(direction, matrix, **how)
            PLAIN.muon_apply_((weight, rounded), update, rate, applied, 0.1)
        torch.testing.assert_close(weight.view(12, 20), theirs.data, rtol=0, atol=2e-3)
        assert torch.equal(rounded, weight.to(torch.bfloat16))
    assert (weight.view(12, 20) - start).abs().mean() > 10 * (weight.view(12, 20) - theirs.data).abs().mean()


def _whole() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn((m.rows, m.columns), generator=generator, dtype=torch.float64) for m in MATRICES]
    return [*drawn[:-1], torch.zeros_like(drawn[-1])]


def _cut(tp: int, dp: int, tp_rank: int, dp_rank: int) -> tuple[torch.Tensor, list[HeldPart]]:
    """A rank's shard and parts: columns of even matrices and rows of odd ones over tp, single rows over dp."""
    parts, flats, at = [], [], 3  # something else lies before
    for number, whole in enumerate(_whole()):
        dim = 1 - number % 2
        size = whole.shape[dim] // tp
        box = [(0, whole.shape[0]), (0, whole.shape[1])]
        box[dim] = (tp_rank * size, (tp_rank + 1) * size)
        (first, last), (left, right) = box
        for row in range(first + dp_rank, last, dp):
            parts.append(HeldPart(number, (row, left), (1, right - left), at))
            flats.append(whole[row, left:right])
            at += right - left
    return torch.cat([torch.full((3,), 7.0, dtype=torch.float64), *flats]), parts


def _updated(context, tp: int) -> list:
    world = context.join(Mesh(context.world, tp))
    axes = [world.groups["dp"], world.groups["tp"]]
    shard, parts = _cut(axes[1].size, axes[0].size, axes[1].rank, axes[0].rank)
    update = orthogonal_update(shard, MATRICES, parts=parts, groups=axes, kernels=PLAIN, dtype=torch.float64)
    assert update[:3].tolist() == [0, 0, 0]
    return [
        (MATRICES[p.matrix].name, ((MATRICES[p.matrix].rows, MATRICES[p.matrix].columns), p.start), p.within(update))
        for p in parts
    ]


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_the_update_does_not_depend_on_the_layout(ranks, tp):
    results = run_ranks(_updated, ranks, tp)
    found = assemble([(name, where, values.numpy()) for parts in results for name, where, values in parts])
    for matrix, whole in zip(MATRICES, _whole(), strict=True):
        expected = PLAIN.orthogonalize(whole, torch.float64) * (0.2 * max(whole.shape) ** 0.5)
        np.testing.assert_array_equal(found[matrix.name], expected.numpy(), err_msg=matrix.name)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), max_size=40), st.integers(1, 9))
def test_the_work_is_shared_out_evenly(shapes, ranks):
    matrices = [Matrix(str(n), *shape) for n, shape in enumerate(shapes)]
    owners = share_out(matrices, ranks=ranks)
    costs = [min(m.rows, m.columns) ** 2 * (2 * max(m.rows, m.columns) + min(m.rows, m.columns)) for m in matrices]
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert len(owners) == len(matrices) and all(0 <= owner < ranks for owner in owners)
    assert all(a - b <= max(costs, default=0) for a, b in itertools.permutations(loads, 2))
