"""Whole files and streams put into object storage, so that nothing is visible there before it is complete.

Storage shows an object when its last part is confirmed and not before, so each object is whole or not there; what names
others (a manifest) is put last by whoever knows the order. The size of parts grows with the file, so that no limit on
their number binds. A file that is there already, with the same hash, is not sent again: that is how an upload that was
interrupted continues.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdata.errors import MdataError, ResourceError, UsageError, os_errors_named
from mdata.object_storage.address import Address
from mdata.object_storage.stores import explained, open_store, storage_errors

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# S3 and GCS take 10,000 parts of at most 5 GiB, Azure 50,000 of at most 4,000 MiB.
MOST_PARTS = 9_000
_SMALLEST_PART = 8 << 20
PARTS_AT_ONCE = 4
_UPLOAD_MEMORY = 128 << 20
TRIES = 5
_HASH = "mdata-blake3"


def part_bytes(size_bytes: int) -> int:
    """The size of the parts of a file: whole MiB, at least 8, and at most 9,000 parts.

    A pure function. 5 TiB, which is the most that S3 and GCS take, gives parts of 583 MiB.
    """
    mebibytes = -(-size_bytes // (MOST_PARTS << 20))
    return max(_SMALLEST_PART, mebibytes << 20)


def put_file(path: Path, address: Address, *, file_hash: str | None, store: ObjectStore | None = None) -> bool:
    """Put a file there, replacing an older object; whether it had to be sent.

    Args:
        path: a finished file, which does not change.
        address: what it becomes.
        file_hash: BLAKE3 of its content in hex, kept with the object; None: it is always sent.

    Raises:
        UsageError: no bucket, no access, or a web server. ResourceError: the storage fails again and again.
    """
    check_writable(address)
    store = store or open_store(address)
    with os_errors_named("reading the result"):
        size = path.stat().st_size
    if file_hash is not None and _stored_hash(store, address, size) == file_hash:
        return False
    _put(lambda: path, address, size_bytes=size, store=store, attributes={_HASH: file_hash} if file_hash else None)
    return True


def put_stream(
    content: Callable[[], Iterable[bytes | memoryview]],
    address: Address,
    *,
    size_bytes: int,
    store: ObjectStore | None = None,
) -> None:
    """Put what a stream gives there, replacing an older object; nothing is there before the stream has ended.

    Args:
        content: begins the stream; called again if an attempt fails. Its own errors, other than OSError and ValueError,
            end the upload and are raised as they are.
        size_bytes: how much it gives.

    Raises:
        UsageError: no bucket, no access, or a web server. ResourceError: the storage fails again and again.
    """
    check_writable(address)
    small = size_bytes <= part_bytes(size_bytes)
    body = (lambda: b"".join(content())) if small else content
    _put(body, address, size_bytes=size_bytes, store=store or open_store(address))


def put_if_unchanged(content: bytes, address: Address, *, etag: str | None, store: ObjectStore | None = None) -> bool:
    """Put a small object there unless another writer has put one since it was looked at; whether it was put.

    Storage without conditional puts lets the last writer win: the caller reads again to see who that was.

    Args:
        etag: the version that was there; None: nothing was.

    Raises:
        UsageError: no bucket, no access. ResourceError: the storage does not answer.
    """
    import obstore
    from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

    store = store or open_store(address)
    try:
        obstore.put(
            store, address.key, content, mode="create" if etag is None else {"e_tag": etag}, use_multipart=False
        )
    except (AlreadyExistsError, PreconditionError):
        return False
    except storage_errors() as failed:
        if not (isinstance(failed, NotSupportedError) or re.search(r"\b501\b|NotImplemented", str(failed))):
            raise explained(failed, address, doing="writing") from None
        put_stream(lambda: [content], address, size_bytes=len(content), store=store)
    return True


def check_writable(address: Address) -> None:
    """Refuse what cannot be written to.

    Raises:
        UsageError: a web server, or the hub.
    """
    if address.scheme in ("http", "https", "hf"):
        raise UsageError(f"{address}: mdata does not write to {address.scheme}://", expected="s3://, gs:// or az://")


def _put(
    content: Callable[[], Any],
    address: Address,
    *,
    size_bytes: int,
    store: ObjectStore,
    attributes: dict[str, str] | None = None,
) -> None:
    """Put a path, bytes or a stream there, and see that all of it arrived."""
    import obstore

    part = part_bytes(size_bytes)
    error: MdataError | None = None
    for attempt in range(TRIES):
        time.sleep(0.2 * 2**attempt if attempt else 0)
        try:
            obstore.put(
                store,
                address.key,
                content(),
                attributes=attributes,
                use_multipart=size_bytes > part,
                chunk_size=part,
                max_concurrency=max(1, min(PARTS_AT_ONCE, _UPLOAD_MEMORY // part)),
            )
            stored = obstore.head(store, address.key)["size"]
        except storage_errors() as failed:
            error = explained(failed, address, doing="writing")
            if isinstance(error, UsageError):
                raise error from None
            continue
        if stored == size_bytes:
            return
        error = ResourceError(f"writing {address}: {stored} of {size_bytes} bytes arrived", fix="run again")
    assert error is not None, "every attempt ends with a return or an error"
    raise error


def remove_object(address: Address, store: ObjectStore | None = None) -> None:
    """Remove an object; one that is not there is no error.

    Raises:
        UsageError: no access. ResourceError: the storage does not answer.
    """
    import obstore

    try:
        obstore.delete(store or open_store(address), address.key)
    except FileNotFoundError:
        return
    except storage_errors() as failed:
        raise explained(failed, address, doing="removing") from None


def remove_objects(addresses: Sequence[Address], store: ObjectStore | None = None) -> None:
    """Remove objects of one place, many with one request where the storage can; one that is not there is no error.

    Raises:
        UsageError: no access. ResourceError: the storage does not answer.
    """
    import obstore

    if not addresses:
        return
    store = store or open_store(addresses[0])
    try:
        obstore.delete(store, [address.key for address in addresses])
    except FileNotFoundError:  # one of them; what became of the others is not said
        for address in addresses:
            remove_object(address, store)
    except storage_errors() as failed:
        raise explained(failed, addresses[0], doing="removing") from None


def _stored_hash(store: ObjectStore, address: Address, size: int) -> str | None:
    """The hash that is kept with the object there; None: there is none, or one of another size."""
    import obstore

    try:
        stored = obstore.get(store, address.key, options={"head": True})
    except FileNotFoundError:
        return None
    except storage_errors() as failed:
        raise explained(failed, address, doing="reading") from None
    return stored.attributes.get(_HASH) if stored.meta["size"] == size else None
