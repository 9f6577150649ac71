"""Saves in the background: what is told and when, failures, and a run that is killed while one is in flight."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mdata
from tests.helpers.examples import SOAK
from tests.helpers.notes import Notes
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_config, make_mix
from tests.trainer.run.one_rank import alone, curve, events
from trainer.checkpoint import background
from trainer.checkpoint.folder import latest_checkpoint, step_of, whole_checkpoints
from trainer.config.sections import CheckpointSection, MeshSection, OptimizerSection, RunConfig
from trainer.errors import rank_here
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.run import after_step, saving
from trainer.run.engine import Engine
from trainer.run.metrics import read_metrics
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("corpora")
    mix = {**make_mix(folder, ["first", "second", "held"]), "mix": folder / "mix.json"}

    def made(run: Path, **keys: Any) -> RunConfig:
        config = make_config(run, blend=mix["mix"], valid=[mix["held"]], steps=6, eval_interval=None, eval_samples=5)
        optimizer = OptimizerSection(lr=1e-2, warmup_steps=1)
        checkpoint = CheckpointSection(**{"interval": 2, "keep": 9, **keys})
        return replace(config, mesh=MeshSection(), optimizer=optimizer, checkpoint=checkpoint)

    return made


def steps_saved(config: RunConfig) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(config.run.folder, "checkpoints").glob("step-*"))


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No save is written before the event is set."""
    go, real = threading.Event(), background.write_part

    def write_part(*args: Any, **options: Any) -> None:
        assert go.wait(60)
        real(*args, **options)

    monkeypatch.setattr(background, "write_part", write_part)
    return go


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Any) -> None:
    """Do something before the engine's n-th step."""
    real, calls = Engine.step, [0]

    def step(self: Engine, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            action()
        return real(self, *arguments, **options)

    monkeypatch.setattr(Engine, "step", step)


def test_training_goes_on_while_a_checkpoint_is_written_and_saved_is_told_when_it_is_true(
    config_of, tmp_path, held_back, monkeypatch
):
    config = config_of(tmp_path / "run", interval=2)
    seen: list[Any] = []

    def look() -> None:
        seen.append((steps_saved(config), events(config, "saved")))
        held_back.set()

    at_step(monkeypatch, 4, look)  # step 3 was done while the save of step 2 waited
    alone(config)
    assert seen == [([], [])]
    assert [event["step"] for event in events(config, "saved")] == [2, 4, 6]
    assert steps_saved(config) == [2, 4, 6]


class Lines(Notes):
    """Notes and progress in one list, as a log shows them."""

    def advance(self, amount: int, **totals: float) -> None:
        if amount:
            self.lines.append(f"step {totals['step']:.0f} of the progress")


@pytest.mark.parametrize("interval", [None, 3])
def test_a_checkpoint_is_told_before_the_lines_of_later_steps(config_of, tmp_path, held_back, monkeypatch, interval):
    """That of step 2, which is written while step 4 runs, or while step 3 is evaluated."""
    config = config_of(tmp_path / "run", interval=2)
    config = replace(config, train=replace(config.train, steps=4, eval_interval=interval))

    saves, real_save = list[Any](), background.BackgroundSave.__init__

    def save(self: Any, *args: Any, **options: Any) -> None:
        saves.append(self)
        real_save(self, *args, **options)

    def written() -> None:
        held_back.set()
        while not saves[0].committed:
            time.sleep(0.01)

    monkeypatch.setattr(background.BackgroundSave, "__init__", save)
    if interval:
        real = after_step.evaluate_sets
        monkeypatch.setattr(after_step, "evaluate_sets", lambda *args, **more: (written(), real(*args, **more))[1])
    else:
        at_step(monkeypatch, 4, written)
    log = Lines()
    train(config, join_world(Mesh(1), placement=Placement()), progress=log)
    (told,) = [place for place, line in enumerate(log.lines) if line.startswith("step 2: checkpoint step-2")]
    later = "step 3: validation" if interval else "step 4 of the progress"
    assert told < next(place for place, line in enumerate(log.lines) if line.startswith(later))


def test_what_is_saved_is_the_state_of_its_step(config_of, tmp_path, held_back, monkeypatch):
    """Steps that are done while it is written do not get into it."""
    other = config_of(tmp_path / "other", background=False)
    held_back.set()
    alone(other)
    held_back.clear()
    config = config_of(tmp_path / "run")
    at_step(monkeypatch, 4, held_back.set)
    alone(config)
    for step in (2, 4, 6):
        first, second = (
            Path(c.run.folder, "checkpoints", f"step-{step}", "rank-00000.safetensors").read_bytes()
            for c in (config, other)
        )
        assert first == second, step


def test_a_second_save_waits_for_the_first_and_says_so(config_of, tmp_path, held_back, monkeypatch):
    config = config_of(tmp_path / "run", interval=2)
    real = background.BackgroundSave.ended.fget

    def ended(self: Any) -> bool:
        before = bool(real(self))  # asked when the second save is due; only then the first may be written
        held_back.set()
        return before

    monkeypatch.setattr(background.BackgroundSave, "ended", property(ended))
    alone(config)
    assert steps_saved(config) == [2, 4, 6]
    waited = events(config, "save waited")
    assert (waited[0]["step"], waited[0]["for"]) == (4, 2)


def failing_write(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The n-th save finds a full disk."""
    real, calls = background.write_part, [0]

    def write_part(*args: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise OSError(errno.ENOSPC, "No space left on device", "rank-00000.safetensors")
        real(*args, **options)

    monkeypatch.setattr(background, "write_part", write_part)


def test_a_failure_ends_the_run_and_leaves_the_older_checkpoint(config_of, tmp_path, monkeypatch):
    config = config_of(tmp_path / "run")
    with monkeypatch.context() as patch:
        failing_write(patch, 2)
        with pytest.raises(mdata.ResourceError, match=r"the checkpoint of step 4 was not written; .*No space left"):
            alone(config)
    assert steps_saved(config) == [2]
    assert [event["step"] for event in events(config, "save failed")] == [4]
    alone(config)
    assert steps_saved(config) == [2, 4, 6]


def test_a_failure_is_told_and_training_goes_on_if_it_may(config_of, tmp_path, monkeypatch):
    config = config_of(tmp_path / "run", on_failure="continue")
    with monkeypatch.context() as patch:
        failing_write(patch, 2)
        notes = alone(config)
    assert steps_saved(config) == [2, 6]
    assert any("the checkpoint of step 4 was not written; the older ones are intact" in line for line in notes.lines)
    for background_too in (True, False):
        with monkeypatch.context() as patch:
            failing_write(patch, 3)
            other = config_of(tmp_path / f"{background_too}", on_failure="continue", background=background_too)
            with pytest.raises(mdata.ResourceError, match="No space left"):  # the last one is needed
                alone(other)


def test_too_little_disk_is_said_before_training_and_before_a_save(config_of, tmp_path, monkeypatch):
    from trainer.checkpoint import save

    usage = [1 << 40]
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: type("Usage", (), {"total": 1 << 40, "free": usage[0]}))
    at_step(monkeypatch, 4, lambda: usage.__setitem__(0, 1000))
    with pytest.raises(mdata.ResourceError, match="a checkpoint does not fit into"):
        alone(config_of(tmp_path / "run"))
    assert steps_saved(config_of(tmp_path / "run")) == [2]
    with pytest.raises(mdata.ResourceError, match="found: 1000 bytes free"):
        alone(config_of(tmp_path / "other"))
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_an_error_while_a_save_is_in_flight_lets_it_end(config_of, tmp_path, held_back, monkeypatch):
    config = config_of(tmp_path / "run")

    class Broken(Exception):
        pass

    def broken() -> None:
        threading.Timer(0.2, held_back.set).start()
        raise Broken

    at_step(monkeypatch, 4, broken)
    with pytest.raises(Broken):
        alone(config)
    assert steps_saved(config) == [2] and [event["step"] for event in events(config, "saved")] == [2]
    assert latest_checkpoint(Path(config.run.folder, "checkpoints")).name == "step-2"


def test_the_best_and_every_nth_are_kept(config_of, tmp_path):
    config = config_of(tmp_path / "run", interval=1, keep=1, keep_every=4, keep_best=1)
    config = replace(config, train=replace(config.train, eval_interval=1))
    alone(config)
    losses = {line["step"]: line["valid"]["held"] for line in read_metrics(Path(config.run.folder))}
    best = min(losses, key=lambda step: losses[step])
    assert steps_saved(config) == sorted({4, best, 6})


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])  # a file server restarts; a user removes one, too
def test_a_checkpoint_exists_though_the_older_ones_cannot_be_removed(number, config_of, tmp_path, monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "step-2/tokenizer")

    monkeypatch.setattr(saving, "remove_old", fails)
    config = config_of(tmp_path / "run", keep=1)
    alone(config)
    assert steps_saved(config) == [2, 4, 6]
    assert [event["step"] for event in events(config, "saved")] == [2, 4, 6]


def _one_fails(context: Any, config: RunConfig) -> str:
    real, calls = background.write_part, [0]

    def write_part(*args: Any, **options: Any) -> None:
        calls[0] += 1
        if context.rank == 1 and calls[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device", "x")
        real(*args, **options)

    background.write_part = write_part
    try:
        train(config, context.join(Mesh(context.world, config.mesh.tp)))
    except mdata.ResourceError as error:
        return str(error)
    finally:
        background.write_part = real
    return ""


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_what_one_rank_could_not_write_is_settled_by_all(policy, config_of, tmp_path):
    config = config_of(tmp_path / "run", on_failure=policy)
    messages = run_ranks(_one_fails, 2, config)
    if policy == "stop":
        assert all(f"{rank_here(1)} writing a checkpoint" in message for message in messages)
        assert steps_saved(config) == [2]
    else:
        assert messages == ["", ""] and steps_saved(config) == [2, 6]
    assert not list(Path(config.run.folder, "checkpoints").glob(".step-*"))


def test_damage_is_passed_over_by_latest_valid(config_of, tmp_path):
    config = config_of(tmp_path / "run")
    alone(config)
    straight = curve(config)
    path = Path(config.run.folder, "checkpoints", "step-6", "rank-00000.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    longer = replace(config, checkpoint=replace(config.checkpoint, load="latest-valid"))
    notes = alone(longer)
    assert any("using step-4, the newest valid checkpoint" in line for line in notes.lines)
    assert curve(longer) == straight


def test_a_run_that_has_ended_removes_what_a_kill_after_its_last_step_left(config_of, tmp_path):
    config = config_of(tmp_path / "run", keep=9)
    alone(config)
    checkpoints = Path(config.run.folder, "checkpoints")
    for name in (".step-4.removed", ".step-6.0123abcd-6.partial"):
        (checkpoints / name).mkdir()
    alone(replace(config, checkpoint=replace(config.checkpoint, keep=1)))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-6"]


KILLS = 50 * SOAK if SOAK > 1 else 4  # 1,000 in `make soak`


@pytest.mark.scaled
@pytest.mark.slow
def test_a_run_that_is_killed_at_any_time_goes_on_bit_for_bit(config_of, tmp_path):
    """kill -9 at seeded moments with saves in flight at every step, again and again, until the run is done.

    In `make soak` many times more kills: a child is a fork, so that it costs no start of Python.
    """
    straight = config_of(tmp_path / "straight", interval=1, keep=2)
    straight = replace(straight, train=replace(straight.train, steps=12))
    began = time.monotonic()
    _in_child(straight, None)
    whole = time.monotonic() - began
    expected = curve(straight)
    chance = random.Random(7)
    kills = run = 0
    while kills < KILLS:
        run += 1
        config = replace(straight, run=replace(straight.run, folder=str(tmp_path / f"run-{run}")))
        while _in_child(config, chance.uniform(0.2, 1.0) * whole):
            kills += 1
        assert curve(config) == expected, f"run {run}, seed 7"
        # Kills after a save and before older checkpoints were removed leave those, until the next save.
        saved = steps_saved(config)
        assert saved[-2:] == [11, 12], saved
        assert [step_of(path) for path in whole_checkpoints(Path(config.run.folder, "checkpoints"))] == saved[::-1]
    print(f"{kills} kills in {run} runs")


def _in_child(config: RunConfig, after_s: float | None) -> bool:
    """Train in a forked process that is killed after so many seconds; whether it was."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            alone(config)
            code = 0
        finally:
            os._exit(code)
    timer = threading.Timer(after_s, os.kill, (pid, signal.SIGKILL)) if after_s is not None else None
    if timer:
        timer.start()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if timer:
        timer.cancel()
        timer.join()
    assert status in (0, -signal.SIGKILL), status
    return status != 0
