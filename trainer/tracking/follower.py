"""The follower of a run: a process beside rank 0 that sends new lines of the run folder to trackers, and outlives it.

Not a thread of a rank: imports and uploads would hold the GIL where the host is the bottleneck. It has its own session,
so that signals to the ranks do not reach it; it exits at most a minute after the run. Each tracker has a thread, so one
that hangs delays no other. A tracker that fails is reopened, asked for its last step, and sent the later ones; its
error is reported once. What was not sent in time can be sent later from the run folder: `mtrain track RUN --to NAME`.

    track.log       output of the follower and of the tracker libraries
    webhook.json    {"events": 12, "running": true}: events already sent to the webhook, which cannot be asked
    opentelemetry.json  the same, and the last step whose evaluation was sent
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mdata import UsageError
from mdata.errors import hide_secrets
from mdata.util import atomic_io, file_lock
from mdata.util.commands import command_line
from mdata.util.stop_signals import LibraryError, library_errors
from trainer.config.parse import load_config, section_types
from trainer.config.sections import RunConfig
from trainer.tracking.files import EVENTS, METRICS, TRACK_LOG, Alert, Alerts, Tail, numbers, run_id
from trainer.tracking.trackers import TRACKERS, WEBHOOK_TIMEOUT_S, TrackedRun, Tracker

SAID = "mtrain: track: "  # prefix of the lines of track.log that are for the user
POLL_S = 1.0
PATIENCE_S = 60.0  # after the end of the run
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # between attempts; the last one from then on
SLOW_S = 3.0  # after which a run that waits for its trackers says so
_NOT_SENT = frozenset({"track.webhook_url"})


def tracked_run(folder: Path, config: RunConfig | None = None) -> TrackedRun:
    """The run in a folder, for trackers.

    Raises:
        UsageError: there is no run in the folder. DamageError: tracking.json cannot be read.
    """
    config = config or load_config(folder / "config.toml")
    settings = config.track
    flat = {
        f"{name}.{key}": value
        for name in section_types()
        if "." not in name
        for key, value in _fields(getattr(config, name))
        if value is not None and f"{name}.{key}" not in _NOT_SENT
    }
    name = settings.name or folder.absolute().name
    id_ = run_id(folder, wanted=settings.id)
    return TrackedRun(folder=folder, name=name, id=id_, settings=settings, config=MappingProxyType(flat))


def _fields(section: Any) -> Iterator[tuple[str, Any]]:
    for key in section.__dataclass_fields__:
        value = getattr(section, key)
        if isinstance(value, str | int | float | None):
            yield key, value
        elif isinstance(value, tuple):
            yield key, ", ".join(map(str, value))


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerTimes:
    """When a follower looks, tries again and gives up, in seconds; see the constants of this file."""

    poll_s: float = POLL_S
    patience_s: float = PATIENCE_S
    pauses_s: Sequence[float] = PAUSES_S


class Sending:
    """Sends the lines and events of a run to one tracker.

    Args:
        name, tracker: of TRACKERS. run: which.
        alive: whether the process that writes the files still runs. over: set once it does not, or the run has ended.
        follow: keep sending until the run ends; otherwise send only what exists now.
        tell: prints a line for the user.

    Attributes:
        lacks: why something could not be sent; None: everything was sent.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        *,
        alive: Callable[[], bool],
        tell: Callable[[str], None],
        over: threading.Event | None = None,
        follow: bool = True,
        times: FollowerTimes = FollowerTimes(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.lacks: str | None = f"{name}: nothing sent yet"
        self._tracker, self._run, self._alive, self._follow, self._tell = tracker, run, alive, follow, tell
        self._times, self._clock, self._over = times, clock, over or threading.Event()
        self._told, self._crash_told, self._step_told = self._position()  # what the tracker was sent before
        self._is_open = self._worked = self._said = self._hung = False
        self._ended_s: float | None = None  # when it was seen that the run has ended
        self._sign: tuple[Any, ...] = ()  # of life
        self._sign_s = clock()
        self._rewind()

    def _rewind(self) -> None:
        """Read the files from their beginnings."""
        self._metrics, self._events = (Tail(self._run.folder / file) for file in (METRICS, EVENTS))
        self._alerts, self._num_events, self._last = Alerts(), 0, 0

    def run(self) -> None:
        """Send until the run has ended, or the tracker can never work."""
        failures = 0
        while True:
            alive = self._alive() and not self._over.is_set()  # first: what it wrote last is read after this
            try:
                if self._round(alive):
                    return
                failures = 0
            except UsageError as error:
                self.lacks = f"{self.name}: {error}"
                self._tell(f"{self.lacks}\n  the run continues without this tracker")
                return
            except LibraryError as error:
                self._fail(hide_secrets(str(error)))
                pause = self._times.pauses_s[min(failures, len(self._times.pauses_s) - 1)]
                failures += 1
                if self._gives_up(alive, pause):
                    return
                if self._over.is_set():
                    time.sleep(pause)
                else:
                    self._over.wait(pause)

    def _fail(self, text: str) -> None:
        self.lacks = f"{self.name}: {text}"
        if not self._said:
            self._said = True
            again = f"mtrain track {self._run.folder} --to {self.name}"
            self._tell(f"{self.lacks}\n  the run continues, and sending is retried; after the run: {again}")

    def _gives_up(self, alive: bool, pause: float) -> bool:
        if alive and self._follow and self._alerts.ended is None:
            self._ended_s = None
            return False
        self._ended_s = self._clock() if self._ended_s is None else self._ended_s
        patience_s = self._times.patience_s if self._worked else 0.0  # one without credentials is not waited for
        return not self._follow or self._clock() + pause - self._ended_s > patience_s

    def _round(self, alive: bool) -> bool:
        """Send what is new, or wait if nothing is; returns whether the run has ended and everything is sent.

        Raises:
            LibraryError: the tracker failed; the next round begins anew. UsageError: it can never work.
        """
        try:
            with library_errors(passed=(UsageError,)):
                if not self._is_open:
                    self._rewind()
                    self._tracker.open(self._run)
                    self._last = self._step_told if self._tracker.keeps_position else self._tracker.last_step()
                    self._is_open = self._worked = True
                sent = self._send_events() | self._send_lines()
                self._tracker.flush()
                if self._tracker.sent_step > self._step_told and self._num_events >= self._told:
                    self._step_told = self._tracker.sent_step
                    self._store_position()
                if self._alerts.running and alive:
                    self._look_for_hang()
                self.lacks = None if not sent else self.lacks
                over = not sent and not (alive and self._follow and self._alerts.ended is None)
                if over:
                    self._end(alive)
        except (LibraryError, UsageError):
            with suppress(LibraryError, UsageError), library_errors():
                self._tracker.close(None)
            self._is_open = False
            raise
        self._name_damage()
        if not sent and not over:
            self._over.wait(self._times.poll_s)
        return over

    def _send_lines(self) -> bool:
        """Send some lines, except those of steps that the tracker already has."""
        lines = self._metrics.read()
        for line in lines:
            step = line.get("step")
            if type(step) is int and step > self._last:
                self._tracker.log(step, numbers(line), float(line.get("time_s") or 0.0))
                self._last = step
        return bool(lines)

    def _send_events(self) -> bool:
        """Send some alerts; those of earlier starts are not sent late."""
        events = self._events.read()
        for event in events:
            self._num_events += 1
            is_new = self._num_events > self._told
            self._tracker.read(event, [*self._alerts.of(event)], new=is_new)
            if is_new:
                self._told, self._crash_told = self._num_events, False
                self._store_position()
            elif self._num_events == self._told and self._crash_told:
                self._alerts.running = False
        return bool(events)

    def _position(self) -> tuple[int, bool, int]:
        """How many events were sent to the tracker before, whether a crash after them was, and the last step."""
        if self._tracker.keeps_position:
            with suppress(OSError, ValueError, KeyError, TypeError):
                facts = json.loads(self._position_path.read_bytes())
                return int(facts["events"]), not facts["running"], int(facts.get("step", 0))
        if self._tracker.wants_all:
            return 0, False, 0
        events = _all_lines(self._run.folder / EVENTS)
        is_start = [event.get("event") == "start" and not event.get("rolled_back") for event in events]
        starts = [number for number, is_one in enumerate(is_start) if is_one]  # a run that rolled back goes on
        return (starts[-1] if starts else 0), True, 0

    def _store_position(self) -> None:
        if self._tracker.keeps_position:
            facts = {"events": self._told, "running": self._alerts.running}
            facts |= {"step": self._step_told} if self._step_told else {}
            atomic_io.atomic_write(self._position_path, json.dumps(facts).encode())

    @property
    def _position_path(self) -> Path:
        return self._run.folder / f"{self.name}.json"

    def _look_for_hang(self) -> None:
        sign = (self._metrics.changed, self._events.changed)
        if sign != self._sign:
            self._sign, self._sign_s, self._hung = sign, self._clock(), False
        silent_s = self._clock() - self._sign_s
        if silent_s > 60 * self._run.settings.hang_minutes and not self._hung:
            text = f"no sign of life for {silent_s / 60:.0f} minutes; last logged step {self._last}"
            self._tracker.event(Alert(kind="hang", text=text, step=self._last, time_s=time.time(), facts={}))
            self._hung = True

    def _end(self, alive: bool) -> None:
        if self._alerts.running and not alive and self._last == _planned_steps(self._run.folder):
            self._alerts.running, self._alerts.ended = False, "finish"  # versions before 0.1 do not say so
        elif self._alerts.running and not alive:
            why = f"its process vanished without recording why; last logged step {self._last}"
            self._tracker.event(self._alerts.crash(time.time(), step=self._last, why=why))
            self._store_position()
        self._tracker.close(self._alerts.ended)

    def _name_damage(self) -> None:
        for tail in (self._metrics, self._events):
            if tail.damaged:
                places = ", ".join(map(str, tail.damaged[:5]))
                self._tell(f"{self.name}: {tail.path} has lines that are not JSON objects, at byte {places}; skipped")
                tail.damaged.clear()


def _planned_steps(folder: Path) -> int | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((folder / "plan.json").read_bytes())["steps"])
    return None


