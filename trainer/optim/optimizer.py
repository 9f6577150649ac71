"""The distributed optimizer: flat buffers and three phases, reduce, update, gather.

`Buffers` lays a model's parameters into one flat tensor of their dtype, and gives its layers main gradients: views of a
flat tensor, of at least fp32 unless it is told otherwise, to which backward adds. `Optimizer.step` then
1. reduces: sums each bucket over its data-parallel ranks, in place, into the run that this rank owns; then what copies
   along other axes hold partial gradients of;
2. updates: the owned runs of the main weights by the rule of the settings (matrices under Muon by muon.py). Division by
   the number of loss tokens, which no rank had to know before backward, and clipping by the global norm are one factor;
3. gathers: the new parameters of each bucket, in place.
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
from trainer.kernels.updates import MOMENTS, rule_of
from trainer.layers.base import Layer
from trainer.optim.layout import BufferLayout, Ownership
from trainer.optim.muon import Part, Round, exchanged, iterations, make_rounds, parts_of, update_scale
from trainer.parallel.collectives import Group, all_gather_, all_reduce_, gather_objects, reduce_scatter_
from trainer.parallel.params import is_first_copy

NORM_BLOCK = 1024  # elements whose squares are summed in the gradient's own precision; the blocks are summed in fp64


class Buffers:
    """A model's parameters and main gradients as two flat tensors.

    Args:
        model: its parameters become views of `parameters`; their old storage is dropped, values are kept.
        layout: where each goes.
        in_params_dtype: whether gradients have the parameters' dtype.

    Attributes:
        main_dtype: of main weights and moments: fp32, or fp64 for an fp64 model.
        parameters: [layout.size] in the model's dtype.
        gradients: [layout.size] in the main dtype, or in the model's.
    """

    def __init__(self, model: nn.Module, layout: BufferLayout, *, in_params_dtype: bool = False) -> None:
        named = dict(model.named_parameters())
        planned = {slot.spec.name: slot.spec.shape for slot in layout.slots}
        actual = {name: tuple(p.shape) for name, p in named.items()}
        assert actual == planned, f"model and table differ: {set(actual.items()) ^ set(planned.items())}"
        first = next(iter(named.values()))
        self.layout, self.main_dtype = layout, torch.promote_types(first.dtype, torch.float32)
        dtype = first.dtype if in_params_dtype else self.main_dtype
        self._layers: dict[str, Layer] = {}
        self.parameters = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(layout.size, dtype=dtype, device=first.device)
        for slot in layout.slots:
            where = slice(slot.start, slot.start + slot.spec.numel)
            self._adopt(named[slot.spec.name], where)
            owner, _, name = slot.spec.name.rpartition(".")
            layer = model.get_submodule(owner)
            assert isinstance(layer, Layer), f"{slot.spec.name} belongs to {type(layer).__name__}, not to a Layer"
            layer.main_gradients.tensors[name] = self.gradients[where].view(slot.spec.shape)
            self._layers[owner] = layer

    def forget(self) -> None:
        """All gradients count as zero, whatever the buffer holds."""
        for layer in self._layers.values():
            layer.main_gradients.forget()

    def settle(self) -> None:
        """Make the buffer hold the gradients: what backward did not come to is zero."""
        for layer in self._layers.values():
            layer.main_gradients.settle()

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
        totals: fp64, what the ranks gave, summed over all of them.
    """

    grad_norm: Tensor
    applied: Tensor
    totals: Tensor


