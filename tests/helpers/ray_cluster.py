"""A Ray cluster on this machine: a head and further nodes, each with its own cpus, using Ray's own test cluster.

If Ray is not installed, tests are skipped with that reason.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

SCRIPT = """
import sys
from ray.cluster_utils import Cluster
nodes, cpus = map(int, sys.argv[1:])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
for _ in range(nodes - 1):
    cluster.add_node(num_cpus=cpus)
cluster.wait_for_nodes()
print("at", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def missing() -> str | None:
    """Why no cluster can run here; None: it can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed (make cluster-test installs it)"
    return None


@contextmanager
def ray_cluster(*, nodes: int, cpus: int) -> Iterator[str]:
    """Run a cluster during the block; yields its address.

    If it does not start, or the block fails, what its processes wrote to stderr is printed.
    """
    words = [sys.executable, "-c", SCRIPT, str(nodes), str(cpus)]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None and process.stdin is not None, "both were asked for"
        try:
            address = next((line.split()[1] for line in process.stdout if line.startswith("at ")), None)
            assert address, "the cluster does not start"
            yield address
        except BaseException:
            errors.seek(0)
            sys.stderr.write(errors.read())
            raise
        finally:
            process.stdin.close()
            process.wait(60)
            process.stdout.close()
