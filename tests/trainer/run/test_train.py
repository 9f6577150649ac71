"""Whole runs on real text: layouts agree, resuming is exact, a killed run goes on, what does not fit is refused."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mdata
from mdata.dataset.eval_sets import evaluated_samples
from mdata.util import file_lock
from tests.helpers.examples import SOAK, soaked
from tests.helpers.processes import wait_until
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.runs import make_config, make_corpora, make_mix, write_jsonl
from trainer.checkpoint.folder import latest_checkpoint, run_state
from trainer.config.parse import dump_config
from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.run.data import open_data, training_batches
from trainer.run.engine import Engine
from trainer.run.metrics import read_events, read_metrics
from trainer.run.train import train


@dataclass(frozen=True)
class Corpora:
    """0.7 first, 0.3 second, and a held-out corpus."""

    folder: Path
    blend: Path
    valid: Path


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Corpora:
    folder = tmp_path_factory.mktemp("corpora")
    made = make_mix(folder, ["first", "second", "held"])
    return Corpora(folder, folder / "mix.json", made["held"])


def _config(corpora, folder, *, tp=1, sequence_parallel=False, steps=20, interval=None, dtype="fp32") -> RunConfig:
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        model=ModelSection(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, init_std=0.05),
        data=DataSection(blend=str(corpora.blend), valid=(str(corpora.valid),)),
        mesh=MeshSection(tp=tp, sequence_parallel=sequence_parallel),
        train=TrainSection(
            sequence_length=32, global_batch=4, micro_batch=2, steps=steps, eval_interval=10, eval_samples=7
        ),
        optimizer=OptimizerSection(lr=1e-2, warmup_steps=1),
        precision=PrecisionSection(dtype=dtype),
        checkpoint=CheckpointSection(interval=interval, keep=2),
    )


def _train(context, config):
    result = train(config, context.join(Mesh(context.world, config.mesh.tp)))
    return result.step, result.loss, result.valid


def _by_component(folder):
    return [line["train"] for line in read_metrics(Path(folder))]


def _curve(folder):
    return {line["step"]: (line["loss"], line["grad_norm"], line.get("valid")) for line in read_metrics(Path(folder))}


@pytest.mark.parametrize(
    ("ranks", "tp", "sequence_parallel"), soaked([(2, 2, False), (2, 2, True), (2, 1, False)], but=[(2, 2, True)])
)
def test_losses_do_not_depend_on_the_layout(ranks, tp, sequence_parallel, corpora, tmp_path):
    """fp32, 20 steps, training and validation, within 1e-4; and the loss falls."""
    run_ranks(_train, 1, _config(corpora, tmp_path / "alone"))
    config = _config(corpora, tmp_path / "ranks", tp=tp, sequence_parallel=sequence_parallel)
    run_ranks(_train, ranks, config)
    alone, other = _curve(tmp_path / "alone"), _curve(tmp_path / "ranks")
    alone_by, other_by = (_by_component(tmp_path / name) for name in ("alone", "ranks"))
    assert list(alone) == list(other) == list(range(1, 21))
    for step, (loss, _, valid) in alone.items():
        np.testing.assert_allclose(other[step][0], loss, rtol=1e-4)
        assert other_by[step - 1] == pytest.approx(alone_by[step - 1], rel=1e-4)
        assert (valid is not None) == (step in (10, 20))
        if valid:
            np.testing.assert_allclose(other[step][2]["held"], valid["held"], rtol=1e-4)
    assert alone[20][0] < alone[1][0] - 1


@pytest.mark.parametrize("samples", [1, 5])
def test_ranks_with_uneven_shares_of_a_validation_set_gather_parameters_together(samples, corpora, tmp_path):
    """Of 5 samples in microbatches of 2, rank 0 has two microbatches and rank 1 one; of 1 sample rank 1 has none."""
    config = _config(corpora, tmp_path / "alone", steps=2)
    config = replace(config, train=replace(config.train, eval_interval=1, eval_samples=samples))
    run_ranks(_train, 1, config)
    sharded = replace(config.optimizer, sharding="parameters")
    run_ranks(_train, 2, replace(config, run=replace(config.run, folder=str(tmp_path / "ranks")), optimizer=sharded))
    alone, other = _curve(tmp_path / "alone"), _curve(tmp_path / "ranks")
    for step in (1, 2):
        assert other[step][2]["held"] == pytest.approx(alone[step][2]["held"], rel=1e-5)


def test_ranks_json_tells_what_each_rank_holds(corpora, tmp_path):
    run_ranks(_train, 1, _config(corpora, tmp_path / "alone", steps=1))
    run_ranks(_train, 2, _config(corpora, tmp_path / "halves", tp=2, sequence_parallel=True, steps=1))
    (whole,) = json.loads((tmp_path / "alone" / "ranks.json").read_text())
    halves = json.loads((tmp_path / "halves" / "ranks.json").read_text())
    assert [half["tp"] for half in halves] == [0, 1]
    assert sum(half["split_parameters"] for half in halves) == whole["split_parameters"]
    # 300 rows of vocabulary are cut at 256 of 512 padded ones; all else in the middle.
    vocabulary = 32 * (256 - 150)
    assert halves[0]["split_parameters"] == whole["split_parameters"] // 2 + vocabulary
    assert {half["copied_parameters"] for half in halves} == {whole["copied_parameters"]}


@pytest.mark.scaled
def test_resuming_at_every_step_is_bitwise_the_same_run(corpora, tmp_path):
    """Stop after k steps, go on with a new process group: the rest equals the undisturbed run, bit for bit."""
    undisturbed = _config(corpora, tmp_path / "whole", tp=2, sequence_parallel=True, steps=12, interval=1)
    run_ranks(_train, 2, undisturbed)
    expected = _curve(tmp_path / "whole")
    folder = tmp_path / "parts"
    for stop in (1, 2, 5, 11, 12) if SOAK > 1 else (1, 5, 12):
        # The schedule must not know where we stop: decay_steps is fixed.
        part = replace(undisturbed, run=RunSection(folder=str(folder), seed=7))
        part = replace(part, optimizer=replace(part.optimizer, decay_steps=12), train=replace(part.train, steps=stop))
        run_ranks(_train, 2, part)
        got = _curve(folder)
        for step in range(1, stop + 1):
            assert got[step][:2] == expected[step][:2], step
        assert _by_component(folder) == _by_component(tmp_path / "whole")[:stop]
    assert latest_checkpoint(folder / "checkpoints") == folder / "checkpoints" / "step-12"
    assert sorted(p.name for p in (folder / "checkpoints").glob("step-*")) == ["step-11", "step-12"]


@pytest.mark.parametrize("sizes", [{"batch_ramp": "2 2 24"}, {"batch_schedule": "0:2 64:4 256:6 512:8"}])
def test_changing_batch_sizes_resume_in_their_middle(corpora, tmp_path, sizes):
    """The counter of consumed samples decides on the size of a step, on other ranks too."""
    whole = _config(corpora, tmp_path / "whole", steps=9, interval=1)
    train = replace(whole.train, global_batch=8, micro_batch=1, **sizes)
    whole = replace(whole, train=train)
    run_ranks(_train, 1, whole)
    expected = _curve(tmp_path / "whole")
    by_table = "batch_schedule" in sizes  # rows have 32 tokens
    consumed = [2, 6, 10, 16, 24, 32, 40, 48, 56] if by_table else [2, 4, 6, 8, 12, 16, 22, 28, 36]
    assert _consumed(tmp_path / "whole") == consumed
    folder = tmp_path / "parts"
    for stop, ranks in ((1, 1), (3, 2), (6, 1), (9, 2)):
        part = replace(whole, run=RunSection(folder=str(folder), seed=7), train=replace(train, steps=stop))
        run_ranks(_train, ranks, replace(part, optimizer=replace(part.optimizer, decay_steps=9)))
        got = _curve(folder)
        for step in range(1, stop + 1):
            assert got[step][0] == pytest.approx(expected[step][0], rel=1e-5), step
    assert _consumed(folder) == consumed


def _consumed(folder):
    return [json.loads(line)["consumed_samples"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_may_evaluate_nothing(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run", steps=4)
    run_ranks(_train, 1, config)
    assert any("valid" in line for line in read_metrics(tmp_path / "run"))
    silent = replace(config, run=RunSection(folder=str(tmp_path / "silent"), seed=7))
    silent = replace(silent, train=replace(config.train, evaluate=False))
    run_ranks(_train, 1, silent)
    lines = read_metrics(tmp_path / "silent")
    assert lines[-1]["step"] == 4 and not any({"valid", "test", "eval_s"} & line.keys() for line in lines)
    assert lines[-1]["loss"] == read_metrics(tmp_path / "run")[-1]["loss"]
    (problem,) = check(replace(silent, checkpoint=CheckpointSection(keep_best=1)), 1, facts=None)
    assert "train.evaluate=false reads no validation set" in problem
    with pytest.raises(mdata.UsageError, match="the run has no validation set"):
        mdata.trace_run(tmp_path / "silent", validation="valid")


def test_the_last_step_is_recorded_whatever_the_interval(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run", steps=3)
    config = replace(
        config,
        run=replace(config.run, log_interval=2),
        data=replace(config.data, valid=()),
        train=replace(config.train, eval_interval=None),
    )
    run_ranks(_train, 1, config)
    assert list(_curve(tmp_path / "run")) == [2, 3]


def test_a_finished_run_has_nothing_to_do(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run", steps=2)
    run_ranks(_train, 1, config)
    assert run_ranks(_train, 1, config) == [(2, None, {})]


def _poisoned(monkeypatch, bad_steps):
    """Engines whose gradient is NaN in some of their own steps, counted from 1 over the whole test."""
    real, calls = Engine.step, [0]

    def step(self, microbatches, rate, **votes):
        calls[0] += 1
        with monkeypatch.context() as patch:
            if calls[0] in bad_steps:
                finish = self.optimizer.reducer.finish

                def poisoned():
                    finish()
                    self.buffers.gradients.values[:1].fill_(float("nan"))

                patch.setattr(self.optimizer.reducer, "finish", poisoned)
            return real(self, microbatches, rate, **votes)

    monkeypatch.setattr(Engine, "step", step)


def test_a_skipped_step_is_told_and_its_samples_are_not_read_again(corpora, tmp_path, monkeypatch):
    _poisoned(monkeypatch, {2, 3})
    config = _config(corpora, tmp_path / "run", steps=5, interval=1)
    train(config, join_world(Mesh(1), placement=Placement()))
    lines = read_metrics(tmp_path / "run")
    assert [line["consumed_samples"] for line in lines] == [4, 8, 12, 16, 20]
    assert [line["grad_norm"] is None for line in lines] == [False, True, True, False, False]
    skipped = [event["step"] for event in read_events(tmp_path / "run") if event["event"] == "skipped"]
    assert skipped == [2, 3]
    run = run_state(tmp_path / "run" / "checkpoints" / "step-5")
    assert (run.step, run.optimizer_steps) == (5, 3), "skipped steps are no updates"


def test_ten_skipped_steps_in_a_row_stop_the_run(corpora, tmp_path, monkeypatch):
    _poisoned(monkeypatch, {*range(1, 10), *range(11, 30)})  # nine, a good one, and then no more
    config = _config(corpora, tmp_path / "run", steps=30)
    with pytest.raises(mdata.UsageError, match="not finite in 10 steps in a row; the last was step 20"):
        train(config, join_world(Mesh(1), placement=Placement()))


def test_the_learning_rate_that_is_recorded_is_the_one_that_was_used(corpora, tmp_path, monkeypatch):
    real, used = Engine.step, []
    monkeypatch.setattr(
        Engine, "step", lambda self, batches, rate, **votes: (used.append(rate), real(self, batches, rate, **votes))[1]
    )
    config = _config(corpora, tmp_path / "run", steps=4)
    config = replace(config, optimizer=OptimizerSection(lr=1e-2, warmup_steps=2))
    train(config, join_world(Mesh(1), placement=Placement()))
    assert used[:2] == [0.5e-2, 1e-2], "a warmup of two steps"
    assert [line["lr"] for line in read_metrics(tmp_path / "run")] == used


def test_waiting_for_data_is_told_as_a_share_of_the_steps(corpora, tmp_path, monkeypatch):
    """A clock that ticks when it is looked at: a step begins, asks for data, has them, and ends."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), time=lambda: 0.0)
    monkeypatch.setattr("trainer.run.measuring.time", clock)
    train(_config(corpora, tmp_path / "run", steps=3), join_world(Mesh(1), placement=Placement()))
    lines = read_metrics(tmp_path / "run")
    assert [line["data_wait"] for line in lines] == [pytest.approx(1 / 3)] * 3
    assert [line["tokens_per_s"] for line in lines] == [pytest.approx(4 * 32 / 3)] * 3


