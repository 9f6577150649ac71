"""What tests of many small runs share: tokenizers are loaded once, not once for each run.

Most of a small run is loading its tokenizer and checking the fast engine against the exact one, of which these tests
want nothing; tests/mdata/tokenizers has tests of both. What loading leaves behind is used by all runs of a file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: these tests sync thousands of times."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder)
