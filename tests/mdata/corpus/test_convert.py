"""Pairs of older formats become the same pair that our writer makes of their documents, or are refused."""

from __future__ import annotations

import errno
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata.corpus.convert import convert
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.examples import examples
from tests.helpers.failures import crash_at, durable_calls
from tests.helpers.legacy_pairs import FORMS, write_legacy
from tests.helpers.manifests import assert_valid
from tests.helpers.notes import Notes
from tests.reference.indexed import read_pair

DOCUMENTS = [[[1, 2, 3], [4]], [], [[5]], [[6, 7], [300, 9]]]
FLAT = [[sequence] for document in DOCUMENTS for sequence in document]
BYTES = load_tokenizer("ByteTokenizer")


@pytest.fixture
def old(tmp_path) -> Path:
    (tmp_path / "old").mkdir()
    write_legacy(tmp_path / "old/x", DOCUMENTS)
    return tmp_path / "old/x"


@pytest.fixture
def new(tmp_path) -> Path:
    return tmp_path / "new/y"


def content(prefix: Path) -> list[list[list[int]]]:
    """The documents by the slow reader."""
    sequences, boundaries = read_pair(prefix)
    lists = [list(sequence) for sequence in sequences]
    return [lists[a:b] for a, b in pairwise(boundaries)]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def test_the_oracle_cases(oracles, tmp_path):
    folder = oracles / "oracle/legacy"
    for case in json.loads((folder / "cases.json").read_text())["cases"]:
        prefix, new = folder / case["file"], tmp_path / case["file"]
        if case["dtype"].startswith("float"):
            with pytest.raises(mdata.UsageError, match="holds float64 values"):
                convert(prefix, new)
            continue
        made = convert(prefix, new, fairseq_ids_plus_one="sentences" in case)
        expected = case.get("documents") or [[sentence] for sentence in case.get("sentences", ())]
        assert content(new) == expected
        assert made.manifest.dtype == case["dtype"] and made.manifest.verified
        assert mdata.verify(new, full=True).problems == ()
        assert_valid(made.path)


@pytest.mark.parametrize("form", FORMS)
def test_each_older_form_is_converted_and_what_it_lacks_is_told(tmp_path, new, form):
    write_legacy(tmp_path / "x", DOCUMENTS, form=form, code=8)
    notes = Notes()
    made = convert(tmp_path / "x.idx", f"{new}.bin", progress=notes)
    assert content(new) == (DOCUMENTS if form == "megatron" else FLAT)
    assert names(new.parent) == {"y.bin", "y.idx", "y.json", "y.blake3"}
    assert made.manifest.shards[0].largest_id == 300 and not made.there_before
    told = "\n".join(notes.lines)
    assert ("has no document boundaries" in told) == (form != "megatron")
    assert ("lost in a merge" in told) == (form == "merged")
    assert ("--fairseq-ids-plus-one" in told) == (form == "fairseq")


def test_it_is_what_adopt_would_say(old, new):
    made = convert(old, new).manifest
    new.with_name("y.json").unlink()
    assert mdata.adopt(new, None, full=True).manifest == made


@pytest.mark.parametrize(("code", "largest", "dtype"), [
    (1, 255, "uint8"), (2, 127, "int8"), (3, 2**15 - 1, "int16"), (4, 2**31 - 1, "int32"), (5, 2**40, "int64"),
    (8, 2**16 - 1, "uint16"), (9, 2**31 - 1, "int32"), (9, 2**31, "int64"), (10, 7, "int32"), (10, 2**63 - 1, "int64"),
])  # fmt: skip
def test_the_type_is_kept_or_wide_enough(tmp_path, new, code, largest, dtype):
    write_legacy(tmp_path / "x", [[[0, largest]]], code=code, form="fairseq")
    made = convert(tmp_path / "x", new).manifest
    assert made.dtype == dtype and content(new) == [[[0, largest]]]


def test_ids_beyond_int64_are_refused(tmp_path, new):
    write_legacy(tmp_path / "x", [[[2**63]]], code=10, form="fairseq")
    with pytest.raises(mdata.UsageError, match="beyond int64"):
        convert(tmp_path / "x", new)
    assert names(new.parent) == set()


