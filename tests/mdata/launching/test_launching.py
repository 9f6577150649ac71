"""Jobs in parts on this machine: what is launched, told, started again, and refused before anything starts."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from cli.mdata import main
from mdata.dedup.plan import DedupOptions
from mdata.errors import DamageError, UsageError
from mdata.launching import job_status as status_module
from mdata.launching import on_processes, on_slurm
from mdata.launching.job_folder import MERGE, Job, PartState, load_job, read_state, save_job, write_started
from mdata.launching.job_status import job_status, last_progress
from mdata.launching.on_slurm import Array, array_script, arrays_of, merge_script
from mdata.launching.plan_launch import plan_dedup
from tests.helpers.examples import examples, soaked
from tests.mdata.preprocessing.test_parts import write_mix

BYTE = ["--tokenizer-type", "ByteTokenizer"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_mix(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*words, parts=3, command=()):
    given = ["preprocess", "--input", "in", "--output-prefix", "out/c", *BYTE, *command]
    return main(["launch", *(words or ("local",)), "--parts", str(parts), "--", *given])


def a_job(folder, **more):
    known = Job(("preprocess",), str(folder), 4, "reference", "out/c", ("text_document",), 4000)
    return replace(known, **more)


def test_parts_are_run_merged_told_and_not_run_twice(here, capsys):
    assert launch("local", "--at-once", "2") == 0
    assert "3 of 3 parts run" in capsys.readouterr().out
    assert main(["preprocess", "--input", "in", "--output-prefix", "one/c", *BYTE]) == 0
    one, merged = (mdata.open_corpus(here / f"{name}/c_text_document.json") for name in ("one", "out"))
    assert one.num_tokens == merged.num_tokens and (one.lengths == merged.lengths).all()
    assert main(["status", "out/c"]) == 0
    told = capsys.readouterr().out
    assert "3 parts: 3 done; merged" in told and "time left: 0:00:00" in told
    assert main(["tail", "out/c"]) == 0
    assert "merge.log" in capsys.readouterr().out
    assert launch("local") == 0
    assert "nothing is left to do" in capsys.readouterr().out


def test_a_second_launch_is_told_of_the_first_which_merges(here, capsys, monkeypatch):
    """The second comes while parts of the first run, then while it merges, and after its end."""
    process = on_processes._Processes
    codes, numbers, real = [], [], process.run

    def run(self, number):
        numbers.append(number)
        if len(numbers) < 9:  # or the second launch starts parts, each of which launches again
            codes.append(launch("local", parts=2))
        return real(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(process, "run", run)
        assert launch("local", parts=2) == 0
    told = capsys.readouterr()
    assert (codes, numbers) == ([2, 2, 2], [1, 2, MERGE]) and "2 of 2 parts run" in told.out
    assert "is being launched already, and that launch also merges its parts" in told.err
    assert f"found: process {os.getpid()} on {os.uname().nodename}" in told.err
    assert main(["status", "out/c"]) == 0 and "2 done; merged" in capsys.readouterr().out
    assert not list((here / "out").glob(".*"))
    assert launch("local", parts=2) == 0 and "nothing is left to do" in capsys.readouterr().out


@pytest.mark.parametrize("lost", soaked(["*", "*.bin", "*.idx"], but=["*", "*.idx"]))
def test_only_what_is_missing_is_started(here, capsys, lost):
    assert launch("local", "--merge", "none") == 0
    for path in (here / "out").glob(f"c-00002-of-00003_{lost}"):
        path.unlink()
    before = [read_state(load_job(here / "out/c"), number).at_s for number in (1, 2, 3)]
    assert launch("local", "--merge", "none") == 0
    assert (here / "out/c-00002-of-00003_text_document.bin").is_file()
    after = [read_state(load_job(here / "out/c"), number).at_s for number in (1, 2, 3)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


def test_a_part_that_fails_is_named_with_its_reason_and_the_others_go_on(here, capsys):
    text = (here / "in/e.jsonl").read_text()
    (here / "in/e.jsonl").write_text(text + '{"no": 1}\n')
    assert launch("local") == 3
    told = capsys.readouterr().err
    assert "1 of 3 parts (00003-of-00003) failed" in told and "e.jsonl" in told and "part-00003.log" in told
    assert main(["status", "out/c", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["counts"] == {"done": 2, "failed": 1} and facts["parts"][2]["code"] == 3
    assert main(["tail", "out/c"]) == 0
    assert "mdata: error:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        ((), ["--shard", "1/2"], "the launcher gives each part its number"),
        ((), ["--partitions", "2"], "--shard cannot be combined with --partitions"),
        ((), ["--dry-run"], "--dry-run writes nothing"),
        ((), ["--json-keys", "a/b"], "cannot be part of a file name"),
        (("local", "--at-once", "0"), [], "--at-once 0"),
        (("local", "--cpus", "0"), [], "--cpus 0"),
    ],
)
def test_what_would_fail_in_every_part_fails_once(here, capsys, words, command, message):
    assert launch(*words, command=command) == 2
    assert message in capsys.readouterr().err and not (here / "out").exists()


def test_only_preprocess_can_be_launched(here, capsys):
    assert main(["launch", "local", "--parts", "2", "--", "verify", "x"]) == 2
    assert "verify cannot be launched" in capsys.readouterr().err
    assert main(["launch", "local", "--parts", "2"]) == 2
    assert "no command cannot be launched" in capsys.readouterr().err


DEDUP = ["--", "dedup", "--input", "in", "--bands", "2", "--rows", "2", "--ngram", "2", "--output"]


def test_stages_of_dedup_are_run_in_order_told_and_not_run_twice(here, capsys):
    assert main(["launch", "local", "--at-once", "2", "--parts", "2", "--ranges", "1", *DEDUP, "two"]) == 0
    assert "4 of 4 tasks run; all are done" in capsys.readouterr().out
    assert main(["status", "two"]) == 0
    told = capsys.readouterr().out
    assert "sign: 2 done\nmatch: 1 done\ngroup: 1 done\n" in told and "time left: 0:00:00" in told
    assert main(["tail", "two"]) == 0 and "group.log" in capsys.readouterr().out
    assert main(["tail", "two", "--part", "3"]) == 0 and "match-00001.log" in capsys.readouterr().out
    assert main(["launch", "local", "--parts", "2", "--ranges", "1", *DEDUP, "two"]) == 0
    assert "all 4 tasks are done; nothing is left to do" in capsys.readouterr().out
    assert main([*DEDUP[1:], "one"]) == 0
    for path in sorted((here / "one").iterdir()):
        assert path.read_bytes() == (here / "two" / path.name).read_bytes(), path.name
    assert main(["launch", "local", "--parts", "3", *DEDUP, "two"]) == 2
    assert "num_parts: 3" in capsys.readouterr().err


def test_a_stage_that_fails_is_named_and_those_after_it_wait(here, capsys):
    os.truncate(here / "in/b.jsonl.gz", 50)
    assert main(["launch", "local", "--parts", "2", *DEDUP, "out"]) == 3
    told = capsys.readouterr().err
    assert "of 2 tasks of sign (" in told and "b.jsonl.gz" in told and "failed" in told
    assert main(["status", "out", "--json"]) == 0
    counts = Counter((part["phase"], part["condition"]) for part in json.loads(capsys.readouterr().out)["parts"])
    assert counts["sign", "failed"] >= 1 and counts["match", "waiting"] == 3 and counts["group", "waiting"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "1/2"], "--shard 1/2 without a stage"),
        (["--parts", "2"], "--parts 2 without a stage"),
        (["--bands", "300"], "bands is 300"),
    ],
)
def test_what_would_fail_in_every_task_of_dedup_fails_once(here, capsys, words, message):
    assert main(["launch", "local", "--parts", "2", *DEDUP, "out", *words]) == 2
    assert message in capsys.readouterr().err and not (here / "out").exists()
    assert main(["launch", "local", "--parts", "2", "--", "dedup", "sign", *DEDUP[2:], "out"]) == 2
    assert "sign is one stage" in capsys.readouterr().err


def test_options_with_a_part_are_not_launched():
    with pytest.raises(UsageError, match="the launcher gives each task its number"):
        plan_dedup(["dedup"], DedupOptions(input="in", output="out", parts=2), num_parts=2)


CLEAN = ["--", "clean", "--input", "in", "--steps", "length", "--length-min-characters", "9", "--output"]


def test_parts_of_clean_are_run_told_and_not_run_twice(here, capsys):
    assert main(["launch", "local", "--at-once", "2", "--parts", "3", *CLEAN, "cleaned"]) == 0
    assert "3 of 3 parts run; all are done" in capsys.readouterr().out
    assert main(["status", "cleaned"]) == 0
    assert "3 parts: 3 done" in capsys.readouterr().out
    assert main([*CLEAN[1:], "whole"]) == 0
    whole, parts = (sorted((here / name).glob("**/*.jsonl")) for name in ("whole", "cleaned"))
    found = b"".join(path.read_bytes() for path in parts)
    assert found == b"".join(path.read_bytes() for path in whole) != b""
    (here / "cleaned/part-00002-of-00003/clean.report").unlink()
    assert main(["launch", "local", "--parts", "3", *CLEAN, "cleaned"]) == 0
    assert "1 of 3 parts run" in capsys.readouterr().out
    assert main(["launch", "local", "--parts", "3", *CLEAN, "cleaned"]) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    # Without the job's folder, reports tell that the parts are of another job.
    shutil.rmtree(here / "cleaned.job")
    assert main(["launch", "local", "--parts", "3", *CLEAN, "cleaned", "--length-min-words", "2"]) == 2
    assert "cleaned/part-00001-of-00003 holds the result of other input or options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "1/2"], "the launcher gives each part its number"),
        (["--rows-only"], "rows_only counts the rows of whole files"),
    ],
)
def test_what_would_fail_in_every_part_of_clean_fails_once(here, capsys, words, message):
    assert main(["launch", "local", "--parts", "2", *CLEAN, "out", *words]) == 2
    assert message in capsys.readouterr().err and not (here / "out").exists()


def test_parts_of_decontaminate_end_in_one_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    item, other = "one two three four five six seven eight", "eight seven six five four three two one"
    for name, texts in {"a": [item, "x"], "b": [item.upper(), "y"]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (item, other)))
    words = ["decontaminate", "--input", "a.jsonl", "b.jsonl", "--against", "eval.jsonl", "--output"]
    launched = ["launch", "local", "--parts", "2", "--", *words, "out"]
    assert main(launched) == 0
    assert "3 of 3 tasks run; all are done" in capsys.readouterr().out
    assert main([*words, "whole"]) == 0
    # Both parts found the first item, which counts once.
    assert "eval: 1 of 2 items (50.00 %) in 2 rows" in capsys.readouterr().out
    whole, joined = (json.loads((tmp_path / name / "decontaminate.report").read_text()) for name in ("whole", "out"))
    assert whole["result"] == joined["result"]
    paths = [tmp_path / "out" / file["output"] for file in joined["files"]]
    assert b"".join(path.read_bytes() for path in paths) == b'{"text": "x"}\n{"text": "y"}\n'
    report = (tmp_path / "out/decontaminate.report").read_bytes()
    shutil.rmtree(tmp_path / "out/part-00002-of-00002")
    assert main([*words, "out", "--parts", "2"]) == 2
    assert "part 2 of 2 is not finished" in capsys.readouterr().err
    assert main(["status", "out"]) == 0
    assert "2 parts: 1 done, 1 failed\nreport: 1 done\n" in capsys.readouterr().out
    assert main(launched) == 0  # the report after the part, although there is one
    assert "2 of 3 tasks run" in capsys.readouterr().out
    assert (tmp_path / "out/decontaminate.report").read_bytes() == report
    assert main(launched) == 0 and "nothing is left to do" in capsys.readouterr().out
    assert main([*words, "out", "--parts", "2", "--ngram", "9"]) == 2
    assert "holds the result of other input or options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "split", "--compat", "openwebtext"], "OpenWebText counts n-grams in all texts"),
        (["--parts", "2"], "the launcher joins the reports"),
        (["--mode", "report", "--rows-only"], "rows_only lists removed rows"),
    ],
)
def test_what_parts_of_decontaminate_cannot_do(here, capsys, words, message):
    (here / "eval.jsonl").write_text('{"text": "one two three four five six seven eight"}\n')
    command = ["--", "decontaminate", "--input", "in", "--against", "eval.jsonl", "--output", "out", *words]
    assert main(["launch", "local", "--parts", "2", *command]) == 2
    assert message in capsys.readouterr().err and not (here / "out").exists()


class Queue:
    """Slurm's answers: what is submitted stays queued until it is ended or cancelled."""

    def __init__(self, monkeypatch):
        self.scripts, self.cancelled, self.ids = {}, [], itertools.count(100)
        monkeypatch.setattr(on_slurm, "sbatch", self.sbatch)
        monkeypatch.setattr(on_slurm, "run_slurm", self.run)
        monkeypatch.setattr(on_slurm, "squeue", self.squeue)

    def sbatch(self, options, script):
        name = str(next(self.ids))
        self.scripts[name] = script.read_text()
        return name

    def run(self, words):
        if words[0] == "scancel":
            self.cancelled += [(name, self.scripts.pop(name)) for name in words[1:]]
        return "MaxArraySize = 3"

    def squeue(self, *options, fields):
        tasks = ((name, re.search(r"--array=(\S+)", text)) for name, text in self.scripts.items())
        return [[name, str(task)] for name, found in tasks for task in _tasks(found[1]) if found]

    def of(self, phase):
        """(id, tasks, what it waits for) of the arrays of a phase."""
        found = [(name, text) for name, text in self.scripts.items() if f"job-name=out-{phase}\n" in text]
        waits = [re.search(r"afterok:(\S+)", text) for _, text in found]
        tasks = [re.search(r"--array=(\S+)", text)[1] for _, text in found]
        names = [name for name, _ in found]
        return list(zip(names, tasks, [wait and wait[1].split(":") for wait in waits], strict=True))


