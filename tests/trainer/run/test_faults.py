"""Seeded faults of ranks in real runs: each is named, ends the run within a minute or not at all, and leaves nothing.

Drawn: what goes wrong, on which of two or three ranks, and after which step. Most have ticks of 0.2 s in place of 4 s.
"""

from __future__ import annotations

import random
import re
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from mdata import ResourceError
from tests.helpers.small_disk import missing, small_disk
from tests.trainer.run.faulty_rank import SAVES
from tests.trainer.run.test_end_time import run_in
from trainer.config.parse import dump_config
from trainer.config.sections import CheckpointSection
from trainer.run.excluded_hosts import excluded_hosts
from trainer.run.launch import launch
from trainer.run.metrics import read_metrics
from trainer.run.rank_times import held_up_text

KINDS = ("kill", "stop", "hang", "slow", "never", "disk", "link", "clock", "pause", "own disk")
MESSAGES = {
    "kill": r"rank {rank} (was killed by SIGKILL|of {world} on node{rank} does not respond)",
    "stop": r"rank {rank} of {world} on node{rank} does not respond",
    "hang": r"all ranks wait for each other\n.*rank {rank} on node{rank} in all_reduce_ over other",
    "never": r"rank {rank} of {world} did not start",
    "disk": r"rank \d on node\d.*: No space left on device|does not fit into .*\n.* free on node0",
    "own disk": r"rank {rank} on node{rank} writing a checkpoint: .*No space left|\n.* free on node{rank}\n",
    "link": r"rank {low} on node{low}, cpu and rank {high} on node{high}, cpu: .* GB/s between them",
    "clock": r"rank {rank} on node{rank}, cpu: its clock is 9\d\.\d s ahead of the median",
}
JOIN_S = 20.0  # the other ranks start that close to each other, also beside other work
FOUND_AT_THE_START = ("link", "clock")
SURVIVED = ("slow", "pause")
pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(400)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a folder for the temporary files of the ranks."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return tmp_path


def _left_behind(folder: Path) -> list[str]:
    """Ranks, their shared memory, temporary files; the next start removes what a killed rank wrote of a checkpoint."""
    pids = {path.read_text() for path in (folder / "reports").glob("listens-*")}
    found = [str(path) for path in (folder / "temporary").iterdir()]
    found += [str(path) for path in Path("/dev/shm").iterdir() if pids & set(re.findall(r"\d+", path.name))]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            words = path.read_bytes().split(b"\0")
            if b"tests.trainer.run.faulty_rank" in words and str(folder / "reports").encode() in words:
                found.append(str(path))
    return found


def _run(folder: Path, seed: int, tick_s: float, capfd: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(seed)
    kind, world = KINDS[seed % len(KINDS)], draw.choice([2, 3])
    world = 3 if kind in FOUND_AT_THE_START else world  # two cannot tell which of them is off
    rank, step = draw.randrange(world), draw.randint(2, 40)
    low, high = sorted((rank, (rank + 1) % world))
    config = run_in(
        folder / "run",
        join_minutes=max(12 * tick_s, JOIN_S) / 60 if kind == "never" else 5.0,
        health="stop" if kind in FOUND_AT_THE_START else "warn",
        log_interval=10 if kind == "slow" else 1,
    )
    steps = step + 20 if kind == "pause" else 10**6
    config = replace(config, train=replace(config.train, steps=steps, micro_batch=1, global_batch=6))
    config = replace(config, checkpoint=CheckpointSection(interval=SAVES, minutes=0.0))
    if kind.endswith("disk") and (reason := missing()):
        pytest.skip(reason)
    reports = folder / "reports"
    reports.mkdir()
    (reports / "config.toml").write_text(dump_config(config))
    words = [sys.executable, "-m", "tests.trainer.run.faulty_rank", str(reports), kind, str(rank), str(step)]
    drawn = f"{kind} on {rank} of {world} at {step}"
    if kind in SURVIVED:
        launch([*words, str(tick_s)], nproc=world, reports=reports)
        said = capfd.readouterr().err
        if kind == "slow":
            _check_slow_rank(folder / "run", rank, said)
        else:
            assert read_metrics(folder / "run")[-1]["step"] == steps
            # The first rank watches: nobody says that all wait for it.
            assert rank == 0 or f"the other ranks wait for rank {rank} on node{rank}: " in said
    else:
        disk = small_disk(folder / "run", 4096) if kind == "disk" else nullcontext()
        with pytest.raises(ResourceError) as error, disk:
            launch([*words, str(tick_s)], nproc=world, reports=reports)
        assert (reports / "fault").exists(), f"{drawn}, before it: {error.value}"
        took_s = time.time() - float((reports / "fault").read_text())
        message = MESSAGES[kind].format(rank=rank, world=world, low=low, high=high)
        assert re.search(message, str(error.value)), f"{drawn}: {error.value}"
        assert took_s <= 60, drawn
    assert not _left_behind(folder)


def _check_slow_rank(run: Path, rank: int, said: str) -> None:
    """Named by the health check, for the scheduler's next start, and from then on in the lines of most steps."""
    assert re.search(rf"health: rank {rank} on node{rank}, cpu: .* TFLOP/s in matrix products, \d+% below", said), said
    assert f"node{rank}" in excluded_hosts(run)
    texts = [held_up_text(line["ranks"]) for line in read_metrics(run) if "ranks" in line]
    named = [text for text in texts if text.startswith(f"rank {rank} on node{rank} holds up ")]
    assert len(named) > len(texts) / 2, texts[:: len(texts) // 10 + 1]


@pytest.mark.parametrize("seed", range(len(KINDS)), ids=KINDS)
def test_a_fault_of_each_kind(seed, folder, capfd):
    _run(folder, seed, 0.2, capfd)


@pytest.mark.parametrize("seed", range(len(KINDS), 240))
def test_a_fault_is_named_and_leaves_nothing(seed, folder, capfd):
    _run(folder, seed, 0.2, capfd)


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_a_fault_is_named_within_a_minute(seed, folder, capfd):
    _run(folder, seed, 4.0, capfd)
