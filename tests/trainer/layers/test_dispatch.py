"""Tokens on their way to experts of other ranks: the bits of one rank, whatever the loads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import device_type, run_ranks
from trainer.kernels.table import PLAIN
from trainer.layers.base import Parallel
from trainer.layers.dispatch import Dispatch
from trainer.layers.experts import Experts
from trainer.layers.shapes import MLPShape
from trainer.parallel.collectives import Group
from trainer.parallel.mesh import Mesh

EXPERTS, TOP_K, TOKENS, WIDTH = 8, 4, 24, 12
BUFFERS = {
    "large buffers": 4.0,
    "small buffers": 1.5,
    "gather into buffers": 4.0,
    "gather into small buffers": 1.01,
}  # over an even load
LOADS = ("drawn", "an empty rank", "an empty expert, and one that computes every token", "dropped")


def _row_by_row(x_MI: Tensor, weight_EOI: Tensor, end_E: Tensor) -> Tensor:
    """A product whose rows do not depend on how many there are, which those of libraries may."""
    rows = [PLAIN.grouped_product(x_MI[i : i + 1], weight_EOI, (end_E > i).int()) for i in range(len(x_MI))]
    return torch.cat(rows) if rows else x_MI.new_zeros(0, weight_EOI.shape[1])


def _choices(load: str) -> Tensor:
    """The experts of all tokens."""
    generator = torch.Generator().manual_seed(3)
    expert_NE = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)
    expert_NK = expert_NE[:, :TOP_K].clone()
    if load == "an empty rank":  # of two; of four there are two, and all tokens go to the others
        expert_NK = EXPERTS // 2 + torch.rand(TOKENS, EXPERTS // 2, generator=generator).argsort(1)
    elif load == "an empty expert, and one that computes every token":
        others_NK = torch.rand(TOKENS, EXPERTS - 2, generator=generator).argsort(1)[:, : TOP_K - 1]
        expert_NK = torch.cat((others_NK, torch.full((TOKENS, 1), EXPERTS - 1)), 1)
    elif load == "dropped":
        expert_NK[torch.rand(expert_NK.shape, generator=generator) < 0.4] = EXPERTS
        expert_NK[:6] = EXPERTS  # all of the first rank of four
    return expert_NK


def _passes(context, load: str, way: str) -> dict[str, Tensor]:
    """The outputs of this rank's tokens and their gradients, and those of its experts."""
    torch.manual_seed(5)
    ranks = context.world
    groups = context.join(Mesh(ranks, ep=ranks)).groups if ranks > 1 else {}
    alone = Parallel(Group.single("tp"), sequence_parallel=False)
    shape = MLPShape(width=WIDTH, inner=16, activation="swiglu", bias=True)
    dispatch = Dispatch(alone, groups, exchanges="gather" not in way, buffer=BUFFERS.get(way, 0.0))
    layer = Experts(shape, EXPERTS, dispatch, kernels=replace(PLAIN, grouped_product=_row_by_row))
    mine = slice(dispatch.expert_rank * layer.num_experts, (dispatch.expert_rank + 1) * layer.num_experts)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(EXPERTS, *parameter.shape[1:])[mine])
    layer.to(device_type())
    expert_NK = _choices(load)
    tokens = (torch.randn(TOKENS, WIDTH), torch.rand(TOKENS, TOP_K), torch.randn(TOKENS, WIDTH), expert_NK)
    parts = (each.unflatten(0, (ranks, -1))[context.rank].clone() for each in tokens)
    x, weight, dout, expert_NK = (part.to(device_type()) for part in parts)
    weight = torch.where(expert_NK < EXPERTS, weight, 0.0)
    for each in (x, weight):
        each.requires_grad_()
    plan = layer.way(expert_NK, all_computed=load != "dropped", fixed=True)
    out = layer(x, expert_NK, weight, all_computed=load != "dropped", way=plan)
    out.backward(dout)
    assert all(parameter.grad is not None for parameter in layer.parameters()), "zeros for experts without tokens"
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    if dispatch.overflow is not None:
        gradients["overflow"] = dispatch.overflow
    found = {"out": out.detach(), "dx": x.grad, "dweight": weight.grad, **gradients}
    return {name: value.cpu() for name, value in found.items()}


@pytest.fixture(scope="module")
def alone():
    return {load: run_ranks(_passes, 1, load, "gather")[0] for load in LOADS}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", ["gather", "gather into buffers", "all-to-all", "large buffers"])
def test_ranks_that_share_experts_compute_what_one_does(alone, ranks, load, way):
    """By all-to-all the same bits, since slots are added in their order, forward and backward."""
    results = run_ranks(_passes, ranks, load, way)
    for name, value in alone[load].items():
        whole = torch.cat([result[name] for result in results])
        exact = "gather" not in way and name in ("out", "dx", "dweight")
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-4}
        torch.testing.assert_close(whole, value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_a_choice_that_does_not_fit_makes_the_outputs_of_its_rank_nan(alone):
    """Those of other ranks stay what they are."""
    ranks, buffer = 4, BUFFERS["small buffers"]
    slots_RT = _choices("drawn").view(ranks, -1) // (EXPERTS // ranks)
    loads = [torch.bincount(slots).max().item() / (slots.numel() / ranks) for slots in slots_RT]
    assert min(loads) <= buffer < max(loads)
    results = run_ranks(_passes, ranks, "drawn", "small buffers")
    for result, load, out in zip(results, loads, alone["drawn"]["out"].chunk(ranks), strict=True):
        assert result["overflow"].item() == (load if load > buffer else 0)
        torch.testing.assert_close(
            result["out"], out if load <= buffer else torch.full_like(out, torch.nan), rtol=0, atol=0, equal_nan=True
        )


def test_a_load_that_does_not_fit_makes_all_outputs_of_gathered_tokens_nan(alone):
    """Of those that have experts on the rank with too many."""
    expert_NK, ranks = _choices("drawn"), 2
    loads = [
        int((expert_NK // (EXPERTS // ranks) == rank).sum()) / (expert_NK.numel() / ranks) for rank in range(ranks)
    ]
    assert min(loads) < 1.01 < max(loads)
    results = run_ranks(_passes, ranks, "drawn", "gather into small buffers")
    assert [result["overflow"].item() for result in results] == [load if load > 1.01 else 0 for load in loads]
    out = torch.cat([result["out"] for result in results])
    of_full = (expert_NK // (EXPERTS // ranks) == loads.index(max(loads))).any(1)
    assert out[of_full].isnan().all() and not out[~of_full].isnan().any()
