from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from mdata.blend.compose import plan_blend
from mdata.blend.data_path import BlendEntry, as_words, parse_data_path
from mdata.errors import UsageError
from mdata.mixing.shares import Share
from tests.helpers.corpora import write_pair


def entry(path, share=None):
    return BlendEntry(path=path, share=None if share is None else Share(share))


def test_pairs_and_prefixes():
    assert parse_data_path(["0.7", "a", "0.3", " b "]) == (entry("a", "0.7"), entry("b", "0.3"))
    assert parse_data_path(["a", "b"]) == (entry("a", None), entry("b", None))
    assert parse_data_path(["7"]) == (entry("7", None),)


def test_the_oracle_reads_the_same_words(oracles):
    cases = json.loads((oracles / "oracle/blend/cases.json").read_text())["data_path_grammar"]
    assert len(cases) > 10
    for case in cases:
        words = case["arguments"]
        if "raises" in case or words in (["0.5", "a", "x", "b"], ["0.7", "a", "b"]):  # these slip through there
            with pytest.raises(UsageError, match="expected: .*prefix" if words else "a prefix, or"):
                parse_data_path(words)
            continue
        parsed = parse_data_path(words)
        assert [word.path for word in parsed] == case["prefixes"]
        shares = [word.share and word.share.text for word in parsed]
        if case["weights"] is None:
            assert set(shares) == {None}
        else:
            assert [str(float(share)) for share in shares] == case["weights"]


def test_every_weight_that_python_reads_can_be_kept(tmp_path):
    """Megatron's float() takes them, so a blend does: `1_0` was read as a weight and then refused by the manifest."""
    ways = ["+10", "1_0", " 10 ", "+1_0.0", "1_0e0", "+.1e+2", "10."]
    for name in ("a", "b"):
        write_pair(tmp_path / name, [[len(name) + 2], [ord(name)]])
    for way in ways:
        words = [way, str(tmp_path / "a"), "20", str(tmp_path / "b")]
        assert parse_data_path(words)[0] == entry(str(tmp_path / "a"), way.strip().removeprefix("+").replace("_", ""))
        assert plan_blend(words, tmp_path).weights == (1, 2)


@pytest.mark.parametrize("words", [["0.5", "a", "x", "b"], ["x", "a", "0.5", "b"]])
def test_a_mixture_is_refused_with_both_words(words):
    with pytest.raises(UsageError, match=r"mixed(.|\n)*'0.5' is a number and 'x' is not(.|\n)*\./0\.5"):
        parse_data_path(words)


@pytest.mark.parametrize("words", [["0.7", "a", "b"], ["0.7", "a", "0.3"]])
def test_a_forgotten_weight_or_prefix_is_refused(words):
    with pytest.raises(UsageError, match=r"mixed(.|\n)*'0.7' is a number and '[ab]' is not; 3 words do not make pairs"):
        parse_data_path(words)
    assert parse_data_path(["1", "2", "3"]) == (entry("1", None), entry("2", None), entry("3", None))


@pytest.mark.parametrize("words", [["a", "0.7"], ["a", "0.7", "b", "1/3"]])
def test_weights_behind_their_prefixes_are_refused(words):
    with pytest.raises(UsageError, match=r"write each weight before its prefix(.|\n)*found: a 0\.7(.|\n)*try: 0\.7 a"):
        parse_data_path(words)
    assert parse_data_path(["a", "0.7", "b", "c"])[1] == entry("0.7", None)


def test_words_of_python_and_json_are_those_of_a_shell():
    given = [0.7, Path("a"), Fraction(1, 3), "b", np.float32(0.1), "c", 2, "d"]
    assert as_words(given) == ["0.7", "a", "1/3", "b", "0.1", "c", "2", "d"]
    assert as_words(" 0.7 a\n") == ["0.7", "a"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (5, '"valid" is not a list of words\n  found: 5'),
        ({"a": 1}, '"valid" is not a list'),
        ([None], 'word 1 of "valid" is neither'),
        (["1", True], r'word 2 of "valid" is neither a weight nor a corpus\n  found: True'),
    ],
)
def test_what_is_no_word_is_named(words, text):
    with pytest.raises(UsageError, match=text):
        as_words(words, '"valid"')


def test_fractions_are_weights():
    assert parse_data_path(["1/3", "a", "2/3", "b"]) == (entry("a", "1/3"), entry("b", "2/3"))
    assert parse_data_path(["./1/3", "a"]) == (entry("./1/3", None), entry("a", None))


def test_no_words_are_refused():
    with pytest.raises(UsageError, match="no data is given"):
        parse_data_path([])
