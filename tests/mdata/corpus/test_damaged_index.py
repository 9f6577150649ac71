"""One flipped bit of an .idx, for every reader of it: right samples, or a DamageError that names the file.

Never wrong samples.
"""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

import mdata
from mdata import DamageError
from mdata.manifest.io import load_manifest, save_manifest
from mdata.samples.rows import Rows
from tests.conftest import ROOT
from tests.helpers.corpora import write_pair
from tests.helpers.masked import make_vocabulary
from tests.helpers.open_by_keys import open_by_keys

DOCUMENTS = [[3, 4], [], [5, 2, 6], [7, 1], [0, 4, 3], [6, 6], [2, 9], [4, 4, 4, 4]] * 3
SEQUENCES = sum(map(len, DOCUMENTS))
TABLES = {
    "header": range(34),
    "lengths": range(34, 34 + 4 * SEQUENCES),
    "pointers": range(34 + 4 * SEQUENCES, 34 + 12 * SEQUENCES),
    "boundaries": range(34 + 12 * SEQUENCES, 34 + 12 * SEQUENCES + 8 * (len(DOCUMENTS) + 1)),
}
FLIPS_OF_A_TABLE = 10
MASKED = {"sequence_length": 12, "vocabulary": make_vocabulary()}
MEGATRON = {"order": "megatron"}

NO_TABLE = {"plain": {}, "whole": {"split": "whole"}, "mask by id": {"eod": 9, "eod_mask_loss": True}}
# Of these all that a row is made of stands in arrays that are kept; the others look at tables as well.
KEPT_IS_ENOUGH = {"packed": {"kind": "packed"}, "packed, dropped": {"kind": "packed", "longer": "drop"}}
TABLES_READ = {
    "a part": {"split_shares": "50,30,20"},
    "validation": {"split_shares": "50,30,20", "split": "valid"},
    "document masks": {"document_masks": True},
    "dense masks": {"document_masks": True, "create_attention_mask": True},
    "shuffled blocks": {"shuffle_block": 4},
    "shuffled blocks, masks": {"shuffle_block": 4, "document_masks": True},
    "documents": {"kind": "document"},
    "documents, dropped": {"kind": "document", "longer": "drop"},
    "chat": {"kind": "chat"},
    "megatron": MEGATRON,
    "megatron, masks": {**MEGATRON, "document_masks": True},
    "megatron, epochs": {**MEGATRON, "num_samples": 60, "extra_token": False},
    "fill in the middle": {"fim_rate": 0.7, "fim_level": "token", "fim_tokens": (1, 2, 3, 4, 5), **MEGATRON},
    "bert": {"kind": "bert", **MASKED},
    "bert, megatron": {"kind": "bert", "num_samples": 30, **MASKED, **MEGATRON},
    "t5": {"kind": "t5", "decoder_length": 20, **MASKED},
}
ALL = NO_TABLE | KEPT_IS_ENOUGH | TABLES_READ


def write_corpus(folder: Path, *, level: str = "document") -> Path:
    """A manifest over one pair of 24 documents."""
    tokens = np.random.default_rng(3).integers(6, 60, sum(map(sum, DOCUMENTS)))
    write_pair(folder / "c", DOCUMENTS, tokens=tokens, code=8)
    bare = mdata.open_corpus(folder / "c").manifest
    save_manifest(msgspec.structs.replace(bare, level=level), folder / "c.json")
    return folder / "c.json"


def flips(*names: str):
    """(name of the table, byte of the .idx, bit) of some bits of each table."""
    random = Random(22)
    for name in names or TABLES:
        # Low bytes of entries too: a bit of a high one is a number that cannot be.
        low = [place for place in TABLES[name] if (place - TABLES[name].start) % (4 if name == "lengths" else 8) < 2]
        places = random.choices(low, k=FLIPS_OF_A_TABLE - 2) + random.choices(TABLES[name], k=2)
        yield from ((name, place, random.randrange(8)) for place in places)


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def as_bytes(sample) -> bytes:
    fields = vars(sample) if hasattr(sample, "__dict__") else sample
    if isinstance(sample, Rows):
        fields = sample.fields | {"cu_seqlens": sample.cu_seqlens, "max_seqlen": sample.max_seqlen}
    return pickle.dumps({name: np.asarray(value).tolist() for name, value in sorted(fields.items())})


