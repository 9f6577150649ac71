"""The Ray cluster of tests shows why it failed; no Ray is needed."""

from __future__ import annotations

import pytest

from tests.helpers import ray_cluster

STARTS = """
import sys
print("a node has died", file=sys.stderr, flush=True)
print("at here", flush=True)
sys.stdin.read()
"""


def test_a_cluster_that_does_not_start_says_why(monkeypatch, capsys):
    monkeypatch.setattr(ray_cluster, "SCRIPT", "import sys; sys.exit('no port is free')")
    with pytest.raises(AssertionError, match="does not start"), ray_cluster.ray_cluster(nodes=1, cpus=1):
        pass
    assert "no port is free" in capsys.readouterr().err


def test_a_block_that_fails_shows_what_the_nodes_wrote(monkeypatch, capsys):
    monkeypatch.setattr(ray_cluster, "SCRIPT", STARTS)
    with pytest.raises(ZeroDivisionError), ray_cluster.ray_cluster(nodes=1, cpus=1) as address:
        raise ZeroDivisionError
    assert address == "here" and "a node has died" in capsys.readouterr().err
    with ray_cluster.ray_cluster(nodes=1, cpus=1):
        pass
    assert not capsys.readouterr().err
