"""Twin of mdata_cpp/philox.hpp and permutation.hpp: Philox4x32-10 and the keyed permutation of [0, n).

Plain integers, one entry at a time. Sources: Salmon et al., SC 2011 (Philox); Black and Rogaway, CT-RSA 2002
(cycle walking). `key` is the lower and the upper 64 bits of the key.
"""

from __future__ import annotations

LARGEST_TABLE = 4096
TABLE_TAG = 0xFFFFFFFF
ROUNDS = 8


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words from four words of counter and two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keyed_words(key: tuple[int, int], place: int, *, tag: int) -> tuple[int, int, int, int]:
    """Return the words of one position under a 128-bit key, half of which is in the counter."""
    low, high = key
    return philox4x32((place, tag, high & 0xFFFFFFFF, high >> 32), (low & 0xFFFFFFFF, low >> 32))


def permutation(n: int, key: tuple[int, int]) -> list[int]:
    """Return the whole permutation of [0, n) as a list: position -> value."""
    if n <= LARGEST_TABLE:
        return _fisher_yates(n, key)
    return [forward(place, n, key=key) for place in range(n)]


def shuffled_range(first: int, n: int, *, key: tuple[int, int]) -> list[int]:
    """Return [first, first + n) in the order of the permutation of [0, n)."""
    return [first + value for value in permutation(n, key)]


def entry(place: int, n: int, *, key: tuple[int, int]) -> int:
    """Return the value at one position of the permutation of [0, n)."""
    return _fisher_yates(n, key)[place] if n <= LARGEST_TABLE else forward(place, n, key=key)


def forward(place: int, n: int, *, key: tuple[int, int]) -> int:
    """Send one position through the Feistel network until it falls inside [0, n)."""
    bits = (n - 1).bit_length()
    left_bits, right_bits = bits // 2, bits - bits // 2
    while True:
        left, right = place >> right_bits, place & ((1 << right_bits) - 1)
        widths = (left_bits, right_bits)
        for number in range(ROUNDS):
            mixed = (left ^ keyed_words(key, right, tag=number)[0]) & ((1 << widths[0]) - 1)
            left, right, widths = right, mixed, widths[::-1]
        place = left << right_bits | right
        if place < n:
            return place


def _fisher_yates(n: int, key: tuple[int, int]) -> list[int]:
    table = list(range(n))
    for i in range(n - 1, 0, -1):
        words = keyed_words(key, i, tag=TABLE_TAG)
        j = ((words[1] << 32 | words[0]) * (i + 1)) >> 64
        table[i], table[j] = table[j], table[i]
    return table
