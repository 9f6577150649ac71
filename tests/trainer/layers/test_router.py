"""The router against its definition, written token by token; its numbers in fp32, whatever the model's dtype."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.layers.base import Parallel
from trainer.layers.router import Router, RowLayout
from trainer.layers.shapes import MoEShape
from trainer.parallel.collectives import Group

EXPERTS, WIDTH, ROWS, LENGTH = 8, 6, 2, 5
SHAPES = {
    "softmax of the chosen": {},
    "softmax of all": {"normalize_weights": False, "top_k": 3},
    "one expert": {"top_k": 1, "score": "sigmoid"},
    "sigmoid, scaled": {"score": "sigmoid", "weight_scale": 2.5, "top_k": 3},
    "bias": {"score": "sigmoid", "expert_bias": True, "top_k": 3},
    "groups by two": {"score": "sigmoid", "expert_bias": True, "groups": 4, "groups_per_token": 2, "top_k": 4},
    "groups by one": {"groups": 4, "groups_per_token": 2, "top_k": 2, "normalize_weights": False},
    "groups by four": {"score": "sigmoid", "groups": 2, "groups_per_token": 1, "top_k": 4},
    "groups by their best": {"groups": 4, "groups_per_token": 3, "group_score": "max", "top_k": 4},
    "balance of the microbatch": {"balance": "microbatch", "top_k": 3, "score": "sigmoid", "expert_bias": True},
    "capacity": {"capacity_factor": 0.6, "top_k": 2, "balance_factor": 1.0},
}


def _router(shape: MoEShape, *, bias: bool = True) -> Router:
    router = Router(shape, WIDTH, Parallel(Group.single("tp"), sequence_parallel=False), bias=bias).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for tensor in (router.weight, router.bias, router.expert_bias):
            if tensor is not None:
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return router


def _best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def _chosen(shape: MoEShape, scores: list[float], bias: list[float]) -> list[int]:
    """The experts of a token, best first."""
    by = [score + b for score, b in zip(scores, bias, strict=True)]
    if shape.groups_per_token < shape.groups:
        size, best = EXPERTS // shape.groups, shape.top_k // shape.groups_per_token
        of_group = [sorted(by[g * size : (g + 1) * size], reverse=True) for g in range(shape.groups)]
        counted = [sum(group[: 1 if shape.group_score == "max" else best]) for group in of_group]
        open_groups = _best(counted, shape.groups_per_token)
        by = [value if e // size in open_groups else -math.inf for e, value in enumerate(by)]
    return _best(by, shape.top_k)


@pytest.mark.parametrize("form", SHAPES)
def test_choices_weights_and_losses_are_those_of_the_definition(form):
    changes = {"top_k": 2, "groups": 1, "groups_per_token": 1, **SHAPES[form]}
    shape = MoEShape(num_experts=EXPERTS, ffn_hidden_size=4, **changes)  # type: ignore[arg-type]
    router = _router(shape)
    weight_ED, bias_E = router.weight.detach(), router.bias.tolist()
    x_ND = torch.randn(ROWS * LENGTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    routing = router(x_ND.requires_grad_(), RowLayout(ROWS, LENGTH, Group.single("cp")))
    bias = [0.0] * EXPERTS if router.expert_bias is None else router.expert_bias.tolist()
    share_sum, plain, load = ([[0.0] * EXPERTS for _ in range(ROWS)] for _ in range(3))
    squares = entropy = 0.0
    for n, x_D in enumerate(x_ND.detach()):
        logits = [float(w_D @ x_D) + b for w_D, b in zip(weight_ED, bias_E, strict=True)]
        exps = [math.exp(logit) for logit in logits]
        scores = [
            e / sum(exps) if shape.score == "softmax" else 1 / (1 + math.exp(-logit))
            for e, logit in zip(exps, logits, strict=True)
        ]
        shares, row = [score / sum(scores) for score in scores], n // LENGTH
        chosen = _chosen(shape, scores, bias)
        weights = [scores[e] for e in chosen]
        if shape.normalize_weights and (shape.score == "softmax" or shape.top_k > 1):
            weights = [weight / sum(weights) for weight in weights]
        for e, share in enumerate(shares):
            share_sum[row][e] += share
        for e in _best(shares, shape.top_k):  # without bias, groups and capacity
            plain[row][e] += 1
        squares += math.log(sum(exps)) ** 2
        entropy -= sum(share * math.log(share) for share in shares)
        kept = routing.expert_NK[n] < EXPERTS
        assert kept.all() or shape.capacity_factor
        assert [e for e, k in zip(chosen, kept, strict=True) if k] == routing.expert_NK[n][kept].tolist()
        expected = torch.tensor([weight * shape.weight_scale for weight in weights], dtype=torch.float64)
        torch.testing.assert_close(routing.weight_NK[n], torch.where(kept, expected, 0.0))
        for e in routing.expert_NK[n][kept].tolist():
            load[row][e] += 1
    losses = routing.losses
    assert losses is not None
    parts = (
        [(share_sum, plain)]
        if shape.balance == "microbatch"
        else [([s], [p]) for s, p in zip(share_sum, plain, strict=True)]
    )
    balance = 0.0
    for shares_of, plain_of in parts:
        tokens = LENGTH * len(shares_of)
        for e in range(EXPERTS):
            share, hits = (sum(row[e] for row in rows) / tokens for rows in (shares_of, plain_of))
            balance += EXPERTS * share * hits / shape.top_k
    assert losses.balance[0].item() / losses.balance[1] == pytest.approx(balance / len(parts))
    assert losses.z[0].item() / losses.z[1] == pytest.approx(squares / len(x_ND))
    assert losses.counts[:EXPERTS].tolist() == [sum(row[e] for row in load) for e in range(EXPERTS)]
    assert float(losses.counts[-2]) == ROWS * LENGTH * shape.top_k - float(losses.counts[:EXPERTS].sum())
    assert float(losses.counts[-1]) == pytest.approx(entropy)
    if shape.capacity_factor:
        assert max(map(max, load)) <= math.ceil(LENGTH * shape.top_k / EXPERTS * shape.capacity_factor) < LENGTH
    (losses.balance[0] + losses.z[0] + routing.weight_NK.sum()).backward()
    assert router.bias.grad is not None
    assert router.expert_bias is None or router.expert_bias.grad is None


def test_logits_of_a_model_in_16_bits_are_not():
    """In bf16 1 + 2 ** -9 is 1, and the first of two equal experts would be chosen."""
    router = _router(MoEShape(num_experts=2, top_k=1, ffn_hidden_size=4), bias=False).to(torch.bfloat16)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = 1
        router.weight[1, 1] = 2**-9
    routing = router(torch.ones(1, WIDTH, dtype=torch.bfloat16), RowLayout(1, 1, Group.single("cp")))
    assert routing.expert_NK.item() == 1 and routing.weight_NK.dtype == torch.float32


def test_a_capacity_by_position_keeps_the_first_tokens():
    shape = MoEShape(num_experts=2, top_k=1, ffn_hidden_size=4, capacity_factor=0.5, drop="position")
    router = _router(shape, bias=False)
    expert_NK, weight_NK = torch.zeros(64, 1, dtype=torch.int64), torch.rand(64, 1)
    kept = router.kept(expert_NK, weight_NK, RowLayout(1, 64, Group.single("cp"))).flatten().tolist()
    assert kept == [True] * 16 + [False] * 48
