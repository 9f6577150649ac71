"""The bucket on loopback of mdata's tests, for checkpoints in object storage."""

from __future__ import annotations

from tests.mdata.object_storage.conftest import bucket, server

__all__ = ["bucket", "server"]
