"""After a loss of power at any call of saving: what was said to be saved can be loaded, and the run goes on.

Every state that tests/helpers/power_loss.py knows is put on the disk. `latest` must then give the last checkpoint that
was said to be saved, or one that was being saved, whole; or, where the step of that one was being saved once more, an
older one. Then the next checkpoint is saved and loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.examples import SOAK
from tests.helpers.failures import crash_at
from tests.helpers.power_loss import recorded, states
from tests.trainer.shapes import LLAMA
from trainer.checkpoint.folder import latest_checkpoint, remove_old, run_state
from trainer.checkpoint.format import RunState
from trainer.checkpoint.load import load_state
from trainer.checkpoint.location import Location
from trainer.checkpoint.rank_file import OwnedState
from trainer.checkpoint.save import Target, save_checkpoint
from trainer.models.gpt.params import parameter_table
from trainer.optim.layout import make_layout
from trainer.optim.ownership import everything
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place

SMALL = replace(
    LLAMA, num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_dim=2, ffn_hidden_size=2, padded_vocab_size=4,
    vocab_size=4,
)  # fmt: skip


def shard() -> OwnedState:
    layout = make_layout(parameter_table(SMALL, Place()), {"data": 1, "edp": 1})
    return OwnedState({"weight": everything(layout)}, {"tp": 0})


def save(root: Path, step: int, *, value: float, keep: int = 2) -> None:
    run = RunState(step=step, consumed_samples=step, data_id="", data={}, optimizer_steps=step, config="")
    part = shard()
    state = {"weight": torch.full((part.owned["weight"].size,), value)}
    save_checkpoint(Target(root, run, "x"), part, state=state, world=Group.single("world"))
    remove_old(root, keep)


def resumed(root: Location) -> tuple[int, float] | None:
    """The step and the value of the checkpoint that a run would go on from."""
    folder = latest_checkpoint(root)
    if folder is None:
        return None
    state = load_state(folder, shard().owned, dtype=torch.float32)["weight"]
    values = set(state[state != 0].tolist())  # padding is 0
    assert len(values) == 1, "a mixture of two checkpoints"
    return run_state(folder).step, values.pop()


def saves(root: Path) -> Iterator[tuple[int, float]]:
    """A run that saves and cleans up, and then does a step again from an older checkpoint."""
    for step, value in ((2, 2.0), (4, 4.0), (6, 6.0), (6, 6.5), (8, 8.0)):
        save(root, step, value=value)
        yield step, value


@pytest.mark.scaled
def test_after_a_loss_of_power_at_any_call(tmp_path):
    root = tmp_path / "checkpoints"
    root.mkdir()
    done: list[tuple[int, float] | None] = [None]
    with recorded(root, tmp_path / "beside") as kept:
        for saved in saves(root):
            done.append(saved)
            kept.promise()
    found = list(states(kept))
    assert len(found) > 100
    for promised, tree in found if SOAK > 1 else found[::3]:
        kept.restore(tree)
        again = done[promised : promised + 2] == [(6, 6.0), (6, 6.5)]
        allowed = {*done[promised : promised + 2], *([(4, 4.0)] if again else [])}
        assert resumed(root) in allowed, (promised, [name for name, _, _ in tree])
        save(root, 10, value=10.0)
        assert resumed(root) == (10, 10.0)


@pytest.mark.scaled
def test_after_a_kill_before_any_call_the_next_save_leaves_nothing_behind(tmp_path):
    """Of saves and of removals of older checkpoints."""
    for n in itertools.count(0, 1 if SOAK > 1 else 23):
        root = tmp_path / str(n)
        root.mkdir()
        if not crash_at(n, lambda root=root: list(saves(root)), removals=True):
            break
        assert resumed(root) in {None, (2, 2.0), (4, 4.0), (6, 6.0), (6, 6.5), (8, 8.0)}
        save(root, 10, value=10.0)
        assert resumed(root) == (10, 10.0)
        assert not list(root.glob(".*")) and len(list(root.glob("step-*"))) <= 2
    assert n > 100


@pytest.mark.parametrize("keep", [1, 2])
def test_without_a_loss_of_power(tmp_path, keep):
    root = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        save(root, step, value=float(step), keep=keep)
        assert resumed(root) == (step, float(step))
    assert len(list(root.glob("step-*"))) == keep
