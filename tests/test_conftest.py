"""The shared fixtures and hooks, tested in a separate pytest run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

CONFTEST = Path(__file__).with_name("conftest.py")
TESTS = """
import signal

import pytest

def test_reads(oracles):
    assert (oracles / "x").read_text() == "1"

@pytest.mark.soak
def test_long():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
IN_BACKGROUND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def nested(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak: long\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("1")

    def run(folder, *words):
        answer = subprocess.run(
            [sys.executable, "-c", IN_BACKGROUND, "-m", "pytest", "-p", "no:cacheprovider", *words],
            cwd=tmp_path,
            env={"MDATA_ORACLES": str(tmp_path / folder), "PATH": ""},
            capture_output=True,
            text=True,
        )
        return answer.stdout

    return run


def test_torch_has_one_thread_in_processes_of_n_whoever_imports_it_first(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("OMP_NUM_THREADS")
    runpy.run_path(str(CONFTEST))
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_oracle_tests_run_where_there_is_data(nested):
    out = nested("data")
    assert "1 passed, 1 deselected" in out and "oracle data: 1 tests used it, 0 skipped" in out


def test_two_processes_count_together_and_a_lone_surrogate_in_a_failure_does_not_end_them(nested, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS + "\ndef test_text():\n    raise ValueError(chr(0xD800))\n")
    out = nested("data", "-n", "2")
    assert "1 failed, 1 passed" in out and "ValueError: \\ud800" in out
    assert "oracle data: 1 tests used it, 0 skipped" in out


def test_oracle_tests_are_skipped_and_counted(nested):
    out = nested("nowhere", "-rs")
    assert "1 skipped, 1 deselected" in out and "oracle data: 0 tests used it, 1 skipped" in out
    assert "set MDATA_ORACLES" in out


def test_soak_tests_run_when_asked_for(nested):
    out = nested("data", "-m", "soak")
    assert "1 passed, 1 deselected" in out and "oracle data: 0 tests" in out


def test_a_folder_for_temporary_files_has_room_and_runs_programs(tmp_path, monkeypatch):
    monkeypatch.setattr(conftest, "MEMORY_BYTES", 1)
    assert conftest.fits_temporary_files(tmp_path) and not conftest.fits_temporary_files(tmp_path / "nowhere")
    monkeypatch.setattr(conftest, "MEMORY_BYTES", 1 << 62)
    assert not conftest.fits_temporary_files(tmp_path)
    monkeypatch.setattr(conftest, "MEMORY_BYTES", 1)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    assert not conftest.fits_temporary_files(tmp_path), "tests run programs that they have written"


def test_tests_with_more_cases_in_soak_are_marked_for_it():
    """`make soak` selects by marks: a test without one would never see its other cases."""
    for path in CONFTEST.parent.glob("**/test_*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search("^from .*import.* SOAK", text, re.MULTILINE):
            assert "@pytest.mark.scaled" in text or "@pytest.mark.soak" in text, path


HUGE_PAGES = """
from tests.conftest import move_to_huge_pages
held = [bytes([number]) * (1 << 20) for number in range(64)]
move_to_huge_pages()
assert all(data == bytes([number]) * (1 << 20) for number, data in enumerate(held))
"""


def test_what_moves_to_huge_pages_stays_as_it_is():
    """In a process of its own: to move all that this one has collected takes seconds."""
    subprocess.run([sys.executable, "-c", HUGE_PAGES], cwd=CONFTEST.parents[1], check=True)
