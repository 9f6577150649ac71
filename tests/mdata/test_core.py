"""The hand-written _core.pyi against the built module: the same names, the same argument names."""

from __future__ import annotations

import ast
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mdata
from mdata import _core

STUB = ast.parse((Path(mdata.__file__).parent / "_core.pyi").read_text())


def stub_signatures() -> dict[str, list[str]]:
    found = {}
    for node in STUB.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef):
                found[prefix + member.name] = [argument.arg for argument in member.args.args]
    return found


def built_signatures() -> dict[str, list[str]]:
    found = {}
    for name, value in vars(_core).items():
        if isinstance(value, type):
            for member in vars(value):
                if member == "__init__" or not member.startswith("_"):
                    found[f"{name}.{member}"] = argument_names(getattr(value, member).__doc__)
        elif not name.startswith("_"):
            found[name] = argument_names(value.__doc__)
    return found


def argument_names(doc: str) -> list[str]:
    """pybind11 begins a docstring with the signature; names are what stands before a colon at depth 0."""
    inside = doc[doc.index("(") + 1 : doc.index(") ->")]
    while re.search(r"\[[^\[\]]*\]", inside):
        inside = re.sub(r"\[[^\[\]]*\]", "", inside)
    return re.findall(r"(\w+):", inside)


def test_stub_and_module_agree():
    assert stub_signatures() == built_signatures()


def test_everything_in_the_stub_is_documented():
    for node in STUB.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert ast.get_docstring(node), node.name


def test_arrays_are_not_converted_silently():
    permutation = _core.Permutation(10, 1, 2)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        permutation.forward(np.array([1.0]))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        permutation.forward(np.arange(10)[::2])
    with pytest.raises(ValueError, match="one dimension"):
        permutation.forward(np.zeros((2, 2), np.int64))


def test_results_survive_their_object():
    values = _core.Permutation(10, 1, 2).forward(np.arange(10))
    assert sorted(values) == list(range(10))


def test_another_thread_may_change_the_list_whose_texts_are_read():
    made = [[f"{number} " * 30_000 for number in range(200)] for _ in range(2)]
    counts = []
    reader = threading.Thread(target=lambda: counts.append(_core.word_counts(made[0])))
    reader.start()
    time.sleep(0.005)
    made[0].clear()
    others = ["x" * 150_000 for _ in range(200)]  # in the memory that the texts had
    reader.join()
    assert np.array_equal(counts[0], _core.word_counts(made[1])) and len(others) == 200
