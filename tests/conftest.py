"""Shared by all tests: the oracle folder, soak tests skipped by default, and a final line with counts.

Oracle data (tokenizers, and files and sample orders written by other programs) is too large for the repository. It is
read from the folder that MDATA_ORACLES names, by default ../shared/data beside the checkout; without it those tests are
skipped with the reason, and the final line says how many.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
SOAK = int(os.environ.get("MDATA_SOAK", "1"))
ORACLE_USE = "oracle data"  # property of a test, "run" or "skipped"; reports carry it from the processes of -n

# The threads of torch would wait for cores that other tests have. It reads the number as it is imported, which
# tests/trainer/conftest.py does before pytest_configure, if pytest is called with a path there.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A property test without @examples, and as many as with @examples(100) (tests/helpers/examples.py).
# How long examples take to be drawn is no fault of a test either, where machines are shared.
settings.register_profile(
    "ours",
    max_examples=100 * SOAK if SOAK > 1 else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ours")


def oracle_folder() -> Path:
    """The folder for oracle data."""
    return Path(os.environ.get("MDATA_ORACLES") or ROOT.parent / "shared" / "data")


@pytest.fixture
def oracles(request: pytest.FixtureRequest) -> Path:
    """The folder with oracle data; the test is skipped if it does not exist."""
    folder = oracle_folder()
    there = folder.is_dir()
    request.node.user_properties.append((ORACLE_USE, "run" if there else "skipped"))
    if not there:
        pytest.skip(f"no oracle data in {folder}; set MDATA_ORACLES")
    return folder


MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 << 30  # free: more than the files of a whole run


def fits_temporary_files(folder: Path) -> bool:
    """Whether tests can write there, run what they wrote, and have enough room."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return False
    return not os.statvfs(folder).f_flag & os.ST_NOEXEC and shutil.disk_usage(folder).free >= MEMORY_BYTES


def pytest_configure(config: pytest.Config) -> None:
    # Our writers wait until the disk has what they wrote, thousands of times in a run, and no test can see it.
    if fits_temporary_files(MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    # A shell starts background jobs with interrupts ignored, and what they start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # nothing that is collected is garbage


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let garbage collection, here and in forks, pass over what stays to the end: half a million objects."""
    gc.freeze()
    gc.enable()
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >= LARGE_KB:
        move_to_huge_pages()


LARGE_KB = 300_000
HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25  # linux/mman.h; an older kernel says no, and nothing changes


def move_to_huge_pages() -> None:
    """Move what this process holds to huge pages, for its forks, of which a run makes more than a thousand.

    A fork copies the table of all pages and its end drops it: 46 ms of CPU where all tests are collected, and 12 so.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split()
        first, stop = (int(address, 16) // HUGE_PAGE * HUGE_PAGE for address in span.split("-"))
        first += HUGE_PAGE
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and first < stop:
            madvise(first, stop - first, MADV_COLLAPSE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """After the last test of a file, give back what its own caches hold: each fork pays for it."""
    yield
    if nextitem is None or nextitem.path != item.path:
        for value in vars(getattr(item, "module", None) or object).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
        ctypes.CDLL(None).malloc_trim(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" in str(config.getoption("markexpr", "")):
        return
    asleep = [item for item in items if item.get_closest_marker("soak")]
    if asleep:
        config.hook.pytest_deselected(items=asleep)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """The processes of -n send reports as UTF-8, and a lone surrogate in the message of one would end the whole run."""
    return _in_utf8((yield))


def _in_utf8(value: Any) -> Any:
    """With each lone surrogate as its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_in_utf8(key): _in_utf8(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_in_utf8, value))
    return value


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    use = {r.nodeid: how for r in reports for name, how in getattr(r, "user_properties", ()) if name == ORACLE_USE}
    run, skipped = (list(use.values()).count(how) for how in ("run", "skipped"))
    terminalreporter.write_line(f"oracle data: {run} tests used it, {skipped} skipped without it")