def _all_lines(path: Path) -> list[dict[str, Any]]:
    tail, lines = Tail(path), list[dict[str, Any]]()
    while more := tail.read():
        lines += more
    return lines


def send(
    run: TrackedRun,
    names: Sequence[str],
    *,
    alive: Callable[[], bool],
    tell: Callable[[str], None],
    follow: bool,
    times: FollowerTimes = FollowerTimes(),
) -> list[str]:
    """Send a run to trackers, each in its own thread; returns what could not be sent, by tracker.

    Args:
        names: of TRACKERS. alive, tell, follow: see `Sending`.
    """
    over = threading.Event()
    sendings = [
        Sending(name, TRACKERS[name](), run, alive=alive, over=over, tell=tell, follow=follow, times=times)
        for name in names
    ]
    threads = [
        threading.Thread(target=_locked, args=(sending, run, follow, times), daemon=True) for sending in sendings
    ]
    for thread in threads:
        thread.start()
    ended_s: float | None = None
    events, alerts = Tail(run.folder / EVENTS), Alerts()
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(0.2, times.poll_s))
        for event in events.read():
            list(alerts.of(event))
        ended = not follow or not alive() or alerts.ended is not None
        ended_s = (ended_s or time.monotonic()) if ended else None
        if ended and follow:
            over.set()
        if ended_s is not None and time.monotonic() - ended_s > times.patience_s + WEBHOOK_TIMEOUT_S:
            break  # a library hangs
    stuck = {thread: sending for thread, sending in zip(threads, sendings, strict=True) if thread.is_alive()}
    for sending in stuck.values():
        sending.lacks = sending.lacks or f"{sending.name}: no response"
    return [sending.lacks for sending in sendings if sending.lacks]


