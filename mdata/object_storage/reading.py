"""Objects looked at, listed, and read by ranges, a few of them ahead.

Every range is asked for with the version that the object had when it was first looked at (If-Match), and its length is
compared, so that a reader never gets a mixture of two versions. obstore repeats requests that fail; a body that breaks
off, is short or too slow is asked for again here. At most `BLOCKS_AHEAD` blocks of a reader are in memory besides the
one in use.
"""

from __future__ import annotations

import io
import random
import time
from collections import OrderedDict, deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mdata.errors import MdataError, ResourceError, UsageError
from mdata.object_storage.address import Address
from mdata.object_storage.facts import ObjectFacts
from mdata.object_storage.stores import broke_off, changed, explained, named_errors, open_store, storage_errors

if TYPE_CHECKING:
    from obstore.store import ObjectStore

BLOCK_BYTES = 4 << 20
BLOCKS_AHEAD = 4
_BLOCKS_KEPT = 4
_TRIES = 8
MOST_OBJECTS = 10_000_000  # of a listing
LIST_TIMEOUT_S = 300  # without another object
FIRST_WAIT_S = 0.1


def look_at_object(address: Address, store: ObjectStore | None = None) -> ObjectFacts:
    """The object as it is now.

    Raises:
        UsageError: nothing is there, no bucket, or no access. ResourceError: the storage does not answer.
    """
    import obstore

    with named_errors(address):
        head = obstore.head(store or open_store(address), address.key)
    return _facts(address, head)


def object_there(address: Address, store: ObjectStore | None = None) -> ObjectFacts | None:
    """The object as it is now; None: there is none.

    Raises:
        UsageError: no access. ResourceError: the storage does not answer.
    """
    import obstore

    with named_errors(address):
        try:
            return _facts(address, obstore.head(store or open_store(address), address.key))
        except FileNotFoundError:
            return None


def check_same(facts: ObjectFacts) -> None:
    """Refuse an object that is another version than it was.

    Raises:
        UsageError: it changed, or is gone. ResourceError: the storage does not answer.
    """
    now = look_at_object(facts.address)
    if (now.size_bytes, now.etag) != (facts.size_bytes, facts.etag):
        raise changed(facts.address)


def list_objects(folder: Address, store: ObjectStore | None = None) -> list[ObjectFacts]:
    """All objects whose key begins with that of `folder`, sorted by key.

    Raises:
        UsageError: no bucket, no access, or a web server, which has no list. ResourceError: no answer.
    """
    if folder.scheme in ("http", "https"):
        raise UsageError(f"{folder}: a web server does not say which files it has", fix="name each file")
    if folder.scheme == "hf":
        from mdata.object_storage.hub import hub_files

        store = store or open_store(folder)
        return [look_at_object(folder.with_key(path), store) for path in sorted(hub_files(folder))]
    store = store or open_store(folder)
    for attempt in range(_TRIES):
        _wait_before(attempt)
        try:
            return _listed(folder, store)
        except storage_errors() as failed:
            if attempt == _TRIES - 1 or not broke_off(failed):
                raise explained(failed, folder, doing="listing") from None
    raise AssertionError("the last attempt returns or raises")


def _listed(folder: Address, store: ObjectStore) -> list[ObjectFacts]:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_list_in_time(folder, store))
    with ThreadPoolExecutor(1) as pool:  # called from a coroutine, as in a notebook
        return pool.submit(asyncio.run, _list_in_time(folder, store)).result()


async def _list_in_time(folder: Address, store: ObjectStore) -> list[ObjectFacts]:
    """The listing; obstore hides its pages, so a repeated page is detected by its keys, or by a timeout."""
    import asyncio

    import obstore

    objects: dict[str, ObjectFacts] = {}
    count = 0
    # obstore matches whole parts of keys, so what follows the last slash is compared here. One key at a time, because a
    # larger chunk asks for further pages before it is handed out.
    chunks = aiter(obstore.list(store, prefix=folder.key.rpartition("/")[0] or None, chunk_size=1))
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(LIST_TIMEOUT_S) as deadline:
            async for chunk in chunks:
                for meta in chunk:
                    facts = _facts(folder.with_key(meta["path"]), meta)
                    # Behind an object "x" may come "x/", the mark of a folder; obstore drops its slash.
                    listed = objects.setdefault(meta["path"], facts)
                    count += 1
                    if (listed is not facts and listed == facts) or count > MOST_OBJECTS:
                        raise endless_list(folder)
                deadline.reschedule(clock() + LIST_TIMEOUT_S)
    except TimeoutError:
        raise endless_list(folder) from None
    return [objects[key] for key in sorted(objects) if key.startswith(folder.key)]


