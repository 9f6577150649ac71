"""Ranks as processes: one error out of many, exit codes, signals, and nobody left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import mdata
from mdata import DamageError, MdataError, ResourceError, StoppedError, UsageError
from tests.helpers.processes import is_alive, wait_until
from tests.helpers.runs import make_mix
from tests.trainer.plan.test_plan import config
from trainer.config.parse import ReadConfig, dump_config, read_config
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.run import launch as launch_module
from trainer.run.launch import (
    READER_GONE,
    RankFault,
    RankReport,
    default_nproc,
    first_cause,
    launch,
    preflight,
    read_reports,
    write_report,
)
from trainer.run.train import train

pytestmark = pytest.mark.slow  # it starts many processes
ROOT = Path(__file__).parents[3]
RANK = """
import os, signal, sys, time
from pathlib import Path
from mdata import DamageError, ResourceError, StoppedError, UsageError
from mdata.util.commands import die_with_parent
from trainer.run.launch import write_report
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
def stop(number, frame):
    raise StoppedError("asked to stop")
die_with_parent()
try:
    signal.signal(signal.SIGTERM, stop)
{body}
except BaseException as error:
    sys.exit(write_report(folder, error, rank=rank))
"""
PARENT = """
import sys
from pathlib import Path
from cli.console import Command, run
from trainer.run.launch import launch
def add_arguments(parser): pass
def main(arguments, console): launch([sys.executable, sys.argv[1], sys.argv[2]], nproc=2, reports=Path(sys.argv[2]))
if __name__ == "__main__":
    sys.exit(run("mtrain", (Command("go", "goes", module="__main__"),), description="a test", argv=["go"]))
"""
Start = Callable[..., None]


@pytest.fixture
def rank_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, Path]]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def write(body: str) -> tuple[str, Path]:
        script, reports = tmp_path / "rank.py", tmp_path / "reports"
        script.write_text(RANK.format(body=textwrap.indent(textwrap.dedent(body), "    ")))
        reports.mkdir()
        return str(script), reports

    return write


def run_body(rank_script: Callable[[str], tuple[str, Path]], body: str, nproc: int = 2) -> Path:
    script, reports = rank_script(body)
    launch([sys.executable, script, str(reports)], nproc=nproc, reports=reports)
    return reports


def test_each_rank_gets_its_place(rank_script):
    body = """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    (folder / f"out-{rank}").write_text(" ".join(os.environ[name] for name in names))
    """
    reports = run_body(rank_script, body, nproc=3)
    assert [(reports / f"out-{r}").read_text() for r in range(3)] == ["0 3 0 3", "1 3 1 3", "2 3 2 3"]


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        ("UsageError('wrong', fix='do')", UsageError, "wrong\n  try: do"),
        ("DamageError('torn')", DamageError, "torn"),
        ("OSError(28, 'full', 'x.bin')", ResourceError, "x.bin: No space left on device\n  try: free"),
        ("KeyError('k')", RankFault, "rank 1: KeyError: 'k'"),
    ],
)
def test_the_error_of_a_rank_becomes_ours(rank_script, capfd, raised, kind, text):
    # The other rank complains of the lost connection a little later.
    body = f"""
    if rank == 1:
        raise {raised}
    time.sleep(600)
    """
    with pytest.raises(kind) as error:
        run_body(rank_script, body)
    assert str(error.value).startswith(text)
    assert "Traceback" in "".join(error.value.__notes__) and "Traceback" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_killed_rank_is_told(rank_script, capfd):
    body = """
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    """
    with pytest.raises(ResourceError, match="rank 0 was killed by SIGKILL\n"):
        run_body(rank_script, body)
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_the_launcher_has_to_kill_is_not_the_cause(rank_script, monkeypatch):
    monkeypatch.setattr(launch_module, "LAUNCHER_PATIENCE_S", 0.5)
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"begun-{rank}").touch()
    if rank == 1:
        while not (folder / "begun-0").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    """
    with pytest.raises(ResourceError, match="rank 1 was killed by SIGKILL\n"):
        run_body(rank_script, body)


