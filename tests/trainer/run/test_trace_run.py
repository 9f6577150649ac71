"""Toy runs traced at every step against what their ranks really read; and run folders that cannot be traced."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import mdata
import trainer.run.after_step
import trainer.run.engine
import trainer.run.train
from cli.mdata import main
from mdata import DamageError, MdataError, UsageError
from mdata.blend_planning.change import BlendEdits, change_blend
from mdata.blend_planning.make_blend import save_blend
from mdata.dataset.dataset_options import OPTION_KEYS, DatasetOptions
from mdata.dataset.run_paths import StartedIn, data_path
from mdata.tracing.legacy_run import _OTHER_DATA, _TRAIN, legacy_record
from mdata.tracing.run_record import RECORD, RunRecord, read_record, samples_until
from mdata.tracing.run_steps import Steps
from mdata.util import atomic_io
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_mix
from trainer.checkpoint.folder import read_index
from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.parallel.mesh import Mesh, mesh_of
from trainer.report.data import read_corpora, read_run
from trainer.run.after_step import AfterStep

LENGTH = 16


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    make_mix(folder, ["web", "code"])
    return folder


def config_of(made: Path, folder: Path, *, data: dict[str, object] | None = None, **train: object) -> RunConfig:
    sizes = {"sequence_length": LENGTH, "global_batch": 8, "micro_batch": 2, "steps": 4, **train}
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        model=ModelSection(num_layers=1, hidden_size=16, num_heads=2),
        data=DataSection(**{"blend": str(made / "mix.json"), **(data or {})}),
        train=TrainSection(**sizes),
        optimizer=OptimizerSection(lr=1e-3, min_lr=1e-4),
        checkpoint=CheckpointSection(),
    )


def trained(context, config):
    """Train; the samples and tokens of every microbatch of this rank, in order."""
    seen, real = [], trainer.run.engine.to_device

    def noted(batch, *more, **options):
        seen.append((batch.samples.tolist(), batch.rows.text.tolist()))
        return real(batch, *more, **options)

    trainer.run.engine.to_device = noted
    evaluate, AfterStep._evaluate = AfterStep._evaluate, lambda self, step: {}
    try:
        trainer.run.train.train(config, context.join(mesh_of(config, context.world)))
    finally:
        trainer.run.engine.to_device, AfterStep._evaluate = real, evaluate
    return seen


def trained_in(context, folder, config):
    before = Path.cwd()
    os.chdir(folder)
    try:
        return trained(context, config)
    finally:
        os.chdir(before)


def as_before_data_json(folder: Path) -> Path:
    """Make it a run folder as mdata 0.1.0 wrote it."""
    record = json.loads((folder / RECORD).read_text())
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"started_in": record["started_in"]}))
    for path in (folder / RECORD, *folder.glob(f"checkpoints/*/{RECORD}")):
        path.unlink()
    return folder


def check_agrees(folder: Path) -> RunRecord:
    """data.json says what config.toml and the other files say."""
    record, legacy = read_record(folder), legacy_record(folder)
    assert record is not None
    given, before = (DatasetOptions.from_keys(one.options) for one in (record, legacy))
    assert given == before and record.identity == legacy.identity
    assert (record.num_steps, record.now.blend, record.now.data_id) == (
        legacy.num_steps, legacy.now.blend, legacy.now.data_id,
    )  # fmt: skip
    for sets in ("valid", "test"):
        assert msgspec.structs.replace(getattr(record, sets), data_ids=None) == getattr(legacy, sets)
    steps = [Steps([span.steps for span in one.spans], seed=0, total=one.num_steps) for one in (record, legacy)]
    for step in range(1, record.num_steps + 1):
        of_record, of_legacy = ((one.bounds(step), one.batch_shape(step)) for one in steps)
        assert of_record == of_legacy, step
    for checkpoint in folder.glob("checkpoints/step-*"):
        state, saved = read_index(checkpoint).run, read_record(checkpoint)
        assert saved is not None and (state.data_id, state.data) == (saved.now.data_id, saved.identity)
        assert samples_until(saved.spans, state.step) == state.consumed_samples
    return record


def test_relative_paths_of_a_run_start_where_it_was_started(made, tmp_path, monkeypatch, capsys):
    """Traced and reported from elsewhere; moved with its data, or alone; an old folder from where it began."""
    tree, elsewhere = tmp_path / "a tree", tmp_path / "elsewhere"
    shutil.copytree(made, tree / "data")
    elsewhere.mkdir()
    monkeypatch.chdir(tree)
    data = {"blend": "data/mix.json", "valid": ("data/code_text_document.json",), "allow_overlap": True}
    config = config_of(made, Path("runs/x"), data=data)
    run_ranks(trained_in, 1, tree, config)
    expected = mdata.trace_run("runs/x").step(2).tolist()
    monkeypatch.chdir(elsewhere)
    run = "../a tree/runs/x"
    assert mdata.trace_run(run).step(2).tolist() == expected
    assert mdata.trace_run(run, validation="code").dataset.num_samples
    assert main(["trace", run, "--step", "2"]) == 0 and "web.jsonl" in capsys.readouterr().out
    assert "could not be opened" not in str(read_corpora(read_run(Path(run))).notes)
    (tree / "runs/x").rename(elsewhere / "alone")  # as it names the tree
    assert mdata.trace_run("alone").step(2).tolist() == expected
    (elsewhere / "alone").rename(tree / "runs/x")
    tree.rename(tmp_path / "moved")
    run = "../moved/runs/x"
    assert mdata.trace_run(run).step(2).tolist() == expected
    as_before_data_json(tmp_path / "moved/runs/x")
    assert mdata.trace_run(run).step(2).tolist() == expected
    plan = tmp_path / "moved/runs/x/plan.json"
    plan.write_text(
        json.dumps({name: value for name, value in json.loads(plan.read_text()).items() if name != "started_in"})
    )
    with pytest.raises(UsageError, match="run from the folder in which the run was started"):
        mdata.trace_run(run)
    monkeypatch.chdir(tmp_path / "moved")
    assert mdata.trace_run("runs/x").step(2).tolist() == expected


def test_a_run_that_continued_with_another_mesh_has_the_ranks_of_each_start(made, tmp_path):
    run = tmp_path / "run"
    run_ranks(trained, 1, config_of(made, run))
    config = as_before_data_json(run) / "config.toml"
    config.write_text(config.read_text().replace("tp = 1", "tp = 2"))
    mesh = {"mesh.tp": {"before": 1, "now": 2}}
    starts = [{"step": 0, "world_size": 2}, {"step": 2, "world_size": 2, "changed": mesh}]
    (run / "events.jsonl").write_text("".join(json.dumps({"event": "start", **start}) + "\n" for start in starts))
    tracer = mdata.trace_run(run)
    ranks = [{tracer.sample(number).place.dp_rank for number in tracer.step(step).tolist()} for step in (1, 2, 3, 4)]
    assert ranks == [{0, 1}, {0, 1}, {0}, {0}]
    (run / "events.jsonl").write_text(
        json.dumps({"event": "start", **starts[0], "world_size": 1})
        + "\n"
        + json.dumps({"event": "start", **starts[1]})
        + "\n"
    )
    assert mdata.trace_run(run).sample(0).place.dp_rank == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "{}/a"),
        ("0.7 a 1/3 b", "0.7 {}/a 1/3 {}/b"),
        ("a b", "{}/a {}/b"),
        ("*.json", "{}/*.json"),
        ("0.5 a 0.5 gone", "0.5 a 0.5 gone"),
        ("0.5 s3://bucket/x 0.5 a", "0.5 s3://bucket/x 0.5 {}/a"),
        ("s3://bucket/x", "s3://bucket/x"),
        ("mock", "mock"),
    ],
)
def test_every_form_of_a_data_path_is_placed(tmp_path, text, expected):
    for name in ("a.json", "b.idx", "mock"):
        (tmp_path / name).touch()
    found = data_path(text, tmp_path / "runs", StartedIn(absolute=str(tmp_path)))
    assert found == expected.format(*[tmp_path] * expected.count("{}"))


def check(tracer: mdata.Tracer, ranks: list[list[tuple[list[int], list[list[int]]]]], *, steps: range) -> None:
    """What the trace says of some steps is what the ranks read in them."""
    for rank, batches in enumerate(ranks):
        left = iter(batches)
        for step in steps:
            samples = tracer.step(step, dp_rank=rank).reshape(-1, 2)
            for number, expected in enumerate(samples.tolist()):
                found, texts = next(left)
                assert found == expected
                for sample, text in zip(found, texts, strict=True):
                    traced = tracer.sample(sample)
                    assert (traced.place.step, traced.place.dp_rank, traced.place.microbatch) == (step, rank, number)
                    ids = [id for part in traced.parts for id in tracer.tokens(traced.component, part).tolist()]
                    assert ids == text
        assert next(left, None) is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data": {"order": "megatron", "blend_surplus": 0.25}},
        {"data": {"shuffle_block": 4, "split": "80,0,20", "document_masks": True}},
        {"batch_ramp": "4 4 16", "global_batch": 12},
        {"batch_schedule": f"0:4 {8 * LENGTH}:8 {16 * LENGTH}:12", "global_batch": 12},
        {"steps": None, "samples": 35, "data": {"order": "megatron", "document_masks": True}},
        {"steps": None, "tokens": LENGTH * 39, "batch_ramp": "4 4 16", "global_batch": 12},
    ],
    ids=["native", "megatron", "blocks", "ramp", "table", "samples", "tokens"],
)
def test_every_step_is_traced_as_it_was_read(made, tmp_path, options):
    config = config_of(made, tmp_path / "run", **options)
    ranks = run_ranks(trained, 2, config)
    tracer = mdata.trace_run(tmp_path / "run")
    check(tracer, ranks, steps=range(1, 5))
    assert len(check_agrees(tmp_path / "run").spans) == 1
    with pytest.raises(UsageError, match="the run has no step 5\n  found: 4 steps\n"):
        tracer.step(5)
    with pytest.raises(UsageError, match="the run has no sample"):
        tracer.sample(tracer.num_samples)


def test_a_run_that_went_on_with_other_ranks_another_batch_and_another_mixture(made, tmp_path):
    """Each start has its own ranks and global batch; the blend that is named last knows what came before it."""
    shutil.copytree(made, tmp_path / "data")
    data = tmp_path / "data"
    config = config_of(data, tmp_path / "run", steps=3)
    first = run_ranks(trained, 2, config)
    larger = replace(config, train=replace(config.train, global_batch=12, steps=5))
    second = run_ranks(trained, 1, larger)
    old = mdata.open_blend(data / "mix.json")
    edits = BlendEdits(shares={"code": "0.9"})
    new = change_blend(old, 48, folder=data, sequence_length=LENGTH, edits=edits)
    save_blend(new, data / "new.json")
    changed = replace(larger, data=DataSection(blend=str(data / "new.json")), train=replace(larger.train, steps=8))
    third = run_ranks(trained, 3, changed)
    tracer = mdata.trace_run(tmp_path / "run")
    assert [(span.steps_before, span.samples_before, span.dp_size) for span in tracer.steps.spans] == [
        (0, 0, 2), (3, 24, 1), (5, 48, 3),
    ]  # fmt: skip
    names = ["mix.json", "mix.json", "new.json"]
    assert [Path(span.blend).name for span in check_agrees(tmp_path / "run").spans] == names
    check(tracer, first, steps=range(1, 4))
    check(tracer, second, steps=range(4, 6))
    check(tracer, third, steps=range(6, 9))
    assert tracer.counts(np.arange(48)) == dict(
        zip(("web", "code"), old.selection([9, 9], LENGTH).counts(48), strict=True)
    )
    assert tracer.counts(np.arange(48, 84))["code"] > tracer.counts(np.arange(36))["code"]


def evaluated(context, config):
    """Train; what this rank reads of each set after each step: (set, samples, texts) of every microbatch."""
    seen, evaluate, batches = [], trainer.run.after_step.evaluate_sets, trainer.run.evaluating.evaluation_batches

    def noted(dataset, samples, **options):
        for batch in batches(dataset, samples, **options):
            seen[-1].append((dataset.components[0].name, batch.samples.tolist(), batch.rows.text.tolist()))
            yield batch

    def each(engine, splits, **options):
        losses = {}
        for split, sets in splits.items():
            if sets:
                seen.append([])
            losses |= evaluate(engine, {split: sets}, **options)
        return losses

    trainer.run.after_step.evaluate_sets, trainer.run.evaluating.evaluation_batches = each, noted
    try:
        trainer.run.train.train(config, context.join(Mesh(context.world, 1)))
    finally:
        trainer.run.after_step.evaluate_sets, trainer.run.evaluating.evaluation_batches = evaluate, batches
    return seen


@pytest.mark.parametrize("order", ["native", "megatron"])
def test_every_evaluation_is_traced_as_it_was_read(made, tmp_path, capsys, order):
    """Validation after steps 2 and 4 and after the last; the test set after the last."""
    data = {
        "valid": (str(made / "web_text_document"), str(made / "code_text_document")),
        "allow_overlap": True,
        "split": "80,0,20",
        "order": order,
    }
    config = config_of(made, tmp_path / "run", data=data, steps=5, eval_interval=2, eval_samples=7)
    ranks = run_ranks(evaluated, 2, config)
    assert set(check_agrees(tmp_path / "run").valid.data_ids) == {"web", "code"}
    tracers = {name: mdata.trace_run(tmp_path / "run", validation=name) for name in ("web", "code")}
    test = mdata.trace_run(tmp_path / "run", test="test")
    read: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for rank, evaluations in enumerate(ranks):
        *validations, tested = evaluations
        for step, evaluation in zip((2, 4, 5), validations, strict=True):
            for name, tracer in tracers.items():
                mine = [
                    (k, text)
                    for set_, ks, texts in evaluation
                    if set_ == name
                    for k, text in zip(ks, texts, strict=True)
                ]
                assert tracer.step(step, dp_rank=rank).tolist() == [k for k, _ in mine]
                for number, (sample, text) in enumerate(mine):
                    traced = tracer.sample(sample)
                    assert [(p.step, p.dp_rank, p.microbatch) for p in (traced.place, *traced.again)] == [
                        (s, rank, number // 2) for s in (2, 4, 5)
                    ]
                    ids = [i for part in traced.parts for i in tracer.tokens(traced.component, part).tolist()]
                    assert ids == text[: len(ids)]
                    for part in traced.parts:
                        read.setdefault((name, part.document), set()).add((step, sample))
        assert [k for _, ks, _ in tested for k in ks] == test.step(5, dp_rank=rank).tolist()
    for name, tracer in tracers.items():
        for document in range(tracer.dataset.components[0].corpus.num_documents):
            told = [(one.place.step, one.sample) for one in tracer.readers(0, document)]
            assert sorted(told) == sorted(read.get((name, document), set()))
    with pytest.raises(
        UsageError, match=r"nothing is evaluated after step 3\n  expected: every 2 steps and after step 5"
    ):
        tracers["web"].step(3)
    with pytest.raises(UsageError, match=r"no validation set called wep\n  expected: web, code\n  try: web\?"):
        mdata.trace_run(tmp_path / "run", validation="wep")
    assert main(["trace", str(tmp_path / "run"), "--validation", "web", "--step", "2", "--rows", "1"]) == 0
    assert capsys.readouterr().out.startswith("evaluation after step 2: 7 samples\n")
    assert main(["trace", str(tmp_path / "run"), "--validation", "web", "--sample", "1"]) == 0
    assert capsys.readouterr().out.startswith("sample 1: sample 1 of web, ")
    assert main(["trace", str(tmp_path / "run"), "--validation", "web", "--test", "test", "--step", "2"]) == 2


def test_a_run_that_went_on_in_another_layout_and_without_its_folder(made, tmp_path):
    """The layout that reads the same rows is no new span; a checkpoint has the spans of the steps before it."""
    config = config_of(made, tmp_path / "run", steps=6)
    config = replace(config, checkpoint=CheckpointSection(folder=str(tmp_path / "kept"), keep=9))
    layouts = [(2, 1, 2), (4, 2, 4), (1, 1, 5), (2, 1, 6)]  # ranks, tp, last step
    for ranks, tp, end in layouts:
        if end == 5:
            shutil.rmtree(tmp_path / "run")
        mesh, until = replace(config.mesh, tp=tp), replace(config.train, exit_interval=end)
        run_ranks(trained, ranks, replace(config, mesh=mesh, train=until))
    record = read_record(tmp_path / "run")
    spans = [(span.steps_before, span.samples_before, span.data_ranks) for span in record.spans]
    assert spans == [(0, 0, 2), (4, 32, 1), (5, 40, 2)]
    assert read_record(tmp_path / "kept" / "step-4").spans == record.spans[:1]
    for folder in ("run", "kept/step-6"):
        tracer = mdata.trace_run(tmp_path / folder)
        ranks = [{tracer.sample(k).place.dp_rank for k in tracer.step(step).tolist()} for step in (1, 4, 5, 6)]
        assert ranks == [{0, 1}, {0, 1}, {0}, {0, 1}]
    (tmp_path / "kept" / "latest").write_text("step-2")
    run_ranks(trained, 2, replace(config, train=replace(config.train, exit_interval=3)))
    assert read_record(tmp_path / "run").spans == record.spans[:1], "it went back to an older checkpoint"


def test_a_record_that_could_not_be_written_leaves_the_older_one(made, tmp_path):
    """Every write, sync and rename of data.json fails once, as a run goes on with other data ranks."""
    config = config_of(made, tmp_path / "run")
    run_ranks(trained, 2, replace(config, train=replace(config.train, exit_interval=2)))
    before = (tmp_path / "run" / RECORD).read_bytes()
    for name in ("write", "sync", "rename"):
        run_ranks(_failing, 1, config, name)
        assert (tmp_path / "run" / RECORD).read_bytes() == before
        mdata.trace_run(tmp_path / "run").step(1)
    run_ranks(trained, 1, config)
    assert [span.data_ranks for span in check_agrees(tmp_path / "run").spans] == [2, 1]


def _failing(context, config, name):
    """Train, while a call that writes data.json fails."""
    real = getattr(atomic_io, name)

    def call(*arguments):
        where = arguments[0] if isinstance(arguments[0], Path) else Path(f"/proc/self/fd/{arguments[0]}").readlink()
        if RECORD in where.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    setattr(atomic_io, name, call)
    try:
        with pytest.raises((OSError, MdataError), match="No space left"):
            trained(context, config)
    finally:
        setattr(atomic_io, name, real)


@pytest.fixture(scope="module")
def run(made, tmp_path_factory) -> Path:
    """A finished run of one rank."""
    folder = tmp_path_factory.mktemp("run") / "run"
    run_ranks(trained, 1, config_of(made, folder))
    return folder


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copied"))


@pytest.fixture
def legacy(copied) -> Path:
    return as_before_data_json(copied)


def test_the_command_on_a_run_folder(run, capsys):
    assert main(["trace", str(run), "--step", "4", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 4: samples 24 to 31\ncomponent  samples  share\n") and out.endswith(
        "and 6 more (--rows)\n"
    )
    assert main(["trace", str(run), "--component", "web", "--document", "3", "--json"]) == 0
    readers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tracer = mdata.trace_run(run)
    traced = [tracer.sample(k) for k in range(32)]
    expected = [t.sample for t in traced if t.name == "web" and any(part.document == 3 for part in t.parts)]
    assert [one["sample"] for one in readers] == expected and all(one["step"] <= 4 for one in readers)
    assert main(["trace", str(run), "--seed", "3", "--step", "1"]) == 2
    assert "is a run folder, which already records how its data is read\n  found: --seed" in capsys.readouterr().err


def test_a_configuration_with_keys_of_another_version_is_traced(copied):
    """The record says everything; no key of the trainer decides what a trace says."""
    expected = mdata.trace_run(copied).step(2).tolist()
    text = (copied / "config.toml").read_text()
    added = text.replace("[data]", "[data]\nreorder = true").replace("[train]", "[train]\npace = 3")
    assert added.count("reorder") == added.count("pace") == 1
    for content in (added, "not [toml"):
        (copied / "config.toml").write_text(content)
        assert mdata.trace_run(copied).step(2).tolist() == expected
    for name in ("config.toml", "plan.json", "events.jsonl", "metrics.jsonl"):
        (copied / name).unlink()
    assert main(["trace", str(copied), "--step", "2"]) == 0
    (copied / RECORD).write_text("{")
    with pytest.raises(DamageError, match=r"data\.json is not JSON"):
        mdata.trace_run(copied)


def test_a_record_of_other_data_or_options(copied, made):
    with pytest.raises(UsageError, match=r"in a different order\n  found: blend .*\n  expected: blend "):
        mdata.trace_run(copied, blend=str(made / "web_text_document.json"))
    record = json.loads((copied / RECORD).read_text())
    (copied / RECORD).write_text(json.dumps(record | {"options": record["options"] | {"reorder": True}}))
    with pytest.raises(UsageError, match="written by another version: no option 'reorder'"):
        mdata.trace_run(copied)


def test_data_of_another_order_is_named_by_field(legacy, made, capsys):
    text = (legacy / "config.toml").read_text()
    (legacy / "config.toml").write_text(text.replace("seed = 7", "seed = 8"))
    with pytest.raises(UsageError, match="in a different order\n  found: seed 8\n  expected: seed 7\n"):
        mdata.trace_run(legacy)
    assert main(["trace", str(legacy), "--step", "1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4
    shutil.rmtree(legacy / "checkpoints")
    with pytest.raises(UsageError, match="in a different order\n  found: data id"):
        mdata.trace_run(legacy)
    (legacy / "config.toml").write_text(text)
    with pytest.raises(UsageError, match="in a different order"):
        mdata.trace_run(legacy, blend=str(made / "web_text_document.json"))


@pytest.mark.parametrize("index", ["{}", '{"run": 1}', '{"run": {"data": [1]}}', "[" * 100_000])
@pytest.mark.parametrize("pointer", ["step-4", "../..", "step-4 (copy)"])
def test_a_damaged_checkpoint_names_no_field(pointer, index, legacy):
    """Whatever stands there, the mismatch or the damage is told, and no fault of ours."""
    text = (legacy / "config.toml").read_text()
    (legacy / "config.toml").write_text(text.replace("seed = 7", "seed = 8"))
    known = index.replace("{", '{"format": "mtrain-checkpoint", "version": 1, ', 1).replace(", }", "}")
    (newest,) = (legacy / "checkpoints").glob("step-*")
    (newest / "index.json").write_text(known)
    (legacy / "index.json").write_text(known)
    (legacy / "checkpoints" / "latest").write_text(pointer.replace("step-4", newest.name))
    with pytest.raises((UsageError, DamageError), match=r"in a different order\n  found: data id|is not JSON"):
        mdata.trace_run(legacy)


def test_a_run_of_another_version_is_refused_by_name(legacy):
    text = (legacy / "config.toml").read_text()
    (legacy / "config.toml").write_text(text.replace("[data]", "[data]\nreorder = true"))
    with pytest.raises(
        UsageError, match=r"another version: this one has no key data.reorder\n  found: reorder = True\n"
    ):
        mdata.trace_run(legacy)
    (legacy / "config.toml").write_text(text.replace("[train]", "[train]\nglobal_batches = 3"))
    with pytest.raises(UsageError, match=r"this one has no key train.global_batches\n(.*\n)*.*or is it global_batch?"):
        mdata.trace_run(legacy)


def test_every_key_of_a_configuration_is_known_here():
    """A key that is added to [data] or [train] has to be thought of: it may decide what is read."""
    refused = {"fim", "bert", "t5", "classify"}  # runs with such a section, or with pairs, have a data.json
    assert {field.name for field in dataclasses.fields(DataSection)} - refused <= {*OPTION_KEYS, *_OTHER_DATA}
    assert {field.name for field in dataclasses.fields(TrainSection)} <= set(_TRAIN)


def test_folders_that_are_damaged_or_none(legacy, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"is not a run folder\n  expected: data.json"):
        mdata.trace_run(tmp_path)
    text = (legacy / "config.toml").read_text()
    (legacy / "config.toml").write_text("not [toml")
    with pytest.raises(DamageError, match=r"config\.toml is not a TOML file"):
        mdata.trace_run(legacy)
    (legacy / "config.toml").write_text(text.replace("sequence_length = 16", 'sequence_length = "16"'))
    with pytest.raises(DamageError, match=r"train.sequence_length is not an integer\n  found: '16'"):
        mdata.trace_run(legacy)
    (legacy / "config.toml").write_text(text.replace("mix.json", "gone.json"))
    with pytest.raises(UsageError, match="try: run from the folder in which the run was started, or give"):
        mdata.trace_run(legacy)
    (legacy / "config.toml").write_text(text)
    (legacy / "events.jsonl").write_text("{}\n[]\n")
    with pytest.raises(DamageError, match=r"events\.jsonl, line 2 is not a JSON object"):
        mdata.trace_run(legacy)
    (legacy / "events.jsonl").unlink()
    (legacy / "metrics.jsonl").unlink()
    assert mdata.trace_run(legacy).sample(5).place == mdata.trace_run(legacy).steps.place(5)
    assert mdata.trace_run(legacy).steps.spans[0].dp_size == 1, "from plan.json"
    (legacy / "plan.json").unlink()
    assert mdata.trace_run(legacy).steps.spans[0].dp_size is None
