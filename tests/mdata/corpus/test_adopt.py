"""A foreign pair gets a correct manifest, or a refusal that says why; the pair itself is never changed."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata.corpus.adopt import adopt, length_histogram
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer
from mdata.util import atomic_io
from tests.conftest import ROOT
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples
from tests.helpers.failures import durable_calls
from tests.helpers.manifests import assert_valid
from tests.helpers.notes import Notes
from tests.mdata.preprocessing.test_preprocess import run

TOKENIZER = load_tokenizer("HuggingFaceTokenizer", ROOT / "tests/golden/tokenizer")
OTHER = load_tokenizer("ByteTokenizer")


@pytest.fixture
def prefix(tmp_path) -> Path:
    """Real text under the golden tokenizer, in two sequences, an empty document, and one more sequence."""
    tokens, lengths = TOKENIZER.encode_batch(["One sentence. ", "And another one.", "The last document."])
    first, second, third = lengths.tolist()
    write_pair(tmp_path / "x_text_document", [[first, second], [], [third]], tokens=tokens, code=8)
    return tmp_path / "x_text_document"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_full_adoption_knows_everything(prefix):
    made = adopt(prefix, TOKENIZER, full=True)
    assert made.path == prefix.with_name("x_text_document.json") and not made.there_before
    assert_valid(made.path)
    corpus = mdata.open_corpus(prefix)
    assert corpus.manifest == made.manifest and made.manifest.verified and made.manifest.level == "document"
    assert corpus.largest_id == int(corpus.read(0, corpus.num_tokens).max())
    assert corpus.eod == TOKENIZER.eod and corpus.tokenizer_fingerprint == TOKENIZER.fingerprint
    assert corpus.load_tokenizer().decode(corpus.document(2)) == "The last document."
    assert (
        made.manifest.statistics.document_lengths
        == np.bincount([len(corpus.document(i)).bit_length() for i in range(3)]).tolist()
    )
    assert mdata.verify(prefix, full=True).problems == ()


def test_two_at_once_complete_each_other(prefix, monkeypatch):
    """One reads every token, one names the tokenizer; the second comes while the first writes."""
    writing, sync = threading.Event(), atomic_io.sync

    def slow_sync(fd: int) -> None:
        sync(fd)
        if not writing.is_set():
            writing.set()
            time.sleep(0.3)  # for the other to catch up, if nothing holds it

    monkeypatch.setattr(atomic_io, "sync", slow_sync)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(adopt, prefix, None, full=True)
        assert writing.wait(10)
        second = pool.submit(adopt, prefix, TOKENIZER).result()
        assert first.result().manifest.tokenizer is None
    assert second.manifest.verified and second.manifest.tokenizer
    assert_valid(second.path)
    assert mdata.verify(prefix, full=True).problems == ()
    assert not [name for name in names(prefix.parent) if name.startswith(".")]


def test_what_was_adopted_is_what_preprocess_would_have_written(tmp_path):
    """The id of content is the same, whoever wrote the pair."""
    made = run(tmp_path, append_eod=True)
    for name in names(tmp_path) - {"out_text_document.bin", "out_text_document.idx"}:
        path = tmp_path / name
        if path.is_file():
            path.unlink()
    again = adopt(tmp_path / "out_text_document.idx", TOKENIZER, full=True).manifest
    assert again.id == made.id and again.tokenizer == made.tokenizer
    assert again.shards == made.shards
    assert again.statistics.document_lengths == made.statistics.document_lengths


def test_without_full_only_the_index_is_read(prefix):
    """The id is that of a bare pair with this tokenizer; nothing is claimed of the tokens."""
    with prefix.with_name(prefix.name + ".bin").open("r+b") as file:
        file.write(b"\xff\xff")
    made = adopt(prefix, TOKENIZER).manifest
    (shard,) = made.shards
    assert not made.verified and shard.blocks is None and shard.largest_id is None
    assert mdata.verify(prefix, full=True).unhashed == (shard.path,)


def test_a_pair_of_an_unknown_tokenizer(prefix):
    made = adopt(prefix, None, full=True).manifest
    assert made.tokenizer is None and made.verified and mdata.verify(prefix, full=True).problems == ()
    assert {name for name in names(prefix.parent) if name.startswith("tokenizer")} == set()


def test_again_is_the_same_and_mends_what_lies_beside(prefix):
    made = adopt(prefix, TOKENIZER, full=True)
    sidecar = prefix.with_name(prefix.name + ".blake3")
    text, hashes = made.path.read_bytes(), sidecar.read_bytes()
    sidecar.unlink()
    again = adopt(prefix, TOKENIZER, full=True)
    assert again.there_before and again.manifest == made.manifest
    assert made.path.read_bytes() == text and sidecar.read_bytes() == hashes


def test_notes_of_the_user_are_no_difference(prefix):
    from mdata.manifest.io import save_manifest

    made = adopt(prefix, TOKENIZER)
    noted = save_manifest(msgspec.structs.replace(made.manifest, notes={"from": "a friend"}), made.path)
    assert adopt(prefix, TOKENIZER).there_before
    assert mdata.load_manifest(made.path) == noted


@pytest.mark.parametrize("second", [{"tokenizer": OTHER}, {"level": "sentence"}])
def test_another_manifest_is_kept(prefix, second):
    made = adopt(prefix, TOKENIZER)
    text, before = made.path.read_bytes(), names(prefix.parent)
    with pytest.raises(mdata.UsageError, match="already exists with other content"):
        adopt(prefix, **({"tokenizer": TOKENIZER} | second))
    assert made.path.read_bytes() == text and names(prefix.parent) == before


@pytest.mark.parametrize("named", [True, False])
def test_what_a_manifest_does_not_know_is_filled_in(prefix, named):
    """adopt, then what verify --full advises: the same as adopting with --full at once, notes kept."""
    from mdata.manifest.io import save_manifest

    first = adopt(prefix, TOKENIZER)
    save_manifest(msgspec.structs.replace(first.manifest, notes={"from": "a friend"}), first.path)
    notes = Notes()
    made = adopt(prefix, TOKENIZER if named else None, full=True, progress=notes)
    assert not made.there_before and made.manifest.notes == {"from": "a friend"}
    assert f"was {first.manifest.id[:16]} and is {made.manifest.id[:16]}: remake the blends" in notes.lines[-1]
    assert mdata.load_manifest(first.path) == made.manifest and made.manifest.verified
    found = mdata.verify(prefix, full=True)
    assert found.problems == () and found.unhashed == () and found.bin_bytes > 0
    first.path.unlink()
    assert adopt(prefix, TOKENIZER, full=True).manifest.id == made.manifest.id


def test_a_tokenizer_is_filled_in(prefix):
    adopt(prefix, None, level="sentence", full=True)
    made = adopt(prefix, TOKENIZER).manifest
    assert made.verified and made.tokenizer.fingerprint == TOKENIZER.fingerprint and made.level == "sentence"
    assert mdata.verify(prefix, full=True).problems == ()


def test_a_tokenizer_that_does_not_fit_is_not_filled_in(tmp_path):
    write_pair(tmp_path / "x", [[3]], tokens=np.array([1, OTHER.vocab_size, 2]), code=8)
    made = adopt(tmp_path / "x", None, full=True)
    text = made.path.read_bytes()
    with pytest.raises(mdata.UsageError, match=r"was not made by this tokenizer(.|\n)*id 257"):
        adopt(tmp_path / "x", OTHER)
    made.path.write_bytes(text)
    made.path.unlink()
    made = adopt(tmp_path / "x", OTHER)
    text = made.path.read_bytes()
    with pytest.raises(mdata.UsageError, match=r"was not made by this tokenizer(.|\n)*id 257"):
        adopt(tmp_path / "x", None, full=True)
    assert made.path.read_bytes() == text


def test_less_than_is_known_changes_nothing(prefix):
    made = adopt(prefix, TOKENIZER, full=True)
    text = made.path.read_bytes()
    again = adopt(prefix, None)
    assert again.there_before and again.manifest == made.manifest and made.path.read_bytes() == text


def test_a_pair_whose_tokens_changed_is_not_the_same(prefix):
    made = adopt(prefix, TOKENIZER, full=True)
    text, hashes = made.path.read_bytes(), prefix.with_name(f"{prefix.name}.blake3").read_bytes()
    with prefix.with_name(f"{prefix.name}.bin").open("r+b") as file:
        file.write(b"\1\0")
    with pytest.raises(mdata.UsageError, match="already exists with other content"):
        adopt(prefix, TOKENIZER, full=True)
    assert made.path.read_bytes() == text
    assert prefix.with_name(f"{prefix.name}.blake3").read_bytes() == hashes


def test_a_blend_of_that_name_is_kept(prefix):
    part = adopt(prefix, TOKENIZER).path.rename(prefix.with_name("part.json"))
    mdata.make_blend(["1", str(part)], prefix.with_name(f"{prefix.name}.json"))
    with pytest.raises(mdata.UsageError, match="already exists and is a blend"):
        adopt(prefix, TOKENIZER)


def test_a_damaged_manifest_is_kept(prefix):
    path = prefix.with_name(prefix.name + ".json")
    path.write_text('{"format": "mdata-manifest", "version": 1')
    with pytest.raises(mdata.UsageError, match="already exists and is damaged"):
        adopt(prefix, TOKENIZER)
    assert path.read_text().startswith('{"format"')


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    write_pair(tmp_path / "x", [[3]], tokens=np.array([1, OTHER.vocab_size, 2]), code=8)
    with pytest.raises(mdata.UsageError, match=r"was not made by this tokenizer(.|\n)*id 257(.|\n)*at most 256"):
        adopt(tmp_path / "x", OTHER, full=True)
    assert names(tmp_path) == {"x.bin", "x.idx"}
    write_pair(tmp_path / "x", [[3]], tokens=np.array([1, OTHER.vocab_size - 1, 2]), code=8)
    assert adopt(tmp_path / "x", OTHER, full=True).manifest.shards[0].largest_id == 256


def test_a_vocabulary_with_a_gap_has_larger_ids_than_entries(oracles, tmp_path):
    folder = oracles / "hostile/tokenizer"
    spec = TokenizerSpec(
        type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab_gap.json"),
        merge_file=str(folder / "good_merges.txt"),
    )
    tokenizer = load_tokenizer(spec)
    assert tokenizer.eod == 999 > tokenizer.vocab_size
    write_pair(tmp_path / "x", [[2]], tokens=np.array([259, 999]), code=8)
    assert adopt(tmp_path / "x", tokenizer, full=True).manifest.shards[0].largest_id == 999


def test_negative_values_and_floats_are_no_ids(tmp_path):
    write_pair(tmp_path / "x", [[3]], tokens=np.array([1, -1, 2]), code=4)
    with pytest.raises(mdata.UsageError, match="negative values"):
        adopt(tmp_path / "x", None, full=True)
    index = bytearray((tmp_path / "x.idx").read_bytes())
    index[17] = 7
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(mdata.UsageError, match="holds float32 values"):
        adopt(tmp_path / "x", None)
    assert names(tmp_path) == {"x.bin", "x.idx"}


def test_an_odd_type_is_noted(tmp_path):
    write_pair(tmp_path / "x", [[3]], code=4)
    notes = Notes()
    adopt(tmp_path / "x", OTHER, full=True, progress=notes)
    (line,) = notes.lines
    assert "is int32; with 257 entries Megatron's tool would have written uint16" in line


@pytest.mark.parametrize(("name", "level"), [("x_text_sentence", "sentence"), ("x_text_document", "document")])
def test_the_level_stands_in_the_name(tmp_path, name, level):
    write_pair(tmp_path / name, [[3]])
    assert adopt(tmp_path / name, None).manifest.level == level
    assert mdata.load_manifest(tmp_path / f"{name}.json").level == level


@pytest.mark.parametrize("documents", [[], [[]], [[0]]])
def test_a_pair_without_tokens(tmp_path, documents):
    write_pair(tmp_path / "x", documents)
    made = adopt(tmp_path / "x", TOKENIZER, full=True).manifest
    assert made.shards[0].largest_id is None and made.statistics.document_lengths == [len(documents)][: len(documents)]
    assert mdata.verify(tmp_path / "x", full=True).problems == ()


def test_an_unsound_pair_is_refused(oracles, tmp_path):
    for ending in ("bin", "idx"):
        (tmp_path / f"x.{ending}").write_bytes((oracles / f"hostile/binidx/idx_pointer_back.{ending}").read_bytes())
    with pytest.raises(mdata.DamageError, match="bad pointer of sequence 2"):
        adopt(tmp_path / "x", None)
    with pytest.raises(mdata.UsageError, match="neither a manifest nor a"):
        adopt(tmp_path / "nothing", None)


def test_a_pair_that_changes_meanwhile_is_refused(prefix, monkeypatch):
    class Writing(Notes):
        def advance(self, amount: int, **totals: float) -> None:
            with prefix.with_name(prefix.name + ".bin").open("ab") as file:
                file.write(b"more")

    with pytest.raises(mdata.UsageError, match="changed while it was read"):
        adopt(prefix, TOKENIZER, full=True, progress=Writing())
    assert names(prefix.parent) == {"x_text_document.bin", "x_text_document.idx"}


@pytest.mark.parametrize("left", [5_000_001, 4 << 20, 0])
def test_a_pair_that_is_truncated_meanwhile_is_refused(tmp_path, left):
    write_pair(tmp_path / "x", [[3_000_000]])  # three blocks

    class Truncating(Notes):
        def begin(self, label: str, total: int | None, *, unit: str, done: int = 0) -> None:
            os.truncate(tmp_path / "x.bin", left)

    with pytest.raises(mdata.UsageError, match="changed while it was read"):
        adopt(tmp_path / "x", None, full=True, threads=1, progress=Truncating())
    assert names(tmp_path) == {"x.bin", "x.idx"}


def test_a_pair_that_is_replaced_before_it_is_read_is_refused(tmp_path, monkeypatch):
    """Otherwise the manifest had the hashes of one file and the sizes of another, and said that it was verified."""
    write_pair(tmp_path / "x", [[5]])

    def replaced(prefix, dtype):
        (tmp_path / "new").write_bytes((tmp_path / "x.bin").read_bytes()[:8])
        (tmp_path / "new").replace(tmp_path / "x.bin")

    monkeypatch.setattr("mdata.corpus.adopt.check_integers", replaced)
    with pytest.raises(mdata.UsageError, match="changed while it was read"):
        adopt(tmp_path / "x", None, full=True)
    assert names(tmp_path) == {"x.bin", "x.idx"}


def test_a_pair_that_cannot_be_looked_at_again_has_not_changed(prefix, monkeypatch):
    """To wait until nothing writes to it would not help."""
    stat = Path.stat

    class Failing(Notes):
        def end(self) -> None:
            monkeypatch.setattr(Path, "stat", failing)

    def failing(path: Path, **how: bool) -> os.stat_result:
        if path.suffix == ".bin":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, **how)

    with pytest.raises(mdata.ResourceError, match=r"\.bin: Input/output error"):
        adopt(prefix, TOKENIZER, full=True, progress=Failing())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_write_sync_and_rename_may_fail(prefix, monkeypatch, code):
    """A typed error and no manifest; the next adoption then does it."""
    with durable_calls(monkeypatch) as calls:
        made = adopt(prefix, TOKENIZER, full=True)
    total = len(calls.seen)
    assert total >= 12 and calls.seen[-2][1].endswith("-> x_text_document.json")
    for number in range(total):
        for path in [
            *prefix.parent.glob("tokenizer-*/*"),
            *prefix.parent.glob("*.json"),
            *prefix.parent.glob("*.blake3"),
        ]:
            path.unlink()
        with durable_calls(monkeypatch, number, code=code), pytest.raises(mdata.ResourceError, match=os.strerror(code)):
            adopt(prefix, TOKENIZER, full=True)
        assert not made.path.exists() or number == total - 1  # the folder's last sync: the manifest is true
        assert not [name for name in names(prefix.parent) if "partial" in name]
        assert adopt(prefix, TOKENIZER, full=True).manifest == made.manifest


def test_pairs_of_megatron(oracles, tmp_path):
    """Oracle pairs made with the GPT-2 vocabulary: text comes back, and the next user may blend them."""
    cases = json.loads((oracles / "oracle/preprocess/cases.json").read_text())
    vocab = oracles / "vocab/gpt2"
    spec = TokenizerSpec(
        type="GPT2BPETokenizer", vocab_file=str(vocab / "vocab.json"), merge_file=str(vocab / "merges.txt")
    )
    tokenizer = load_tokenizer(spec)
    found = 0
    for path in sorted((oracles / "oracle/preprocess/files").glob("*gpt2*/*.idx")):
        for ending in (".bin", ".idx"):
            (tmp_path / f"{path.stem}{ending}").write_bytes(path.with_suffix(ending).read_bytes())
        made = adopt(tmp_path / path.stem, tokenizer, full=True)
        assert mdata.verify(made.path, full=True).problems == ()
        made.path.unlink()
        found += 1
    assert found and cases


@examples(200)
@given(st.lists(st.lists(st.integers(0, 70), max_size=4), max_size=30), st.integers(1, 7))
def test_the_histogram_counts_documents_by_the_bit_length_of_their_tokens(monkeypatch_module, documents, at_once):
    """bit_length of each document's tokens, counted; whatever the block."""
    monkeypatch_module.setattr(sys.modules["mdata.corpus.adopt"], "_DOCUMENTS_AT_ONCE", at_once)
    lengths = np.array([length for document in documents for length in document], np.int32)
    boundaries = np.cumsum([0, *(len(document) for document in documents)])
    expected = [0] * 65
    for document in documents:
        expected[sum(document).bit_length()] += 1
    while expected and not expected[-1]:
        expected.pop()
    assert length_histogram(lengths, boundaries) == expected


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch
