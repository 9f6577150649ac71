"""The files that a run writes while it trains: metrics.jsonl, events.jsonl, ranks.json.

One JSON object per line, each written in one call, so that a reader may look at any time and a killed run loses at most
the line being written. What is unusual: at a start, lines of steps that will be repeated move to metrics-1.jsonl (or
the next free number), so that a curve never holds a step twice and no measurement is lost; events stay, because they
did happen. Values that JSON cannot represent (NaN, infinities) become null.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mdata import DamageError, MdataError, StoppedError
from mdata.util import atomic_io, file_lock
from mdata.util.regular_files import regular_file
from trainer.optim.optimizer import Optimizer
from trainer.run.goodput import Tally
from trainer.run.log_text import event_text, losses_text

METRICS, EVENTS, RANKS = "metrics.jsonl", "events.jsonl", "ranks.json"
PUT_ASIDE = "metrics-{}.jsonl"  # lines of steps that were repeated
ENDS = ("finished", "stopped", "failed", "rollback")  # events that end a start of a run
ALIVE_S = 10.0  # seconds between signs of life


class MetricsWriter:
    """Appends to the metrics and events of a run folder; used on one rank of a run.

    Args:
        folder: the run folder, which exists.
        resumed_step: the number of finished steps from which the run continues; lines of later steps are put aside.
            None: a new run with an empty curve.
        tell: called with each line for the terminal.
        tally: of the run's time so far; each line says the goodput with it.
        check_owner: called before each line; raises an error where a newer attempt writes the folder.

    Attributes:
        put_aside: the file with lines that do not belong to this run's curve; None: there were none.
        after_line: called after each line of metrics.jsonl.

    Raises:
        OSError: from the file system. DamageError: an earlier curve cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resumed_step: int | None = None,
        tell: Callable[[str], None] = lambda text: None,
        tally: Tally | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self._tell, self._check_owner, self.tally = tell, check_owner, tally
        self._alive_s, self._has_ended = 0.0, False
        self.after_line: Callable[[], None] = lambda: None
        self._folder = folder
        self.put_aside = _keep_until(folder, resumed_step)
        _drop_torn_end(folder / EVENTS)
        self._metrics = _open_append(folder / METRICS)
        self._events = _open_append(folder / EVENTS)

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line of metrics.jsonl: the number of finished steps and the measurements."""
        self._check_owner()
        line = {"step": step, **values}
        if self.tally is not None:
            self.tally.line(line)
            line["goodput"] = round(self.tally.goodput().share, 4)
        with atomic_io.named_in_errors(self._folder / METRICS):
            atomic_io.write_all(self._metrics, _line(line))
        self.after_line()
        for text in losses_text(step, values):
            self._tell(text)

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Write one line of events.jsonl: time (seconds since 1970), event, and its facts."""
        self._check_owner()
        line = {"time_s": round(time.time(), 3), "event": kind, **facts}
        if self.tally is not None:
            self.tally.event(line)
        with atomic_io.named_in_errors(self._folder / EVENTS):
            atomic_io.write_all(self._events, _line(line))
        self._has_ended |= kind in ENDS
        if text := event_text(kind, facts):
            self._tell(text)

    def alive(self) -> None:
        """Update the file's time after a step without a line, so that mtrain status and trackers see progress."""
        now_s = time.monotonic()
        if now_s - self._alive_s >= ALIVE_S:
            self._alive_s = now_s
            os.utime(self._metrics)

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        for fd, name in ((self._metrics, METRICS), (self._events, EVENTS)):
            with atomic_io.named_in_errors(self._folder / name):
                atomic_io.sync(fd)

    def close(self) -> None:
        """Sync and close both files."""
        self.sync()
        for fd in (self._metrics, self._events):
            os.close(fd)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._has_ended:
                self._record_end(error)
        finally:
            self.close()

    def _record_end(self, error: BaseException) -> None:
        """Record how the run ends, for trackers, unless a newer attempt has taken the folder or the disk is full."""
        stopped = isinstance(error, KeyboardInterrupt | StoppedError)
        text = next(iter(str(error).splitlines()), "") or type(error).__name__
        with suppress(OSError, MdataError):
            self.event("stopped" if stopped else "failed", {"saved": False} if stopped else {"error": text})


def append_event(folder: Path, line: Mapping[str, Any]) -> None:
    """Add a line to the events of a run that this process does not train; it may be active."""
    if file_lock.held_by(folder / ".lock") is None:
        _drop_torn_end(folder / EVENTS)
    events = _open_append(folder / EVENTS)
    try:
        atomic_io.write_all(events, _line(line))
        atomic_io.sync(events)
    finally:
        os.close(events)


