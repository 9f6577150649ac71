"""The distributed optimizer: flat buffers and three phases, reduce, update, gather.

`Buffers` lays a model's parameters into one flat tensor of their dtype and adds every gradient, as soon as backward
has made it, to a flat main-gradient tensor of at least fp32. `Optimizer.step` then
1. reduces: sums the copies' partial gradients over tp, sums and scatters everything over dp, and divides once by the
   number of loss tokens, so that no rank had to know that number before backward;
2. updates: this rank's shard of the main weights by AdamW (Loshchilov and Hutter 2019), clipped by the global norm;
3. gathers: the new parameters over dp.
A step is a transaction: when the norm is not finite nothing has changed yet, and nothing does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from trainer.collectives import Axis, all_gather, all_reduce_, reduce_scatter
from trainer.config import OptimizerSection
from trainer.layout import BufferLayout
from trainer.memory import MORE_RANKS, out_of_memory_in

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
            self._adopt(named[slot.spec.name], slice(slot.start, slot.start + slot.spec.numel))

    def clear(self) -> None:
        """Forget all gradients."""
        self.gradients.zero_()

    def _adopt(self, parameter: nn.Parameter, where: slice) -> None:
        view = self.parameters[where].view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
        main_gradient = self.gradients[where].view(parameter.shape)

        def accumulate(p: Tensor) -> None:
            assert p.grad is not None, "the hook runs after a gradient was accumulated"
            main_gradient.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did.

    Args:
        grad_norm: global L2 norm before clipping, of the mean loss's gradient.
        applied: False where the norm was not finite and nothing was changed.
    """

    grad_norm: float
    applied: bool


class Optimizer:
    """AdamW over this rank's shard of the flat buffers.

    Attributes:
        state: name -> flat tensor of this rank's shard (fp32, or fp64 for an fp64 model): "weight" are the main
            weights, "exp_avg" and "exp_avg_sq" the moments.
        steps: updates applied so far.
    """

    def __init__(self, buffers: Buffers, settings: OptimizerSection, *, tp: Axis, dp: Axis) -> None:
        self.buffers, self.settings, self.tp, self.dp = buffers, settings, tp, dp
        self.start, self.stop = buffers.layout.shard(dp.rank)
        self.segments = tuple(buffers.layout.segments_within(self.start, self.stop))
        # Only tp rank 0 counts what all tp ranks hold copies of.
        self._counted = [s for s in self.segments if s.over_tp == "split" or tp.rank == 0]
        weight = buffers.parameters[self.start : self.stop].to(buffers.gradients.dtype, copy=True)
        self.state = {
            "weight": weight,
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
        self.steps = 0

    @out_of_memory_in("the optimizer's update", fix=MORE_RANKS)
    def step(self, learning_rate: float, num_tokens: Tensor) -> StepResult:
        """Reduce, update, gather.

        Args:
            learning_rate: for this step.
            num_tokens: fp64 scalar tensor, the loss tokens of the whole step, already summed over dp.
        """
        gradient = self._reduce(num_tokens)
        norm = self._norm(gradient)
        if not math.isfinite(norm):
            self.buffers.clear()
            return StepResult(norm, applied=False)
        if 0.0 < self.settings.clip_norm < norm:
            gradient.mul_(self.settings.clip_norm / norm)
        self._update(gradient, learning_rate)
        self.publish()
        self.buffers.clear()
        return StepResult(norm, applied=True)

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Continue from saved shards; the model's parameters become the rounded main weights."""
        for name in STATE_NAMES:
            self.state[name].copy_(state[name])
        self.steps = steps
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Gather: the model's parameters become the rounded main weights of all ranks."""
        shard = self.state["weight"].to(self.buffers.parameters.dtype)
        self.buffers.parameters.copy_(all_gather(shard, self.dp))

    def _reduce(self, num_tokens: Tensor) -> Tensor:
        """This rank's shard of the mean loss's gradient."""
        gradients = self.buffers.gradients
        for segment in self.buffers.layout.segments:
            if segment.over_tp == "partial":
                all_reduce_(gradients[segment.start : segment.stop], self.tp)
        return reduce_scatter(gradients, self.dp).div_(num_tokens.to(gradients.dtype))

    def _norm(self, gradient: Tensor) -> float:
        square = gradient.new_zeros((), dtype=torch.float64)
        for segment in self._counted:
            square += sum_of_squares(self._part(gradient, segment.start, segment.stop))
        return math.sqrt(all_reduce_(all_reduce_(square, self.dp), self.tp).item())

    @torch.no_grad()
    def _update(self, gradient: Tensor, learning_rate: float) -> None:
        self.steps += 1
        for decay in (False, True):
            parts = [(s.start, s.stop) for s in self.segments if s.decay == decay]
            weights, first, second = ([self._part(self.state[name], *part) for part in parts] for name in STATE_NAMES)
            adamw_(
                weights,
                [self._part(gradient, *part) for part in parts],
                moments=(first, second),
                settings=self.settings,
                learning_rate=learning_rate,
                weight_decay=self.settings.weight_decay if decay else 0.0,
                steps=self.steps,
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


def adamw_(
    weights: list[Tensor],
    gradients: list[Tensor],
    *,
    moments: tuple[list[Tensor], list[Tensor]],
    settings: OptimizerSection,
    learning_rate: float,
    weight_decay: float,
    steps: int,
) -> None:
    """One AdamW update in place by PyTorch's fused kernel: one pass over memory.

    Args:
        weights: flat tensors. gradients: of the same shapes. moments: first and second, likewise.
        steps: number of this update, from 1, for the bias correction.
    """
    adamw(
        weights,
        gradients,
        *moments,
        max_exp_avg_sqs=[],
        # The function counts the update itself before it corrects the bias.
        state_steps=[torch.tensor(float(steps - 1), device=w.device) for w in weights],
        fused=True,
        amsgrad=False,
        beta1=settings.beta1,
        beta2=settings.beta2,
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=settings.epsilon,
        maximize=False,
    )