def test_another_global_batch_goes_on_at_the_next_sample(corpora, tmp_path, monkeypatch):
    """The counter of samples, not that of steps, says where the data goes on."""
    seen: list[int] = []
    config = _config(corpora, tmp_path / "run", steps=2)
    config = replace(config, optimizer=replace(config.optimizer, min_lr=1e-3))
    train(config, join_world(Mesh(1), placement=Placement()))
    larger = replace(config, train=replace(config.train, global_batch=6, steps=4))
    batches = training_batches
    monkeypatch.setattr(
        "trainer.run.train.training_batches", lambda *a, **k: (seen.append(k["consumed"]), batches(*a, **k))[1]
    )
    train(larger, join_world(Mesh(1), placement=Placement()))
    train(replace(larger, train=replace(larger.train, steps=5)), join_world(Mesh(1), placement=Placement()))
    assert seen == [8, 20]
    assert [line["consumed_samples"] for line in read_metrics(tmp_path / "run")] == [4, 8, 14, 20, 26]


def test_a_run_of_so_many_samples_ends_there_whatever_the_batches(corpora, tmp_path):
    """A ramp, then a larger batch after a resume; evaluated and saved at the end, and then there is nothing left."""
    config = _config(corpora, tmp_path / "run", interval=None)
    sizes = replace(config.train, steps=None, samples=23, batch_ramp="2 2 8", micro_batch=1)
    schedule = OptimizerSection(lr=1e-2, schedule="linear", warmup_steps=2, decay_samples=40)
    config = replace(config, train=sizes, optimizer=schedule)
    alone = join_world(Mesh(1), placement=Placement())
    assert train(config, alone).step == 7  # 2 2 2 2 4 4 4; a step more would end at 24
    lines = read_metrics(tmp_path / "run")
    assert [line["consumed_samples"] for line in lines] == [2, 4, 6, 8, 12, 16, 20]
    warm = 4  # the samples of the first two steps
    falling = [1e-2 * (1 - (done - warm) / (40 - warm)) for done in (4, 6, 8, 12, 16)]
    assert [line["lr"] for line in lines] == pytest.approx([5e-3, 1e-2, *falling])
    assert "valid" in lines[-1] and "valid" not in lines[-2]
    assert lines[-1]["eval_s"] > 0 and "eval_s" not in lines[-2]
    longer = replace(config, train=replace(sizes, samples=None, tokens=32 * 41, batch_ramp=None, global_batch=6))
    assert train(longer, alone).step == 10  # 26, 32, 38; a step more would end at 44
    assert [line["consumed_samples"] for line in read_metrics(tmp_path / "run")][7:] == [26, 32, 38]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["steps"] == 10
    assert train(longer, alone).loss is None, "nothing is left to do"