def write_ranks(folder: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write ranks.json: what each rank holds, in rank order."""
    atomic_io.atomic_write(folder / RANKS, (json.dumps(plain(ranks), indent=1) + "\n").encode())


def read_metrics(folder: Path, *, name: str = METRICS) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in order; empty if there are none yet. A torn last line is left out.

    Args:
        name: of a file with lines that were put aside.

    Raises:
        DamageError: a line that is not a JSON object, or has no step.
    """
    return [_with_step(line, folder / name) for line in _read_lines(folder / name)]


def last_metrics(folder: Path, num_bytes: int = 1 << 19) -> list[dict[str, Any]]:
    """The last lines of metrics.jsonl that fit into this many bytes, so that the cost does not grow with the run.

    Raises:
        DamageError: as `read_metrics`.
    """
    path = folder / METRICS
    with regular_file(path).open("rb") as file:
        first = max(0, file.seek(0, os.SEEK_END) - num_bytes)
        file.seek(first)
        lines = file.read().split(b"\n")[1 if first else 0 : -1]
    return [parse_line(line, path) for line in lines if line]


def parse_line(line: bytes, path: Path) -> dict[str, Any]:
    """Parse a line of metrics.jsonl.

    Raises:
        DamageError: as `read_metrics`.
    """
    return _with_step(_parsed(line, path, 0), path)


def _with_step(line: dict[str, Any], path: Path) -> dict[str, Any]:
    if type(line.get("step")) is not int:
        raise DamageError(f"{path} has a line without a step", found=json.dumps(line)[:80], fix="remove that line")
    return line


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl; see read_metrics."""
    return _read_lines(folder / EVENTS)


def tally_of(folder: Path, sequence_length: int, *, background: bool = True) -> Tally:
    """The tally of all starts in a run folder.

    Raises:
        DamageError: a line that is not JSON.
    """
    tally = Tally(sequence_length, background=background)
    aside = (path.name for path in folder.glob(PUT_ASIDE.format("*")))
    lines = [line for name in (METRICS, *aside) for line in read_metrics(folder, name=name)]
    timed = [line for line in lines if {"time_s", "consumed_samples"} <= line.keys()]  # a user may add others
    signs = [(float(line["time_s"]), 1, line) for line in timed]
    signs += [(float(event.get("time_s") or 0.0), 0, event) for event in read_events(folder)]
    for _, is_line, sign in sorted(signs, key=lambda sign: sign[:2]):
        (tally.line if is_line else tally.event)(sign)
    return tally


def _keep_until(folder: Path, resumed_step: int | None) -> Path | None:
    """Move the lines of later steps to a separate file, which is returned."""
    path = folder / METRICS
    if resumed_step is None:
        if not path.exists() or path.stat().st_size == 0:
            return None
        aside = _free_name(folder)
        atomic_io.rename(path, aside)
        return aside
    lines = read_metrics(folder)
    later = [line for line in lines if line["step"] > resumed_step]
    aside = _free_name(folder)
    if later:
        atomic_io.atomic_write(aside, b"".join(map(_line, later)))
    if path.exists():
        atomic_io.atomic_write(path, b"".join(_line(line) for line in lines if line["step"] <= resumed_step))
    return aside if later else None


def _free_name(folder: Path) -> Path:
    names = (folder / PUT_ASIDE.format(number) for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _drop_torn_end(path: Path) -> None:
    """Remove an incomplete last line, so that the next line does not continue it."""
    content = path.read_bytes() if path.exists() else b""
    complete_lines = content[: content.rfind(b"\n") + 1]
    if complete_lines != content:
        atomic_io.atomic_write(path, complete_lines)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        content = regular_file(path).read_bytes()
    except FileNotFoundError:
        return []
    complete_lines, _, _torn = content.rpartition(b"\n")  # bytes: a line may be torn inside a character
    return [_parsed(line, path, number) for number, line in enumerate(complete_lines.split(b"\n"), 1) if line]


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or no UTF-8
        value = None
    if not isinstance(value, dict):
        shown = repr(line[:80].decode(errors="replace"))
        raise DamageError(f"{path}, line {number} is not a JSON object", found=shown, fix="remove that line")
    return value


def _open_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(plain(value), ensure_ascii=False) + "\n").encode()


def plain(value: Any) -> Any:
    """The value, with None for every number that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def held_parameters(optimizer: Optimizer, stages: Iterable[int]) -> dict[str, Any]:
    """The parameters of one rank, for ranks.json: stages, counts, bytes, and each parameter with its logical pieces."""
    layout, buffers = optimizer.buffers.layout, optimizer.buffers
    real = {slot.spec: sum(math.prod(piece.size) for piece in slot.spec.pieces) for slot in layout.slots}
    return {
        "stages": list(stages),
        "split_parameters": sum(count for spec, count in real.items() if "tp" not in spec.copies),
        "copied_parameters": sum(count for spec, count in real.items() if "tp" in spec.copies),
        "buffer_elements": layout.size,
        "owned_elements": buffers.owned.size,
        "kept_bytes": {
            "parameters": buffers.parameters.values.nbytes,
            "gradients": buffers.gradients.values.nbytes,
            "optimizer": sum(values.nbytes for values in optimizer.outside_buffers),
        },
        "parameters": [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "copies": [axis for axis in spec.copies if optimizer.groups[axis].size > 1],
                "pieces": [{"name": p.name, "start": list(p.start), "size": list(p.size)} for p in spec.pieces],
            }
            for spec in real
        ],
    }
