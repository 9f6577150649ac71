from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mdata.errors import UsageError
from mdata.samples.gpt import GptSamples
from mdata.samples.rows import RowOptions, empty_rows
from tests.helpers.corpora import FileStream, write_pair
from tests.helpers.examples import examples

DOCUMENTS = [[5, 3], [], [1], [9, 2, 4], [16]]  # 40 tokens in 7 sequences


def samples(tmp_path, *, sequences=(0, 7), length=4, **options):
    write_pair(tmp_path / "x", DOCUMENTS)
    return GptSamples(
        FileStream(tmp_path / "x"), sequences, options=RowOptions(sequence_length=length), seed=1, **options
    )


def test_tokens_say_where_they_come_from_and_labels_follow_them(tmp_path):
    gpt = samples(tmp_path)
    for k in range(3 * gpt.order.samples_per_epoch):
        sample = gpt.sample(k)
        start = gpt.order.start(k)
        assert sample["tokens"].tolist() == list(range(start, start + 4))
        assert sample["labels"].tolist() == list(range(start + 1, start + 5))
        assert sample["loss_mask"].tolist() == [1.0] * 4
        assert [sample[name].dtype.name for name in ("tokens", "labels", "loss_mask")] == ["int64", "int64", "float32"]
        assert gpt.token_range(k) == (start, start + 5)


def test_a_range_of_sequences_is_never_left(tmp_path):
    gpt = samples(tmp_path, sequences=(2, 5))  # tokens 8 to 20
    seen = {token for k in range(200) for token in gpt.sample(k)["tokens"].tolist()}
    assert seen == set(range(8, 19))


def test_a_batch_read_in_one_call_stays_in_its_range(tmp_path):
    gpt = samples(tmp_path, sequences=(2, 5))  # tokens 8 to 20
    numbers = np.arange(gpt.order.samples_per_epoch)
    rows = gpt.read(numbers, empty_rows(len(numbers), gpt.options))
    assert rows.tokens.tolist() == [gpt.sample(int(k))["tokens"].tolist() for k in numbers]
    assert rows.labels.tolist() == [gpt.sample(int(k))["labels"].tolist() for k in numbers]


@examples(60)
@given(st.integers(1, 50), st.booleans())
def test_a_validation_pass_reads_every_token_once_and_masks_the_rest(tmp_path_factory, length, extra):
    gpt = samples(tmp_path_factory.mktemp("g"), length=length, extra_token=extra, shuffle=False)
    rows = [gpt.sample(k) for k in range(gpt.num_samples)]
    masks = np.concatenate([row["loss_mask"] for row in rows])
    tokens = np.concatenate([row["tokens"] for row in rows])
    labels = np.concatenate([row["labels"] for row in rows])
    assert (labels[masks == 1] == tokens[masks == 1] + 1).all()
    if extra:
        assert tokens[masks == 1].tolist() == list(range(39))
        assert (labels[masks == 0] == 0).all()
    else:
        assert tokens[:40].tolist() == list(range(40))
        assert [i for i in range(40) if masks[i] == 0] == sorted({*range(length - 1, 40, length), 39})


@examples(40)
@given(st.integers(1, 40), st.booleans(), st.integers(0, 100))
def test_a_sample_costs_one_read_of_just_its_tokens(tmp_path_factory, length, extra, k):
    assume(length + extra <= 40)
    gpt = samples(tmp_path_factory.mktemp("g"), length=length, extra_token=extra)
    gpt.sample(k)
    start, stop = gpt.token_range(k)
    assert gpt.corpus.reads == [(start, stop - start)]
    assert stop - start == length + extra


def test_an_order_belongs_to_its_corpus(tmp_path):
    write_pair(tmp_path / "x", DOCUMENTS)
    starts = set()
    for id in ("a", "b"):
        gpt = GptSamples(FileStream(tmp_path / "x", id=id), (0, 7), options=RowOptions(sequence_length=4), seed=1)
        starts.add(tuple(gpt.order.starts(np.arange(9))))
    assert len(starts) == 2


def test_a_range_without_a_whole_sample_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"8 tokens for sequence length 8(.|\n)*at least 9"):
        samples(tmp_path, sequences=(0, 2), length=8)
