"""The loss scale against Megatron's tables and a twin in plain Python."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.optim.scaler import LossScaler, ScaleRule, initial_state, next_state

CPU = torch.device("cpu")


@dataclass
class Twin:
    """The rules as a person would say them."""

    rule: ScaleRule
    scale: float
    good: int = 0
    left: int = 0

    def step(self, overflow: bool) -> None:
        if overflow:
            self.good = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.rule.smallest)
            return
        self.good += 1
        if self.good == self.rule.window:
            self.good, self.left, self.scale = 0, self.rule.hysteresis, self.scale * 2


def ran(rule: ScaleRule, overflows: list[bool]) -> list[list[float]]:
    state, found = initial_state(rule, CPU), []
    for overflow in overflows:
        state = next_state(state, torch.tensor(overflow), rule=rule)
        found.append(state.tolist())
    return found


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 6),
    st.integers(1, 4),
    st.tuples(st.integers(0, 32), st.floats(1e-3, 64)),
)
def test_it_goes_the_way_of_its_twin(overflows, window, hysteresis, scales):
    exponent, smallest = scales
    rule = ScaleRule(initial=2.0**exponent, smallest=smallest, window=window, hysteresis=hysteresis)
    twin, expected = Twin(rule, rule.initial, left=hysteresis), []
    for overflow in overflows:
        twin.step(overflow)
        expected.append([twin.scale, twin.good, twin.left])
    assert ran(rule, overflows) == expected


def test_by_hand():
    """Hysteresis 2: the second overflow halves, the third too; three good steps double and restore it."""
    rule = ScaleRule(initial=8.0, smallest=1.5, window=3, hysteresis=2)
    overflows = [True, False, True, True, True, False, False, False, True]
    assert [scale for scale, _, _ in ran(rule, overflows)] == [8.0, 8.0, 4.0, 2.0, 1.5, 1.5, 1.5, 3.0, 3.0]


def test_megatrons_tables(oracles):
    tables = json.loads((oracles / "oracle" / "model" / "loss_scale.json").read_text())
    for table in tables.values():
        told = table["settings"]
        rule = ScaleRule(
            initial=told["initial_scale"],
            smallest=told["min_scale"],
            window=told["growth_interval"],
            hysteresis=told["hysteresis"],
        )
        rows = table["rows"]
        found = ran(rule, [bool(row[1]) for row in rows])
        assert found == [row[2:5] for row in rows]
        assert [rule.initial, *(scale for scale, _, _ in found[:-1])] == [row[0] for row in rows]
    assert len(tables) == 7


@pytest.mark.parametrize("overflow", [True, False])
def test_a_constant_scale_stays(overflow):
    scaler = LossScaler(ScaleRule(initial=1.0, dynamic=False), CPU)
    scaler.update_(torch.tensor(overflow), counts=torch.tensor(True))
    assert scaler.scale.item() == 1.0
    scaler.load({"scale": 5.0, "good_steps": 1.0, "hysteresis": 0.0})
    assert scaler.scale.item() == 1.0


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30))
def test_a_scale_goes_on_from_what_a_checkpoint_keeps(overflows, at):
    rule = ScaleRule(initial=2.0**20, window=3)
    whole, first, second = (LossScaler(rule, CPU) for _ in range(3))
    for overflow in overflows:
        whole.update_(torch.tensor(overflow), counts=torch.tensor(True))
    for overflow in overflows[:at]:
        first.update_(torch.tensor(overflow), counts=torch.tensor(True))
    second.load(json.loads(json.dumps(first.to_numbers())))
    for overflow in overflows[at:]:
        second.update_(torch.tensor(overflow), counts=torch.tensor(True))
    assert second.to_numbers() == whole.to_numbers()
