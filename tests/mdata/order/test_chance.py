"""Permutations and offsets over many keys look random, and the same checks detect poor ones.

The keys are fixed, so the result never changes. benchmarks/permutation_bias.cpp measures the effect of few rounds over
far more keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from mdata.order.native_order import OrderKey, StreamOrder
from mdata.order.permutation import Permutation, shuffled_range
from mdata.util.arrays import Int64s
from mdata.util.random_keys import Key
from tests.helpers.chance import RARE, normal_tail, of_counts, of_values, tail
from tests.helpers.examples import soaked
from tests.reference import permutation as twin

Maker = Callable[[int, int, Int64s], Int64s]  # (n, number of keys, places) -> values, [keys, places]
RIGHT_BITS = 7  # of the right half of a place, where n takes 13 bits
TABLES, NETWORKS = (8, 64, 700), (4097, 5000)


def ours(n: int, keys: int, places: Int64s) -> Int64s:
    return np.array([Permutation(n, Key(number, n, 0)).core.forward(places) for number in range(keys)])


def rotation(n: int, keys: int, places: Int64s) -> Int64s:
    starts = np.random.default_rng(n).integers(0, n, keys)
    return (places + starts[:, None]) % n


def shuffle_with_any(n: int, keys: int, places: Int64s) -> Int64s:
    """The well-known wrong shuffle: each place changes with any other, not with one that is left."""
    table, all_keys = np.tile(np.arange(n), (keys, 1)), np.arange(keys)
    for i, j in enumerate(np.random.default_rng(n).integers(0, n, (n, keys))):
        at_i, at_j = table[all_keys, i].copy(), table[all_keys, j]
        table[all_keys, i], table[all_keys, j] = at_j, at_i
    return table[:, places]


def network(rounds: int, *, walk: bool = True) -> Maker:
    """The Feistel network of so many rounds, many keys at once; without cycle walking its values are taken mod n."""

    def make(n: int, keys: int, places: Int64s) -> Int64s:
        bits = (n - 1).bit_length()
        widths = (bits // 2, bits - bits // 2)
        low = np.repeat(np.arange(keys, dtype=np.uint64), len(places))
        found = np.tile(places.astype(np.uint64), keys)
        todo = np.arange(len(found))
        while len(todo):
            left, right = found[todo] >> widths[1], found[todo] & ((1 << widths[1]) - 1)
            for number in range(rounds):
                word = twin.keyed_words((low[todo], n), right, tag=number)[0]
                left, right = right, (left ^ word) & ((1 << widths[number % 2]) - 1)
            found[todo] = (left << widths[1] | right) % (1 << 63 if walk else n)
            todo = todo[found[todo] >= n]
        return found.astype(np.int64).reshape(keys, len(places))

    return make


def value_at_a_place(make: Maker, n: int, keys: int, place: int) -> float:
    return of_values(make(n, keys, np.array([place])), n)


def step_of_neighbours(make: Maker, n: int, keys: int, place: int) -> float:
    values = make(n, keys, np.array([place, place + 1]))
    return of_values(np.diff(values) % n - 1, n - 1)


def order_of_neighbours(make: Maker, n: int, keys: int, place: int) -> float:
    return of_values(np.diff(make(n, keys, np.array([place, place + 1]))) > 0, 2)


def every_value_at_every_place(make: Maker, n: int, keys: int) -> float:
    """Counts [place, value]: rows and columns sum to `keys`, so (n - 1)^2 of them are free."""
    values = make(n, keys, np.arange(n))
    seen = np.array([np.bincount(column, minlength=n) for column in values.T])
    return tail(float(((seen - keys / n) ** 2).sum() * (n - 1) / keys), (n - 1) ** 2)


def every_arrangement(make: Maker, n: int, keys: int) -> float:
    digits = make(n, keys, np.arange(n)) @ n ** np.arange(n)
    seen = np.unique(digits, return_counts=True)[1]
    return of_counts(np.append(seen, np.zeros(math.factorial(n) - len(seen))))


def left_xor_chances(n: int) -> NDArray[np.float64]:
    """Of two different values drawn from [0, n): how often their left halves differ by each xor."""
    sizes = np.bincount(np.arange(n) >> RIGHT_BITS, minlength=64)
    pairs = np.array([(sizes * sizes[np.arange(64) ^ differing]).sum() for differing in range(64)])
    pairs[0] -= n
    return pairs / (n * (n - 1))


def xor_of_left_halves(make: Maker, n: int, keys: int) -> float:
    """Of places with equal right halves: where a network of few rounds is weakest."""
    one, other = (make(n, keys, np.array([5, 5 + (3 << RIGHT_BITS)])) >> RIGHT_BITS).T
    return of_counts(np.bincount(one ^ other, minlength=64), left_xor_chances(n))


def kept_xors(make: Maker, n: int, keys: int) -> float:
    """Whole permutations: over pairs of places with equal right halves, how often the xor of left halves is kept."""
    lefts = np.arange(n >> RIGHT_BITS)[:, None]
    places = lefts << RIGHT_BITS | np.arange(1 << RIGHT_BITS)
    moved = (make(n, keys, places.ravel()) >> RIGHT_BITS).reshape(keys, *places.shape) ^ lefts
    alike = moved[:, :, None] == moved[:, None]
    kept = alike.sum(axis=(1, 2, 3)) - places.size  # each place is like itself
    differing = (lefts ^ lefts.T)[lefts != lefts.T]
    excess = kept - left_xor_chances(n)[differing].sum() * (1 << RIGHT_BITS)
    return normal_tail(float(excess.mean() / (excess.std() / math.sqrt(keys))))


def test_the_tail_is_the_tabulated_one():
    # Abramowitz and Stegun, table 26.8, and exp(-x / 2) for two degrees.
    for square, df, expected in ((3.84146, 1, 0.05), (18.3070, 10, 0.05), (29.8767, 9, 0.00046), (124.342, 100, 0.05)):
        assert tail(square, df) == pytest.approx(expected, rel=0.02)
    assert tail(9.0, 2) == pytest.approx(math.exp(-4.5))
    assert tail(4096.0, 4096) == pytest.approx(0.5, abs=0.01)
    assert normal_tail(4.8916) == pytest.approx(1e-6, rel=0.001)


def test_the_network_of_the_tests_is_ours():
    for n in (4097, 5000, 10**9):
        places = np.array([0, 1, 128, n - 1])
        assert (network(8)(n, 20, places) == ours(n, 20, places)).all()


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_every_arrangement_is_as_likely(n):
    assert every_arrangement(ours, n, 20_000) > RARE


@pytest.mark.parametrize("n", [2, 3, 7, 16, 40])
def test_every_value_comes_as_often_at_every_place(n):
    assert every_value_at_every_place(ours, n, 20_000) > RARE


NEIGHBOURS = [(n, place) for n in (*TABLES, *NETWORKS) for place in (0, 1, -2)]


@pytest.mark.parametrize(("n", "place"), soaked(NEIGHBOURS, but=NEIGHBOURS[::4]))
def test_values_and_neighbours(n, place):
    for check in (value_at_a_place, step_of_neighbours, order_of_neighbours):
        assert check(ours, n, max(10_000, 6 * n), place % n) > RARE, check.__name__


@pytest.mark.parametrize("n", NETWORKS)
def test_halves_of_a_network(n):
    assert xor_of_left_halves(ours, n, 40_000) > RARE
    assert kept_xors(ours, n, 100) > RARE


@pytest.mark.parametrize("n", [2**40 + 15, 2**63])
def test_large_networks_fill_their_range_evenly(n):
    values = ours(n, 20_000, np.array([0, 1, n // 2, n - 1]))
    parts = (values // (n // 64 + 1)).T
    for part in parts:
        assert of_values(part, 64) > RARE
    for one, other in pairwise(parts):
        assert of_values(one // 4 * 16 + other // 4, 256) > RARE


def test_rows_of_a_batch_take_every_order():
    rows = [shuffled_range(0, 5, key=Key(number, 1, 0)) for number in range(20_000)]
    assert every_arrangement(lambda *_: np.array(rows), 5, 20_000) > RARE


def test_poor_permutations_are_seen():
    """Each by the check that is made for it, by far."""
    seen = {
        "a rotation, all": every_arrangement(rotation, 5, 20_000),
        "a rotation, steps": step_of_neighbours(rotation, 64, 10_000, 0),
        "a shuffle with any, all": every_arrangement(shuffle_with_any, 5, 20_000),
        "a shuffle with any, places": every_value_at_every_place(shuffle_with_any, 16, 20_000),
        "values mod n": value_at_a_place(network(8, walk=False), 5000, 30_000, 1),
        "2 rounds": xor_of_left_halves(network(2), 5000, 10_000),
        "4 rounds": kept_xors(network(4), 5000, 100),
    }
    assert all(chance < RARE**2 for chance in seen.values()), seen


def pairs_of_offsets(found: Int64s, num: int) -> float:
    """Of an epoch and the next one, in four parts of the range each; every offset counts once."""
    sizes = np.bincount(np.arange(num) * 4 // num) / num
    parts = found.reshape(-1, 2) * 4 // num
    return of_counts(np.bincount(parts[:, 0] * 4 + parts[:, 1], minlength=16), np.outer(sizes, sizes).ravel())


@pytest.mark.parametrize(("tokens", "length", "num"), [(90, 4, 4), (1001, 10, 10), (1000, 64, 64), (71, 64, 7)])
def test_offsets_of_epochs(tokens, length, num):
    native = StreamOrder(tokens, length, key=OrderKey(1234, "corpus"))
    n = native.samples_per_epoch
    epochs = [native.epoch_of(epoch * n)[1:] for epoch in range(20_000)]
    found = np.array([offset for offset, _ in epochs])
    first = np.array([int(order.forward([0])[0]) for _, order in epochs])
    assert of_values(found, num) > RARE
    assert pairs_of_offsets(found, num) > RARE
    assert of_values(first, n) > RARE
    if num % 4 == 0:
        assert of_values(found * 4 // num * n + first, 4 * n) > RARE


def test_offsets_of_seeds_and_corpora():
    for keys in ([OrderKey(seed, "corpus") for seed in range(10_000)], [OrderKey(1, str(c)) for c in range(10_000)]):
        found = [StreamOrder(1001, 10, key=key).epoch_of(0)[1] for key in keys]
        assert of_values(found, 10) > RARE


def test_poor_offsets_are_seen():
    assert of_values(np.random.default_rng(1).integers(0, 256, 20_000) % 100, 100) < RARE**2
    assert pairs_of_offsets(np.arange(20_000) % 10, 10) < RARE**2
