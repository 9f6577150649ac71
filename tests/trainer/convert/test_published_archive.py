"""Archives of published checkpoints: one copy for all processes of a host, whole or none, gone after the last."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mdata import DamageError
from trainer.convert import published_archive
from trainer.convert.megatron_folder import LATEST

MEMBERS = {LATEST: b"release", **{f"release/mp_rank_0{n}/model_optim_rng.pt": b"%d" % n * 5000 for n in range(3)}}
# Opens the archive, and prints its folder and how many members this process unpacked. `STOP`: is killed at this one.
RANK = """
import os, sys, time, zipfile
from pathlib import Path
from trainer.convert.published_archive import unpacked

count, extract = 0, zipfile.ZipFile.extract

def slowly(*arguments):
    global count
    count += 1
    if count == int(os.environ.get("STOP", "0")):
        os._exit(9)
    time.sleep(0.1)
    return extract(*arguments)

zipfile.ZipFile.extract = slowly
folder = unpacked(Path(sys.argv[1]))
print(folder, count, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """An archive of `MEMBERS`, and a host whose temporary files lie in `tmp_path / "tmp"`."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    with zipfile.ZipFile(tmp_path / "gpt.zip", "w") as written:
        for name, content in MEMBERS.items():
            written.writestr(name, content)
    return tmp_path / "gpt.zip"


def start(archive, **env) -> subprocess.Popen:
    command = [sys.executable, "-c", RANK, str(archive)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **env})


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_ranks_of_a_host_share_one_copy_until_the_last_ends(archive):
    ranks = [start(archive) for _ in range(2)]
    told = [rank.stdout.readline().split() for rank in ranks]
    assert sorted(int(count) for _, count in told) == [0, len(MEMBERS)]
    (folder,) = {Path(folder) for folder, _ in told}
    for rank in ranks:
        assert content_of(folder) == MEMBERS
        assert rank.communicate("") and rank.returncode == 0
    assert [*(archive.parent / "tmp").iterdir()] == []


def test_a_copy_that_a_killed_process_left_is_not_taken_for_whole(archive):
    killed = start(archive, STOP="3")
    assert killed.communicate() == ("", None) and killed.returncode == 9
    assert len(content_of(archive.parent / "tmp")) > 1, "it left something"
    rank = start(archive)
    folder, count = rank.stdout.readline().split()
    assert int(count) == len(MEMBERS) and content_of(Path(folder)) == MEMBERS
    (Path(folder) / LATEST).unlink()  # as programs do that clean up
    other = start(archive)
    assert other.stdout.readline().split() == [folder, str(len(MEMBERS))] and content_of(Path(folder)) == MEMBERS
    rank.communicate("")
    other.communicate("")
    assert [*(archive.parent / "tmp").iterdir()] == []


def test_each_rank_tells_of_damage_and_nothing_is_left(archive):
    data = bytearray(archive.read_bytes())
    data[data.index(b"1111")] ^= 1
    archive.write_bytes(data)
    for _ in range(2):
        with pytest.raises(DamageError, match=r"gpt\.zip is damaged\n  found: Bad CRC-32"):
            published_archive.unpacked(archive)
        assert [*(archive.parent / "tmp").iterdir()] == []
