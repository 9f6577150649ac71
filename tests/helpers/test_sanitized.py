"""The sanitizers detect errors: a run that cannot fail would prove nothing (tests/helpers/sanitized.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import sanitized

ROOT = Path(__file__).resolve().parents[2]
UNDER_THEM = sanitized.FOLDER in os.environ


@pytest.mark.parametrize("name", sanitized.TESTS)
def test_each_file_is_there(name):
    assert (ROOT / name).is_file()


def test_each_test_left_out_is_there():
    text = "".join((ROOT / name).read_text() for name in sanitized.TESTS)
    assert [name for name in sanitized.TOO_LONG if f"def {name}(" not in text] == []


@pytest.mark.skipif(not UNDER_THEM, reason="make core-sanitized runs it under the sanitizers")
def test_the_extension_is_the_watched_one():
    from mdata import _core

    assert Path(_core.__file__).parent == Path(os.environ[sanitized.FOLDER])


@pytest.mark.skipif(not UNDER_THEM, reason="make core-sanitized runs it under the sanitizers")
@pytest.mark.parametrize("past", [0, 1])
def test_one_byte_past_an_array_ends_the_process(past):
    code = f"import ctypes, numpy; a = numpy.zeros(5000, 'u1'); ctypes.string_at(a.ctypes.data, {5000 + past})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode != 0, "heap-buffer-overflow" in ran.stderr) == (bool(past), bool(past))
