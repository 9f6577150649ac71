"""Names in a manifest lead only to regular files below its folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import mdata
from mdata.manifest.contained_paths import file_inside, path_inside


@pytest.fixture
def manifest(tmp_path) -> Path:
    """A folder with a file, a folder, and a manifest; beside it a file of somebody else."""
    folder = tmp_path / "corpus"
    (folder / "below").mkdir(parents=True)
    for name in ("x.json", "x.origins", "below/y"):
        (folder / name).write_text(name)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "corpus-2").mkdir()
    (tmp_path / "corpus-2" / "z").write_text("z")
    return folder / "x.json"


@pytest.mark.parametrize("name", ["x.origins", "below/y", "./x.origins", "below/../x.origins", "../corpus/x.origins"])
def test_files_inside(manifest, name):
    assert file_inside(manifest, name) == manifest.parent / name


@pytest.mark.parametrize("name", ["gone", "below/gone/deeper"])
def test_what_is_not_there_may_be_named(manifest, name):
    assert path_inside(manifest, name) == manifest.parent / name
    with pytest.raises(mdata.UsageError, match="No such file"):
        file_inside(manifest, name)


@pytest.mark.parametrize(
    "name", ["../secret", "../corpus-2/z", "below/../../secret", "..", ".", "../gone", "/dev/null"]
)
def test_names_that_lead_out(manifest, name):
    for look in (path_inside, file_inside):
        with pytest.raises(mdata.UsageError, match="outside its folder") as caught:
            look(manifest, name)
        assert name in str(caught.value) and "copy it into the folder" in str(caught.value)
    assert path_inside(manifest, name, allow_outside=True) == manifest.parent / name


@pytest.mark.parametrize("target", ["../secret", "/dev/zero", "loop", ".."])
def test_links_are_followed_before_judging(manifest, target):
    (manifest.parent / "loop").symlink_to("loop")
    (manifest.parent / "link").symlink_to(target)
    with pytest.raises(mdata.UsageError, match="link"):
        file_inside(manifest, "link")
    (manifest.parent / "way").symlink_to("..")
    with pytest.raises(mdata.UsageError, match="outside its folder"):
        file_inside(manifest, "way/secret")
    (manifest.parent / "fine").symlink_to("below/y")
    assert file_inside(manifest, "fine").read_text() == "below/y"


def test_a_folder_of_links_into_one_store(manifest, tmp_path):
    """As a model hub's cache keeps what it fetched: every file a link."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("x.json", "x.origins"):
        (snapshot / name).symlink_to(manifest.parent / name)
    assert file_inside(snapshot / "x.json", "x.origins").read_text() == "x.origins"
    (snapshot / "other").symlink_to(tmp_path / "secret")
    with pytest.raises(mdata.UsageError, match="outside its folder"):
        file_inside(snapshot / "x.json", "other")


def test_the_folder_itself_may_be_reached_by_a_link_or_by_no_name(manifest, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").symlink_to(manifest.parent)
    assert file_inside(tmp_path / "elsewhere" / "x.json", "x.origins").exists()
    monkeypatch.chdir(manifest.parent)
    assert file_inside(Path("x.json"), "x.origins") == Path("x.origins")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, a_socket])
def test_only_regular_files(manifest, make, monkeypatch):
    monkeypatch.chdir(manifest.parent)
    make(manifest.parent / "odd")
    with pytest.raises(mdata.UsageError, match="odd is not a regular file"):
        file_inside(manifest, "odd")
