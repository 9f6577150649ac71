"""CUDA graphs of the passes of a rank's stages: recorded once, then replayed.

A step of small layers, or of layers that tensor parallelism makes small, waits for the host to launch its kernels. A
recorded pass takes one launch. Between recorded passes the host follows the schedule, sends and receives as usual.
Results are bitwise those of passes that are not recorded.

A graph repeats kernels with the addresses and the decisions of its recording, so:
- Passes are recorded for each *slot*. A stage has as many slots as it has microbatches between forward and the end of
  backward; a microbatch takes the lowest free one. What a pass keeps for backward lies in the memory pool of its slot's
  lane. All recordings of a slot share the lane, because no two of them are ever in use at the same time. Passes that
  are computed take a slot too, and its memory, so that they need none beside that of recordings.
- The first microbatch of a step has recordings of its own: the first product of a step overwrites a main gradient, and
  later ones add to it. Each recording remembers this, and each replay checks it.
- Hooks of data parallelism are not recorded. Where ranks share parameters, they gather them beside the first microbatch
  and sum gradients beside the last: recordings of those are cut at the hooks, which each replay calls (with `overlap`
  these microbatches are computed). In between, hooks have nothing to do, unless the memory of sharded gradients or
  parameters moves, which cannot be recorded. plan/check.py lists what else cannot.
- Rows of BERT and T5 have as many real tokens as their text. They are computed in few sizes (run/data.py), each with
  recordings of its own; sizes beyond MOST_SHAPES are computed.

With `overlap` the forward pass of a microbatch runs beside the backward pass of the one before, so that one computes
while the other communicates. Forward passes follow each other, and so do backward passes, so gradients are summed in
the same order as ever: a forward pass only adds to those of the output head, which must not be the embedding.
Recordings of two lanes use communicators of their own, because two replays must not share one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from trainer.kernels.recording import Given, Lane, RecordedFunction, Recorder
from trainer.layers.base import Layer, MainGradients
from trainer.layers.block_hooks import BlockHooks
from trainer.models.stage import Microbatch, Tensors
from trainer.pipeline.passes import LossOptions, Pass

WARMUP_STEPS = 1  # computed without graphs, so that kernels are compiled and communicators exist
MOST_SHAPES = 16  # of microbatches that a stage records; a graph of a thousand kernels holds some MiB of the GPU


class _Shapes(NamedTuple):
    """Of a microbatch: how its values are nested, the shape and dtype of each tensor, and the other values."""

    nested: TreeSpec
    values: tuple[Any, ...]


class _Key(NamedTuple):
    """Everything that a recording of a slot depends on."""

    is_first: bool
    completes: bool  # and hooks then sum its gradients
    loss: LossOptions
    shapes: _Shapes

    @classmethod
    def of(cls, batch: Microbatch, *, is_first: bool, completes: bool, loss: LossOptions) -> _Key:
        """The key of a microbatch."""
        values, nested = tree_flatten(_fields(batch))
        shapes = ((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in values)
        return cls(is_first, completes, loss, _Shapes(nested, tuple(shapes)))


class StageGraphs:
    """The recorded passes of a rank's stages.

    Args:
        recorder: how passes are recorded.
        shared: whether ranks share parameters, so that hooks gather them and sum their gradients.
        overlap: whether passes of two microbatches run beside each other.
        channel: the block records with the communicators of this number.
        most_shapes: of microbatches that a stage records; those of other shapes are computed.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        shared: bool,
        overlap: bool = False,
        channel: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
        most_shapes: int = MOST_SHAPES,
    ) -> None:
        self.recorder, self.shared, self.overlap, self.channel = recorder, shared, overlap, channel
        self.most_shapes, self._steps = most_shapes, 0
        self._slots: dict[int, _Slots] = {}
        self._done: dict[str, Any] = {}  # forward or backward -> the mark of the last replay beside others

    def after_step(self) -> None:
        """Count a training step that has ended."""
        self._steps += 1

    def join(self) -> None:
        """What follows waits for all passes that run beside the current stream."""
        if self._done:
            for slots in self._slots.values():
                for slot in slots.all:
                    slot.lane.join()
            self._done.clear()

    def replay(self, lane: Lane, kind: str, call: Callable[[], list[Given]]) -> list[Given]:
        """Call a recorded function, after the last one of the same kind; with `overlap` on its lane."""
        if not self.overlap:
            return call()
        with lane.beside(self._done.get(kind)):
            results = call()
            self._done[kind] = lane.mark()
        return results

    def take(
        self,
        stage: int,
        make: Callable[[], Pass],
        *,
        batch: Microbatch,
        ends: tuple[bool, bool],
        loss: LossOptions,
        recordable: bool,
    ) -> ReplayedPass | ComputedPass:
        """The pass of a microbatch in a free slot: one that is recorded, or will be now, or is computed.

        Args:
            make: the pass to record or compute.
            ends: whether the microbatch is the first of the stage in a step, and whether it completes its gradients.
            recordable: whether the pass may be recorded if everything else allows it.
        """
        slots = self._slots.setdefault(stage, _Slots())
        slot = slots.take(self.recorder)
        key = _Key.of(batch, is_first=ends[0], completes=self.shared and ends[1], loss=loss)
        hooked = self.shared and any(ends)
        # The number of pairs differs between microbatches.
        if recordable and batch.pairs is None and not (hooked and self.overlap) and self._records(slots, key):
            if key not in slot.passes:
                slot.passes[key] = ReplayedPass(make(), self, slot, ends=ends if self.shared else (False, False))
            return slot.passes[key]
        return ComputedPass(make(), self, slot, is_new=slot.is_new((key, recordable)))

    def _records(self, slots: _Slots, key: _Key) -> bool:
        """Whether there are recordings for the key, or will be now."""
        if key.shapes not in slots.shapes and len(slots.shapes) == self.most_shapes:
            return False
        if self._steps < WARMUP_STEPS or key not in slots.computed:
            slots.computed.add(key)  # this compiles kernels, which must not happen in a recording
            return False
        slots.shapes.add(key.shapes)
        return True


