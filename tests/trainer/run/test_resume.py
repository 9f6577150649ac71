"""How a run goes on: the learning rate's horizon is kept, what differs is told, what does not fit is found before."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.mtrain import main
from mdata import UsageError
from tests.helpers.notes import Notes
from tests.helpers.runs import make_corpora, write_jsonl
from tests.trainer.plan.test_plan import config as sound
from trainer.checkpoint.folder import latest_checkpoint, read_index
from trainer.checkpoint.format import dump_index
from trainer.config.parse import dump_config, key_names, load_config, parse_config
from trainer.config.sections import RunConfig
from trainer.models.gpt.shape import function_keys, gpt_shape
from trainer.optim.schedules import rates
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.check import check
from trainer.plan.lengths import schedule_lengths
from trainer.run.data import open_data
from trainer.run.metrics import read_events, read_metrics
from trainer.run.resume import changed_settings, find_start, with_horizon
from trainer.run.train import train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    return make_corpora(folder, {"text": write_jsonl(folder / "text.jsonl", 1)})["text"]


def _config(corpus: Path, folder: Path, *, steps: int, **changes: dict[str, Any]) -> RunConfig:
    tables: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder)},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
        "data": {"blend": str(corpus)},
        "train": {"sequence_length": 16, "global_batch": 2, "micro_batch": 2, "steps": steps},
        "optimizer": {"lr": 1e-2},
    }
    for name, keys in changes.items():
        tables[name] = tables.get(name, {}) | keys
    config, problems = parse_config(tables)
    assert config is not None, problems
    return config


def _train(config: RunConfig) -> list[str]:
    """Train alone; what was told."""
    notes = Notes()
    train(config, join_world(Mesh(1), placement=Placement()), progress=notes)
    return notes.lines


def _rates(folder: Path) -> list[float]:
    return [line["lr"] for line in read_metrics(folder)]


def _rate(config: RunConfig, step: int) -> float:
    size = config.train.global_batch
    found = rates(config.optimizer, schedule_lengths(config), steps=step, samples=step * size, batch=size)
    return found.learning_rate


def _go_back(folder: Path, step: int) -> None:
    (folder / "checkpoints" / "latest").write_text(f"step-{step}")


def test_more_steps_do_not_rewind_the_learning_rate(corpus, tmp_path):
    often = {"checkpoint": {"interval": 1, "keep": 9}, "optimizer": {"lr": 1e-2, "min_lr": 1e-3}}
    _train(_config(corpus, tmp_path, steps=4, **often))
    planned = _rates(tmp_path)
    _go_back(tmp_path, 2)  # as if it had been stopped there
    notes = _train(_config(corpus, tmp_path, steps=6, **often))
    assert _rates(tmp_path) == [*planned, 1e-3, 1e-3]
    told = (
        "the learning rate reaches optimizer.min_lr=0.001 at step 4, as planned when the run began; "
        "set optimizer.decay_steps=6 to let it decay until step 6"
    )
    assert notes[2:4] == ["changed since step-2: train.steps 4 -> 6", told]  # behind the header
    # The horizon is that of the first start, not of the last.
    _go_back(tmp_path, 3)
    _train(_config(corpus, tmp_path, steps=7, **often))
    assert _rates(tmp_path) == [*planned, 1e-3, 1e-3, 1e-3]
    assert load_config(tmp_path / "config.toml").optimizer.decay_steps == 4


@pytest.mark.parametrize("length", [{"steps": 4}, {"samples": 8}, {"tokens": 128}])
@pytest.mark.parametrize("step", [2, 4])
def test_more_steps_at_learning_rate_0_are_refused(corpus, tmp_path, step, length):
    """Whether the run has ended, or was stopped before its decay had; in each unit of its length."""
    ((unit, end),) = length.items()

    def lasting(times: int, **optimizer: Any) -> RunConfig:
        train = {"steps": None, unit: times * end}
        often = {"interval": 1, "keep": 9}
        return _config(
            corpus, tmp_path, steps=None, train=train, checkpoint=often, optimizer={"schedule": "linear", **optimizer}
        )

    _train(lasting(1))
    _go_back(tmp_path, step)
    longer = lasting(2)
    with pytest.raises(UsageError) as caught:
        find_start(longer, open_data(longer))
    one, other = f"{unit.removesuffix('s')} {end}", f"{unit.removesuffix('s')} {2 * end}"
    assert str(caught.value) == (
        "steps 5 to 8 would run at learning rate 0\n"
        f"  found: optimizer.min_lr=0, which the decay reaches at {one}, as planned when the run began\n"
        f"  try: set optimizer.decay_{unit}={2 * end} to let it decay until {other}, or a larger optimizer.min_lr; "
        f"optimizer.decay_{unit}={end} trains them at rate 0"
    )
    for settings in (
        {f"decay_{unit}": 2 * end},
        {f"decay_{unit}": end},
        {"min_lr": 1e-4},
        {"embedding_lr": 1e-3, "embedding_min_lr": 1e-4},
        {"schedule": "constant"},
    ):
        asked = lasting(2, **settings)
        assert find_start(asked, open_data(asked)).done.steps == step
    same = lasting(1)
    assert find_start(same, open_data(same)).notes == ()


def test_a_horizon_that_the_user_moves_is_used_and_told(corpus, tmp_path):
    _train(_config(corpus, tmp_path, steps=2))
    longer = _config(corpus, tmp_path, steps=4, optimizer={"lr": 1e-2, "decay_steps": 4})
    notes = _train(longer)
    assert _rates(tmp_path)[2:] == [_rate(longer, step) for step in (2, 3)]
    assert notes[2:4] == [
        "changed since step-2: train.steps 2 -> 4, optimizer.decay_steps 2 -> 4",
        "the learning rate of step 3 is 0.005; with the checkpoint's settings it would be 0",
    ]


def test_settings_that_differ_are_printed_and_recorded(corpus, tmp_path):
    _train(_config(corpus, tmp_path, steps=2, optimizer={"min_lr": 1e-3}))
    changes = {"optimizer": {"lr": 3e-2, "min_lr": 1e-3}, "precision": {"dtype": "bf16"}}
    other = _config(corpus, tmp_path, steps=4, **changes)
    other = replace(other, train=replace(other.train, global_batch=4))
    notes = _train(other)
    assert notes[2] == (
        "changed since step-2: train.global_batch 2 -> 4, train.steps 2 -> 4, optimizer.lr 0.01 -> 0.03, "
        "precision.dtype 'fp32' -> 'bf16'"
    )
    first, second = (event for event in read_events(tmp_path) if event["event"] == "start")
    assert first["checkpoint"] is None and first["changed"] == {}
    assert second["checkpoint"] == "step-2" and second["step"] == 2
    assert second["changed"] == {
        "train.global_batch": {"before": 2, "now": 4},
        "train.steps": {"before": 2, "now": 4},
        "optimizer.lr": {"before": 1e-2, "now": 3e-2},
        "precision.dtype": {"before": "fp32", "now": "bf16"},
    }


def test_a_run_that_goes_on_as_it_was_has_nothing_to_tell(corpus, tmp_path):
    config = _config(corpus, tmp_path, steps=4, checkpoint={"interval": 1, "keep": 9})
    _train(config)
    start = find_start(config, open_data(config))
    assert (start.done.steps, start.done.samples, start.changes, start.notes) == (4, 8, {}, ())
    _go_back(tmp_path, 2)
    start = find_start(config, open_data(config))
    assert (start.done.steps, start.folder, start.changes, start.notes) == (
        2,
        tmp_path / "checkpoints" / "step-2",
        {},
        (),
    )


def _rewrite(folder: Path, text: str) -> None:
    """Give a checkpoint another configuration, as an older or a newer version would have written it."""
    index = read_index(folder)
    (folder / "index.json").write_bytes(dump_index(replace(index.run, config=text), index.parts, extras=index.extras))


# How versions before 0.1 wrote keys that are not set.
NOT_SET_BEFORE = (
    "decay_steps = 0\ndecay_samples = 0\nembedding_lr = 0.0\nbucket_size = 0\n",
    'preset = ""\nhead_dim = 0\nwindow = 0\nattention_scale = 0.0\nlogit_softcap = 0.0\nmax_position = 0\n',
)


def test_a_checkpoint_of_an_older_version_keeps_its_horizon(corpus, tmp_path):
    """They stored optimizer.decay_steps = 0, and lacked keys that came later."""
    config = _config(corpus, tmp_path, steps=3, optimizer={"schedule": "inverse_sqrt"})
    _train(config)
    text = dump_config(config)
    assert "decay_steps" not in text and "head_dim" not in text
    for section, keys in {"optimizer": NOT_SET_BEFORE[0], "model": NOT_SET_BEFORE[1]}.items():
        text = text.replace(f"[{section}]\n", f"[{section}]\n{keys}")
    _rewrite(tmp_path / "checkpoints" / "step-3", text)
    longer = _config(corpus, tmp_path, steps=9, optimizer={"schedule": "inverse_sqrt"})
    start = find_start(longer, open_data(longer))
    assert start.config.optimizer.decay_steps == 3 and start.changes == {"train.steps": (3, 9)}


def test_settings_of_a_newer_version_are_told_not_to_be_compared(corpus, tmp_path):
    config = _config(corpus, tmp_path, steps=2)
    _train(config)
    _rewrite(tmp_path / "checkpoints" / "step-2", dump_config(config) + "\n[later]\nx = 1\n")
    assert find_start(config, open_data(config)).notes == (
        "step-2 has settings that this version does not know, so changed settings are not reported",
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_the_horizon_is_that_of_the_first_start(steps):
    """A run resumed again and again with other lengths has one curve, whatever lies between."""
    now = with_horizon(sound(train={"steps": steps[0]}), None)
    for number in steps[1:]:
        now = with_horizon(sound(train={"steps": number}), now)
    assert now.train.steps == steps[-1] and now.optimizer.decay_steps == steps[0]
    assert with_horizon(sound(optimizer={"decay_steps": 77}), now).optimizer.decay_steps == 77
    found = [_rate(now, step) for step in range(10, 60)]
    assert all(a >= b for a, b in pairwise(found))


@given(st.lists(st.tuples(st.sampled_from(("steps", "samples", "tokens")), st.integers(32, 999)), min_size=1))
def test_the_horizon_keeps_the_unit_of_the_first_start(lengths):
    """Whatever units the run's length is given in later."""
    linear = {"schedule": "linear", "weight_decay_schedule": "cosine"}
    now = None
    for unit, amount in lengths:
        train = {"steps": None, "samples": None, "tokens": None} | {unit: amount}
        now = with_horizon(sound(train=train, optimizer=linear), now)
    (unit, amount), keys = lengths[0], asdict(now.optimizer)
    for prefix in ("decay", "weight_decay"):
        found = {key: keys[f"{prefix}_{key}"] for key in ("steps", "samples", "tokens")}
        assert found == {"steps": None, "samples": None, "tokens": None} | {unit: amount}