@pytest.mark.parametrize("code", [READER_GONE, 3])
def test_a_rank_that_the_launcher_asks_to_stop_is_not_the_cause(rank_script, code):
    """It reports that, and the one that ended by itself reports nothing."""
    body = f"""
    if rank == 0:
        while not (folder / "begun-1").exists():
            time.sleep(0.05)
        os._exit({code})
    (folder / "begun-1").touch()
    time.sleep(600)
    """
    with nullcontext() if code == READER_GONE else pytest.raises(MdataError, match="rank 0 ended with exit code 3"):
        run_body(rank_script, body)


def test_a_rank_that_sigterm_ends_before_it_can_answer_is_told(rank_script):
    body = """
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    while not (folder / "over").exists():
        time.sleep(0.05)
    """
    with pytest.raises(StoppedError, match="rank 1 was stopped by SIGTERM"):
        run_body(rank_script, body)


def test_a_stopped_rank_is_killed_as_soon_as_another_names_it(rank_script, tmp_path):
    """It does not answer the launcher's SIGTERM, which waits half a minute for it."""
    body = """
    from trainer.run.launch import SilentRanksError, listen
    if rank == 1:
        listen(folder, rank=rank)
        os.kill(os.getpid(), signal.SIGSTOP)
    while not (folder / "listens-1").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    (folder / "named").touch()
    error = SilentRanksError("rank 1 of 2 does not respond")
    error.ranks = (1,)
    raise error
    """
    with pytest.raises(ResourceError, match="rank 1 of 2 does not respond"):
        run_body(rank_script, body)
    assert time.time() - (tmp_path / "reports" / "named").stat().st_mtime < launch_module.LAUNCHER_PATIENCE_S / 2


NAMING = """
import os, pathlib, sys
from trainer.run.launch import SilentRanksError, listen, write_report
listen(folder := pathlib.Path(sys.argv[1]), rank=0)
error = SilentRanksError("ranks do not respond")
error.ranks = (0, 1, 2)
os._exit(write_report(folder, error, rank=0))
"""


def test_a_rank_that_names_others_kills_its_siblings_alone(tmp_path):
    """Not itself, if it goes on and hears of it; nor a process that got the number of one that has ended."""
    with (
        subprocess.Popen(["sleep", "60"]) as sibling,
        subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent,
    ):
        assert parent.stdout is not None
        stranger = int(parent.stdout.readline())
        try:
            for rank, pid in enumerate((sibling.pid, stranger), start=1):
                (tmp_path / f"listens-{rank}").write_text(str(pid))
            done = subprocess.run([sys.executable, "-c", NAMING, tmp_path], cwd=ROOT, check=False)
            assert done.returncode == 5 and [report.rank for report in read_reports(tmp_path)] == [0]
            assert sibling.wait(10) == -signal.SIGKILL
            assert is_alive(stranger)
        finally:
            sibling.kill()
            if is_alive(stranger):
                os.kill(stranger, signal.SIGKILL)


