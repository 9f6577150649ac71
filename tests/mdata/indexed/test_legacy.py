"""Older formats: valid pairs are read like the slow twin reads them, all others are refused by file and field."""

from __future__ import annotations

import json
import random
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import DamageError, UsageError
from mdata.indexed.legacy import LegacyReader
from mdata.indexed.reader import IndexedReader
from tests.helpers.examples import examples
from tests.helpers.legacy_pairs import FORMS, TYPES, write_legacy
from tests.reference.legacy import read_legacy

NAMES = {
    "megatron": "Megatron's TNTIDX",
    "merged": "Megatron's TNTIDX",
    "fairseq": "fairseq's TNTIDX",
    "fairseq-mmap": "fairseq's MMIDIDX",
}


def documents_of(prefix) -> list[list[tuple[float, ...]]]:
    """What the groups give, as the twin does."""
    found = []
    with LegacyReader(prefix) as reader:
        for tokens, lengths, ends in reader.groups():
            assert tokens.dtype == reader.dtype and len(tokens) == lengths.sum() and ends[-1] == len(lengths)
            sequences = [tuple(part.tolist()) for part in np.split(tokens, np.cumsum(lengths)[:-1])][: len(lengths)]
            found += [sequences[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        assert len(found) == reader.num_documents
        assert sum(map(len, found)) == reader.num_sequences
        assert sum(len(sequence) for document in found for sequence in document) == reader.num_tokens
    return found


def assert_equal_to_twin(prefix) -> bool:
    """The same documents, or both refuse; whether they were taken."""
    expected = read_legacy(prefix)
    if expected is None:
        with pytest.raises(DamageError) as caught:
            LegacyReader(prefix)
        assert len(str(caught.value).splitlines()) <= 4
        return False
    assert repr(documents_of(prefix)) == repr(expected)  # by their spelling, because a float may be no number
    return True


def test_pairs_of_the_oracle_are_read_as_they_were_written(oracles):
    folder = oracles / "oracle/legacy"
    cases = json.loads((folder / "cases.json").read_text())["cases"]
    assert len(cases) == 10
    for case in cases:
        prefix = folder / case["file"]
        expected = case.get("documents")
        if expected is None:
            expected = [[[id + 1 for id in sentence]] for sentence in case["sentences"]]
        assert [[list(sequence) for sequence in document] for document in documents_of(prefix)] == expected
        assert assert_equal_to_twin(prefix)
        with LegacyReader(prefix) as reader:
            assert reader.dtype.name == case["dtype"]
            assert reader.form == ("Megatron's TNTIDX" if "documents" in case else "fairseq's TNTIDX")
            assert reader.has_boundaries == ("documents" in case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("code", TYPES)
def test_every_form_and_type(tmp_path, form, code):
    documents = [[[1, 2, 3], [4]], [], [[5]], [[], [6, 7]]]
    write_legacy(tmp_path / "x", documents, form=form, code=code)
    with LegacyReader(tmp_path / "x") as reader:
        assert (reader.form, reader.dtype) == (NAMES[form], np.dtype(TYPES[code]))
        assert reader.has_boundaries == (form == "megatron")
    if form != "megatron":
        documents = [[sequence] for document in documents for sequence in document]
    assert documents_of(tmp_path / "x") == [[tuple(sequence) for sequence in document] for document in documents]
    with pytest.raises(DamageError, match=rf"{NAMES[form]}(.|\n)*mdata adopt .*x --convert NEWPREFIX"):
        IndexedReader(tmp_path / "x")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("documents", [[], [[[]]], [[], []]])
def test_pairs_without_tokens(tmp_path, form, documents):
    write_legacy(tmp_path / "x", documents, form=form)
    assert assert_equal_to_twin(tmp_path / "x")


WORDS = {  # (word of 8 bytes in the .idx of three sequences in two documents, its new value) -> what is refused
    (1, 2): "bad version",
    (2, 0): "bad dtype code",
    (2, 11): "bad dtype code",
    (2, 5): "bad item size",
    (3, 8): "bad item size",
    (4, 2): "bad size",
    (4, 2**60): "bad size",
    (5, 4): "bad size",
    (6, 0): "bad size",
    (6, 2**61): "bad size",
    (8, 2): "bad dimension offset 1(.|\n)*one dimension",
    (11, 1): "its size does not match|length of sequence 0",
    (12, -1): "bad offset of sequence 1",
    (12, 2**62): "bad offset of sequence 1",
    (12, 4): "bad length of sequence 0(.|\n)*the next offset minus its own",
    (14, 5): "bad length of sequence 2",
    (15, -1): "bad length of sequence 0",
    (17, 2**62 + 3): "bad length of sequence 2",
    (18, 1): "bad document boundary 0",
    (19, -1): "bad document boundary 1",
    (19, 4): "bad document boundary 1",
    (20, 2): "bad last document boundary",
}


@pytest.mark.parametrize(("change", "message"), WORDS.items(), ids=str)
def test_damaged_pairs_are_refused_by_field(tmp_path, change, message):
    write_legacy(tmp_path / "x", [[[1, 2], [3]], [[4, 5, 6]]])
    path = tmp_path / "x.idx"
    index = bytearray(path.read_bytes())
    assert len(index) == 21 * 8
    struct.pack_into("<q", index, change[0] * 8, change[1])
    path.write_bytes(index)
    with pytest.raises(DamageError, match=message):
        LegacyReader(tmp_path / "x")
    assert read_legacy(tmp_path / "x") is None


@pytest.mark.parametrize("form", FORMS)
def test_every_cut_and_every_longer_file_is_refused(tmp_path, form):
    write_legacy(tmp_path / "x", [[[1, 2], [3]], [[4, 5, 6]]], form=form)
    for ending in (".idx", ".bin"):
        path = tmp_path / f"x{ending}"
        whole = path.read_bytes()
        for data in (*(whole[:cut] for cut in range(len(whole))), whole + b"\0", whole + bytes(8)):
            path.write_bytes(data)
            assert not assert_equal_to_twin(tmp_path / "x")
        path.write_bytes(whole)
    assert assert_equal_to_twin(tmp_path / "x")


@examples(400)
@given(
    seed=st.integers(0, 10**9),
    documents=st.lists(st.lists(st.lists(st.integers(0, 100), max_size=4), max_size=3), max_size=4),
    form=st.sampled_from(FORMS),
    code=st.sampled_from(sorted(TYPES)),
)
def test_any_change_is_judged_as_by_the_twin(tmp_path_factory, seed, documents, form, code):
    """Flipped, replaced, cut and added bytes: both refuse, or both read the same."""
    rng = random.Random(seed)
    prefix = tmp_path_factory.mktemp("r") / "x"
    write_legacy(prefix, documents, form=form, code=code)
    path = prefix.with_name(rng.choice(("x.idx", "x.idx", "x.bin")))
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(3) if data else 0):
        at = rng.randrange(len(data))
        data[at] = rng.choice((data[at] ^ 1, data[at] ^ 2, rng.randrange(256)))
    if rng.random() < 0.2 and data:
        data = data[: rng.randrange(len(data))]
    if rng.random() < 0.2:
        data += bytes(rng.randrange(1, 20))
    path.write_bytes(data)
    assert_equal_to_twin(prefix)


@examples(100)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 100), max_size=4), max_size=3), max_size=30),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 40)),
    form=st.sampled_from(FORMS),
)
def test_blocks_of_any_size(tmp_path_factory, documents, sizes, form):
    prefix = tmp_path_factory.mktemp("b") / "x"
    write_legacy(prefix, documents, form=form, code=6)
    module = sys.modules["mdata.indexed.legacy"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("_ENTRIES_AT_ONCE", "_DOCUMENTS_AT_ONCE", "_GROUP_BYTES"), sizes, strict=True):
            patch.setattr(module, name, value)
        assert assert_equal_to_twin(prefix)


