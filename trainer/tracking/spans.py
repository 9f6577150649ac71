"""A run as a trace: spans of the run, its attempts, checkpoints and evaluations, from its events and lines. Pure.

Ids are hashes of the run's origin and of what a span is, so a span that is sent twice is the same span. A span is known
once it has ended: the run's when it finishes, an attempt's when it ends or is seen to have crashed; what happened in an
attempt (spikes, rollbacks, hangs, a crash) are events of its span. A return from a spike begins no attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.tracking.files import Alert

IN_ATTEMPTS = ("spike", "rollback")  # events of events.jsonl that its span has
_OF_A_START = ("attempt", "host", "job", "world_size", "device")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """An event of a span."""

    name: str
    time_s: float
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A span that has ended.

    Args:
        key: what its id is made of. parent: key of another; None: it is the run's own.
        begin_s, end_s: seconds since 1970. facts: its attributes. error: why it failed; None: it did not.
    """

    key: str
    name: str
    parent: str | None
    begin_s: float
    end_s: float
    facts: Mapping[str, Any]
    moments: tuple[Moment, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class _Attempt:
    number: int
    begin_s: float
    facts: dict[str, Any]
    moments: list[Moment] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"attempt-{self.number}"


class Trace:
    """Turns all events of a run, in order from the first, into spans; lines and alerts between them."""

    def __init__(self) -> None:
        self._attempts: list[_Attempt] = []
        self._is_finished = False
        self._before_s = self._last_s = 0.0  # times of the last two events

    def event(self, event: Mapping[str, Any]) -> Iterator[Span]:
        """Take a line of events.jsonl; the span that ends with it, unless it ends an attempt (see `alert`)."""
        kind, time_s = event.get("event"), float(event.get("time_s") or 0.0)
        self._before_s, self._last_s = self._last_s, time_s
        if kind in IN_ATTEMPTS and self._attempts:
            self._attempts[-1].moments.append(Moment(name=str(kind), time_s=time_s, facts=event))
        elif kind == "saved":
            facts = {name: event.get(name) for name in ("step", "checkpoint")}
            seconds = float(event.get("seconds") or 0.0)
            yield self._inside("save", event.get("step"), time_s - seconds, seconds, facts=facts)

    def evaluation(self, step: int, values: Mapping[str, float], time_s: float) -> Iterator[Span]:
        """Take the numbers of a line of metrics.jsonl; the span of the evaluation that followed it, if one did."""
        if "eval_s" in values:
            facts = {"step": step, **{name: x for name, x in values.items() if name.startswith(("valid/", "test/"))}}
            yield self._inside("evaluation", step, time_s, values["eval_s"], facts=facts)

    def alert(self, alert: Alert) -> Iterator[Span]:
        """Take an alert of the last event, or of what was seen without one; the spans that end with it."""
        if alert.kind == "start":
            begin_s = alert.time_s - float(alert.facts.get("setup_s") or 0.0)
            facts = {name: alert.facts[name] for name in _OF_A_START if alert.facts.get(name) is not None}
            self._attempts.append(_Attempt(len(self._attempts) + 1, begin_s, {**facts, "first_step": alert.step}))
        elif alert.kind == "hang" and self._attempts:
            self._attempts[-1].moments.append(Moment(name="hang", time_s=alert.time_s, facts={"text": alert.text}))
        elif alert.kind in ("stop", "finish", "crash") and self._attempts:
            yield self._ended(self._attempts[-1], alert)
            if alert.kind == "finish" and not self._is_finished:
                self._is_finished = True
                begin_s, facts = self._attempts[0].begin_s, {"attempts": len(self._attempts), "step": alert.step}
                yield Span(key="run", name="run", parent=None, begin_s=begin_s, end_s=alert.time_s, facts=facts)

    def _ended(self, attempt: _Attempt, alert: Alert) -> Span:
        end_s, error = alert.time_s, None
        if alert.kind == "crash":
            error = alert.text
            if not alert.facts and end_s == self._last_s:  # the next start is the first to say so
                end_s = max(attempt.begin_s, self._before_s)
            attempt.moments.append(Moment(name="crash", time_s=end_s, facts={"text": alert.text}))
        facts = {**attempt.facts, "last_step": alert.step, "ended": alert.kind}
        return Span(
            key=attempt.key,
            name="attempt",
            parent="run",
            begin_s=attempt.begin_s,
            end_s=end_s,
            facts=facts,
            moments=tuple(attempt.moments),
            error=error,
        )

    def _inside(self, name: str, step: object, begin_s: float, seconds: float, *, facts: Mapping[str, Any]) -> Span:
        """A span of the attempt that ran at that time."""
        attempt = next((attempt for attempt in reversed(self._attempts) if attempt.begin_s <= begin_s), None)
        parent = attempt.key if attempt else "run"
        return Span(
            key=f"{name}-{step}-{begin_s}",
            name=name,
            parent=parent,
            begin_s=begin_s,
            end_s=begin_s + seconds,
            facts=facts,
        )


def trace_id(origin: str) -> int:
    """The id of a run's trace: 16 bytes."""
    return int.from_bytes(hashlib.sha256(origin.encode()).digest()[:16])


def span_id(origin: str, key: str) -> int:
    """The id of a span: 8 bytes."""
    return int.from_bytes(hashlib.sha256(f"{origin}/{key}".encode()).digest()[:8])
