"""When checkpoints are written, and whole runs around it: stopped, diverged, killed in an evaluation, begun again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mdata
from mdata.progress import SILENT, Progress
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_config, make_mix
from trainer.checkpoint.folder import latest_checkpoint, run_state
from trainer.config.sections import CheckpointSection, MeshSection, OptimizerSection, RunConfig
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.run.engine import Engine
from trainer.run.metrics import read_events, read_metrics
from trainer.run.saving import SaveSchedule
from trainer.run.train import TrainResult, train

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def due(schedule, step, *, last, votes):
    schedule.add_votes(votes)
    return schedule.due(step, last=last)


def test_checkpoints_are_due_by_steps_by_time_at_the_end_and_on_request():
    clock = Clock()
    schedule = SaveSchedule(CheckpointSection(interval=3, minutes=10.0), keeps_time=True, clock=clock)
    assert [due(schedule, step, last=False, votes=(0.0, 0.0, 0.0)) for step in (1, 2, 3)] == [False, False, True]
    assert due(schedule, 4, last=False, votes=()), "one that was not written stays due"
    schedule.saved()
    assert not due(schedule, 4, last=False, votes=())
    clock.now = 599.0
    assert schedule.vote() == 0.0
    clock.now = 600.0
    assert schedule.vote() == 1.0 and due(schedule, 4, last=False, votes=(1.0, 0.0, 0.0))
    schedule.saved()
    assert schedule.vote() == 0.0
    assert due(schedule, 5, last=True, votes=(0.0, 0.0, 0.0))
    schedule.saved()
    assert due(schedule, 7, last=False, votes=(0.0, 2.0, 0.0))


def test_one_clock_counts_and_none_if_it_is_told_so():
    clock = Clock()
    other = SaveSchedule(CheckpointSection(minutes=10.0), keeps_time=False, clock=clock)
    never = SaveSchedule(CheckpointSection(minutes=0.0), keeps_time=True, clock=clock)
    clock.now = 1e9
    assert other.vote() == never.vote() == 0.0
    assert not due(never, 12345, last=False, votes=(0.0,))


def test_a_refusal_is_told_once():
    schedule = SaveSchedule(CheckpointSection(), keeps_time=True, clock=Clock())
    assert [schedule.first_refusal(), schedule.first_refusal()] == [True, False]
    schedule.saved()
    assert schedule.first_refusal()


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return {**make_mix(folder, ["first", "second", "held"]), "mix": folder / "mix.json"}


def config_in(folder: Path, mix: dict[str, Path]) -> RunConfig:
    """Six steps of one rank, evaluated after three and at the end; no checkpoint before the end."""
    made = make_config(folder, blend=mix["mix"], valid=[mix["held"]], steps=6, eval_interval=3, eval_samples=5)
    return replace(made, mesh=MeshSection(), optimizer=OptimizerSection(lr=1e-2, warmup_steps=1))


@pytest.fixture
def config(mix: dict[str, Path], tmp_path: Path) -> RunConfig:
    return config_in(tmp_path / "run", mix)


@pytest.fixture(scope="module")
def undisturbed(
    one_thread: None, mix: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Any, ...]]:
    """The curve of a run that nothing happened to."""
    config = config_in(tmp_path_factory.mktemp("undisturbed") / "run", mix)
    alone(config)
    return curve(config)


def alone(config: RunConfig, progress: Progress = SILENT) -> TrainResult:
    return train(config, join_world(Mesh(1), placement=Placement()), progress=progress)


def curve(config: RunConfig) -> list[tuple[Any, ...]]:
    lines = read_metrics(Path(config.run.folder))
    return [(x["step"], x["loss"], x["grad_norm"], x["lr"], x.get("valid")) for x in lines]


def events(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(Path(config.run.folder)) if event["event"] == kind]


def saved(config: RunConfig) -> list[str]:
    return sorted(path.name for path in Path(config.run.folder, "checkpoints").glob("step-*"))


def after_forward(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[Engine], None]) -> None:
    """Do something in the middle of the engine's n-th step."""
    real, calls = Engine.step, [0]

    def step(self: Engine, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            action(self)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Engine, "step", step)


@pytest.fixture
def quiet_handlers() -> Iterator[None]:
    """Handlers of a command of ours, whatever pytest was started with."""

    def stopped(number: int, frame: object) -> None:
        raise mdata.StoppedError("at once")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("step", [2, 3, 6], ids=["between", "before an evaluation", "last"])
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, mdata.StoppedError), (signal.SIGINT, KeyboardInterrupt)])
def test_a_stopped_run_is_saved_and_goes_on_as_if_nothing_was(
    number, kind, step, config, undisturbed, monkeypatch, quiet_handlers
):
    assert config.checkpoint.interval is None
    with monkeypatch.context() as patch:
        after_forward(patch, step, lambda engine: os.kill(os.getpid(), number))
        with pytest.raises(kind):
            alone(config)
    assert saved(config) == [f"step-{step}"]
    assert [event["step"] for event in events(config, "stopped")] == [step]
    result = alone(config)
    assert curve(config) == undisturbed
    assert result.step == 6 and result.loss == curve(config)[-1][1] and result.valid == curve(config)[-1][4]
    assert alone(config).loss is None, "and then there is nothing left to do"
    assert not list(Path(config.run.folder).glob("metrics-*"))


