"""Any layout reads any other, bit for bit; nothing half-written is ever taken for a checkpoint."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import assemble, layouts, logical, microbatches, small_config
from trainer import checkpoint
from trainer.checkpoint import RunState, SavedSlice
from trainer.collectives import Axis
from trainer.config import MeshSection
from trainer.optimizer import STATE_NAMES

LAYOUTS = {"alone": (1, 1, False), "tp2": (2, 2, True), "dp2": (2, 1, False), "tp2dp2": (4, 2, True)}


def _config(layout, shape="gpt2"):
    ranks, tp, sequence_parallel = LAYOUTS[layout]
    return ranks, replace(small_config(shape), mesh=MeshSection(tp=tp, sequence_parallel=sequence_parallel))


def _state(step):
    return RunState(step=step, consumed_samples=4 * step, data_id="id", data={}, optimizer_steps=step, config="x = 1\n")


def _state_parts(engine):
    o = engine.optimizer
    return [
        [(f"{n}/{a}", b, c) for a, b, c in logical(engine.layout, o.state[n], o.start, o.stop)] for n in STATE_NAMES
    ]


def _train_and_save(context, config, root):
    engine = layouts(context, config)
    for step in range(2):
        engine.step(microbatches(engine, step), 1e-2)
    engine.save(root, _state(2))
    return _state_parts(engine)


def _load(context, config, folder):
    engine = layouts(context, config, fresh=False)
    run = engine.load(folder)
    return run, _state_parts(engine), engine.optimizer.steps


def _whole(results):
    return assemble([part for rank in results for group in rank for part in group])


@pytest.mark.parametrize(
    ("writer", "reader", "shape"), [*((a, b, "gpt2") for a in LAYOUTS for b in LAYOUTS), ("tp2dp2", "tp2", "wide")]
)
def test_any_layout_reads_any_other(writer, reader, shape, tmp_path):
    ranks, config = _config(writer, shape)
    expected = _whole(run_ranks(_train_and_save, ranks, config, tmp_path))
    ranks, config = _config(reader, shape)
    results = run_ranks(_load, ranks, config, checkpoint.latest(tmp_path))
    got = _whole([parts for _, parts, _ in results])
    assert all(run == _state(2) for run, _, _ in results)
    assert {steps for _, _, steps in results} == {2}
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def test_padding_and_copies_are_not_stored(tmp_path):
    ranks, config = _config("tp2")
    run_ranks(_train_and_save, ranks, config, tmp_path)
    index = checkpoint.read_index(tmp_path / "step-2")
    assert index["tensors"]["weight/embedding.weight"]["shape"] == [250, 32]
    for name, entry in index["tensors"].items():
        stored = sum(int(np.prod(s["size"])) for s in entry["slices"])
        assert stored == np.prod(entry["shape"]), name


@given(st.lists(st.integers(0, 5), min_size=2, max_size=4), st.data())
def test_overlaps_equal_their_twin(cuts, data):
    """Twin: paint every saved element with its slice's number and look which numbers lie in the wanted box."""
    edges = sorted({0, 6, *cuts})
    saved = [
        SavedSlice("f", f"{r},{c}", (r, c), (r2 - r, c2 - c))
        for r, r2 in itertools.pairwise(edges)
        for c, c2 in [(0, 2), (2, 7)]
    ]
    start = (data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6)))
    size = (data.draw(st.integers(1, 6 - start[0])), data.draw(st.integers(1, 7 - start[1])))
    painted = {}
    for piece, (low, extent) in checkpoint.overlaps((start, size), saved):
        for i in range(low[0], low[0] + extent[0]):
            for j in range(low[1], low[1] + extent[1]):
                assert (i, j) not in painted
                painted[i, j] = piece.key
    expected = {
        (i, j): piece.key
        for piece in saved
        for i in range(piece.start[0], piece.start[0] + piece.size[0])
        for j in range(piece.start[1], piece.start[1] + piece.size[1])
        if start[0] <= i < start[0] + size[0] and start[1] <= j < start[1] + size[1]
    }
    assert painted == expected


