"""Sums by component: against a loop over rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.models.stage import Microbatch
from trainer.pipeline.passes import by_component


def _batch(components):
    nothing = torch.zeros(0)
    return Microbatch(tokens_BS=nothing, labels_BS=nothing, loss_mask_BS=nothing, components_B=torch.tensor(components))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 99))
def test_sums_by_component_are_those_of_a_loop(components, length, seed):
    values_BS = torch.rand((len(components), length), generator=torch.Generator().manual_seed(seed))
    expected = [0.0] * 5
    for row, component in zip(values_BS.double().tolist(), components, strict=True):
        expected[component] += math.fsum(row)
    for values in (values_BS, values_BS.flatten()):
        assert by_component(values, _batch(components), num_components=5).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_row_that_is_not_finite_spoils_its_own_component_alone():
    values = torch.tensor([[math.nan], [math.inf], [2.0]])
    first, second, third = by_component(values, _batch([0, 1, 2]), num_components=3).tolist()
    assert math.isnan(first) and second == math.inf and third == 2.0
