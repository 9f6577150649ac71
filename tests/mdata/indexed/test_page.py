"""The ten-line reader of docs/reference/formats.md works as printed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mdata.indexed.pair_format import DTYPES
from mdata.indexed.writer import IndexedWriter

PAGE = (Path(__file__).parents[3] / "docs/reference/formats.md").read_text()


@pytest.fixture
def read():
    section = PAGE[PAGE.index("## Indexed dataset") :]
    (code,) = re.findall(r"A reader in ten lines.*?```python\n(.*?)```", section, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 11  # ten and the import
    names: dict = {}
    exec(code, names)
    return names["read"]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.kind != "f"], ids=str)
def test_the_page_reads_what_we_write(tmp_path, read, dtype):
    with IndexedWriter(tmp_path / "x", dtype) as writer:
        writer.append(np.array([5, 6, 7, 127]), np.array([3, 0, 1]), document_ends=np.array([2, 2, 3]))
        writer.commit()
    sequences, boundaries = read(str(tmp_path / "x"))
    assert [sequence.tolist() for sequence in sequences] == [[5, 6, 7], [], [127]]
    assert {sequence.dtype for sequence in sequences} == {dtype}
    assert boundaries.tolist() == [0, 2, 2, 3]


def test_the_page_reads_oracle_pairs(oracles, read):
    prefix = oracles / "oracle/preprocess/files/gpt2-sentences/d_text_sentence"
    prefix = prefix if prefix.with_suffix(".idx").exists() else prefix.with_name("d_text_document")
    sequences, boundaries = read(str(prefix))
    assert len(sequences) == boundaries[-1] == 126
    assert sum(map(len, sequences)) == 18339


def test_the_page_names_every_code(read):
    codes = re.search(r"\| code \| (.*) \|\n.*\n\| dtype \| (.*) \|", PAGE)
    assert codes, "the table of codes is there"
    named = dict(zip(map(int, codes[1].split(" | ")), codes[2].split(" | "), strict=True))
    assert named == {code: dtype.name for code, dtype in DTYPES.items()}
