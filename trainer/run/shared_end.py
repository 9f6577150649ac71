"""Ends all ranks of a command when one of them fails, with that rank's error.

For ranks that torchrun or Slurm starts and that share a model: `mtrain generate`, `eval` and `logits`. Training has the
watchdog, which sees more. A rank that fails leaves its report in the store of all ranks; a thread of each other rank
reads it and ends its process, because the main thread may wait in an NCCL collective, which does not notice a lost
rank. A rank that was killed leaves no report, but its thread stops counting. Silence is counted in ticks of the
listener, so that a job that is suspended as a whole continues.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict

from torch.distributed.distributed_c10d import Store

from mdata import ResourceError
from trainer.errors import LostRankError
from trainer.run.launch import RankReport, explained_end

TICK_S = 0.5
SILENT_TICKS = 16  # without a new count: the rank is lost
LEFT = "left"
_REPORT = "mtrain/report"


@contextmanager
def ended_together(
    store: Store,
    *,
    rank: int,
    world_size: int,
    end: Callable[[int, str], None],
    success: type[Exception] | tuple[()] = (),
    tick_s: float = TICK_S,
) -> Iterator[None]:
    """Within the block, an error that ends one rank ends all.

    Args:
        store: of all ranks, over a connection that nothing else uses.
        end: ends this process with an exit code and a message; does not return.
        success: an error of this type ends the other ranks with exit code 0 and no message.
    """
    shared = _SharedEnd(store, rank, world_size, end, tick_s)
    shared.thread.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, LostRankError):  # the other rank's report says why, or its silence will
            shared.thread.join(2 * SILENT_TICKS * tick_s)
        if isinstance(error, success):
            shared.report(0, "")
        else:
            _, code, message = explained_end(error, rank=rank)
            shared.report(code, message)
        raise
    finally:
        shared.leave()


class _SharedEnd:
    """A rank's thread that counts in the store, and reads the counts and reports of others."""

    def __init__(
        self, store: Store, rank: int, world_size: int, end: Callable[[int, str], None], tick_s: float
    ) -> None:
        self._store, self._rank, self._world_size, self._end, self._tick_s = store, rank, world_size, end, tick_s
        self._left = threading.Event()
        self._counts = {other: (b"", 0) for other in (range(world_size) if rank == 0 else [0]) if other != rank}
        self.thread = threading.Thread(target=self._watch, name="shared end", daemon=True)

    def report(self, code: int, message: str) -> None:
        """Leave the end of this rank for the others, unless one is there already."""
        with suppress(RuntimeError):  # the store may be gone with its process
            self._leave_report(RankReport(rank=self._rank, exit_code=code, message=message))

    def leave(self) -> None:
        """End the thread, then wait a while for other ranks, which may need the store of this process."""
        self._left.set()
        self.thread.join(2 * self._tick_s)
        if self.thread.is_alive():  # the store does not answer
            return
        until_s = time.monotonic() + 6 * self._tick_s
        with suppress(RuntimeError):
            self._store.set(_key(self._rank), LEFT)
            while time.monotonic() < until_s and self._others_here():
                time.sleep(self._tick_s / 10)

    def _others_here(self) -> bool:
        keys = [_key(rank) for rank in range(self._world_size)]
        return not self._store.check(keys) or any(self._store.get(key) != LEFT.encode() for key in keys)

    def _watch(self) -> None:
        count = failures = 0
        while not self._left.wait(self._tick_s if count else 0):
            count += 1
            try:
                self._store.set(_key(self._rank), str(count))
                if self._store.check([_REPORT]):
                    report = RankReport(**json.loads(self._store.get(_REPORT)))
                    if report.rank != self._rank:
                        self._store.set(_key(self._rank), LEFT)
                        self._end(report.exit_code, self._message(report))
                        return
                self._listen()
                failures = 0
            except RuntimeError as error:
                failures += 1
                if failures == 3:
                    self._end(ResourceError.exit_code, str(self._without_store(error)))
                    return

    def _listen(self) -> None:
        """Report a rank that no longer counts."""
        for rank, (before, silent) in self._counts.items():
            key = _key(rank)
            now = self._store.get(key) if self._store.check([key]) else b""
            silent = silent + 1 if now == before and now not in (b"", LEFT.encode()) else 0
            self._counts[rank] = now, silent
            if silent >= SILENT_TICKS:
                text = f"it has not responded for {silent * self._tick_s:.0f} s: it was killed, or its machine is gone"
                self._leave_report(RankReport(rank=rank, exit_code=ResourceError.exit_code, message=text))

    def _without_store(self, error: RuntimeError) -> ResourceError:
        return ResourceError(
            f"rank {self._rank} of {self._world_size} cannot reach the store of all ranks",
            found=str(error).partition("\n")[0],
            fix="check the output of rank 0 and of the launcher, one of which holds the store",
        )

    def _leave_report(self, report: RankReport) -> None:
        self._store.compare_set(_REPORT, "", json.dumps(asdict(report)))

    def _message(self, report: RankReport) -> str:
        if not report.message:
            return ""
        text = report.message.removeprefix(f"rank {report.rank}: ")
        return f"rank {report.rank} of {self._world_size} failed: {text}"


def _key(rank: int) -> str:
    return f"mtrain/alive/{rank}"
