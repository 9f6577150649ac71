from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mdata.indexed.pair_format import (
    DTYPES,
    IdxHeader,
    bin_path,
    dtype_code,
    idx_path,
    pack_header,
    smallest_dtype,
    unpack_header,
)


def test_header_bytes_are_the_documented_ones():
    packed = pack_header(np.dtype("<u2"), num_sequences=3, num_documents=1)
    assert packed.hex() == "4d4d494449445800000100000000000000" + "08" + "0300000000000000" + "0200000000000000"
    assert unpack_header(packed) == IdxHeader(b"MMIDIDX\0\0", 1, 8, 3, 2)
    assert unpack_header(packed).index_bytes == 42 + 12 * 3 + 8 * 1


@pytest.mark.parametrize("code, dtype", DTYPES.items())
def test_codes_and_dtypes_name_each_other(code, dtype):
    assert dtype_code(dtype) == code
    assert dtype_code(dtype.newbyteorder(">")) == code


def test_a_dtype_without_a_code_has_none():
    with pytest.raises(KeyError, match="u4"):
        dtype_code(np.dtype("<u4"))


@pytest.mark.parametrize("size, name", [(1, "uint16"), (65499, "uint16"), (65500, "int32"), (10**6, "int32")])
def test_the_vocabulary_decides_the_type(size, name):
    assert smallest_dtype(size).name == name


def test_dots_in_a_prefix_stay():
    assert bin_path(Path("a/b.c")) == Path("a/b.c.bin")
    assert idx_path(Path("a/b.c")) == Path("a/b.c.idx")
