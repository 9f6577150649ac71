"""Locks that name their holder and end with it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from mdata.errors import DamageError, UsageError
from mdata.util import file_lock

FORK = multiprocessing.get_context("fork")


def test_open_locked_keeps_what_is_asked_and_no_more(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    fd = file_lock.open_locked(path, 4)
    os.write(fd, b"ab")
    os.close(fd)
    assert path.read_bytes() == b"0123ab"
    with pytest.raises(DamageError, match=r"found: 6 bytes\n  expected: 7 or more"):
        file_lock.open_locked(path, 7)
    assert path.read_bytes() == b"0123ab"
    os.close(file_lock.open_locked(path))
    assert path.read_bytes() == b""


def _hold(path, theirs) -> None:
    with file_lock.hold(path):
        theirs.send("held")
        theirs.recv()


@contextlib.contextmanager
def another_holder(path):
    """A process that holds the lock; a pipe, because an Event of a killed process hangs."""
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=_hold, args=(path, theirs))
    child.start()
    try:
        assert ours.poll(60) and ours.recv() == "held"
        yield child
    finally:
        with contextlib.suppress(OSError):
            ours.send("go")
        child.join()


def test_a_look_at_a_lock_names_its_holder_and_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    assert file_lock.held_by(path) is None and not path.exists()
    with another_holder(path) as child:
        named = f"process {child.pid} on {os.uname().nodename}"
        assert file_lock.held_by(path) == named == path.read_text()
        with monkeypatch.context() as patch:  # a file system without locks
            patch.setattr(file_lock, "_lock", lambda fd, how: False)
            assert file_lock.held_by(path) == named
        child.kill()
        child.join()
        assert path.read_text() == named and file_lock.held_by(path) is None
    with file_lock.hold(path):
        pass
    assert path.read_text() == "" and file_lock.held_by(path) is None


@pytest.mark.parametrize("locks", [True, False])
def test_a_look_at_a_lock_that_its_holder_removes_meanwhile(tmp_path, monkeypatch, locks):
    path, real = tmp_path / ".lock", fcntl.flock
    path.write_text("process 1 on elsewhere")

    def removed(fd, how):
        path.unlink(missing_ok=True)
        if not locks:
            raise OSError(errno.ENOLCK, "no locks")
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed)
    assert file_lock.held_by(path) == (None if locks else "process 1 on elsewhere")
    opened = file_lock.atomic_io.open_no_link

    def removed_once_open(path, flags):
        fd = opened(path, flags)
        path.unlink()
        return fd

    path.write_text("process 1 on elsewhere")
    monkeypatch.setattr(file_lock.atomic_io, "open_no_link", removed_once_open)
    assert file_lock.held_by(path) == (None if locks else "process 1 on elsewhere")


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path):
    path = tmp_path / "lock"
    for how in ("leaves", "is killed"):
        with another_holder(path) as child:
            said = rf"lock is held: another run is writing there\n  found: process {child.pid} on {os.uname().nodename}"
            for _ in range(2):
                with pytest.raises(UsageError, match=said), file_lock.hold(path):
                    pass
            if how == "is killed":
                child.kill()
                child.join()
        assert path.read_text() == ("" if how == "leaves" else f"process {child.pid} on {os.uname().nodename}")
        with file_lock.hold(path):
            assert path.read_text() == f"process {os.getpid()} on {os.uname().nodename}"


@pytest.mark.parametrize("remove", [False, True])
def test_a_lock_is_let_go_by_an_error_too(tmp_path, remove):
    path = tmp_path / "lock"
    for _ in range(2):
        with pytest.raises(KeyError), file_lock.hold(path, remove=remove):
            raise KeyError
        assert path.exists() is not remove
        assert remove or path.read_bytes() == b""


def test_a_lock_that_its_holder_removes_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """Between our open and our lock the holder finished: what we locked has no name any more."""
    path, real, left = tmp_path / "lock", fcntl.flock, [1]

    def flock(fd: int, how: int) -> None:
        if left:
            left.clear()
            path.unlink()
        real(fd, how)

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    with file_lock.hold(path, remove=True):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert not path.exists() and not left


def by_four_threads(work) -> None:
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_many_at_once_hold_one_after_another(tmp_path):
    """Threads have descriptors of their own, so the lock tells them apart as it does processes."""
    inside, most, taken = [], [], []

    def work() -> None:
        for _ in range(30):
            # The last two: the holder emptied or removed the file while we looked at it.
            refused = (UsageError, DamageError, FileNotFoundError)
            with contextlib.suppress(*refused), file_lock.hold(tmp_path / "l", remove=True):
                inside.append(1)
                most.append(len(inside))
                taken.append(1)
                inside.pop()

    by_four_threads(work)
    assert set(most) == {1} and taken


def test_a_lock_to_wait_for_that_its_holder_removes_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """Between our open and our lock."""
    path, locking, removed = tmp_path / "lock", fcntl.flock, []

    def gone_before(*args):
        if not removed:
            removed.append(path.unlink())
        return locking(*args)

    monkeypatch.setattr(file_lock.fcntl, "flock", gone_before)
    with file_lock.wait_for(path):
        assert path.is_file() and removed
    assert not path.exists()
    with pytest.raises(FileNotFoundError), file_lock.wait_for(tmp_path / "none" / "lock"):
        raise AssertionError("it is there")


@pytest.fixture
def everyones_folder():
    """Not below tmp_path, whose parents are one user's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes other users")
