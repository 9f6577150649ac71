"""`run_ranks(fn, world)`: a function on several ranks at once, for tests.

A pool of up to 8 processes is created when first needed and kept for the whole session; each call joins the ranks it
needs through its own file, and leaves again. The processes come from a fork server that has imported torch and the
trainer once, so that eight of them cost about as much as one. On gloo with one torch thread each; with
MTRAIN_TEST_DEVICE=cuda the same body runs on nccl, rank i on GPU i, or all on the only GPU, which NCCL 2.30 and later
can do with NCCL_MULTI_RANK_GPU_ENABLE=1.

An exception in a rank is raised with its rank and traceback and leaves the pool usable; a hang ends by a timeout, shows
the position of every rank, and kills the pool, which the next call creates again.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.processes import process_state

MAX_RANKS = 8
LOOK_S = 0.5  # between two looks whether ranks were stopped
GRACE_S = 10.0  # after the first failure; the other ranks then lose their connection and fail as well


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class RankHang(AssertionError):
    """Ranks did not answer in time; the message has their positions."""


@dataclass(frozen=True)
class RankContext:
    """The rank of a test function, and how it joins the others.

    Args:
        rank, world: among the ranks of this call.
        init_method: where they meet.
    """

    rank: int
    world: int
    init_method: str

    def join(self, mesh: Any = None) -> Any:
        """Join the other ranks: a `trainer.parallel.world.World` over `mesh` (default: all ranks in dp)."""
        from trainer.parallel.mesh import Mesh
        from trainer.parallel.placement import Placement
        from trainer.parallel.world import join_world

        place = Placement(
            rank=self.rank,
            world_size=self.world,
            local_rank=self.rank,
            local_world_size=self.world,
            init_method=self.init_method,
            own_device=device_type() == "cuda",
        )
        return join_world(mesh or Mesh(self.world), placement=place, device_type=device_type())


def device_type() -> str:
    """ "cpu", or what MTRAIN_TEST_DEVICE says."""
    return os.environ.get("MTRAIN_TEST_DEVICE", "cpu")


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call fn(context, *args) on `world` ranks at once and return what each returned, by rank.

    Args:
        fn: a function at the top of a module; args: what pickle can carry.
        timeout_s: after this long the ranks are taken to hang.

    Raises:
        RankError: of the rank that raised first. RankHang: see above.
    """
    assert 1 <= world <= MAX_RANKS, f"run_ranks has 1 to {MAX_RANKS} ranks, not {world}"
    return _POOL.run(fn, world, args, timeout_s)


def run_alone(fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> Any:
    """What fn(context, *args) returns in a process that nothing ran in before: a fork, which need not import torch."""
    stop_ranks()
    try:
        return run_ranks(fn, 1, *args, timeout_s=timeout_s)[0]
    finally:
        stop_ranks()


def stop_ranks() -> None:
    """End the pool's processes; the next call makes new ones."""
    _POOL.kill()


@dataclass
class _Worker:
    process: Any
    pipe: multiprocessing.connection.Connection


@dataclass(frozen=True, kw_only=True)
class _Answer:
    value: Any = None
    error: str | None = None
    time_s: float = 0.0
    died: bool = False


class _Pool:
    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.folder: Path | None = None
        self.calls = 0

    def run(self, fn: Callable[..., Any], world: int, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        self._grow(world)
        self._send(fn, world, args)
        answers = self._answers(world, timeout_s)
        silent = [rank for rank in range(world) if rank not in answers]
        failures = sorted((a.time_s, rank) for rank, a in answers.items() if a.error is not None)
        stacks = self._stacks(silent)
        if silent or any(answer.died for answer in answers.values()):
            self.kill()
        if failures:
            (_, rank), *others = failures
            note = f"\n(ranks {[other for _, other in others]} failed after it)" if others else ""
            raise RankError(f"rank {rank} of {world}:\n{answers[rank].error}{note}")
        if silent:
            raise RankHang(f"ranks {silent} gave no answer for {timeout_s:g} s\n{stacks}")
        return [answers[rank].value for rank in range(world)]

    def _send(self, fn: Callable[..., Any], world: int, args: tuple[Any, ...]) -> None:
        self.calls += 1
        meeting = f"file://{self.folder}/call-{self.calls}"
        for rank, worker in enumerate(self.workers[:world]):
            try:
                worker.pipe.send_bytes(pickle.dumps((fn, RankContext(rank, world, meeting), args)))
            except OSError as error:
                self.kill()
                raise RankError(f"rank {rank} has died since the last call") from error

    def _answers(self, world: int, timeout_s: float) -> dict[int, _Answer]:
        """The answers in time; after the first failure the other ranks have a short time to fail too.

        Those that are stopped will not.
        """
        waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(self.workers[:world])}
        answers: dict[int, _Answer] = {}
        deadline, failed = time.monotonic() + timeout_s, False
        while waiting and (left := deadline - time.monotonic()) > 0:
            if failed and all(process_state(self.workers[rank].process.pid) == "T" for rank in waiting.values()):
                break
            for pipe in multiprocessing.connection.wait(list(waiting), min(left, LOOK_S) if failed else left):
                rank = waiting.pop(pipe)
                answers[rank] = self._answer(rank)
                if answers[rank].error is not None:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _answer(self, rank: int) -> _Answer:
        try:
            answer: _Answer = pickle.loads(self.workers[rank].pipe.recv_bytes())
            return answer
        except (EOFError, ConnectionError):
            process = self.workers[rank].process
            process.join(1)
            # Time 0: what other ranks complain of follows from this death.
            return _Answer(error=f"the process died (exit code {process.exitcode})", died=True)

    def _grow(self, world: int) -> None:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = multiprocessing.get_context("forkserver")
        # Dynamo, which torch imports for the first recomputation, costs each process as much as all the rest.
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "trainer.run.train"])
        while len(self.workers) < world:
            ours, theirs = context.Pipe()
            stack_file = self.folder / f"stack-{len(self.workers)}"
            process = context.Process(target=_serve, args=(theirs, str(stack_file)), daemon=True)
            process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours))

    def _stacks(self, ranks: list[int]) -> str:
        """The stack of each of these ranks, from faulthandler."""
        assert self.folder is not None, "there are workers"
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(0.3 if ranks else 0)
        return "\n".join(f"rank {rank}:\n{(self.folder / f'stack-{rank}').read_text()}" for rank in ranks)

    def kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.pipe.close()
        self.workers = []
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


def _serve(pipe: multiprocessing.connection.Connection, stack_file: str) -> None:
    """The main loop of a pool process: one call after another until the pipe closes."""
    import torch

    from trainer.parallel.world import leave_world

    os.chdir(Path(stack_file).parent)  # the folder of the test in which the fork server began may be gone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what the fork server imported is shared as long as nothing touches it
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with Path(stack_file).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        while True:
            try:
                job = pipe.recv_bytes()
            except EOFError:
                return
            world = 1
            try:
                fn, context, args = pickle.loads(job)
                world = context.world
                answer = pickle.dumps(_Answer(value=fn(context, *args)))
            # Whatever a test's body raises, pytest's own outcomes included, belongs to the caller.
            except BaseException:
                # A rank that could not join counts its groups differently from the others, and would never meet them
                # again.
                lost = world > 1 and not torch.distributed.is_initialized()
                answer = pickle.dumps(_Answer(error=traceback.format_exc(), time_s=time.monotonic(), died=lost))
            leave_world()  # before answering: a rank that waits for this one then loses its connection
            pipe.send_bytes(answer)


_POOL = _Pool()
atexit.register(_POOL.kill)
