"""Attention with options: the plain implementation against SDPA, papers and FlexAttention; and dropout draws."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from trainer.kernels import gpu, plain
from trainer.kernels.philox import keep, philox
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape, alibi_slopes
from trainer.kernels.table import choose_kernels
from trainer.layers.attention import Documents

HALF = torch.bfloat16
BATCH, LENGTH, HEADS, GROUPS, WIDTH = 2, 12, 4, 2, 8


def _heads(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (HEADS, GROUPS, GROUPS)
    return tuple(
        torch.randn(BATCH, LENGTH, n, WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for n in sizes
    )


def _lengths(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def _close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_plain_path_without_options_is_sdpa(scale):
    heads, twin = _heads(), _heads()
    got = plain.scored_attention(*heads, ScoreShape(scale=scale or 0.0), ScoreTensors())
    expected = plain.attention(*twin, scale)
    _close(got, expected)
    weight = torch.randn(got.shape, dtype=torch.float64)
    (got * weight).sum().backward(), (expected * weight).sum().backward()
    for x, y in zip(heads, twin, strict=True):
        _close(x.grad, y.grad)


@pytest.mark.parametrize("length", [127, 129, 1_023, pytest.param(4_095, marks=pytest.mark.soak)])
@pytest.mark.parametrize("form", ["causal", "documents", "window"])
def test_lengths_that_fill_no_block_of_a_kernel(form, length):
    """What a run uses on this machine, on its GPU if it has one, against all scores in plain arithmetic."""
    gpu_here = torch.cuda.is_available()
    device, dtype, tolerance = ("cuda", torch.bfloat16, 8e-3) if gpu_here else ("cpu", torch.float32, 1e-5)
    kernels = choose_kernels(torch.device(device), dtype, None)
    generator = torch.Generator().manual_seed(length)
    made = [torch.randn(1, length, n, 64, generator=generator).to(device, dtype) for n in (2, 1, 1)]
    heads = [x.clone().requires_grad_() for x in made]
    twin = [x.float().requires_grad_() for x in made]  # products and sums in fp32
    bounds = torch.tensor([0, 5, length // 2, length], dtype=torch.int32, device=device)
    documents = Documents(bounds, length - length // 2) if form == "documents" else None
    scores = ScoreShape(window=100) if form == "window" else ScoreShape()
    numbers = documents.numbers(1, length) if documents else None
    expected = plain.scored_attention(*twin, scores, ScoreTensors(document_BS=numbers))
    if form == "causal":
        got = kernels.attention(*heads)
    elif documents:
        got = kernels.document_attention(*heads, documents)
    else:
        got = kernels.scored_attention(*heads, scores, ScoreTensors())
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn(got.shape, generator=generator).to(device, dtype)
    (got * weight).sum().backward(), (expected * weight).sum().backward()
    for x, y in zip(heads, twin, strict=True):
        most = y.grad.abs().max().item()
        torch.testing.assert_close(x.grad.float(), y.grad, rtol=tolerance, atol=tolerance * most + tolerance)


def test_alibi_is_the_papers_bias():
    """Press et al. 2022: 8 heads have 1/2 to 1/256; SDPA with the bias as a mask is the reference."""
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12)[8:] == pytest.approx([2.0 ** -(i / 2) for i in (1, 3, 5, 7)])
    slopes = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)
    q, k, v = _heads()
    got = plain.scored_attention(q, k, v, ScoreShape(alibi=True), ScoreTensors(slope_H=slopes))
    token = torch.arange(LENGTH)
    distance = (token.unsqueeze(1) - token).double()
    bias = torch.where(distance < 0, -math.inf, -slopes.view(-1, 1, 1) * distance)
    moved = (x.transpose(1, 2) for x in (q, k, v))
    _close(got, F.scaled_dot_product_attention(*moved, attn_mask=bias, enable_gqa=True).transpose(1, 2))


CASES = {
    "window": (ScoreShape(window=3), False, False),
    "softcap": (ScoreShape(softcap=0.7, scale=0.5), False, False),
    "documents": (ScoreShape(), True, False),
    "sinks": (ScoreShape(sinks="learned", window=5), True, True),
    "alibi": (ScoreShape(alibi=True, softcap=1.1), True, False),
}


def test_rows_of_an_encoder_are_rows_without_their_padding(monkeypatch):
    """No mask but that of padding; also with fewer queries than keys, as a decoder has."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(gpu, "_flex", lambda: flex_attention)
    q, k, v = _heads()
    lengths, scores = (LENGTH, 7), ScoreShape(causal=False, relative=True)
    bias_HST = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for queries, bias in ((LENGTH, bias_HST), (5, None)):
        added = bias if bias is None else bias.requires_grad_()
        tensors = ScoreTensors(length_B=torch.tensor(lengths, dtype=torch.int32), bias_HST=added)
        got = plain.scored_attention(q[:, :queries], k, v, scores, tensors)
        for row, length in enumerate(lengths):
            moved = (x[row : row + 1].transpose(1, 2) for x in (q[:, :queries], k[:, :length], v[:, :length]))
            mask = None if bias is None else bias[:, :, :length].detach()
            _close(got[row], F.scaled_dot_product_attention(*moved, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
        on_gpu = gpu.scored_attention(q[:, :queries].detach(), k.detach(), v.detach(), scores, tensors)
        torch.testing.assert_close(on_gpu, got, rtol=0, atol=1e-6)
        got.sum().backward()
        assert not k.grad[1, 7:].any() and k.grad[1, :7].any()
    assert bias_HST.grad.abs().sum() > 0


def _each_sequence(q_NHK, k_NGK, v_NGK, of_queries, of_keys, longest, most, **options):
    """What variable-length attention computes, sequence by sequence."""
    assert longest in (LENGTH, 5) and most == LENGTH and of_queries.dtype == of_keys.dtype == torch.int32
    assert not options.pop("is_causal", False) and options.pop("window_size", (-1, -1)) == (-1, -1)
    out = torch.empty_like(q_NHK)
    bounds = [itertools.pairwise(x.tolist()) for x in (of_queries, of_keys)]
    for (first, stop), keys in zip(*bounds, strict=True):
        if first < stop:
            parts = slice(first, stop), slice(*keys), slice(*keys)
            moved = (x[part].transpose(0, 1)[None] for x, part in zip((q_NHK, k_NGK, v_NGK), parts, strict=True))
            out[first:stop] = F.scaled_dot_product_attention(*moved, enable_gqa=True)[0].transpose(0, 1)
    assert stop == len(q_NHK) and keys[1] == len(k_NGK)
    return out


@pytest.mark.parametrize("lengths", [(LENGTH, 7), (1, LENGTH), None])
def test_padded_rows_are_computed_alike_by_every_kernel(lengths, monkeypatch):
    heads = [x.detach() for x in _heads()]
    length_B = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    expected = plain.scored_attention(*heads, ScoreShape(causal=False), ScoreTensors(length_B=length_B))
    _close(plain.padded_attention(*heads, length_B), expected)
    half = [x.bfloat16() for x in heads]
    monkeypatch.setattr(gpu, "_varlen", lambda: _each_sequence)
    got = gpu.padded_attention(*half, length_B)
    for row, length in enumerate(lengths or (LENGTH, LENGTH)):
        torch.testing.assert_close(got[row, :length].double(), expected[row, :length], rtol=0, atol=0.05)


@pytest.mark.parametrize("queries", [5, LENGTH])
@pytest.mark.parametrize("lengths", [(LENGTH, 7), (1, LENGTH)])
def test_queries_of_a_decoder_see_the_real_keys(lengths, queries, monkeypatch):
    """Also where there are as many as keys, for whose own tokens they were once taken."""
    q, k, v = (x.detach() for x in _heads())
    tensors, scores = ScoreTensors(length_B=torch.tensor(lengths)), ScoreShape(causal=False)
    expected = plain.scored_attention(q[:, :queries], k, v, scores, tensors)
    monkeypatch.setattr(gpu, "_varlen", lambda: _each_sequence)
    got = gpu.scored_attention(*(x.bfloat16() for x in (q[:, :queries], k, v)), scores, tensors)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(LENGTH, 7), (1, LENGTH), None])
