"""Indexes over several parts are located as by a loop over the parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mdata.util.arrays import locate, locate_all, offsets_of
from tests.helpers.examples import examples


@examples(100)
@given(counts=st.lists(st.integers(0, 4), max_size=8))
def test_entries_are_found_in_their_parts(counts):
    offsets = offsets_of(counts)
    walked = [(part, inside) for part, count in enumerate(counts) for inside in range(count)]
    assert offsets[-1] == len(walked) and len(offsets) == len(counts) + 1
    assert [locate(offsets, number) for number in range(len(walked))] == walked
    assert locate(offsets, len(walked)) == (len(counts), 0)
    parts, insides = locate_all(offsets, np.arange(len(walked)))
    assert list(zip(parts.tolist(), insides.tolist(), strict=True)) == walked
