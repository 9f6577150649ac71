"""Twin of native_order.py and mdata_cpp/block_shuffle.hpp: the first token of sample k, from the definition, and
the stream of tokens that it is in where sequences are permuted inside blocks.

T tokens, S a sample, x = 1 with the extra token; keys as in mdata/util/random_keys.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdata.util.random_keys import derive_key
from tests.reference.permutation import entry, keyed_words

BLOCK_TAG = 0xFFFFFFFE


def native_start(sample: int, *, tokens: int, length: int, extra: int, seed: int, corpus_id: str) -> int:
    """Return the first token of a sample of the shuffled order, relative to the range."""
    per_epoch = max(1, (tokens - extra - length + 1) // length)
    epoch, place = divmod(sample, per_epoch)
    key = derive_key("native order v1", seed, corpus_id, epoch)
    offset = key.below(min(length, tokens - extra - per_epoch * length + 1))
    return offset + length * entry(place, per_epoch, key=(key.low, key.high))


def block_order(num_sequences: int, block: int, *, seed: int, corpus_id: str, epoch: int) -> list[int]:
    """Return the sequences of a range (numbered from 0) in the order of an epoch's permuted stream."""
    key = derive_key("native blocks v1", seed, corpus_id, epoch)
    order: list[int] = []
    for number, first in enumerate(range(0, num_sequences, block)):
        a, b, c, d = keyed_words((key.low, key.high), number & 0xFFFFFFFF, tag=number >> 32)
        of_block = (b << 32 | a, d << 32 | c)
        placed: list[int] = []
        for i, sequence in enumerate(range(first, min(first + block, num_sequences))):
            words = keyed_words(of_block, i // 2, tag=BLOCK_TAG)
            low, high = words[i % 2 * 2 : i % 2 * 2 + 2]
            j = ((high << 32 | low) * (i + 1)) >> 64
            placed.append(sequence)
            placed[i], placed[j] = placed[j], sequence
        order += placed
    return order


def block_stream(lengths: Sequence[int], order: Sequence[int]) -> list[tuple[int, int]]:
    """Return (sequence, token in it) of every token of a permuted stream."""
    return [(sequence, token) for sequence in order for token in range(lengths[sequence])]
