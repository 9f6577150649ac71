"""Records functions of tensors as CUDA graphs, and replays them.

A graph repeats its kernels on the addresses of the recording. So a recorded function copies its arguments into its own
tensors, and returns copies of its results; everything else that it reads or writes must stay where it is. Decisions of
Python code are those of the recording. Communication may be recorded: each rank then replays the same
collectives in the same order. Recording is confined to its thread, because others copy batches and watch collectives
meanwhile. What must not be recorded, such as communication that later work only waits for, cuts a recording in two
parts, between which each replay calls it.

Recordings belong to lanes. Those of one lane share a memory pool and are never in use at the same time; those of two
lanes may run beside each other, because each lane has a stream, with cuBLAS's workspace of that stream. What is
computed in the place of a recording takes its memory from the lane, too: the memory of recordings serves nothing else.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.parallel.world import reset_before_leaving

Given = Tensor | None


class Recorded(Protocol):
    """The recorded operations of a function, to be repeated on the same tensors."""

    def replay(self) -> None:
        """Repeat the operations."""


class Lane(Protocol):
    """Records functions of tensors that are never in use at the same time."""

    def record(self, run: Callable[[], Any]) -> Recorded:
        """Record the operations of `run` without executing them."""

    def cut(self, between: Callable[[], None]) -> None:
        """Inside `run`, in its thread: each replay calls `between` here, which is not called now."""

    @contextmanager
    def beside(self, after: Any) -> Iterator[None]:
        """Run the operations of the block beside those that the current stream gets from here on.

        Args:
            after: the `mark` that they wait for, too; None: only for what the current stream has got so far.
        """

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Compute the block in the lane's memory, while none of its recordings is in use; what follows waits for it.

        What is allocated here and kept does not keep its values: replays of earlier recordings may write to it.
        """

    def held(self) -> int:
        """Bytes of the lane's memory that are in use now: by recordings, and by tensors that exist."""

    def mark(self) -> Any:
        """What the lane has been given so far."""

    def join(self) -> None:
        """The current stream waits for the lane."""


Recorder = Callable[[], Lane]  # makes a new lane


class _Parts(list[Callable[[], None]]):
    """What a replay calls, in order."""

    def replay(self) -> None:
        """See Recorded.replay."""
        for part in self:
            part()


class CudaLane:
    """Records CUDA graphs on a stream: autograd runs a backward pass on the stream of its forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._pool = device, torch.cuda.Stream(device), torch.cuda.MemPool()
        # PyTorch counts the graphs of a pool, and fails to record where all of them are gone, as when recordings are
        # made anew. One without operations stays.
        self._first = self.record(lambda: None)

    def record(self, run: Callable[[], Any]) -> Recorded:
        """CUDA graphs of the kernels that `run` launches: one, and one more for each cut."""
        torch.cuda.synchronize(self._device)
        gc.collect()  # nothing is freed in the middle of a recording
        torch.cuda.empty_cache()
        self._parts = parts = _Parts()
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                run()
            finally:
                self._end()
        return parts

    def cut(self, between: Callable[[], None]) -> None:
        """See Lane.cut."""
        self._end()
        self._parts.append(between)
        self._begin()

    def _begin(self) -> None:
        handle: Any = self._pool.id
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=handle, capture_error_mode="thread_local")

    def _end(self) -> None:
        with warnings.catch_warnings():  # nothing may be launched between two cuts
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            self._graph.capture_end()
        reset_before_leaving(self._graph)  # it may outlive its lane
        self._parts.append(self._graph.replay)

    @contextmanager
    def beside(self, after: Any) -> Iterator[None]:
        """See Lane.beside."""
        self._stream.wait_stream(torch.cuda.current_stream())
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def inside(self) -> Iterator[None]:
        """See Lane.inside. Backward passes run in the caller's thread, because a pool serves one thread."""
        with (
            self.beside(None),
            torch.cuda.use_mem_pool(self._pool, self._device),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
        self.join()

    def held(self) -> int:
        """See Lane.held."""
        return sum(segment["allocated_size"] for segment in self._pool.snapshot())

    def mark(self) -> Any:
        """An event of the stream."""
        return self._stream.record_event()

    def join(self) -> None:
        """See Lane.join."""
        torch.cuda.current_stream().wait_stream(self._stream)


class RecordedFunction:
    """A function of tensors, recorded with the shapes of `arguments`; None stays None."""

    def __init__(self, run: Callable[..., Sequence[Given]], arguments: Sequence[Given], *, lane: Lane) -> None:
        self._arguments = [None if x is None else x.detach().clone() for x in arguments]
        self._results: list[Given] = []

        def keep() -> None:
            self._results = [None if x is None else x.detach() for x in run(*self._arguments)]

        self._recorded = lane.record(keep)

    def __call__(self, *arguments: Given) -> list[Given]:
        """Replay with other arguments of the same shapes."""
        for recorded, argument in zip(self._arguments, arguments, strict=True):
            assert (recorded is None) == (argument is None), (
                "recorded with a tensor where there is none now, or the reverse"
            )
            if recorded is not None and argument is not None:
                recorded.data.copy_(
                    argument.detach()
                )  # `data`: autograd, which may have saved `recorded`, sees no change
        self._recorded.replay()
        return [None if x is None else x.clone() for x in self._results]
