"""What every tokenizer of ours is, whichever library does the work, and how one is asked for.

Ids are int32 and lengths int64 arrays, because a batch of texts becomes arrays once, where it is tokenized,
and stays so until it is written. A tokenizer never depends on the texts that it saw before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int32]
LengthArray = npt.NDArray[np.int64]


class Recipe(NamedTuple):
    """What `build_tokenizer` makes a tokenizer of: its name, files, options and engine."""

    name: str
    files: Mapping[str, bytes]
    options: Mapping[str, Any]
    engine: str


Announce = Callable[[Recipe], None]


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer a user asks for.

    Args:
        type: Megatron's name of the type, or "ByteTokenizer".
        model: a folder with tokenizer.json, or a file: such a one, of ranks, or of SentencePiece.
        vocab_file, merge_file: vocab.json and merges.txt, or BERT's vocab.txt alone.
        options: what the type takes besides, as (name, value) pairs: `special_tokens` (a list),
            `special_in_text` ("special" or "plain"), `compat` ("megatron-2023"), and what single types have
            (docs/tokenizers.md): `include_special_tokens`, `vocab_size`, `eod_id`, `pattern`, `legacy` ...
        engine: the library that gives the ids, or "auto" for the fastest that is equal to the exact one.
        announce: hears what is likely to be taken, before engines are compared; not by all types.
    """

    type: str
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    engine: str = "auto"
    announce: Announce | None = field(default=None, compare=False, repr=False)


class TextRefused(Exception):
    """One text of a batch cannot be tokenized.

    Args:
        index: which text of the batch.
        reason: why, for the user.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index, self.reason = index, reason

    def __str__(self) -> str:
        return f"text {self.index}: {self.reason}"


@contextmanager
def numbered(numbers: Sequence[int]) -> Iterator[None]:
    """What refuses a text inside refuses that one of a larger batch: `numbers` are the places of its texts there."""
    try:
        yield
    except TextRefused as refused:
        raise TextRefused(numbers[refused.index], refused.reason) from refused


class TokenizerType(Protocol):
    """The class of one type. It has the type's name, by which the registry finds it in its module."""

    OPTIONS: tuple[str, ...]

    def load(self, spec: TokenizerSpec, options: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of the files that a user names, with its best engine."""

    def build(self, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Tokenizer:
        """The same from what a tokenizer keeps, without a file system; its engine is not compared again."""


class Tokenizer(Protocol):
    """Text to ids. All ids are decided by `files` and `options`, so two machines with the same ones agree."""

    @property
    def name(self) -> str:
        """Megatron's name of the type, such as "HuggingFaceTokenizer"."""

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included, padding not."""

    @property
    def eod(self) -> int | None:
        """The id that --append-eod writes; None where the files name none."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Text of each special token -> its id."""

    @property
    def fingerprint(self) -> str:
        """BLAKE3 (hex) of the content that decides ids, never of paths or engines."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """File name -> content: what is kept beside a corpus so that it works offline."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What `files` do not say and ids depend on; with both the tokenizer can be built again."""

    @property
    def engine(self) -> str:
        """Which library gives the ids; all that are taken give the same."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user, such as why a faster engine was not taken."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """Ids of all texts, one after another (int32[sum of lengths]), and how many each gave (int64[n]).

        Raises:
            TextRefused: a text that has no ids.
        """

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """How many special ids stood in the texts themselves.

        Args:
            ids: what `encode_batch` gave, nothing put in.
            num_texts: of that many texts, empty ones included.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens shown."""
