"""The facts of an object: its address, size and version.

Facts are plain data, so that they can be recorded and sent to workers. Nothing here connects to storage; `reading`
makes them and compares later versions with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mdata.object_storage.address import Address


@dataclass(frozen=True)
class ObjectFacts:
    """An object as it was when it was looked at.

    Attributes:
        address: where it is.
        size_bytes: its length.
        modified_ns: when it was written, as the storage says; 0 where it does not.
        etag: its version, without quotes lost; None where the storage gives none.
    """

    address: Address
    size_bytes: int
    modified_ns: int
    etag: str | None
