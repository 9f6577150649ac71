"""ByteTokenizer: the UTF-8 bytes of a text are its ids, and 256 ends a document.

Ours, not Megatron's: it needs no file and no training, and no text can contain its special token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from blake3 import blake3

from mdata.tokenizers.base.helpers import plain_special_tokens, refuse_surrogates
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TokenizerSpec

NAME = "ByteTokenizer"
END_OF_DOCUMENT = 256


class ByteTokenizer:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`."""

    name = NAME
    OPTIONS = ("special_in_text",)
    engine = "none"
    notes: tuple[str, ...] = ()
    vocab_size = 257
    eod, bos = END_OF_DOCUMENT, None
    fingerprint = blake3(NAME.encode()).hexdigest()

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Self:
        """The same as `build`: there are no files."""
        return cls.build({}, options, engine=spec.engine)

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Self:
        """Build the tokenizer; no text can contain its only special token, so `special_in_text` changes nothing."""
        plain_special_tokens(options)  # for its check
        return cls()

    def __init__(self) -> None:
        self.files: Mapping[str, bytes] = {}
        self.options: Mapping[str, Any] = {}
        self.special_ids: Mapping[str, int] = {"<|endofdocument|>": END_OF_DOCUMENT}

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        try:
            contents = [text.encode() for text in texts]
        except UnicodeEncodeError:
            refuse_surrogates(texts)
            raise
        lengths = np.fromiter(map(len, contents), dtype=np.int64, count=len(contents))
        return np.frombuffer(b"".join(contents), dtype=np.uint8).astype(np.int32), lengths

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol."""
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol; bytes that are not UTF-8, and ids that are no bytes, become U+FFFD, the end of document its
        name.
        """
        out = []
        run = bytearray()
        for id in ids:
            if id == END_OF_DOCUMENT:
                out.append(run.decode(errors="replace") + "<|endofdocument|>")
                run.clear()
            else:
                run.append(int(id) if 0 <= id < 256 else 0xFF)  # which no text has
        return "".join(out) + run.decode(errors="replace")
