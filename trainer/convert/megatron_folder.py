"""The common part of Megatron-LM's two checkpoint formats: the iteration of a folder, and its settings.

`Training` is the part of a checkpoint that is not tensors; it becomes our run's state. Tensors are in
`torch_dist.py` and `mp_rank.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mdata import DamageError, UsageError
from mdata.errors import counted, os_errors_named
from mdata.util.regular_files import regular_file
from trainer.checkpoint.format import RunState
from trainer.config.parse import dump_config
from trainer.config.sections import RunConfig
from trainer.convert.pickles import Made
from trainer.convert.torch_file import StoredTensor

LATEST, RELEASE = "latest_checkpointed_iteration.txt", "release"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training progress of a checkpoint.

    Args:
        arguments: of Megatron-LM, by name. iteration: of the checkpoint; 0 of a released model.
        adam_steps: updates applied. version: checkpoint_version, or 0. where: the file, for messages.
    """

    where: Path
    arguments: Mapping[str, Any]
    iteration: int
    adam_steps: int
    version: float

    def run(self, config: RunConfig) -> RunState:
        """The state of one of our runs at the same step, with unknown data."""
        step = max(1, self.iteration)
        batch, consumed = (
            count_at(self.arguments, key, where=self.where, inside="args.")
            for key in ("global_batch_size", "consumed_train_samples")
        )
        return RunState(
            step=step,
            consumed_samples=max(consumed or step * (batch or 1), step),
            data_id="",
            data={},
            optimizer_steps=min(self.adam_steps, step),
            config=dump_config(config),
        )


def training_of(common: Any, *, where: Path, released: bool = False) -> Training:
    """The progress recorded in the part of a checkpoint that is not tensors.

    Args:
        released: a published model, which may be without arguments.

    Raises:
        DamageError: it is not a dictionary with settings, or a value is not one that Megatron-LM writes; names the key.
    """
    arguments = common.get("args", {} if released else None) if isinstance(common, dict) else None
    if arguments is None:
        raise DamageError(
            f"{where} has no args",
            found=", ".join(map(str, common))[:120] if isinstance(common, dict) else repr(common)[:120],
            expected="a checkpoint of Megatron-LM, which holds its arguments",
        )
    values = arguments.state if isinstance(arguments, Made) else arguments
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise damaged(where, "args", arguments, expected="Megatron's arguments by name")
    version = common.get("checkpoint_version") or 0
    if type(version) not in (int, float) or not 0 <= version < 100:
        raise damaged(where, "checkpoint_version", version, expected="a number such as 3.0")
    iteration = count_at(common, "iteration", where=where)
    return Training(
        arguments=values,
        iteration=iteration,
        adam_steps=adam_steps(common.get("optimizer"), otherwise=iteration, where=where),
        version=float(version),
        where=where,
    )


def damaged(where: Path, key: str, value: Any, *, expected: str) -> DamageError:
    """The error for a value that Megatron-LM does not write."""
    return DamageError(
        f"{where} is damaged at {key}", found=repr(value)[:120], expected=expected, fix="restore the file from a copy"
    )


def count_at(table: Mapping[str, Any], key: str, *, where: Path, inside: str = "") -> int:
    """A count in a dictionary; 0 if it is missing.

    Raises:
        DamageError: it is not a whole number from 0 to 2^62; names the key.
    """
    value = table.get(key)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise damaged(where, f"{inside}{key}", value, expected="a whole number of at least 0")
    return value


def adam_steps(optimizer: Any, *, otherwise: int, where: Path) -> int:
    """The one step count of an optimizer's state, which is kept at several places; or another number.

    Raises:
        DamageError: the value is not a count.
    """
    if not isinstance(optimizer, dict):
        return otherwise
    inner = optimizer.get("optimizer")
    if isinstance(inner, dict):
        return adam_steps(inner, otherwise=otherwise, where=where)
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if groups is not None and not (isinstance(groups, list) and all(isinstance(group, dict) for group in groups)):
        raise damaged(where, "optimizer.param_groups", groups, expected="a list of dictionaries")
    steps = state.get("common_step") if isinstance(state, dict) else None
    if steps is None and groups:
        steps = groups[0].get("step")
    if steps is None and isinstance(state, dict):
        steps = next((entry.get("step") for entry in state.values() if isinstance(entry, dict)), None)
    if steps is None:
        return otherwise
    number = steps.read().item() if isinstance(steps, StoredTensor) and math.prod(steps.shape) == 1 else steps
    if type(number) not in (int, float) or not 0 <= number < 1 << 62:
        raise damaged(where, "the optimizer's step", number, expected="a count of updates")
    return int(number)


def iteration_folder(path: Path) -> Path | None:
    """The folder of the latest iteration, or the one that was given; None: no checkpoint of Megatron-LM."""
    if (path / ".metadata").is_file() or any(path.glob("mp_rank_*")):
        return path
    pointer = path / LATEST
    if not pointer.is_file():
        return None
    with os_errors_named("reading a checkpoint"), regular_file(pointer).open("rb") as file:
        text = file.read(40).decode(errors="replace").strip()
    name = RELEASE if text == RELEASE else f"iter_{int(text):07d}" if text.isdecimal() else None
    if name is None or not (path / name).is_dir():
        raise UsageError(
            f"{pointer} does not name an iteration in its folder",
            found=repr(text),
            expected='a number such as 3, with iter_0000003 beside it, or "release"',
        )
    return path / name


_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(?:([0-9]{1,6})\.)?")


def layer_number(name: str) -> int | None:
    """The layer that a tensor belongs to; None: no layer, or all layers, stacked."""
    match = _LAYER.match(name)
    return int(match[1]) if match and match[1] else None


def block_numbers(names: Iterable[str]) -> set[int]:
    """The numbers of the blocks that have tensors; those of a decoder come after those of an encoder."""
    of_stack: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
    for name in names:
        if (number := layer_number(name)) is not None:
            of_stack[name.partition(".")[0]].add(number)
    first = 1 + max(of_stack["encoder"], default=-1)
    return of_stack["encoder"] | {first + number for number in of_stack["decoder"]}


def check_layers(config: RunConfig, layers: Iterable[int], *, where: Path) -> None:
    """Compare the number of layers with the layers that have tensors, before anything of that size is built.

    Raises:
        DamageError: they differ.
    """
    numbers, expected = set(layers), config.model.num_layers
    if numbers != set(range(expected)):
        raise DamageError(
            f"{where} does not have the layers of its model",
            found=f"tensors of {len(numbers)} layers" + (f", up to layer {max(numbers)}" if numbers else ""),
            expected=f"num_layers = {expected}",
            fix="restore the missing files, or the arguments of these weights",
        )


def check_rows(config: RunConfig, padded_rows: int, *, where: Path) -> None:
    """Refuse a vocabulary that the embedding has no rows for.

    Raises:
        UsageError: it is larger.
    """
    if (config.model.vocab_size or 0) > padded_rows:
        raise UsageError(
            f"the embedding of {where} is too small",
            found=counted(padded_rows, "row"),
            expected=f"at least model.vocab_size={config.model.vocab_size}",
            fix="leave --set model.vocab_size out, or correct it",
        )
