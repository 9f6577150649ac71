"""What `import trainer` offers: every name, training with a loss and callbacks of one's own, saving and loading."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.nn.functional import cross_entropy

import trainer
from tests.helpers.ranks import run_ranks
from tests.trainer.run.test_mock_run import config_of
from trainer.run.metrics import read_events, read_metrics


def test_every_public_name_exists_and_importing_them_starts_without_torch():
    for name in trainer.__all__:
        assert getattr(trainer, name) is not None, name
    code = "import sys, trainer; trainer.load_config; assert 'torch' not in sys.modules and 'Engine' in dir(trainer)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _mean_loss(logits_BSV, batch):
    losses = cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten(), reduction="none")
    return (losses * batch.loss_mask_BS.flatten()).sum().double()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_train_joins_by_itself_and_takes_a_loss(tmp_path):
    built_in = trainer.train(config_of(tmp_path / "built-in", steps=2))
    own = trainer.train(config_of(tmp_path / "own", steps=2), loss=_mean_loss)
    assert own.loss == pytest.approx(built_in.loss, rel=1e-5)
    double = config_of(tmp_path / "double", steps=2)
    twice = trainer.train(double, loss=lambda logits_BSV, batch: 2 * _mean_loss(logits_BSV, batch))
    assert twice.loss == pytest.approx(2 * built_in.loss, rel=1e-2)


def _ended_by_one_rank(context, config, behind, end_at):
    seen: list[trainer.FinishedStep] = []

    def see(finished):
        seen.append(finished)
        return finished.step == end_at and context.rank == context.world - 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.run.train.reports_behind", lambda device: behind)
        result = trainer.train(config, context.join(trainer.mesh_of(config, context.world)), callbacks=[see])
    return result.step, [(step.step, step.consumed_samples, step.report.loss) for step in seen]


@pytest.mark.parametrize(("ranks", "behind", "last"), [(1, 0, 3), (2, 0, 3), (1, 1, 5)])
def test_a_callback_sees_every_step_and_may_end_the_run(ranks, behind, last, tmp_path):
    """Asked after step 2: the request goes with the next step that begins, and those that have begun are finished."""
    config = config_of(tmp_path / "run")
    results = run_ranks(_ended_by_one_rank, ranks, config, behind, 2)
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    expected = [(step, 4 * step, loss) for step, loss in enumerate(losses, 1)]
    assert results == [(last, expected)] * ranks and len(losses) == last
    events = [(event["event"], event["step"]) for event in read_events(tmp_path / "run")]
    assert ("ended by a callback", last) in events and ("saved", last) in events
    results = run_ranks(_ended_by_one_rank, ranks, config, behind, None)
    assert {step for step, _ in results} == {6} and [step for step, *_ in results[0][1]] == list(range(last + 1, 7))


def test_an_error_of_a_callback_ends_the_run(tmp_path):
    with pytest.raises(ZeroDivisionError):
        trainer.train(config_of(tmp_path / "run"), callbacks=[lambda finished: 1 // 0])


def _own_loop(context, config, folder, load):
    """Three steps saved, or a checkpoint loaded and gone on with; the losses of steps 4 and 5."""
    world = context.join(trainer.mesh_of(config, context.world))
    plan = trainer.make_plan(config, context.world)
    data = trainer.open_data(config)
    engine = trainer.Engine(config, plan, world=world, fresh=load is None)
    first = 0 if load is None else engine.load(load).consumed_samples
    losses = []
    batches = trainer.training_batches(data, config, plan=plan, dp=world.groups["dp"], consumed=first)
    for step, read in zip(range(first // plan.global_batch + 1, 6), batches, strict=False):
        losses.append(engine.step([engine.microbatch(batch) for batch in read], 1e-3).read().loss)
        if step == 3:
            engine.save(folder, step=step, consumed_samples=step * plan.global_batch, data=data.train)
    return losses[-2:]


def test_a_loop_of_ones_own_saves_and_another_layout_goes_on(tmp_path):
    root = str(tmp_path / "checkpoints")
    (alone,) = run_ranks(_own_loop, 1, config_of(tmp_path), root, None)
    for losses in run_ranks(_own_loop, 2, config_of(tmp_path, tp=2), None, f"{root}/step-3"):
        assert losses == pytest.approx(alone, rel=1e-4)
