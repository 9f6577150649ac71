"""A mixture that changes in the middle of a real training: what was read is what the arithmetic says.

The run is stopped, goes on with a changed blend, and is resumed once more; every batch that reached the model is noted.
Random runs that are stopped change their layout as well, those of other tasks only this; MDATA_SOAK multiplies their
number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mdata
from mdata.blend_planning.change import BlendEdits, change_blend
from mdata.blend_planning.make_blend import save_blend
from mdata.sources.labelled import LABELS
from mdata.tracing.run_folder import trace_run
from tests.helpers.examples import SOAK, soaked
from tests.helpers.labelled import make_labelled
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_chat, make_corpora, make_pairs, write_jsonl
from tests.trainer.models import test_random_models
from trainer.config.parse import parse_config
from trainer.config.sections import DataSection, PrecisionSection, RunConfig, RunSection
from trainer.parallel.mesh import Mesh, mesh_of
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.run.data import open_data
from trainer.run.metrics import read_metrics
from trainer.run.train import train

LENGTH = 16


@dataclass(frozen=True)
class Corpora:
    """Manifests by name."""

    folder: Path
    made: dict[str, Path]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Corpora:
    folder = tmp_path_factory.mktemp("corpora")
    texts = {name: write_jsonl(folder / f"{name}.jsonl", seed) for seed, name in enumerate(["a", "b", "c", "held"])}
    return Corpora(folder, make_corpora(folder, texts))


def config_of(folder: Path, blend: Path, *, steps: int, batch: int = 20) -> RunConfig:
    tables = {
        "run": {"folder": str(folder), "seed": 7},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
        "data": {"blend": str(blend)},
        "train": {"sequence_length": LENGTH, "global_batch": batch, "micro_batch": batch, "steps": steps},
        "optimizer": {"lr": 1e-3, "decay_steps": 100},
        "checkpoint": {"interval": 5},
    }
    config, problems = parse_config(tables)
    assert config is not None, problems
    return config


def run(config: RunConfig):
    return train(config, join_world(Mesh(1), placement=Placement()))


@pytest.fixture
def reads(monkeypatch):
    """sample number -> its tokens and labels, of every batch that goes to the model in training."""
    import trainer.run.engine as module
    from trainer.run.after_step import AfterStep

    seen: dict[int, list[int]] = {}
    real = module.to_device

    def noted(batch, *arguments, **options):
        for sample, row in zip(batch.samples.tolist(), batch.rows.text.tolist(), strict=True):
            assert sample not in seen or seen[sample] == row
            seen[sample] = row
        return real(batch, *arguments, **options)

    monkeypatch.setattr(module, "to_device", noted)
    monkeypatch.setattr(AfterStep, "_evaluate", lambda self, step: {"valid": {"none": 0.0}})
    return seen


def test_a_mixture_that_changes_in_mid_run(corpora, tmp_path, reads):
    """1,200 samples: a and b as 7 : 3; from sample 500 on a as before, b out, c in."""
    made, rng = corpora.made, np.random.default_rng(3)
    old = mdata.make_blend(["0.7", str(made["a"]), "0.3", str(made["b"])], corpora.folder / "old.json")
    edits = BlendEdits(remove=["b"], add=[("0.3", str(made["c"]))])
    new = change_blend(old, 500, folder=corpora.folder, sequence_length=LENGTH, edits=edits)
    save_blend(new, corpora.folder / "new.json")

    run(config_of(tmp_path / "run", corpora.folder / "old.json", steps=4, batch=100))  # before the change
    run(config_of(tmp_path / "run", corpora.folder / "new.json", steps=8, batch=100))
    run(config_of(tmp_path / "run", corpora.folder / "new.json", steps=12, batch=100))
    assert sorted(reads) == list(range(1200))
    assert read_metrics(tmp_path / "run")[-1]["consumed_samples"] == 1200

    # Arithmetic: two plain trees, the second one's numbers behind the first one's counts.
    first, second = mdata.open_blend(corpora.folder / "old.json").selection([1, 1], LENGTH), {"a": 0.7, "c": 0.3}
    before = dict(zip("ab", first.counts(500), strict=True))
    assert before == {"a": 350, "b": 150}
    datasets = {name: mdata.open_dataset(made[name], sequence_length=LENGTH, seed=7) for name in "abc"}
    found = {name: [] for name in "abc"}
    mixed = mdata.open_dataset(corpora.folder / "new.json", sequence_length=LENGTH, seed=7)
    for sample in rng.permutation(1200)[:1000].tolist():
        (component,), (inside,) = mixed.locate([sample])
        name = mixed.components[component].name
        expected = datasets[name][int(inside)]
        assert reads[sample][:-1] == expected["tokens"].tolist()
        assert reads[sample][1:] == expected["labels"].tolist()
        found[name].append((sample, int(inside)))
    for name, places in found.items():
        assert [inside for _, inside in sorted(places)] == sorted(inside for _, inside in places), name
    counts = dict(zip((c.name for c in mixed.components), mixed.selection.counts(1200), strict=True))
    assert counts == {"a": 350 + 490, "b": 150, "c": 210}
    for name, share in second.items():
        for k in range(500, 1200, 7):
            given = dict(zip((c.name for c in mixed.components), mixed.selection.counts(k), strict=True))[name]
            assert abs(given - before.get(name, 0) - share * (k - 500)) < 1.68


def test_counts_trace_and_source_texts_agree_on_a_thousand_samples(corpora, tmp_path, reads):
    """1,200 samples: a, b, held as 5 : 3 : 2; from sample 700 on c in the place of b, the others as before."""
    made, folder = corpora.made, tmp_path / "run"
    words = ["0.5", str(made["a"]), "0.3", str(made["b"]), "0.2", str(made["held"])]
    old = mdata.make_blend(words, corpora.folder / "first.json")
    edits = BlendEdits(remove=["b"], add=[("0.3", str(made["c"]))])
    changed = change_blend(old, 700, folder=corpora.folder, sequence_length=LENGTH, edits=edits)
    save_blend(changed, corpora.folder / "second.json")
    run(config_of(folder, corpora.folder / "first.json", steps=5, batch=100))
    run(config_of(folder, corpora.folder / "second.json", steps=12, batch=100))
    assert sorted(reads) == list(range(1200))

    tracer = trace_run(folder)
    assert sorted(n for step in range(1, 13) for n in tracer.step(step).tolist()) == list(range(1200))
    expected = {"a": 350 + 250, "b": 210, "held": 140 + 100, "c": 150}
    assert tracer.counts(np.arange(1200)) == expected
    assert tracer.counts(np.arange(700)) == {"a": 350, "b": 210, "held": 140}

    tokenizer = mdata.open_corpus(made["a"]).load_tokenizer()  # that of all of them
    ids_of: dict[tuple[str, int], list[int]] = {}
    order: dict[str, list[int]] = {name: [] for name in expected}
    for sample in sorted(np.random.default_rng(5).permutation(1200)[:1000].tolist()):
        traced = tracer.sample(sample)
        order[traced.name].append(traced.inside)
        told = []
        for part in traced.parts:
            assert part.origin is not None and Path(part.origin.path).name == f"{traced.name}.jsonl"
            if part.origin not in ids_of:
                line = Path(part.origin.path).read_text().splitlines()[part.origin.row - 1]
                ids, _ = tokenizer.encode_batch([json.loads(line)["text"]])
                ids_of[part.origin] = [*ids.tolist(), tracer.dataset.eod]
            told += ids_of[part.origin][part.in_document : part.in_document + part.count]
        assert told == reads[sample], sample  # the source text, tokenized anew, is what the model was given
    for name, inside in order.items():
        assert inside == sorted(set(inside)) and inside[-1] < expected[name]

    # Whose share did not change reads on in the order of a run whose mixture never changed.
    never = mdata.open_dataset(corpora.folder / "first.json", sequence_length=LENGTH, seed=7)
    for name in ("a", "held"):
        now = [reads[k] for k in range(1200) if tracer.sample(k).name == name]
        number = [component.name for component in never.components].index(name)
        then = never.read(np.flatnonzero(never.locate(np.arange(1200))[0] == number)).text.tolist()
        assert now == then and len(now) == expected[name]


def test_a_change_of_what_was_read_already_is_refused_with_both_numbers(corpora, tmp_path):
    made = corpora.made
    old = mdata.make_blend(["7", str(made["a"]), "3", str(made["b"])], corpora.folder / "old.json")
    run(config_of(tmp_path / "run", corpora.folder / "old.json", steps=5))
    for at, refused in ((99, True), (100, False)):
        new = change_blend(old, at, folder=corpora.folder, sequence_length=LENGTH, edits=BlendEdits(remove=["b"]))
        save_blend(new, corpora.folder / "late.json")
        config = config_of(tmp_path / "run", corpora.folder / "late.json", steps=6)
        if refused:
            with pytest.raises(mdata.UsageError, match=r"at sample 99; the run has read 100 samples\n.*100 or later"):
                run(config)
        else:
            assert run(config).step == 6
    stranger = mdata.make_blend(["1", str(made["a"])], corpora.folder / "stranger.json")
    assert stranger.continues is None
    with pytest.raises(mdata.UsageError, match=r"in a different order\n +found: data.blend=.* \(blend "):
        run(config_of(tmp_path / "run", corpora.folder / "old.json", steps=7))


def test_two_changes_within_a_step_are_one_resume(corpora, tmp_path, reads):
    blend = mdata.make_blend(["7", str(corpora.made["a"]), "3", str(corpora.made["b"])], corpora.folder / "zero.json")
    run(config_of(tmp_path / "run", corpora.folder / "zero.json", steps=5))
    # 100 samples were read; the sixth step reads from three mixtures.
    for name, at, share in (("one", 107, "0.5"), ("two", 113, "0.1")):
        edits = BlendEdits(shares={"b": share})
        blend = change_blend(blend, at, folder=corpora.folder, sequence_length=LENGTH, edits=edits)
        save_blend(blend, corpora.folder / f"{name}.json")
    assert run(config_of(tmp_path / "run", corpora.folder / "two.json", steps=8)).step == 8
    assert sorted(reads) == list(range(160))
    named = {
        name: mdata.open_dataset(corpora.folder / f"{name}.json", sequence_length=LENGTH, seed=7)
        for name in ("zero", "one", "two")
    }
    for sample, row in reads.items():
        name = "zero" if sample < 107 else "one" if sample < 113 else "two"
        assert row[:-1] == named[name][sample]["tokens"].tolist(), sample
    with pytest.raises(mdata.UsageError, match=r"it continues blend [0-9a-f]{16} at sample 107: train with that one"):
        run(config_of(tmp_path / "run", corpora.folder / "one.json", steps=9))


def test_two_changes_are_refused_if_the_first_changes_what_was_read(corpora, tmp_path):
    blend = mdata.make_blend(["7", str(corpora.made["a"]), "3", str(corpora.made["b"])], corpora.folder / "zero.json")
    run(config_of(tmp_path / "run", corpora.folder / "zero.json", steps=5))
    for name, at in (("one", 99), ("two", 140)):
        edits = BlendEdits(shares={"b": f"0.{at}"})
        blend = change_blend(blend, at, folder=corpora.folder, sequence_length=LENGTH, edits=edits)
        save_blend(blend, corpora.folder / f"{name}.json")
    with pytest.raises(mdata.UsageError, match=r"at sample 99; the run has read 100 samples"):
        run(config_of(tmp_path / "run", corpora.folder / "two.json", steps=6))


def test_a_training_to_the_very_end_of_a_blend_and_no_further(corpora, tmp_path):
    spec = {
        "component": [{"path": str(corpora.made["a"]), "samples": 60}, {"path": str(corpora.made["b"]), "samples": 40}]
    }
    mdata.make_blend(spec, corpora.folder / "ends.json")
    assert run(config_of(tmp_path / "run", corpora.folder / "ends.json", steps=5)).step == 5
    config = config_of(tmp_path / "run", corpora.folder / "ends.json", steps=6)
    with pytest.raises(mdata.UsageError, match=r"reads 120 samples, and .*ends\.json ends after 100; choose at most 5"):
        make_plan(config, 1, facts=open_data(config).facts)


def test_test_sets_are_read_once_when_the_last_step_is_done(corpora, tmp_path):
    made = corpora.made
    sets = {"valid": {"code": str(made["c"])}, "test": {"kept": str(made["held"]), "other": str(made["b"])}}
    mdata.make_blend({"component": [{"path": str(made["a"])}], **sets}, corpora.folder / "tested.json")
    config = config_of(tmp_path / "run", corpora.folder / "tested.json", steps=4)
    config = replace(config, train=replace(config.train, eval_interval=2))
    result = run(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "valid" in line] == [2, 4]
    assert [(line["step"], line["test"]) for line in lines if "test" in line] == [(4, result.test)]
    assert list(result.test) == ["kept", "other"]
    again = replace(config, run=replace(config.run, folder=str(tmp_path / "again")))
    as_valid = replace(
        again, data=replace(again.data, valid=(str(made["held"]), str(made["b"])), test=(str(made["c"]),))
    )
    other = run(as_valid)
    assert list(other.valid.values()) == list(result.test.values())
    assert list(other.test.values()) == list(result.valid.values())


def _random_run(chance: random.Random, folder: Path, blend: Path, *, steps: int) -> RunConfig:
    """A random model on one rank in fp64."""
    base = config_of(folder, blend, steps=steps, batch=8)
    while True:
        drawn, _, documents = test_random_models._drawn(chance)
        kind = chance.choice(("gpt", "gpt", "document", "packed"))
        config = replace(
            test_random_models._alone(drawn),
            run=replace(base.run, log_params_norm=True),
            model=replace(drawn.model, vocab_size=None),
            data=replace(base.data, kind=kind, document_masks=documents),
            train=replace(base.train, micro_batch=1),
            optimizer=replace(drawn.optimizer, lr=1e-2, decay_steps=100),
            precision=PrecisionSection(dtype="fp64"),
        )
        if not check(config, 1, facts=None):
            return config


def _laid_out(chance: random.Random, config: RunConfig) -> tuple[RunConfig, int]:
    """(the same run in a drawn layout, its ranks)."""
    while True:
        drawn, ranks, _ = test_random_models._drawn(chance)
        train = replace(config.train, micro_batch=drawn.train.micro_batch)
        optimizer = replace(config.optimizer, sharding=drawn.optimizer.sharding)
        laid_out = replace(config, mesh=drawn.mesh, recompute=drawn.recompute, optimizer=optimizer, train=train)
        if not check(laid_out, ranks, facts=None):
            return laid_out, ranks


def _trained(context: Any, config: RunConfig) -> int:
    return train(config, context.join(mesh_of(config, context.world))).step


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(SOAK))
def test_a_random_run_that_stops_and_changes_is_one_that_never_stopped(corpora, tmp_path, seed):
    """After each stop another layout, and often another mixture."""
    chance, made, steps = random.Random(seed), corpora.made, 5
    blend = corpora.folder / f"random-{seed}.json"
    mdata.make_blend(["0.5", str(made["a"]), "0.3", str(made["b"])], blend)
    config = _random_run(chance, tmp_path / "stopped", blend, steps=steps)
    changes = [BlendEdits(shares={"b": "0.7"}), BlendEdits(remove=["a"], add=[("0.4", str(made["c"]))])]
    chance.shuffle(changes)
    print(config)  # shown where it fails
    for stop in (*sorted(chance.sample(range(1, steps), 2)), steps):
        part, ranks = _laid_out(chance, replace(config, data=replace(config.data, blend=str(blend))))
        print(stop, ranks, part.mesh, part.optimizer.sharding, part.recompute, part.train.micro_batch)
        assert run_ranks(_trained, ranks, replace(part, train=replace(part.train, steps=stop))) == [stop] * ranks
        if stop < steps and changes and chance.random() < 0.7:
            at = 8 * stop + chance.choice((0, 3))
            for number in range(chance.randint(1, len(changes))):  # two may lie within the next step
                changed = change_blend(
                    mdata.open_blend(blend),
                    at + 2 * number,
                    folder=corpora.folder,
                    sequence_length=LENGTH,
                    edits=changes.pop(),
                )
                blend = corpora.folder / f"random-{seed}-{stop}-{number}.json"
                save_blend(changed, blend)
    whole = replace(config, run=replace(config.run, folder=str(tmp_path / "whole")))
    run_ranks(_trained, 1, replace(whole, data=replace(config.data, blend=str(blend))))
    for found, expected in zip(*(read_metrics(tmp_path / name) for name in ("stopped", "whole")), strict=True):
        for key in ("step", "consumed_samples", "lr", "loss", "grad_norm", "params_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-8), f"{key} of step {expected['step']}"


LENGTHS: Mapping[Any, int] = {"chat": 96, "pairs": 160, "classify": 24}


def _task(chance: random.Random, kind: Any, *, made: Mapping[str, Path], folder: Path) -> RunConfig:
    """A run of a random model on one rank in fp64, evaluated after every second step."""
    pick = chance.choice
    while True:
        drawn, *_ = test_random_models._drawn(chance)
        model, data = drawn.model, DataSection(blend=str(made[kind]), kind=kind, split="80,20")
        if kind == "classify":
            model, _ = test_random_models._bert(chance)
            bert = replace(model.bert, task="classify", labels=LABELS["mnli"])
            model, data = replace(model, bert=bert), replace(data, split="100,0,0", valid=(str(made["dev"]),))
        alone = test_random_models._alone(drawn)
        sizes = {"global_batch": 8, "steps": 5, "eval_interval": 2, "eval_samples": pick((0, 3))}
        config = replace(
            alone,
            run=RunSection(folder=str(folder / "whole"), seed=7, log_params_norm=True, health="off"),
            model=replace(model, vocab_size=None, init_std=0.1),
            data=replace(data, cache=None if kind == "classify" else str(folder / "cache")),
            train=replace(alone.train, sequence_length=LENGTHS[kind], batch_ramp=pick((None, "4 4 12")), **sizes),
            optimizer=replace(alone.optimizer, lr=1e-2, **test_random_models._options(chance, alone.optimizer.name)),
            precision=PrecisionSection(dtype="fp64"),
        )
        if not check(config, 1, facts=None):
            return config


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tasks")
    made = make_labelled(folder, {"train": 60, "dev": 13})
    return {"chat": make_chat(folder), "pairs": make_pairs(folder), "classify": made["train"], "dev": made["dev"]}


@pytest.mark.scaled
@pytest.mark.parametrize("kind", soaked(LENGTHS, but=["pairs", "classify"]))
@pytest.mark.parametrize("seed", range(SOAK))
def test_a_random_task_that_changes_its_layout_is_that_of_one_rank(tasks, tmp_path, seed, kind):
    """Its batches may grow, and the first log probabilities of pairs are computed in another layout than used."""
    chance = random.Random(f"{seed}{kind}")
    config = _task(chance, kind, made=tasks, folder=tmp_path)
    print(config)  # shown where it fails
    run_ranks(_trained, 1, config)
    stopped = replace(config, run=replace(config.run, folder=str(tmp_path / "stopped")))
    for stop in (chance.randrange(1, 5), 5):
        part, ranks = _laid_out(chance, stopped)
        print(stop, ranks, part.mesh, part.optimizer.sharding, part.recompute, part.train.micro_batch)
        ends = replace(part, train=replace(part.train, exit_interval=stop))
        assert run_ranks(_trained, ranks, ends) == [stop] * ranks
    for found, expected in zip(*(read_metrics(tmp_path / name) for name in ("stopped", "whole")), strict=True):
        for key in ("step", "consumed_samples", "lr", "weight_decay", "loss", "grad_norm", "params_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-7), f"{key} of step {expected['step']}"
        for key in ("named_losses", "valid", "accuracy"):
            numbers = expected.get(key, {})
            if abs(numbers.get("reward_margin", 1.0)) < 1e-9:  # of a model that is the reference but for rounding
                numbers = {**numbers, "reward_accuracy": found[key]["reward_accuracy"]}
            assert found.get(key, {}) == pytest.approx(numbers, rel=1e-7, abs=1e-11), f"{key} of {expected['step']}"


def test_named_validation_sets_of_the_manifest(corpora, tmp_path):
    made = corpora.made
    spec = {"component": [{"path": str(made["a"])}], "valid": {"kept": str(made["held"]), "code": str(made["c"])}}
    mdata.make_blend(spec, corpora.folder / "named.json")
    config = config_of(tmp_path / "run", corpora.folder / "named.json", steps=5)
    assert list(run(config).valid) == ["kept", "code"]
    given = replace(config, data=replace(config.data, valid=(str(made["b"]),)))
    assert list(open_data(given).valid) == ["b"]
    made["c"].rename(corpora.folder / "elsewhere.json")
    made["b"].rename(made["c"])
    with pytest.raises(mdata.DamageError, match=r"validation set code is not the one that was named"):
        open_data(config)
