"""Kernels over rows of experts against the plain functions; rows behind the last group's are left alone.

TRITON_INTERPRET=1 runs the kernels on a CPU, where Triton is installed.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.ranks import device_type
from trainer.kernels import expert_rows, plain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device(device_type())
ENDS = {"all rows": [9, 40], "fewer": [0, 17, 17, 33], "one": [0, 1], "none": [0, 0, 0]}


def _case(end, *, width=300):
    draw = torch.Generator().manual_seed(3)
    both, dz = torch.randn(40, 2 * width, generator=draw), torch.randn(40, width, generator=draw)
    weight, token = torch.rand(40, generator=draw), torch.randint(7, (40,), generator=draw)
    tensors = (torch.randn(7, width, generator=draw), both, dz, weight, token, torch.tensor(end, dtype=torch.int32))
    return [part.to(DEVICE) for part in tensors]


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_plain_gradients_are_those_of_autograd(end):
    x, both, dz, weight, token, end_E = _case(end)
    both, weight = both.double().requires_grad_(), weight.double().requires_grad_()
    z = plain.weigh_swiglu(both, weight, end_E)
    expected = torch.autograd.grad(z, (both, weight), dz.double())
    found = plain.weigh_swiglu_backward(dz.double(), both.detach(), weight.detach(), end_E)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right)
    assert torch.equal(plain.take_rows(x, token, end_E), x[token])


@pytest.mark.skipif(not (DEVICE.type == "cuda" or INTERPRETED), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_kernels_are_the_plain_functions_up_to_the_last_group(end, dtype):
    x, both, dz, weight, token, end_E = _case(end)
    x, both, dz = (part.to(dtype) for part in (x, both, dz))
    stop, limit = end[-1], {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        found = (
            expert_rows._take_rows(x, token, end_E),
            expert_rows._weigh(both, weight, end_E),
            *expert_rows._weigh_backward(dz, both, weight, end_E),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    right = (
        plain.take_rows(x, token, end_E),
        plain.weigh_swiglu(both, weight, end_E),
        *plain.weigh_swiglu_backward(dz, both, weight, end_E),
    )
    for ours, twin in zip(found, right, strict=True):
        assert ours.dtype == twin.dtype and ours.shape == twin.shape
        torch.testing.assert_close(ours[:stop], twin[:stop], **limit)
        assert ours[stop:].isnan().all(), "rows behind the last group's are not written"


@pytest.mark.skipif(not (DEVICE.type == "cuda" or INTERPRETED), reason="needs a GPU")
def test_the_trial_tells_kernels_that_differ(monkeypatch):
    assert expert_rows.largest_difference(DEVICE, torch.float32) < 1e-5
    monkeypatch.setattr(expert_rows, "_weigh", lambda both, weight, end: plain.weigh_swiglu(both, 2 * weight, end))
    assert expert_rows.largest_difference(DEVICE, torch.float32) > 0.5
    monkeypatch.setattr(expert_rows, "_weigh", lambda both, weight, end: plain.weigh_swiglu(both, weight / 0, end))
    assert expert_rows.largest_difference(DEVICE, torch.float32) == torch.inf