def _locked(sending: Sending, run: TrackedRun, follow: bool, times: FollowerTimes) -> None:
    """Send while no other process does: the follower of an earlier start may still be sending to this tracker."""
    held = (f"another process is sending this run to {sending.name}", "wait for it; it sends everything")
    while True:
        try:
            with file_lock.hold(run.folder / f".track-{sending.name}.lock", remove=True, held=held):
                sending.run()
            return
        except UsageError as error:
            sending.lacks = str(error)
            if not follow:
                return
            time.sleep(times.poll_s)


class Follower:
    """The follower as rank 0 sees it; it does nothing until it is started, and follows across rollbacks."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._log, self._said = note, Path(TRACK_LOG), 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path) -> None:
        """Start the process, unless it runs, for a run folder with config.toml and events.jsonl."""
        if self._process is not None:
            return
        self._log = folder / TRACK_LOG
        words = [*command_line("mtrain"), "track", str(folder), "--follow", "--parent", str(os.getpid())]
        try:
            log = atomic_io.open_no_link(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                self._said = os.fstat(log).st_size
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                )
            finally:
                os.close(log)
        except OSError as error:
            self._note(f"the trackers could not be started: {error}; send the run afterwards: mtrain track {folder}")

    def poll(self) -> None:
        """Print the follower's new lines for the user."""
        if self._process is None:
            return
        with suppress(OSError), self._log.open("rb") as log:
            log.seek(self._said)
            content = log.read()
            complete = content[: content.rfind(b"\n") + 1]
            self._said += len(complete)
            for text in told_lines(complete.decode(errors="replace")):
                self._note(text)

    def close(self) -> None:
        """Wait until everything is sent or the follower gives up."""
        began_s, said = time.monotonic(), False
        while self._process is not None and self._process.poll() is None:
            waited_s = time.monotonic() - began_s
            if waited_s > SLOW_S and not said:
                said = True
                self._note(f"waiting for the trackers, at most {PATIENCE_S + WEBHOOK_TIMEOUT_S:.0f} s")
            if waited_s > PATIENCE_S + 2 * WEBHOOK_TIMEOUT_S:
                break
            time.sleep(0.05)
            self.poll()
        self.poll()


def told_lines(text: str) -> Iterator[str]:
    """The follower's lines for the user, each with the indented lines below it."""
    lines, messages = text.splitlines(), list[str]()
    for line in lines:
        if line.startswith(SAID):
            messages.append(line.removeprefix(SAID.removesuffix("track: ")))
        elif messages and line.startswith("  "):
            messages[-1] += f"\n{line}"
    yield from messages
