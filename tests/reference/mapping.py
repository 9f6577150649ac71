"""Twin of mdata/samples/sentence_mapping.py and mdata_cpp/mapping.hpp: the rules in plain Python.

`words` are iterators of random words: 32 bits for targets, 64 for the shuffle. numpy's RandomState gives the first;
MT19937-64, which numpy does not have, is written out here (Matsumoto and Nishimura's 64-bit variant of 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tests.reference.permutation import philox4x32

Row = tuple[int, int, int]


def words32(seed: int) -> Iterator[int]:
    """MT19937, word by word."""
    generator = np.random.RandomState(seed)
    while True:
        yield int(generator.randint(0, 2**32, dtype=np.uint32))


def words64(seed: int) -> Iterator[int]:
    """MT19937-64, word by word."""
    mask, low = 2**64 - 1, 2**31 - 1
    state = [seed & mask]
    for i in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ state[-1] >> 62) + i) & mask)
    while True:
        for i in range(312):
            x = state[i] & ~low | state[(i + 1) % 312] & low
            state[i] = state[(i + 156) % 312] ^ x >> 1 ^ (0xB5026F5AA96619E9 if x & 1 else 0)
        for x in state:
            x ^= x >> 29 & 0x5555555555555555
            x ^= x << 17 & 0x71D67FFFEDA60000
            x ^= x << 37 & 0xFFF7EEE000000000
            yield x ^ x >> 43


def keyed_words(key: tuple[int, int], number: int) -> Iterator[int]:
    """The words of one number under a key."""
    low, high = key
    for block in range(2**32):
        counter = (block, number & 0xFFFFFFFF, number >> 32, high & 0xFFFFFFFF)
        yield from philox4x32(counter, (low & 0xFFFFFFFF, low >> 32))


def one_epoch(
    documents: Sequence[tuple[int, Sequence[int]]],
    *,
    longest: int,
    short_probability: float,
    least_sentences: int,
    words_of: Callable[[int], Iterator[int]],
) -> list[Row]:
    """The rows of documents (first sentence, sizes of the sentences); `words_of(d)`: where its targets come from."""
    rows: list[Row] = []
    for number, (first, sizes) in enumerate(documents):
        if len(sizes) < max(least_sentences, 1) or (len(sizes) > 1 and max(sizes) > 512):
            continue
        words = words_of(number)

        def target(words: Iterator[int] = words) -> int:
            if short_probability == 0:
                return longest
            word = next(words)
            return longest if word % int(1 / short_probability + 0.5) else 2 + word % (longest - 1)

        begin, wanted = 0, target()
        for end in range(1, len(sizes) + 1):
            left = len(sizes) - end
            reached = sum(sizes[begin:end]) >= wanted and end - begin >= least_sentences
            if (reached and left > 1) or left == 0:
                rows.append((first + begin, first + end, wanted))
                begin, wanted = end, target()
    return rows


def shuffled(rows: list[Row], seed: int) -> list[Row]:
    """The rows in Megatron's order."""
    rows, words = list(rows), words64(seed + 1)
    for i in range(len(rows) - 1, 0, -1):
        j = next(words) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows
