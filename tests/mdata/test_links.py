"""Links with our hidden names: no temporary file, journal or lock is opened through a planted link."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import mdata
from mdata.array_cache import store
from mdata.indexed.append_file import AppendFile
from mdata.preprocessing.journal import Journal, read_records
from mdata.tokenizers.base.tokenizer_folder import write_folder
from mdata.util import atomic_io, file_lock
from tests.mdata.preprocessing.test_preprocess import options

TEXT = b"precious\n"


def atomically(path: Path) -> None:
    atomic_io.atomic_write(path, b"new")


def spooled(path: Path) -> None:
    AppendFile(path).close()


def held(path: Path) -> None:
    with file_lock.hold(path):
        pass


def wait_for(path: Path) -> None:
    with file_lock.wait_for(path):
        pass


DOORS = [
    (atomically, ".x.partial"),
    (spooled, ".x.partial"),
    (held, "x"),
    (wait_for, "x"),
    (Journal, "x"),
    (read_records, "x"),
    (lambda path: write_folder(path, {"vocab.json": b"{}"}), ".x.lock"),
    (lambda path: write_folder(path, {"vocab.json": b"{}"}), "x/.vocab.json.partial"),
]


def planted(link: Path, target: Path) -> None:
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(("use", "name"), DOORS)
def test_a_planted_link_is_refused_and_what_it_leads_to_is_as_it_was(tmp_path, use, name, there):
    target, link = tmp_path / "target", tmp_path / "work" / name
    if there:
        target.write_bytes(TEXT)
    (tmp_path / "work").mkdir()
    planted(link, target)
    with pytest.raises(mdata.UsageError, match=r"is a symbolic link[\s\S]*found: a link to .*target") as caught:
        use(tmp_path / "work" / "x")
    assert str(link) in str(caught.value)
    assert link.is_symlink() and target.exists() == there
    assert not there or target.read_bytes() == TEXT


def test_a_folder_of_arrays(tmp_path):
    """Its lock is planted; what is made has names that nobody can know before."""
    target, key = tmp_path / "target", {"name": "test"}
    target.write_bytes(TEXT)
    entry = store.entry_path(tmp_path / "cache", key)
    entry.parent.mkdir(parents=True)
    planted(entry.with_name(f".{entry.name}.building"), target)
    with pytest.raises(mdata.UsageError, match="is a symbolic link"):
        store.cached(tmp_path / "cache", key, make=lambda: iter([{"a": np.arange(3)}]))
    assert target.read_bytes() == TEXT


def test_every_hidden_name_of_a_run(tmp_path, monkeypatch):
    """The names that `preprocess` opens are collected from a run; a link at any of them stops the next one."""
    real, opened = atomic_io.open_no_link, set()

    def noting(path: Path, flags: int) -> int:
        opened.add(path.relative_to(tmp_path / "whole"))
        return real(path, flags)

    (tmp_path / "whole").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "open_no_link", noting)
        mdata.preprocess(options(tmp_path / "whole", workers=1))
    assert {".lock", ".journal", ".partial"} <= {name.suffix for name in opened} and len(opened) > 6
    target = tmp_path / "target"
    for number, name in enumerate(sorted(opened)):
        folder = tmp_path / str(number)
        folder.mkdir()
        target.write_bytes(TEXT)
        planted(folder / name, target)
        with pytest.raises(mdata.UsageError, match="is a symbolic link"):
            mdata.preprocess(options(folder, workers=1))
        assert target.read_bytes() == TEXT, name
        assert not (folder / "out_text_document.json").exists(), name


def test_another_error_of_links_passes(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="Too many levels"):
        atomic_io.open_no_link(tmp_path / "a" / "x", os.O_RDONLY)
