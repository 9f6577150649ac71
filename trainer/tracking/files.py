"""What is sent to trackers, from the files of a run folder: new lines, numbers, alerts, and the run's id.

    tracking.json   {"id": "k3j2...", "origin": "9f1c..."}

`id` names the run in trackers; each checkpoint has a copy of the file, so that a run that continues in another folder
continues its curves. `origin` is drawn with it and stored in each tracker: a tracker run with another origin belongs to
another run and is not written to. What is unusual: a killed run leaves no line in events.jsonl, so a start without an
end is a crash once its process is gone, or once another start follows.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mdata import DamageError
from mdata.util import atomic_io
from mdata.util.regular_files import regular_file

TRACKING, METRICS, EVENTS, TRACK_LOG = "tracking.json", "metrics.jsonl", "events.jsonl", "track.log"
AlertKind = Literal["start", "stop", "crash", "hang", "spike", "finish"]
_NOT_VALUES = ("step", "time_s")


@dataclass(frozen=True, slots=True)
class RunId:
    """The run in trackers: see the top of this file."""

    id: str
    origin: str


def run_id(folder: Path, *, wanted: str | None = None, stored: bytes | None = None) -> RunId:
    """The id of the run in a folder; draws and writes one if there is none.

    Args:
        wanted: track.id. stored: tracking.json of the checkpoint from which the run continues.

    Raises:
        DamageError: tracking.json cannot be read. OSError: from the file system.
    """
    path = folder / TRACKING
    content = regular_file(path).read_bytes() if path.exists() else stored
    run = _parsed(content, path) if content is not None else None
    if run is None or (wanted is not None and wanted != run.id):
        run = RunId(wanted or secrets.token_hex(6), secrets.token_hex(8))
        content = None
    if content is None or not path.exists():
        atomic_io.atomic_write(path, (json.dumps(asdict(run)) + "\n").encode())
    return run


def _parsed(content: bytes, path: Path) -> RunId:
    with suppress(ValueError, KeyError, TypeError):
        facts = json.loads(content)
        if type(facts["id"]) is str and type(facts["origin"]) is str and facts["id"]:
            return RunId(facts["id"], facts["origin"])
    fix = "delete it; trackers then get a new run with all steps"
    raise DamageError(f"{path} does not name the run in trackers", found=repr(content[:80]), fix=fix)


def tracking_file(folder: Path) -> dict[str, bytes]:
    """tracking.json by name, for a checkpoint; empty if the run has none."""
    with suppress(FileNotFoundError):
        return {TRACKING: (folder / TRACKING).read_bytes()}
    return {}


class Tail:
    """The new lines of a file to which another process appends; an incomplete line waits.

    A file that was replaced, as a run does when it goes back to a checkpoint, is read again from the beginning.

    Attributes:
        damaged: byte offsets of lines that are not JSON objects; they are skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._inode = path, 0, 0
        self.damaged: list[int] = []

    def read(self, most: int = 1000) -> list[dict[str, Any]]:
        """The next lines, at most `most`; empty if there are none yet."""
        lines = list[dict[str, Any]]()
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._at:
                    self._at, self._inode = 0, status.st_ino
                file.seek(self._at)
                while len(lines) < most and (line := file.readline()).endswith(b"\n"):
                    value = None
                    with suppress(ValueError, RecursionError):
                        value = json.loads(line)
                    if isinstance(value, dict):
                        lines.append(value)
                    elif line.strip():
                        self.damaged.append(self._at)
                    self._at += len(line)
        except FileNotFoundError:
            pass
        return lines

    @property
    def changed(self) -> tuple[int, int]:
        """A value that changes with every sign of life of the process that writes."""
        with suppress(OSError):
            status = self.path.stat()
            return status.st_mtime_ns, status.st_size
        return 0, 0


def numbers(line: Mapping[str, Any], *, prefix: str = "") -> dict[str, float]:
    """The numbers of a line of metrics.jsonl by name; those of a nested object are `object/name`."""
    values: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            values |= numbers(value, prefix=f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and (prefix or name not in _NOT_VALUES):
            values[prefix + name] = float(value)
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """Something to notify people of.

    Args:
        step: the last finished one, if known. time_s: seconds since 1970. facts: fields of the event.
    """

    kind: AlertKind
    text: str
    step: int | None
    time_s: float
    facts: Mapping[str, Any]


class Alerts:
    """Turns the events of a run, in order, into alerts.

    Attributes:
        running: whether the last start has no end yet.
        ended: how the last start ended; None: it runs.
    """

    def __init__(self) -> None:
        self.running = False
        self.ended: AlertKind | None = None

    def of(self, event: Mapping[str, Any]) -> Iterator[Alert]:
        """The alerts of the next event."""
        kind, time_s = event.get("event"), float(event.get("time_s") or 0.0)
        step = event.get("step") if type(event.get("step")) is int else None
        if kind == "start" and event.get("rolled_back"):
            self.running, self.ended = True, None  # the same process goes on
        elif kind == "start":
            if self.running:
                yield self.crash(time_s, step=None, why="it ended without recording why, and was started again")
            self.running, self.ended = True, None
            text = f"started from step {step}" if step else "started"
            yield Alert(kind="start", text=text, step=step, time_s=time_s, facts=event)
        elif kind in ("stopped", "finished", "failed"):
            self.running = False
            self.ended = "stop" if kind == "stopped" else "finish" if kind == "finished" else "crash"
            done = kind if step is None else f"{kind} after step {step}"  # a second signal ends a run within a step
            text = f"failed: {event.get('error')}" if kind == "failed" else done
            yield Alert(kind=self.ended, text=text, step=step, time_s=time_s, facts=event)
        elif kind == "spike":
            yield Alert(kind="spike", text=f"spike at step {step}", step=step, time_s=time_s, facts=event)

    def crash(self, time_s: float, *, step: int | None, why: str) -> Alert:
        """The run has ended without saying so."""
        self.running, self.ended = False, "crash"
        return Alert(kind="crash", text=f"crashed: {why}", step=step, time_s=time_s, facts={})