def _stopped_on_rank_1(context, config: RunConfig) -> str:
    if context.rank == 1:
        real = Engine.step

        def step(self: Engine, *arguments: Any, **options: Any) -> Any:
            report = real(self, *arguments, **options)
            if self.optimizer.steps == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return report

        Engine.step = step  # type: ignore[method-assign]
    try:
        train(config, context.join(Mesh(context.world, config.mesh.tp)))
    except mdata.StoppedError as error:
        return str(error)
    finally:
        if context.rank == 1:
            Engine.step = real  # type: ignore[method-assign]
    return "not stopped"


@pytest.mark.parametrize("tp", [1, 2])
def test_what_one_rank_hears_stops_all_of_them_at_one_step(tp, config):
    """The last rank alone gets the signal, behind its second step: all save after the third."""
    config = replace(config, mesh=MeshSection(tp=tp))
    messages = run_ranks(_stopped_on_rank_1, 2, config)
    expected = "stopped by SIGTERM after step 3 and its checkpoint\n  try: run the same command again to continue"
    assert messages == [expected] * 2
    assert saved(config) == ["step-3"]


def _train(context, config: RunConfig) -> int:
    return train(config, context.join(Mesh(context.world, config.mesh.tp))).step


def test_rank_0_says_when_it_is_time(config):
    config = replace(config, mesh=MeshSection(tp=2), checkpoint=CheckpointSection(minutes=1e-9, keep=9))
    assert run_ranks(_train, 2, config) == [6, 6]
    assert saved(config) == [f"step-{step}" for step in range(1, 7)]


def poison(engine: Engine) -> None:
    """Make a gradient of this step NaN, once backward has written them."""
    reducer = engine.optimizer.reducer

    def poisoned() -> None:
        del reducer.finish
        reducer.finish()
        engine.buffers.gradients.values[0] = float("nan")

    reducer.finish = poisoned


def test_no_checkpoint_is_written_behind_a_skipped_step_until_one_was_sound(config, monkeypatch):
    config = replace(config, checkpoint=CheckpointSection(interval=2, keep=9))
    after_forward(monkeypatch, 4, poison)
    alone(config)
    assert saved(config) == ["step-2", "step-5", "step-6"]
    assert [event["step"] for event in events(config, "not saved")] == [4]


def without_loss(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """No token of these steps has loss, as where every document of them is one token long."""
    real, number = Engine.step, iter(range(1, 100))

    def step(self: Engine, batches: Any, *arguments: Any, **options: Any) -> Any:
        if next(number) in steps:
            batches = [replace(batch, loss_mask_BS=torch.zeros_like(batch.loss_mask_BS)) for batch in batches]
        return real(self, batches, *arguments, **options)

    monkeypatch.setattr(Engine, "step", step)


def test_a_step_without_loss_changes_nothing_and_is_saved(config, monkeypatch):
    config = replace(config, checkpoint=CheckpointSection(interval=2, keep=9))
    without_loss(monkeypatch, {2, 6})
    alone(config)
    assert saved(config) == ["step-2", "step-4", "step-6"]
    last = run_state(Path(config.run.folder, "checkpoints", "step-6"))
    assert (last.optimizer_steps, last.measured["loss"]) == (4, None)
    assert [event["loss_tokens"] for event in events(config, "skipped")] == [0, 0]


def test_a_step_without_loss_does_not_make_a_state_sound(config, monkeypatch):
    config = replace(config, checkpoint=CheckpointSection(interval=1, keep=9))
    after_forward(monkeypatch, 2, poison)
    without_loss(monkeypatch, {3})
    alone(config)
    assert saved(config) == ["step-1", "step-4", "step-5", "step-6"]


def test_ten_steps_without_loss_are_the_fault_of_the_data(config, monkeypatch):
    config = replace(config, train=replace(config.train, steps=12))
    without_loss(monkeypatch, set(range(2, 100)))
    with pytest.raises(mdata.UsageError, match="no token counted in the loss in 10 steps in a row, up to"):
        alone(config)


def test_a_validation_set_without_loss_has_none(config, monkeypatch):
    real = Engine.evaluate

    def evaluate(self: Engine, batches: Any) -> float:
        return real(self, [replace(b, loss_mask_BS=torch.zeros_like(b.loss_mask_BS)) for b in batches])

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    alone(config)
    assert [line["valid"] for line in read_metrics(Path(config.run.folder)) if "valid" in line] == [{"held": None}] * 2


def test_a_run_that_diverges_replaces_no_good_checkpoint(config, monkeypatch):
    config = replace(config, checkpoint=CheckpointSection(interval=1, keep=1))
    real = Engine.step

    def step(self: Engine, *arguments: Any, **options: Any) -> Any:
        if self.optimizer.steps >= 3:
            poison(self)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Engine, "step", step)
    with pytest.raises(mdata.UsageError, match=r"no checkpoint was written for the last step, 6\n  found: .*norm nan"):
        alone(config)
    assert saved(config) == ["step-3"]
    assert latest_checkpoint(Path(config.run.folder, "checkpoints")).name == "step-3"


