"""The facts about a tokenizer that BERT and T5 samples need: special ids, all ids, and which ids continue a word.

`vocabulary_of` reads them from the tokenizer beside a corpus by the names of its tokens: [CLS], [SEP], [MASK], [PAD] of
WordPiece, or <s>, </s>, <mask>, <pad>, and <extra_id_0>, <extra_id_1> ... as sentinels. The decoder of T5 begins with
[BOS], or [CLS] if that is missing, as in Megatron's tokenizers; otherwise with <s>, or with <pad> as in published T5s.
An entry continues a word if its text begins with ##. For other tokenizers the caller passes a `MaskedVocabulary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from blake3 import blake3

from mdata import _core
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError
from mdata.tokenizers.base.special_names import names_text, special_tokens_by, special_tokens_of

_LARGEST_ID = 1 << 31
_CONTINUES = "##"


@dataclass(frozen=True, kw_only=True)
class MaskedVocabulary:
    """Ids of special tokens; a sample kind that needs an id that is None is refused with its name.

    Args:
        ids: all ids in ascending order, from which BERT sometimes draws the replacement of a masked token.
        continuations: ids that continue the preceding word.
        cls, sep: begin and end texts (BERT); neither is ever masked.
        mask: replaces a masked token (BERT).
        bos, eos: begin the decoder's input and end its labels (T5).
        pad: fills samples up; None: 0.
        sentinels: replace a span of masked tokens, in the order of use (T5).
    """

    ids: tuple[int, ...]
    continuations: tuple[int, ...] = ()
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    sentinels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        named = [self.cls, self.sep, self.mask, self.bos, self.eos, self.pad]
        all_ids = [id for id in (*named, *self.ids, *self.continuations, *self.sentinels) if id is not None]
        if not self.ids or min(all_ids) < 0 or max(all_ids) >= _LARGEST_ID:
            raise UsageError("a vocabulary of ids from 0 to 2^31 - 1 is expected", found=f"{len(self.ids)} ids")
        if list(self.ids) != sorted(set(self.ids)):
            raise UsageError("the ids of a vocabulary are not in ascending order")

    @property
    def megatron_pad(self) -> int:
        """Megatron's padding: -1 if there is no padding id, or if it has another meaning too."""
        others = {self.cls, self.sep, self.mask, self.bos, self.eos, *self.sentinels}
        return -1 if self.pad is None or self.pad in others else self.pad

    @cached_property
    def fingerprint(self) -> str:
        """BLAKE3 of all fields, because they decide samples."""
        import orjson

        return blake3(orjson.dumps({name: getattr(self, name) for name in self.__dataclass_fields__})).hexdigest()

    def require(self, *names: str) -> None:
        """Refuse a vocabulary that lacks any of these.

        Raises:
            UsageError: one is None, or empty.
        """
        missing = [name for name in names if getattr(self, name) in (None, ())]
        if missing:
            raise UsageError(
                f"the vocabulary lacks {', '.join(missing)}",
                expected=f"{', '.join(map(names_text, missing))} among the tokens of the tokenizer",
                fix="mdata preprocess again with them as --tokenizer-special-tokens; or, in Python, give a "
                f"MaskedVocabulary({', '.join(f'{name}=...' for name in missing)})",
            )

    def as_core(self) -> _core.MaskVocabulary:
        """In the form that C++ takes; None becomes an id that no text has."""
        continues = np.zeros(max(self.continuations, default=-1) + 1, np.uint8)
        continues[np.array(self.continuations, np.int64)] = 1
        cls, sep, mask = (-1 if id is None else id for id in (self.cls, self.sep, self.mask))
        return _core.MaskVocabulary(cls, sep, mask, continues, np.array(self.ids, np.int64))


def vocabulary_of(corpus: Corpus) -> MaskedVocabulary:
    """Read the vocabulary from the tokenizer beside a corpus.

    Raises:
        UsageError: the tokenizer is unknown, or its type has no such token names.
    """
    tokenizer = corpus.load_tokenizer()
    entries: Mapping[str, int] | None = getattr(tokenizer, "entries", None)
    if entries is not None:
        return vocabulary_from(entries)
    if tokenizer is not None and (special := special_tokens_of(tokenizer)):
        return MaskedVocabulary(ids=tuple(range(tokenizer.vocab_size)), **special)
    raise UsageError(
        f"{corpus.name}: its tokenizer does not say which tokens begin, end and mask a text",
        found="no tokenizer beside the corpus" if tokenizer is None else tokenizer.name,
        expected=f"one with {names_text('mask')}, or with {names_text('sentinels')}",
        fix="mdata preprocess again with --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase; or, in Python, "
        "give a MaskedVocabulary",
    )


def vocabulary_from(entries: Mapping[str, int]) -> MaskedVocabulary:
    """Look up the names of special tokens."""
    return MaskedVocabulary(
        ids=tuple(sorted(set(entries.values()))),
        continuations=tuple(sorted({id for text, id in entries.items() if text.startswith(_CONTINUES)})),
        **special_tokens_by(entries.get),
    )