def test_another_layout_goes_on_where_one_stopped(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run", steps=20)
    run_ranks(_train, 1, config)
    expected = _curve(tmp_path / "run")
    other = replace(config, run=RunSection(folder=str(tmp_path / "other"), seed=7))
    half = replace(other, train=replace(other.train, steps=10), optimizer=replace(other.optimizer, decay_steps=20))
    run_ranks(_train, 1, half)
    run_ranks(_train, 2, replace(other, mesh=MeshSection(tp=2, sequence_parallel=True)))
    got = _curve(tmp_path / "other")
    assert list(got) == list(range(1, 21))
    for step in range(11, 21):
        np.testing.assert_allclose(got[step][0], expected[step][0], rtol=1e-4)


def _train_until_killed(context, config, lines):
    """Every rank dies by itself as soon as the run has written so many lines, wherever it is then."""

    def watch():
        wait_until(lambda: _lines(config.run.folder) >= lines)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _train(context, config)


@pytest.mark.scaled
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SOAK))
def test_kill_9_at_any_step_and_run_again(seed, corpora, tmp_path):
    """The command itself, killed with its ranks at a random moment, then ranks alone; then the undisturbed curve."""
    config = _config(corpora, tmp_path / "whole", tp=2, sequence_parallel=True, steps=30, interval=3)
    run_ranks(_train, 2, config)
    config = replace(config, run=RunSection(folder=str(tmp_path / "killed"), seed=7))
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "cli.mtrain", "train", str(path), "--nproc", "2"]
    rng = random.Random(seed)
    first, second = rng.randint(2, 12), rng.randint(16, 25)
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_until(lambda: _lines(tmp_path / "killed") >= first or process.poll() is not None)
    assert process.poll() is None, process.stderr.read().decode()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with pytest.raises(RankError, match="exit code -9"):
        run_ranks(_train_until_killed, 2, config, second)
    run_ranks(_train, 2, config)
    assert _curve(tmp_path / "killed") == _curve(tmp_path / "whole")
    assert [event["event"] for event in read_events(tmp_path / "killed")].count("start") == 3


