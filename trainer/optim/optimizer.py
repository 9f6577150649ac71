"""The distributed optimizer: three phases, reduce, update, gather, over the flat buffers (buffers.py).

`Optimizer.step`
1. reduces: waits until each bucket of gradients is summed over its data-parallel ranks (data_parallel.py), and sums
   partial gradients of copies along other axes;
2. updates: the main weights by the rule of the settings (under Muon matrices by muon.py). Division by the
   number of loss tokens, which no rank had to know before backward, and clipping by the global norm are one factor;
3. gathers: starts to gather the new parameters of each bucket, in place (data_parallel.py); blocks wait for their own.
A rank has the main weights and moments of the runs that it owns, or all of them under `sharding = "none"`; where
parameters are not rounded, they are the main weights. A step is a transaction: if the norm is not finite nothing
changes. All of this is decided on the device: nothing here waits for the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from trainer.config.sections import OptimizerSection
from trainer.errors import MORE_RANKS, out_of_memory_in
from trainer.kernels.plain import AdamConstants, AdamState, AdamStep, SgdConstants, SgdState, SgdStep
from trainer.kernels.recording import RecordedFunction, Recorder
from trainer.kernels.table import Kernels
from trainer.kernels.updates import MOMENTS, rule_of
from trainer.optim.buffers import Buffers
from trainer.optim.data_parallel import DataParallelHooks, GradientReducer, ParameterGathers
from trainer.optim.layout import Bucket, RuleRange
from trainer.optim.muon import MatrixUpdate
from trainer.optim.ownership import Ownership, everything
from trainer.parallel.collectives import Group, all_reduce_
from trainer.parallel.params import SHARD_AXES, is_first_copy, slices


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, as tensors on the device: reading one waits for the step.

    Args:
        grad_norm: fp64 scalar, global L2 norm before clipping, of the mean loss's gradient.
        applied: bool scalar, False if the norm was not finite or a limit was exceeded, and nothing was changed.
        totals: fp64, the totals given by the ranks, summed over all of them.
        squares: fp64, this rank's part of the squared norm of each of `norm_groups`; not summed over ranks.
    """

    grad_norm: Tensor
    applied: Tensor
    totals: Tensor
    squares: Tensor