def test_groups_are_small(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["mdata.indexed.legacy"], "_GROUP_BYTES", 100)
    write_legacy(tmp_path / "x", [[[1] * 10]] * 9 + [[[2] * 200]] + [[[3]]])
    with LegacyReader(tmp_path / "x") as reader:
        assert [group.tokens.nbytes for group in reader.groups()] == [80, 80, 80, 80, 40, 800, 4]


def test_one_boundary_that_is_not_zero(tmp_path):
    write_legacy(tmp_path / "x", [[[1, 2], [3]]], form="merged")
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[-8] = 1
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(DamageError, match="bad document boundary 0"):
        LegacyReader(tmp_path / "x")


def test_a_file_that_shrinks_is_an_error(tmp_path):
    write_legacy(tmp_path / "x", [[[1, 2], [3]], [[4, 5, 6]]])
    with LegacyReader(tmp_path / "x") as reader:
        (tmp_path / "x.bin").write_bytes(b"")
        with pytest.raises(DamageError, match=r"x\.bin became shorter"):
            list(reader.groups())


@pytest.mark.parametrize("ending", ["idx", "bin"])
def test_a_missing_file_is_named(tmp_path, ending):
    write_legacy(tmp_path / "x", [])
    (tmp_path / f"x.{ending}").unlink()
    with pytest.raises(UsageError, match=rf"x\.{ending}: No such file"):
        LegacyReader(tmp_path / "x")