def test_biases_in_a_mask_are_the_plain_path(lengths, causal):
    """Outputs and all gradients in fp64, of two layers that share the mask."""
    scores, length_B = ScoreShape(causal=causal, relative=True, scale=0.7), lengths and _lengths(lengths)
    real = torch.arange(LENGTH) < _lengths(lengths or (LENGTH, LENGTH))[:, None]
    results = []
    for attend in (plain.scored_attention, gpu.scored_attention):
        q, (_, k, v) = _heads()[0], _heads(1)
        k, v = (x.detach().repeat_interleave(2, dim=2).requires_grad_() for x in (k, v))
        bias = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        bias.requires_grad_()
        tensors = ScoreTensors(length_B=length_B, bias_HST=bias)
        if attend is gpu.scored_attention:
            tensors = tensors._replace(mask_BHST=gpu.additive_mask(bias, scores, length_B, torch.float64))
            assert tensors.mask_BHST.stride(2) == 16 and not tensors.mask_BHST.requires_grad
        y = attend(attend(q, k, v, scores, tensors), k, v, scores, tensors)[real]
        weight = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        results.append([y, *torch.autograd.grad((y * weight).sum(), (q, k, v, bias))])
    for got, expected in zip(*results, strict=True):
        _close(got, expected)
    assert results[0][-1].abs().sum() > 0


