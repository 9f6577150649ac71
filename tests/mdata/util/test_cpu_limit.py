"""Cores that may be used: by affinity, and by control groups of either version as a process may find them."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.util import cpu_limit
from tests.helpers.examples import examples


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """16 cores by affinity; returns a function that writes /proc/self/cgroup and files below /sys/fs/cgroup."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return lambda own, **files: set_up(tmp_path, monkeypatch, own, files)


def set_up(folder, monkeypatch, own, files):
    monkeypatch.setattr(cpu_limit, "_OWN_GROUP", folder / "own")
    monkeypatch.setattr(cpu_limit, "_GROUPS", folder / "groups")
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
    assert cpu_limit.usable_cores() == expected


def test_affinity_is_the_upper_limit(machine, monkeypatch):
    machine("0::/\n", **{"cpu.max": "800000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert cpu_limit.usable_cores() == 2


@examples(100)
@given(data=st.binary(max_size=40), own=st.binary(max_size=40))
def test_whatever_the_system_says_there_is_a_number(tmp_path_factory, data, own):
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
        set_up(folder, patch, None, {"cpu.max": ""})
        (folder / "own").write_bytes(own)
        (folder / "groups" / "cpu.max").write_bytes(data)
        assert 1 <= cpu_limit.usable_cores() <= 4


def test_this_process_may_use_a_core_or_more():
    assert 1 <= cpu_limit.usable_cores() <= len(os.sched_getaffinity(0))