def test_another_update_rule_is_refused(corpus, tmp_path):
    _train(_config(corpus, tmp_path, steps=1))
    other = _config(corpus, tmp_path, steps=1, optimizer={"name": "sgd"})
    with pytest.raises(UsageError, match=r"another update rule\n  found: optimizer\.name sgd\n"):
        find_start(other, open_data(other))


def test_dropout_may_change_on_the_way(corpus, tmp_path):
    _train(_config(corpus, tmp_path, steps=1))
    other = _config(corpus, tmp_path, steps=1, model={"hidden_dropout": 0.1, "attention_dropout": 0.2})
    changes = find_start(other, open_data(other)).changes
    assert changes["model.hidden_dropout"] == (0.0, 0.1) and changes["model.attention_dropout"] == (0.0, 0.2)


def test_changed_settings_are_named_by_section_and_key():
    before, now = sound(), sound(optimizer={"lr": 0.5}, mesh={"tp": 1})
    assert changed_settings(before, now) == {"optimizer.lr": (1e-3, 0.5), "mesh.tp": (2, 1)}
    assert changed_settings(before, before) == {}


def _check(config: RunConfig, path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    path.write_text(dump_config(config))
    code = main(["check", str(path), "--nproc", "1", *words])
    return code, *capsys.readouterr()


def test_check_finds_what_train_would_refuse(corpus, tmp_path, capsys):
    folder = tmp_path / "run"
    low = {"optimizer": {"min_lr": 1e-3}}
    _train(_config(corpus, folder, steps=1, **low))
    wrong = _config(corpus, folder, steps=3, run={"folder": str(folder), "seed": 5}, mesh={"tp": 1}, **low)
    wrong = replace(wrong, model=replace(wrong.model, head_dim=4), optimizer=replace(wrong.optimizer, warmup_steps=4))
    code, out, err = _check(wrong, tmp_path / "run.toml", capsys)
    assert (code, out) == (2, "")
    assert "in a different order\n" in err and "found: run.seed=5\n" in err
    assert "a different model\n" in err and "found: head_dim 4\n" in err and "expected: head_dim 8\n" in err
    assert "optimizer.warmup_steps=4 is more than train.steps=3" in err
    with pytest.raises(UsageError, match=r"^continuing step-1 has 2 problems:\n  - .*different model\n    ") as raised:
        find_start(wrong, open_data(wrong))
    assert str(raised.value).count("\n  - ") == 2


def test_another_length_in_megatrons_order_is_told_by_its_settings(corpus, tmp_path):
    """The order depends on the number of samples, which no setting holds; a longer run can begin with the state."""
    megatron: dict[str, Any] = {
        "data": {"order": "megatron", "cache": str(tmp_path / "cache")},
        "optimizer": {"min_lr": 1e-3},
    }
    _train(_config(corpus, tmp_path / "run", steps=2, **megatron))
    longer = _config(corpus, tmp_path / "run", steps=400, **megatron)  # another epoch
    with pytest.raises(UsageError) as caught:
        find_start(longer, open_data(longer))
    assert str(caught.value).splitlines()[1:] == [
        "  found: train.steps=400 x train.global_batch=2 (800 samples)",
        "  expected: train.steps=2 x train.global_batch=2 (4 samples)",
        "  try: this length changes the epochs of Megatron's order, and with them its samples: restore train.steps, or "
        "train on in another run.folder, from the first sample, with checkpoint.init_from, init_optimizer and "
        "init_schedule; data.order_samples=N, set when a run begins, lets it grow to N samples",
    ]
    first = {"init_from": str(tmp_path / "run"), "init_optimizer": True, "init_schedule": True}
    other = _config(corpus, tmp_path / "other", steps=1, checkpoint=first, **megatron)
    start = find_start(other, open_data(other))
    assert (start.done.steps, start.done.schedule_steps, start.done.moment_steps) == (0, 2, 2)


@pytest.mark.parametrize("built_for", [None, 800])
def test_a_run_in_megatrons_order_grows_where_its_samples_stay(corpus, tmp_path, built_for):
    """Within an epoch by itself, with a new data id; to any length that the order was built for."""
    data = {"order": "megatron", "cache": str(tmp_path / "cache")} | ({"order_samples": built_for} if built_for else {})
    settings: dict[str, Any] = {"data": data, "optimizer": {"min_lr": 1e-3, "decay_steps": 4}}
    _train(_config(corpus, tmp_path / "whole", steps=4, **settings))
    short = _config(corpus, tmp_path / "run", steps=2, **settings)
    _train(short)
    longer = _config(corpus, tmp_path / "run", steps=4, **settings)
    told = [line for line in _train(longer) if "new data id" in line]
    text = "train.steps=4 builds Megatron's order for 8 samples in place of 4: a new data id, "
    assert (built_for is None) == bool(told) and all(text in line and "with the same samples" in line for line in told)
    curves = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(tmp_path / name)]
        for name in ("run", "whole")
    ]
    assert curves[0] == curves[1]
    if built_for:
        endless = replace(longer, train=replace(longer.train, steps=9999))
        (problem,) = check(endless, 1, facts=open_data(longer).facts)
        assert "in a new run at least data.order_samples=19998" in problem
        native = replace(longer, data=replace(longer.data, order="native", cache=None))
        assert any(
            'data.order_samples=800 applies only to data.order="megatron"' in x for x in check(native, 1, facts=None)
        )


