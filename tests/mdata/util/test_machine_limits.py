"""Usable cores and available memory: by affinity, control groups of either version, and process limits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.util import machine_limits
from tests.helpers.examples import examples


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """16 cores by affinity; returns a function that writes /proc/self/cgroup and files below /sys/fs/cgroup."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return lambda own, **files: set_up(tmp_path, monkeypatch, own, files)


def set_up(folder, monkeypatch, own, files):
    monkeypatch.setattr(machine_limits, "_OWN_GROUP", folder / "own")
    monkeypatch.setattr(machine_limits, "_GROUPS", folder / "groups")
    if own is not None:
        (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V1 = "12:cpuset:/\n4:cpu,cpuacct:/docker/ab\n1:name=systemd:/docker/ab\n0::/system.slice\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (None, {}, 16),
        ("0::/\n", {"cpu.max": "max 100000"}, 16),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4),
        ("0::/\n", {"cpu.max": "250000 100000"}, 3),
        ("0::/\n", {"cpu.max": "5000 100000"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000"}, 16),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "800000 100000", "a/b/cpu.max": "200000 100000"}, 2),
        ("0::/a/b\n", {"a/b/c/cpu.max": "100000 100000"}, 16),
        ("0::/not/mounted/here\n", {"cpu.max": "600000 100000"}, 6),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        (V1, {"cpu/docker/ab/cpu.cfs_quota_us": "350000\n", "cpu/docker/ab/cpu.cfs_period_us": "100000\n"}, 4),
        (V1, {"cpu/cpu.cfs_quota_us": "700000", "cpu/cpu.cfs_period_us": "100000"}, 7),
        ("0::/\n", {"cpu.max": ""}, 16),
        ("0::/\n", {"cpu.max": "none of this 7"}, 16),
        ("0::/\n", {"cpu.max": "a b"}, 16),
        ("0::/\n", {"cpu.max": "100000 0"}, 16),
        ("nonsense\n\n0::/\n", {"cpu.max": "200000 100000"}, 2),
    ],
)
def test_the_least_that_any_group_grants(machine, own, files, expected):
    machine(own, **files)
    assert machine_limits.usable_cores() == expected


def test_affinity_is_the_upper_limit(machine, monkeypatch):
    machine("0::/\n", **{"cpu.max": "800000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert machine_limits.usable_cores() == 2


@examples(100)
@given(data=st.binary(max_size=40), own=st.binary(max_size=40))
def test_whatever_the_system_says_there_is_a_number(tmp_path_factory, data, own):
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
        set_up(folder, patch, None, {"cpu.max": ""})
        (folder / "own").write_bytes(own)
        (folder / "groups" / "cpu.max").write_bytes(data)
        assert 1 <= machine_limits.usable_cores() <= 4


def test_this_process_may_use_a_core_or_more():
    assert 1 <= machine_limits.usable_cores() <= len(os.sched_getaffinity(0))


MEMINFO = "MemTotal:  9000 kB\nMemAvailable:    1000 kB\nSwapFree:  24 kB\nHugePages_Total:  0\n"
V1_MEMORY = "4:memory:/docker/ab\n0::/system.slice\n"


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """1 MiB left; returns a function that writes /proc/self/cgroup and files below /sys/fs/cgroup."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    monkeypatch.setattr(machine_limits, "_MACHINE_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine_limits, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(machine_limits, "_GROUPS", tmp_path / "groups")

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
        (V1_MEMORY, {"memory/docker/ab/memory.limit_in_bytes": "900", "memory/docker/ab/memory.usage_in_bytes": "100",
              "memory/docker/ab/memory.stat": "total_inactive_file 11\ninactive_file 3\n"}, 811),
    ],
)  # fmt: skip
def test_the_least_that_any_leaves(memory, own, files, expected):
    memory(own, files)
    assert machine_limits.available_bytes() == expected


def test_where_nobody_says_nothing_is_known(memory, monkeypatch, tmp_path):
    memory("", {})
    monkeypatch.setattr(machine_limits, "_MACHINE_MEMORY", tmp_path / "nothing")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert machine_limits.available_bytes() is None


def test_a_limit_of_the_process_counts():
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
    code += "from mdata.util.machine_limits import available_bytes; print(available_bytes())"
    left = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 < left < 1 << 30


def test_this_machine_has_memory_left():
    assert machine_limits.available_bytes() > 1 << 20