class Optimizer:
    """An update rule over the runs of the flat buffers that this rank owns.

    Args:
        buffers: of the model.
        settings: the rule, and its constants.
        groups: axis -> ranks along it, for the shard axes, those of copies, and "world".
        kernels: the implementation of the update.
        recorder: records the update of a rank that shares its parameters with no other; None: not recorded.
        norm_groups: logical tensor -> its group (`norm_group`), whose squared norm each step gives.

    Attributes:
        norm_groups: names of these groups, in the order of their norms.
        holds: name -> the runs of the buffers that this rank updates, and where they lie in a tensor of the state: of
            all parameters, or under Muon of the matrices, or of the rest.
        owns: name -> those of them that this rank owns; the others are copies.
        state: name -> flat tensor of these runs (fp32, or fp64 for an fp64 model): "weight" has the main weights, which
            are the buffers' parameters where these are not rounded; the others belong to the rule (kernels/updates.py).
        hooks: of the model's blocks.
    """

    def __init__(
        self,
        buffers: Buffers,
        settings: OptimizerSection,
        *,
        groups: Mapping[str, Group],
        kernels: Kernels,
        recorder: Recorder | None = None,
        norm_groups: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.buffers, self.settings, self.groups, self.kernels = buffers, settings, groups, kernels
        unsharded = buffers.sharding == "none"
        held = everything(buffers.layout).of(frozen=False) if unsharded else buffers.owned
        rest = held
        self.holds = {"weight": held if buffers.has_main_weights else buffers.parameters.runs.within(held)}
        self._matrices: MatrixUpdate | None = None
        if settings.name == "muon":
            matrices, rest = held.only(matrix=True), held.only(matrix=False)
            self.holds |= dict.fromkeys(MOMENTS["muon"], matrices)
            self._matrices = MatrixUpdate(buffers, settings, held=matrices, groups=groups, kernels=kernels)
        self._rule = rule_of(settings.name, matrix=False)
        self.holds |= dict.fromkeys(MOMENTS[self._rule], rest)
        self.owns = {name: runs.within(buffers.owned) for name, runs in self.holds.items()}
        zeros = functools.partial(torch.zeros, dtype=buffers.main_dtype, device=buffers.parameters.values.device)
        self.state = {
            name: zeros(runs.size) if name != "weight" or buffers.has_main_weights else buffers.parameters.values
            for name, runs in self.holds.items()
        }
        self._segments = [
            [
                part
                for run, segment in rest.segments()
                if run.bucket is bucket
                for part in _by_rate(segment, bucket, apart=bool(settings.embedding_lr))
            ]
            for bucket in buffers.layout.buckets
        ]
        # A sum over many ranks may be too large for fp16; as in Megatron, the ranks' mean is used instead.
        self._shrunk = groups["data"].size if buffers.gradients.values.dtype == torch.float16 else 1
        self._steps = torch.zeros((), dtype=torch.float64, device=self.state["weight"].device)
        self.gathers = ParameterGathers(buffers, groups, overlap=settings.overlap_param_gather)
        self.reducer = GradientReducer(
            buffers, groups, held=held, overlap=settings.overlap_grad_reduce, shrink=self._shrunk
        )
        self.hooks = DataParallelHooks(self.gathers, self.reducer)
        self.norm_groups = tuple(sorted({*norm_groups.values()}))
        self._norm_groups = {name: list[tuple[int, int]]() for name in self.norm_groups}  # elements in the buffers
        for slot, low, high, _ in self.owned.parameters() if norm_groups else ():
            # A rank's part of a padded tensor may be padding alone.
            if slot.spec.pieces and is_first_copy(slot.spec.copies, lambda axis: self.groups[axis].rank):
                self._norm_groups[norm_groups[slot.spec.pieces[0].name]].append((slot.start + low, slot.start + high))
        alone = all(groups[axis].size == 1 for axis in SHARD_AXES) and self._matrices is None
        self._recorder = recorder if alone else None
        self._recordings: dict[Any, RecordedFunction | None] = {}

    @property
    def owned(self) -> Ownership:
        """The part of the main weights that this rank owns."""
        return self.owns["weight"]

    @property
    def outside_buffers(self) -> list[Tensor]:
        """The tensors of the state that have memory of their own."""
        return [values for values in self.state.values() if values is not self.buffers.parameters.values]

    @property
    def steps(self) -> int:
        """Updates applied so far; waits for the device."""
        return int(self._steps)

    @out_of_memory_in("the optimizer's update", fix=MORE_RANKS)
    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        totals: Tensor,
        *,
        embedding_rate: float | None = None,
        weight_decay: float | None = None,
        scale: Tensor | None = None,
        limits: tuple[float, float] | None = None,
    ) -> StepResult:
        """Reduce, update, gather.

        Args:
            learning_rate, weight_decay: for this step; None, or a constant optimizer.weight_decay_schedule: the weight
                decay of the settings.
            embedding_rate: of the token embedding and the output head, under optimizer.embedding_lr; None: the same.
            totals: fp64 [1 + any], this rank's part of sums over all ranks; the gradient is divided by the first: its
                number of loss tokens, or of microbatches for a mean of their means.
            scale: fp64 scalar by which gradients were multiplied; None: 1.
            limits: largest quotient of the second and third total (the loss), and largest norm; above one of them
                nothing is changed. None, in all steps: there are no limits.
        """
        self.gathers.release()
        self.reducer.finish()
        decay = self.settings.weight_decay if weight_decay is None else weight_decay
        embedding_rate = learning_rate if embedding_rate is None else embedding_rate
        rates = torch.tensor((learning_rate, embedding_rate, decay, *(limits or ())), dtype=torch.float64)
        numbers = (rates.to(totals.device, non_blocking=True), totals, scale)
        norm, applied, sums, squares = self._recorded(numbers) or self._reduce_and_update(*numbers)
        self.buffers.forget()
        return StepResult(norm, applied, sums, squares)

    def _recorded(self, numbers: tuple[Tensor, Tensor, Tensor | None]) -> Sequence[Any]:
        """The results of a recorded `_reduce_and_update`; nothing where it has to be computed."""
        key = (numbers[1].shape, numbers[2] is None)
        if self._recorder is None:
            return ()
        if key not in self._recordings:
            self._recordings[key] = None  # the first call compiles kernels
            return ()
        if (recorded := self._recordings[key]) is None:
            recorded = RecordedFunction(self._reduce_and_update, numbers, lane=self._recorder())
            self._recordings[key] = recorded
        return recorded(*numbers)

    def _reduce_and_update(self, numbers_R: Tensor, totals: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """The tensor operations of a step, and nothing else, so that they can be recorded."""
        self.reducer.sum_copies()
        sums = all_reduce_(torch.cat((self._square().view(1), totals)), self.groups["world"])
        divisor = (sums[1] if scale is None else sums[1] * scale) / self._shrunk
        norm = sums[0].sqrt() / divisor
        applied, rates_3, limits = norm.isfinite(), numbers_R[:3], numbers_R[3:]
        if len(limits):
            applied &= (norm <= limits[1]) & ~(sums[2] / sums[3] > limits[0])
        squares = self._squares_by_group() / divisor.square()
        clip = self.settings.clip_norm
        factor = (clip / norm.clamp(min=clip) if clip else 1.0) / divisor
        self._steps += applied
        self._update(factor, rates_3.unbind(), applied)
        return norm, applied, sums[1:], squares

    def loaded(self, steps: int) -> None:
        """Continue from the values in `state`, after this many updates; parameters become the rounded weights."""
        self._steps.fill_(steps)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the main weights and gather the model's parameters from all ranks."""
        self.gathers.release()
        held = self.holds["weight"]
        for run, span in zip(held.runs, held.spans(), strict=True):
            if (parameters := self.buffers.rounded(run.start, run.stop)) is not None:
                parameters.copy_(self.state["weight"][span])
        self._gather()

    def _gather(self) -> None:
        for number in reversed(range(len(self.buffers.layout.buckets))):  # in the order of use
            self.gathers.updated(number)

    def _square(self) -> Tensor:
        """This rank's share of the squared norm: only one of several copies counts."""
        counted = [
            self.buffers.gradients.view(segment.start, segment.stop)
            for _, segment in self.owned.segments()
            if is_first_copy(segment.rules.copies, lambda axis: self.groups[axis].rank)
        ]
        return sum_of_squares(counted) if counted else self._steps.new_zeros(())

    @torch.no_grad()
    def norm_and_zeros(self) -> Tensor:
        """fp64 [2] over all ranks, after a step: the norm of the parameters, and how many gradients were zero."""
        weights, gradients = [], []
        for slot, low, high, _ in self.owned.parameters():
            if not is_first_copy(slot.spec.copies, lambda axis: self.groups[axis].rank):
                continue
            for part in slices(slot.spec, first=low, stop=high):  # without the rows that pad the vocabulary
                start = slot.start + part.flat
                weights.append(self._view("weight", start, start + math.prod(part.size)))
                gradients.append(self.buffers.gradients.view(start, start + math.prod(part.size)))
        none = self._steps.new_zeros(())
        square = sum_of_squares(weights) if weights else none
        zeros = sum(((values == 0).sum(dtype=torch.float64) for values in gradients), none)
        square, zeros = all_reduce_(torch.stack((square, zeros)), self.groups["world"]).unbind()
        return torch.stack((square.sqrt(), zeros))

    def _squares_by_group(self) -> Tensor:
        """This rank's part of the squared norm of each of the norm groups, fp64; precise enough for people."""
        spans = [span for group in self._norm_groups.values() for span in group]
        if not spans:
            return self._steps.new_zeros(len(self._norm_groups))
        views = [self.buffers.gradients.view(*span) for span in spans]
        norms = torch._foreach_norm(views, 2, torch.promote_types(views[0].dtype, torch.float32))
        squares, first, sums = torch.stack(norms).double().square(), 0, []
        for group in self._norm_groups.values():
            sums.append(squares[first : first + len(group)].sum())
            first += len(group)
        return torch.stack(sums)

    def _update(self, factor: Tensor, rates: Sequence[Tensor], applied: Tensor) -> None:
        settings, dtype, (rate, embedding_rate, scheduled_decay) = self.settings, self.buffers.main_dtype, rates
        by_rate = {False: rate} | ({True: embedding_rate} if settings.embedding_lr else {})
        # A number that changes from step to step has to be a tensor, because torch.compile would treat it as a
        # constant.
        scheduled = settings.weight_decay_schedule != "constant"
        decay = scheduled_decay if scheduled else settings.weight_decay
        if self._rule == "adamw":
            correction1, correction2 = (1 - beta**self._steps for beta in (settings.beta1, settings.beta2))
            numbers = {
                own: torch.stack(AdamStep(factor, its_rate, correction1, correction2, self._steps)).to(dtype)
                for own, its_rate in by_rate.items()
            }
        else:
            numbers = {own: torch.stack(SgdStep(factor, its_rate)).to(dtype) for own, its_rate in by_rate.items()}
        names = ("weight", *MOMENTS[self._rule])
        for number in reversed(range(len(self._segments))):  # in the order of use
            for (start, stop, rules), own_rate in self._segments[number]:
                weight, *moments = (self._view(name, start, stop) for name in names)
                parameter, gradient = self.buffers.rounded(start, stop), self.buffers.gradients.view(start, stop)
                its_numbers, its_decay = numbers[own_rate], decay if rules.decay else 0.0
                if self._rule == "adamw":
                    first, second = moments
                    constants = AdamConstants(settings.beta1, settings.beta2, settings.epsilon, its_decay)
                    adam = AdamState(weight, first, second, parameter)
                    self.kernels.adamw_(adam, gradient, its_numbers, applied, constants)
                else:
                    (momentum,) = moments
                    sgd = SgdState(weight, momentum, parameter)
                    settled = SgdConstants(settings.momentum, its_decay)
                    self.kernels.sgd_(sgd, gradient, its_numbers, applied, settled)
            if self._matrices is None:
                self.gathers.updated(number)
        if self._matrices is not None:
            self._matrices.update_(self._view, factor, rates=(rate, decay), applied=applied)
            self._gather()

    def _view(self, name: str, start: int, stop: int) -> Tensor:
        """A tensor of the state for owned elements [start, stop) of the buffers."""
        first = self.holds[name].place(start)
        return self.state[name][first : first + stop - start]


def _by_rate(segment: RuleRange, bucket: Bucket, *, apart: bool) -> Iterator[tuple[RuleRange, bool]]:
    """The parts of a segment, and whether each belongs to the token embedding or the head; undivided unless `apart`."""
    spans = [(slot.start, slot.start + slot.spec.numel) for slot in bucket.slots if apart and slot.spec.vocabulary]
    at = segment.start
    for start, stop in sorted(spans):
        start, stop = max(start, at), min(stop, segment.stop)
        if start >= stop:
            continue
        if at < start:
            yield segment._replace(start=at, stop=start), False
        yield segment._replace(start=start, stop=stop), True
        at = stop
    if at < segment.stop:
        yield segment._replace(start=at), False


def norm_group(name: str) -> str:
    """The group of a parameter in which its gradient is measured: its name without the number of its layer."""
    return ".".join(part for part in name.split(".") if not part.isdecimal())


NORM_BLOCK = 1024  # elements whose squares are summed in the gradient's own precision; the blocks are summed in fp64


def sum_of_squares(flats: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of flat tensors of any length, at least one: an fp64 scalar on their device.

    In fp32 it would lose 1 % of the norm at 1e8 elements on a CPU. With blocks the relative error is at most 1e-7,
    wherever a layout divides the tensors. One or two kernels run for each tensor and four for all, as a model has
    many segments and hosts may need longer to launch a kernel than GPUs to run it.
    """
    norms = []
    for flat in flats:
        wide = torch.promote_types(flat.dtype, torch.float32)  # the norm of a block may be too large for fp16
        blocks = len(flat) // NORM_BLOCK * NORM_BLOCK
        norms.append(torch.linalg.vector_norm(flat[:blocks].view(-1, NORM_BLOCK), dim=1, dtype=wide))
        if blocks < len(flat):
            norms.append(torch.linalg.vector_norm(flat[blocks:].view(1, -1), dim=1, dtype=wide))
    return torch.cat(norms).double().square().sum()