def test_another_table_of_batches_in_megatrons_order_is_told(corpus, tmp_path):
    megatron: dict[str, Any] = {"data": {"order": "megatron", "cache": str(tmp_path / "cache")}}
    _train(_config(corpus, tmp_path / "run", steps=2, **megatron))
    other = _config(corpus, tmp_path / "run", steps=300, train={"batch_schedule": "0:6 32:2"}, **megatron)
    with pytest.raises(
        UsageError, match=r"found: train\.steps=300 with train\.batch_schedule='0:6 32:2' \(1800 samples\)\n"
    ):
        find_start(other, open_data(other))


@pytest.mark.parametrize("order", ["native", "megatron"])
def test_a_length_that_is_given_twice_or_not_at_all_is_told_beside_a_checkpoint(corpus, tmp_path, capsys, order):
    data: dict[str, Any] = {"data": {"order": order, "cache": str(tmp_path / "cache")}}
    run = _config(corpus, tmp_path / "run", steps=2, **data)
    _train(run)
    told = {
        "are set; a run has one length": replace(run.train, steps=3, samples=100),
        "the run has no length": replace(run.train, steps=None),
    }
    for text, length in told.items():
        code, _, err = _check(replace(run, train=length), tmp_path / "run.toml", capsys)
        assert code == 2 and text in err and "in a different order" not in err, err
        other = replace(run, run=replace(run.run, folder=str(tmp_path / "other")), train=length)
        first = {"init_from": str(tmp_path / "run"), "init_optimizer": True, "init_schedule": True}
        code, _, err = _check(replace(other, checkpoint=replace(run.checkpoint, **first)), tmp_path / "2.toml", capsys)
        assert code == 2 and text in err, err


