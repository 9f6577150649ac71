"""Memory of conversions and of first weights does not grow with the model.

Each is measured in a new process, a fork of one that has imported torch: by how much its anonymous memory grew at most.
Pages of files are not counted: the system takes them back when it wants to. The peak is seen by looking every
millisecond, so that what is held for less time may be missed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.examples import soaked
from tests.helpers.ranks import run_alone
from trainer.checkpoint.format import RunState
from trainer.checkpoint.rank_file import OwnedState
from trainer.checkpoint.save import Target, commit, write_part
from trainer.config.parse import dump_config
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.first_state import read_model
from trainer.convert.model_keys import model_config
from trainer.models.family import family_of
from trainer.models.gpt.shape import gpt_shape
from trainer.optim.layout import make_layout
from trainer.optim.ownership import Ownership, owned_by
from trainer.parallel.params import Place

pytestmark = pytest.mark.slow
MOST = 256 << 20  # less than the largest tensor, of 287 MB
PAIRS = [
    *(("mtrain", to) for to in ("hf", "torch_dist", "mp_rank", "mtrain")),
    *((of, "mtrain") for of in ("hf", "torch_dist", "mp_rank")),
]
ROWS = 70_000
MODEL = {"num_layers": 1, "hidden_size": 1024, "num_heads": 8, "ffn_hidden_size": 4096, "vocab_size": ROWS}
CONFIG = model_config({**MODEL, "tie_embeddings": True}, where="here", context=16)


def anonymous_bytes() -> int:
    """Memory of this process that no file is behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@contextmanager
def growth() -> Iterator[list[int]]:
    """Holds one number after the block: how much more memory there was at most than before it."""
    before, ended, found = anonymous_bytes(), threading.Event(), [0]

    def look() -> None:
        while not ended.wait(0.001):
            found[0] = max(found[0], anonymous_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    ended.set()
    thread.join()


def owned() -> Ownership:
    """All weights."""
    shape = gpt_shape(CONFIG, ROWS)
    layout = make_layout(family_of(CONFIG).parameters(shape, Place()), {"data": 1, "edp": 1})
    return owned_by(layout, {"data": 0, "edp": 0})


def save(folder: Path) -> None:
    """A run folder with weights alone, 350 MB."""
    run = RunState(2, 2, data_id="", data={}, optimizer_steps=2, config=dump_config(CONFIG))
    shard = OwnedState({"weight": owned()}, {"tp": 0})
    target = Target(folder / "checkpoints", run, "x")
    write_part(target, 0, shard=shard, state={"weight": torch.ones(shard.owned["weight"].size)})
    commit(target, 1)


def measure(context: Any, what: str, folder: Path, *rest: Any) -> tuple[int, int]:
    """See `side`; in a process of its own."""
    runs = owned()
    torch.ones(1 << 20).add_(1)  # what torch keeps from now on
    with growth() as grown:
        if what == "save":
            save(folder)
        elif what == "convert":
            convert(folder, rest[0], options=ConvertOptions(to=rest[1], check=False))
        else:
            read_model({"weight": torch.empty(runs.size)}, open_model(folder), owned={"weight": runs})
    return runs.size * 4, grown[0]


def side(*words: Any) -> tuple[int, int]:
    """(bytes of all weights in fp32, by how much memory grew) of: save FOLDER; convert SOURCE TARGET TO, without a
    comparison of logits; first SOURCE, all weights as the first of a new run."""
    total, grown = run_alone(measure, *words)
    return total, grown


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """Of each format the same model, and the memory that it took to make it of a run folder."""
    root = tmp_path_factory.mktemp("memory")
    side("save", root / "mtrain")
    made = {"mtrain": (root / "mtrain", 0)}
    for to in ("hf", "torch_dist", "mp_rank"):
        made[to] = root / to, side("convert", root / "mtrain", root / to, to)[1]
    return made


@pytest.mark.parametrize(("of", "to"), soaked(PAIRS, but=[*PAIRS[:3], ("hf", "mtrain")]))
def test_a_conversion_holds_pieces(of, to, folders, tmp_path):
    grown = folders[to][1] or side("convert", folders[of][0], tmp_path / "new", to)[1]
    print(f"{of} to {to}: {grown / 2**20:.0f} MiB")
    assert 0 < grown <= MOST


@pytest.mark.parametrize("of", ["mtrain", "hf", "torch_dist", "mp_rank"])
def test_first_weights_take_their_place_and_pieces(of, folders):
    total, grown = side("first", folders[of][0])
    print(f"{of}: {(grown - total) / 2**20:.0f} MiB beside {total / 2**20:.0f} MiB of weights")
    assert total * 0.9 < grown <= total + MOST