def _tasks(ranges):
    for part in ranges.split("%")[0].split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def test_arrays_of_a_stage_wait_for_those_before_and_are_submitted_again_with_them(here, monkeypatch, capsys):
    queue = Queue(monkeypatch)
    words = ["launch", "slurm", "--parts", "3", "--ranges", "2", *DEDUP, "out"]
    assert main(words) == 0
    sign, match, group = (queue.of(phase) for phase in ("sign", "match", "group"))
    assert [tasks for _, tasks, _ in sign] == ["1-2", "1"] and [wait for *_, wait in sign] == [None, None]
    assert [wait for *_, wait in match] == [[name for name, *_ in sign]] * len(match)
    assert [wait for *_, wait in group] == [[name for name, *_ in match]]
    before = dict(queue.scripts)
    assert main(words) == 0 and queue.scripts == before, "what is queued is not submitted again"
    del queue.scripts[sign[1][0]]  # it failed
    assert main(words) == 0
    again = [queue.of(phase) for phase in ("sign", "match", "group")]
    assert again[0][0] == sign[0] and again[0][1][1] == "1"
    assert [name for name, _ in queue.cancelled] == [*(name for name, *_ in match), group[0][0]]
    assert [set(wait) for *_, wait in again[1]] == [{name for name, *_ in again[0]}] * len(again[1])
    assert [wait for *_, wait in again[2]] == [[name for name, *_ in again[1]]]


