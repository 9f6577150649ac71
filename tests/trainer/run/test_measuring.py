"""Utilization by hand, and peak memory that grows when more is allocated."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.plan.test_plan import config
from trainer.plan.plan import make_plan
from trainer.run.measuring import DeviceUse, Rate, peak_flops

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H200", "fp32", None),
        ("Some later device", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_the_peak_of_a_device(name, dtype, peak):
    assert peak_flops(name, dtype) == peak


def test_utilization_by_hand(monkeypatch):
    plan = make_plan(config(model={"vocab_size": 1000}), 4, facts=None)
    usage = DeviceUse(plan, "bf16", device=CPU)
    assert usage.mfu(1e6) is None and usage.tflops(1e6) == pytest.approx(plan.flops_per_token / 4e6)
    monkeypatch.setattr(usage, "_peak", 1e12)
    assert usage.mfu(1e6) == pytest.approx(1e6 * plan.flops_per_token / (4 * 1e12))


def test_memory_is_the_most_that_was_held():
    plan = make_plan(config(model={"vocab_size": 1000}), 2, facts=None)
    usage = DeviceUse(plan, "fp32", device=CPU)
    before = usage.memory_bytes()
    block = torch.ones(1 << 26)  # 256 MiB
    held = usage.memory_bytes()
    assert before > 1 << 20 and held >= before
    del block
    assert usage.memory_bytes() >= held


def test_a_report_that_is_read_after_the_last_step_repeats_the_rates(monkeypatch):
    now = 0.0
    monkeypatch.setattr("trainer.run.measuring.time.perf_counter", lambda: now)
    rate = Rate()
    for _ in range(2):
        with rate:
            now += 0.25
        rate.steps += 1
        rate.tokens += 100
    rate.sync_s = 0.1
    taken = rate.take()
    assert taken == (400.0, 0.0, (0.25, 0.0, 0.05))
    with rate:
        now += 1e-5
    assert rate.take() == taken
