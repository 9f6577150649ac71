"""Kill -9 at seeded times, as a test (`make soak`, 200 kills) and as a program that uses all cores:

    python -m tests.mdata.preprocessing.kills --kills 2000 --jobs 16 [--seed 2026] [--folder /dev/shm]

Each chain is one job on its own folder, with a record after every chunk and everything that leaves files. It is run
again and again, and killed each time at a random moment between its first call and the time an undisturbed run took,
until it is done; then its files must be those of the undisturbed run. After every kill each existing manifest must be
correct. Every fourth chain has two workers. The 2,000 kills take about 6 minutes on 16 cores.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mdata
from tests.helpers.failures import assert_what_is_visible_is_true
from tests.mdata.preprocessing.test_preprocess import GOLDEN, contents
from tests.mdata.preprocessing.test_resume import corpus, whole_job

RUN = """
import sys, dataclasses, mdata
from pathlib import Path
from tests.mdata.preprocessing.test_resume import whole_job
job = dataclasses.replace(whole_job(tuple(sys.argv[3:]), Path(sys.argv[1])), workers=int(sys.argv[2]))
print("ready", flush=True)
mdata.preprocess(job)
"""
MOST_KILLS_OF_A_CHAIN = 20


def kill_many(kills: int, jobs: int, *, seed: int, folder: Path) -> int:
    """Run chains until so many kills were done; returns their number. An assertion fails where a chain is wrong."""
    inputs = corpus(folder / "in")
    mdata.preprocess(whole_job(inputs, folder / "whole"))
    expected = contents(folder / "whole")
    done, chains = 0, 0
    with ThreadPoolExecutor(jobs) as threads:
        while done < kills:
            numbers = range(chains, chains + jobs)
            done += sum(threads.map(lambda n: chain(seed, n, inputs, folder=folder, expected=expected), numbers))
            chains += jobs
    return done


def chain(seed: int, number: int, inputs: tuple[str, ...], *, folder: Path, expected: dict[str, bytes]) -> int:
    """One job, killed until it is done; returns how often."""
    generator, out = random.Random(f"{seed} {number}"), folder / str(number)
    workers = 2 if number % 4 == 3 else 1
    process = started(folder / f"{number} undisturbed", workers, inputs)
    begun = time.monotonic()
    assert process.wait() == 0
    takes_s, kills = time.monotonic() - begun, 0
    for _ in range(MOST_KILLS_OF_A_CHAIN):
        process = started(out, workers, inputs)
        time.sleep(generator.uniform(0, takes_s))
        if process.poll() is None:
            process.kill()
            kills += 1
        if process.wait() == 0:
            break
        assert_what_is_visible_is_true(out)
    mdata.preprocess(whole_job(inputs, out))
    assert contents(out) == expected, f"seed {seed}, chain {number}"
    return kills


def started(out: Path, workers: int, inputs: tuple[str, ...]) -> subprocess.Popen[str]:
    """A process that is about to begin."""
    words = [sys.executable, "-c", RUN, str(out), str(workers), *inputs]
    process = subprocess.Popen(words, cwd=GOLDEN.parents[1], stdout=subprocess.PIPE, text=True)
    with process.stdout as said:
        assert said.readline() == "ready\n"
    return process


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=16, help="chains at once")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--folder", type=Path, help="where the files go, such as /dev/shm; default: the system's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        begun = time.monotonic()
        kills = kill_many(arguments.kills, arguments.jobs, seed=arguments.seed, folder=Path(folder))
    print(f"{kills} kills in {time.monotonic() - begun:.0f} s, every chain ended in the same bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
