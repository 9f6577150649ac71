"""Results that travel without being copied twice: arrays through memory that two processes share.

pickle (protocol 5) gives the memory of arrays apart from the rest. The worker writes that memory into a slot,
a file without a name that lives in memory only (memfd); the rest, a few hundred bytes, goes through the pipe;
the parent maps the slot and gets arrays that are views of it. Through the pipe alone, 16 workers of a fast
engine waited half their time for the one process that reads all pipes. A slot is written again only after its
views were given back, which is its owner's to see to; it vanishes with the processes that have it open.
"""

from __future__ import annotations

import mmap
import os
import pickle
from itertools import accumulate, pairwise
from multiprocessing import reduction
from typing import Any, NamedTuple

from mdata.util import atomic_io

_LEAST_BYTES = 1 << 23  # of a slot: what a piece of the usual size gives
_ALIGNMENT = 64  # of each array in a slot: numpy's and the processor's liking


class Packed(NamedTuple):
    """What goes through the pipe: the pickle, and where in the slot each array starts and ends."""

    head: bytes
    spans: list[tuple[int, int]]


class Slot:
    """The parent's end: makes the memory, and reads what a worker packed into it.

    Hand `fd` to a process that is being spawned as `Sent(fd)`.
    """

    def __init__(self) -> None:
        self._open = atomic_io.Descriptor(os.memfd_create("mdata-result", os.MFD_CLOEXEC))
        self._view = memoryview(b"")

    @property
    def fd(self) -> int:
        """Its descriptor."""
        return self._open.fd

    def unpack(self, packed: Packed) -> Any:
        """What was packed; its arrays are read-only views of the slot."""
        if packed.spans and packed.spans[-1][1] > len(self._view):
            # Views of an older, smaller map keep that map alive.
            self._view = memoryview(mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ))
        return pickle.loads(packed.head, buffers=[self._view[start:stop] for start, stop in packed.spans])

    def close(self) -> None:
        """Let go of it; views stay valid."""
        self._open.close()


def pack(fd: int, value: object) -> Packed:
    """Write the arrays of a value into the slot; the rest is returned."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raws = [buffer.raw() for buffer in buffers]
    ends = accumulate((-(-len(raw) // _ALIGNMENT) * _ALIGNMENT for raw in raws), initial=0)
    spans = [(start, start + len(raw)) for (start, _), raw in zip(pairwise(ends), raws, strict=True)]
    size = spans[-1][1] if spans else 0
    if os.fstat(fd).st_size < size:
        # To the next power of two, so that it is seldom mapped anew; what is not written takes no memory.
        os.ftruncate(fd, max(_LEAST_BYTES, 1 << (size - 1).bit_length()))
    for (start, _), raw in zip(spans, raws, strict=True):
        while raw:
            written = os.pwrite(fd, raw, start)
            raw, start = raw[written:], start + written
    return Packed(head, spans)


class Sent:
    """A descriptor on its way to a process that is being spawned; there `fd` is the same open file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[object, ...]:
        return _received, (reduction.DupFd(self.fd),)


def _received(duplicate: Any) -> Sent:
    return Sent(duplicate.detach())
