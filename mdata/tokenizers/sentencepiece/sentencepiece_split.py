"""Splits texts into parts that are encoded separately: at special tokens, or to keep blanks.

Megatron's tool does both around the SentencePiece library. All parts of a batch go to the engine at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mdata.tokenizers.base.token_matching import first_listed, pattern_of_any
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, indices_in_batch
from mdata.util.arrays import running_sums

# A symbol that is unlikely to be a piece; Megatron's choice.
MARK = "\u262f"
# Between two blanks; a blank at the start of the text; the end of the text, or before its final line feed.
_BLANKS_TO_KEEP = re.compile(r"(?<= )(?= )|^ | (?=\n?\Z)")

Encode = Callable[[Sequence[str]], tuple[IdArray, LengthArray]]


class TokenSplitter:
    """Splits texts at tokens: the earliest first; at the same position, the one that was listed first.

    Args:
        tokens: text -> id, in their order.
        trimmed: an id that is removed from the start of each part after a token, except the last.
    """

    def __init__(self, tokens: Mapping[str, int], trimmed: int | None) -> None:
        self.tokens = dict(tokens)
        self._trimmed = trimmed
        self._pattern = pattern_of_any(first_listed(tokens))

    def encode(self, texts: Sequence[str], encode: Encode) -> tuple[IdArray, LengthArray]:
        """The ids of all texts, including the tokens between the parts, and the number of ids of each.

        Raises:
            TextRefused: a text that has no ids.
        """
        parts: list[str] = []
        # For each text: the number of parts, and the ids of the tokens between them.
        between: list[list[int]] = []
        for text in texts:
            matches = list(self._pattern.finditer(text))
            starts = [0, *(match.end() for match in matches)]
            stops = [*(match.start() for match in matches), len(text)]
            parts += [text[start:stop] for start, stop in zip(starts, stops, strict=True)]
            between.append([self.tokens[match[0]] for match in matches])
        ids, lengths = encode_parts(parts, [len(tokens) + 1 for tokens in between], encode=encode)
        return self._joined(np.split(ids, np.cumsum(lengths)[:-1]), between)

    def _joined(self, parts: list[IdArray], between: list[list[int]]) -> tuple[IdArray, LengthArray]:
        joined: list[IdArray] = []
        lengths = np.zeros(len(between), dtype=np.int64)
        rest = iter(parts)
        for index, tokens in enumerate(between):
            of_text = [next(rest)]
            for place, token in enumerate(tokens):
                if place and len(of_text[-1]) and of_text[-1][0] == self._trimmed:
                    of_text[-1] = of_text[-1][1:]
                of_text += [np.array([token], dtype=np.int32), next(rest)]
            lengths[index] = sum(map(len, of_text))
            joined += of_text
        return np.concatenate([np.empty(0, dtype=np.int32), *joined]), lengths


def encode_parts(parts: Sequence[str], counts: Sequence[int], *, encode: Encode) -> tuple[IdArray, LengthArray]:
    """Encode the parts of several texts with `encode`.

    Raises:
        TextRefused: a part has no ids; names its text.
    """
    with indices_in_batch(np.repeat(np.arange(len(counts)), counts)):
        return encode(parts)


def split_blanks(text: str) -> list[str]:
    """The parts of a text, each ending with a mark, so that all blanks are kept."""
    marked = _BLANKS_TO_KEEP.sub(f" {MARK} ", text).rstrip()
    return [part + MARK for part in marked.split(MARK) if part]


def without_last(ids: IdArray, lengths: LengthArray, *, counts: Sequence[int]) -> tuple[IdArray, LengthArray]:
    """The ids without the last of each part, and the lengths of the texts, given the number of parts of each."""
    keep = np.ones(len(ids), dtype=np.bool_)
    keep[(np.cumsum(lengths) - 1)[lengths > 0]] = False
    ends = running_sums(np.maximum(lengths - 1, 0))
    return ids[keep], np.diff(ends[np.cumsum([0, *counts])])
