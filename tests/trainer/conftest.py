"""Fixtures of several rooms: the bucket on loopback of mdata's tests, one thread for a small model, engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mdata.tokenizers.types import engine_selection
from tests.mdata.object_storage.conftest import bucket, server

__all__ = ["bucket", "server"]


@pytest.fixture(scope="module")
def one_thread():
    """A model so small is computed faster by one, on a busy machine many times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def engines_compared_once() -> Iterator[None]:
    """An engine that was equal to the exact one is not compared with it again for an equal tokenizer.json.

    A conversion loads several tokenizers, and comparing is most of it; tests/mdata/tokenizers tests that.
    """
    equal: set[tuple[str, bool, str]] = set()
    real = engine_selection.try_engine

    def try_engine(name: str, definition: Any, *, exact: Any, plain: bool) -> Any:
        key = name, plain, json.dumps(definition)
        if key in equal:
            return engine_selection.make_engine(name, definition, plain=plain, exact=lambda: exact)
        engine_or_reason = real(name, definition, exact=exact, plain=plain)
        if not isinstance(engine_or_reason, str):
            equal.add(key)
        return engine_or_reason

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_selection, "try_engine", try_engine)
        yield
