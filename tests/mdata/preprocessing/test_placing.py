"""Which files get their names, and what an earlier run's transaction may still do: its own files, and no others."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from mdata.errors import DamageError
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.placing import Staged, complete, discard_run, place, remove_leftovers
from mdata.progress import SILENT
from mdata.util import atomic_io
from tests.helpers.examples import SOAK
from tests.helpers.failures import crash_at
from tests.helpers.notes import Notes

ENDINGS = (".bin", ".idx", ".json", ".origins")


def fresh(folder: Path) -> Path:
    """A result and a quarantine file, complete under temporary names, and the older files that they replace."""
    folder.mkdir()
    for ending in ENDINGS:
        (folder / f"x{ending}").write_bytes(b"old")
        atomic_io.partial_path(folder / f"x{ending}").write_bytes(b"ours")
    (folder / "x.bin.blake3").write_bytes(b"old")
    atomic_io.partial_path(folder / "bad").write_bytes(b"rows")
    return folder


@pytest.fixture
def folder(tmp_path):
    return fresh(tmp_path / "results")


def journal_of(folder) -> Journal:
    journal = Journal(folder / ".x.journal")
    if not journal.records:
        journal.append({"kind": "job", "job": {"outputs": ["x"], "policy": {"quarantine": str(folder / "bad")}}})
    return journal


def placed(folder) -> None:
    files = tuple(folder / f"x{ending}" for ending in ENDINGS)
    place(journal_of(folder), [Staged(folder / "x", None, files)], also=[folder / "bad"])


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".x.journal"}


NEW = {"x.bin", "x.idx", "x.json", "x.origins", "bad"}


def cut_off(folder: Path, n: int) -> bool:
    """Whether a process that gives the names came to its n-th call, before which it was killed."""
    return crash_at(n, lambda: placed(fresh(folder)), removals=True)


@pytest.mark.scaled
@pytest.mark.parametrize("again", [False, True])
def test_a_transaction_that_was_cut_off_anywhere_is_completed(tmp_path, again):
    """Also by a run that is cut off itself, and with nothing left to do."""
    before, completed = names(fresh(tmp_path / "before")), 0
    step = 1 if SOAK > 1 else 3
    for n in itertools.count(1, step):
        folder = tmp_path / str(n)
        if not cut_off(folder, n):
            break
        if again:
            crash_at(n // 2, lambda here=folder: complete(journal_of(here), SILENT, may_replace=True), removals=True)
        if complete(journal_of(folder), SILENT, may_replace=True):
            completed += 1
            assert names(folder) == NEW and {(folder / name).read_bytes() for name in NEW} == {b"ours", b"rows"}
            assert complete(journal_of(folder), SILENT, may_replace=True)
        else:
            assert not completed and names(folder) == before  # the record was not on the disk yet
    assert completed > 10 / step


def test_the_order_of_the_steps(folder, monkeypatch):
    """An .idx speaks of the .bin beside it, and has the manifest of both: at every moment."""
    seen = []
    real = atomic_io.sync_folder
    monkeypatch.setattr(atomic_io, "sync_folder", lambda path: (seen.append(state(folder)), real(path)))
    placed(folder)
    assert [one for one, after in zip(seen, [*seen[1:], None], strict=True) if one != after] == [
        {".bin": "old", ".idx": "old", ".json": "old"},
        {".bin": "old", ".json": "old"},
        {".bin": "old"},
        {".bin": "ours"},
        {".bin": "ours", ".json": "ours"},
        {".bin": "ours", ".idx": "ours", ".json": "ours"},
    ]


def state(folder) -> dict[str, str]:
    return {e: (folder / f"x{e}").read_text() for e in (".bin", ".idx", ".json") if (folder / f"x{e}").exists()}


def test_an_error_undoes_the_renames_and_the_next_run_repeats_them(folder, monkeypatch):
    real = atomic_io.rename

    def rename(source, target):
        if target.name == "x.json":
            raise OSError(5, "no")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "rename", rename)
        with pytest.raises(Exception, match="finishing"):
            placed(folder)
    assert all(name.startswith(".") for name in names(folder))
    assert complete(journal_of(folder), SILENT, may_replace=False)
    assert names(folder) == NEW


@pytest.mark.parametrize("change", ["another", "longer", "copied", "gone"])
def test_another_file_of_the_name_stays(folder, change):
    """The transaction has lost its .bin and cannot be completed; what is left of it goes."""
    placed(folder)
    path = folder / "x.bin"
    if change == "another":
        (folder / "new").write_bytes(b"ours")
        (folder / "new").rename(path)
    elif change == "longer":
        path.write_bytes(b"ours and more")
    elif change == "copied":
        shutil.copy(path, folder / "new")
        (folder / "new").replace(path)
    else:
        path.unlink()
    (folder / "x.idx").rename(atomic_io.partial_path(folder / "x.idx"))
    notes = Notes()
    assert not complete(journal_of(folder), notes, may_replace=True)
    assert ".x.bin.partial was removed" in notes.lines[0]
    assert names(folder) == ({"x.bin"} if change != "gone" else set())


def test_older_files_are_replaced_only_for_the_same_command(tmp_path):
    n = 1
    while not (folder := tmp_path / str(n)).exists() or len(journal_of(folder).records) < 2:
        n += 1
        assert cut_off(tmp_path / str(n), n)
    before = names(folder)
    assert not complete(journal_of(folder), SILENT, may_replace=False)
    assert names(folder) == before
    assert complete(journal_of(folder), SILENT, may_replace=True)
    assert names(folder) == NEW


def test_results_that_are_finished_stay_when_a_run_is_discarded(folder):
    placed(folder)
    journal = journal_of(folder)
    discard_run(journal)
    assert names(folder) == NEW
    assert not complete(journal_of(folder), SILENT, may_replace=True)  # given up


def test_what_was_to_be_joined_later_takes_no_finished_file_along(folder):
    """Partitions have their names and were not joined yet; their quarantine file stays with them."""
    files = tuple(folder / f"x{ending}" for ending in ENDINGS)
    journal = journal_of(folder)
    place(journal, [Staged(folder / "x", None, files)], replaced=[folder / "joined"], also=[folder / "bad"])
    discard_run(journal_of(folder))
    assert names(folder) == NEW


def test_a_run_that_came_on_from_there_has_no_transaction(folder):
    placed(folder)
    journal = journal_of(folder)
    journal.append({"kind": "state"})
    journal.close()
    assert not complete(journal_of(folder), SILENT, may_replace=True)


def test_a_temporary_file_that_somebody_removed_is_named(folder):
    atomic_io.partial_path(folder / "x.idx").unlink()
    with pytest.raises(DamageError, match=r"\.x\.idx\.partial was removed"):
        placed(folder)
    assert (folder / "x.json").read_bytes() == b"old"


def test_leftovers_of_a_result_are_its_hidden_files(folder):
    (folder / ".x.buckets").mkdir()
    (folder / ".x.buckets/0.bin").write_bytes(b"1")
    atomic_io.partial_path(folder / "xx.bin").write_bytes(b"of another")
    remove_leftovers(folder / "x")
    assert {name for name in names(folder) if name.startswith(".")} == {".bad.partial", ".xx.bin.partial"}
