"""The head's chunked, vocabulary-parallel loss against PyTorch's cross entropy on whole logits."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.ranks import run_ranks
from tests.trainer.shapes import LLAMA
from trainer.kernels.table import PLAIN
from trainer.layers.base import Parallel
from trainer.layers.embedding import VocabularyEmbedding
from trainer.layers.head import head_loss
from trainer.parallel.collectives import Group
from trainer.parallel.mesh import Mesh

TOKENS, WIDTH, VOCAB = 8, LLAMA.hidden_size, LLAMA.vocab_size


def _case():
    generator = torch.Generator().manual_seed(3)
    x, table = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (TOKENS, VOCAB))
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return x, table, labels, (torch.arange(TOKENS) % 3 > 0).float()


def _rows(shape, parallel, table, *, main):
    rows = VocabularyEmbedding(
        shape.vocab_size, shape.padded_vocab_size, width=shape.hidden_size, parallel=parallel
    ).to(torch.float64)
    rows.weight.data.fill_(1e4)  # padding would dominate if it were counted
    rows.weight.data[: rows.stop - rows.first] = table[rows.first : rows.stop]
    if main:
        rows.main_gradients.tensors["weight"] = torch.zeros_like(rows.weight)
    return rows


def _body(context, sequence_parallel, main, chunk):
    tp = context.join(Mesh(context.world, context.world)).groups["tp"]
    parallel = Parallel(tp, sequence_parallel=sequence_parallel)
    x, table, labels, weight = _case()
    rows = _rows(replace(LLAMA, padded_vocab_size=256), parallel, table, main=main)
    mine = x[parallel.local_tokens(TOKENS)].clone().requires_grad_()
    loss, losses = head_loss(mine, rows, labels_N=labels, weight_N=weight, kernels=PLAIN, chunk_tokens=chunk)
    loss.backward()
    gradient = rows.main_gradients.tensors["weight"] if main else rows.weight.grad
    assert (rows.weight.grad is None) == main
    assert not losses.requires_grad
    return (loss.item(), losses), mine.grad, gradient[: rows.stop - rows.first], gradient[rows.stop - rows.first :]


@pytest.mark.parametrize("chunk", [3, 2048], ids=["chunks", "one"])
@pytest.mark.parametrize(
    ("world", "sequence_parallel", "main"), [(1, 0, 0), (1, 0, 1), (2, 0, 1), (2, 1, 0), (4, 1, 1)]
)
def test_equals_cross_entropy_of_whole_logits(world, sequence_parallel, main, chunk):
    """Loss, and gradients of the input and of the table; padding changes nothing and gets none."""
    results = run_ranks(_body, world, bool(sequence_parallel), bool(main), chunk)
    x, table, labels, weight = _case()
    x.requires_grad_(), table.requires_grad_()
    each = F.cross_entropy(x @ table.t(), labels, reduction="none") * weight
    expected = each.sum()
    expected.backward()
    for (loss, losses), dx, _, padding in results:
        assert loss == pytest.approx(expected.item(), abs=1e-11)
        torch.testing.assert_close(losses, each.detach(), rtol=0, atol=1e-11)
        assert not padding.any()
        if not sequence_parallel:
            torch.testing.assert_close(dx, x.grad, rtol=0, atol=1e-11)
    if sequence_parallel:
        torch.testing.assert_close(torch.cat([dx for _, dx, _, _ in results]), x.grad, rtol=0, atol=1e-11)
    torch.testing.assert_close(torch.cat([g for _, _, g, _ in results]), table.grad, rtol=0, atol=1e-11)


def test_bf16_logits_are_summed_in_fp32():
    alone = Parallel(Group.single("tp"), sequence_parallel=False)
    rows = VocabularyEmbedding(4096, 4096, width=WIDTH, parallel=alone).to(torch.bfloat16)
    rows.weight.data.zero_()
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    loss, _ = head_loss(x, rows, labels_N=torch.tensor([0]), weight_N=torch.ones(1), kernels=PLAIN)
    assert loss.item() == pytest.approx(math.log(4096), abs=1e-5)  # bf16 sums would stop at 256


def test_without_gradients_nothing_is_made_for_backward():
    parallel = Parallel(Group.single("tp"), sequence_parallel=False)
    x, table, labels, weight = _case()
    rows = _rows(replace(LLAMA, padded_vocab_size=256), parallel, table, main=True)
    with torch.no_grad():
        head_loss(x, rows, labels_N=labels, weight_N=weight, kernels=PLAIN)
    assert not rows.main_gradients.tensors["weight"].any()


class _Logits(TorchDispatchMode):
    """Counts the products that make logits, none of which may begin while others are held."""

    def __init__(self, width):
        super().__init__()
        self.width, self.made = width, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten.mm.default and args[1].shape[1] == self.width:
            assert not any(logits() is not None for logits in self.made), "logits of the chunk before"
            out = operation(*args, **kwargs or {})
            self.made.append(weakref.ref(out))
            return out
        return operation(*args, **kwargs or {})


def test_logits_of_one_chunk_are_gone_before_the_next_are_made():
    """They are the largest tensors of a step."""
    x, table, labels, weight = _case()
    rows = _rows(LLAMA, Parallel(Group.single("tp"), sequence_parallel=False), table, main=True)
    with _Logits(LLAMA.padded_vocab_size) as seen:
        head_loss(x.requires_grad_(), rows, labels_N=labels, weight_N=weight, kernels=PLAIN, chunk_tokens=2)
    assert len(seen.made) == TOKENS // 2