def samples(path: Path, options: dict) -> tuple[bytes, ...]:
    """All that a reader sees: many rows at once, and single ones."""
    data = open_by_keys(path, **{"sequence_length": 8, **options})
    first = range(min(16, data.num_samples or 16))
    singles = [data[k] for k in first]
    return as_bytes(data.read(first)), *map(as_bytes, singles)


def told_or_equal(read, sound, *, idx: Path, names: tuple[str, ...] = ()) -> dict[str, int]:
    """How many flips of each table are named; all others give what the sound file gives."""
    told = dict.fromkeys(names or TABLES, 0)
    for name, place, bit in flips(*names):
        flip(idx, place, bit)
        try:
            assert read() == sound, f"other samples by bit {bit} of byte {place}, of the {name}"
        except DamageError as error:
            assert idx.name in str(error)
            told[name] += 1
        finally:
            flip(idx, place, bit)
    assert read() == sound
    return told


@pytest.mark.parametrize("kept", ["kept", "not kept"])
@pytest.mark.parametrize("mode", ["mmap", "pread"])
@pytest.mark.parametrize("name", ALL)
def test_a_flipped_bit_gives_the_same_samples_or_the_name_of_the_file(tmp_path, name, mode, kept):
    path = write_corpus(tmp_path, level="chat" if name == "chat" else "document")
    options = {**ALL[name], "mode": mode}
    if kept == "kept":
        options["cache"] = str(tmp_path / "cache")
    sound = samples(path, options)
    told = told_or_equal(lambda: samples(path, options), sound, idx=tmp_path / "c.idx")
    expected = dict.fromkeys(TABLES, FLIPS_OF_A_TABLE)
    if name in NO_TABLE or (name in KEPT_IS_ENOUGH and kept == "kept"):
        expected |= dict.fromkeys(("lengths", "pointers", "boundaries"), 0)
    assert told == expected


@pytest.mark.parametrize("name", ["document masks", "megatron"])
def test_in_a_blend_and_in_the_second_shard(tmp_path, name):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_corpus(tmp_path / folder)
    first, second = (load_manifest(tmp_path / folder / "c.json") for folder in ("a", "b"))
    shards = [msgspec.structs.replace(one.shards[0], path=f"{at}/c") for at, one in (("a", first), ("b", second))]
    save_manifest(msgspec.structs.replace(first, shards=shards), tmp_path / "two.json")
    mdata.make_blend(["0.5", str(tmp_path / "two.json"), "0.5", str(tmp_path / "a/c.json")], tmp_path / "mix.json")
    options = {**ALL[name], "num_samples": 40, "cache": str(tmp_path / "cache")}
    read = partial(samples, tmp_path / "mix.json", options)
    told = told_or_equal(read, read(), idx=tmp_path / "b/c.idx", names=("lengths", "pointers", "boundaries"))
    assert set(told.values()) == {FLIPS_OF_A_TABLE}


@pytest.mark.parametrize(
    "read",
    [
        lambda path: [mdata.open_corpus(path).document_sequences(k)[0].tolist() for k in (0, 2, 23)],
        lambda path: [mdata.open_corpus(path, checked=False).document(k).tolist() for k in (0, 1, 23)],
        lambda path: [mdata.open_corpus(path, checked=False).document_of(k) for k in (0, 9)],
        lambda path: [mdata.open_corpus(path, checked=False).sequences_of(k) for k in (0, 9)],
        lambda path: [mdata.open_corpus(path, checked=False).length_of(k) for k in (0, 9)],
        lambda path: [mdata.open_corpus(path, checked=False).token_bounds(k, 9) for k in (0, 5)],
        lambda path: mdata.Tracer(mdata.open_dataset(path, sequence_length=8)).sample(2),
    ],
    ids=["cat", "document", "document of", "sequences of", "length of", "token bounds", "trace"],
)
def test_documents_and_traces_too(tmp_path, read):
    path = write_corpus(tmp_path)
    sound = read(path)
    told = told_or_equal(lambda: read(path), sound, idx=tmp_path / "c.idx")
    assert set(told.values()) == {FLIPS_OF_A_TABLE}