def test_other_data_is_told_by_its_settings(tmp_path):
    """The corpus by its path, and with its id where only its content is another."""
    paths = []
    for number, name in enumerate(("ours", "theirs")):
        (tmp_path / name).mkdir()
        texts = write_jsonl(tmp_path / f"{name}.jsonl", number)
        paths.append(make_corpora(tmp_path / name, {"text": texts})["text"])
    ours, theirs = paths
    config = _config(ours, tmp_path / "run", steps=1)
    _train(config)
    other = _config(theirs, tmp_path / "run", steps=1, data={"split": "90,10", "kind": "packed"})
    with pytest.raises(UsageError) as caught:
        find_start(other, open_data(other))
    found, expected = str(caught.value).splitlines()[1:3]
    assert f"data.blend='{theirs}' (blend " in found and f"data.blend='{ours}' (blend " in expected
    assert "data.kind='packed', data.split='90,10'" in found and "data.kind='gpt', data.split='100,0,0'" in expected
    blends = [open_data(replace(config, data=replace(config.data, blend=str(path)))).train.blend_id for path in paths]
    shutil.rmtree(ours.parent)
    theirs.parent.rename(ours.parent)
    with pytest.raises(UsageError) as caught:
        find_start(config, open_data(config))
    wrong, right = (f": data.blend='{ours}' (blend {blend})" for blend in reversed(blends))
    assert str(caught.value).splitlines()[1:3] == [f"  found{wrong}", f"  expected{right}"]


