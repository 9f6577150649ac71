"""Shared by tests of many small runs: tokenizers are loaded once, not once per run.

Most of a small run's time is loading its tokenizer and comparing the fast engine with the exact one, which these tests
do not need; tests/mdata/tokenizers tests both. All runs of a file share the loaded tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mdata.preprocessing import plan
from mdata.tokenizers.base.tokenizer import Tokenizer, TokenizerConfig, TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """`preprocess` gets the tokenizer of an earlier run of the file that asked for the same."""
    loaded: dict[str, Tokenizer] = {}

    def load(spec: TokenizerSpec, *, on_files_read: Callable[[TokenizerConfig], None] | None = None) -> Tokenizer:
        key = repr(spec)  # its options may be lists
        if key not in loaded:
            loaded[key] = load_tokenizer(spec, on_files_read=on_files_read)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "load_tokenizer", load)
        yield