class _Slots:
    """Of one stage: what was computed once, the shapes that are recorded, and its slots, the free ones as a heap."""

    def __init__(self) -> None:
        self.computed: set[_Key] = set()
        self.shapes: set[_Shapes] = set()
        self.all: list[_Slot] = []
        self.free: list[int] = []

    def take(self, recorder: Recorder) -> _Slot:
        """The lowest free slot, or a new one."""
        if self.free:
            return self.all[heappop(self.free)]
        self.all.append(_Slot(len(self.all), recorder(), release=partial(heappush, self.free, len(self.all))))
        return self.all[-1]


class _Slot:
    """The place of one microbatch: its lane, and the passes that are recorded there.

    Args:
        number: among the slots of the stage. release: called when the microbatch no longer needs the slot.
    """

    def __init__(self, number: int, lane: Lane, *, release: Callable[[], None]) -> None:
        self.number, self.lane, self.release = number, lane, release
        self.passes: dict[_Key, ReplayedPass] = {}
        self._seen: set[Any] = set()

    def is_new(self, kind: Any) -> bool:
        """Whether this is the first time that a pass of this kind is computed here."""
        is_new = kind not in self._seen
        self._seen.add(kind)
        return is_new


class ComputedPass:
    """A pass that is computed in the memory of a slot, after all that runs beside the current stream.

    Recordings of the slot may write to that memory. So results are copied; and where the first pass of its kind has
    left something there, such as a table for rows of its length, the slot's recordings are made anew.
    """

    def __init__(self, way: Pass, graphs: StageGraphs, slot: _Slot, *, is_new: bool) -> None:
        self._pass, self._graphs, self._slot = way, graphs, slot
        self._held = slot.lane.held() if is_new and slot.passes else None

    def forward(self, received: Tensors, batch: Microbatch, scale: Tensor | None) -> tuple[Tensors, Tensor | None]:
        """See Pass.forward."""
        with self._inside():
            outputs, totals = self._pass.forward(received, batch, scale)
        results = _copies(outputs), None if totals is None else totals.clone()
        del outputs, totals
        if not torch.is_grad_enabled():
            self._end()
        return results

    def backward(self, gradients: Tensors) -> Tensors:
        """See Pass.backward."""
        found = self._gradients(self._pass.backward, gradients)
        self._end()
        return found

    def input_gradients(self, gradients: Tensors) -> Tensors:
        """See Pass.input_gradients."""
        return self._gradients(self._pass.input_gradients, gradients)

    def weight_gradients(self) -> None:
        """See Pass.weight_gradients."""
        with self._inside():
            self._pass.weight_gradients()
        self._end()

    def _gradients(self, run: Callable[[Tensors], Tensors], gradients: Tensors) -> Tensors:
        with self._inside():
            found = run(gradients)
        return _copies(found)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """With the slot's communicators, which exist when the slot is recorded."""
        self._graphs.join()
        with self._graphs.channel(self._slot.number), self._slot.lane.inside():
            yield

    def _end(self) -> None:
        if self._held is not None and self._slot.lane.held() > self._held:
            self._slot.passes.clear()
        self._slot.release()


