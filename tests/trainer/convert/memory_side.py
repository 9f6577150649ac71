"""A process of its own that converts or reads a model, and prints by how much its anonymous memory grew at most.

    python -m tests.trainer.convert.memory_side save FOLDER                   a run folder with weights alone, 350 MB
    python -m tests.trainer.convert.memory_side convert SOURCE TARGET TO      without a comparison of logits
    python -m tests.trainer.convert.memory_side first SOURCE                  all weights, as the first of a new run

Pages of files are not counted: the system takes them back when it wants to. The peak is seen by looking every
millisecond, so that what is held for less time may be missed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.checkpoint.format import RunState
from trainer.checkpoint.rank_file import OwnedState
from trainer.checkpoint.save import Target, commit, write_part
from trainer.config.parse import dump_config
from trainer.convert.convert import Options, convert, open_model
from trainer.convert.first_state import read_owned
from trainer.convert.model_keys import model_config
from trainer.models.family import family_of
from trainer.models.gpt.shape import gpt_shape
from trainer.optim.layout import make_layout
from trainer.optim.ownership import Ownership, owned_by
from trainer.parallel.params import Place

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
    """A checkpoint in a run folder."""
    run = RunState(2, 2, data_id="", data={}, optimizer_steps=2, config=dump_config(CONFIG))
    shard = OwnedState({"weight": owned()}, {"tp": 0})
    target = Target(folder / "checkpoints", run, "x")
    write_part(target, 0, shard=shard, state={"weight": torch.ones(shard.owned["weight"].size)})
    commit(target, 1)


def main() -> None:
    """See above; also prints the bytes of all weights in fp32."""
    what, folder, *rest = sys.argv[1:]
    runs = owned()
    torch.ones(1 << 20).add_(1)  # its threads
    with growth() as grown:
        if what == "save":
            save(Path(folder))
        elif what == "convert":
            convert(Path(folder), Path(rest[0]), options=Options(to=rest[1], check=False))
        else:
            found = open_model(Path(folder)).path
            read_owned({"weight": torch.empty(runs.size)}, found, owned={"weight": runs})
    print(runs.size * 4, grown[0])


if __name__ == "__main__":
    main()
