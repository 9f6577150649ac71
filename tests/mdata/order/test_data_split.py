from __future__ import annotations

import json

import pytest

from mdata.errors import UsageError
from mdata.order.data_split import SPLITS, split_edges, split_range


def test_the_oracle_cuts_at_the_same_sequences(oracles):
    cases = json.loads((oracles / "oracle/blend/cases.json").read_text())["split_grammar"]
    compared = 0
    for case in cases:
        text = case["split_string"]
        if "raises" in case or "nan" in case["vector"] or "-1" in text:
            with pytest.raises(UsageError, match="split string"):
                split_edges(text)
            continue
        for size, ranges in case["documents"].items():
            found = [split_range(text, split, num_sequences=int(size)) for split in SPLITS]
            assert found == [None if cut is None else tuple(cut) for cut in ranges], (text, size)
            compared += 1
    assert compared > 50


def test_halves_are_rounded_to_even():
    assert split_range("1,1", "train", num_sequences=5) == (0, 2)
    assert split_range("1,1", "train", num_sequences=7) == (0, 4)


def test_the_sum_is_the_plain_one_in_every_python():
    """Megatron's edges come from ((0.1 + 0.2) + 0.3), which is not 0.6; Python 3.12's sum() would give 0.6."""
    assert split_edges("0.1,0.2,0.3")[1] == 0.1 / ((0.1 + 0.2) + 0.3) != 0.1 / 0.6


def test_any_sign_parts_the_numbers_but_a_minus_of_a_negative_one_is_refused():
    assert split_edges("969-30-1") == split_edges("969, 30, 1") == split_edges("969/30/1")
    for text in ("-1,1", "1, -1", "9e-1,1,0"):
        with pytest.raises(UsageError, match="split string"):
            split_edges(text)


@pytest.mark.parametrize("text", ["", "0,0,0", "0", "1,1,1,1", ".5.5,1", "x", "9" * 400])
def test_what_is_no_split_is_refused(text):
    with pytest.raises(UsageError, match=r"split string cannot be used(.|\n)*969,30,1"):
        split_edges(text)


def test_another_name_is_refused():
    with pytest.raises(UsageError, match=r"there is no split 'dev'(.|\n)*train, valid, test"):
        split_range("1", "dev", num_sequences=3)
