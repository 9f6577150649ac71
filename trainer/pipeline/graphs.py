"""CUDA graphs of the passes of a rank's stages: recorded once, then replayed.

A step of small layers, or of layers that tensor parallelism makes small, waits for the host to launch its kernels. A
recorded pass takes one launch. Between recorded passes the host follows the schedule, sends and receives as usual.
Results are bitwise those of passes that are not recorded.

A graph repeats kernels with the addresses and the decisions of its recording, so:
- Passes are recorded for each *slot*. A stage has as many slots as it has microbatches between forward and the end of
  backward; a microbatch takes the lowest free one. What a pass keeps for backward lies in the memory pool of its slot's
  lane. All recordings of a slot share the lane, because no two of them are ever in use at the same time.
- The first microbatch of a step has recordings of its own: the first product of a step overwrites a main gradient, and
  later ones add to it. Each recording remembers this, and each replay checks it.
- Hooks of data parallelism are not recorded. Where ranks share parameters, they gather them beside the first microbatch
  and sum gradients beside the last: those two are computed. In between, hooks have nothing to do, unless the memory of
  sharded gradients or parameters moves, which cannot be recorded. plan/check.py lists what else cannot.
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
    loss: LossOptions
    shapes: _Shapes


class StageGraphs:
    """The recorded passes of a rank's stages.

    Args:
        recorder: how passes are recorded.
        whole_steps: whether the first and the last microbatch of a step are recorded too: no ranks share parameters.
        overlap: whether passes of two microbatches run beside each other.
        channel: the block records with the communicators of this number.
        most_shapes: of microbatches that a stage records; those of other shapes are computed.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        whole_steps: bool,
        overlap: bool = False,
        channel: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
        most_shapes: int = MOST_SHAPES,
    ) -> None:
        self.recorder, self.whole_steps, self.overlap, self.channel = recorder, whole_steps, overlap, channel
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
                for lane in slots.lanes:
                    lane.join()
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
        self, stage: int, make: Callable[[], Pass], *, batch: Microbatch, ends: tuple[bool, bool], loss: LossOptions
    ) -> ReplayedPass | None:
        """A pass that is recorded, or will be now, for a microbatch; None: it must be computed.

        Args:
            make: the pass to record.
            ends: whether the microbatch is the first of the stage in a step, and whether it completes its gradients.
        """
        if batch.pairs is not None or (any(ends) and not self.whole_steps):
            return None  # the number of pairs differs between microbatches
        values, nested = tree_flatten(_fields(batch))
        shapes = _Shapes(nested, tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in values))
        key = _Key(ends[0], loss, shapes)
        slots = self._slots.setdefault(stage, _Slots())
        if shapes not in slots.shapes and len(slots.shapes) == self.most_shapes:
            return None
        if self._steps < WARMUP_STEPS or key not in slots.computed:
            slots.computed.add(key)  # this compiles kernels, which must not happen in a recording
            return None
        slots.shapes.add(shapes)
        if not slots.free:
            heappush(slots.free, len(slots.passes))
            slots.passes.append({})
            slots.lanes.append(self.recorder())
        slot = heappop(slots.free)
        passes = slots.passes[slot]
        if key not in passes:
            release = partial(heappush, slots.free, slot)
            passes[key] = ReplayedPass(make(), self, lane=slots.lanes[slot], slot=slot, release=release)
        return passes[key]


class _Slots:
    """Of one stage: what was computed once, the shapes that are recorded, recorded passes by slot, the slots' lanes,
    and the free slots as a heap.
    """

    def __init__(self) -> None:
        self.computed: set[_Key] = set()
        self.shapes: set[_Shapes] = set()
        self.passes: list[dict[_Key, ReplayedPass]] = []
        self.lanes: list[Lane] = []
        self.free: list[int] = []


class ReplayedPass:
    """A pass whose methods are recorded at their first call, and replayed in that and every later call.

    Args:
        way: the pass to record. slot: its number. release: called when the microbatch no longer needs its slot.
    """

    def __init__(self, way: Pass, graphs: StageGraphs, *, lane: Lane, slot: int, release: Callable[[], None]) -> None:
        self.release = release
        self._pass, self._graphs, self._lane, self._slot = way, graphs, lane, slot
        self._hooks = BlockHooks()  # these do nothing; used while recording
        self._forward: _Function | None = None
        self._backward: _Function | None = None
        self._weights: _Function | None = None

    def forward(self, received: Tensors, batch: Microbatch, scale: Tensor | None) -> tuple[Tensors, Tensor | None]:
        """See Pass.forward."""
        for layer in self._pass.layers:
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

        totals, *outputs = self._graphs.replay(self._lane, "forward", call)
        return tuple(x for x in outputs if x is not None), totals

    def backward(self, gradients: Tensors) -> Tensors:
        """See Pass.backward."""
        return self._gradients(self._pass.backward, gradients)

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

        self._graphs.replay(self._lane, "backward", call)

    def _gradients(self, run: Callable[[Tensors], Tensors], gradients: Tensors) -> Tensors:
        def call() -> list[Given]:
            if self._backward is None:
                self._backward = self._function(lambda *tensors: run(tensors), gradients)
            return self._backward(*gradients)

        return tuple(x for x in self._graphs.replay(self._lane, "backward", call) if x is not None)

    def _function(self, run: Callable[..., Any], inputs: Sequence[Given]) -> _Function:
        layers, stage = self._pass.layers, self._pass.stage
        hooks, stage.hooks = stage.hooks, self._hooks
        try:
            with self._graphs.channel(self._slot), _own_leaves(layers):
                return _Function(run, inputs, lane=self._lane, layers=layers)
        finally:
            stage.hooks = hooks


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


def _fields(batch: Microbatch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
