"""Folders of datasets' save_to_disk: the listed files in their order, and nothing else of theirs."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from mdata.errors import UsageError
from mdata.sources.folder_files import PathFilter
from mdata.sources.input_files import find_inputs


def save(folder, names=("data-00000-of-00002.arrow", "data-00001-of-00002.arrow"), **state):
    """What datasets 5.2 writes, and the cache file that `map` leaves there."""
    folder.mkdir(parents=True)
    for name in [*names, "cache-0123456789abcdef.arrow"]:
        with pa.OSFile(str(folder / name), "wb") as sink:
            schema = pa.schema([("text", pa.string())])
            with pa.ipc.new_stream(sink, schema) as writer:
                writer.write_table(pa.table({"text": [name]}, schema))
    listed = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "d509", "_split": None}
    (folder / "state.json").write_text(json.dumps({**listed, **state}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def found(*inputs, notes=None, **options):
    result = find_inputs(inputs, **options)
    return [f"{file.path.parent.name}/{file.path.name}" for file in result.files], result.skipped.counts


def test_the_listed_files_in_their_order_and_no_others(tmp_path):
    save(tmp_path / "set", ["b.arrow", "a.arrow"])
    assert found(tmp_path / "set") == (["set/b.arrow", "set/a.arrow"], {"not of the dataset": 1})
    (tmp_path / "more.jsonl").write_text('{"text": "a"}\n')
    names = [f"{tmp_path.name}/more.jsonl", "set/b.arrow", "set/a.arrow"]
    assert found(tmp_path)[0] == names
    assert found(tmp_path, format="arrow")[0] == names[1:]


def test_a_folder_that_only_looks_like_one_is_read_as_ever(tmp_path):
    (tmp_path / "state.json").write_text('{"text": "a"}\n')
    (tmp_path / "dataset_info.json").write_text('{"text": "a"}\n')
    assert len(found(tmp_path)[0]) == 2
    (tmp_path / "state.json").write_text("[" * 100_000)
    assert len(found(tmp_path)[0]) == 2


def test_splits_are_not_read_together(tmp_path):
    for split in ("test", "train"):
        save(tmp_path / "dict" / split, ["x.arrow"])
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"several splits\n  found: test, train(.|\n)*try: give .*dict/train"):
        found(tmp_path / "dict")
    with pytest.raises(UsageError, match="several splits"):
        found(tmp_path)
    assert found(tmp_path / "dict/train")[0] == ["train/x.arrow"]
    assert found(tmp_path / "dict", filter=PathFilter(exclude=("test/",)))[0] == ["train/x.arrow"]
    assert found(tmp_path / "dict", filter=PathFilter(include=("test/*.arrow",)))[0] == ["test/x.arrow"]


@pytest.mark.parametrize("names", [["../x.arrow"], [""], [7]])
def test_a_list_that_leads_elsewhere_is_refused(tmp_path, names):
    save(tmp_path / "set", _data_files=[{"filename": name} for name in names])
    with pytest.raises(UsageError, match=r"state\.json lists data files without a name"):
        found(tmp_path / "set")


def test_a_missing_file_and_indices_are_named(tmp_path):
    folder = save(tmp_path / "set")
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UsageError, match=r"with missing files\n  found: 1 of 2, such as data-00001"):
        found(folder)
    save(tmp_path / "old", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(UsageError, match="indices beside its data"):
        found(tmp_path / "old")
