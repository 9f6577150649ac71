"""State of a model that no optimizer updates, such as a bias that balances experts: fp32, in checkpoints, no gradients.

Each rank that has a buffer has all of its part; data-parallel ranks hold copies, of which the first is stored. Not in
the gradient's norm, without decay and moments. Values change only with an applied step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.optim.layout import make_layout
from trainer.optim.ownership import Ownership, everything
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.params import ParamSpec

STATE = "buffer"  # before their names in a checkpoint


class ModelBuffers:
    """The buffers of a rank's stages, as views of one flat tensor.

    Args:
        model: whose buffers of these names are replaced. specs: at least one.

    Attributes:
        values: of all of them. holds: where each lies in it.
    """

    def __init__(self, model: nn.Module, specs: Sequence[ParamSpec], *, device: torch.device) -> None:
        copied = [dataclasses.replace(spec, copies=(*spec.copies, "data")) for spec in specs]
        layout = make_layout(copied, {"data": 1, "edp": 1})
        self.holds: Ownership = everything(layout)
        self.values = torch.zeros(layout.size, dtype=torch.float32, device=device)
        self._named: dict[str, Tensor] = {}
        for slot in layout.slots:
            owner, _, name = slot.spec.name.rpartition(".")
            view = self.values[slot.start : slot.start + slot.spec.numel].view(slot.spec.shape)
            module = model.get_submodule(owner)
            assert name in module._buffers, f"the table has a buffer {slot.spec.name} that the model lacks"
            self._named[slot.spec.name] = module._buffers[name] = view

    def draw(self, seed: int) -> None:
        """Their first values."""
        runs = (
            ElementRange(slot.spec, low, high, self.values[first : first + high - low])
            for slot, low, high, first in self.holds.parameters()
        )
        initialize_(runs, seed=seed)

    @torch.no_grad()
    def update(self, values: Mapping[str, Tensor], *, applied: Tensor) -> None:
        """Take over new values by name if the step was applied."""
        for name, new in values.items():
            self._named[name].copy_(torch.where(applied, new.float(), self._named[name]))
