"""One run, one writer: of two live attempts the older one ends, on a disk, without locks and in object storage."""

from __future__ import annotations

import errno
import fcntl
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdata import UsageError
from mdata.object_storage import stores
from mdata.object_storage.uploading import put_if_unchanged
from tests.helpers.runs import make_config
from tests.trainer.run.one_rank import alone, curve, events
from trainer.checkpoint.folder import whole_checkpoints
from trainer.checkpoint.load import verify_checkpoint
from trainer.checkpoint.location import Location, ObjectFolder, location_of
from trainer.config.sections import CheckpointSection, MeshSection, RunConfig
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.run import run_folder
from trainer.run.attempt import ATTEMPT, Attempt, SupersededError, claim, newest_attempt, this_attempt
from trainer.run.run_folder import folder_problems
from trainer.run.step_report import FinishedStep
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def run_in(folder: Path, root: str | None = None) -> RunConfig:
    config = make_config(folder, blend="mock", valid=[], steps=5, eval_interval=None)
    saves = CheckpointSection(interval=2, keep=9, folder=root, background=False)
    return replace(config, mesh=MeshSection(), checkpoint=saves, model=replace(config.model, vocab_size=300))


def train_alone(config: RunConfig, *callbacks: Any) -> None:
    train(config, join_world(Mesh(1), placement=Placement()), callbacks=callbacks)


def at_step(step: int, action: Any) -> Any:
    def callback(finished: FinishedStep) -> None:
        if finished.step == step:
            action()

    return callback


@pytest.mark.parametrize("locks", ["missing", "lost"])
def test_of_two_attempts_on_a_file_system_without_locks_the_older_one_ends(locks, tmp_path, monkeypatch):
    """The lock call fails, or does nothing; the folder then holds the newer attempt's run and nothing of the older."""
    straight, config = run_in(tmp_path / "straight"), run_in(tmp_path / "run")
    alone(straight)

    def flock(fd: int, how: int) -> None:
        if locks == "missing":
            raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(SupersededError) as ended:
        train_alone(config, at_step(3, lambda: alone(config)))
    text = str(ended.value)
    assert f"found: attempt 2 of process {this_attempt({}).process} on {this_attempt({}).host}" in text
    assert "expected: attempt 1 of " in text and ended.value.exit_code == 5
    assert curve(config) == curve(straight)
    assert [start["attempt"] for start in events(config, "start")] == [1, 2]
    assert [event["step"] for event in events(config, "saved")] == [2, 4, 5]


def test_the_older_attempt_commits_no_checkpoint(tmp_path):
    """It may come to one before it writes a line."""
    config = run_in(tmp_path)
    config = replace(config, run=replace(config.run, log_interval=5))
    with pytest.raises(SupersededError, match="the checkpoint of step 4 was not written"):
        train_alone(config, at_step(3, lambda: claim(tmp_path, this_attempt({}))))
    assert [folder.name for folder in whole_checkpoints(tmp_path / "checkpoints")] == ["step-2"]
    assert not list(tmp_path.glob("checkpoints/.step*"))


def test_a_requeued_job_takes_the_folder_from_ranks_that_live_on(tmp_path, monkeypatch):
    """They hold the lock until they have seen the newer claim; another job is refused at once."""
    straight, config = run_in(tmp_path / "straight"), run_in(tmp_path / "run")
    alone(straight)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    trains, taken, errors = threading.Event(), threading.Event(), list[BaseException]()

    def old() -> None:
        def wait() -> None:
            trains.set()
            taken.wait(30)

        try:
            train_alone(config, at_step(3, wait))
        except SupersededError as error:
            errors.append(error)

    thread = threading.Thread(target=old)
    thread.start()
    assert trains.wait(60)
    with pytest.raises(UsageError, match=r"\.lock is held"):
        train_alone(config)  # the same job, not requeued: somebody started it twice
    assert [problem for problem in folder_problems(config) if "is in use" in problem]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not list(folder_problems(config))
    monkeypatch.setattr(run_folder, "claim", lambda *given: (claim(*given), taken.set())[0])
    train_alone(config)
    thread.join(60)
    assert len(errors) == 1 and "attempt 2 of process" in str(errors[0]) and "(slurm 7)" in str(errors[0])
    assert curve(config) == curve(straight)


