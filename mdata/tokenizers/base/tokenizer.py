"""The interface of every tokenizer, regardless of library, and how a user names one.

Ids are int32 and lengths int64 arrays: a batch of texts becomes arrays once, where it is tokenized, and stays arrays
until it is written. The ids of a text never depend on earlier texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int32]
LengthArray = npt.NDArray[np.int64]


class TokenizerConfig(NamedTuple):
    """Everything that `build_tokenizer` needs; unlike a tokenizer it can be sent to another process."""

    name: str
    files: Mapping[str, bytes]
    options: Mapping[str, Any]
    engine: str


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer as the user names it.

    Args:
        type: Megatron's name of the type, or "ByteTokenizer" or "RWKVTokenizer".
        model: a folder with tokenizer.json, or a file: tokenizer.json, ranks, a SentencePiece model, RWKV's entries.
        vocab_file, merge_file: vocab.json and merges.txt, or only BERT's vocab.txt.
        options: further options of the type, as (name, value) pairs: `special_tokens` (a list),
            `special_in_text` ("special" or "plain"), `compat` ("megatron-2023"), and those of single types
            (docs/reference/tokenizers.md): `include_special_tokens`, `vocab_size`, `eod_id`, `pattern`, `legacy` ...
        engine: the library that computes the ids, or "auto" for the fastest that gives the exact ids.
    """

    type: str
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    engine: str = "auto"


class TextRefused(Exception):
    """One text of a batch cannot be tokenized.

    Args:
        index: of the text in the batch.
        reason: for the user.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index, self.reason = index, reason

    def __str__(self) -> str:
        return f"text {self.index}: {self.reason}"


@contextmanager
def indices_in_batch(indices: Sequence[int] | LengthArray) -> Iterator[None]:
    """Context for encoding some texts of a larger batch: a TextRefused gets the index in that batch."""
    try:
        yield
    except TextRefused as refused:
        raise TextRefused(int(indices[refused.index]), refused.reason) from refused


class TokenizerType(Protocol):
    """The class of one type. The registry finds it in its module by its name, which is the type's name."""

    OPTIONS: tuple[str, ...]

    def load(self, spec: TokenizerSpec, options: Mapping[str, Any]) -> Tokenizer:
        """Read and check the files that a user names; the exact engine is used.

        Raises:
            UsageError: a file is not named, cannot be read, or has the wrong content.
        """

    def build(self, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Tokenizer:
        """Build the tokenizer from files loaded before; its engine is not compared with the exact one again."""


@runtime_checkable
class SelectsEngine(Protocol):
    """A tokenizer with several engines."""

    def likely_engine(self, wanted: str) -> str:
        """The engine that `select_engine` tries first; it may still select another."""

    def select_engine(self, wanted: str) -> None:
        """Switch to an engine after comparing it with the exact one; adds to `notes` what the user should know.

        Args:
            wanted: the name of an engine, or "auto" for the fastest that gives the exact ids.

        Raises:
            UsageError: there is no such engine, or the named one cannot be used.
        """


class Tokenizer(Protocol):
    """Text to ids. Only `files` and `options` decide the ids, so two machines with equal ones agree."""

    @property
    def name(self) -> str:
        """Megatron's name of the type, such as "HuggingFaceTokenizer"."""

    @property
    def vocab_size(self) -> int:
        """Number of entries, with added tokens, without padding."""

    @property
    def eod(self) -> int | None:
        """The id that --append-eod writes; None if the files name none."""

    @property
    def bos(self) -> int | None:
        """The id that begins a text; None if the files name none. A text only gets it if the tokenizer adds it."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Text of each special token -> its id."""

    @property
    def fingerprint(self) -> str:
        """BLAKE3 (hex) of everything that decides ids; paths and engines do not change it."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """File name -> content: the copy that is kept beside a corpus."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The options on which ids depend; with `files` they suffice to rebuild the tokenizer."""

    @property
    def engine(self) -> str:
        """The name of the library that computes the ids; every engine that is used gives the same ids."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user, such as why a faster engine is not used."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """Ids of all texts, concatenated (int32[sum of lengths]), and the number of ids of each (int64[n]).

        Raises:
            TextRefused: a text that has no ids.
        """

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """How many special tokens occurred in the texts themselves.

        Args:
            ids: from `encode_batch`.
            num_texts: number of texts in that batch.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, including special tokens; U+FFFD, or nothing, for ids of no entry.

        Models have such ids where their vocabulary is larger than the tokenizer's.
        """


def token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the special token or entry with this text, or of a text that encodes to one id; otherwise None."""
    special_id = tokenizer.special_ids.get(text)
    id_of = getattr(tokenizer, "id_of", None)
    if special_id is None and id_of is not None:
        special_id = id_of(text)
    if special_id is not None:
        return int(special_id)
    try:
        ids, _ = tokenizer.encode_batch([text])
    except TextRefused:
        return None
    return int(ids[0]) if len(ids) == 1 and tokenizer.decode(ids.tolist()).strip() == text else None