def test_a_mask_is_made_for_kernels_of_16_bits_that_drop_nothing():
    bias, scores = torch.zeros(HEADS, LENGTH, LENGTH), ScoreShape(causal=False, relative=True)
    assert gpu.bias_mask(bias, scores, None, torch.bfloat16).dtype == torch.bfloat16
    assert gpu.bias_mask(bias, scores, None, torch.float32) is None
    assert gpu.bias_mask(bias, dataclasses.replace(scores, dropout=0.1), None, torch.bfloat16) is None
    assert plain.bias_mask(bias, scores, None, torch.bfloat16) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("form", ["encoder", "decoder", "cross"])
def test_attention_of_two_stacks_on_a_gpu_is_the_plain_path(form):
    """In bf16 against fp32, at T5's lengths; where keys are padding, their gradient is 0."""
    rows, keys, queries = 4, 512 if form != "decoder" else 114, 512 if form == "encoder" else 114
    generator, lengths = torch.Generator().manual_seed(1), _lengths((keys, keys - 3, keys // 3, 1)).cuda()
    made = [torch.randn(rows, n, 12, 64, generator=generator).cuda().bfloat16() for n in (queries, keys, keys)]
    scores = ScoreShape(causal=form == "decoder", relative=form != "cross", scale=0.125)
    bias = torch.randn(12, queries, keys, generator=generator).cuda().bfloat16().float()
    length_B, kernels, results = None if form == "decoder" else lengths, choose_kernels(torch.device("cuda"), HALF), []
    for dtype in (torch.float32, HALF):
        heads, added = [x.to(dtype).requires_grad_() for x in made], bias.clone().requires_grad_()
        tensors = ScoreTensors(length_B=length_B, bias_HST=added if scores.relative else None)
        attend = plain.scored_attention if dtype == torch.float32 else kernels.scored_attention
        if scores.relative and dtype == HALF:
            tensors = tensors._replace(mask_BHST=kernels.bias_mask(added, scores, length_B, dtype))
            assert tensors.mask_BHST is not None
        y = attend(*heads, scores, tensors)
        y = y if form != "encoder" else y * (torch.arange(queries).cuda() < lengths[:, None])[..., None, None]
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).cuda().to(dtype)
        wanted = (*heads, added) if scores.relative else heads
        results.append([y, *torch.autograd.grad((y * weight).sum(), wanted)])
    for expected, got in zip(*results, strict=True):
        most = expected.abs().max().item()
        torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02 * most)
    if form != "decoder":
        padding = torch.arange(keys).cuda() >= lengths[:, None]
        assert not results[1][2][padding].any() and not results[1][3][padding].any()


@pytest.mark.parametrize("name", CASES)
def test_flex_attention_is_the_plain_path(name, monkeypatch):
    """Uncompiled, which is the same arithmetic; a GPU compares the compiled form."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(gpu, "_flex", lambda: flex_attention)
    scores, documents, sinks = CASES[name]
    tensors = ScoreTensors(
        sink_H=torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64) if sinks else None,
        slope_H=torch.tensor(alibi_slopes(HEADS), dtype=torch.float64) if scores.alibi else None,
        document_BS=(torch.arange(LENGTH) // 5).expand(BATCH, LENGTH) if documents else None,
    )
    heads = [x.detach() for x in _heads()]
    got = gpu.scored_attention(*heads, scores, tensors)
    torch.testing.assert_close(got, plain.scored_attention(*heads, scores, tensors), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_chunks_of_queries_see_what_whole_rows_show_them(name, monkeypatch):
    """Both paths, given two chunks of each row, against the same rows of whole attention."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(gpu, "_flex", lambda: flex_attention)
    scores, documents, sinks = CASES[name]
    q, k, v = (x.detach() for x in _heads())
    column_S = torch.tensor([3, 4, 5, 9, 10, 11])
    tensors = ScoreTensors(
        sink_H=torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64) if sinks else None,
        slope_H=torch.tensor(alibi_slopes(HEADS), dtype=torch.float64) if scores.alibi else None,
        document_BS=(torch.arange(LENGTH) // 5).expand(BATCH, LENGTH) if documents else None,
    )
    whole = plain.scored_attention(q, k, v, scores, tensors)[:, column_S]
    tensors = tensors._replace(column_S=column_S)
    _close(plain.scored_attention(q[:, column_S], k, v, scores, tensors), whole)
    got = gpu.scored_attention(q[:, column_S], k, v, scores, tensors)
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-6)