class ReplayedPass:
    """A pass whose methods are recorded at their first call, and replayed in that and every later call.

    Args:
        ends: whether hooks gather parameters beside its forward pass, and sum gradients beside its backward pass.
    """

    def __init__(self, way: Pass, graphs: StageGraphs, slot: _Slot, *, ends: tuple[bool, bool]) -> None:
        self._pass, self._graphs, self._slot = way, graphs, slot
        self._hooks = _CuttingHooks(way.stage, slot.lane, ends=ends)  # while recording
        self._forward: _Function | None = None
        self._backward: _Function | None = None
        self._weights: _Function | None = None

    def forward(self, received: Tensors, batch: Microbatch, scale: Tensor | None) -> tuple[Tensors, Tensor | None]:
        """See Pass.forward."""
        if preparing := [layer for layer in self._pass.layers if layer.prepares]:
            self._hooks.wait_for_parameters()
            for layer in preparing:
                layer.prepare()
        values, nested = tree_flatten(_fields(batch))
        inputs = (*received, *(x if isinstance(x, Tensor) else None for x in values), scale)

        def call() -> list[Given]:
            if self._forward is None:
                count = len(received)

                def run(*tensors: Any) -> tuple[Given, ...]:
                    pairs = zip(tensors[count:-1], values, strict=True)
                    rows = tree_unflatten([value if x is None else x for x, value in pairs], nested)
                    outputs, totals = self._pass.forward(
                        tensors[:count], dataclasses.replace(batch, **rows), tensors[-1]
                    )
                    return (totals, *outputs)

                self._forward = self._function(run, inputs)
            return self._forward(*inputs)

        totals, *outputs = self._graphs.replay(self._slot.lane, "forward", call)
        return tuple(x for x in outputs if x is not None), totals

    def backward(self, gradients: Tensors) -> Tensors:
        """See Pass.backward."""
        found = self._gradients(self._pass.backward, gradients)
        self._slot.release()
        return found

    def input_gradients(self, gradients: Tensors) -> Tensors:
        """See Pass.input_gradients."""
        return self._gradients(self._pass.input_gradients, gradients)

    def weight_gradients(self) -> None:
        """See Pass.weight_gradients."""

        def call() -> list[Given]:
            if self._weights is None:

                def run() -> tuple[()]:
                    self._pass.weight_gradients()
                    return ()

                self._weights = self._function(run, ())
            return self._weights()

        self._graphs.replay(self._slot.lane, "backward", call)
        self._slot.release()

    def _gradients(self, run: Callable[[Tensors], Tensors], gradients: Tensors) -> Tensors:
        def call() -> list[Given]:
            if self._backward is None:
                self._backward = self._function(lambda *tensors: run(tensors), gradients)
            return self._backward(*gradients)

        return tuple(x for x in self._graphs.replay(self._slot.lane, "backward", call) if x is not None)

    def _function(self, run: Callable[..., Any], inputs: Sequence[Given]) -> _Function:
        layers, stage = self._pass.layers, self._pass.stage
        hooks, stage.hooks = stage.hooks, self._hooks
        uncut = not any(self._hooks.ends)
        try:
            with (
                self._graphs.channel(self._slot.number),
                _own_leaves(layers),
                # A recording is cut in the thread that began it, and autograd has threads of its own.
                torch.autograd.set_multithreading_enabled(uncut),
            ):
                return _Function(run, inputs, lane=self._slot.lane, layers=layers)
        finally:
            stage.hooks = hooks