def test_a_pair_without_a_manifest_is_another_corpus_where_its_documents_differ(tmp_path):
    """Nobody knows what was written: lengths and pointers contradict each other, boundaries may be others as well."""
    write_corpus(tmp_path)
    (tmp_path / "c.json").unlink()
    options = {"document_masks": True, "sequence_length": 8}
    sound = open_by_keys(tmp_path / "c", **options)
    other_ids = 0
    for name, place, bit in flips():
        flip(tmp_path / "c.idx", place, bit)
        try:
            found = open_by_keys(tmp_path / "c", **options)
            assert name == "boundaries" and found.data_id != sound.data_id
            other_ids += 1
        except DamageError as error:
            assert "c.idx" in str(error) or "c.bin" in str(error)
        finally:
            flip(tmp_path / "c.idx", place, bit)
    assert other_ids


def test_the_page_on_samples_leads_to_what_readers_find():
    damage, samples = ((ROOT / f"docs/{name}.md").read_text() for name in ("reference/damage", "howto/samples"))
    words = damage.split("## What readers find\n\n")[1].split("\n\n")[0]
    assert "never get a wrong sample" in words and "(../reference/damage.md#what-readers-find)" in samples


def test_another_process_compares_no_hash_of_files_that_are_as_they_were(tmp_path, monkeypatch):
    path = write_corpus(tmp_path)
    data = mdata.open_dataset(path, sequence_length=8, kind=mdata.Gpt(document_masks=True))
    data.read(range(4))
    hashed = []
    monkeypatch.setattr("mdata.indexed.reader.hash_file", lambda *_: hashed.append(1) or "")
    again = pickle.loads(pickle.dumps(data))
    assert as_bytes(again.read(range(4))) == as_bytes(data.read(range(4))) and not hashed
    flip(tmp_path / "c.idx", 40, 0)
    with pytest.raises(DamageError, match=r"c\.idx is not the one that c\.json describes"):
        pickle.loads(pickle.dumps(data)).read(range(4))
    assert hashed


def test_each_index_is_hashed_once_an_opening(tmp_path, monkeypatch):
    from mdata.indexed import reader

    path, hashed, hash_file = write_corpus(tmp_path), [], reader.hash_file
    monkeypatch.setattr(reader, "hash_file", lambda *given: hashed.append(given[0].name) or hash_file(*given))
    data = mdata.open_dataset(path, sequence_length=8, split_shares="50,30,20", kind=mdata.Gpt(document_masks=True))
    for numbers in ([0, 1], [2], [3]):
        data.read(numbers)
        data[numbers[0]]
    assert hashed == ["c.idx"]
    mdata.open_dataset(path, sequence_length=8).read([0])
    assert hashed == ["c.idx"]


def test_an_index_that_cannot_be_read_has_no_hash(tmp_path):
    (reader,) = mdata.open_corpus(write_corpus(tmp_path)).readers
    (tmp_path / "c.idx").unlink()
    assert "found: [Errno 2] No such file" in str(reader.alteration())


def test_a_merge_of_parts_does_not_take_a_damaged_one(tmp_path):
    from mdata.preprocessing.joining import merge_partitions

    write_corpus(tmp_path)
    flip(tmp_path / "c.idx", TABLES["boundaries"].start + 8, 0)
    with pytest.raises(DamageError, match=r"c\.idx is not the one"):
        merge_partitions([tmp_path / "c"], None)  # type: ignore[arg-type]
