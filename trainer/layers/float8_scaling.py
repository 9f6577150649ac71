"""The scales of a model's FP8 matrix products: for input, weight and gradient of each linear layer.

Delayed scaling computes them from the largest values of the last steps. Within a step scales are fixed and largest
values only rise: recomputed layers get the same bits and change nothing, and an evaluation, which only raises those of
weights, has no effect. `update` ends a step; a skipped step leaves the history unchanged. All ranks keep the history of
the whole model, so that a checkpoint of it fits every layout. Without a history, and always with current scaling, each
matrix is scaled by its own largest value; blockwise each block is.

Shapes: H steps of history, L linear layers of the whole model, 3 roles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainer.kernels.float8 import E4M3, E5M2, Float8, Scaling, scale_for
from trainer.parallel.collectives import Group, all_reduce_

ROLES = ("input", "weight", "gradient")
Role = Literal["input", "weight", "gradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Recipe:
    """How a model is computed in FP8; the terms are those of Transformer Engine.

    Args:
        delayed: whether scales come from earlier steps. blocks: whether each block has a scale of its own.
        gradients: the format of gradients, E5M2 ("hybrid") or E4M3. history: steps. margin: powers of two below it.
        most_recent: the newest value of the history sets the scale, not the largest.
        input_again: backward rounds a layer's input again, if another layer keeps or recomputes it.
    """

    delayed: bool
    blocks: bool = False
    gradients: torch.dtype = E5M2
    history: int = 16
    most_recent: bool = False
    margin: int = 0
    input_again: bool = False


class Float8Kernels(NamedTuple):
    """The two operations of kernels/float8.py, or of a library."""

    quantize: Callable[..., Float8]
    product: Callable[..., Tensor]


class Float8Scaling:
    """The scales of all linear layers of a model.

    Args:
        names: of the layers of the whole model, in the same order on all ranks.

    Attributes:
        history_HL3: fp32, the largest values of the last steps, newest first; 0: none.
    """

    def __init__(
        self, names: tuple[str, ...], recipe: Float8Recipe, *, kernels: Float8Kernels, device: torch.device
    ) -> None:
        self.names, self.recipe, self.kernels = names, recipe, kernels
        size = (len(names), len(ROLES))
        self.history_HL3 = torch.zeros(recipe.history, *size, device=device)
        self._scale_L3 = torch.ones(size, device=device)
        self._largest_L3 = torch.zeros(size, device=device)
        self._has_history = False
        self.weights_version = 0

    def of(self, name: str) -> LayerScaling:
        """The scaling of one layer."""
        return LayerScaling(self, self.names.index(name))

    def scaling(self, row: int, role: Role, *, record: bool) -> Scaling:
        """The scaling of one matrix; `record`: update this step's largest value."""
        if self.recipe.blocks:
            return Scaling(None, None, "squares" if role == "weight" else "rows")
        if not self.recipe.delayed:
            return Scaling(None, None)
        at = (row, slice(ROLES.index(role), ROLES.index(role) + 1))
        return Scaling(self._scale_L3[at] if self._has_history else None, self._largest_L3[at] if record else None)

    @torch.no_grad()
    def update(self, applied: Tensor, everyone: Group) -> None:
        """End a step; `applied`: its update changed the weights. The same on all ranks. Does not wait."""
        self.forget_weights()
        if not self.recipe.delayed:
            return
        newest_L3 = all_reduce_(self._largest_L3, everyone, op="max")
        newest_L3 = torch.where(newest_L3.isfinite(), newest_L3, 0.0)
        newer_HL3 = torch.cat((newest_L3.unsqueeze(0), self.history_HL3[:-1]))
        self._set(torch.where(applied, newer_HL3, self.history_HL3))
        self._largest_L3.zero_()

    def forget_weights(self) -> None:
        """The weights changed: layers round them again."""
        self.weights_version += 1

    def to_numbers(self) -> dict[str, Any]:
        """The history for a checkpoint: layer -> [H][3]; empty for current scaling. Waits for the device."""
        if not self.recipe.delayed:
            return {}
        return dict(zip(self.names, self.history_HL3.transpose(0, 1).tolist(), strict=True))

    def load(self, numbers: dict[str, Any]) -> None:
        """Load a history; a longer or shorter one is cut or padded, layers without one start empty."""
        self.forget_weights()
        history_HL3 = torch.zeros_like(self.history_HL3)
        for row, name in enumerate(self.names):
            kept = torch.tensor(numbers.get(name, [])[: self.recipe.history]).view(-1, len(ROLES))
            history_HL3[: len(kept), row] = kept.to(history_HL3)
        self._largest_L3.zero_()
        self._set(history_HL3)
        self._has_history = bool(numbers) and self.recipe.delayed

    def _set(self, history_HL3: Tensor) -> None:
        """Set the scales, which are a function of the history alone."""
        self.history_HL3.copy_(history_HL3)
        margin, most_recent = self.recipe.margin, self.recipe.most_recent
        largest_L3 = self.history_HL3[0] if most_recent else self.history_HL3.amax(dim=0)
        forward_L2 = scale_for(largest_L3[:, :2], dtype=E4M3, margin=margin)
        gradient_L1 = scale_for(largest_L3[:, 2:], dtype=self.recipe.gradients, margin=margin)
        self._scale_L3.copy_(torch.cat((forward_L2, gradient_L1), dim=1))
        self._has_history = True


class LayerScaling:
    """The matrices of one linear layer in FP8. The weight is rounded once after each update, and cached."""

    def __init__(self, model: Float8Scaling, row: int) -> None:
        self.model, self._row = model, row
        self._weight: tuple[int, Float8] | None = None
        self._kept: Float8 | None = None

    def input(self, x_NI: Tensor, *, record: bool, columns: bool) -> Float8:
        """The input, or gathered inputs, of the layer; `columns`: with the transpose."""
        return self._quantize(x_NI, "input", record=record, columns=columns)

    def gradient(self, dy_NO: Tensor, *, columns: bool = True) -> Float8:
        """The gradient of the output; `columns`: with the transpose."""
        return self._quantize(dy_NO, "gradient", record=True, columns=columns)

    def weight(self, weight_OI: Tensor) -> Float8:
        """The weight; its largest value also counts in an evaluation, since it is the same weight."""
        version = self.model.weights_version
        if self._weight is None or self._weight[0] != version:
            self._weight = None  # its memory is reused for the new one
            self._weight = version, self._quantize(weight_OI, "weight", record=True, columns=True)
        return self._weight[1]

    @torch.no_grad()
    def keep_weight(self, weight_OI: Tensor) -> None:
        """Round the weight as `weight` does, but into the same memory as before, which CUDA graphs read."""
        version, kept = self.model.weights_version, self._kept
        if self._weight is None or self._weight[0] != version or self._weight[1] is not kept:
            rounded = self.weight(weight_OI)
            if kept is None:
                self._kept = kept = rounded
            elif rounded is not kept:
                for old, new in zip(kept.tensors(), rounded.tensors(), strict=True):
                    old.copy_(new)
            self._weight = version, kept

    def _quantize(self, x: Tensor, role: Role, *, record: bool, columns: bool) -> Float8:
        dtype = self.model.recipe.gradients if role == "gradient" else E4M3
        scaling = self.model.scaling(self._row, role, record=record)
        return self.model.kernels.quantize(x, dtype, scaling=scaling, columns=columns)
