"""The commands of mtrain that write files, killed before any call that changes the disk.

The same command, given again, ends well with what an undisturbed one leaves: its files, the bytes of its checkpoints
and its curve; nothing hidden is left but the lock of the run folder. A default run takes some of the calls.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from cli import mtrain
from cli.console import run
from tests.helpers.failures import crash_at
from tests.helpers.runs import make_mix
from tests.trainer.conftest import one_thread  # noqa: F401

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

RUN = """
run.folder = "{folder}/run"
model = {{ num_layers = 2, hidden_size = 32, num_heads = 4 }}
data.blend = "{folder}/mix.json"
data.valid = ["{folder}/held_text_document.json"]
train = {{ sequence_length = 32, global_batch = 4, micro_batch = 2, steps = 4, eval_interval = 2, eval_samples = 4 }}
optimizer = {{ lr = 1e-2, warmup_steps = 1 }}
checkpoint = {{ interval = 1, keep = 1, keep_best = 1 }}
"""
ADAPTERS = RUN.replace("num_heads = 4", "num_heads = 4, lora = {{ rank = 2 }}").replace(
    "keep_best = 1", 'keep_best = 1, init_from = "{folder}/ended"'
)


class World:
    """A folder as it was before each command: corpora, a run's configuration, and a run that has ended."""

    def __init__(self, root: Path) -> None:
        self.folder, self.pristine = root / "world", root / "pristine"
        self.folder.mkdir()
        make_mix(self.folder, ["first", "second", "held"])
        (self.folder / "run.toml").write_text(RUN.format(folder=self.folder))
        (self.folder / "adapters.toml").write_text(ADAPTERS.format(folder=self.folder))
        self.run("train", "run.toml", f"run.folder={self.folder}/ended")
        shutil.copytree(self.folder, self.pristine)

    def fresh(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.pristine, self.folder)

    def run(self, command: str, *words: str) -> None:
        """The command in this folder, which must end well."""
        own = ("run.toml", "adapters.toml", "ended", "out")
        paths = [str(self.folder / word) if word in own else word for word in words]
        assert run("mtrain", mtrain.COMMANDS, description="", argv=[command, *paths]) == 0

    def contents(self) -> dict[str, object]:
        """What decides a run or a result, by file, but for the measurements of steps that were done again."""
        found = {str(path.relative_to(self.folder)): path for path in sorted(self.folder.rglob("*")) if path.is_file()}
        return {name: _content(name, path) for name, path in found.items() if not name.startswith("run/metrics-")}


def _content(name: str, path: Path) -> object:
    """The bytes of a file; of those with times of a run, the curve or nothing."""
    if name == "run/metrics.jsonl":
        keys = ("step", "loss", "grad_norm", "valid", "test")
        return [[line.get(key) for key in keys] for line in map(json.loads, path.read_text().splitlines())]
    of_one_start = ("events.jsonl", "index.json", "attempt.json")
    return None if name.startswith("run/") and path.name in of_one_start else path.read_bytes()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
@pytest.mark.parametrize(
    "words",
    [
        ("train", "run.toml"),
        pytest.param(("train", "adapters.toml"), marks=pytest.mark.soak),
        ("convert", "ended", "out", "--to", "hf"),
        ("convert", "ended", "out", "--to", "mtrain"),
        ("convert", "ended", "out", "--to", "torch_dist"),
        ("convert", "ended", "out", "--to", "mp_rank"),
        ("report", "ended"),
    ],
    ids=" ".join,
)
def test_a_command_that_was_killed_is_completed_by_itself(world, words, step):
    world.fresh()
    world.run(*words)
    expected = world.contents()
    for number, start in enumerate(itertools.count(0, step)):
        n = start + number % step  # another place of the pattern each time
        world.fresh()
        if not crash_at(n, lambda: world.run(*words), removals=True):
            break
        world.run(*words)
        assert world.contents() == expected, n
    assert n > 3