@pytest.mark.parametrize("call", ["rank._end(Path('no/folder'), error, rank=0)", "train._end(None, error)"])
def test_the_watchdog_ends_a_rank_that_cannot_tell_why(call, tmp_path):
    """Its main thread waits for a lost rank: an exception in the watchdog's thread would end nothing."""
    code = (
        f"import sys, threading; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path\n"
        "from cli import mtrain_rank as rank, mtrain_train as train; from trainer.run.launch import SilentRanksError\n"
        "error = SilentRanksError('rank 1 does not respond')\n"
        f"thread = threading.Thread(target=lambda: {call}); thread.start(); thread.join()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 5, done.stderr


def test_a_rank_that_cannot_leave_a_report_prints_it(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path\n"
        "from cli import mtrain_rank as rank\n"
        "sys.exit(rank._report(Path('no/folder'), OSError(28, 'full', 'x.bin'), rank=0))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 5 and done.stderr.startswith("mtrain: error: x.bin: No space left on device\n  try: ")


def test_signal_handlers_are_put_back(rank_script):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run_body(rank_script, "pass")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def report(rank: int, exit_code: int, time_s: float) -> RankReport:
    return RankReport(rank=rank, exit_code=exit_code, message=f"of {rank}", time_s=time_s)


def lost(rank: int, time_s: float) -> RankReport:
    return dataclasses.replace(report(rank, 5, time_s), lost=True)


@pytest.mark.parametrize(
    ("reports", "codes", "rank"),
    [
        ([report(0, 1, 1.0), report(1, 2, 2.0)], {}, 1),  # explained wins over a lost connection
        ([report(0, 2, 2.0), report(1, 2, 1.0)], {}, 1),  # the earlier of two
        ([report(0, 1, 1.0)], {0: 1, 1: -9}, 1),  # a killed rank explains a lost connection
        ([report(0, 75, 2.0), report(1, 1, 1.0)], {0: 75, 1: 1}, 1),  # stopped because the other failed
        ([report(0, 1, 2.0), report(1, 75, 1.0)], {0: 1, 1: 75}, 1),  # stopped from outside: the other lost it
        ([report(0, 5, 2.0), report(1, 75, 1.0)], {0: 5, 1: 75}, 1),  # whatever it says of that
        ([report(0, 75, 1.0)], {0: 75, 1: -9}, 1),  # stopped by the launcher, because the other was killed
        ([report(0, 75, 1.0)], {0: 75, 1: -15}, 0),  # both were stopped from outside
        ([lost(0, 1.0)], {0: 5, 1: -15}, 1),  # this one alone
        ([lost(0, 1.0), report(1, 2, 2.0)], {0: 5, 1: 2}, 1),  # a lost connection explains nothing either
        ([lost(0, 1.0), report(1, 1, 2.0)], {0: 5, 1: 1}, 1),
        ([lost(0, 1.0)], {0: 5, 1: -9}, 1),
        ([lost(0, 1.0), report(1, 75, 2.0)], {0: 5, 1: 75}, 0),
        ([], {0: 1}, 0),
        ([], {0: -15, 1: -15}, 0),
        ([], {}, -1),
    ],
)
def test_the_first_cause(reports, codes, rank):
    assert first_cause(reports, codes).rank == rank


def test_a_report_is_read_as_written(tmp_path):
    assert write_report(tmp_path, StoppedError("later"), rank=3) == 75
    assert write_report(tmp_path, ValueError("broken"), rank=1) == 1
    assert write_report(tmp_path, KeyboardInterrupt(), rank=2) == 130
    found = read_reports(tmp_path)
    assert [(r.rank, r.exit_code, r.message) for r in found] == [
        (1, 1, "rank 1: ValueError: broken"),
        (2, 130, "interrupted"),
        (3, 75, "later"),
    ]


def test_a_report_needs_no_torch(tmp_path):
    """A rank that is stopped while it imports torch cannot import it again, and has to write its report."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from mdata import StoppedError; from trainer.run.launch import write_report\n"
        "sys.exit(write_report(Path(sys.argv[1]), StoppedError('stopped'), rank=0))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (75, "")
    assert [report.message for report in read_reports(tmp_path)] == ["stopped"]


LISTENING = """
from trainer.run.launch import listen
def note(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends all when one has ended
    (folder / f"heard-{rank}").write_text(str(number))
    time.sleep(rank)  # as long as a checkpoint takes; nobody waits for it with a clock
    if (folder / "fails").exists():
        raise ResourceError("no room for a checkpoint")
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise StoppedError("saved and stopped")
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGINT, note)
(folder / f"pid-{rank}").write_text(str(os.getpid()))
listen(folder, rank=rank)
time.sleep(600)
"""
WAITING = """
(folder / f"pid-{rank}").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def parent(request, rank_script, tmp_path: Path):
    """A command whose two ranks wait; (process, pids of the ranks)."""
    script, reports = rank_script(getattr(request, "param", WAITING))
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    words = [sys.executable, str(program), script, str(reports)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    pids: list[int] = []
    try:
        files = [reports / f"pid-{rank}" for rank in range(2)]
        wait_until(lambda: process.poll() is not None or all(f.exists() and f.read_text() for f in files))
        assert process.poll() is None, process.stderr.read()
        pids += [int(file.read_text()) for file in files]
        yield process, pids
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        for pid in filter(is_alive, pids):  # only where the test has failed
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGINT, 130, "mtrain: interrupted\n"),
        pytest.param(signal.SIGTERM, 75, "mtrain: error: asked to stop\n", marks=pytest.mark.soak),
    ],
)
def test_a_stopped_command_leaves_no_rank(parent, number, code, text):
    process, pids = parent
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, text)
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("parent", [LISTENING], indirect=True)
@pytest.mark.parametrize(
    ("number", "fails", "code", "text"),
    [
        pytest.param(signal.SIGINT, False, 130, "mtrain: interrupted\n", marks=pytest.mark.soak),
        pytest.param(signal.SIGTERM, False, 75, "mtrain: error: saved and stopped\n", marks=pytest.mark.soak),
        (signal.SIGTERM, True, 5, "mtrain: error: no room for a checkpoint\n"),
    ],
)
def test_a_signal_is_handed_on_to_ranks_that_listen(parent, number, fails, code, text, tmp_path):
    """The command alone gets it; the ranks hear the same one and end by themselves, each in its time."""
    process, pids = parent
    reports = tmp_path / "reports"
    wait_until(lambda: len(list(reports.glob("listens-*"))) == 2)
    if fails:
        (reports / "fails").touch()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, text)
    assert {(reports / f"heard-{rank}").read_text() for rank in range(2)} == {str(int(number))}
    assert not any(map(is_alive, pids))