def test_the_report_of_decontaminate_waits_for_all_parts(here, monkeypatch):
    queue = Queue(monkeypatch)
    (here / "eval.jsonl").write_text('{"text": "one two three four five six seven eight"}\n')
    words = ["--", "decontaminate", "--input", "in", "--against", "eval.jsonl", "--output", "out"]
    assert main(["launch", "slurm", "--parts", "3", *words]) == 0
    parts, report = queue.of("parts"), queue.of("report")
    assert [tasks for _, tasks, _ in parts] == ["1-2", "1"] and [wait for *_, wait in parts] == [None, None]
    assert [(tasks, wait) for _, tasks, wait in report] == [("2", [name for name, *_ in parts])]
    assert load_job(here / "out").words_of(4) == [*words[1:], "--parts", "3"]


def test_slurm_that_is_not_here_is_said(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    assert launch("slurm") == 2
    assert "scontrol is not installed on this machine" in capsys.readouterr().err
    assert not list(here.rglob("*.job")), "the folder of a job that was not started"


def test_another_job_in_the_folder_is_refused(tmp_path):
    save_job(a_job(tmp_path))
    save_job(a_job(tmp_path, merge="copy"))
    for more, found in (({"num_parts": 5}, "num_parts: 5"), ({"words": ("preprocess", "--x")}, "preprocess --x")):
        with pytest.raises(UsageError, match=f"(?s)is the folder of another job.*{found}"):
            save_job(a_job(tmp_path, **more))


def test_a_job_that_is_not_there_or_damaged_is_said(tmp_path):
    with pytest.raises(UsageError, match="is not a job"):
        load_job(tmp_path / "x")
    save_job(a_job(tmp_path))
    (tmp_path / "out/c.job/job.json").write_text("{")
    with pytest.raises(DamageError, match=r"job\.json is damaged"):
        load_job(tmp_path / "out/c")


def test_the_condition_of_a_part_is_told_from_its_files(tmp_path, monkeypatch):
    job = a_job(tmp_path)
    save_job(job)
    assert job_status(job).counts == {"waiting": 4}
    write_started(job, 1)
    job.log(1).write_text('{"doing": "tokenizing", "unit": "B", "done": 300, "mb_per_s": 0.0001}\nmdata: a note\n{"doi')
    found = job_status(job)
    assert found.counts == {"running": 1, "waiting": 3} and found.done_bytes == 300
    assert found.seconds_left == pytest.approx(37)
    assert job_status(job, now_s=time.time() + 100).counts == {"silent": 1, "waiting": 3}
    for number, event in ((2, ("ended", 75)), (3, ("ended", 3))):
        job.state_path(number).write_text(json.dumps({"event": event[0], "code": event[1], "attempt": 1}))
    dead = {"event": "started", "host": os.uname().nodename, "pid": 1 << 30, "attempt": 1}
    job.state_path(4).write_text(json.dumps(dead))
    assert job_status(job).counts == {"running": 1, "stopped": 2, "failed": 1}
    for ending in ("json", "idx", "bin"):
        assert "done" not in job_status(job).counts
        (tmp_path / f"out/c-00003-of-00004_text_document.{ending}").write_text("{}")
    assert job_status(job).counts["done"] == 1


def test_progress_is_the_last_whole_line_of_it(tmp_path):
    assert last_progress(tmp_path / "none") == {}
    lines = [json.dumps({"doing": "tokenizing", "unit": "B", "done": n, "more": "x" * 100}) for n in range(400)]
    (tmp_path / "log").write_text("\n".join(lines) + '\n{"doing": "merging", "unit": "B"\n')
    assert last_progress(tmp_path / "log")["done"] == 399
    assert len(status_module.last_lines(tmp_path / "log", 500)) < 10


@examples(200)
@given(parts=st.sets(st.integers(1, 300)), max_array=st.integers(2, 100))
def test_arrays_have_every_part_once_and_no_task_beyond_the_sites_limit(parts, max_array):
    arrays = arrays_of(sorted(parts), max_array)
    assert sorted(one.offset + task for one in arrays for task in one.tasks) == sorted(parts)
    assert all(1 <= task < max_array for one in arrays for task in one.tasks)
    assert len({one.offset for one in arrays}) == len(arrays)


def test_scripts_say_what_slurm_needs(tmp_path):
    job = a_job(tmp_path)
    script = array_script(job, Array(1000, (1, 2, 5)), cpus=8, at_once=16)
    assert script.startswith("#!/bin/bash\n")
    for line in ("--array=1-2,5%16", "--cpus-per-task=8", "--requeue", "--signal=B:USR1@120", "--open-mode=append"):
        assert f"#SBATCH {line}\n" in script
    assert script.endswith(f"--cpus 8 {job.folder} $((1000 + SLURM_ARRAY_TASK_ID))\n")
    merge = merge_script(job, ["7", "9"])
    assert "#SBATCH --dependency=afterok:7:9\n" in merge and "--kill-on-invalid-dep=yes" in merge
    assert merge.endswith(f" {MERGE}\n") and "--dependency" not in merge_script(job, [])


def test_a_state_that_cannot_be_read_is_none(tmp_path):
    job = a_job(tmp_path)
    save_job(job)
    job.state_path(1).write_text("[]")
    assert read_state(job, 1) is None and read_state(job, 2) is None
    assert PartState("waiting").code is None