def test_a_lock_that_nobody_gives_up_holds_a_requeued_job_for_a_while_only(tmp_path, monkeypatch):
    config = run_in(tmp_path)
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks")))
    monkeypatch.setattr(run_folder, "TAKE_OVER_S", 0.3)
    claim(tmp_path, replace(this_attempt({"SLURM_JOB_ID": "7"}), host="gone"))
    (tmp_path / ".lock").write_text("process 1 on gone")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.raises(UsageError, match=r"\.lock is held"):
        train_alone(config)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train_alone(config)
    assert len(curve(config)) == 5


@pytest.mark.parametrize("conditional", [True, False])
def test_of_two_attempts_in_object_storage_the_older_one_ends(conditional, server, bucket, tmp_path, monkeypatch):
    """On machines without a common disk; storage without conditional puts lets the last writer win."""
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.01)
    if not conditional:
        from obstore import exceptions

        put = __import__("obstore").put

        def plain_put(*given: Any, mode: Any = None, **more: Any) -> Any:
            if mode is not None:
                raise exceptions.NotSupportedError("no conditional puts")
            return put(*given, **more)

        monkeypatch.setattr("obstore.put", plain_put)
    root = location_of(f"{bucket}/run")
    older, newer = (run_in(tmp_path / name, str(root)) for name in ("older", "newer"))
    with pytest.raises(SupersededError, match=f"has taken over {root}") as ended:
        train_alone(older, at_step(3, lambda: alone(newer)))
    assert "the checkpoint of step 4 was not written" in str(ended.value)
    assert "attempt 2 of process" in str(ended.value)
    assert [folder.name for folder in whole_checkpoints(root)] == ["step-5", "step-4", "step-2"]
    for name in ("step-5", "step-4"):
        verify_checkpoint(root / name)
    assert newest_attempt(root) == replace(ended_attempt(newer), attempt=2)


def ended_attempt(config: RunConfig) -> Attempt:
    found = newest_attempt(Path(config.run.folder))
    assert found is not None
    return found


def test_claims_are_counted_and_the_last_one_counts(tmp_path):
    first, second = this_attempt({}), this_attempt({})
    assert (claim(tmp_path, first), claim(tmp_path, second)) == (1, 2)
    second.check(tmp_path)
    with pytest.raises(SupersededError):
        first.check(tmp_path)
    assert not list(tmp_path.glob(".attempt*"))
    (tmp_path / ATTEMPT).write_text("{torn")
    with pytest.raises(SupersededError, match=r"unreadable attempt\.json"):
        second.check(tmp_path)
    assert claim(tmp_path, first) == 1
    (tmp_path / ATTEMPT).unlink()
    first.check(tmp_path)  # names no newer attempt


def test_claims_at_the_same_moment_leave_one_owner(tmp_path):
    attempts = [this_attempt({}) for _ in range(16)]
    threads = [threading.Thread(target=claim, args=(tmp_path, attempt)) for attempt in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def owns(attempt: Attempt) -> bool:
        try:
            attempt.check(tmp_path)
        except SupersededError:
            return False
        return True

    assert [owns(attempt) for attempt in attempts].count(True) == 1
    assert not list(tmp_path.glob(".attempt*"))


def test_conditional_puts_number_claims_one_after_another(bucket, monkeypatch):
    """Also for two that have read the same state."""
    root: Location = location_of(f"{bucket}/run")
    assert isinstance(root, ObjectFolder)
    place = (root / ATTEMPT).address
    assert put_if_unchanged(b"{}", place, etag=None)
    assert not put_if_unchanged(b"{ }", place, etag=None)
    assert not put_if_unchanged(b"{ }", place, etag='"0123"')
    attempts = [this_attempt({}) for _ in range(4)]
    numbers = list[int]()
    threads = [threading.Thread(target=lambda a=a: numbers.append(claim(root, a))) for a in attempts]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("env", "before", "restarts"),
    [
        ({}, {}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "7"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "8"}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none"}, False),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "a"}, True),
        ({"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "7"}, {"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "7"}, True),
    ],
)
def test_only_the_same_job_started_again_takes_over(env, before, restarts):
    assert this_attempt(env).restarts(this_attempt(before)) is restarts
    assert not this_attempt(env).restarts(None)


def test_an_attempt_is_one_small_object_of_json(tmp_path):
    claim(tmp_path, this_attempt({"SLURM_JOB_ID": "7"}))
    assert json.loads((tmp_path / ATTEMPT).read_text()).keys() == {
        "attempt",
        "nonce",
        "host",
        "process",
        "time_s",
        "job",
        "restart",
    }