class _CuttingHooks(BlockHooks):
    """While a pass is recorded: cuts the recording where the stage's own hooks have something to do."""

    def __init__(self, stage: Any, lane: Lane, *, ends: tuple[bool, bool]) -> None:
        super().__init__()
        self.ends, self._stage, self._lane = ends, stage, lane

    def wait_for_parameters(self) -> None:
        """Before a replay, for what needs all of them."""
        if self.ends[0]:
            for block in self._stage.hooked:
                self._stage.hooks.before_forward(block)

    def before_forward(self, block: int, *, adds: bool = False) -> None:
        """See BlockHooks."""
        if self.ends[0]:
            self._lane.cut(lambda: self._stage.hooks.before_forward(block, adds=adds))

    def after_gradients(self, block: int) -> None:
        """See BlockHooks."""
        if self.ends[1]:
            self._lane.cut(lambda: self._stage.hooks.after_gradients(block))


class _Function:
    """A recorded part of a pass; each replay repeats its decisions about main gradients."""

    def __init__(
        self,
        run: Callable[..., Sequence[Given]],
        arguments: Sequence[Given],
        *,
        lane: Lane,
        layers: Sequence[Layer],
    ) -> None:
        with _decisions(layers) as made:
            self._recorded = RecordedFunction(run, arguments, lane=lane)
        self._decisions = made
        self._is_new = True

    def __call__(self, *arguments: Given) -> list[Given]:
        if not self._is_new:  # the recording itself has made the decisions
            for main, (overwritten, added) in self._decisions.items():
                main.repeat(overwritten=overwritten, added=added)
        self._is_new = False
        return self._recorded(*arguments)


@contextmanager
def _own_leaves(layers: Sequence[Layer]) -> Iterator[None]:
    """In this block the layers' parameters are leaves of autograd that no other pass has, on the same memory.

    A leaf belongs to the stream of the first pass that uses it, and every backward pass waits for the streams of its
    leaves: a recording must not wait for a stream that is not recorded.
    """
    parameters = [(layer, name, value) for layer in layers for name, value in layer.named_parameters(recurse=False)]
    for layer, name, value in parameters:
        setattr(layer, name, nn.Parameter(value.data))
    try:
        yield
    finally:
        for layer, name, value in parameters:
            setattr(layer, name, value)


@contextmanager
def _decisions(layers: Sequence[Layer]) -> Iterator[dict[MainGradients, tuple[frozenset[str], frozenset[str]]]]:
    """For each layer, the names of main gradients that this block overwrites, and of those that it only adds to."""
    mains = list(dict.fromkeys(layer.main_gradients for layer in layers))
    made: dict[MainGradients, tuple[frozenset[str], frozenset[str]]] = {}
    for main in mains:
        main.decisions = []
    try:
        yield made
    finally:
        for main in mains:
            taken, main.decisions = main.decisions or [], None
            overwritten = frozenset(name for name, stale in taken if stale)
            if taken:
                made[main] = overwritten, frozenset(name for name, _ in taken) - overwritten


def _copies(tensors: Tensors) -> Tensors:
    return tuple(tensor.clone() for tensor in tensors)


def _fields(batch: Microbatch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
