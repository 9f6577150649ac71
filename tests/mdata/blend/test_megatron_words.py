"""Random words in Megatron's order, weights spelt in many ways, against the rules; ids follow the order."""

from __future__ import annotations

import random
from decimal import Decimal
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

import mdata
from mdata.blend.compose import plan_blend
from mdata.blend.open_blend import open_blend
from mdata.blend.spec import spec_of_splits
from mdata.dataset.dataset import Dataset
from mdata.errors import UsageError
from mdata.order.megatron_order import MegatronRequest
from mdata.samples.rows import RowOptions
from tests.helpers.corpora import write_pair
from tests.reference.gpt_samples import megatron_samples
from tests.reference.megatron_words import Refused, mix

S = 8
# Corpora of different documents and sizes; two of the sizes are in the ratio 1 : 2.
CORPORA = {"a": [10] * 12, "b": [5] * 12, "c": [3, 9, 17, 1, 0, 40], "d": [70], "e": [6, 2] * 9, "f": [1] * 33}
FIRST = {name: 1000 * number for number, name in enumerate(CORPORA)}


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, lengths in CORPORA.items():
        write_pair(tmp_path / name, [[length] for length in lengths], tokens=FIRST[name] + np.arange(sum(lengths)))
    return tmp_path


@cache
def plain(name, num_samples):
    """All samples of a corpus that is built for so many: their tokens."""
    lengths = CORPORA[name]
    request = MegatronRequest(
        first=0, stop=len(lengths), sequence_length=S, num_samples=num_samples, seed=1234, extra_token=True,
        keep_partial=False,
    )  # fmt: skip
    tokens = [FIRST[name] + place for place in range(sum(lengths))]
    found = megatron_samples(lengths, tokens, request=request, options=RowOptions(sequence_length=S))
    return [tuple(sample["tokens"]) for sample in found]


def expected(words, num_samples, *, per_split):
    found = mix(words, lambda name, n: len(plain(name, n)), num_samples=num_samples, per_split=per_split)
    parts = [plain(*pair) for pair in zip(found.prefixes, found.requests, strict=True)]
    return found, [parts[component][inside] for component, inside in found.order]


def opened(words, num_samples, *, per_split=False, folder=None):
    blend = plan_blend(spec_of_splits({"train": words}), folder) if per_split else open_blend(words)
    options = mdata.DatasetOptions(sequence_length=S, num_samples=num_samples, order=mdata.MegatronOrder())
    return Dataset(blend, options)


def check(words, num_samples, *, per_split, folder):
    """One list against the rules; returns (data id, what it decides), or None where both refuse it."""
    where = f"{' '.join(words)}, {num_samples} samples, {'one list a split' if per_split else 'one list'}"
    try:
        rules, tokens = expected(words, num_samples, per_split=per_split)
    except Refused:
        with pytest.raises(UsageError, match="num_samples"):
            opened(words, num_samples, per_split=per_split, folder=folder)
        return None
    data = opened(words, num_samples, per_split=per_split, folder=folder)
    assert data.num_samples == len(rules.order), where
    if rules.is_blend:
        assert [part.samples.request.num_samples for part in data.components] == rules.requests, where
        found = data.locate(np.arange(data.num_samples))
        assert list(zip(*map(np.ndarray.tolist, found), strict=True)) == rules.order, where
    assert [tuple(row) for row in data.read(np.arange(data.num_samples)).tokens.tolist()] == tokens, where
    return data.data_id, (tuple(rules.prefixes), num_samples, tuple(tokens))


def spelt(value, draw):
    """A number as people write it; all of one value."""
    exact = Fraction(value)
    text = format(Decimal(exact.numerator) / exact.denominator, "f")
    ways = [text, f"{text}0" if "." in text else f"{text}.0", f"{text}e0", f"{Decimal(text):e}"]
    ways += [text.removeprefix("0")] if text.startswith("0.") else [f"0{text}"]
    ways += [f"{exact.numerator}/{exact.denominator}"] if draw.random() < 0.3 else []
    ways += [f"{exact.numerator}e{-k}" for k in range(1, 5) if exact.denominator == 10**k]
    return draw.choice(ways)