def endless_list(folder: Address) -> ResourceError:
    """The error for a listing whose pages repeat, stay empty, or do not end."""
    return ResourceError(
        f"listing {folder}: the list does not end",
        found=f"a repeated page, no object for {LIST_TIMEOUT_S} s, or more than {MOST_OBJECTS:,} objects",
        fix="check the endpoint, or name a part of the folder",
    )


def _wait_before(attempt: int) -> None:
    if attempt:
        time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))


def _facts(address: Address, head: Any) -> ObjectFacts:
    modified = head["last_modified"]
    return ObjectFacts(
        address, head["size"], round(modified.timestamp() * 1_000_000) * 1_000 if modified else 0, head["e_tag"]
    )


def read_range(facts: ObjectFacts, start: int, *, stop: int, store: ObjectStore | None = None) -> bytes:
    """The bytes [start, stop) of the object, which lie inside it.

    Raises:
        UsageError: it changed, or is gone. ResourceError: the storage fails again and again.
    """
    import obstore

    if start == stop:
        return b""
    store = store or open_store(facts.address)
    options: dict[str, Any] = {"range": (start, stop)}
    if facts.etag is not None and not facts.etag.startswith("W/"):
        options["if_match"] = facts.etag
    error: MdataError | None = None
    for attempt in range(_TRIES):
        _wait_before(attempt)
        try:
            answer = obstore.get(store, facts.address.key, options=options)  # type: ignore[arg-type]
            data, meta = answer.bytes().to_bytes(), answer.meta
        except storage_errors() as failed:
            error = explained(failed, facts.address)
            if isinstance(error, UsageError):
                raise error from None
            continue
        if meta["size"] != facts.size_bytes or (facts.etag and meta["e_tag"] not in (facts.etag, None)):
            raise changed(facts.address)
        if len(data) == stop - start:
            return data
        error = ResourceError(
            f"reading {facts.address}: the storage sent too few bytes",
            found=f"{len(data)} bytes",
            expected=f"{stop - start} bytes from byte {start}",
            fix="run again, which continues",
        )
    assert error is not None, "every attempt ends with a return or an error"
    raise error


def blocks_ahead(facts: ObjectFacts, start: int = 0) -> Generator[bytes, None, None]:
    """The object from byte `start` to its end, as blocks of at most `BLOCK_BYTES`, read ahead by threads.

    Closing the generator, or dropping it, ends its threads.

    Raises:
        UsageError, ResourceError: as `read_range`, where the block would have come.
    """
    store = open_store(facts.address)
    waiting: deque[Future[bytes]] = deque()
    pool = ThreadPoolExecutor(BLOCKS_AHEAD, thread_name_prefix="mdata-objects")
    try:
        for begin in range(start, facts.size_bytes, BLOCK_BYTES):
            stop = min(begin + BLOCK_BYTES, facts.size_bytes)
            waiting.append(pool.submit(read_range, facts, begin, stop=stop, store=store))
            if len(waiting) == BLOCKS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class ObjectFile(io.RawIOBase):
    """An object as a file that can be read at any place; the last few blocks are kept. For one thread."""

    def __init__(self, facts: ObjectFacts) -> None:
        super().__init__()
        self._facts = facts
        self._store = open_store(facts.address)
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset, as files do."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._facts.size_bytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; fewer bytes at the end of the object only."""
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view) and self._at < self._facts.size_bytes:
            number, offset = divmod(self._at, BLOCK_BYTES)
            part = memoryview(self._block(number))[offset : offset + len(view) - filled]
            view[filled : filled + len(part)] = part
            filled += len(part)
            self._at += len(part)
        return filled

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * BLOCK_BYTES
            stop = min(start + BLOCK_BYTES, self._facts.size_bytes)
            self._blocks[number] = read_range(self._facts, start, stop=stop, store=self._store)
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[number]
