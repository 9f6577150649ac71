"""Passes texts and arrays between two processes through shared memory instead of copying them through a pipe.

pickle (protocol 5) separates the memory of arrays from the rest. A worker writes that memory into a shared buffer, an
unnamed file in memory (memfd); the rest, a few hundred bytes, goes through the pipe; the parent maps the buffer and
gets arrays that are views of it. With pipes only, 16 workers of a fast engine waited half their time for the one
process that reads all pipes. Text that the parent has read reaches the worker in the same way, in the buffer for its
result: through the pipe it would be pickled, and written and read in pieces of 64 KiB. The owner must not reuse a
buffer before its views are released. The memory is freed when the last process closes it.
"""

from __future__ import annotations

import mmap
import os
import pickle
from itertools import accumulate, pairwise
from multiprocessing import reduction
from typing import Any, NamedTuple

from mdata.util import atomic_io

_LEAST_BYTES = 1 << 23  # of a buffer: the result of a chunk of the usual size
_ALIGNMENT = 64  # of each array in a buffer, a cache line


class PickledResult(NamedTuple):
    """The message in the pipe: the pickle, and where in the buffer each array starts and ends."""

    head: bytes
    spans: list[tuple[int, int]]


class SharedBuffer:
    """The parent's end: creates the memory, writes text into it, and reads the result that a worker wrote there.

    Pass `fd` to a process that is being spawned as `SentDescriptor(fd)`.
    """

    def __init__(self) -> None:
        self._open = atomic_io.Descriptor(os.memfd_create("mdata-result", os.MFD_CLOEXEC))
        self._view = memoryview(b"")

    @property
    def fd(self) -> int:
        """The file descriptor."""
        return self._open.fd

    def write(self, data: bytes) -> None:
        """Write a text for `read_text`; the worker reads it before it writes its result.

        Raises:
            OSError: no memory.
        """
        left, start = memoryview(data), 0
        while left:
            written = os.pwrite(self.fd, left, start)
            left, start = left[written:], start + written

    def read(self, result: PickledResult) -> Any:
        """The value that was written; its arrays are read-only views of the buffer."""
        if result.spans and result.spans[-1][1] > len(self._view):
            # Views of an older, smaller map keep it alive.
            self._view = memoryview(mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ))
        return pickle.loads(result.head, buffers=[self._view[start:stop] for start, stop in result.spans])

    def close(self) -> None:
        """Close the descriptor; views stay valid."""
        self._open.close()


def read_text(fd: int, size: int) -> bytes:
    """The bytes that the parent wrote into a buffer."""
    parts: list[bytes] = []
    start = 0
    while start < size:
        parts.append(os.pread(fd, size - start, start))
        assert parts[-1], "the buffer ends before the text"
        start += len(parts[-1])
    return b"".join(parts)  # one part is not copied


def write_arrays(fd: int, value: object) -> PickledResult:
    """Write the arrays of a value into a buffer; returns the rest."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raws = [buffer.raw() for buffer in buffers]
    ends = accumulate((-(-len(raw) // _ALIGNMENT) * _ALIGNMENT for raw in raws), initial=0)
    spans = [(start, start + len(raw)) for (start, _), raw in zip(pairwise(ends), raws, strict=True)]
    size = spans[-1][1] if spans else 0
    if os.fstat(fd).st_size < size:
        # Rounded up to a power of two, so that it is rarely mapped again; unwritten bytes take no memory.
        os.ftruncate(fd, max(_LEAST_BYTES, 1 << (size - 1).bit_length()))
    for (start, _), raw in zip(spans, raws, strict=True):
        while raw:
            written = os.pwrite(fd, raw, start)
            raw, start = raw[written:], start + written
    return PickledResult(head, spans)


class SentDescriptor:
    """A descriptor that can be pickled for a process that is being spawned; `fd` there is the same open file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (reduction.DupFd(self.fd),)


def _received(duplicate: Any) -> SentDescriptor:
    return SentDescriptor(duplicate.detach())
