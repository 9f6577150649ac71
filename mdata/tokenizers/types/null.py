"""NullTokenizer: texts that are ids already, written as integers with single blanks between them.

A number is anything Python's int() accepts: "+8", "007", "1_000", digits of other scripts, white space around it. The
end of document is the last id of the vocabulary unless another is named, so it may occur in a text; ids are not
compared with the size of the vocabulary, only with the range of 32 bits (and later with the file's token type).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from blake3 import blake3

from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import LARGEST_ID, MEGATRON_2023, is_megatron_2023, whole_number
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused, TokenizerSpec

NAME = "NullTokenizer"


class NullTokenizer:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`."""

    name = NAME
    OPTIONS = ("vocab_size", "eod_id", "special_in_text", "compat")
    engine = "none"
    notes: tuple[str, ...] = ()

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Self:
        """The same as `build`: there are no files."""
        return cls(options)

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Self:
        """Build a tokenizer with `vocab_size` ids.

        Args:
            files: none.
            options: `vocab_size`, and `eod_id` if it is not the last id; `compat`: see TokenizerSpec.
            engine: there is only one.

        Raises:
            UsageError: no vocabulary size, or numbers out of range.
        """
        return cls(options)

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options.get("vocab_size") is None:
            raise UsageError(f"{NAME} needs the number of ids", fix="--vocab-size N")
        if options.get("special_in_text", "special") != "special":
            problem = f"the texts of {NAME} are ids, so its end of document cannot be spelled as plain text"
            raise UsageError(problem, fix="choose an id that occurs in no text: --null-tokenizer-eod-id N")
        fork = is_megatron_2023(options)
        # The fork of 2023 adds an id for the end of document.
        self.vocab_size = whole_number("vocab_size", options["vocab_size"], lowest=1, type=NAME) + fork
        eod = options.get("eod_id")
        if fork and eod is not None:
            problem = f"{MEGATRON_2023} ends documents with the vocabulary's size, {options['vocab_size']}"
            raise UsageError(problem, found=f"eod_id={eod!r}", fix="leave out one of the two options")
        self.eod = self.vocab_size - 1 if eod is None else whole_number("eod_id", eod, lowest=0, type=NAME)
        self.bos: int | None = None
        self.files: Mapping[str, bytes] = {}
        self.options = dict(options)
        self.special_ids: Mapping[str, int] = {str(self.eod): self.eod}
        self.fingerprint = blake3(f"{NAME} {self.vocab_size} {self.eod}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        lists = [_ids(index, text) for index, text in enumerate(texts)]
        lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        return np.array([id for ids in lists for id in ids], dtype=np.int32), lengths

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol."""
        return int(np.count_nonzero(ids == self.eod))

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        return " ".join(str(int(id)) for id in ids)


def _ids(index: int, text: str) -> list[int]:
    parts = text.split(" ")
    try:
        ids = [int(part) for part in parts]
    except ValueError as error:
        wrong = next(part for part in parts if not _is_number(part))
        subject = "an empty text" if not text else f"{wrong[:40]!r}" if wrong else "two blanks, or one at an end,"
        raise TextRefused(index, f"{subject} is not an integer") from error
    wide = next((id for id in ids if not -LARGEST_ID - 1 <= id <= LARGEST_ID), None)
    if wide is not None:
        shown = str(wide) if abs(wide) < 10**40 else "a number of more than 40 digits"
        raise TextRefused(index, f"{shown} does not fit into 32 bits")
    return ids


def _is_number(part: str) -> bool:
    try:
        int(part)
    except ValueError:
        return False
    return True
