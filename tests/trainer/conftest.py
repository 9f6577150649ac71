"""Fixtures of several rooms: the bucket on loopback of mdata's tests, and one thread for a small model."""

from __future__ import annotations

import pytest
import torch

from tests.mdata.object_storage.conftest import bucket, server

__all__ = ["bucket", "server"]


@pytest.fixture
def one_thread():
    """A model so small is computed faster by one, on a busy machine many times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
