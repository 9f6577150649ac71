"""Whatever error a system call returns, a command ends with the documented exit code and names the error."""

from __future__ import annotations

import shutil

import pytest

from tests.helpers.failing_calls import Case, Outcome, fault, problems

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the library to preload")
# Of 150,000 cases: every call of every command, every error, once and for good.
FEW, MANY = 0.0008, 0.02


def bad(found):
    ran = [line["ran"] for line in found if "ran" in line]
    assert ran and ran[0] > 10, found
    return [line for line in found if "problem" in line]


@needs_compiler
@pytest.mark.slow
def test_some_calls_fail(tmp_path):
    assert not bad(problems(tmp_path, share=FEW, only="preprocess,blend,verify,cat,adopt"))


@needs_compiler
@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_calls_fail(tmp_path):
    assert not bad(problems(tmp_path, share=MANY))


@pytest.mark.parametrize(
    ("code", "name", "call", "good"),
    [
        (5, "EIO", "read", True),
        (4, "EIO", "read", True),
        (0, "EIO", "read", True),
        (2, "EIO", "read", False),
        (1, "EIO", "read", False),
        (-14, "EIO", "read", False),
        (2, "EACCES", "open", True),
        (5, "EACCES", "open", False),
        (2, "EAGAIN", "flock", True),
        (1, "EAGAIN", "read", True),
        (-11, "EAGAIN", "read", False),
        (1, "EAGAIN", "pread", False),
    ],
)
def test_what_counts_as_a_fault(code, name, call, good):
    case = Case("cat", 3, name, False)
    assert (fault(case, Outcome(code, call, "cat: error: said")) is None) == good
    assert fault(case, Outcome(code, call, "Traceback (most recent call last)")) is not None
