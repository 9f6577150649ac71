"""A corpus is one stream over its shards, whatever the path by which it was opened."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import DamageError, UsageError
from mdata.manifest.io import save_manifest
from mdata.manifest.types import InputFile, Provenance
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples
from tests.helpers.manifests import corpus_of_pairs, some_blend, some_corpus

DOCUMENTS = st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4)


@examples(40)
@given(shards=st.lists(DOCUMENTS, min_size=1, max_size=4), data=st.data())
def test_shards_read_as_one_stream(tmp_path_factory, shards, data):
    folder = tmp_path_factory.mktemp("shards")
    total, lengths, documents = 0, [], []
    for number, shard in enumerate(shards):
        size = sum(map(sum, shard))
        write_pair(folder / f"s{number}", shard, tokens=np.arange(total, total + size))
        total += size
        lengths += [length for document in shard for length in document]
        documents += [sum(document) for document in shard]
    corpus_of_pairs(folder / "all.json", [f"s{number}" for number in range(len(shards))])
    corpus = mdata.open_corpus(folder / "all.json")
    assert (corpus.num_tokens, corpus.num_sequences, corpus.num_documents) == (total, len(lengths), len(documents))
    start = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - start))
    assert corpus.read(start, count).tolist() == list(range(start, start + count))
    out = np.full(count, -1, np.int64)
    assert corpus.read(start, count, out=out) is out
    assert out.tolist() == list(range(start, start + count))
    first = data.draw(st.integers(0, len(lengths)))
    last = data.draw(st.integers(first, len(lengths)))
    assert corpus.token_bounds(first, last) == (sum(lengths[:first]), sum(lengths[:last]))
    begins = np.concatenate(([0], np.cumsum(documents))).tolist()
    for number, length in enumerate(documents):
        assert corpus.document(number).tolist() == list(range(begins[number], begins[number] + length))


def test_documents_are_counted_from_both_ends_as_in_a_list(tmp_path):
    write_pair(tmp_path / "a", [[3], [2, 1], [4]])
    corpus = mdata.open_corpus(tmp_path / "a")
    assert corpus.document(-1).tolist() == corpus.document(2).tolist()
    assert corpus.document(-3).tolist() == corpus.document(0).tolist()
    for number in (3, -4):
        with pytest.raises(IndexError, match=f"document {number} of 3"):
            corpus.document(number)
    assert repr(corpus).endswith(f"a', 3 documents, 10 tokens of int32, id {corpus.id[:12]}>")


def test_paths_that_mean_the_same_pair(tmp_path):
    write_pair(tmp_path / "v1.5_text_document", [[3], [2]], code=8)
    names = ["v1.5_text_document", "v1.5_text_document.bin", "v1.5_text_document.idx"]
    bare = [mdata.open_corpus(tmp_path / name) for name in names]
    assert len({corpus.id for corpus in bare}) == 1
    assert (bare[0].name, bare[0].num_tokens, bare[0].dtype) == ("v1.5", 5, np.uint16)
    assert bare[0].manifest.verified is False
    assert (bare[0].eod, bare[0].largest_id, bare[0].tokenizer_fingerprint) == (None, None, None)
    assert bare[0].load_tokenizer() is None
    corpus_of_pairs(tmp_path / "v1.5_text_document.json", ["v1.5_text_document"], verified=True)
    for name in [*names, "v1.5_text_document.json"]:
        assert mdata.open_corpus(tmp_path / name).manifest.verified is True


def test_a_name_that_is_not_utf_8_is_refused_where_a_manifest_would_hold_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path(os.fsdecode(b"\xfe"))
    folder.mkdir()
    for prefix in (Path("x"), Path(os.fsdecode(b"\xff")), folder / "x"):
        write_pair(prefix, [[3]])
    for act in (
        lambda: mdata.open_corpus(os.fsdecode(b"\xff")),
        lambda: mdata.adopt(os.fsdecode(b"\xff"), None),
        lambda: mdata.make_blend(["1", f"{folder}/x"], "mix.json"),
    ):
        with pytest.raises(UsageError, match=r"not UTF-8(.|\n)*found: .*\\udcf[ef](.|\n)*rename"):
            act()
    assert mdata.open_dataset(folder / "x", sequence_length=2).read([0]).text.tolist() == [[0, 1, 2]]


def test_a_bare_id_covers_the_index_and_the_size_of_bin(tmp_path):
    ids = set()
    for name, documents, code in [("a", [[3]], 8), ("b", [[2], [1]], 8), ("c", [[3]], 4), ("d", [[4]], 8)]:
        write_pair(tmp_path / name, documents, code=code)
        ids.add(mdata.open_corpus(tmp_path / name).id)
    assert len(ids) == 4
    shutil.copy(tmp_path / "a.bin", tmp_path / "moved.bin")
    shutil.copy(tmp_path / "a.idx", tmp_path / "moved.idx")
    assert mdata.open_corpus(tmp_path / "moved").id in ids


def test_pickling_opens_again_and_checks_the_id(tmp_path, monkeypatch):
    write_pair(tmp_path / "a", [[5]])
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(mdata.open_corpus("a"))
    assert len(data) < 1200
    monkeypatch.chdir("/")
    assert pickle.loads(data).read(1, 3).tolist() == [1, 2, 3]
    write_pair(tmp_path / "a", [[6]])
    with pytest.raises(DamageError, match="was replaced while it was in use"):
        pickle.loads(data)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_a_process_that_sees_the_same_files_opens_none_before_it_reads(tmp_path, monkeypatch, mode):
    write_pair(tmp_path / "a", [[5], [4]])
    corpus_of_pairs(tmp_path / "a.json", ["a"])
    corpus = mdata.open_corpus(tmp_path / "a", mode=mode, checked=False)
    data = pickle.dumps(corpus)
    with monkeypatch.context() as patched:
        patched.setattr("mdata.corpus.corpus.open_corpus", None)
        patched.setattr("mdata.manifest.io.load_manifest", None)
        twin = pickle.loads(data)
    assert (twin.num_tokens, twin.num_documents, twin.largest_id) == (9, 2, corpus.largest_id)
    assert not {"data", "tables"} & set(vars(twin.readers[0]))
    assert twin.read(4, 3).tolist() == corpus.read(4, 3).tolist()
    assert twin.manifest == corpus.manifest
    assert pickle.loads(pickle.dumps(twin)).id == corpus.id


def test_copies_of_the_files_are_opened_by_the_path(tmp_path):
    """As where another machine has its own: the same content, other files."""
    write_pair(tmp_path / "a", [[5]])
    data = pickle.dumps(mdata.open_corpus(tmp_path / "a"))
    for end in (".idx", ".bin"):
        shutil.copy(tmp_path / f"a{end}", tmp_path / "copy")
        (tmp_path / "copy").replace(tmp_path / f"a{end}")
        assert pickle.loads(data).read(1, 3).tolist() == [1, 2, 3]


def test_provenance_is_read_where_it_is_asked_for(tmp_path):
    write_pair(tmp_path / "a", [[5]])
    plain = mdata.open_corpus(tmp_path / "a").manifest
    inputs = [InputFile(path="x" * 5000, bytes=1, modified_ns=0, hash="0" * 64, block_bytes=1, rows=1)]
    provenance = Provenance(
        program="p", options={}, inputs=inputs, records=1, skipped={}, special_in_text=None, origins=None
    )
    save_manifest(msgspec.structs.replace(plain, provenance=provenance), tmp_path / "a.json")
    data = pickle.dumps(mdata.open_corpus(tmp_path / "a.json"))
    assert len(data) < 2000
    twin = pickle.loads(data)
    assert twin.manifest.provenance == provenance
    late = pickle.loads(data)
    save_manifest(msgspec.structs.replace(plain, level="sentence"), tmp_path / "a.json")
    with pytest.raises(DamageError, match=r"a\.json was replaced while it was in use"):
        _ = late.manifest


@pytest.mark.parametrize("change", [{"documents": 9}, {"sequences": 9}, {"tokens": 9}, {"bytes": 9}])
def test_a_pair_that_is_not_the_manifests_is_damage(tmp_path, change):
    write_pair(tmp_path / "a", [[3], [2]])
    shard = msgspec.structs.replace(mdata.open_corpus(tmp_path / "a").manifest.shards[0], **change)
    made = msgspec.structs.replace(some_corpus(), dtype="int32", shards=[shard], tokenizer=None)
    save_manifest(made, tmp_path / "m.json")
    (name,) = change
    file = "idx" if name in ("documents", "sequences") else "bin"
    with pytest.raises(DamageError, match=rf"a\.{file} is not the one that m\.json describes\n  found: {name}: "):
        mdata.open_corpus(tmp_path / "m.json")


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("files", [[".bin"], [".idx"], [".idx", ".bin"]])
@pytest.mark.parametrize("sizes", [[[2]], [[3], [2, 4]]])
def test_a_file_of_another_corpus_is_named(tmp_path, checked, files, sizes):
    write_pair(tmp_path / "a", [[3], [2]])
    corpus_of_pairs(tmp_path / "m.json", ["a"])
    write_pair(tmp_path / "b", sizes)
    index = bytearray((tmp_path / "b.idx").read_bytes())
    index[17] = 5  # int64: twice the size of a token
    (tmp_path / "b.idx").write_bytes(index)
    for end in files:
        shutil.copy(tmp_path / f"b{end}", tmp_path / f"a{end}")
    named = " and ".join(str(tmp_path / f"a{end}") for end in files)
    with pytest.raises(DamageError) as error:
        mdata.open_corpus(tmp_path / "m.json", checked=checked)
    assert str(error.value).split(" that ")[0] == f"{named} {'is not the one' if len(files) == 1 else 'are not those'}"
    assert ("copy the pair again, or remove m.json" in str(error.value)) is (len(files) == 2)


def test_what_is_no_corpus(tmp_path):
    with pytest.raises(UsageError, match=r"neither a manifest nor a \.bin/\.idx pair"):
        mdata.open_corpus(tmp_path / "none")
    with pytest.raises(UsageError, match=r"none\.json: No such file"):
        mdata.open_corpus(tmp_path / "none.json")
    save_manifest(some_blend(), tmp_path / "mix.json")
    with pytest.raises(UsageError, match=r"mix\.json is a blend"):
        mdata.open_corpus(tmp_path / "mix.json")
    write_pair(tmp_path / "f", [[1]])
    index = bytearray((tmp_path / "f.idx").read_bytes())
    index[17] = 7  # float32
    (tmp_path / "f.idx").write_bytes(index)
    with pytest.raises(UsageError, match="holds float32 values"):
        mdata.open_corpus(tmp_path / "f")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("web", "web_text_document?"),
        ("web.idx", "check the path"),
        ("wbe_text_documnt", "web_text_document?"),
        ("web.jsonl", "make a corpus of it with mdata preprocess --input {}/web.jsonl"),
        ("other.jsonl", "check the path"),
        ("none/web", "check the path"),
    ],
)
def test_a_path_that_names_no_corpus_is_told_what_is_meant(tmp_path, name, meant):
    write_pair(tmp_path / "web_text_document", [[1]])
    (tmp_path / "web.jsonl").write_text("")
    with pytest.raises(UsageError) as error:
        mdata.open_corpus(tmp_path / name)
    assert f"\n  try: {meant.format(tmp_path)}".replace("try: web", f"try: {tmp_path}/web") in str(error.value)


@pytest.mark.parametrize("length", [246, 250, 251, 300])
def test_a_name_that_is_too_long_is_no_corpus(tmp_path, length):
    """Itself, or only with the ending or the dot of a file that is looked for."""
    path = tmp_path / ("x" * length)
    for opened in (mdata.open_corpus, mdata.verify, lambda path: mdata.open_dataset(str(path), sequence_length=8)):
        with pytest.raises(UsageError, match=r"neither a manifest|opening .*: File name too long"):
            opened(path)
    with pytest.raises(UsageError, match=r"matches|File name too long|no corpus"):
        mdata.open_dataset(f"{path}*", sequence_length=8)


def test_scattered_sequences_are_refused_as_a_stream(tmp_path):
    write_pair(tmp_path / "a", [[2], [2]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[42:58] = np.array([8, 0], "<i8").tobytes()  # the two pointers, exchanged
    (tmp_path / "a.idx").write_bytes(index)
    corpus = mdata.open_corpus(tmp_path / "a")
    assert corpus.document(0).tolist() == [2, 3]
    with pytest.raises(UsageError, match="its sequences are not contiguous"):
        corpus.token_bounds(0, 2)


def test_tables_are_checked_at_opening_or_when_they_are_used(tmp_path):
    write_pair(tmp_path / "a", [[2], [2], [2]])
    corpus_of_pairs(tmp_path / "a.json", ["a"])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[54] = 9  # the pointer of sequence 1
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(DamageError, match=r"a\.idx is not the one that a\.json describes"):
        mdata.open_corpus(tmp_path / "a.json")
    corpus = mdata.open_corpus(tmp_path / "a.json", checked=False)
    assert corpus.read(0, 6).tolist() == list(range(6))
    for wrong in (lambda: corpus.token_bounds(0, 1), lambda: corpus.lengths, lambda: corpus.document(0)):
        with pytest.raises(DamageError, match=r"a\.idx is not the one that a\.json describes"):
            wrong()
    assert mdata.open_dataset(tmp_path / "a.json", sequence_length=2)[0]["tokens"].shape == (2,)


def test_reading_by_pread_is_the_same(tmp_path):
    write_pair(tmp_path / "a", [[2], [5]])
    corpus = mdata.open_corpus(tmp_path / "a", mode="pread")
    assert pickle.loads(pickle.dumps(corpus)).mode == corpus.mode == "pread"
    assert corpus.read(1, 5).tolist() == [1, 2, 3, 4, 5]
    assert corpus.document(1).tolist() == [2, 3, 4, 5, 6]
    assert corpus.token_bounds(1, 2) == (2, 7)
    with pytest.raises(UsageError, match="no mode 'read' of reading"):
        mdata.open_corpus(tmp_path / "a", mode="read")