def test_a_killed_command_leaves_no_rank(parent):
    process, pids = parent
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ({"tp": 2}, 2),
        ({"tp": 1, "ep": 4}, 4),
        ({"tp": 2, "ep": 4}, 8),
        ({"tp": 2, "cp": 2, "pp": 3}, 12),
        ({"tp": 2, "ep": 3, "etp": 1, "pp": 2}, 12),
    ],
)
def test_without_gpus_the_default_is_as_many_ranks_as_the_mesh_needs(mesh, ranks):
    import torch

    assert default_nproc(config(mesh=mesh)) == (torch.cuda.device_count() or ranks)


def test_preflight_finds_the_problems_of_mesh_and_data_at_once(tmp_path):
    broken = config(mesh={"tp": 3}, data={"blend": str(tmp_path / "no-such.json")})
    with pytest.raises(UsageError) as error:
        preflight(ReadConfig(broken, []), 3, where="run.toml")
    text = str(error.value)
    assert text.startswith("run.toml has 3 problems:") and "no-such.json" in text and "mesh.tp=3" in text


def _problems(tmp_path: Path, *words: str, kind: type[MdataError] = UsageError) -> list[str]:
    """What a run of a sound file with these settings is refused for, by the first lines of its problems."""
    path = tmp_path / "run.toml"
    sound = config(run={"folder": str(tmp_path / "run")}, model={"vocab_size": 1000}, data={"blend": "mock"})
    path.write_text(dump_config(replace(sound, mesh=replace(sound.mesh, tp=1))))
    with pytest.raises(kind) as error:
        preflight(read_config(path, words), 2, where="run.toml")
    assert type(error.value) is kind
    head, *lines = str(error.value).splitlines()
    return [line[4:] for line in lines if line.startswith("  - ")] or [head.removeprefix("run.toml: ")]


