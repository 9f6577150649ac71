"""Which files are rolled back after a run died: those that its journal names, and no others with the same name."""

from __future__ import annotations

import shutil

import pytest

from mdata.preprocessing.resume import PendingCommit, commit_record, pending_commit, remove_partials
from mdata.util import atomic_io

ENDINGS = ("bin", "origins")


@pytest.fixture
def prefix(tmp_path):
    """A result in the making that has just been given its final names, and what stands beside it."""
    prefix = tmp_path / "x"
    for ending in ENDINGS:
        atomic_io.partial_path(tmp_path / f"x.{ending}").write_bytes(b"ours")
    return prefix


def committed(prefix) -> PendingCommit:
    record = commit_record([prefix], None)
    for ending in ENDINGS:
        atomic_io.rename(atomic_io.partial_path(prefix.with_suffix(f".{ending}")), prefix.with_suffix(f".{ending}"))
    for ending in ("idx", "json", "bin.blake3"):
        prefix.with_name(f"x.{ending}").write_bytes(b"beside")
    return pending_commit([{"kind": "job"}, {"kind": "state"}, record])


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_the_journal_names_is_taken_back_and_nothing_speaks_of_it(prefix):
    pending = committed(prefix)
    for _ in range(2):  # also by a run that died on the way
        pending.roll_back(prefix)
        assert names(prefix.parent) == {".x.bin.partial", ".x.origins.partial"}
    remove_partials(prefix)
    assert names(prefix.parent) == set()


@pytest.mark.parametrize("change", ["another", "longer", "copied", "gone"])
def test_another_file_of_the_name_stays(prefix, change):
    pending, path = committed(prefix), prefix.with_suffix(".bin")
    if change == "another":
        (prefix.parent / "new").write_bytes(b"ours")
        (prefix.parent / "new").rename(path)
    elif change == "longer":
        path.write_bytes(b"ours and more")
    elif change == "copied":
        shutil.copy(path, prefix.parent / "new")
        (prefix.parent / "new").replace(path)
    else:
        path.unlink()
    before = names(prefix.parent) - {"x.origins"}
    pending.roll_back(prefix)
    assert names(prefix.parent) == before | {".x.origins.partial"}


def test_the_quarantine_is_told_from_another(tmp_path):
    path = tmp_path / "bad.jsonl"
    atomic_io.partial_path(path).write_bytes(b"rows")
    record = commit_record([], str(path))
    path.write_bytes(b"rows")
    assert not pending_commit([record]).has_quarantine(path)
    atomic_io.rename(atomic_io.partial_path(path), path)
    pending_commit([record]).roll_back_quarantine(path)
    assert names(tmp_path) == {".bad.jsonl.partial"}


def test_only_the_last_word_counts(prefix):
    record = commit_record([prefix], None)
    assert pending_commit([]) == pending_commit([record, {"kind": "state"}]) == PendingCommit()
    for after in ([], [{"kind": "given up"}], [{"kind": "job"}]):
        assert pending_commit([{"kind": "state"}, record, *after]).files == record["files"] != {}