def _save_twice(context, config, root, failing_rank, call):
    """Save step 1; save step 2 with a full disk at the n-th write, sync or rename of one rank."""
    engine = layouts(context, config)
    engine.save(root, _state(1))
    calls = [0]

    def failing(real):
        def run(*args):
            calls[0] += 1
            if calls[0] == call:
                raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
            return real(*args)

        return run

    names = ("write", "sync", "rename") if context.rank == failing_rank else ()
    real = {name: getattr(mdata.durable, name) for name in names}
    try:
        for name, function in real.items():
            setattr(mdata.durable, name, failing(function))
        engine.save(root, _state(2))
    except mdata.ResourceError as error:
        return str(error), calls[0]
    finally:
        for name, function in real.items():
            setattr(mdata.durable, name, function)
    return None, calls[0]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_leaves_the_older_checkpoint_and_stops_every_rank(failing_rank, tmp_path):
    ranks, config = _config("tp2")
    for call in range(1, 40):
        root = tmp_path / f"{failing_rank}-{call}"
        results = run_ranks(_save_twice, ranks, config, root, failing_rank, call)
        newest = checkpoint.latest(root)
        if results[failing_rank][1] < call:
            assert [message for message, _ in results] == [None, None]
            assert newest == root / "step-2"
            break
        assert all("No space left" in message for message, _ in results), results
        checkpoint.read_index(newest)  # whole, whichever of the two it is
        assert [p.name for p in root.iterdir() if p.name.endswith(".partial")] == []
    assert call > (8 if failing_rank == 0 else 4), "the failures reached every write"


def test_remove_old_keeps_the_newest_and_clears_what_a_crash_left(tmp_path):
    for step in (2, 10, 9):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / ".step-11.partial").mkdir()
    checkpoint.remove_old(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-9"]


def test_remove_old_never_deletes_what_latest_names(tmp_path):
    """Step 100 was gone back to by hand, and 150 saved from there; 200 is of the branch that was left."""
    for step in (100, 150, 200):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / "latest").write_text("step-150")
    checkpoint.remove_old(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-150", "step-200"]


@pytest.fixture
def saved(tmp_path) -> Path:
    ranks, config = _config("alone")
    run_ranks(_train_and_save, ranks, config, tmp_path)
    return tmp_path / "step-2"


def test_damage_is_named(saved):
    path = saved / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(mdata.DamageError, match=r"is damaged(.|\n)*; there is no other checkpoint beside it"):
        checkpoint.read_index(saved)
    shutil.copytree(saved, saved.with_name("step-1"))
    instead = f"restore it from a copy; or write step-1 into {saved.parent / 'latest'} to go on from there"
    with pytest.raises(mdata.DamageError, match=rf"rank-00000\.safetensors is damaged(.|\n)*{instead}"):
        checkpoint.read_index(saved)
    path.unlink()
    with pytest.raises(mdata.DamageError, match="found: no such file"):
        checkpoint.read_index(saved)


def test_a_missing_slice_and_another_shape_are_named(saved):
    index = json.loads((saved / "index.json").read_text())
    index["tensors"]["weight/final_norm.weight"]["slices"] = []
    index["tensors"]["exp_avg/final_norm.bias"]["shape"] = [31]
    (saved / "index.json").write_text(json.dumps(index))
    _, config = _config("alone")
    with pytest.raises(AssertionError, match=r"lacks a part of weight/final_norm\.weight"):
        run_ranks(_load, 1, config, saved)
    index["tensors"].pop("weight/final_norm.weight")
    (saved / "index.json").write_text(json.dumps(index))
    with pytest.raises(AssertionError, match=r"does not fit this model at final_norm\.weight"):
        run_ranks(_load, 1, config, saved)


def test_a_full_disk_is_told_with_the_files_name(tmp_path, monkeypatch):
    """The system's own error of a write carries no name."""

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mdata.durable, "write", full)
    with pytest.raises(mdata.ResourceError, match=r"rank 0 writing a checkpoint: .*rank-0\.safetensors: No space left"):
        checkpoint._together(
            Axis.single("world"), lambda: mdata.durable.atomic_write(tmp_path / "rank-0.safetensors", b"x")
        )


def test_another_format_or_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(mdata.UsageError, match=r"no checkpoint at(.|\n)*try: restore it from a copy"):
        checkpoint.read_index(tmp_path)
    with pytest.raises(mdata.UsageError, match=r"no checkpoint at(.|\n)*try: give a folder with index\.json"):
        checkpoint.read_index(tmp_path / "none")
    (tmp_path / "index.json").write_text('{"format": "mtrain-checkpoint", "version": 2}')
    with pytest.raises(mdata.DamageError, match="expected: mtrain-checkpoint version 1"):
        checkpoint.read_index(tmp_path)
    assert checkpoint.latest(tmp_path) is None