def test_wrong_values_hide_no_other_problem(tmp_path):
    """Of keys, of values, of the data and its sets, of folders and of rules between sections that have none."""
    gone, lost = tmp_path / "gone", tmp_path / "lost"
    blocked = tmp_path / "file"
    blocked.touch()
    words = [
        "optimizer.lrr=3",
        "precision.dtype=fp31",
        f"run.folder={blocked}",
        f"data.blend={gone}",
        f'data.valid=["{lost}"]',
        "model.num_heads=3",
        "train.global_batch=7",
    ]
    assert [problem.split(";")[0] for problem in _problems(tmp_path, *words)] == [
        "there is no key optimizer.lrr",
        "precision.dtype is 'fp31'",
        "train.global_batch=7 is not a multiple of train.micro_batch=2 x 2 data-parallel ranks",
        "model.hidden_size=64 is not a multiple of model.num_heads=3",
        "model.num_heads=3 is not a multiple of model.num_kv_heads=2",
        f"run.folder='{blocked}' cannot be created: {blocked} is a file",
        f"{gone}: neither a manifest nor a .bin/.idx pair exists there",
        f"{lost}: neither a manifest nor a .bin/.idx pair exists there",
    ]


@pytest.mark.parametrize(
    "words", [["train.micro_batch=0"], ["mesh.tp=0"], ["model.num_layers=x"], ["train.seq_length=9"]], ids=" ".join
)
def test_what_follows_from_a_wrong_value_is_no_problem_of_its_own(words, tmp_path):
    assert len(_problems(tmp_path, *words, "train.global_batch=8")) == 1


def test_a_damaged_corpus_does_not_hide_other_problems(tmp_path):
    """All lost and damaged components of a blend, and what else is wrong; the exit code is that of damage."""
    made = make_mix(tmp_path, ("one", "two"))
    made["one"].write_text(made["one"].read_text().replace('"tokens"', '"tokenz"', 1))
    made["two"].unlink()
    words = (f"data.blend={tmp_path / 'mix.json'}", "train.global_batch=7")
    batch, damaged = _problems(tmp_path, *words, kind=DamageError)
    assert batch.startswith("train.global_batch=7") and damaged.startswith(f"{tmp_path / 'mix.json'}: component one: ")
    with pytest.raises(DamageError, match=r"component one: [\s\S]*component two: "):
        mdata.open_blend(tmp_path / "mix.json")


def test_sets_of_evaluation_are_no_problem_of_a_run_that_reads_none(tmp_path):
    words = (f"data.blend={tmp_path / 'gone'}", f'data.valid=["{tmp_path / "lost"}"]', "train.evaluate=false")
    (problem,) = _problems(tmp_path, *words, "train.global_batch=8")
    assert "gone: neither" in problem


def test_a_checkpoint_that_does_not_fit_is_told_without_data(tmp_path):
    sound = config(run={"folder": str(tmp_path / "run")}, model={"vocab_size": 1000}, data={"blend": "mock"})
    sound = replace(sound, mesh=replace(sound.mesh, tp=1), train=replace(sound.train, steps=1))
    sound = replace(sound, optimizer=replace(sound.optimizer, warmup_steps=None))
    train(sound, join_world(Mesh(1), placement=Placement()))
    lost = tmp_path / "lost"
    words = ["train.steps=1", "optimizer.warmup_steps=0", "model.num_layers=3", f"data.blend={lost}"]
    gone, model = _problems(tmp_path, *words)
    assert gone.startswith(f"{lost}: neither") and model.endswith("step-1 was trained with a different model")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL\n  try: the system kills processes when memory runs out"),
        (signal.SIGABRT, "rank 1 was killed by SIGABRT\n  try: check the system's log for the cause"),
        (signal.SIGTERM, "rank 1 was stopped by SIGTERM\n  try: run the same command again to continue"),
    ],
)
def test_a_death_without_a_report_is_named_with_what_to_do(number, text):
    with pytest.raises((ResourceError, StoppedError)) as error:
        launch_module._raise(first_cause([], {1: -number}))
    assert str(error.value).startswith(text)