def some_words(draw):
    """Words: corpora alone, or with weights: of any size, equal to the corpora's tokens, or in their ratio."""
    names = draw.sample(list(CORPORA), draw.randint(1, 4))
    kind = draw.choice(["none", "tokens", "tokens", "ratio", "tenths", "parts", "any", "whole"])
    if kind == "none":
        return names
    tokens = [sum(CORPORA[name]) for name in names]
    factor = Fraction(draw.choice([1, 2, 3, 5, 7]), draw.choice([1, 2, 10, 100]))
    values = {
        "tokens": tokens,
        "ratio": [number * factor for number in tokens],
        "tenths": [Fraction(number + 1, 10) for number in range(len(names))],
        "parts": [Fraction(draw.randint(1, 99), 100) for _ in names],
        "any": [Fraction(draw.randint(1, 10**6), 10 ** draw.randint(0, 6)) for _ in names],
        "whole": [number + 1 for number in range(len(names))],
    }[kind]
    exact = kind == "tokens" and draw.random() < 0.5
    shares = [str(value) if exact else spelt(value, draw) for value in values]
    return [word for pair in zip(shares, names, strict=True) for word in pair]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_random_words_follow_the_rules_and_no_id_stands_for_two_orders(corpora, seed):
    draw, orders, refused = random.Random(seed), {}, 0
    for _ in range(100):
        words, num_samples = some_words(draw), draw.choice([None, 0, 1, 7, 40, 41, 60, 100])
        found = check(words, num_samples, per_split=draw.random() < 0.3, folder=corpora)
        if found is None:
            refused += 1
            continue
        data_id, decided = found
        assert orders.setdefault(data_id, decided) == decided, f"{' '.join(words)}: an id of another order"
    assert len(orders) > 30 and refused < 40


def test_a_weight_that_equals_the_tokens_is_a_weight(corpora):
    """Five spellings of one blend have one id, and it is not that of the corpora alone."""
    ways = ["120 a 60 b", "120.0 a 60 b", "12e1 a 6e1 b", "2 a 1 b", "240/2 a 60/1 b"]
    ids = [check(way.split(), 100, per_split=False, folder=corpora)[0] for way in ways]
    assert len(set(ids)) == 1
    assert check(["a", "b"], 100, per_split=False, folder=corpora)[0] != ids[0]
    saved = mdata.make_blend("120 a 60 b", "mix.json")
    data = mdata.open_dataset("mix.json", sequence_length=S, num_samples=100, order=mdata.MegatronOrder())
    assert data.data_id == ids[0]
    assert [(part.share, part.set_by) for part in saved.manifest.components] == [("120", "user"), ("60", "user")]


def test_one_weighted_corpus_as_a_list_of_a_split_is_read_as_it_is(corpora):
    alone = check(["a"], 40, per_split=False, folder=corpora)[0]
    assert check(["1.0", "a"], 40, per_split=True, folder=corpora)[0] == alone
    assert check(["120", "a"], 40, per_split=True, folder=corpora)[0] == alone
    of_one = [check([weight, "a"], 40, per_split=False, folder=corpora)[0] for weight in ("1.0", "120", ".5")]
    assert len(set(of_one)) == 1 and alone not in of_one
    plan = plan_blend(spec_of_splits({"train": ["1.0", "a"]}), corpora)
    assert [(part.share, part.set_by) for part in plan.manifest.components] == [("120", "tokens")]


def test_equal_ratios_that_differ_as_doubles_have_their_own_ids(corpora):
    tenths, whole = ["0.1", "a", "0.2", "b", "0.3", "c"], ["1", "a", "2", "b", "3", "c"]
    assert mix(tenths, lambda *_: 100, num_samples=100) != mix(whole, lambda *_: 100, num_samples=100)
    ids = [check(words, 100, per_split=False, folder=corpora)[0] for words in (tenths, whole)]
    assert ids[0] != ids[1]
    assert opened(tenths, 100).blend_id == opened(whole, 100).blend_id  # the native order knows exact ratios alone
    assert "blend_weights" not in opened(whole, 100).identity
    same = ["2 a 4 b 6 c", "1.0 a 2.0 b 3.0 c", "1e0 a 2 b 3 c"]  # their doubles are those of 1, 2 and 3
    assert {opened(way.split(), 100).data_id for way in same} == {ids[1]}
    assert opened(["0.10", "a", "2e-1", "b", ".3", "c"], 100).data_id == ids[0]
