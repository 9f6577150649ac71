"""The id of a token by its text, for whichever tokenizer: what sample kinds and chat templates need.

Special tokens come first, then entries, then any text that the tokenizer turns into one id which shows as that text.
Nothing is added to a vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from mdata.tokenizers.base.tokenizer import TextRefused, Tokenizer


def named_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of the token with this text; None where there is none."""
    found = tokenizer.special_ids.get(text)
    by_name: Callable[[str], int | None] | None = getattr(tokenizer, "id_of", None)
    if found is None and by_name is not None:
        found = by_name(text)
    return _spelled(tokenizer, text) if found is None else found


def _spelled(tokenizer: Tokenizer, text: str) -> int | None:
    try:
        ids, _ = tokenizer.encode_batch([text])
    except TextRefused:
        return None
    return int(ids[0]) if len(ids) == 1 and tokenizer.decode(ids.tolist()).strip() == text else None