class Optimizer:
    """An update rule over the runs of the flat buffers that this rank owns.

    Args:
        buffers: of the model.
        settings: the rule, and its constants.
        groups: axis -> ranks along it, for the shard axes, those of copies, and "world".
        kernels: the implementation of the update.

    Attributes:
        owned: the runs of the buffers that are this rank's.
        owns: name -> those of them that a tensor of the state is for: all, or under Muon matrices, or the rest.
        state: name -> flat tensor of those runs, one after the other (fp32, or fp64 for an fp64 model): "weight" are
            the main weights, the others those of the rule (kernels/updates.py).
    """

    def __init__(
        self, buffers: Buffers, settings: OptimizerSection, *, groups: Mapping[str, Group], kernels: Kernels
    ) -> None:
        self.buffers, self.settings, self.groups, self.kernels = buffers, settings, groups, kernels
        self.owned = owned_runs(buffers.layout, groups)
        weight = torch.empty(self.owned.size, dtype=buffers.main_dtype, device=buffers.gradients.device)
        for run in self.owned.runs:
            weight[run.first : run.first + run.stop - run.start].copy_(buffers.parameters[run.start : run.stop])
        rest = self.owned
        self.owns = {"weight": self.owned}
        self._rounds: tuple[Round, ...] = ()
        if settings.name == "muon":
            matrices, rest = self.owned.only(matrix=True), self.owned.only(matrix=False)
            self.owns |= dict.fromkeys(MOMENTS["muon"], matrices)
            self._rounds = stage_rounds(matrices, groups)
        self._rest, self._rule = rest, rule_of(settings.name, matrix=False)
        self.owns |= dict.fromkeys(MOMENTS[self._rule], rest)
        moments = {name: weight.new_zeros(runs.size) for name, runs in self.owns.items() if name != "weight"}
        self.state = {"weight": weight} | moments
        # A sum over many ranks may be too large for fp16, as in Megatron the ranks' mean is taken instead.
        self._shrunk = groups["data"].size if buffers.gradients.dtype == torch.float16 else 1
        self._steps = torch.zeros((), dtype=torch.float64, device=weight.device)

    @property
    def steps(self) -> int:
        """Updates applied so far; waits for the device."""
        return int(self._steps)

    @out_of_memory_in("the optimizer's update", fix=MORE_RANKS)
    @torch.no_grad()
    def step(
        self, learning_rate: float, totals: Tensor, *, weight_decay: float | None = None, scale: Tensor | None = None
    ) -> StepResult:
        """Reduce, update, gather.

        Args:
            learning_rate, weight_decay: for this step; a weight decay of None is that of the settings.
            totals: fp64 [1 + any], what this rank adds to sums over all ranks; by the first the gradient is divided:
                its number of loss tokens, or of microbatches for a mean of their means.
            scale: fp64 scalar by which gradients were multiplied; None: 1.
        """
        self._reduce()
        sums = all_reduce_(torch.cat((self._square().view(1), totals)), self.groups["world"])
        divisor = (sums[1] if scale is None else sums[1] * scale) / self._shrunk
        norm = sums[0].sqrt() / divisor
        applied = norm.isfinite()
        clip = self.settings.clip_norm
        factor = (clip / norm.clamp(min=clip) if clip else 1.0) / divisor
        self._steps += applied
        decay = self.settings.weight_decay if weight_decay is None else weight_decay
        self._update(factor, (learning_rate, decay), applied)
        self._gather()
        self.buffers.forget()
        return StepResult(norm, applied, sums[1:])

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Continue from saved runs; the model's parameters become the rounded main weights."""
        for name, held in self.state.items():
            held.copy_(state[name])
        self._steps.fill_(steps)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the main weights and gather: the model's parameters become those of all ranks."""
        for run in self.owned.runs:
            weight = self.state["weight"][run.first : run.first + run.stop - run.start]
            self.buffers.parameters[run.start : run.stop].copy_(weight)
        self._gather()

    def _reduce(self) -> None:
        """The owned runs of the gradients become those of the loss's sum; what the other runs hold is undefined."""
        gradients = self.buffers.gradients
        self.buffers.settle()
        for bucket in self.buffers.layout.buckets:
            if self._shrunk > 1:
                gradients[bucket.start : bucket.stop] /= self._shrunk
            reduce_scatter_(gradients[bucket.start : bucket.stop], self.groups[bucket.shard])
        for axis in ("tp", "kv", "ends"):
            parts = [gradients[s.start : s.stop] for _, s in self.owned.segments() if axis in s.rules.partial]
            if parts and self.groups[axis].size > 1:
                _sum_together(parts, self.groups[axis])

    def _gather(self) -> None:
        for bucket in self.buffers.layout.buckets:
            all_gather_(self.buffers.parameters[bucket.start : bucket.stop], self.groups[bucket.shard])

    def _square(self) -> Tensor:
        """This rank's share of the squared norm: of several copies one counts."""
        square = self.buffers.gradients.new_zeros((), dtype=torch.float64)
        for _, segment in self.owned.segments():
            if is_first_copy(segment.rules.copies, lambda axis: self.groups[axis].rank):
                square += sum_of_squares(self.buffers.gradients[segment.start : segment.stop])
        return square

    def _update(self, factor: Tensor, rates: tuple[float, float], applied: Tensor) -> None:
        settings, dtype, (learning_rate, weight_decay) = self.settings, self.buffers.main_dtype, rates
        rate = torch.full_like(factor, learning_rate)
        # A number that changes from step to step has to be a tensor, or torch.compile would compile it in.
        scheduled = settings.weight_decay_schedule != "constant"
        decay = torch.full_like(rate, weight_decay) if scheduled else weight_decay
        if self._rule == "adamw":
            corrections = (1 - beta**self._steps for beta in (settings.beta1, settings.beta2))
            numbers = torch.stack((factor, rate, *corrections, self._steps)).to(dtype)
            update_ = self.kernels.adamw_
            constants: tuple[float, ...] = (settings.beta1, settings.beta2, settings.epsilon)
        else:
            numbers = torch.stack((factor, rate)).to(dtype)
            update_, constants = self.kernels.sgd_, (settings.momentum,)
        names = ("weight", *MOMENTS[self._rule])
        for _, segment in self._rest.segments():
            start, stop = segment.start, segment.stop
            held = (self._view(name, start, stop) for name in names)
            update_(
                (*held, self.buffers.parameters[start:stop]),
                self.buffers.gradients[start:stop],
                numbers,
                applied,
                (*constants, decay if segment.rules.decay else 0.0),
            )
        if self._rounds:
            self._update_matrices(factor, (rate, decay), applied)

    def _update_matrices(self, factor: Tensor, rates: tuple[Tensor, float | Tensor], applied: Tensor) -> None:
        """Muon's part of an update."""
        settings, buffers, (rate, decay) = self.settings, self.buffers, rates
        dtype = torch.bfloat16 if buffers.parameters.itemsize == 2 else buffers.parameters.dtype
        constants = (settings.muon_momentum, settings.muon_nesterov)

        def direction(part: Part) -> Tensor:
            where = part.element, part.element + part.numel
            mean, gradient = self._view("momentum_buffer", *where), buffers.gradients[slice(*where)]
            return self.kernels.muon_momentum_(mean, gradient, factor, applied, constants)

        def orthogonal(whole: Tensor) -> Tensor:
            found = self.kernels.orthogonalize(whole, dtype, iterations(settings))
            return found * update_scale(settings, (whole.shape[0], whole.shape[1]))

        for one in self._rounds:
            like, group = self.state["weight"], self.groups["stage"]
            for part, update in exchanged(one, direction, update=orthogonal, like=like, group=group):
                where = part.element, part.element + part.numel
                held = self._view("weight", *where), buffers.parameters[slice(*where)]
                self.kernels.muon_apply_(held, update, rate, applied, decay)

    def _view(self, name: str, start: int, stop: int) -> Tensor:
        """A tensor of the state for owned elements [start, stop) of the buffers."""
        first = self.owns[name].place(start)
        return self.state[name][first : first + stop - start]


