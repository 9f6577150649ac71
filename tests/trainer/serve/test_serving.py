"""What a server prints when it is ready."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from trainer.serve.serving import _announce


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (2048, "KV cache: 2,048 tokens over all sequences, 1.5 GiB on each rank (--cache-tokens)"),
        (0, "states of the sequences of a batch, of any length: 1.5 GiB on each rank (--max-batch)"),
    ],
)
def test_a_model_without_attention_has_no_cache_of_tokens(tokens, line):
    lines: list[str] = []

    async def announced() -> None:
        ready = asyncio.Event()
        ready.set()
        await _announce(SimpleNamespace(ready=ready, cache_tokens=tokens, cache_bytes=3 << 29), "served", lines.append)

    asyncio.run(announced())
    assert lines == [line, "served"]
