"""Where samples lie, in words: true for the arithmetic orders, modest for the others, and never read from the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mdata
from mdata.loader.stall_message import describe_places
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys


def make(folder, **options) -> mdata.Dataset:
    names = ["a", "b", "c", "d", "e", "f"]
    for number, name in enumerate(names):
        write_pair(folder / name, [[50 + number]] * 6)  # the same pair twice would be refused
    words = [str(folder / name) for name in names]
    mdata.make_blend([word for path in words for word in ("1", path)], folder / "mix.json")
    return open_by_keys(folder / "mix.json", sequence_length=8, cache=str(folder / "cache"), **options)


def test_the_byte_is_that_of_the_first_token_of_the_sample(tmp_path):
    dataset = make(tmp_path)
    for sample in range(30):
        text = describe_places(dataset, np.array([sample]))
        path, byte = text.split(": ")[1].removesuffix(" (1 sample)").split(" at byte ")
        with Path(path).open("rb") as file:
            file.seek(int(byte))
            assert np.frombuffer(file.read(32), "<i4").tolist() == dataset[sample]["tokens"].tolist()


def test_a_shard_further_on_is_found(tmp_path):
    dataset = make(tmp_path)
    corpus = dataset.components[0].corpus
    corpus.readers, corpus._token_ends = corpus.readers * 2, np.array([300, 600])
    corpus.num_tokens = 600
    assert corpus.file_position(299) == (tmp_path / "a.bin", 1196)
    assert corpus.file_position(300) == (tmp_path / "a.bin", 0)
    assert corpus.file_position(599) == (tmp_path / "a.bin", 1196)


def test_many_components_are_cut_short(tmp_path):
    text = describe_places(make(tmp_path), np.arange(60))
    assert text.count(" at byte ") == 4
    assert text.endswith("(10 samples); 2 more components")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "packed"}, "a: its sample 0 (1 sample)"),
        ({"order": "megatron", "num_samples": 40}, "samples 0"),
    ],
)
def test_of_other_orders_numbers_are_told(tmp_path, options, expected):
    dataset = make(tmp_path, **options)
    text = describe_places(dataset, np.array([0]))
    assert text.split(": ", 1)[-1] == expected.split(": ", 1)[-1]


def test_nothing_is_read_for_it(tmp_path):
    """Where the disk is what is waited for, a word about it must not wait too: the files are gone."""
    write_pair(tmp_path / "a", [[50]] * 6)
    dataset = mdata.open(tmp_path / "a", sequence_length=8, mode="pread")
    for end in (".bin", ".idx"):
        (tmp_path / f"a{end}").unlink()
    dataset.components[0].corpus.readers[0].file = None
    assert "a.bin at byte " in describe_places(dataset, np.arange(4))
