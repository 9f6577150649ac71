"""What every tokenizer of ours is, whichever library does the work.

Ids are int32 and lengths int64 arrays, because a batch of texts becomes arrays once, where it is tokenized,
and stays so until it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int32]
LengthArray = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """Text to ids. Everything here is decided by `files` alone, so two machines with the same files agree."""

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
        """BLAKE3 (hex) of the content that decides ids, never of paths."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """File name -> content: what is kept beside a corpus so that it works offline."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What `files` do not say and ids depend on; with both the tokenizer can be built again."""

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """Ids of all texts, one after another (int32[sum of lengths]), and how many each gave (int64[n])."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens shown."""
