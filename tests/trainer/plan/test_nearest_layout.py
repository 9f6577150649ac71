"""The nearest layout that works, against a search of all layouts; and its message."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.mtrain import main
from mdata import UsageError
from tests.helpers.examples import examples
from tests.trainer.plan.test_plan import config as sound
from tests.trainer.run.test_mock_run import config_of
from trainer.config.parse import dump_config
from trainer.config.sections import MeshSection
from trainer.plan.check import check, layout_problems
from trainer.plan.nearest_layout import distance, nearest_layout, nearest_layout_text, with_changes
from trainer.plan.plan import make_plan

OPTIONS = ("schedule", "virtual_pipeline", "stage_balance", "layers_per_stage", "sequence_parallel")


def _config(mesh, *, length=32, micro_batch=1, **others):
    train = {"sequence_length": length, "global_batch": 8, "micro_batch": micro_batch, **others}
    model = {"num_layers": 4, "vocab_size": 1024, "ffn_hidden_size": 192}
    return sound(model=model, mesh={"tp": 1, **mesh}, train=train)


def _all_changes(config, world_size, batches):
    """Every mesh that divides the ranks, every smaller microbatch, every option kept or left out, every batch."""
    mesh, default = config.mesh, MeshSection()
    kept_or_not = [{getattr(mesh, key), getattr(default, key)} for key in OPTIONS]
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for axes in itertools.product(divisors, repeat=3):
        if world_size % math.prod(axes):
            continue
        for size, batch in itertools.product(range(1, config.train.micro_batch + 1), batches):
            if batch % (size * world_size // math.prod(axes)):
                continue
            for options in itertools.product(*kept_or_not):
                now = dict(zip(("tp", "cp", "pp", *OPTIONS), (*axes, *options), strict=True))
                changes = {f"mesh.{key}": value for key, value in now.items() if value != getattr(mesh, key)}
                changes |= {"train.micro_batch": size} if size != config.train.micro_batch else {}
                yield changes | ({"train.global_batch": batch} if batch != config.train.global_batch else {})


def _nearest_of_all(config, world_size):
    """The twin: how far the nearest one is."""
    train = config.train
    for batches in ([train.global_batch], range(1, train.global_batch + train.micro_batch * world_size + 1)):
        works = [
            distance(config, changes)
            for changes in _all_changes(config, world_size, batches)
            if not layout_problems(with_changes(config, changes), world_size)
        ]
        if works:
            return min(works)[:3]
    raise AssertionError("one rank for everything but data works with some batch")


MESHES = st.fixed_dictionaries(
    {"tp": st.sampled_from([1, 2, 3, 4, 8]), "cp": st.sampled_from([1, 2, 3, 4]), "pp": st.sampled_from([1, 2, 3, 8])},
    optional={
        "schedule": st.sampled_from(["gpipe", "interleaved", "zb_v"]),
        "virtual_pipeline": st.sampled_from([2, 3]),
        "layers_per_stage": st.sampled_from([(2, 2), (3, 1), (4, 4)]),
        "sequence_parallel": st.just(True),
    },
)


@examples(150)
@given(
    mesh=MESHES,
    world_size=st.sampled_from([1, 2, 3, 4, 6, 8]),
    micro_batch=st.integers(1, 3),
    global_batch=st.integers(1, 12),
    length=st.sampled_from([32, 30, 7]),
)
def test_none_is_nearer(mesh, world_size, micro_batch, global_batch, length):
    config = _config(mesh, length=length, micro_batch=micro_batch, global_batch=global_batch)
    changes = nearest_layout(config, world_size, facts=None)
    if not layout_problems(config, world_size):
        assert changes == {}
        return
    assert check(with_changes(config, changes), world_size, facts=None) == []
    far = distance(config, changes)[:3]
    assert far == pytest.approx(_nearest_of_all(config, world_size)), changes


@pytest.mark.parametrize(
    ("mesh", "ranks", "others", "text"),
    [
        ({"tp": 3}, 8, {}, "mesh.tp=4"),
        ({"pp": 8}, 8, {}, "mesh.pp=4"),
        ({"pp": 4, "layers_per_stage": (2, 2)}, 4, {}, "mesh.layers_per_stage=[]"),
        ({"pp": 2, "schedule": "interleaved"}, 2, {"global_batch": 7}, "mesh.schedule=1f1b"),
        ({"cp": 2}, 2, {"length": 30}, "mesh.cp=1"),
        ({"tp": 2, "sequence_parallel": True}, 2, {"length": 31}, "mesh.sequence_parallel=false"),
        ({"pp": 8, "cp": 3}, 8, {"micro_batch": 4}, "mesh.cp=2 mesh.pp=4"),
        ({}, 7, {}, "train.global_batch=7"),
    ],
)
def test_the_nearest_is_what_one_would_choose(mesh, ranks, others, text):
    config = _config(mesh, **others)
    assert nearest_layout_text(nearest_layout(config, ranks, facts=None)) == f"the nearest layout that works: {text}"
    with pytest.raises(UsageError, match=r"try: the nearest layout that works: "):
        make_plan(config, ranks, facts=None)


@pytest.mark.parametrize("ranks", [1024, 4096, 720_720, 1_000_003])
def test_many_ranks_have_a_nearest_layout_too(ranks):
    config = _config({"tp": 7, "pp": 11, "cp": 5, "schedule": "zb_v"}, micro_batch=8)
    changes = nearest_layout(config, ranks, facts=None)
    assert check(with_changes(config, changes), ranks, facts=None) == []


def test_other_problems_stay_and_none_is_added():
    """What has nothing to do with the layout is listed beside it; a kernel that needs cp=1 decides for cp=1."""
    config = _config({"tp": 3})
    broken = with_changes(config, {"optimizer.min_lr": 1.0})
    assert nearest_layout(broken, 8, facts=None) == nearest_layout(config, 8, facts=None) == {"mesh.tp": 4}
    named = with_changes(_config({"tp": 3, "cp": 2}), {"kernels.attention": "transformer_engine"})
    assert nearest_layout(named, 8, facts=None) == {"mesh.tp": 4, "mesh.cp": 1}
    assert nearest_layout(with_changes(config, {"mesh.pp": 0}), 8, facts=None) == {}


def test_a_ramp_that_fits_no_layout_gets_no_proposal():
    assert nearest_layout(_config({"tp": 3}, batch_ramp="3 5 100"), 7, facts=None) == {}
    assert nearest_layout(_config({"tp": 3}, batch_ramp="4 4 100"), 4, facts=None) == {"mesh.tp": 4}
    assert nearest_layout(_config({"tp": 3}, batch_ramp="4 3 100"), 4, facts=None) == {}


@pytest.mark.parametrize("command", ["check", "train", "plan"])
def test_users_read_all_problems_and_one_way_out(tmp_path, capsys, command):
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config_of(tmp_path)))
    ranks = "--ranks" if command == "plan" else "--nproc"
    assert main([command, str(path), ranks, "8", "mesh.tp=3", "mesh.pp=8"]) == 2
    message = capsys.readouterr().err
    assert "not a multiple of mesh.tp=3" in message and "are more than model.num_layers" in message
    found = [line for line in message.splitlines() if "the nearest layout that works: " in line]
    assert len(found) == 1
    words = found[0].split("works: ")[1].split()
    assert main(["check", str(path), "--nproc", "8", "mesh.tp=3", "mesh.pp=8", *words]) == 0
    if command == "check":
        capsys.readouterr()
        assert main(["check", str(path), "--json", "--nproc", "8", "mesh.tp=3", "mesh.pp=8"]) == 2
        facts = json.loads(capsys.readouterr().out)
        assert {f"{name}={value}" for name, value in facts["nearest_layout"].items()} == set(words)
