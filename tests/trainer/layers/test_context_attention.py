"""Attention beside communication, on ranks that share rows, against attention over whole rows on one."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.slow_attention import Slow
from trainer.kernels import plain
from trainer.kernels.chunk_attention import CuDnn
from trainer.layers.context_attention import context_attention
from trainer.layers.context_rows import gather_rows
from trainer.parallel.context import chunks_of, columns_of, place_of
from trainer.parallel.mesh import Mesh

BATCH, CHUNK, HEADS, WIDTH = 2, 3, 4, 8


def _drawn(length, groups, *, width=WIDTH):
    """q, k and v of whole rows, and the gradient of the result, in fp64."""
    generator = torch.Generator().manual_seed(groups)
    numbers = (HEADS, groups, groups, HEADS)
    return [torch.randn(BATCH, length, n, width, generator=generator, dtype=torch.float64) for n in numbers]


def _on_a_rank(context, drawn, scale, kernel, dtype):
    """The result on one rank, and the gradients of its heads."""
    world = context.join(Mesh(context.world, cp=context.world))
    mine = columns_of(drawn[0].shape[1], rank=context.rank, size=context.world)
    *heads, dy = (x[:, mine].to(world.device, dtype) for x in drawn)
    heads = [x.requires_grad_() for x in heads]
    before = [x.detach().clone() for x in heads]
    y = context_attention(tuple(heads), world.groups["cp"], scale=scale, kernel=kernel)
    y.backward(dy)
    assert all(torch.equal(x, old) for x, old in zip(heads, before, strict=True)), "the input was written to"
    return [x.detach().cpu() for x in (y, *(x.grad for x in heads))]


def _of_whole_rows(drawn, scale):
    *heads, dy = drawn
    heads = [x.clone().requires_grad_() for x in heads]
    y = plain.attention(*heads, scale)
    y.backward(dy)
    return [y.detach(), *(x.grad for x in heads)]


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize(("groups", "scale"), [(4, None), (2, 0.3)])
def test_ranks_compute_what_one_computes_from_whole_rows(cp, groups, scale):
    drawn = _drawn(2 * CHUNK * cp, groups)
    whole = _of_whole_rows(drawn, scale)
    for rank, found in enumerate(run_ranks(_on_a_rank, cp, drawn, scale, Slow, torch.float64)):
        mine = columns_of(drawn[0].shape[1], rank=rank, size=cp)
        for ours, expected in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, expected[:, mine], rtol=0, atol=1e-11)


@pytest.mark.skipif(os.environ.get("MTRAIN_TEST_DEVICE") != "cuda", reason="needs ranks on GPUs")
def test_the_kernels_of_cudnn_beside_nccl():
    drawn = [x.bfloat16().double() for x in _drawn(2048, 2, width=128)]
    whole = _of_whole_rows(drawn, None)
    for rank, found in enumerate(run_ranks(_on_a_rank, 2, drawn, None, CuDnn, torch.bfloat16)):
        mine = columns_of(2048, rank=rank, size=2)
        for ours, expected in zip(found, whole, strict=True):
            largest = expected.abs().max().item()
            torch.testing.assert_close(ours.double(), expected[:, mine], rtol=2e-2, atol=2e-2 * largest)


@pytest.mark.parametrize("size", range(1, 6))
def test_the_place_of_a_chunk_is_where_its_rank_holds_it(size):
    held = list(itertools.chain.from_iterable(chunks_of(rank, size) for rank in range(size)))
    assert [place_of(number, size) for number in range(2 * size)] == [held.index(n) for n in range(2 * size)]


def _gathered(context):
    world = context.join(Mesh(context.world, cp=context.world))
    length = 2 * CHUNK * context.world
    mine = columns_of(length, rank=context.rank, size=context.world)
    x = _drawn(length, 1)[0][:, mine].to(world.device).requires_grad_()
    rows = gather_rows(x, cp=world.groups["cp"])
    rows.backward(rows.detach() * (context.rank + 1))
    return rows.detach().cpu(), x.grad.cpu()


def test_gathered_rows_are_in_order_and_their_gradients_summed():
    length = 2 * CHUNK * 3
    whole = _drawn(length, 1)[0]
    for rank, (rows, grad) in enumerate(run_ranks(_gathered, 3)):
        assert torch.equal(rows, whole)
        torch.testing.assert_close(grad, 6 * whole[:, columns_of(length, rank=rank, size=3)], rtol=0, atol=1e-12)
