"""The distributed optimizer: flat buffers and three phases, reduce, update, gather.

`Buffers` lays a model's parameters into one flat tensor of their dtype, and gives its layers main gradients: views of a
flat tensor of at least fp32, to which backward adds. `Optimizer.step` then
1. reduces: sums the copies' partial gradients over tp, and sums and scatters everything over dp;
2. updates: this rank's shard of the main weights by AdamW (Loshchilov and Hutter 2019). Division by the number of loss
   tokens, which no rank had to know before backward, and clipping by the global norm are one factor;
3. gathers: the new parameters over dp.
A step is a transaction: when the norm is not finite nothing changes. All of it is decided on the device: nothing here
waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.config.sections import OptimizerSection
from trainer.errors import MORE_RANKS, out_of_memory_in
from trainer.kernels.table import Kernels
from trainer.layers.base import Layer
from trainer.optim.layout import BufferLayout
from trainer.parallel.collectives import Axis, all_gather_, all_reduce_, reduce_scatter

STATE_NAMES = ("weight", "exp_avg", "exp_avg_sq")
NORM_BLOCK = 1024  # elements whose squares are summed in the gradient's own precision; the blocks are summed in fp64


class Buffers:
    """A model's parameters and main gradients as two flat tensors.

    Args:
        model: its parameters become views of `parameters`; their old storage is dropped, values are kept.
        layout: where each goes.

    Attributes:
        parameters: [layout.size] in the model's dtype.
        gradients: [layout.size], fp32, or fp64 for an fp64 model; zero after `clear`.
    """

    def __init__(self, model: nn.Module, layout: BufferLayout) -> None:
        named = dict(model.named_parameters())
        planned = {slot.spec.name: slot.spec.shape for slot in layout.slots}
        actual = {name: tuple(p.shape) for name, p in named.items()}
        assert actual == planned, f"model and table differ: {set(actual.items()) ^ set(planned.items())}"
        first = next(iter(named.values()))
        main_dtype = torch.promote_types(first.dtype, torch.float32)
        self.layout = layout
        self.parameters = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(layout.size, dtype=main_dtype, device=first.device)
        for slot in layout.slots:
            where = slice(slot.start, slot.start + slot.spec.numel)
            self._adopt(named[slot.spec.name], where)
            owner, _, name = slot.spec.name.rpartition(".")
            layer = model.get_submodule(owner)
            assert isinstance(layer, Layer), f"{slot.spec.name} belongs to {type(layer).__name__}, not to a Layer"
            layer.main_gradients[name] = self.gradients[where].view(slot.spec.shape)

    def clear(self) -> None:
        """Forget all gradients."""
        self.gradients.zero_()

    def _adopt(self, parameter: nn.Parameter, where: slice) -> None:
        view = self.parameters[where].view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, as tensors on the device: reading one waits for the step.

    Args:
        grad_norm: fp64 scalar, global L2 norm before clipping, of the mean loss's gradient.
        applied: bool scalar, False where the norm was not finite and nothing was changed.
    """

    grad_norm: Tensor
    applied: Tensor


class Optimizer:
    """AdamW over this rank's shard of the flat buffers.

    Attributes:
        state: name -> flat tensor of this rank's shard (fp32, or fp64 for an fp64 model): "weight" are the main
            weights, "exp_avg" and "exp_avg_sq" the moments.
    """

    def __init__(self, buffers: Buffers, settings: OptimizerSection, *, tp: Axis, dp: Axis, kernels: Kernels) -> None:
        self.buffers, self.settings, self.tp, self.dp, self.kernels = buffers, settings, tp, dp, kernels
        self.start, self.stop = buffers.layout.shard(dp.rank)
        self.segments = tuple(buffers.layout.segments_within(self.start, self.stop))
        # Only tp rank 0 counts what all tp ranks hold copies of.
        self._counted = [s for s in self.segments if s.over_tp == "split" or tp.rank == 0]
        self._parameters = buffers.parameters[self.start : self.stop]
        weight = self._parameters.to(buffers.gradients.dtype, copy=True)
        self.state = {
            "weight": weight,
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
        self._steps = torch.zeros((), dtype=torch.float64, device=weight.device)

    @property
    def steps(self) -> int:
        """Updates applied so far; waits for the device."""
        return int(self._steps)

    @out_of_memory_in("the optimizer's update", fix=MORE_RANKS)
    @torch.no_grad()
    def step(self, learning_rate: float, num_tokens: Tensor) -> StepResult:
        """Reduce, update, gather.

        Args:
            learning_rate: for this step.
            num_tokens: fp64 scalar tensor, the loss tokens of the whole step, already summed over dp.
        """
        gradient = self._reduce()
        norm = self._norm(gradient) / num_tokens
        applied = norm.isfinite()
        clip = self.settings.clip_norm
        factor = (clip / norm.clamp(min=clip) if clip else 1.0) / num_tokens
        self._steps += applied
        self._update(gradient, factor, learning_rate, applied)
        self._gather()
        self.buffers.clear()
        return StepResult(norm, applied)

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Continue from saved shards; the model's parameters become the rounded main weights."""
        for name in STATE_NAMES:
            self.state[name].copy_(state[name])
        self._steps.fill_(steps)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the main weights and gather: the model's parameters become those of all ranks."""
        self._parameters.copy_(self.state["weight"])
        self._gather()

    def _gather(self) -> None:
        all_gather_(self.buffers.parameters, self.dp)

    def _reduce(self) -> Tensor:
        """This rank's shard of the gradient of the loss's sum."""
        gradients = self.buffers.gradients
        for segment in self.buffers.layout.segments:
            if segment.over_tp == "partial":
                all_reduce_(gradients[segment.start : segment.stop], self.tp)
        return reduce_scatter(gradients, self.dp)

    def _norm(self, gradient: Tensor) -> Tensor:
        square = gradient.new_zeros((), dtype=torch.float64)
        for segment in self._counted:
            square += sum_of_squares(self._part(gradient, segment.start, segment.stop))
        return all_reduce_(all_reduce_(square, self.dp), self.tp).sqrt()

    def _update(self, gradient: Tensor, factor: Tensor, learning_rate: float, applied: Tensor) -> None:
        settings = self.settings
        corrections = (1 - beta**self._steps for beta in (settings.beta1, settings.beta2))
        rate = torch.full_like(factor, learning_rate)
        numbers = torch.stack((factor, rate, *corrections, self._steps)).to(gradient.dtype)
        for segment in self.segments:
            part = (segment.start, segment.stop)
            weight, first, second = (self._part(self.state[name], *part) for name in STATE_NAMES)
            self.kernels.adamw_(
                (weight, first, second, self._part(self._parameters, *part)),
                self._part(gradient, *part),
                numbers,
                applied,
                (settings.beta1, settings.beta2, settings.epsilon, settings.weight_decay if segment.decay else 0.0),
            )

    def _part(self, shard: Tensor, start: int, stop: int) -> Tensor:
        return shard[start - self.start : stop - self.start]


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of the squares of a flat tensor of any length: an fp64 scalar on its device.

    A sum in fp32 over all of it loses what is small beside the sum so far: 1 % of the norm at 1e8 elements on a CPU.
    A block is too short for that: the relative error is at most 1e-7, wherever a layout cuts.
    """
    blocks = len(flat) // NORM_BLOCK * NORM_BLOCK
    norms = torch.linalg.vector_norm(flat[:blocks].view(-1, NORM_BLOCK), dim=1)
    return norms.double().square().sum() + flat[blocks:].double().square().sum()
