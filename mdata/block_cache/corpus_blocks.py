"""The blocks of one corpus on this node: read if they are present, otherwise fetched by threads.

A block is fetched by the holder of its claim, so once per node, and is present after it was compared with its hash,
written and synced. Reading takes no lock: tokens are copied, and copied again if one of their blocks changed meanwhile.
Blocks left by a killed process, or by earlier users of the cache, are used again if they match their hashes. A forked
process, such as a worker of torch's DataLoader, cannot use its parent's connections: the storage library has threads of
its own, which do not survive a fork, and it would wait for them for ever. So it starts a new interpreter, which opens
the same cache and receives the blocks to fetch through a pipe, and which ends when the pipe is closed, also if its
parent was killed. Not done here: which tokens are in which block, and making the cache's folder.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mdata.block_cache.block_layout import BlockLayout
from mdata.block_cache.block_table import BLOCKS, PRESENT, STALE, WRITING, BlockTable
from mdata.block_cache.cache_room import CacheRoom
from mdata.errors import DamageError, MdataError, ResourceError, os_errors_named
from mdata.indexed.mapped_files import map_bytes
from mdata.indexed.pair_format import BLOCK_BYTES
from mdata.object_storage.address import Address
from mdata.object_storage.facts import ObjectFacts
from mdata.util.arrays import Int64s
from mdata.util.background import ClosedError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


THREADS = 8
HASH_BYTES = 32
_ATTEMPTS = 4


@dataclass(frozen=True)
class BlockSource:
    """Where the blocks of a corpus come from.

    Attributes:
        layout: which block is which.
        objects: the .bin of each shard. hashes: for each shard the file of its block hashes, already checked.
    """

    layout: BlockLayout
    objects: Sequence[Address]
    hashes: Sequence[Path]


class CorpusBlocks:
    """Blocks that many readers share.

    Args:
        folder: of their table, made by `make_table`; its parent is the cache.
        source: where they come from.
        most: limit on the blocks of all corpora in the cache; None: as the disk allows.
        user: kept open as long as the blocks are in use.

    Raises:
        OSError: what the file system said.
    """

    def __init__(self, folder: Path, source: BlockSource, *, most: int | None, user: object = None) -> None:
        self.source, self.layout = source, source.layout
        self._folder, self.most, self._user = folder, most, user
        self.table = BlockTable(folder)
        self._room = CacheRoom(folder.parent, most)
        self._made_in: int | None = os.getpid()
        self._lock = threading.Lock()
        self._asked: dict[int, Future[int]] = {}
        self._facts: dict[int, ObjectFacts] = {}
        self._forked: tuple[int, FetchProcess] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return _opened, (self._folder, self.source, self.most)

    @property
    def at_once(self) -> int:
        """The most blocks that one reader asks for at the same time, so that others have room."""
        return self.layout.num_blocks if self.most is None else max(1, self.most // 8)

    def capacity(self) -> int:
        """How many blocks of all corpora fit in the cache."""
        return self._room.capacity()

    @cached_property
    def mapped(self) -> NDArray[np.uint8]:
        """All blocks as a read-only map, of which only what `read` allows may be read."""
        return map_bytes(self._folder / BLOCKS)

    def read(self, blocks: Int64s, copy: Callable[[], None]) -> bool:
        """Run `copy`, which reads these blocks; False: others were evicted meanwhile, again and again.

        Raises:
            DamageError: a block in storage does not match the manifest. UsageError: the object changed, or no access.
            ResourceError: the storage does not answer, or the disk is full.
        """
        table = self.table
        for _ in range(_ATTEMPTS):
            before = table.entries[blocks]
            lacking = table.lacking(blocks, before)
            if len(lacking):
                self.bring(lacking)
                before = table.entries[blocks]
                if len(table.lacking(blocks, before)):
                    continue
            table.touch(blocks)
            copy()
            if np.array_equal(table.entries[blocks], before):
                return True
        return False

    def bring(self, blocks: Int64s) -> int:
        """Wait until blocks are present; the bytes that were fetched for it.

        Raises:
            as `read`.
        """
        if os.getpid() != self._made_in:
            return self._other_process().bring(blocks.tolist())
        waiting = [self._future(block) for block in blocks.tolist()]
        wait(waiting)  # so that after an error nothing goes on
        return sum(future.result() for future in waiting)

    def ask_for(self, blocks: Int64s) -> list[Future[int]]:
        """Start to fetch the blocks that are not present, without waiting; a forked process does nothing."""
        if os.getpid() != self._made_in:
            return []
        lacking = self.table.lacking(blocks, self.table.entries[blocks])
        return [self._future(block) for block in lacking.tolist()]

    def _future(self, block: int) -> Future[int]:
        with self._lock:
            future = self._asked.get(block)
            if future is None:
                future = self._asked[block] = self._pool.submit(self._fetch_once, block)
        return future

    def _fetch_once(self, block: int) -> int:
        try:
            return self._fetch(block)
        finally:
            with self._lock:  # the next request looks again
                del self._asked[block]

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="mdata-blocks")

    def _other_process(self) -> FetchProcess:
        if self._forked is None or self._forked[0] != os.getpid():
            self._forked = os.getpid(), FetchProcess(self)
        return self._forked[1]

    def _fetch(self, block: int) -> int:
        """Make a block present; the bytes that had to be fetched."""
        if not threading.main_thread().is_alive():
            raise ClosedError("the program ends")
        table = self.table
        with os_errors_named(f"keeping a block in {self._folder}"), table.claim(block):
            state = table.state(block)
            if state == PRESENT:
                return 0
            _, start, stop = self.layout.place(block)
            if state in (STALE, WRITING) and self._is(block, table.read(block, stop - start)):
                table.set(block, PRESENT)
                return 0
            data = self._from_storage(block)
            self._room.put(table, block, data=data)
        return len(data)

    def _from_storage(self, block: int) -> bytes:
        from mdata.object_storage.reading import look_at_object, read_range

        shard, start, stop = self.layout.place(block)
        facts = self._facts.get(shard)
        if facts is None:
            facts = self._facts[shard] = look_at_object(self.source.objects[shard], self._store)
            expected = int(self.layout.shard_bytes[shard])
            if facts.size_bytes != expected:
                raise _not_as_written(facts.address, f"{facts.size_bytes} bytes", f"{expected} bytes")
        data = read_range(facts, start, stop=stop, store=self._store)
        if not self._is(block, data):
            number = start // BLOCK_BYTES
            raise _not_as_written(facts.address, f"block {number}: hash {blake3(data).hexdigest()}", "another hash")
        return data

    @cached_property
    def _store(self) -> ObjectStore:
        from mdata.object_storage.stores import open_store

        return open_store(self.source.objects[0])

    def _is(self, block: int, data: bytes) -> bool:
        shard, start, stop = self.layout.place(block)
        with self.source.hashes[shard].open("rb") as file:
            file.seek(start // BLOCK_BYTES * HASH_BYTES)
            return len(data) == stop - start and blake3(data).digest() == file.read(HASH_BYTES)


def _opened(folder: Path, source: BlockSource, most: int | None) -> CorpusBlocks:
    made = CorpusBlocks(folder, source, most=most)
    if "obstore" in sys.modules:  # used by this process before, or by the one that it was forked from
        made._made_in = None
    return made


def _not_as_written(address: Address, found: str, expected: str) -> DamageError:
    return DamageError(
        f"{address} does not match the manifest", found=found, expected=expected, fix="upload the corpus again"
    )


class FetchProcess:
    """The other process; threads use it one after another."""

    def __init__(self, blocks: CorpusBlocks) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        assert self._process.stdin is not None and self._process.stdout is not None, "pipes were asked for"
        self._to, self._from = self._process.stdin, self._process.stdout
        weakref.finalize(self, self._to.close)
        self._send(blocks)

    def bring(self, blocks: list[int]) -> int:
        """As `CorpusBlocks.bring`.

        Raises:
            as there. ResourceError: the process has ended.
        """
        with self._lock:
            try:
                self._send(blocks)
                answer: int | MdataError = pickle.load(self._from)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                raise ResourceError(
                    "the process that fetches blocks from storage has ended",
                    found=f"exit code {self._process.poll()}",
                    fix="run again; the messages of that process are above",
                ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _send(self, message: object) -> None:
        pickle.dump(message, self._to, pickle.HIGHEST_PROTOCOL)
        self._to.flush()


def serve() -> None:
    """Answer requests until the pipe is closed."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print, which must not become an answer
    blocks: CorpusBlocks = pickle.load(asked)
    while True:
        try:
            numbers = pickle.load(asked)
        except EOFError:
            return
        try:
            answer: int | MdataError = blocks.bring(np.array(numbers, np.int64))
        except MdataError as error:
            answer = error
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
