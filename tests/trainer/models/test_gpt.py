"""The forward pass against a slow twin, written from the papers one token and one head at a time; and causality."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.trainer.engines import microbatch
from tests.trainer.shapes import SHAPES
from trainer.models.gpt.model import GPT, build_gpt
from trainer.models.gpt.params import parameter_table
from trainer.models.gpt.shape import GPTShape
from trainer.parallel.collectives import Group
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.params import Place

SEQUENCE = 7


def _model(shape: GPTShape) -> tuple[GPT, dict[str, np.ndarray]]:
    """A model with weights that leave no term out (norms and biases drawn too), and its logical tensors."""
    model = build_gpt(
        shape, Place(), groups={"tp": Group.single("tp")}, dtype=torch.float64, device=torch.device("cpu")
    )
    named, logical = dict(model.named_parameters()), {}
    generator = torch.Generator().manual_seed(1)
    for spec in parameter_table(shape, Place()):
        values = named[spec.name].data
        initialize_([ElementRange(spec, 0, spec.numel, values.view(-1))], seed=3)
        if spec.std == 0.0:
            values += 0.3 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
        logical |= {
            p.name: values.view(-1)[p.offset : p.offset + math.prod(p.size)].view(p.size).numpy() for p in spec.pieces
        }
    return model, logical


def _norm(x, w, name, shape):
    if shape.norm == "rmsnorm":
        return x / np.sqrt(np.mean(x * x) + shape.norm_epsilon) * w[f"{name}.weight"]
    deviation = np.sqrt(np.mean((x - x.mean()) ** 2) + shape.norm_epsilon)
    return (x - x.mean()) / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]


def _linear(x, w, name):
    return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0.0)


def _turned(x, position, theta):
    """Su et al. 2021, eq. 15: features (i, i + K/2) are a complex number, times exp(i position theta^(-2i/K))."""
    half = len(x) // 2
    z = x[:half] + 1j * x[half:]
    z = z * np.exp(1j * position * theta ** (-2.0 * np.arange(half) / len(x)))
    return np.concatenate((z.real, z.imag))


def _attention(xs, w, block, shape):
    size, out = shape.head_dim, []
    q, k, v = ([_linear(x, w, f"{block}.{n}").reshape(-1, size) for x in xs] for n in "qkv")
    for t in range(len(xs)):
        heads = []
        for head in range(shape.num_heads):
            group = head * shape.num_kv_heads // shape.num_heads
            if shape.position == "rope":
                query = _turned(q[t][head], t, shape.rope.theta)
                keys = [_turned(k[s][group], s, shape.rope.theta) for s in range(t + 1)]
            else:
                query, keys = q[t][head], [k[s][group] for s in range(t + 1)]
            weight = np.exp([query @ key / math.sqrt(size) for key in keys])
            heads.append(sum(a * v[s][group] for s, a in enumerate(weight / weight.sum())))
        out.append(_linear(np.concatenate(heads), w, f"{block}.out"))
    return out


def _mlp(x, w, block, shape):
    up = _linear(x, w, f"{block}.up")
    if shape.activation == "swiglu":
        gate = _linear(x, w, f"{block}.gate")
        return _linear(gate / (1 + np.exp(-gate)) * up, w, f"{block}.down")
    if shape.activation == "gelu_erf":
        gelu = up * np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in up])  # Hendrycks and Gimpel 2016
    else:
        gelu = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return _linear(gelu, w, f"{block}.down")


def slow_logits(tokens: list[int], w: dict[str, np.ndarray], shape: GPTShape) -> np.ndarray:
    """[tokens, vocab_size]."""
    xs = [w["embedding.weight"][token] for token in tokens]
    if shape.position == "learned":
        xs = [x + w["positions.weight"][t] for t, x in enumerate(xs)]
    for i in range(shape.num_layers):
        block = f"blocks.{i}"
        added = _attention([_norm(x, w, f"{block}.attention_norm", shape) for x in xs], w, f"{block}.attention", shape)
        xs = [x + a for x, a in zip(xs, added, strict=True)]
        xs = [x + _mlp(_norm(x, w, f"{block}.mlp_norm", shape), w, f"{block}.mlp", shape) for x in xs]
    head = w["embedding.weight" if shape.tie_embeddings else "head.weight"]
    return np.stack([head @ _norm(x, w, "final_norm", shape) for x in xs])


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_their_twin(name):
    shape = SHAPES[name]
    model, weights = _model(shape)
    tokens = np.random.default_rng(2).integers(0, shape.vocab_size, (2, SEQUENCE))
    with torch.no_grad():
        got = model.logits(torch.from_numpy(tokens))[..., : shape.vocab_size].numpy()
    for row, logits in zip(tokens, got, strict=True):
        np.testing.assert_allclose(logits, slow_logits(row.tolist(), weights, shape), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SHAPES)
def test_loss_is_the_sum_over_the_unmasked_tokens(name):
    shape = SHAPES[name]
    model, weights = _model(shape)
    generator = np.random.default_rng(4)
    tokens, labels = (generator.integers(0, shape.vocab_size, (1, SEQUENCE)) for _ in range(2))
    mask = np.array([[1, 0, 1, 1, 0, 1, 1]], np.float32)
    logits = slow_logits(tokens[0].tolist(), weights, shape)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(SEQUENCE), labels[0]]
    with torch.no_grad():
        got, _ = model((), microbatch(*(torch.from_numpy(x) for x in (tokens, labels, mask))))
    assert got.item() == pytest.approx((losses * mask[0]).sum(), abs=1e-10)
