"""tiktoken with any ranks and some patterns, as the exact engine of TikTokenizer.

tiktoken fails on a million blanks before a word or at the end of a text. Those are split off first: the last blank
belongs to the following word, all others are one word, which needs no pattern. `as_definition` writes the same
tokenizer as a tokenizer.json, for engines that read that; it lists the merges, which tiktoken derives itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from mdata.tokenizers.base.byte_level import from_bytes
from mdata.tokenizers.base.token_matching import pattern_of_any
from mdata.tokenizers.engines.libraries import Ids
from mdata.tokenizers.tiktoken.tiktoken_ranks import PATTERNS

_LONG_RUN_CHARS = 500_000
# Finding the parts of an entry takes quadratic time in its length.
_LONGEST_ENTRY_BYTES = 1000
# White space except line ends; Python's definition of white space has four more characters.
_LONG_RUN = re.compile(rf"[\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{{{_LONG_RUN_CHARS},}}")


class RanksEngine:
    """See `mdata.tokenizers.engines.libraries.TokenizerEngine`.

    Args:
        tokens: bytes -> id; ids are in the order of the merges.
        special: tokens that are matched in the text; none contains white space.
        pattern: a name in PATTERNS.
        plain: special tokens spelled in a text are ordinary text.
    """

    name = "tiktoken"

    def __init__(self, tokens: Mapping[bytes, int], special: Mapping[str, int], *, pattern: str, plain: bool) -> None:
        import tiktoken

        self._tokens = dict(tokens)
        self.library = tiktoken.Encoding(
            "mdata", pat_str=PATTERNS[pattern], mergeable_ranks=self._tokens, special_tokens=dict(special)
        )
        self._special = pattern_of_any(() if plain else special)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `TokenizerEngine`."""
        return [self._encode_long(text) if len(text) > _LONG_RUN_CHARS else self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        # Passing a thousand names takes longer than encoding a short text.
        special = set(self._special.findall(text))
        return self.library.encode_to_numpy(text, allowed_special=special, disallowed_special=())

    def _encode_long(self, text: str) -> Ids:
        parts: list[Ids] = []
        start = 0
        for run in _LONG_RUN.finditer(text):
            if text[run.end() : run.end() + 1] in ("\r", "\n"):
                continue
            # Blanks at the end of the text or before a special token are one word, including the last.
            last = run.end() - (not self._ends(text, run.end()))
            parts += [self._encode(text[start : run.start()]), self._one_word.encode_to_numpy(text[run.start() : last])]
            start = last
        return np.concatenate([*parts, self._encode(text[start:])])

    def _ends(self, text: str, place: int) -> bool:
        return place == len(text) or self._special.match(text, place) is not None

    @cached_property
    def _one_word(self) -> Any:
        """Encode a single word, without a pattern."""
        import tiktoken

        return tiktoken.Encoding("mdata", pat_str="(?s:.+)", mergeable_ranks=self._tokens, special_tokens={})

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; a nonexistent id becomes U+FFFD."""
        try:
            return self.library.decode(ids)
        except KeyError:
            names = self.library.special_tokens_set
            valid_ids = {*self._tokens.values(), *map(self.library.encode_single_token, names)}
            unknown = "\ufffd".encode()
            parts = (self.library.decode_single_token_bytes(id) if id in valid_ids else unknown for id in ids)
            return b"".join(parts).decode(errors="replace")


def as_definition(tokens: Mapping[bytes, int], special: Mapping[str, int], *, pattern: str) -> dict[str, Any] | str:
    """The same tokenizer as a tokenizer.json; or why no tokenizer.json gives the same ids."""
    merges = []
    if max(map(len, tokens)) > _LONGEST_ENTRY_BYTES:
        return "an entry is very long"
    for token in sorted((token for token in tokens if len(token) > 1), key=tokens.__getitem__):
        parts = _two_parts(token, tokens)
        if parts is None:
            return "an entry cannot be reached by merges"
        merges.append([from_bytes(part) for part in parts])
    vocabulary = {from_bytes(token): id for token, id in tokens.items()}
    if any(content in vocabulary for content in special):
        return "a special token is an ordinary entry too"
    vocabulary.update(special)
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": content, **flags} for content, id in special.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "byte_fallback": False, "vocab": vocabulary, "merges": merges},
    }


def _two_parts(token: bytes, tokens: Mapping[bytes, int]) -> list[bytes] | None:
    """The two parts that the last merge joins; None if entries of lower rank leave more than two parts."""
    parts = [token[at : at + 1] for at in range(len(token))]
    this = tokens[token]
    while len(parts) > 2:
        ranks = [tokens.get(left + right, this) for left, right in pairwise(parts)]
        lowest = min(ranks)
        if lowest >= this:
            return None
        at = ranks.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