@pytest.mark.parametrize(("code", "largest"), [(1, 255), (8, 65535), (4, 2**31 - 1), (9, 2**31)])
def test_one_is_taken_off(tmp_path, new, code, largest):
    write_legacy(tmp_path / "x", [[[1, largest]], [[]]], code=code, form="fairseq")
    made = convert(tmp_path / "x", new, fairseq_ids_plus_one=True).manifest
    assert content(new) == [[[0, largest - 1]], [[]]] and made.shards[0].largest_id == largest - 1
    assert made.dtype == {1: "uint8", 8: "uint16", 4: "int32", 9: "int32"}[code]


def test_one_is_not_taken_off_zero(tmp_path, new):
    write_legacy(tmp_path / "x", [[[1, 0]]], code=8, form="fairseq")
    with pytest.raises(mdata.UsageError, match=r"not written with 1 added(.|\n)*leave out --fairseq-ids-plus-one"):
        convert(tmp_path / "x", new, fairseq_ids_plus_one=True)
    assert names(new.parent) == set()


@pytest.mark.parametrize("form", ["megatron", "merged", "fairseq-mmap"])
def test_only_fairseqs_builder_adds_one(tmp_path, new, form):
    write_legacy(tmp_path / "x", DOCUMENTS, form=form)
    with pytest.raises(mdata.UsageError, match=r"--fairseq-ids-plus-one does not apply: .*which stores ids unchanged"):
        convert(tmp_path / "x", new, fairseq_ids_plus_one=True)


def test_negative_values_are_no_ids(tmp_path, new):
    write_legacy(tmp_path / "x", [[[1, -1]]])
    with pytest.raises(mdata.UsageError, match="holds negative values"):
        convert(tmp_path / "x", new)
    assert names(new.parent) == set()


def test_the_tokenizer_is_kept_and_its_ids_checked(tmp_path, new, old):
    with pytest.raises(mdata.UsageError, match="was not made by this tokenizer"):
        convert(old, new, tokenizer=BYTES)
    assert names(new.parent) == set()
    write_legacy(tmp_path / "x_sentence", [[list(b"some text")]])
    made = convert(tmp_path / "x_sentence", new, tokenizer=BYTES).manifest
    assert made.level == "sentence" and mdata.open_corpus(new).eod == BYTES.eod


def test_again_is_the_same(old, new):
    made = convert(old, new)
    text = made.path.read_bytes()
    assert convert(old, new).there_before and made.path.read_bytes() == text
    made.path.unlink()  # as if the process had died just before the manifest
    assert convert(old, new).manifest == made.manifest


@pytest.mark.parametrize("other", [
    [[[1, 2, 3], [4]], [], [[5]], [[6, 7], [300, 8]]],
    [[[1, 2, 3], [4]], [[5]], [], [[6, 7], [300, 9]]],
    [[[1, 2], [3, 4]], [], [[5]], [[6, 7], [300, 9]]],
    [[[1, 2, 3], [4]], [], [[5]]],
])  # fmt: skip
def test_something_else_is_kept(tmp_path, old, new, other):
    write_legacy(tmp_path / "other", other)
    made = convert(tmp_path / "other", new)
    before = {path: path.read_bytes() for path in new.parent.iterdir()}
    with pytest.raises(mdata.UsageError, match=r"y\.idx already exists and has other content"):
        convert(old, new)
    assert {path: path.read_bytes() for path in new.parent.iterdir()} == before and made.path in before


@pytest.mark.parametrize("there", [("y.bin", "y.idx"), ("y.bin",), ("y.bin", "y.idx", "y.json")])
def test_a_killed_conversion_makes_nothing_else_its_own(tmp_path, old, new, there):
    """Its hidden files lie beside a pair that somebody made since: other documents in as many bytes."""
    other = [[[id + 1 for id in sequence] for sequence in document] for document in DOCUMENTS]
    write_legacy(tmp_path / "other", other)
    made = {path.name: path.read_bytes() for path in convert(tmp_path / "other", new).path.parent.iterdir()}
    for path in new.parent.iterdir():
        path.unlink()
    assert crash_at(6, lambda: convert(old, new)) and ".y.boundaries.partial" in names(new.parent)
    for name in there:
        (new.parent / name).write_bytes(made[name])
    with pytest.raises(mdata.UsageError, match="already exists"):
        convert(old, new)
    assert {name: (new.parent / name).read_bytes() for name in there} == {name: made[name] for name in there}


