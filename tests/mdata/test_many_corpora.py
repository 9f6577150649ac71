"""More corpora than a process may have descriptors: they open, are read correctly, and can be sent to workers."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tests.helpers.examples import soaked
from tests.helpers.many_corpora import write_corpora

pytestmark = pytest.mark.slow  # it starts many processes
COUNT = 2000

READING = """
import multiprocessing, os, pickle, resource, sys
import numpy as np
import mdata

DESCRIPTORS = 256
SEQUENCE = 32

def main(mix, mode, method):
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    data = mdata.open_dataset(mix, sequence_length=SEQUENCE, mode=mode)
    check(data, np.arange(0, 9000, 3))
    if method:
        context = multiprocessing.get_context(method)
        numbers = [np.arange(start, 9000, 7) for start in range(2)]
        workers = [context.Process(target=check, args=(data, part)) for part in numbers]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0, worker.exitcode
    print(len(data.components))

def check(data, samples):
    rows = data.read(samples)
    components, inside = data.locate(samples)
    for row, component, sample in zip(rows.text, components.tolist(), inside.tolist(), strict=True):
        start, stop = data.components[component].samples.token_range(sample)
        expected = (31 * component + np.arange(start, stop)) % 50_000
        assert (row == expected).all(), (component, sample)
    assert len(os.listdir("/proc/self/fd")) < 64 + (DESCRIPTORS // 4 if data.options.mode == "pread" else 0)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    return write_corpora(tmp_path_factory.mktemp("many"), COUNT)


@pytest.mark.parametrize(
    ("method", "mode"),
    soaked(
        itertools.product(["", "fork", "spawn"], ["mmap", "pread"]),
        but=[("", "pread"), ("fork", "mmap"), ("spawn", "pread")],
    ),
)
def test_two_thousand_corpora_and_256_descriptors(tmp_path, mix, mode, method):
    script = tmp_path / "reading.py"
    script.write_text(READING)
    command = [sys.executable, str(script), str(mix), mode, method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(COUNT)]
