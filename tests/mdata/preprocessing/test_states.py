"""A table of states that a run may find at its start; none leads to wrong documents.

A state is (an old result) x (a run that was killed at one of its calls) x (a file lost since) x (the job that runs now,
with or without --overwrite). In every state the run gives the bytes of its own job, or refuses with a message and
leaves finished results unchanged. A default run draws its states from the table by a fixed seed; `make soak` draws 40
times as many.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import mdata
from mdata import UsageError
from tests.helpers.examples import SOAK
from tests.helpers.failures import crash_at
from tests.helpers.notes import Notes
from tests.mdata.preprocessing.test_preprocess import contents, options

pytestmark = pytest.mark.usefixtures("loaded_once")

OLD = ("nothing", "damaged", "input", "options", "parts", "pair")
RUNS = ("same", "parts")
LOST = ("nothing", "journal", "json", "bin", "idx", "origins", "blake3", "jsonl", "partials", "bin.partial")
LOST += ("lengths.partial", "boundaries.partial", "hashes.partial", "origins.partial", "jsonl.partial", "copied")
JOBS = ("same", "input", "options", "parts")
STATES = 9600 if SOAK > 1 else 50


@dataclass(frozen=True)
class State:
    """One row of the table; `at` is the part of its calls after which the run was killed."""

    old: str
    run: str
    at: float
    lost: str
    job: str
    overwrite: bool


def states() -> Iterator[State]:
    """Seeded; the rows that were wrong first."""
    yield State("input", "same", 0.5, "bin.partial", "same", overwrite=True)
    yield State("options", "same", 0.5, "bin.partial", "same", overwrite=True)
    yield State("damaged", "same", 0.5, "bin.partial", "same", overwrite=False)
    yield State("parts", "same", 0.06, "nothing", "parts", overwrite=True)
    yield State("nothing", "parts", 0.77, "jsonl", "parts", overwrite=False)
    generator = random.Random(22)
    for number in range(STATES):
        # Most calls come before the first file gets its name; what matters most comes after.
        at = generator.random() if number % 3 else generator.uniform(0.6, 1)
        yield State(
            generator.choice(OLD),
            generator.choice(RUNS),
            at,
            generator.choice(LOST),
            generator.choice(JOBS),
            overwrite=generator.random() < 0.6,
        )


class Table:
    """Old results and expected ones, made once; one folder at a time in which states are built."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "now"
        for word in ("one", "two"):
            rows = [json.dumps({"text": f"{word} {i}" * (i % 3 + 1)}) for i in range(12)]
            rows[5] = json.dumps({"text": len(word)})
            (root / f"{word}.jsonl").write_text("\n".join(rows))
        self.expected = {name: self._made(name) for name in JOBS}
        self.calls = {run: self._count(run) for run in RUNS}

    def job(self, name: str, *, overwrite: bool = False) -> mdata.PreprocessOptions:
        same = options(
            self.folder,
            input=(str(self.root / ("two.jsonl" if name == "input" else "one.jsonl")),),
            tokenizer_type="ByteTokenizer",
            tokenizer_model=None,
            workers=1,
            chunk_bytes=120,
            checkpoint_s=0,
            on_error="quarantine",
            quarantine=str(self.folder / "bad.jsonl"),
            overwrite=overwrite,
        )
        return replace(same, append_eod=name == "options", partitions=2 if name == "parts" else 1)

    def build(self, state: State, at: int | None = None) -> bool:
        """Whether the run came to the call at which it was to die; `at`: its number, in place of the part."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        of = {"nothing": {}, "damaged": self.expected["same"]}.get(state.old) or self.expected.get(state.old, {})
        if state.old == "pair":
            made = self.expected["input"]
            of = {name: made[name] for name in ("out_text_document.bin", "out_text_document.idx")}
        for name, data in {} if state.old == "nothing" else of.items():
            (self.folder / name).write_bytes(data)
        if state.old == "damaged":
            (self.folder / "out_text_document.origins").unlink()
        at = int(state.at * self.calls[state.run]) if at is None else at
        died = crash_at(at, lambda: mdata.preprocess(self.job(state.run, overwrite=True)), removals=True)
        self._lose(state.lost)
        return died

    def _lose(self, what: str) -> None:
        if what == "copied":  # to another place: no file is the one that the journal names
            shutil.copytree(self.folder, self.root / "copy")
            shutil.rmtree(self.folder)
            (self.root / "copy").rename(self.folder)
        for path in list(self.folder.iterdir()):
            hidden = path.name.startswith(".")
            if (what == "partials" and path.name.endswith(".partial")) or (
                path.name.endswith(f".{what}") and hidden == (what == "journal" or "partial" in what)
            ):
                path.unlink()

    def _made(self, name: str) -> dict[str, bytes]:
        shutil.rmtree(self.folder, ignore_errors=True)
        mdata.preprocess(self.job(name))
        return contents(self.folder)

    def _count(self, run: str) -> int:
        """How many calls a run takes over an old result."""
        numbers = itertools.count(0, 10)
        return next(n for n in numbers if not self.build(State("input", run, 1, "nothing", run, overwrite=True), n))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(tmp_path_factory.mktemp("states"))


def finished(folder: Path) -> dict[str, bytes]:
    """The files of all results whose manifest is there and true."""
    sound = [path for path in folder.glob("*.json") if not mdata.verify(path, full=True).problems]
    named = {path.name[: -len("json")] for path in sound}
    return {name: data for name, data in contents(folder).items() if any(name.startswith(one) for one in named)}


@pytest.mark.scaled
def test_every_state_ends_in_the_right_bytes_or_in_a_refusal(table):
    seen = {"done": 0, "refused": 0}
    for state in states():
        table.build(state)
        before, expected, notes = finished(table.folder), table.expected[state.job], Notes()
        if state.old == "pair":  # of nobody knows whom; it counts as long as its .bin is there
            foreign, name = contents(table.folder), "out_text_document.bin"
            before |= {name: foreign[name]} if foreign.get(name) == table.expected["input"][name] else {}
        try:
            result = mdata.preprocess(table.job(state.job, overwrite=state.overwrite), notes)
        except UsageError as error:
            assert not state.overwrite and "--overwrite" in str(error), (state, error)
            after = contents(table.folder)
            assert {name: after.get(name) for name in before} == before, state
            seen["refused"] += 1
            continue
        after = contents(table.folder)
        assert {name: after.get(name) for name in expected} == expected, (state, notes.lines)
        others = {name: data for name, data in before.items() if name not in expected}
        assert {name: after.get(name) for name in others} == others, state
        assert state.lost == "journal" or not [name for name in after if name.startswith(".")], state
        if not state.overwrite and state.job != state.run:
            lost = {name for name, data in before.items() if after.get(name) != data}
            assert not lost, (state, lost)
        assert set(result.paths) >= {"text"}
        seen["done"] += 1
    assert min(seen.values()) > len(list(states())) / 8, seen
