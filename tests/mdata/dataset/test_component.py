"""An .idx that differs from its manifest gives a DamageError with its name, whatever kind of samples reads it."""

from __future__ import annotations

import struct

import pytest

import mdata
from mdata import DamageError
from mdata.manifest.io import save_manifest
from tests.helpers.corpora import write_pair
from tests.helpers.masked import make_vocabulary
from tests.helpers.open_by_keys import open_by_keys

LENGTHS, POINTERS = 34, 34 + 4 * 40
BOUNDARIES = POINTERS + 8 * 40
MASKED = {"sequence_length": 12, "vocabulary": make_vocabulary()}
NAMED = (
    r"c\.idx is not the one that c(\.json)? describes(.|\n)*found: hash(.|\n)*`mdata verify .*c(\.json)?` for details"
)


def written(prefix, documents, *, described: bool = True):
    """A pair of 20 documents of two sequences, with its manifest where it is described; how it is opened."""
    write_pair(prefix, documents)
    if not described:
        return prefix
    path = prefix.with_name(prefix.name + ".json")
    save_manifest(mdata.open_corpus(prefix).manifest, path)
    return path


def overwrite(prefix, place: int, code: str, value: int) -> None:
    """Change an .idx where it lies, as a map sees it."""
    with prefix.with_suffix(".idx").open("r+b") as file:
        file.seek(place)
        file.write(struct.pack(code, value))


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_another_index_of_the_same_size_under_kept_arrays(tmp_path, mode):
    path = written(tmp_path / "c", [[10, 2]] * 20)
    options = {"sequence_length": 4, "order": "megatron", "mode": mode, "cache": str(tmp_path / "cache")}
    open_by_keys(path, **options)
    write_pair(tmp_path / "c", [[2, 10]] * 20)
    dataset = open_by_keys(path, **options)
    with pytest.raises(DamageError, match=NAMED):
        dataset.read(range(20))
    with pytest.raises(DamageError, match=NAMED):
        [dataset[k] for k in range(20)]


CHANGES = [
    ({"kind": "bert", **MASKED}, LENGTHS + 4, "<i", 1 << 30),
    ({"kind": "bert", **MASKED}, LENGTHS + 4, "<i", -(1 << 30)),
    ({"kind": "t5", "decoder_length": 20, **MASKED}, POINTERS + 8, "<q", 1 << 40),
    ({"kind": "bert", "order": "megatron", "num_samples": 60, **MASKED}, LENGTHS + 4, "<i", 1 << 30),
    ({"kind": "document", "longer": "drop"}, BOUNDARIES + 8, "<q", 0),
    ({"order": "megatron", "sequence_length": 2}, LENGTHS, "<i", 0),
]


@pytest.mark.parametrize("described", [True, False], ids=["manifest", "bare"])
@pytest.mark.parametrize(("options", "place", "code", "value"), CHANGES)
def test_an_index_that_changes_while_it_is_mapped(tmp_path, options, place, code, value, described):
    path = written(tmp_path / "c", [[5, 3]] * 20, described=described)
    dataset = open_by_keys(path, **{"sequence_length": 8, **options})
    overwrite(tmp_path / "c", place, code, value)
    with pytest.raises(DamageError, match=NAMED):
        dataset.read(range(dataset.num_samples or 40))


def test_of_a_blend_it_is_the_component_that_is_named(tmp_path):
    written(tmp_path / "b", [[4, 4]] * 20)
    written(tmp_path / "c", [[5, 3]] * 20)
    words = ["1", str(tmp_path / "b"), "1", str(tmp_path / "c")]
    mdata.make_blend(words, tmp_path / "mix.json")
    for options in ({"kind": "document", "longer": "drop"}, {"kind": "bert", **MASKED}):
        dataset = open_by_keys(tmp_path / "mix.json", **{"sequence_length": 8, **options})
        overwrite(tmp_path / "c", *((BOUNDARIES + 8, "<q", 0) if "longer" in options else (LENGTHS, "<i", 1 << 30)))
        with pytest.raises(DamageError, match=NAMED):
            dataset.read(range(39))
        write_pair(tmp_path / "c", [[5, 3]] * 20)


def test_tracing_says_so_too(tmp_path):
    path = written(tmp_path / "c", [[5, 3]] * 20)
    dataset = mdata.open_dataset(path, sequence_length=8, kind=mdata.Document(longer="drop"))
    tracer = mdata.Tracer(dataset)
    overwrite(tmp_path / "c", BOUNDARIES + 8, "<q", 0)
    with pytest.raises(DamageError, match=NAMED):
        [tracer.sample(k) for k in range(19)]


def test_an_index_that_is_gone_is_named(tmp_path):
    dataset = mdata.open_dataset(written(tmp_path / "c", [[5, 3]] * 20), sequence_length=8, order=mdata.MegatronOrder())
    overwrite(tmp_path / "c", LENGTHS, "<i", 0)
    (tmp_path / "c.idx").unlink()
    with pytest.raises(DamageError, match=r"c\.idx is not the one(.|\n)*No such file"):
        dataset.read(range(19))


def test_with_files_as_they_were_the_error_is_ours(tmp_path, monkeypatch):
    dataset = mdata.open_dataset(written(tmp_path / "c", [[5, 3]] * 20), sequence_length=8, order=mdata.MegatronOrder())
    fault = IndexError("a fault of ours")

    def failing(*_, **__):
        raise fault

    monkeypatch.setattr(dataset.components[0].samples, "gather", failing)
    with pytest.raises(IndexError) as caught:
        dataset.read([0])
    assert caught.value is fault
