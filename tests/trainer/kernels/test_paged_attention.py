"""Paged attention: the gather against attention of whole rows; the Triton kernels against the gather, on a GPU.

TRITON_INTERPRET=1 runs the kernels on a CPU, where Triton is installed.
"""

from __future__ import annotations

import os

import pytest
import torch

from trainer.kernels import gpu, paged_attention, plain
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape, alibi_slopes

PAGE = 4
LENGTHS = (1, 9, 70, 133)
CASES = {
    "ordinary": (8, 2, 16, {}),
    "one head a group": (4, 4, 16, {}),
    "one group": (4, 1, 24, {"scale": 0.3}),
    "window": (8, 2, 16, {"window": 67}),
    "cap": (4, 2, 16, {"softcap": 2.0}),
    "alibi": (4, 2, 16, {"alibi": True}),
    "sinks": (8, 2, 16, {"sinks": "learned", "window": 5}),
}


def _case(name, device, dtype):
    """Arguments of paged attention."""
    heads, groups, width, options = CASES[name]
    generator = torch.Generator().manual_seed(3)
    pages = [-(-length // PAGE) for length in LENGTHS]
    order = (torch.randperm(sum(pages), generator=generator) + 1).to(torch.int32)
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    for row, part in enumerate(order.split(pages)):
        table[row, : len(part)] = part
    shape = (sum(pages) + 1, PAGE, groups, width)
    new = (len(LENGTHS), groups, width)
    q, k, v, key, value = (
        torch.randn(*size, generator=generator).to(device, dtype)
        for size in ((len(LENGTHS), heads, width), new, new, shape, shape)
    )
    sink = torch.randn(heads, generator=generator).to(device) if options.get("sinks") else None
    slope = torch.tensor(alibi_slopes(heads), device=device) if options.get("alibi") else None
    tensors = ScoreTensors(sink_H=sink, slope_H=slope)
    length = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    return q, k, v, key, value, table.to(device), length, ScoreShape(**options), tensors


@pytest.mark.parametrize("name", CASES)
def test_the_gather_is_the_attention_of_the_last_token(name):
    q, k, v, key, value, table, _, scores, tensors = _case(name, "cpu", torch.float64)
    before = [pool.clone() for pool in (key, value)]
    found = plain.paged_attention(q, k, v, key, value, table, torch.tensor(LENGTHS), scores, tensors)
    for row, length in enumerate(LENGTHS):
        whole_k, whole_v = (
            torch.cat((pool[table[row]].flatten(0, 1)[: length - 1], new[row, None]))[None]
            for pool, new in zip(before, (k, v), strict=True)
        )
        last = tensors._replace(column_S=torch.tensor([length - 1]))
        whole = plain.scored_attention(q[row][None, None], whole_k, whole_v, scores, last)
        torch.testing.assert_close(found[row], whole[0, 0], rtol=0, atol=1e-6)
        for old, new in zip(before, (k, v), strict=True):
            page, place = int(table[row, (length - 1) // PAGE]), (length - 1) % PAGE
            old[page, place] = new[row]
    assert torch.equal(key, before[0]) and torch.equal(value, before[1])


def _ragged(name, device, dtype):
    """Rows of several lengths of which the last tokens are new, and each row's attention."""
    q, _, _, key, value, table, _, scores, tensors = _case(name, device, dtype)
    counts = tuple(min(length, 1 + 40 * row) for row, length in enumerate(LENGTHS))
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(sum(counts), *q.shape[1:], generator=generator).to(device, dtype)
    k, v = (
        torch.cat([pool[table[row]].flatten(0, 1)[:length] for row, length in enumerate(LENGTHS)])
        for pool in (key, value)
    )
    return q, k, v, counts, LENGTHS, scores, tensors


def _row_by_row(q, k, v, counts, lengths, scores, tensors):
    parts = zip(q.split(counts), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat(
        [
            plain.scored_attention(
                *(x[None] for x in part),
                scores,
                tensors._replace(column_S=torch.arange(len(part[1]) - len(part[0]), len(part[1]), device=q.device)),
            )[0]
            for part in parts
        ]
    )


@pytest.mark.parametrize("name", CASES)
def test_rows_of_several_lengths_are_rows_alone(name):
    arguments = _ragged(name, "cpu", torch.float64)
    torch.testing.assert_close(plain.ragged_attention(*arguments), _row_by_row(*arguments), rtol=0, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_flash_attention_of_several_lengths(name):
    arguments = _ragged(name, "cuda", torch.bfloat16)
    torch.testing.assert_close(gpu.ragged_attention(*arguments), _row_by_row(*arguments), rtol=0, atol=2e-2)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU")
# The interpreter multiplies bf16 as integers.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_are_the_gather(name, dtype):
    q, k, v, key, value, *rows = _case(name, "cpu" if INTERPRETED else "cuda", dtype)
    pools = key.clone(), value.clone()
    found, wanted = paged_attention.launch(q, k, v, *pools, *rows), plain.paged_attention(q, k, v, key, value, *rows)
    assert torch.equal(pools[0], key) and torch.equal(pools[1], value)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit)
    assert not torch.equal(found, torch.zeros_like(found))


def test_a_kernel_that_a_gpu_cannot_run_is_not_used(monkeypatch):
    """Heads of 2,048 features need more shared memory than an H200 has; the trial ended the command."""

    def refused(*_):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(paged_attention, "_kernels", lambda: (None, None))
    monkeypatch.setattr(paged_attention, "launch", refused)
    untried = paged_attention.works.__wrapped__
    assert not untried(torch.device("cpu"), torch.bfloat16, heads=1, groups=1, width=64)
