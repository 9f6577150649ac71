"""Any layout reads any other, bit for bit; nothing half-written is ever taken for a checkpoint."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata.util import atomic_io
from tests.helpers.examples import soaked
from tests.helpers.ranks import run_ranks
from tests.trainer.checkpoint.layouts import Layout, config_of
from tests.trainer.checkpoint.version_1 import make_1
from tests.trainer.engines import assemble, layouts, logical, microbatches, save_engine, small_config
from trainer.checkpoint.folder import latest_checkpoint, read_index
from trainer.checkpoint.format import RunState, SavedSlice, dump_index
from trainer.checkpoint.load import overlaps
from trainer.checkpoint.save import together
from trainer.config.sections import MeshSection
from trainer.kernels.updates import state_names
from trainer.parallel.collectives import Group
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint"
LAYOUTS = {"alone": (1, 1, False), "tp2": (2, 2, True), "dp2": (2, 1, False), "tp2dp2": (4, 2, True)}


def _config(layout, shape="gpt2"):
    ranks, tp, sequence_parallel = LAYOUTS[layout]
    return ranks, replace(small_config(shape), mesh=MeshSection(tp=tp, sequence_parallel=sequence_parallel))


def _state(step):
    return RunState(step=step, consumed_samples=4 * step, data_id="id", data={}, optimizer_steps=step, config="x = 1\n")


def _state_parts(engine):
    o = engine.optimizer
    return [[(f"{n}/{a}", b, c) for a, b, c in logical(o.owns[n], o.state[n])] for n in o.state]


@pytest.mark.parametrize("rule", ["sgd", "muon"])
def test_the_state_of_another_update_rule_is_saved_under_its_own_names(rule, tmp_path):
    ranks, config = _config("tp2dp2", "wide")
    config = replace(config, optimizer=replace(config.optimizer, name=rule))
    saved = _whole(run_ranks(_train_and_save, ranks, config, tmp_path))
    assert {name.partition("/")[0] for name in saved} == {
        name for matrix in (False, True) for name in state_names(rule, matrix=matrix)
    }
    ranks, other = _config("tp2", "wide")
    other = replace(other, optimizer=config.optimizer)
    loaded = run_ranks(_load, ranks, other, tmp_path / "step-2")
    found = _whole([parts for _, parts, _ in loaded])
    assert found.keys() == saved.keys()
    for name, values in saved.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def _train_and_save(context, config, root, then=None):
    engine = layouts(context, config)
    for step in range(2):
        engine.step(microbatches(engine, step), 1e-2)
    save_engine(engine, root, run=_state(2))
    return (_state_parts(engine), then(engine)) if then else _state_parts(engine)


def _load(context, config, folder):
    engine = layouts(context, config, fresh=False)
    run = engine.load(folder)
    return run, _state_parts(engine), engine.optimizer.steps


def _whole(results):
    return assemble([part for rank in results for group in rank for part in group])


GLOO = [
    (Layout(), Layout(2, 2)),
    (Layout(2, 2), Layout()),
    (Layout(2, 1, 2, "parameters"), Layout(1, 4)),
    (Layout(1, 4), Layout(1, 1, 4, "gradients")),
    (Layout(1, 1, 4, "none"), Layout(2, 2, 1, "state", (("schedule", "interleaved"), ("virtual_pipeline", 2)))),
    (Layout(1, 2, 2, "gradients", (("schedule", "zb_v"),)), Layout(4)),
    (Layout(1, 2, 1, "state", (("cp", 2), ("layers_per_stage", (1, 3)))), Layout(2, 1, 2, "state")),
    (Layout(4), Layout(2, 1, 1, "parameters", (("cp", 2), ("sequence_parallel", True)))),
]


def _evaluated(engine):
    return engine.evaluate(microbatches(engine, 9))


def _write(context, layout, root):
    return _train_and_save(context, config_of(layout), root, then=_evaluated)


def _read(context, layout, folder):
    engine = layouts(context, config_of(layout), fresh=False)
    run = engine.load(folder)
    return run, _state_parts(engine), engine.optimizer.steps, _evaluated(engine)


@pytest.mark.parametrize(("writer", "reader"), soaked(GLOO, but=GLOO[4:7]), ids=str)
def test_real_ranks_of_any_layout_read_any_other(writer, reader, tmp_path):
    """All layouts, simulated: test_layouts.py."""
    trained = run_ranks(_write, writer.world_size, writer, tmp_path)
    expected = _whole([parts for parts, _ in trained])
    results = run_ranks(_read, reader.world_size, reader, latest_checkpoint(tmp_path))
    got = _whole([parts for _, parts, _, _ in results])
    assert all(run == _state(2) for run, _, _, _ in results)
    assert {steps for _, _, steps, _ in results} == {2}
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)
    # The parameters of the model are those of the state, on every rank.
    losses = {loss for _, loss in trained} | {loss for _, _, _, loss in results}
    assert max(losses) - min(losses) < 1e-6


def _went_on(context, config, root):
    """Weights after four steps, and after two that go on from the checkpoint of the first two."""
    engine = layouts(context, config)
    for step in range(4):
        if step == 2:
            save_engine(engine, root, run=_state(2))
        engine.step(microbatches(engine, step), 1e-2)
    again = Engine(config, engine.plan, world=engine.world, fresh=False)
    again.load(root / "step-2")
    for step in (2, 3):
        again.step(microbatches(again, step), 1e-2)
    return all(torch.equal(again.optimizer.state[name], x) for name, x in engine.optimizer.state.items())


@pytest.mark.parametrize(("layout", "dtype"), [("tp2dp2", "fp32"), ("dp2", "bf16")])
def test_muon_continues_bit_for_bit(layout, dtype, tmp_path):
    ranks, config = _config(layout, "gpt2")
    config = replace(config, optimizer=replace(config.optimizer, name="muon"))
    config = replace(config, precision=replace(config.precision, dtype=dtype))
    assert all(run_ranks(_went_on, ranks, config, tmp_path))


def test_padding_and_copies_are_not_stored(tmp_path):
    ranks, config = _config("tp2")
    run_ranks(_train_and_save, ranks, config, tmp_path)
    index = read_index(tmp_path / "step-2")
    assert index.tensors["weight/embedding.weight"].shape == (250, 32)
    for name, entry in index.tensors.items():
        stored = sum(int(np.prod(piece.size)) for piece in entry.slices)
        assert stored == np.prod(entry.shape), name


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
    for piece, (low, extent) in overlaps((start, size), saved):
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
    save_engine(engine, root, run=_state(1))
    calls = [0]

    def failing(real):
        def run(*args):
            calls[0] += 1
            if calls[0] == call:
                raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
            return real(*args)

        return run

    names = ("write", "sync", "rename") if context.rank == failing_rank else ()
    real = {name: getattr(atomic_io, name) for name in names}
    try:
        for name, function in real.items():
            setattr(atomic_io, name, failing(function))
        save_engine(engine, root, run=_state(2))
    except mdata.ResourceError as error:
        return str(error), calls[0]
    finally:
        for name, function in real.items():
            setattr(atomic_io, name, function)
    return None, calls[0]


@pytest.mark.parametrize("failing_rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_full_disk_leaves_the_older_checkpoint_and_stops_every_rank(failing_rank, tmp_path):
    ranks, config = _config("tp2")
    for call in range(1, 40):
        root = tmp_path / f"{failing_rank}-{call}"
        results = run_ranks(_save_twice, ranks, config, root, failing_rank, call)
        newest = latest_checkpoint(root)
        if results[failing_rank][1] < call:
            assert [message for message, _ in results] == [None, None]
            assert newest == root / "step-2"
            break
        assert all("No space left" in message for message, _ in results), results
        read_index(newest)  # whole, whichever of the two it is
        assert [p.name for p in root.iterdir() if p.name.endswith(".partial")] == []
    assert call > (8 if failing_rank == 0 else 4), "the failures reached every write"


@pytest.fixture
def saved(tmp_path) -> Path:
    ranks, config = _config("alone")
    run_ranks(_train_and_save, ranks, config, tmp_path)
    return tmp_path / "step-2"


@functools.cache
def _alone_engine():
    _, config = _config("alone")
    world = join_world(Mesh(1), placement=Placement())
    return Engine(config, make_plan(config, 1, facts=None), world=world, fresh=False)


def _alone_load(folder):
    """Read the whole state as one rank."""
    return _alone_engine().load(folder)


def _flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


def _without_hashes(folder):
    """Make it a checkpoint of the oldest version."""
    return make_1(folder, read_index(folder))


def test_a_checkpoint_of_an_older_version_is_read(saved):
    run = _alone_load(saved)
    _without_hashes(saved)
    assert not read_index(saved).hashed
    assert _alone_load(saved) == run


def test_damaged_headers_are_found_without_hashes(saved):
    """Lengths, JSON, names, types, shapes and offsets of a file whose index knows no hashes."""
    _without_hashes(saved)
    path = saved / "rank-00000.safetensors"
    whole = path.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    size = data - 8
    damaged = {
        "a length of 0": (0).to_bytes(8, "little") + whole[8:],
        "a length past the end": (1 << 62).to_bytes(8, "little") + whole[8:],
        "no JSON": whole[:8] + b"nonsense".ljust(size) + whole[data:],
        "nested deeply": whole[:8] + b"[" * size + whole[data:],
        "another name": whole.replace(b"weight/final_norm.weight@0", b"weight/final_norm.height@0", 1),
        "no such type": whole.replace(b"F64", b"F65", 1),
        "whole numbers": whole.replace(b'"F64"', b'"I64"'),
        "a negative offset": whole.replace(b'"data_offsets":[0,', b'"data_offsets":[-,', 1),
        "another shape": whole.replace(b'"shape":[250,32]', b'"shape":[32,250]'),
    }
    for what, content in damaged.items():
        assert len(content) == len(whole) and content != whole, what
        path.write_bytes(content)
        with pytest.raises(mdata.DamageError, match=r"rank-00000\.safetensors is damaged"):
            _alone_load(saved)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.json"])
def test_no_link_is_followed_out_of_the_folder(saved, name, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (saved / name).rename(elsewhere)
    (saved / name).symlink_to(elsewhere)
    with pytest.raises(mdata.DamageError, match=rf"{name} is damaged\n  found: a link"):
        read_index(saved)
    (saved / name).unlink()
    os.mkfifo(saved / name)  # to open it would wait for ever
    with pytest.raises(mdata.DamageError, match=rf"{name} is damaged\n  found: not a regular file"):
        read_index(saved)


def test_damage_is_named_with_what_to_do(saved):
    path = saved / "rank-00000.safetensors"
    whole, index = path.read_bytes(), read_index(saved)
    path.write_bytes(whole[:-1])
    with pytest.raises(
        mdata.DamageError, match=r"is damaged(.|\n)*; there is no other intact checkpoint in its folder"
    ):
        read_index(saved)
    other = saved.with_name("step-1")
    shutil.copytree(saved, other)  # as damaged as the first
    run = replace(index.run, step=1, optimizer_steps=1)
    (other / "index.json").write_bytes(dump_index(run, index.parts, extras=index.extras))
    with pytest.raises(mdata.DamageError, match="there is no other intact checkpoint"):
        read_index(saved)
    (other / path.name).write_bytes(whole)
    instead = f"restore it from a copy, or write step-1 into {saved.parent / 'latest'} to continue from that one"
    with pytest.raises(mdata.DamageError, match=rf"rank-00000\.safetensors is damaged(.|\n)*{instead}"):
        read_index(saved)
    path.unlink()
    with pytest.raises(mdata.DamageError, match="found: no such file"):
        read_index(saved)
    (saved / "index.json").unlink()
    with pytest.raises(mdata.DamageError, match=r"index\.json is damaged\n  found: no such file"):
        read_index(saved)


def test_a_missing_tensor_and_another_shape_are_named(saved):
    value = _without_hashes(saved)
    other = value["tensors"].pop("weight/final_norm.weight")
    (saved / "index.json").write_text(json.dumps(value))
    with pytest.raises(mdata.UsageError, match=r"does not fit this model at final_norm\.weight\n  found: no such"):
        _alone_load(saved)
    other["shape"] = other["slices"][0]["size"] = [31]
    value["tensors"]["weight/final_norm.weight"] = other
    (saved / "index.json").write_text(json.dumps(value))
    with pytest.raises(mdata.UsageError, match=r"does not fit this model at final_norm\.weight\n  found: shape \[31"):
        _alone_load(saved)


def test_damage_that_one_rank_finds_is_raised_by_all(tmp_path):
    """None waits in a collective for one that gave up."""
    ranks, config = _config("dp2")
    run_ranks(_train_and_save, ranks, config, tmp_path)
    path = tmp_path / "step-2" / "rank-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(_flipped(whole, len(whole) - 1))
    for message in run_ranks(_load_damaged, ranks, config, tmp_path / "step-2", timeout_s=60):
        assert "rank-00001.safetensors is damaged" in message


def _load_damaged(context, config, folder):
    try:
        _load(context, config, folder)
    except mdata.DamageError as error:
        return str(error)
    return ""


def test_a_full_disk_is_told_with_the_files_name(tmp_path, monkeypatch):
    """The system's own error of a write carries no name."""

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_io, "write", full)
    with pytest.raises(
        mdata.ResourceError, match=r"rank 0 on \S+ writing a checkpoint: .*rank-0\.safetensors: No space left"
    ):
        together(Group.single("world"), lambda: atomic_io.atomic_write(tmp_path / "rank-0.safetensors", b"x"))