def stage_rounds(matrices: Ownership, groups: Mapping[str, Group]) -> tuple[Round, ...]:
    """Muon's exchanges, from what every rank of the pipeline stage says that it holds."""
    mine = parts_of(matrices, lambda axis: groups[axis].rank)
    return make_rounds(gather_objects(mine, groups["stage"]), groups["stage"].rank)


def owned_runs(layout: BufferLayout, groups: Mapping[str, Group]) -> Ownership:
    """What the rank owns that sees these groups."""
    return layout.owned({axis: groups[axis].rank for axis in ("data", "edp")})


def _sum_together(parts: list[Tensor], group: Group) -> None:
    """Sum several tensors over a group in one message."""
    if len(parts) == 1:
        all_reduce_(parts[0], group)
        return
    joined = all_reduce_(torch.cat(parts), group)
    for part, total in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.copy_(total)


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of the squares of a flat tensor of any length: an fp64 scalar on its device.

    A sum in fp32 over all of it loses what is small beside the sum so far: 1 % of the norm at 1e8 elements on a CPU.
    A block is too short for that: the relative error is at most 1e-7, wherever a layout cuts.
    """
    blocks = len(flat) // NORM_BLOCK * NORM_BLOCK
    wide = torch.promote_types(flat.dtype, torch.float32)  # the norm of a block may be too large for fp16
    norms = torch.linalg.vector_norm(flat[:blocks].view(-1, NORM_BLOCK), dim=1, dtype=wide)
    return norms.double().square().sum() + flat[blocks:].double().square().sum()
