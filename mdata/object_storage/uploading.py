"""Whole files put into object storage, so that nothing is visible there before it is complete.

Storage shows an object when its last part is confirmed and not before, so each object is whole or not there; what names
others (a manifest) is put last by whoever knows the order. The size of parts grows with the file, so that no limit on
their number binds. A file that is there already, with the same hash, is not sent again: that is how an upload that was
interrupted continues.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

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
    import obstore

    if address.scheme in ("http", "https", "hf"):
        raise UsageError(f"{address}: mdata does not write to {address.scheme}://", expected="s3://, gs:// or az://")
    store = store or open_store(address)
    with os_errors_named("reading the result"):
        size = path.stat().st_size
    if file_hash is not None and _stored_hash(store, address, size) == file_hash:
        return False
    part = part_bytes(size)
    error: MdataError | None = None
    for attempt in range(TRIES):
        time.sleep(0.2 * 2**attempt if attempt else 0)
        try:
            obstore.put(
                store,
                address.key,
                path,
                attributes={_HASH: file_hash} if file_hash else None,
                use_multipart=size > part,
                chunk_size=part,
                max_concurrency=max(1, min(PARTS_AT_ONCE, _UPLOAD_MEMORY // part)),
            )
            stored = obstore.head(store, address.key)["size"]
        except storage_errors() as failed:
            error = explained(failed, address, doing="writing")
            if isinstance(error, UsageError):
                raise error from None
            continue
        if stored == size:
            return True
        error = ResourceError(f"writing {address}: {stored} of {size} bytes arrived", fix="run again")
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


def _stored_hash(store: ObjectStore, address: Address, size: int) -> str | None:
    """The hash that is kept with the object there; None: there is none, or one of another size."""
    import obstore

    try:
        found = obstore.get(store, address.key, options={"head": True})
    except FileNotFoundError:
        return None
    except storage_errors() as failed:
        raise explained(failed, address, doing="reading") from None
    return found.attributes.get(_HASH) if found.meta["size"] == size else None