def _lines(folder: str | Path) -> int:
    file = Path(folder, "metrics.jsonl")
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_changed_order_of_data_is_refused_by_field(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run", steps=1)
    run_ranks(_train, 1, config)
    changed = replace(config, run=replace(config.run, seed=8), train=replace(config.train, steps=2))
    with pytest.raises(AssertionError, match=r"in a different order\n +found: run.seed=8\n +expected: run.seed=7"):
        run_ranks(_train, 1, changed)


@pytest.mark.parametrize("change", [{"num_layers": 1}, {"num_heads": 2}, {"rope_theta": 5e5}, {"norm_epsilon": 1e-6}])
def test_a_changed_model_is_refused_though_its_tensors_fit(change, corpora, tmp_path):
    config = _config(corpora, tmp_path / "run", steps=1)
    run_ranks(_train, 1, config)
    other = replace(config, model=replace(config.model, **change), train=replace(config.train, steps=2))
    (name,) = change
    with pytest.raises(AssertionError, match=rf"was trained with a different model\n +found: .*{name}"):
        run_ranks(_train, 1, other)


def test_a_second_run_in_one_folder_is_refused(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run", steps=1)
    (tmp_path / "run").mkdir()
    with (
        file_lock.hold(tmp_path / "run" / ".lock"),
        pytest.raises(AssertionError, match="another run is writing"),
    ):
        run_ranks(_train, 1, config)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
    run_ranks(_train, 1, config)


def test_a_run_folder_without_a_name_is_refused(corpora, tmp_path):
    config = replace(_config(corpora, tmp_path), run=RunSection(folder=""))
    with pytest.raises(mdata.UsageError, match=r"run\.folder is empty"):
        make_plan(config, 1, facts=None)


def test_a_corpus_of_another_tokenizer_is_refused(corpora, tmp_path):
    made = make_corpora(tmp_path, {"x": write_jsonl(tmp_path / "x.jsonl", 9)}, vocab_size=280)
    config = _config(corpora, tmp_path / "run")
    other = replace(config, data=replace(config.data, valid=(str(made["x"]),)))
    with pytest.raises(mdata.UsageError, match="was made with a different tokenizer"):
        open_data(other)


def test_two_validation_sets_of_one_name_are_refused(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run")
    twice = replace(config, data=replace(config.data, valid=(str(corpora.valid), str(corpora.valid))))
    with pytest.raises(mdata.UsageError, match=r"data\.valid holds two sets called held"):
        open_data(twice)


@pytest.mark.parametrize(("limit", "samples"), [(0, range(10)), (4, [0, 2, 5, 7]), (10, range(10)), (99, range(10))])
def test_validation_samples_are_spread_over_the_set(limit, samples):
    assert evaluated_samples(SimpleNamespace(num_samples=10), limit).tolist() == list(samples)


def test_a_vocabulary_that_is_too_small_is_refused(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run")
    data = open_data(config)
    small = replace(config, model=replace(config.model, vocab_size=200))
    with pytest.raises(mdata.UsageError, match=r"model\.vocab_size=200 is too small.*300"):
        make_plan(small, 1, facts=data.facts)


def test_a_foreign_corpus_is_checked_batch_by_batch(corpora, tmp_path):
    """A bare .bin/.idx pair says nothing of its vocabulary: the model's is given, and an id outside it is named."""
    for ending in ("bin", "idx"):
        source = corpora.folder / f"first_text_document.{ending}"
        (tmp_path / f"bare.{ending}").write_bytes(source.read_bytes())
    config = _config(corpora, tmp_path / "run", steps=2)
    config = replace(config, data=DataSection(blend=str(tmp_path / "bare")))
    fits = replace(config, model=replace(config.model, vocab_size=300))
    run_ranks(_train, 1, fits)
    assert list(_curve(tmp_path / "run")) == [1, 2]
    small = replace(fits, model=replace(config.model, vocab_size=150), run=RunSection(folder=str(tmp_path / "r2")))
    with pytest.raises(AssertionError, match="token id outside the model's vocabulary"):
        run_ranks(_train, 1, small)


def _behind(context, config, behind, stop_at):
    """Train with reports read so many steps later; from step stop_at on somebody asks to stop."""
    import trainer.run.train as module
    from mdata import StoppedError

    calls = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "reports_behind", lambda device: behind)
        patch.setattr(module.StopRequests, "votes", lambda self: (float(next(calls) == stop_at), 0.0))
        try:
            return _train(context, config)[0]
        except StoppedError as stopped:
            return str(stopped).splitlines()[0]


def test_reports_that_are_read_one_step_later_say_the_same(corpora, tmp_path):
    """On a GPU the next step runs meanwhile: metrics, evaluations and checkpoints are those of a run that waits."""
    for behind in (0, 1, 2):
        config = _config(corpora, tmp_path / str(behind), steps=12, interval=5)
        assert run_ranks(_behind, 1, config, behind, None) == [12]
        assert _curve(tmp_path / str(behind)) == _curve(tmp_path / "0")
        saved = [e["step"] for e in read_events(tmp_path / str(behind)) if e["event"] == "saved"]
        assert saved == [5, 10, 12]


def test_a_request_to_stop_ends_the_step_that_runs_when_it_is_read(corpora, tmp_path):
    """And its checkpoint holds that step, not the one before; the run then goes on as if it had not stopped."""
    run_ranks(_behind, 1, _config(corpora, tmp_path / "whole", steps=12), 0, None)
    config = _config(corpora, tmp_path / "stopped", steps=12)
    (message,) = run_ranks(_behind, 1, config, 1, 6)
    assert "after step 7 and its checkpoint" in message
    assert latest_checkpoint(tmp_path / "stopped" / "checkpoints").name == "step-7"
    assert run_ranks(_behind, 1, config, 1, None) == [12]
    assert _curve(tmp_path / "stopped") == _curve(tmp_path / "whole")


def _lose_rank_1(context, config):
    def die(finished):
        if context.rank == 1 and finished.step == 3:
            os._exit(9)

    train(config, context.join(Mesh(context.world, config.mesh.tp)), callbacks=[die])


def test_a_lost_rank_is_named_in_the_events(tmp_path):
    config = make_config(tmp_path / "run", blend="mock", valid=[], steps=6, eval_interval=None)
    with pytest.raises(RankError):
        run_ranks(_lose_rank_1, 2, replace(config, model=replace(config.model, vocab_size=300)))
    last = read_events(tmp_path / "run")[-1]
    assert (last["event"], last["error"]) == ("failed", "rank 0 of 2 lost its connection to another rank")
