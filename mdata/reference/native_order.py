"""Twin of mdata/order/native.py: the first token of sample k, from the definition.

T tokens, S a sample, x = 1 with the extra token; keys as in mdata/keys.py.
"""

from __future__ import annotations

from mdata.keys import derive_key
from mdata.reference.permutation import entry


def native_start(sample: int, *, tokens: int, length: int, extra: int, seed: int, corpus_id: str) -> int:
    """Return the first token of a sample of the shuffled order, relative to the range."""
    per_epoch = max(1, (tokens - extra - length + 1) // length)
    epoch, place = divmod(sample, per_epoch)
    key = derive_key("native order v1", seed, corpus_id, epoch)
    offset = key.below(min(length, tokens - extra - per_epoch * length + 1))
    return offset + length * entry(place, per_epoch, key=(key.low, key.high))