def test_chunks_of_queries_in_plain_attention():
    q, k, v = (x.detach() for x in _heads())
    column_S, ends = torch.tensor([3, 4, 5, 9, 10, 11]), (6, 12)
    _close(plain.attention(q[:, column_S], k, v, 0.3, ends), plain.attention(q, k, v, 0.3)[:, column_S])
    with pytest.raises(AssertionError, match="6 queries, 12 keys"):
        plain.attention(q[:, column_S], k, v, 0.3)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4).flatmap(lambda chunks: st.tuples(st.just(chunks), st.integers(1, chunks))),
    st.randoms(use_true_random=False),
)
def test_bounds_of_documents_in_a_chunk(rows, chunk, which, random):
    """For each document: its queries in the chunk and its keys up to the chunk's end, counted one by one."""
    chunks, number = which
    length, end = chunk * chunks, chunk * number
    cuts = {row * length for row in range(rows + 1)}
    cuts |= {random.randrange(rows * length) for _ in range(random.randrange(6))}
    bounds = torch.tensor(sorted(cuts), dtype=torch.int32)
    queries, keys = gpu.chunk_bounds(bounds, length, end=end, chunk=chunk)
    for document, (first, stop) in enumerate(itertools.pairwise(sorted(cuts))):
        columns = [token % length for token in range(first, stop)]
        assert int(queries[document + 1] - queries[document]) == sum(end - chunk <= c < end for c in columns)
        assert int(keys[document + 1] - keys[document]) == sum(c < end for c in columns)
    assert (int(queries[0]), int(queries[-1])) == (0, rows * chunk)
    assert (int(keys[0]), int(keys[-1])) == (0, rows * end)


def test_philox_is_salmons():
    """The known answers that come with the authors' Random123."""
    known = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in known:
        words = philox(tuple(torch.tensor([word]) for word in counter), torch.tensor(key))
        assert tuple(word.item() for word in words) == expected


def test_draws_keep_their_share_and_depend_on_each_part_of_their_place():
    key = torch.tensor([1, 2])
    sample, position = torch.tensor([5, 5, 6, 5 + (1 << 32)]), torch.tensor([0, 1, 0, 0])
    drawn = keep(sample, position, None, features=4003, key_2=key, probability=0.25)
    assert drawn.shape == (4, 4003)
    assert ((drawn.double().mean(1) - 0.75).abs() < 0.03).all()
    assert len({tuple(row.tolist()) for row in drawn}) == 4
    head = torch.tensor([0, 1, 0, 0])
    assert not torch.equal(keep(sample, position, head, features=4003, key_2=key, probability=0.25)[1], drawn[1])
    for place in range(4):  # each row alone, and fewer features, give the same draws
        alone = keep(
            sample[place : place + 1], position[place : place + 1], None, features=9, key_2=key, probability=0.25
        )
        assert torch.equal(alone[0], drawn[place, :9])


def test_dropout_scales_what_it_keeps_and_drops_nothing_else():
    x, places = torch.ones(3, 8, dtype=torch.bfloat16), (torch.arange(3), torch.zeros(3, dtype=torch.int64))
    y = plain.dropout(x, *places, torch.tensor([7, 8]), 0.5)
    assert set(y.flatten().tolist()) == {0.0, 2.0} and y.dtype == x.dtype


@pytest.mark.parametrize("how", [("swiglu", 0.5, 1.0), ("geglu", 0.0, 0.0), ("geglu_tanh", 0.9, 0.0)])
def test_gates_are_those_of_autograd(how):
    activation, clamp, offset = how
    both = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    gate, up = both.chunk(2, dim=-1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    run = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation]
    expected = run(gate) * (up + offset)
    dy = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected.backward(dy)
    got = torch.empty_like(both)
    plain.gated_backward_(*got.chunk(2, dim=-1), dy, *both.detach().chunk(2, dim=-1), how)
    _close(plain.gated(both.detach(), how), expected.detach())
    _close(got, both.grad)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_partial_rotation_turns_pairs_and_leaves_the_rest(interleaved):
    x = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    angle = torch.randn(3, 2, dtype=torch.float64)
    y = plain.rotate(x, angle.cos(), angle.sin(), interleaved)
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    for i, (a, b) in enumerate(pairs):
        turned = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones(3, 1).double(), angle[:, i : i + 1])
        _close(torch.complex(y[..., a], y[..., b]), turned)
    assert torch.equal(y[..., 4:], x[..., 4:])
