"""Records functions of tensors as CUDA graphs, and replays them.

A graph repeats its kernels on the addresses of the recording. So a recorded function copies its arguments into its own
tensors, and returns copies of its results; everything else that it reads or writes must stay where it is. Decisions of
Python code are those of the recording. Communication may be recorded: each rank then replays the same
collectives in the same order. Recording is confined to its thread, because others copy batches and watch collectives
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Given = Tensor | None


class Recorded(Protocol):
    """The recorded operations of a function, to be repeated on the same tensors."""

    def replay(self) -> None:
        """Repeat the operations."""


class Recorder(Protocol):
    """Records functions of tensors."""

    def pool(self) -> Any:
        """A new memory pool, for recordings that are never in use at the same time."""

    def record(self, run: Callable[[], Any], pool: Any) -> Recorded:
        """Record the operations of `run` without executing them."""


class CudaRecorder:
    """Records CUDA graphs, all on one stream: autograd runs a backward pass on the stream of its forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        """A pool of PyTorch's caching allocator."""
        return torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Any], pool: Any) -> Recorded:
        """A CUDA graph of the kernels that `run` launches."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph


class RecordedFunction:
    """A function of tensors, recorded with the shapes of `arguments`; None stays None.

    Args:
        pool: of the recorder, for what the function allocates.
    """

    def __init__(
        self, run: Callable[..., Sequence[Given]], arguments: Sequence[Given], *, recorder: Recorder, pool: Any
    ) -> None:
        self._arguments = [None if x is None else x.detach().clone() for x in arguments]
        self._results: list[Given] = []

        def keep() -> None:
            self._results = [None if x is None else x.detach() for x in run(*self._arguments)]

        self._recorded = recorder.record(keep, pool)

    def __call__(self, *arguments: Given) -> list[Given]:
        """Replay with other arguments of the same shapes."""
        for kept, given in zip(self._arguments, arguments, strict=True):
            assert (kept is None) == (given is None), "recorded with a tensor where there is none now, or the reverse"
            if kept is not None and given is not None:
                kept.data.copy_(given.detach())  # `data`: autograd, which may have saved `kept`, sees no change
        self._recorded.replay()
        return [None if x is None else x.clone() for x in self._results]