@pytest.mark.parametrize("name", ["weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_state_that_is_not_finite_is_no_checkpoint(name, value, config, monkeypatch):
    """Though every loss and norm was: the moments say it first."""
    config = replace(config, checkpoint=CheckpointSection(interval=1, keep=1))
    real = Engine.is_finite

    def is_finite(self: Engine, loss: float) -> bool:
        if self.optimizer.steps >= 3:
            self.optimizer.state[name][-1] = value
        return real(self, loss)

    monkeypatch.setattr(Engine, "is_finite", is_finite)
    with pytest.raises(mdata.UsageError, match="no checkpoint was written for the last step"):
        alone(config)
    assert saved(config) == ["step-2"]
    assert [event["step"] for event in events(config, "not saved")] == [3], "told once"


class Broken(Exception):
    """The end of a process in an evaluation."""


@pytest.mark.parametrize("step", [3, 6])
def test_a_run_that_ends_in_an_evaluation_has_its_checkpoint_and_evaluates_again(
    step, config, undisturbed, monkeypatch
):
    config = replace(config, checkpoint=CheckpointSection(interval=3))
    real = Engine.evaluate

    def evaluate(self: Engine, batches: Any) -> float:
        if self.optimizer.steps == step:
            raise Broken
        return real(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "evaluate", evaluate)
        with pytest.raises(Broken):
            alone(config)
    assert saved(config)[-1] == f"step-{step}"
    assert [line["step"] for line in read_metrics(Path(config.run.folder))] == list(range(1, step))
    result = alone(config)
    assert curve(config) == undisturbed
    assert result.valid == curve(config)[-1][4]


def test_signals_act_at_once_in_an_evaluation_behind_a_checkpoint(config, monkeypatch, quiet_handlers):
    def evaluate(self: Engine, batches: Any) -> float:
        if self.optimizer.steps == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return 0.0

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    with pytest.raises(mdata.StoppedError, match="at once"):
        alone(config)
    assert saved(config) == ["step-6"]


def test_an_evaluation_tells_how_much_is_left(config):
    heard: list[dict[str, float]] = []
    notes: list[str] = []

    class Listener:
        def begin(self, label: str, total: int | None, *, unit: str, done: int = 0) -> None: ...
        def advance(self, amount: int, **totals: float) -> None:
            heard.append({"amount": amount, **totals})

        def stages(self, **seconds: float) -> None: ...
        def measured(self, values: Mapping[str, Any]) -> None: ...
        def note(self, text: str) -> None:
            notes.append(text)

        def end(self) -> None: ...

    alone(replace(config, train=replace(config.train, steps=3)), Listener())
    left = [(told["amount"], told["to_evaluate"]) for told in heard if "to_evaluate" in told]
    assert left == [(0, 3), (0, 1), (0, 0), (0, 0)]
    assert sum(told["amount"] for told in heard) == 3 and not any("is written" in text for text in notes)


def test_metrics_of_an_earlier_run_are_kept_under_another_name(config):
    folder = Path(config.run.folder)
    alone(config)
    before = (folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder / "checkpoints")
    alone(replace(config, train=replace(config.train, steps=2)))
    assert (folder / "metrics-1.jsonl").read_bytes() == before
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]
    assert "metrics-1.jsonl" in events(config, "note")[-1]["text"]


def test_a_lost_pointer_is_told_and_the_run_goes_on(config):
    config = replace(config, checkpoint=CheckpointSection(interval=2, keep=9))
    alone(config)
    expected = curve(config)
    root = Path(config.run.folder, "checkpoints")
    (root / "latest").write_text("")
    shutil.rmtree(root / "step-6")
    alone(config)
    assert curve(config) == expected
    (told,) = (event["text"] for event in events(config, "note") if "latest" in event["text"])
    assert told.endswith("names no checkpoint of its folder (''); using the newest intact checkpoint, step-4")
    assert (root / "latest").read_text() == "step-6"
