"""Vocabulary-parallel cross entropy against PyTorch's on the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.ranks import run_ranks
from trainer.collectives import Axis
from trainer.loss import vocabulary_cross_entropy
from trainer.mesh import Mesh

VOCAB, TOKENS = 10, 7


def _case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return logits, labels, torch.randn(TOKENS, generator=generator, dtype=torch.float64)


def _body(context, rows):
    world = context.join(Mesh(context.world, context.world))
    logits, labels, upstream = (x.to(world.device) for x in _case())
    first, stop = min(context.rank * rows, VOCAB), min((context.rank + 1) * rows, VOCAB)
    local = torch.full(
        (TOKENS, rows), 1e4, dtype=torch.float64, device=world.device
    )  # padding would dominate if it were counted
    local[:, : stop - first] = logits[:, first:stop]
    local.requires_grad_()
    loss = vocabulary_cross_entropy(local, labels, first=first, stop=stop, tp=world.axes["tp"])
    loss.backward(upstream)
    return tuple(x.cpu() for x in (loss.detach(), local.grad[:, : stop - first], local.grad[:, stop - first :]))


@pytest.mark.parametrize(("world", "rows"), [(1, 10), (1, 16), (2, 5), (2, 8), (4, 3), (4, 8)])
def test_equals_the_whole_vocabulary(world, rows):
    """Rows of padding, even whole ranks of it, change nothing."""
    results = run_ranks(_body, world, rows)
    logits, labels, upstream = _case()
    logits.requires_grad_()
    expected = F.cross_entropy(logits, labels, reduction="none")
    expected.backward(upstream)
    for loss, _, padding in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        assert not padding.any()
    torch.testing.assert_close(torch.cat([g for _, g, _ in results], dim=1), logits.grad, rtol=0, atol=1e-12)


def test_bf16_logits_are_summed_in_fp32():
    logits = torch.zeros(1, 4096, dtype=torch.bfloat16)
    loss = vocabulary_cross_entropy(logits, torch.tensor([0]), first=0, stop=4096, tp=Axis.single("tp"))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(8.317766, abs=1e-5)  # log 4096; bf16 sums would stop at 256
