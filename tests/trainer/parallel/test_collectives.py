"""Every collective that autograd differentiates against its single-process twin: values and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.ranks import run_ranks
from trainer.parallel import collectives, conjugates
from trainer.parallel.collectives import Group
from trainer.parallel.mesh import Mesh

PAIRS = ["reduce_from_group", "gather_sequence", "scatter_sequence", "gather_rows"]


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def _forward_and_backward(context, name):
    world = context.join(Mesh(context.world, context.world))
    x, upstream = (t.to(world.device) for t in _inputs(context.rank))
    x.requires_grad_()
    before = x.detach().clone()
    y = getattr(conjugates, name)(x, world.groups["tp"])
    grad = upstream.repeat(context.world, 1)[: len(y)] if name.startswith("gather") else upstream[: len(y)]
    y.backward(grad)
    assert torch.equal(x.detach(), before), "the input was written to"
    return y.detach().cpu(), grad.cpu(), x.grad.cpu()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", PAIRS)
def test_pair_equals_the_single_process_twin(name, world):
    """All ranks' inputs in one process: y = f(x0..xn), and x's gradient from sum over ranks of <y_r, grad_r>."""
    results = run_ranks(_forward_and_backward, world, name)
    inputs = [next(iter(_inputs(rank))).requires_grad_() for rank in range(world)]
    total = torch.stack(inputs).sum(0)
    part = 4 // world
    outputs = {
        "reduce_from_group": [total] * world,
        "gather_sequence": [torch.cat(inputs)] * world,
        "scatter_sequence": list(total.split(part)),
        "gather_rows": [torch.cat(inputs)] * world,
    }[name]
    for rank, (y, grad, x_grad) in enumerate(results):
        torch.testing.assert_close(y, outputs[rank].detach(), rtol=0, atol=1e-14)
        if name == "reduce_from_group":
            expected = grad
        elif name == "gather_rows":
            expected = grad[4 * rank : 4 * rank + 4]
        else:
            score = sum((o * g).sum() for o, (_, g, _) in zip(outputs, results, strict=True))
            (expected,) = torch.autograd.grad(score, inputs[rank], retain_graph=True)
        torch.testing.assert_close(x_grad, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", PAIRS)
def test_axis_of_one_returns_its_input(name):
    x = torch.randn(4, 3)
    assert getattr(conjugates, name)(x, Group.single("tp")) is x


def _objects(context):
    world = context.join(Mesh(context.world, context.world))
    return collectives.gather_objects({"rank": context.rank}, world.groups["world"])


def test_gather_objects_gives_every_rank_all_values_in_order():
    assert run_ranks(_objects, 2) == [[{"rank": 0}, {"rank": 1}]] * 2


def _exchanged(context):
    world = context.join(Mesh(context.world))
    if context.rank == 1:
        return None
    x = torch.full((3,), float(context.rank))
    return collectives.exchange(x, peer=2 - context.rank, group=world.groups["world"]).tolist()


def test_two_ranks_exchange_while_others_do_not():
    assert run_ranks(_exchanged, 3) == [[2.0] * 3, None, [0.0] * 3]
