"""Memory that is left: by the machine, by control groups of either version, and by the process' own limit."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from mdata.util import cpu_limit, memory_limit

MACHINE = "MemTotal:  9000 kB\nMemAvailable:    1000 kB\nSwapFree:  24 kB\nHugePages_Total:  0\n"
V1 = "4:memory:/docker/ab\n0::/system.slice\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """1 MiB left; returns a function that writes /proc/self/cgroup and files below /sys/fs/cgroup."""
    (tmp_path / "meminfo").write_text(MACHINE)
    monkeypatch.setattr(memory_limit, "_MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(cpu_limit, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(cpu_limit, "_GROUPS", tmp_path / "groups")

    def write(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {}, 1024 * 1024),
        ("0::/\n", {"memory.max": "max", "memory.current": "5"}, 1024 * 1024),
        ("0::/a\n", {"a/memory.max": "9000\n", "a/memory.current": "8000\n"}, 1000),
        ("0::/a\n", {"a/memory.max": "90", "a/memory.current": "80", "a/memory.stat": "active_file 7\nfile 9\n"}, 17),
        ("0::/a\n", {"memory.max": "50", "memory.current": "1", "a/memory.max": "90", "a/memory.current": "1"}, 49),
        ("0::/a\n", {"a/memory.max": "1", "a/memory.current": "8000"}, 0),
        ("0::/a\n", {"a/memory.max": "none", "a/memory.current": "8000"}, 1024 * 1024),
        (V1, {"memory/docker/ab/memory.limit_in_bytes": "900", "memory/docker/ab/memory.usage_in_bytes": "100",
              "memory/docker/ab/memory.stat": "total_inactive_file 11\ninactive_file 3\n"}, 811),
    ],
)  # fmt: skip
def test_the_least_that_any_leaves(machine, own, files, expected):
    machine(own, files)
    assert memory_limit.available_bytes() == expected


def test_where_nobody_says_nothing_is_known(machine, monkeypatch, tmp_path):
    machine("", {})
    monkeypatch.setattr(memory_limit, "_MACHINE", tmp_path / "nothing")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory_limit.available_bytes() is None


def test_a_limit_of_the_process_counts():
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
    code += "from mdata.util.memory_limit import available_bytes; print(available_bytes())"
    left = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 < left < 1 << 30


def test_this_machine_has_memory_left():
    assert memory_limit.available_bytes() > 1 << 20
