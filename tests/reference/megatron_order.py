"""Twin of mdata/order/megatron_order.py: numpy's own generator, Python integers, and a list of all positions.

Samples follow the words of the format: q inputs, and one more token if labels are read. Positions are looked up in a
list, so there is no arithmetic that could be wrong.
"""

from __future__ import annotations

import numpy as np

Place = tuple[int, int]


def epochs_of(tokens: int, wanted: int | None, *, q: int, extra: int) -> int:
    """Return the smallest number of epochs that gives `wanted` samples of q tokens."""
    epochs = 1
    while wanted is not None and epochs * tokens < wanted * q + extra:
        epochs += 1
    return epochs


def is_separate(tokens: int, wanted: int | None, *, epochs: int, q: int, extra: int) -> tuple[bool, int]:
    """Return whether the last epoch is shuffled separately, and how many samples the earlier epochs give."""
    before = ((epochs - 1) * tokens - extra) // q
    needed = (wanted or 0) - before
    return epochs > 1 and needed < int(0.80 * ((tokens - extra) // q)), before


def indices(
    lengths: list[int], span: tuple[int, int], *, wanted: int | None, q: int, seed: int, extra: int, keep: bool
) -> tuple[list[int], list[Place], list[int]]:
    """Return document index, sample index and shuffle index."""
    generator = np.random.RandomState(seed)
    once = list(range(*span))
    tokens = sum(lengths[document] for document in once)
    epochs = epochs_of(tokens, wanted, q=q, extra=extra)
    separate, cut = is_separate(tokens, wanted, epochs=epochs, q=q, extra=extra)
    runs = [once * (epochs - 1), once] if separate else [once * epochs]
    for run in runs:
        generator.shuffle(run)
    documents = [document for run in runs for document in run]
    inputs = max(epochs * tokens - extra, 0)
    samples = -(-inputs // q) if keep else inputs // q
    rows = [range(cut), range(cut, samples)] if separate else [range(samples)]
    shuffled = [list(run) for run in rows]
    for part in shuffled:
        generator.shuffle(part)
    return documents, walk([lengths[d] for d in documents], samples, q=q, extra=extra), [k for p in shuffled for k in p]


def walk(lengths: list[int], samples: int, *, q: int, extra: int) -> list[Place]:
    """Return where each sample begins, and where the last one ends: every token is visited once."""
    places = [(place, offset) for place, length in enumerate(lengths) for offset in range(length)]
    # A sample of q inputs begins at the last label of the previous one: one token further, if labels are read.
    found = [(0, 0)]
    for k in range(1, samples + 1):
        if k * q + extra <= len(places):
            place, offset = places[k * q + extra - 1]
            found.append((place, offset + 1 - extra))
        else:
            # The partial sample ends with the last document that has an input.
            place = max(place for place, length in enumerate(lengths) if length >= extra)
            found.append((place, lengths[place] - extra))
    return found
