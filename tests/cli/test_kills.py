"""Every command that writes files, killed before any call that changes the disk, or with such a call that fails.

The same command, given again, ends well and gives the files of an undisturbed run; nothing hidden is left, and no
manifest in between is false. A default run takes some of the calls, `make soak` all of them.
"""

from __future__ import annotations

import errno
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.examples import SOAK, soaked
from tests.helpers.failing_calls import commands, make_world, run_command
from tests.helpers.failures import assert_what_is_visible_is_true, crash_at, durable_calls, removals

WRITING = (
    "preprocess", "preprocess again", "preprocess parquet", "blend", "build", "build packed", "adopt", "adopt convert",
    "report", "train-tokenizer",
)  # fmt: skip


class World:
    """A folder with corpora and inputs, as it was before each command."""

    def __init__(self, root: Path) -> None:
        self.folder, self.pristine = root / "world", root / "pristine"
        make_world(self.folder)
        shutil.copytree(self.folder, self.pristine)
        self.commands = commands(self.folder)

    def fresh(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.pristine, self.folder)  # with the times of the files

    def run(self, name: str) -> int:
        return run_command(self.commands[name])

    def contents(self) -> dict[str, bytes]:
        """All files."""
        files = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}

    def assert_true(self) -> None:
        for folder in {path.parent for path in self.folder.rglob("*_text_document.*")}:
            assert_what_is_visible_is_true(folder, full=False, named="[!.]*_document", bare=("bare", "old"))


def without_locks(contents: dict[str, bytes]) -> dict[str, bytes]:
    """Without those of a tokenizer's folder, an array or a folder's runs, whose removal was what failed."""
    return {name: data for name, data in contents.items() if not re.search(r"/\.[^/]*\.(lock|building)$", f"/{name}")}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def points(step: int) -> Iterator[int]:
    """Every call, or every `step`-th and others of the pattern than the last time."""
    step = 1 if SOAK > 1 else step
    return (start + number % step for number, start in enumerate(itertools.count(0, step)))


@pytest.mark.scaled
@pytest.mark.slow
@pytest.mark.parametrize("name", WRITING)
def test_a_command_that_was_killed_is_completed_by_itself(world, name):
    world.fresh()
    assert world.run(name) == 0
    expected = world.contents()
    for n in points(9):
        world.fresh()
        if not crash_at(n, lambda: world.run(name), removals=True):
            break
        world.assert_true()
        assert world.run(name) == 0, n
        assert world.contents() == expected, n
    assert n > 3


@pytest.mark.scaled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "code"),
    soaked(
        itertools.product([durable_calls, removals], [errno.ENOSPC, errno.EIO]),
        but=[(durable_calls, errno.ENOSPC), (removals, errno.EIO)],
    ),
)
@pytest.mark.parametrize("name", WRITING)
def test_a_command_that_failed_is_completed_by_itself(world, monkeypatch, capsys, name, fails, code):
    world.fresh()
    assert world.run(name) == 0
    expected = without_locks(world.contents())
    for n in points(9):
        world.fresh()
        with fails(monkeypatch, *([world.folder] if fails is removals else []), fail_at=n, code=code) as calls:
            ended = world.run(name)
        assert ended in (0, 5), capsys.readouterr().err
        if len(calls.seen) <= n:
            break
        world.assert_true()
        assert world.run(name) == 0, (n, calls.seen[n], capsys.readouterr().err)
        assert without_locks(world.contents()) == expected, (n, calls.seen[n])
