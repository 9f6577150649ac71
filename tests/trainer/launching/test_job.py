"""The record of a launched run, and how its attempts ended."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mdata.errors import DamageError, UsageError
from mdata.util.commands import command_line
from tests.trainer.launching.jobs import a_job
from trainer.launching.job import (
    END_FILE,
    discard,
    ends,
    load_job,
    prepare,
    record_end,
    refuse_restart,
    save_job,
    start_here,
    wait_for_ranks,
)


def test_a_record_is_read_as_it_was_written_and_belongs_to_one_folder(tmp_path):
    job = a_job(tmp_path, nodes=(2, 3))
    assert load_job(Path(job.run_folder)) is None
    prepare(job, "[run]\n")
    save_job(job)
    assert load_job(Path(job.run_folder)) == job and job.config.read_text() == "[run]\n"
    copy = tmp_path / "copy"
    shutil.copytree(job.run_folder, copy)
    with pytest.raises(UsageError, match=f"is the job folder of another run\n  found: a job of {job.run_folder}"):
        load_job(copy)
    for text in ("{", "[]", '{"words": [], "nodes": [], "x": 1}'):
        (job.folder / "job.json").write_text(text)
        with pytest.raises(DamageError, match=r"job\.json is damaged"):
            load_job(Path(job.run_folder))


def test_another_command_is_refused_and_named(tmp_path):
    job = a_job(tmp_path)
    job.refuse_other(replace(job, launches=2, id=""))
    with pytest.raises(UsageError, match=r"(?s)folder of another job.*found: words: run.toml a=1.*mtrain stop"):
        job.refuse_other(replace(job, words=("run.toml", "a=1")))


def test_the_first_rank_that_ends_says_how(tmp_path):
    job = a_job(tmp_path)
    prepare(job, "")
    env = {END_FILE: str(job.folder / "end-7-0")}
    record_end({}, code=2, who="rank 1 on a", message="nobody asks")
    assert ends(job) == []
    record_end(env, code=5, who="rank 3 on b", message="no space\n  try: less")
    record_end(env, code=75, who="rank 0 on a", message="was ended because rank 3 was")
    (end,) = ends(job)
    assert (end.code, end.who, end.message) == (5, "rank 3 on b", "no space\n  try: less")
    os.utime(job.folder / "end-7-0", (1, 1))
    record_end({END_FILE: str(job.folder / "end-7-1")}, code=0, who="rank 0 on a")
    record_end({END_FILE: str(job.folder / "end-8-0")}, code=2, who="of another job")
    (job.folder / "end-7-2").write_text("")  # at this moment another rank creates it
    wait_for_ranks(env, 12)
    refuse_restart(env)
    assert [end.code for end in ends(job)] == [5, 0]
    record_end({END_FILE: str(tmp_path / "none" / "end")}, code=5, who="rank 0")  # a folder that is gone is no reason


def test_a_local_process_is_known_by_its_start_and_leaves_its_log(tmp_path):
    job = a_job(tmp_path, engine="local", ranks_per_node=1, launches=2)
    prepare(job, "not TOML")
    (job.folder / "end-local-2").write_text("0 of an older launch\n")
    started = start_here(job, [*command_line("mtrain"), "train", str(job.config), "--nproc", "1"])
    assert started.is_same_process() and not replace(started, host="elsewhere").is_same_process()
    assert not replace(started, started_ticks=started.started_ticks + 1).is_same_process()
    assert started.log.exists() and ends(started) == []
    os.kill(int(started.id), signal.SIGKILL)
    late = time.monotonic() + 60
    while started.is_same_process():
        assert time.monotonic() < late
        time.sleep(0.05)


def test_a_process_that_ended_before_it_was_looked_at_is_not_alive(tmp_path):
    """One that fails at once: its start could not be read any more."""
    job = a_job(tmp_path, engine="local", ranks_per_node=1, id=str(2**22 + 1), host=os.uname().nodename)
    assert job.started_ticks == 0 and not job.is_same_process()


def test_what_was_not_started_leaves_nothing(tmp_path):
    job = a_job(tmp_path)
    prepare(job, "")
    discard(job)
    assert not Path(job.run_folder).exists()
    prepare(job, "")
    other = Path(job.run_folder) / "metrics.jsonl"
    other.write_text("")
    discard(job)
    assert other.exists() and not job.folder.exists()
