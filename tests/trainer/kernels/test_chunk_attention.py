"""Chunks of queries that attend in two halves, merged: against whole causal attention; and cuDNN's kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.slow_attention import Slow
from trainer.kernels import plain
from trainer.kernels.chunk_attention import CuDnn, chunks_of_rows
from trainer.parallel.context import chunk_ends


@given(
    cp=st.integers(2, 4),
    rank=st.integers(0, 3),
    chunk=st.integers(1, 5),
    groups=st.sampled_from([1, 2, 4]),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 99),
)
def test_two_halves_are_the_whole(cp, rank, chunk, groups, scale, seed):
    """fp64, each rank's two chunks: values and gradients of plain.attention to 1e-12."""
    length, generator = 2 * cp * chunk, torch.Generator().manual_seed(seed)
    ends = chunk_ends(length, rank=rank % cp, size=cp)
    sizes = ((2 * chunk, 4), (length, groups), (length, groups))
    made = [torch.randn(2, n, h, 8, generator=generator, dtype=torch.float64) for n, h in sizes]
    heads, twin = ([x.clone().requires_grad_() for x in made] for _ in range(2))
    got = chunks_of_rows(*heads, scale=scale, ends=ends, kernel=Slow)
    expected = plain.attention(*twin, scale, ends)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    weight = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    (got * weight).sum().backward(), (expected * weight).sum().backward()
    for x, y in zip(heads, twin, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-11)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("groups", [2, 8])
def test_the_kernels_of_cudnn(rank, groups):
    length, generator = 2048, torch.Generator("cuda").manual_seed(rank)
    ends = chunk_ends(length, rank=rank, size=2)
    sizes = ((length // 2, 8), (length, groups), (length, groups))
    made = [torch.randn(2, n, h, 128, generator=generator, device="cuda", dtype=torch.bfloat16) for n, h in sizes]
    heads = [x.clone().requires_grad_() for x in made]
    twin = [x.float().requires_grad_() for x in made]
    got = chunks_of_rows(*heads, scale=None, ends=ends, kernel=CuDnn)
    columns = plain.chunk_columns(twin[0], ends)
    expected = plain.scored_attention(*twin, plain.ScoreShape(), plain.ScoreTensors(column_S=columns))
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)
    weight = torch.randn(got.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    (got * weight).sum().backward(), (expected * weight).sum().backward()
    for x, y in zip(heads, twin, strict=True):
        torch.testing.assert_close(x.grad.float(), y.grad, rtol=2e-2, atol=2e-2 * y.grad.abs().max().item())