@pytest.mark.parametrize("name", ["y.bin", "y.json"])
def test_a_file_of_the_name_is_kept(old, new, name):
    new.parent.mkdir()
    (new.parent / name).write_text("mine")
    with pytest.raises(mdata.UsageError, match=f"{name} already exists"):
        convert(old, new)
    assert (new.parent / name).read_text() == "mine"


def test_what_is_no_older_format(tmp_path, old, new):
    with pytest.raises(mdata.UsageError, match="is the prefix of the old pair"):
        convert(old, old.parent / ".." / old.parent.name / "x")
    convert(old, new)
    with pytest.raises(mdata.UsageError, match="is already in the MMIDIDX format"):
        convert(new, tmp_path / "z")
    new.with_name("y.idx").write_bytes(b"nothing")
    with pytest.raises(mdata.DamageError, match=r"y\.idx: bad magic"):
        convert(new, tmp_path / "z")
    with pytest.raises(mdata.UsageError, match="No such file"):
        convert(tmp_path / "nothing", new)


def test_the_hostile_pair(oracles, tmp_path):
    prefix = oracles / "hostile/binidx/idx_magic_tntidx"
    with pytest.raises(mdata.DamageError, match="bad version"):
        convert(prefix, tmp_path / "z")
    assert names(tmp_path) == set()


@pytest.mark.parametrize("use", [mdata.open_corpus, lambda prefix: mdata.adopt(prefix, None)], ids=["open", "adopt"])
def test_an_old_pair_is_named_where_it_is_opened(old, use):
    with pytest.raises(mdata.DamageError, match=r"Megatron's TNTIDX(.|\n)*mdata adopt .*x --convert NEWPREFIX"):
        use(old)
    (problem,) = mdata.verify(old).problems
    assert "--convert" in str(problem)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_write_sync_and_rename_may_fail(old, new, monkeypatch, code):
    """A typed error and nothing left, but for the last sync of the folder; then it can be done."""
    with durable_calls(monkeypatch) as calls:
        made = convert(old, new, tokenizer=None).manifest
    total = len(calls.seen)
    assert total >= 12 and calls.seen[-2][1].endswith("-> y.json")
    for number in range(total):
        for path in new.parent.iterdir():
            path.unlink()
        with durable_calls(monkeypatch, number, code=code), pytest.raises(mdata.ResourceError, match=os.strerror(code)):
            convert(old, new)
        assert names(new.parent) == (set() if number < total - 1 else {"y.bin", "y.idx", "y.json", "y.blake3"})
        assert convert(old, new).manifest == made


def test_a_conversion_killed_anywhere_leaves_nothing_half_made(old, new):
    """What has a final name is whole, and the same command goes on to the same result."""
    made = convert(old, new).manifest
    calls, came = 0, True
    while came:
        for path in new.parent.iterdir():
            path.unlink()
        came = crash_at(calls, lambda: convert(old, new))
        left = names(new.parent)
        if "y.json" in left:
            assert mdata.verify(new, full=True).problems == ()
        if "y.idx" in left:
            assert content(new) == DOCUMENTS
        assert convert(old, new).manifest == made
        assert not [name for name in names(new.parent) if "partial" in name]
        calls += 1
    assert calls > 12


@examples(60)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(1, 100), max_size=4), max_size=3), max_size=20),
    form=st.sampled_from(FORMS),
    code=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 10]),
    group_bytes=st.integers(1, 200),
    plus_one=st.booleans(),
)
def test_any_documents(tmp_path_factory, documents, form, code, group_bytes, plus_one):
    folder = tmp_path_factory.mktemp("c")
    write_legacy(folder / "x", documents, form=form, code=code)
    plus_one = plus_one and form == "fairseq"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["mdata.indexed.legacy"], "_GROUP_BYTES", group_bytes)
        convert(folder / "x", folder / "y", fairseq_ids_plus_one=plus_one)
        assert convert(folder / "x", folder / "y", fairseq_ids_plus_one=plus_one).there_before
    expected = [[[id - plus_one for id in sequence] for sequence in document] for document in documents]
    if form != "megatron":
        expected = [[sequence] for document in expected for sequence in document]
    assert content(folder / "y") == expected
