"""Merge, split, sample and shuffle killed before any call that changes the disk, or with a call that fails.

After each, no manifest is false, a pair without a manifest is not taken for a corpus, and the same command completes
the job: the bytes of an undisturbed run, and nothing hidden. A default run takes some of the calls, `make soak` all.
"""

from __future__ import annotations

import errno
import itertools
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mdata
from mdata.blend_planning.make_blend import make_blend
from mdata.errors import MdataError, UsageError
from mdata.preprocessing.journal import Journal, read_records
from mdata.rewriting.merge import merge
from mdata.rewriting.shuffle import shuffle
from mdata.rewriting.subsets import sample, split
from tests.helpers.corpora import write_pair
from tests.helpers.examples import SOAK, soaked
from tests.helpers.failures import assert_what_is_visible_is_true, crash_at, durable_calls, removals
from tests.helpers.notes import Notes
from tests.helpers.power_loss import recorded, states
from tests.mdata.preprocessing.test_parts import job, make_parts, write_mix


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rewritten")


@pytest.fixture(scope="module")
def world(shared) -> Path:
    """Parts of a job, with held-out documents; a corpus of which the origins are known, and a pair of which not."""
    folder = shared / "world"
    folder.mkdir()
    write_mix(folder / "in")
    make_parts(job(folder, holdout="0.2"), 3)
    mdata.preprocess(replace(job(folder), output_prefix=str(folder / "whole")))
    write_pair(folder / "bare", [[2, 1], [], [4], [3, 5]])
    return folder


def whole(folder: Path) -> Path:
    return folder / "whole_text_document.json"


COMMANDS = {
    "merge": lambda world, out: merge(str(out / "c"), overwrite=True),
    "merge --copy": lambda world, out: merge(str(out / "c"), copy=True, overwrite=True),
    "split": lambda world, out: split(whole(world), str(out / "y"), shares=["8", "1", "1"]),
    "sample": lambda world, out: sample(whole(world), str(out / "y"), tokens=2000),
    "shuffle": lambda world, out: shuffle(whole(world), str(out / "y"), bucket_bytes=20_000),
    "shuffle of a bare pair": lambda world, out: shuffle(world / "bare", str(out / "y")),
}


def fresh(command: str, world: Path, out: Path) -> None:
    """The folder in which a command writes, before it ran: empty, or for a merge with the parts."""
    shutil.rmtree(out, ignore_errors=True)
    if command.startswith("merge"):
        shutil.copytree(world / "out", out)
    else:
        out.mkdir()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.scaled
@pytest.mark.parametrize("command", COMMANDS)
def test_a_kill_before_any_call_loses_nothing_and_leaves_nothing(world, shared, command):
    out, run = shared / "killed", COMMANDS[command]
    fresh(command, world, out)
    run(world, out)
    expected = contents(out)
    step = 1 if SOAK > 1 else 17
    for offset, start in enumerate(itertools.count(0, step)):
        n = start + offset % step  # another place of the pattern each time
        fresh(command, world, out)
        if not crash_at(n, lambda: run(world, out), removals=True):
            break
        assert_what_is_visible_is_true(out, full=False)
        run(world, out)
        assert contents(out) == expected, n
    assert n > 30


@pytest.mark.parametrize(
    "command", soaked(["merge --copy", "split", "sample", "shuffle"], but=["merge --copy", "sample"])
)
def test_a_kill_before_each_rename_shows_no_pair_without_its_manifest(world, shared, command):
    out, run = shared / "renames", COMMANDS[command]
    fresh(command, world, out)
    run(world, out)
    expected = contents(out)
    for n in itertools.count():
        fresh(command, world, out)
        if not crash_at(n, lambda: run(world, out), calls=["rename"]):
            break
        assert_what_is_visible_is_true(out, full=False)
        run(world, out)
        assert contents(out) == expected, n
    assert n >= 5


@pytest.mark.scaled
@pytest.mark.parametrize("command", ["merge --copy", "split"])
@pytest.mark.parametrize("fails", [durable_calls, removals])
def test_an_error_at_any_call_is_typed_and_the_same_command_continues(world, shared, monkeypatch, command, fails):
    out, run = shared / "failed", COMMANDS[command]
    fresh(command, world, out)
    run(world, out)
    expected, where = contents(out), (out,) if fails is removals else ()
    for n in itertools.count(0, 1 if SOAK > 1 else 5):
        fresh(command, world, out)
        with fails(monkeypatch, *where, fail_at=n, code=errno.EIO) as calls:
            try:
                run(world, out)
            except MdataError as error:
                assert "Input/output error" in str(error), (n, calls.seen[-1])
        if len(calls.seen) <= n:
            break
        assert_what_is_visible_is_true(out, full=False)
        run(world, out)
        found = {name: data for name, data in contents(out).items() if not name.startswith(".tokenizer-")}
        assert found == expected, (n, calls.seen[n])
    assert n > 4


