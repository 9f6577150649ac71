"""Every write, sync and rename fails once: a typed error, nothing that looks finished, no manifest that is wrong."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import mdata
from mdata import MdataError, ResourceError
from mdata.util import atomic_io
from tests.helpers.failures import assert_what_is_visible_is_true, durable_calls, removals
from tests.mdata.preprocessing.test_preprocess import contents, options, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("loaded_once")]
NAMES = ("out_text_document.bin", "out_text_document.idx", "out_text_document.json")


def litter(folder: Path) -> list[str]:
    return [name for name in contents(folder) if ".partial" in name]


def number_of_calls(monkeypatch, work) -> int:
    with durable_calls(monkeypatch) as calls:
        work()
    return len(calls.seen)


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.soak)])
def test_a_fresh_run_that_fails_leaves_nothing_or_a_journal(tmp_path, monkeypatch, code):
    total = number_of_calls(monkeypatch, lambda: run(tmp_path / "whole", append_eod=True))
    assert total > 15
    for n in range(total):
        folder = tmp_path / f"{code}-{n}"
        with (
            durable_calls(monkeypatch, n, code=code) as calls,
            pytest.raises(ResourceError, match=r"(No space left on device|Input/output error)"),
        ):
            mdata.preprocess(options(folder, append_eod=True))
        left = [name for name in contents(folder) if not name.startswith("tokenizer-")]
        if n < total - 2:  # the last calls make the end of the temporary files and of the journal lasting
            assert all(name.startswith(".") for name in left), (n, calls.seen[-1])
            # Either a journal says how to continue, or nothing is left.
            assert left == [] or ".out_text.journal" in left, (n, calls.seen[-1])
        mdata.preprocess(options(folder, append_eod=True))
        assert contents(folder) == contents(tmp_path / "whole"), n


def test_an_older_result_is_true_or_gone(tmp_path, monkeypatch):
    """A second run over the first one's names: a manifest that is there speaks of the pair beside it."""
    old = run(tmp_path / "old")
    total = number_of_calls(monkeypatch, lambda: run(tmp_path / "old", append_eod=True, overwrite=True))
    seen = set()
    for n in range(total):
        folder = tmp_path / str(n)
        run(folder)
        with durable_calls(monkeypatch, n), pytest.raises(MdataError, match="No space left"):
            mdata.preprocess(options(folder, append_eod=True, overwrite=True))
        left = set(contents(folder))
        assert not litter(folder) or ".out_text.journal" in left
        assert_what_is_visible_is_true(folder)
        if NAMES[1] in left:
            manifest = mdata.load_manifest(folder / NAMES[2])
            seen.add("old" if manifest.id == old.id else "new")
        else:
            seen.add("gone")
    assert seen >= {"old", "gone"}


def interrupted(folder: Path) -> None:
    """A run that ended in the middle, with a journal."""
    with pytest.MonkeyPatch.context() as patch, durable_calls(patch) as calls:
        mdata.preprocess(options(folder / "dry", append_eod=True))
    last = max(number for number, (name, _) in enumerate(calls.seen) if name == "rename")
    with (
        pytest.MonkeyPatch.context() as patch,
        durable_calls(patch, last // 2),
        pytest.raises(MdataError, match="No space left"),
    ):
        mdata.preprocess(options(folder, append_eod=True))


def lock_of(folder: Path) -> str:
    (tokenizer,) = folder.glob("tokenizer-*")
    return f".{tokenizer.name}.lock"


BEFORE = {"fresh": lambda folder: None, "older": run, "interrupted": interrupted}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("code", [pytest.param(errno.EIO, marks=pytest.mark.soak), errno.EPERM])
def test_every_deletion_and_cut_may_fail(tmp_path, monkeypatch, before, code):
    """A typed error or a run that goes on; what is finished is true, and the next run has the whole result."""
    run(tmp_path / "whole", append_eod=True)
    expected = contents(tmp_path / "whole")
    n, came, failed = 0, True, 0
    while came:
        folder = tmp_path / str(n)
        folder.mkdir()
        BEFORE[before](folder)
        with removals(monkeypatch, folder, n, code=code) as calls:
            try:
                mdata.preprocess(options(folder, append_eod=True, overwrite=True))
            except MdataError as error:
                assert str(folder) in str(error) or "out_text" in str(error), error
                failed += 1
        came = len(calls.seen) > n
        assert_what_is_visible_is_true(folder)
        mdata.preprocess(options(folder, append_eod=True, overwrite=True))
        found = {name: text for name, text in contents(folder).items() if not name.startswith("dry")}
        # Where just its removal failed, a lock of the folder or of the tokenizer's stays, empty and held by nobody.
        left = [{}, {lock_of(folder): b""}, {".mdata-runs.lock": b""}]
        assert found in [expected | lock for lock in left], (n, calls.seen[-1])
        n += 1
    assert n > 12 and failed == n - 5  # all but the last, which finds no call to fail, and those at the end of a lock


def test_short_writes_change_nothing(tmp_path, monkeypatch):
    run(tmp_path / "whole")
    real = atomic_io.write
    monkeypatch.setattr(atomic_io, "write", lambda fd, data: real(fd, memoryview(data)[:7]))
    run(tmp_path / "short")
    assert contents(tmp_path / "short") == contents(tmp_path / "whole")


@pytest.mark.parametrize("existing", [False, True])
def test_a_blend_is_written_whole_or_not_at_all(tmp_path, monkeypatch, existing):
    run(tmp_path)
    words = ["1", str(tmp_path / NAMES[2])]
    path = tmp_path / "mix.json"
    total = number_of_calls(monkeypatch, lambda: mdata.make_blend(words, path))
    before = path.read_bytes()
    for n in range(total):
        path.unlink(missing_ok=True)
        if existing:
            path.write_bytes(before)
        with durable_calls(monkeypatch, n), pytest.raises(ResourceError, match=r"writing .*mix\.json"):
            mdata.make_blend(words, path)
        assert path.exists() == (existing or n == total - 1)
        assert litter(tmp_path) == []


def test_a_tokenizer_folder_is_whole_or_gone(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl").write_text('{"text": "a few words"}\n')

    def train(name: str) -> None:
        mdata.train_tokenizer([tmp_path / "x.jsonl"], tmp_path / name, vocab_size=260)

    for n in range(number_of_calls(monkeypatch, lambda: train("whole"))):
        with durable_calls(monkeypatch, n), pytest.raises(ResourceError, match="writing the tokenizer to"):
            train(str(n))
        assert not (tmp_path / str(n)).exists()
