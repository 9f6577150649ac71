"""Attention with learned biases: the Triton kernels against their twin, on a GPU.

TRITON_INTERPRET=1 runs the kernels on a CPU, where Triton is installed.
"""

from __future__ import annotations

import os

import pytest
import torch

from trainer.kernels import biased_attention, gpu
from trainer.kernels.biased_attention import BLOCK, differs_by
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape
from trainer.kernels.self_test import refusals

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NEEDS_GPU = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU")


@NEEDS_GPU
@pytest.mark.parametrize("tokens", [7, BLOCK, 2 * BLOCK + 10])
@pytest.mark.parametrize("width", [16, 64])
def test_outputs_and_all_gradients_are_those_of_the_twin(tokens, width):
    dtype, tolerance = (torch.float32, 1e-5) if INTERPRETED else (torch.bfloat16, 1e-2)
    assert differs_by(DEVICE, dtype, width, tokens) < tolerance


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_trial_of_a_gpu_and_the_same_bits_twice():
    assert biased_attention.works(DEVICE, torch.bfloat16, 64) and not biased_attention.works(DEVICE, torch.float32, 64)
    made = [torch.randn(8, 300, 4, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    bias, length = torch.randn(4, 300, 300, device=DEVICE, requires_grad=True), torch.arange(8, device=DEVICE) + 290
    scores, tensors = ScoreShape(scale=1.0, causal=False, relative=True), ScoreTensors(bias_HST=bias, length_B=length)
    given = (*made, bias)
    first, second = (
        torch.autograd.grad(gpu.scored_attention(*made, scores, tensors).float().square().sum(), given)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_gpu_that_lacks_shared_memory_has_no_kernel(monkeypatch):
    """Heads of 128 features need 140,288 bytes on an L4, which has 101,376; the trial ended the run."""

    def refused(*_):
        raise refusals()[-1]("out of resource: shared memory")

    monkeypatch.setattr(biased_attention, "_kernels", lambda: biased_attention)
    monkeypatch.setattr(biased_attention, "differs_by", refused)
    assert not biased_attention.works.__wrapped__(torch.device("cuda"), torch.bfloat16, 128)


def test_other_devices_dtypes_and_widths_have_no_kernel():
    cpu = torch.device("cpu")
    assert not biased_attention.works(cpu, torch.bfloat16, 64)
    assert not biased_attention.works(DEVICE, torch.bfloat16, 80) and not biased_attention.works(DEVICE, torch.half, 0)
