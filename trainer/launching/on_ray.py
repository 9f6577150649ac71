"""A training run on an existing Ray cluster: one task per node, which starts the ranks there and waits for them.

Ray reserves the nodes and GPUs all at once (a placement group, spread over nodes); the ranks find each other as under
srun. The process that waits for the tasks is the job: it runs on the machine of `mtrain launch`, and the run ends with
it. Unusual: a request to stop reaches the nodes as a file in the job's folder, which they all share. As with `launch
local` nothing is restarted; the same command continues the run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mdata.errors import ResourceError, StoppedError, counted
from mdata.launching.on_ray import connected
from mdata.util import atomic_io
from mdata.util.commands import command_line
from trainer.launching.job import END_FILE, RunJob

PATIENCE_S = 90.0  # for the other nodes after one has failed: their ranks end within a minute


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    """How a run is placed.

    Args:
        address: of the cluster; "auto": the one of this node.
        gpus: of each node. cpus: of each rank. env: variables of each rank.
    """

    address: str = "auto"
    gpus: int = 0
    cpus: int = 1
    env: Mapping[str, str] = field(default_factory=dict)


def train_on_ray(job: RunJob, options: RayOptions, *, tell: Callable[[str], None]) -> int:
    """Wait for the nodes, then train on them; the exit code of the first node that failed, or 0.

    Raises:
        UsageError, ResourceError: Ray is not installed, or no cluster answers. StoppedError: the job was stopped before
            it got its nodes.
    """
    nodes, ranks = job.nodes[1], job.ranks_per_node
    with connected(options.address) as ray:
        for number in (signal.SIGTERM, signal.SIGINT):  # ray.init has put its own handlers there, which end the process
            signal.signal(number, lambda *_: atomic_io.atomic_write(job.stop_mark, b""))

        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = {"CPU": float(ranks * options.cpus)} | ({"GPU": float(options.gpus)} if options.gpus else {})
        group = placement_group([resources] * nodes, strategy="STRICT_SPREAD")
        each = ", ".join(f"{count:g} {name}" for name, count in resources.items())
        tell(f"waiting for {counted(nodes, 'node')} with {each} each")
        while not group.wait(1):
            if job.stop_mark.exists():
                raise StoppedError("stopped while waiting for Ray's nodes", fix="run the same command again")

        def on_node(node: int, function: Any, **more: float) -> Any:
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            return ray.remote(scheduling_strategy=place, max_retries=0, **more)(function)

        host, port = ray.get(on_node(0, _free_place(), num_cpus=0).remote())
        run = [on_node(node, _run_ranks(), num_cpus=resources["CPU"], num_gpus=options.gpus) for node in range(nodes)]
        shared = {**options.env, "MASTER_ADDR": host, "MASTER_PORT": str(port), END_FILE: os.environ[END_FILE]}
        command = [*command_line("mtrain"), "train", str(job.config)]
        paths = job.cwd, str(job.log), str(job.stop_mark)
        waiting = [
            task.remote(command, shared, (node * ranks, ranks, nodes * ranks), paths) for node, task in enumerate(run)
        ]
        return _wait(ray, waiting, tell)


def _wait(ray: Any, waiting: list[Any], tell: Callable[[str], None]) -> int:
    """The exit code of the first node that failed, or 0; the other nodes then get time to end, and are ended."""
    code, until_s = 0, float("inf")
    while waiting and time.monotonic() < until_s:
        ended, waiting = ray.wait(waiting, timeout=1)
        for task in ended:
            try:
                exit_code = ray.get(task)
            except ray.exceptions.RayError as error:
                if not code:
                    code = ResourceError.exit_code
                    tell(f"lost a node: {str(error).partition('. ')[0]}")
                continue
            code = code or exit_code
        if code:
            until_s = min(until_s, time.monotonic() + PATIENCE_S)
    for task in waiting:
        ray.cancel(task, force=True)  # its ranks die with it
    return code


def _free_place() -> Any:
    """A task: the address of its node, and a free port. Ray sends functions made here by their code."""

    def place() -> tuple[str, int]:
        import socket

        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    return place


def _run_ranks() -> Any:
    """A task: start the ranks of a node and wait for them; the first exit code that is not 0."""

    def run(command: list[str], shared: dict[str, str], place: tuple[int, ...], paths: tuple[str, ...]) -> int:
        import ctypes
        import os
        import signal
        import subprocess
        import time

        (first, count, world), (cwd, log_path, stop_mark) = place, paths

        def die_with_parent() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

        def start(local: int) -> subprocess.Popen[bytes]:
            numbers = {"RANK": first + local, "LOCAL_RANK": local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": count}
            environment = os.environ | shared | {name: str(number) for name, number in numbers.items()}
            with open(log_path, "ab") as log:  # noqa: PTH123
                return subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )

        ranks, asked = [start(local) for local in range(count)], False
        while None in (codes := [rank.poll() for rank in ranks]):
            if not asked and os.path.exists(stop_mark):  # noqa: PTH110
                asked = True
                for rank in ranks:
                    rank.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        return next((code if code > 0 else 128 - code for code in codes if code), 0)

    return run
