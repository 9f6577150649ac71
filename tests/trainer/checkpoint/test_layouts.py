"""Every layout reads every other: simulated ranks of tp x pp x dp in one process, the state compared bit for bit."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mdata
from tests.trainer.shapes import LLAMA
from trainer.checkpoint.folder import read_index
from trainer.checkpoint.format import RunState
from trainer.checkpoint.load import load_state, verify_checkpoint
from trainer.checkpoint.save import Shard, Target, commit, missing_parts, write_part
from trainer.models.gpt_params import parameter_table
from trainer.optim.layout import make_layout
from trainer.parallel.mesh import Mesh
from trainer.parallel.params import Place

SHAPE = replace(
    LLAMA, num_layers=4, hidden_size=8, num_heads=4, num_kv_heads=4, head_dim=2, ffn_hidden_size=8, vocab_size=250,
    padded_vocab_size=252,
)  # fmt: skip
NAMES = ("weight", "exp_avg")
LAYOUTS = list(itertools.product((1, 2, 4), (1, 2, 4), (1, 2)))


@functools.cache
def shards(tp: int, pp: int, dp: int) -> list[Shard]:
    """What each rank of a layout owns."""
    mesh = Mesh(tp * pp * dp, tp, pp=pp)
    made = []
    for rank in range(mesh.world_size):
        index = {}
        for axis in ("tp", "kv", "data", "edp", "ends", "pp"):
            ranks = mesh.ranks_of(axis, rank)
            index[axis] = ranks.index(rank) if ranks else 0
        place = Place(tp_rank=index["tp"], tp_size=tp, stage=index["pp"], num_stages=pp)
        layout = make_layout(parameter_table(SHAPE, place), {axis: mesh.size(axis) for axis in ("data", "edp")})
        made.append(Shard(dict.fromkeys(NAMES, layout.owned(index)), index))
    return made


@functools.cache
def value(name: str, key: str, *, shape: tuple[int, ...]) -> torch.Tensor:
    """The logical tensor, whole: seeded by its name."""
    generator = torch.Generator().manual_seed(sum(map(ord, f"{name}/{key}")))
    return torch.randn(shape, generator=generator)


def state_of(shard: Shard) -> dict[str, torch.Tensor]:
    """What a rank holds of the seeded tensors; padding 0."""
    state = {name: torch.zeros(shard.owned[name].size) for name in NAMES}
    for _, part, first in shard.owned["weight"].slices():
        box = tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True))
        for name in NAMES:
            values = value(name, part.name, shape=tuple(part.shape))[box].reshape(-1)
            state[name][first : first + len(values)] = values
    return state


@functools.cache
def expected_states(layout: tuple[int, int, int]) -> list[dict[str, torch.Tensor]]:
    """What each rank of a layout holds."""
    return [state_of(shard) for shard in shards(*layout)]


def save(root: Path, layout: tuple[int, int, int]) -> Path:
    run = RunState(step=2, consumed_samples=2, data_id="", data={}, optimizer_steps=2, config="")
    target, ranks = Target(root, run, "x", {"tokenizer/vocab.json": b"{}"}), shards(*layout)
    # In any order: rank 0 looks at files only.
    for rank in reversed(range(len(ranks))):
        assert missing_parts(target, len(ranks)) == list(range(rank + 1))
        write_part(target, rank, shard=ranks[rank], state=state_of(ranks[rank]))
    commit(target, len(ranks))
    return target.final


QUICK = ((1, 1, 1), (2, 2, 2), (4, 4, 1))


@pytest.mark.parametrize(
    "source", [pytest.param(x, marks=() if x in QUICK else pytest.mark.soak) for x in LAYOUTS], ids=str
)
def test_every_layout_reads_every_other(source: tuple[int, int, int], tmp_path: Path) -> None:
    folder = save(tmp_path, source)
    for target in LAYOUTS:
        for number, shard in enumerate(shards(*target)):
            found = load_state(folder, shard.owned, dtype=torch.float32)
            for name, expected in expected_states(target)[number].items():
                assert torch.equal(found[name], expected), (target, name)


def test_every_flipped_byte_of_every_file_is_found_and_named(tmp_path: Path) -> None:
    folder = save(tmp_path, (1, 1, 2))
    (shard,) = shards(1, 1, 1)
    verify_checkpoint(folder)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        # Every byte of the indexes is in test_format.py; here all files are read from disk.
        places = range(0, len(whole), max(1, len(whole) // 20))
        for place in (*places, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            with pytest.raises(mdata.DamageError, match=rf"{path.name} is damaged"):
                load_state(folder, shard.owned, dtype=torch.float32)
            with pytest.raises(mdata.DamageError, match=rf"{path.name} is damaged"):
                verify_checkpoint(folder)
        for other in (whole[:-1], whole + b"x"):
            path.write_bytes(other)
            with pytest.raises(mdata.DamageError, match=rf"{path.name} is damaged"):
                read_index(folder) and verify_checkpoint(folder)
        path.unlink()
        with pytest.raises(mdata.DamageError, match=rf"{path.name} is damaged"):
            read_index(folder)
        path.write_bytes(whole)


@pytest.mark.soak
def test_every_single_byte_of_the_slices_counts(tmp_path: Path) -> None:
    folder = save(tmp_path, (2, 1, 1))
    path = folder / "rank-00001.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(mdata.DamageError, match=rf"{path.name} is damaged"):
            verify_checkpoint(folder)


@pytest.mark.parametrize("name", ["rank-00007.safetensors", "rank-00007.json", "tokenizer/other.json"])
def test_a_file_of_another_checkpoint_is_found(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, (1, 1, 1))
    (folder / "notes.txt").write_text("mine")
    read_index(folder)
    (folder / name).write_bytes(b"x")
    with pytest.raises(mdata.DamageError, match=rf"{name} is damaged\n  found: a file that the index does not list"):
        read_index(folder)


def test_a_part_of_another_save_is_found(tmp_path: Path) -> None:
    """A file of the same size and names, with other values."""
    folder, other = save(tmp_path / "a", (1, 1, 2)), save(tmp_path / "b", (1, 1, 2))
    (folder / "rank-00001.json").write_bytes((other / "rank-00000.json").read_bytes())
    with pytest.raises(mdata.DamageError, match=r"rank-00001\.json is damaged"):
        read_index(folder)


def test_a_model_of_another_shape_is_told_with_its_tensors(tmp_path: Path) -> None:
    folder = save(tmp_path, (1, 1, 1))
    wide = make_layout(parameter_table(replace(SHAPE, ffn_hidden_size=12), Place()), {"data": 1, "edp": 1})
    with pytest.raises(mdata.UsageError) as caught:
        load_state(folder, dict.fromkeys(NAMES, wide.everything()), dtype=torch.float32)
    message = str(caught.value)
    assert "does not fit this model at blocks." in message and "shape [" in message
    with pytest.raises(mdata.UsageError, match="momentum"):
        load_state(folder, {"momentum": shards(1, 1, 1)[0].owned["weight"]}, dtype=torch.float32)


BIG = """
import sys, torch
from dataclasses import replace
from pathlib import Path
from tests.trainer.checkpoint import test_layouts as t
t.SHAPE = replace(t.SHAPE, hidden_size=1024, ffn_hidden_size=4096, num_layers=1, vocab_size=20000,
    padded_vocab_size=20000, num_heads=8, num_kv_heads=8, head_dim=128)
folder = Path(sys.argv[1])
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
if sys.argv[2] == "save":
    (shard,) = t.shards(1, 1, 1)
    run = t.RunState(step=2, consumed_samples=2, data_id="", data={}, optimizer_steps=2, config="")
    state = {"weight": torch.ones(shard.owned["weight"].size)}
    before = peak()
    target = t.Target(folder, run, "x")
    t.write_part(target, 0, shard=shard, state=state)
    t.commit(target, 1)
    print(0, peak() - before)
else:
    shard = t.shards(4, 1, 2)[3]
    before = peak()
    state = t.load_state(folder / "step-2", {"weight": shard.owned["weight"]}, dtype=torch.float32)
    print(shard.owned["weight"].size * 4, peak() - before)
"""


def test_memory_is_bounded_by_the_shard(tmp_path: Path) -> None:
    """A process of its own saves 160 MB and another reads an eighth of it; the peak of its memory is measured."""
    for what, most in (("save", 48 << 20), ("load", 48 << 20)):
        words = [sys.executable, "-c", BIG, str(tmp_path), what]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
        shard_bytes, grown = map(int, done.stdout.split())
        assert grown <= shard_bytes + most, (what, shard_bytes, grown)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) > 120_000_000
