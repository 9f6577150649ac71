"""Every layout reads every other, bit for bit; and neither saving nor loading takes more memory than the shard.

Pairs of layouts, read in small blocks, cover each two values of each two settings of writer and reader: half of them
run in `make test`, all in `-m soak`, which has all other pairs as well, in blocks of the usual size.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.examples import SOAK, soaked
from tests.trainer.checkpoint.layouts import GRID, SIZES, SPECIAL, Layout, engines, save
from tests.trainer.engines import held_state
from trainer.checkpoint import load as load_module
from trainer.checkpoint import rank_file as rank_file_module
from trainer.checkpoint.load import load_state

LAYOUTS = GRID + SPECIAL


def check_reads(folder: Path, target: Layout) -> None:
    """Every rank of a layout reads the state that it should hold."""
    for rank, engine in enumerate(engines(target)):
        found = load_state(folder, engine.optimizer.holds, dtype=torch.float32)
        assert found.keys() == engine.optimizer.state.keys() == {"weight", "exp_avg", "exp_avg_sq"}
        for name, expected in held_state(engine).items():
            assert torch.equal(found[name], expected), (str(target), rank, name)


def twos(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    """Each two settings of a row, with their places in it."""
    return set(itertools.combinations(enumerate(row), 2))


def pairwise(values: tuple[tuple[Any, ...], ...]) -> list[tuple[Any, ...]]:
    """Few rows that have each two values of each two columns: greedy, of seeded candidates."""
    chance, rows = random.Random(3), list[tuple[Any, ...]]()
    left = set(
        itertools.chain.from_iterable(
            itertools.product(*([(i, x) for x in values[i]] for i in columns))
            for columns in itertools.combinations(range(len(values)), 2)
        )
    )
    while left:
        (i, x), (j, y) = min(left, key=str)
        some = [[chance.choice(each) for each in values] for _ in range(60)]
        for row in some:
            row[i], row[j] = x, y
        rows.append(max(map(tuple, some), key=lambda row: len(left & twos(row))))
        left -= twos(rows[-1])
    return rows


PAIRS = [(Layout(*row[:4]), Layout(*row[4:])) for row in pairwise(SIZES * 2)]
PAIRS += itertools.pairwise((Layout(), *SPECIAL, Layout(), *SPECIAL[::-1], Layout()))
WRITERS = sorted({writer for writer, _ in PAIRS}, key=str)


def test_the_pairs_have_each_two_values_of_each_two_settings():
    """Counted anew."""
    columns = [(side, place) for side in (0, 1) for place in range(4)]
    for one, other in itertools.combinations(columns, 2):
        found = {tuple(pair[side][place] for side, place in (one, other)) for pair in PAIRS}
        assert found >= set(itertools.product(SIZES[one[1]], SIZES[other[1]]))
    assert {reader for _, reader in PAIRS} >= set(SPECIAL) <= {writer for writer, _ in PAIRS}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are cut in writing, and read in several blocks."""
    monkeypatch.setattr(rank_file_module, "MAX_SLICE_BYTES", 600)
    monkeypatch.setattr(load_module, "BLOCK_BYTES", 200)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("writer", soaked(WRITERS, but={*WRITERS[::4], *SPECIAL}), ids=str)
def test_layouts_read_each_other(writer, tmp_path):
    folder = save(tmp_path, writer)
    for reader in [reader for one, reader in PAIRS if one == writer]:
        check_reads(folder, reader)


@pytest.mark.soak
@pytest.mark.parametrize("writer", LAYOUTS, ids=str)
def test_every_layout_reads_every_other(writer, tmp_path):
    folder = save(tmp_path, writer)
    for reader in LAYOUTS:
        check_reads(folder, reader)


BIG = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from tests.trainer.shapes import LLAMA
from trainer.checkpoint.format import RunState
from trainer.checkpoint.load import load_state
from trainer.checkpoint.rank_file import OwnedState
from trainer.checkpoint.save import Target, commit, write_part
from trainer.config.parse import dump_config
from trainer.convert.first_state import read_model
from trainer.convert.convert import open_model
from trainer.convert.model_keys import model_config
from trainer.models.gpt.params import parameter_table
from trainer.optim.layout import make_layout
from trainer.optim.ownership import owned_by
from trainer.parallel.params import Place
shape = replace(LLAMA, hidden_size=1024, ffn_hidden_size=4096, num_layers=1, vocab_size=20000,
    padded_vocab_size=20000, num_heads=8, num_kv_heads=8, head_dim=128)
folder = Path(sys.argv[1])
def owned(tp_rank, tp, dp_rank, dp):
    layout = make_layout(parameter_table(shape, Place(tp_rank=tp_rank, tp_size=tp)), {"data": dp, "edp": dp})
    return {"weight": owned_by(layout, {"data": dp_rank, "edp": dp_rank})}
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
if sys.argv[2] == "save":
    shard = OwnedState(owned(0, 1, 0, 1), {"tp": 0})
    state = {"weight": torch.ones(shard.owned["weight"].size)}
    before = peak()
    keys = dict(num_layers=1, hidden_size=1024, num_heads=8, ffn_hidden_size=4096, vocab_size=20000)
    config = dump_config(model_config({**keys, "tie_embeddings": False}, where="", context=16))
    run = RunState(step=2, consumed_samples=2, data_id="", data={}, optimizer_steps=2, config=config)
    target = Target(folder, run, "x")
    write_part(target, 0, shard=shard, state=state)
    commit(target, 1)
    print(0, peak() - before)
elif sys.argv[2] == "load":
    wanted = owned(1, 4, 1, 2)
    before = peak()
    load_state(folder / "step-2", wanted, dtype=torch.float32)
    print(wanted["weight"].size * 4, peak() - before)
else:
    wanted = owned(0, 1, 0, 1)
    before = peak()
    read_model({"weight": torch.empty(wanted["weight"].size)}, open_model(folder / "step-2"), owned=wanted)
    print(wanted["weight"].size * 4, peak() - before)
"""


@pytest.mark.scaled
def test_memory_is_bounded_by_the_shard(tmp_path):
    """A process of its own saves 230 MB, another reads an eighth of it, and another all of it as its first weights.

    The peak of its memory is measured.
    """
    # In `make test` the memory of first weights is that of tests/trainer/convert/test_memory.py.
    for what, most in (("save", 48 << 20), ("load", 48 << 20), *([("first", 64 << 20)] if SOAK > 1 else [])):
        words = [sys.executable, "-c", BIG, str(tmp_path), what]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
        shard_bytes, grown = map(int, done.stdout.split())
        assert grown <= shard_bytes + most, (what, shard_bytes, grown)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) > 120_000_000