def test_what_decides_a_model_is_named_by_its_keys():
    names = {f"model.{name}" for name in function_keys(gpt_shape(sound(), 1000))}
    assert names <= set(key_names()) and {"model.attention_sinks", "model.mla.kv_lora_rank"} <= names


def test_a_conflict_with_a_checkpoint_that_latest_does_not_name_says_how_to_choose(corpus, tmp_path):
    """Somebody's step-20 of another model lies beside ours, and `latest` is lost."""
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    config = _config(corpus, folder, steps=1)
    _train(config)
    _train(_config(corpus, theirs, steps=20, model={"hidden_size": 32}))
    shutil.copytree(theirs / "checkpoints" / "step-20", folder / "checkpoints" / "step-20")
    assert find_start(config, open_data(config)).done.steps == 1
    (folder / "checkpoints" / "latest").unlink()
    with pytest.raises(UsageError) as caught:
        find_start(config, open_data(config))
    text = str(caught.value)
    assert "step-20 was trained with a different model\n" in text
    assert text.endswith(
        "latest is missing; using the newest intact checkpoint, step-20\n"
        f"      try: write the name of another checkpoint into {folder}/checkpoints/latest"
    )


def test_check_tells_where_a_run_goes_on_and_what_changes(corpus, tmp_path, capsys):
    folder, path = tmp_path / "run", tmp_path / "run.toml"
    low = {"optimizer": {"min_lr": 1e-3}}
    _train(_config(corpus, folder, steps=1, **low))
    code, out, err = _check(_config(corpus, folder, steps=3, optimizer={"lr": 0.5, "min_lr": 1e-3}), path, capsys)
    assert (code, err) == (0, "")
    newest = latest_checkpoint(folder / "checkpoints")
    assert out.splitlines() == [
        f"{path}: no problems with --nproc 1",
        f"continues from {newest}; 1 of 3 steps are done",
        "changed since step-1: train.steps 1 -> 3, optimizer.lr 0.01 -> 0.5",
        "the learning rate reaches optimizer.min_lr=0.001 at step 1, as planned when the run began; "
        "set optimizer.decay_steps=3 to let it decay until step 3",
    ]
    code, out, _ = _check(_config(corpus, folder, steps=3, **low), path, capsys, "--json")
    facts = json.loads(out)
    assert (code, facts["checkpoint"], facts["step"]) == (0, str(newest), 1)
    assert facts["changed"] == {"train.steps": {"before": 1, "now": 3}} and len(facts["notes"]) == 2
    _, out, _ = _check(_config(corpus, folder, steps=1, **low), path, capsys)
    assert out.splitlines()[1] == f"nothing is left to do: {newest} is at step 1 of train.steps=1"
    code, out, _ = _check(_config(corpus, tmp_path / "new", steps=1), path, capsys, "--json")
    facts = json.loads(out)
    assert (code, facts["checkpoint"], facts["step"], facts["changed"]) == (0, None, 0, {})
