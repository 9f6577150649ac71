"""A save in the background: a copy of the state on the host, and the thread that writes it while training goes on.

`HostCopies` takes the copy; on a GPU into pinned memory on a stream of its own, and `before_update` lets the next
update wait for it, so that the forward and backward passes in between overlap with it. `BackgroundSave` is one save of
one rank. It calls no collective: rank 0 waits for the files of the others. Its owner, run/saving.py, checks `error` and
`committed` and decides what to do.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import Tensor

from mdata import MdataError, ResourceError
from mdata.errors import explain_os_error
from trainer.checkpoint.rank_file import OwnedState
from trainer.checkpoint.save import Target, commit, missing_parts, write_part
from trainer.errors import rank_here

LONGEST_PAUSE_S = 0.5  # between looks for files; on a shared file system each costs a message


class HostCopies:
    """A copy, in the host's memory, of what a rank stores; the next copy uses the same memory."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def take(self, shard: OwnedState, state: Mapping[str, Tensor]) -> tuple[OwnedState, dict[str, Tensor]]:
        """Begin to copy the parts that the rank stores; the result may be read after `wait`."""
        packed = OwnedState({name: shard.owned[name].packed() for name in state}, shard.index)
        for name, tensor in state.items():
            held, size = self._held.get(name), packed.owned[name].size
            if held is None or (held.numel(), held.dtype) != (size, tensor.dtype):
                self._held[name] = _host_memory(size, like=tensor)
        if any(tensor.is_cuda for tensor in state.values()):
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._copy(state, shard, packed=packed)
                self._copied = torch.cuda.Event()
                self._copied.record()
        else:
            self._copy(state, shard, packed=packed)
        return packed, dict(self._held)

    def _copy(self, state: Mapping[str, Tensor], shard: OwnedState, *, packed: OwnedState) -> None:
        for name, tensor in state.items():
            for source, target in zip(shard.owned[name].spans(), packed.owned[name].spans(), strict=True):
                self._held[name][target].copy_(tensor[source], non_blocking=True)

    def wait(self) -> None:
        """Wait on the host until the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def before_update(self) -> None:
        """Let what is launched next on the current stream wait for the copy; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)


def _host_memory(size: int, *, like: Tensor) -> Tensor:
    """Memory for a copy; pinned if the tensor is on a GPU.

    PyTorch's own pinned memory has the next power of two as its size, and is touched by one thread: 5.5 s for 6 GiB on
    the host of an H200, where touching it by all threads and registering it took 0.8 s.
    """
    held = torch.zeros(size, dtype=like.dtype)
    if like.is_cuda and held.nbytes:
        cudart, address = torch.cuda.cudart(), held.data_ptr()
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, held.nbytes, 0)))
        weakref.finalize(held.untyped_storage(), cudart.cudaHostUnregister, address).atexit = False
    return held


class BackgroundSave:
    """One rank's part of one save, in a thread; on rank 0 also the commit.

    Args:
        target: where it goes. place: this rank's number, and how many ranks write.
        shard, state: what this rank stores, on the host, not shared with other writers. ready: waits for the copy.
        after: called on rank 0 once the checkpoint exists.

    Attributes:
        written: set when this rank's files exist, or it has failed. committed: on rank 0, whether the checkpoint
            exists. seconds: duration of the save.
    """

    def __init__(
        self,
        target: Target,
        place: tuple[int, int],
        *,
        shard: OwnedState,
        state: Mapping[str, Tensor],
        ready: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self.target, self._place = target, place
        self._shard, self._state, self._ready, self._after = shard, state, ready, after
        self.written = threading.Event()
        self.committed = False
        self.seconds = 0.0
        self._began = time.perf_counter()
        self._cancelled = threading.Event()
        self._patience_until: float | None = None
        threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work = threads.submit(self._run)
        self._work.add_done_callback(lambda work: self.written.set())
        threads.shutdown(wait=False)

    @property
    def ended(self) -> bool:
        """Whether the save has ended."""
        return self._work.done()

    @property
    def error(self) -> MdataError | None:
        """Why this rank failed; None: it has not failed so far."""
        error = self._work.exception() if self._work.done() else None
        rank = self._place[0]
        if error is None or isinstance(error, MdataError):
            return error
        if isinstance(error, OSError):
            return explain_os_error(error, f"{rank_here(rank)} writing a checkpoint")
        # A bug, or no memory; in a thread it would be lost.
        return ResourceError(f"{rank_here(rank)} could not write a checkpoint", found=repr(error)[:200])

    def join(self) -> None:
        """Wait for the end; signal handlers may run meanwhile."""
        wait([self._work])

    def cancel(self) -> None:
        """Stop waiting for the files of other ranks; this rank finishes its own."""
        self._cancelled.set()

    def hurry(self, patience_s: float) -> None:
        """Wait at most this many more seconds for the files of other ranks."""
        self._patience_until = time.monotonic() + patience_s

    def _run(self) -> None:
        rank, num_ranks = self._place
        self._ready()
        write_part(self.target, rank, shard=self._shard, state=self._state)
        self.written.set()
        if rank == 0 and self._wait_for_parts(num_ranks):
            commit(self.target, num_ranks)
            self.committed = True
            self.seconds = time.perf_counter() - self._began
            self._after()

    def _wait_for_parts(self, num_ranks: int) -> bool:
        """Wait until all ranks have written; False: the save was cancelled."""
        pause = 0.005
        while missing_parts(self.target, num_ranks):
            if self._patience_until is not None and time.monotonic() > self._patience_until:
                return False
            if self._cancelled.wait(pause):
                return False
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return True