def test_another_users_lock_is_waited_for_whether_or_not_it_could_be_written(everyones_folder):
    """A cache folder that several users share; the lock that a killed build of one of them left."""
    shared = everyones_folder
    (shared / "l").touch(0o644)
    inside = FORK.Value("i", 0)

    def work(user: int) -> None:
        os.setuid(user)
        for _ in range(20):
            with file_lock.wait_for(shared / "l"):
                inside.value += 1
                time.sleep(0.001)
                assert inside.value == 1
                inside.value -= 1

    processes = [FORK.Process(target=work, args=(user,)) for user in (12345, 12346)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert list(shared.iterdir()) == []


def test_without_a_folder_for_temporary_files_locks_work_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with file_lock.wait_for(tmp_path / "l"):
        pass
    monkeypatch.setattr(file_lock, "_lock", lambda fd, how: False)
    with file_lock.wait_for(tmp_path / "l"):
        pass


@pytest.mark.parametrize("locks", ["everywhere", "not there", "nowhere"])
def test_many_wait_one_after_another(tmp_path, monkeypatch, locks):
    """Where the file system knows no locks, the node's temporary files do; where nothing does, nobody waits."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    locking = fcntl.flock

    def flock(fd, how):
        of = Path(f"/proc/self/fd/{fd}").readlink().parent
        if locks == "nowhere" or (locks == "not there" and of == there):
            raise OSError(errno.ENOSYS, "no locks")
        locking(fd, how)

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    inside, most = [], []

    def work() -> None:
        for _ in range(30):
            with file_lock.wait_for(there / "l"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    by_four_threads(work)
    assert len(most) == 120 and list(there.iterdir()) == list(here.iterdir()) == []
    assert locks == "nowhere" or set(most) == {1}


@pytest.mark.parametrize(("lock", "at"), [(file_lock.wait_for, 0), (file_lock.wait_for, 1), (file_lock.hold, 1)])
def test_a_lock_that_is_refused_to_who_would_wait_is_an_error_of_the_system(tmp_path, monkeypatch, lock, at):
    """Only who asked not to wait learns by EAGAIN that another holds it."""
    real, calls = fcntl.flock, []

    def flock(fd, how):
        calls.append(how)
        if len(calls) == at + 1:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        real(fd, how)

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    with pytest.raises(BlockingIOError), lock(tmp_path / "lock"):
        pass


def test_an_interrupt_while_a_lock_file_is_removed_releases_the_lock(tmp_path, monkeypatch):
    """Else the next wait of this process is for itself."""

    def interrupted(path, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), file_lock.wait_for(tmp_path / "x"):
        patch.setattr(os, "unlink", interrupted)
    with (tmp_path / "x").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
