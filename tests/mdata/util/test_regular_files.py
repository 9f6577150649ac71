"""Pipes, sockets and devices in the place of files: refused, where opening them would wait or never end."""

from __future__ import annotations

import os
import socket

import pytest

from mdata import UsageError
from mdata.util.regular_files import regular_file


def test_kinds_of_files(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name, kind in {"pipe": "a pipe", "link": "a pipe", "socket": "a socket", "/dev/null": "a device"}.items():
        with pytest.raises(UsageError, match=f"{name} is not a regular file\n  found: {kind}"):
            regular_file(tmp_path / name)
    assert regular_file(str(tmp_path / "file")) == tmp_path / "file"
    assert regular_file(tmp_path) == tmp_path, "opening a folder is an error of its own"
    with pytest.raises(FileNotFoundError):
        regular_file(tmp_path / "nothing")
