"""Initial weights: known answers, and the same numbers in every layout."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mdata.util.random_keys import derive_key
from tests.trainer.shapes import GPT2, SHAPES
from trainer.models.gpt_params import parameter_table
from trainer.parallel import init
from trainer.parallel.params import Place


def test_known_answers():
    """Version 1 of the construction; a change of these numbers is a new version."""
    values = init.normal(1234, "blocks.0.attention.q.weight", first=0, count=3)
    expected = [2.2286077448804065, -1.2001759965740622, -0.47056933236412846]
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def slow_philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 of Salmon et al. 2011, section 3.3, on a 256-bit counter."""
    mask = 2**64 - 1
    x0, x1, x2, x3 = ((counter >> (64 * i)) & mask for i in range(4))
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * x0, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * x2, 2**64)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [x0, x1, x2, x3]


@pytest.mark.parametrize("block", [0, 1, 2**40])
def test_draws_equal_the_papers_generator(block):
    """Element i is output i mod 4 of counter i div 4 + 1: numpy counts up before it draws."""
    key = derive_key("mtrain init v1", 7, "t")
    expected = slow_philox(block + 1, (key.low, key.high))
    uniform = [((bits >> 11) + 0.5) * 2.0**-53 for bits in expected]
    assert init._uniform(7, "t", 4 * block, 4).tolist() == uniform


@pytest.mark.parametrize("first", [0, 1, 3, 4, 5, 1001])
def test_any_run_of_elements_can_be_made_alone(first):
    whole = init.normal(7, "t", first=0, count=1100)
    assert torch.equal(init.normal(7, "t", first=first, count=50), whole[first : first + 50])


def test_seed_and_name_both_matter():
    a = init.normal(7, "t", first=0, count=100)
    assert not torch.equal(a, init.normal(8, "t", first=0, count=100))
    assert not torch.equal(a, init.normal(7, "u", first=0, count=100))


def test_distribution_is_standard_normal():
    x = init.normal(1, "t", first=0, count=200_000)
    assert abs(x.mean()) < 5 / 200_000**0.5
    assert abs(x.std() - 1) < 5 / 400_000**0.5
    assert abs(x.pow(4).mean() - 3) < 5 * (96 / 200_000) ** 0.5


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tp", [2, 4])
def test_every_layout_starts_from_the_same_numbers(name, tp, monkeypatch):
    monkeypatch.setattr(init, "_CHUNK_ELEMENTS", 100)  # many chunks a tensor
    shape = replace(SHAPES[name], num_kv_heads=4, padded_vocab_size=512)
    whole = {piece.name: values for spec in parameter_table(shape, Place()) for piece, values in _pieces(spec)}
    for rank in range(tp):
        for spec in parameter_table(shape, Place(tp_size=tp, tp_rank=rank)):
            for piece, values in _pieces(spec):
                box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
                assert torch.equal(values, whole[piece.name][box])


def test_padding_starts_as_zeros():
    spec = parameter_table(replace(GPT2, vocab_size=120), Place(tp_size=2))[0]
    assert spec.name == "embedding.weight" and spec.numel > 120 * GPT2.hidden_size
    assert not _first_values(spec)[120:].any()


def _first_values(spec):
    local = torch.full((spec.numel,), torch.nan, dtype=torch.float64)
    init.initialize_([init.Run(spec, 0, spec.numel, local)], seed=5)
    return local.view(spec.shape)


def _pieces(spec):
    local = _first_values(spec).view(-1)
    for piece in spec.pieces:
        yield piece, local[piece.offset : piece.offset + math.prod(piece.size)].view(piece.size)


def test_a_parameter_is_the_draw_times_its_std_or_its_constant():
    """Known answer through the table: values, not only their equality between layouts."""
    table = {s.name: s for s in parameter_table(GPT2, Place())}
    spec = table["blocks.0.mlp.down.weight"]
    local = _first_values(spec)
    drawn = init.normal(5, "blocks.0.mlp.down.weight", first=0, count=local.numel()).view(spec.shape)
    assert torch.equal(local, drawn * spec.std)
    for name, value in (("final_norm.weight", 1.0), ("final_norm.bias", 0.0), ("blocks.0.mlp.up.bias", 0.0)):
        assert (_first_values(table[name]) == value).all(), name


def test_residual_outputs_start_smaller():
    """std / sqrt(2 L) for what is added to the residual stream."""
    stds = {s.name: s.std for s in parameter_table(GPT2, Place())}
    assert stds["blocks.0.mlp.down.weight"] == pytest.approx(0.1 / 2)
    assert stds["blocks.1.attention.out.weight"] == pytest.approx(0.1 / 2)
    assert stds["blocks.1.mlp.up.weight"] == pytest.approx(0.1)


def test_no_number_is_infinite(monkeypatch):
    """The largest draw: its uniform number would round to 1."""

    class Largest:
        def __init__(self, generator):
            pass

        def random(self, count):
            return np.full(count, 1 - 2.0**-53)

    monkeypatch.setattr(np.random, "Generator", Largest)
    assert init.normal(1, "t", first=0, count=3).isfinite().all()