def test_another_format_or_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(mdata.UsageError, match=r"no checkpoint at(.|\n)*try: give a folder with index\.json"):
        read_index(tmp_path / "none")
    (tmp_path / "index.json").write_text('{"format": "mtrain-checkpoint", "version": 3}')
    with pytest.raises(mdata.DamageError, match="expected: mtrain-checkpoint version 2 or 1"):
        read_index(tmp_path)


def _continued(context, config, folder):
    engine = layouts(context, config, fresh=False)
    engine.load(folder)
    return [engine.step(microbatches(engine, step), 1e-2).read().loss for step in range(2, 6)]


@pytest.mark.parametrize("name", ["tp2dp2", "alone"])
def test_a_checkpoint_from_before_there_were_buckets_is_continued(name):
    """Written by four ranks (tp 2 x dp 2, sequence parallel) of the code before, which went on to these losses."""
    ranks, config = _config(name, "gpt2")
    tiny = replace(
        config.model, num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn_hidden_size=8
    )
    losses = [5.552683583590087, 5.577033321573194, 5.514929854412308, 5.551948325085778]
    for got in run_ranks(_continued, ranks, replace(config, model=tiny), GOLDEN / "step-2"):
        np.testing.assert_allclose(got, losses, rtol=1e-12)


def _scaled(context, root, resumed):
    """Six steps in fp16 from a scale that overflows at first; with a new engine after the third, or in one go."""
    config = small_config("llama", dtype="fp16")
    config = replace(config, precision=replace(config.precision, initial_loss_scale=2.0**20, loss_scale_window=2))
    engine, reports = layouts(context, config), []
    for step in range(6):
        if resumed and step == 3:
            save_engine(engine, root, run=replace(_state(3), optimizer_steps=engine.optimizer.steps))
            engine = layouts(context, config, fresh=False)
            engine.load(root / "step-3")
        reports.append(engine.step(microbatches(engine, step), 1e-2).read())
    return [(report.loss, report.loss_scale, report.applied) for report in reports]


def test_a_loss_scale_goes_on_where_it_was(tmp_path):
    (straight,) = run_ranks(_scaled, 1, tmp_path, False)
    (resumed,) = run_ranks(_scaled, 1, tmp_path, True)
    assert straight == resumed and len({scale for _, scale, _ in straight}) > 1
