"""CUDA graphs of one lane, on a GPU; tests/trainer/pipeline/test_graphs.py compares what recorded passes give."""

from __future__ import annotations

import pytest
import torch

from trainer.kernels.recording import CudaLane, RecordedFunction

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_a_lane_records_again_when_all_its_recordings_are_gone():
    """PyTorch 2.11 to 2.13 count the graphs of a pool, and failed in its second recording."""
    x, lane = torch.arange(4.0, device="cuda"), CudaLane(torch.device("cuda", torch.cuda.current_device()))
    for factor in (2.0, 3.0):
        recorded = RecordedFunction(lambda y, factor=factor: (y * factor,), (x,), lane=lane)
        (found,) = recorded(x)
        assert found is not None and torch.equal(found, x * factor)
        del recorded
