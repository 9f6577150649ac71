"""The special tokens of BERT and T5, found by their names in a tokenizer: what begins, ends, masks and pads a text.

The decoder of T5 begins with [BOS], or [CLS] if that is missing, as in Megatron's tokenizers; otherwise with <s>, or
with <pad> as in published T5s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count, takewhile
from typing import Any

from mdata.tokenizers.base.tokenizer import Tokenizer, token_id

# Names of each token, the first that a tokenizer has; those of WordPiece, or, if it has none of these, the others.
_WORDPIECE = {
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]",),
    "bos": ("[BOS]", "[CLS]"),
    "eos": ("[EOS]", "[SEP]"),
    "pad": ("[PAD]",),
}
_OTHERS = {
    "cls": ("<s>",),
    "sep": ("</s>",),
    "mask": ("<mask>",),
    "bos": ("<s>", "<pad>"),
    "eos": ("</s>",),
    "pad": ("<pad>",),
}


def special_tokens_by(id_of: Callable[[str], int | None]) -> dict[str, Any]:
    """The special tokens that a tokenizer has, by the fields of `mdata.samples.special_tokens.MaskedVocabulary`."""
    sentinels = tuple(takewhile(lambda id: id is not None, (id_of(f"<extra_id_{number}>") for number in count())))
    fields = {"sentinels": sentinels} if sentinels else {}
    for names_of in (_WORDPIECE, _OTHERS):
        named = {role: [id for name in names if (id := id_of(name)) is not None] for role, names in names_of.items()}
        if any(named.values()):
            return {**fields, **{role: ids[0] for role, ids in named.items() if ids}}
    return fields


def special_tokens_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The same of a tokenizer."""
    entries: Mapping[str, int] | None = getattr(tokenizer, "entries", None)
    return special_tokens_by(partial(token_id, tokenizer) if entries is None else entries.get)


def decoder_ends(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """The ids with which samples of T5 begin the decoder's input and end its labels; None: the tokenizer has none.

    They need not be `bos` and `eod` of the tokenizer.
    """
    special = special_tokens_of(tokenizer)
    return special.get("bos", tokenizer.bos), special.get("eos", tokenizer.eod)


def names_text(role: str) -> str:
    """The names of a token, for messages."""
    if role == "sentinels":
        return "<extra_id_0>, <extra_id_1> ..."
    return " or ".join((*_WORDPIECE[role], *_OTHERS[role]))
