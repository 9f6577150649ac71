"""What both of Megatron-LM's checkpoint formats have in common: which iteration a folder is at, and its settings.

`Training` is what a checkpoint says beside tensors; it becomes the run's state of ours. Tensors are in
`torch_dist.py` and `mp_rank.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mdata import DamageError, UsageError
from mdata.errors import os_errors_named
from trainer.checkpoint.format import RunState
from trainer.config.parse import dump_config
from trainer.config.sections import RunConfig

LATEST = "latest_checkpointed_iteration.txt"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Where the training of a checkpoint was.

    Args:
        arguments: of Megatron-LM, by name. iteration: of the checkpoint; 0 of a released model.
        adam_steps: updates applied. version: checkpoint_version, 0 where there is none.
    """

    arguments: Mapping[str, Any]
    iteration: int
    adam_steps: int
    version: float

    def run(self, config: RunConfig) -> RunState:
        """The state of a run of ours at the same place, whose data is not known."""
        step = max(1, self.iteration)
        batch = self.arguments.get("global_batch_size")
        consumed = self.arguments.get("consumed_train_samples") or step * (batch if isinstance(batch, int) else 1)
        return RunState(
            step=step,
            consumed_samples=max(int(consumed), step),
            data_id="",
            data={},
            optimizer_steps=min(self.adam_steps, step),
            config=dump_config(config),
        )


def training_of(common: Any, *, where: Path) -> Training:
    """From what a checkpoint holds beside tensors.

    Raises:
        DamageError: it is no dictionary with settings.
    """
    arguments = common.get("args") if isinstance(common, dict) else None
    if arguments is None:
        raise DamageError(
            f"{where} has no args",
            found=", ".join(map(str, common))[:120] if isinstance(common, dict) else type(common).__name__,
            expected="a checkpoint of Megatron-LM, which holds its arguments",
        )
    iteration = common.get("iteration", 0)
    return Training(
        arguments=arguments if isinstance(arguments, dict) else vars(arguments),
        iteration=iteration if isinstance(iteration, int) else 0,
        adam_steps=adam_steps(common.get("optimizer"), otherwise=iteration),
        version=float(common.get("checkpoint_version", 0) or 0),
    )


def adam_steps(optimizer: Any, *, otherwise: int) -> int:
    """The one step count of an optimizer's state, which is kept at several places; or another number."""
    if isinstance(optimizer, dict):
        inner = optimizer.get("optimizer")
        if isinstance(inner, dict):
            return adam_steps(inner, otherwise=otherwise)
        state, groups = optimizer.get("state"), optimizer.get("param_groups")
        found = state.get("common_step") if isinstance(state, dict) else None
        if found is None and isinstance(groups, list) and groups:
            found = groups[0].get("step")
        if found is None and isinstance(state, dict):
            found = next((entry.get("step") for entry in state.values() if isinstance(entry, dict)), None)
        if isinstance(found, (int, float, torch.Tensor)):
            return int(found)
    return otherwise


def iteration_folder(path: Path) -> Path | None:
    """The folder of the latest iteration, or the one that was given; None: no checkpoint of Megatron-LM."""
    if (path / ".metadata").is_file() or any(path.glob("mp_rank_*")):
        return path
    pointer = path / LATEST
    if not pointer.is_file():
        return None
    with os_errors_named("reading a checkpoint"):
        text = pointer.read_bytes()[:40].decode(errors="replace").strip()
    name = "release" if text == "release" else f"iter_{int(text):07d}" if text.isdecimal() else None
    if name is None or not (path / name).is_dir():
        raise UsageError(
            f"{pointer} does not name an iteration in its folder",
            found=repr(text),
            expected='a number such as 3, with iter_0000003 beside it, or "release"',
        )
    return path / name


def check_rows(config: RunConfig, padded_rows: int, *, where: Path) -> None:
    """Refuse a vocabulary that the embedding has no rows for.

    Raises:
        UsageError: it is larger.
    """
    if config.model.vocab_size > padded_rows:
        raise UsageError(
            f"the embedding of {where} is too small",
            found=f"{padded_rows} rows",
            expected=f"at least model.vocab_size={config.model.vocab_size}",
            fix="leave --set model.vocab_size out, or correct it",
        )