def killed_while_names_are_given(world: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shuffle that was killed before its last rename: a manifest and a .bin are visible without the .idx."""
    fresh("shuffle", world, out)
    with durable_calls(monkeypatch) as calls:
        COMMANDS["shuffle"](world, out)
    last = next(n for n, (name, file) in enumerate(calls.seen) if name == "rename" and file.endswith("y_document.idx"))
    fresh("shuffle", world, out)
    assert crash_at(last, lambda: COMMANDS["shuffle"](world, out))
    assert (out / "y_document.json").exists() and not (out / "y_document.idx").exists()


def test_a_pair_whose_index_has_no_name_yet_is_no_corpus(world, shared, monkeypatch):
    out = shared / "out"
    killed_while_names_are_given(world, out, monkeypatch)
    told = r"is not finished(.|\n)*\.y_document\.idx\.partial(.|\n)*run the same command again"
    for name in ("y_document", "y_document.json"):
        with pytest.raises(UsageError, match=told):
            mdata.open_corpus(out / name)
        with pytest.raises(UsageError, match=told):
            make_blend([str(out / name)], out / "mix.json")
        (problem,) = mdata.verify(out / name).problems
        assert re.search(told, str(problem))
    (out / "y_document.json").rename(out / ".y_document.json.partial")  # as it was before its own rename
    with pytest.raises(UsageError, match=r"is not finished(.|\n)*\.y_document\.json\.partial"):
        mdata.open_corpus(out / "y_document")


def test_of_two_commands_with_a_result_in_common_that_begin_together_one_wins(world, shared, monkeypatch):
    """Neither has entered its job when the other looks, unless one has to wait."""
    out, outcomes = shared / "out", dict[str, object]()
    fresh("split", world, out)
    both_look, real = threading.Barrier(2), Journal.append

    def append(self: Journal, record: dict[str, Any]) -> None:
        if record["kind"] == "job":
            with suppress(threading.BrokenBarrierError):
                both_look.wait(1)
        real(self, record)

    def run(name: str, command: Callable[[], object]) -> None:
        try:
            outcomes[name] = command()
        except MdataError as error:
            outcomes[name] = error

    monkeypatch.setattr(Journal, "append", append)
    threads = [
        threading.Thread(target=run, args=("split", lambda: COMMANDS["split"](world, out))),
        threading.Thread(target=run, args=("sample", lambda: sample(whole(world), str(out / "y_2"), tokens=2000))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (told,) = [outcome for outcome in outcomes.values() if isinstance(outcome, MdataError)]
    # Where threads are slow, the second begins when the first has ended.
    assert isinstance(told, UsageError)
    assert "another run is writing there" in str(told) or "already exists and is not this" in str(told)
    assert not list(out.glob(".*"))
    results = [mdata.verify(path) for path in out.glob("*.json")]
    assert len(results) == (1 if outcomes["split"] is told else 3) and not any(one.problems for one in results)


def test_another_command_into_the_same_output_is_told_what_is_there(world, shared, monkeypatch):
    out = shared / "out"
    killed_while_names_are_given(world, out, monkeypatch)
    with pytest.raises(UsageError, match=r"already exists and is not this sample(.|\n)*found: sample_of was None"):
        sample(whole(world), str(out / "y"), tokens=9)
    assert not mdata.verify(out / "y_document.json", full=True).problems
    assert not list(out.glob(".*"))
    # One that was killed earlier had nothing to lose, and another command takes its place.
    fresh("shuffle", world, out)
    assert crash_at(20, lambda: COMMANDS["shuffle"](world, out))
    assert list(out.glob(".*"))
    sample(whole(world), str(out / "y"), tokens=9)
    assert sorted(path.suffix for path in out.glob("*.*")) == [".bin", ".blake3", ".idx", ".json", ".origins"]
    assert not list(out.glob(".*"))


def test_a_merge_of_other_parts_does_not_continue_one_that_was_killed(world, shared):
    """By its journal it is another command, though it has the same words."""
    here, out = shared / "again", shared / "again" / "out"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    write_mix(here / "in")
    make_parts(job(here, holdout="0.2"), 3)
    merge(str(out / "c"))
    journal, older = out / ".c_holdout_text_document.rewrite.journal", contents(out)
    n = next(
        n for n in itertools.count(0, 4)
        if crash_at(n, lambda: merge(str(out / "c"), copy=True, overwrite=True), removals=True)
        and any(record["kind"] == "placing" for record in read_records(journal)[0])
    )  # fmt: skip
    assert n and {name: data for name, data in contents(out).items() if name in older} == older
    with next(path for path in sorted((here / "in").iterdir()) if path.suffix == ".jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    make_parts(job(here, holdout="0.2", overwrite=True), 3)
    notes = Notes()
    merge(str(out / "c"), copy=True, overwrite=True, progress=notes)
    assert not any("had written everything" in line for line in notes.lines)
    assert not mdata.verify(out / "c_text_document.json").problems and not list(out.glob(".*"))


@pytest.mark.scaled
@pytest.mark.parametrize("command", ["merge --copy", "split"])
def test_after_a_loss_of_power_at_any_call(world, shared, command):
    out, run = shared / "power", COMMANDS[command]
    fresh(command, world, out)
    if command == "merge --copy":  # over a merge by reference, which is replaced
        merge(str(out / "c"))
    with recorded(out, shared / f"beside {command}") as kept:
        run(world, out)
    expected = contents(out)
    found = list(states(kept))
    assert len(found) > 200
    for _, tree in found if SOAK > 1 else found[:: len(found) // 40]:
        kept.restore(tree)
        assert_what_is_visible_is_true(out, full=False)
        run(world, out)
        left = {name: data for name, data in contents(out).items() if not name.startswith(".tokenizer-")}
        assert left == expected, [name for name, _, _ in tree]


def test_a_finished_command_does_nothing_even_in_a_folder_that_cannot_be_written(world, shared, monkeypatch):
    out = shared / "out"
    for command, run in COMMANDS.items():
        fresh(command, world, out)
        run(world, out)
        with durable_calls(monkeypatch) as calls:
            run(world, out)
        assert not calls.seen, command


def test_a_result_that_was_damaged_is_made_again(world, shared):
    out = shared / "out"
    for command, name in (("split", "y_2_document"), ("merge --copy", "c_text_document")):
        fresh(command, world, out)
        COMMANDS[command](world, out)
        expected = contents(out)
        (out / f"{name}.idx").unlink()
        COMMANDS[command](world, out)
        assert contents(out) == expected
