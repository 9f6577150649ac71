"""Maps of files that hold no descriptor."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from mdata import _core, open_corpus
from tests.helpers.corpora import write_pair


def test_the_bytes_of_a_file_stay_when_its_name_goes(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 100)
    data = _core.map_file(os.fsencode(path))
    path.unlink()
    assert data.tobytes() == bytes(range(256)) * 100
    assert not data.flags.writeable and data.dtype == np.uint8
    part = data[256:260]
    del data
    assert part.tolist() == [0, 1, 2, 3]


def test_an_empty_file_and_files_that_cannot_be_mapped(tmp_path):
    (tmp_path / "empty").touch()
    assert _core.map_file(os.fsencode(tmp_path / "empty")).shape == (0,)
    with pytest.raises(FileNotFoundError, match="none"):
        _core.map_file(os.fsencode(tmp_path / "none"))
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        _core.map_file(os.fsencode(tmp_path))


def _descriptors():
    return [path.resolve() for path in Path("/proc/self/fd").iterdir()]


def test_many_corpora_open_at_once_hold_no_descriptors(tmp_path):
    write_pair(tmp_path / "x_text_document", [[3], [4]])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(_descriptors()) + 20, hard))
    try:
        corpora = [open_corpus(tmp_path / "x_text_document") for _ in range(100)]
        # Only those of the corpus: connections of other tests may end meanwhile.
        assert not [path for path in _descriptors() if path.is_relative_to(tmp_path.resolve())]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(corpus.read(2, 3).tolist() == [2, 3, 4] for corpus in corpora)
