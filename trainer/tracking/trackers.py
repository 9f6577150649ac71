"""The trackers: each takes the lines of a run as numbers by step, and knows the last step that it has.

What is unusual: a tracker is asked for its last step when it is opened, and is sent the later ones. So a line may be
sent twice but is stored once, whatever was killed in between. Errors of a library become a LibraryError with its text;
follower.py retries. Libraries are imported inside the classes: a run needs only those that it uses.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mdata import UsageError
from mdata.errors import install_command
from mdata.util import atomic_io
from trainer.config.sections import TrackSection
from trainer.tracking.files import TRACK_LOG, Alert, AlertKind, RunId
from trainer.tracking.spans import Span, Trace, span_id, trace_id

WEBHOOK_URL = "MTRAIN_WEBHOOK_URL"
WEBHOOK_TIMEOUT_S = 10.0


class OtherRunError(UsageError):
    """The tracker's run of this id belongs to another run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What trackers get to know of a run.

    Args:
        folder: of the run. name: display name. id: in trackers.
        config: the settings of the run by section.key.
    """

    folder: Path
    name: str
    id: RunId
    settings: TrackSection
    config: Mapping[str, Any]

    def check_origin(self, tracker: str, origin: object) -> None:
        """Refuse a tracker run that another run created.

        Raises:
            OtherRunError: the origin stored in the tracker is not this run's.
        """
        if origin is not None and origin != self.id.origin:
            raise OtherRunError(
                f"the run {self.id.id!r} in {tracker} belongs to another run",
                found=f"origin {origin}",
                expected=f"origin {self.id.origin}, of {self.folder}/tracking.json",
                fix="set another track.id, track.project or folder, or leave track.id out",
            )


class Tracker:
    """A tracker; methods that a subclass leaves out do nothing.

    Methods may raise any error of their library.

    Attributes:
        keeps_position: whether its position is kept in the run folder, in NAME.json, because it cannot be queried.
        wants_all: it takes the events of earlier starts, too, if it was never sent any.
        sent_step: with `keeps_position`, the last step of whose line it has sent something.
    """

    keeps_position = wants_all = False
    sent_step = 0

    def open(self, run: TrackedRun) -> None:
        """Begin or continue the run.

        Raises:
            OtherRunError: its id is another run's.
        """

    def last_step(self) -> int:
        """The last step that the tracker has; 0: none."""
        return 0

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """Take the numbers of a step; steps come in order."""

    def read(self, event: Mapping[str, Any], alerts: Sequence[Alert], *, new: bool) -> None:
        """Take a line of events.jsonl with its alerts; all lines, from the first, after each opening.

        Args:
            new: the tracker was not sent this line before.
        """
        if new:
            for alert in alerts:
                self.event(alert)

    def event(self, alert: Alert) -> None:
        """Take an alert."""

    def flush(self) -> None:
        """Send what was logged."""

    def close(self, ended: AlertKind | None) -> None:
        """End the connection.

        Args:
            ended: how the run ended; None: it continues.
        """


class TensorBoard(Tracker):
    """Event files in a folder, one file per start."""

    def open(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        from tensorboard.summary import Writer

        self._folder = Path(run.settings.tensorboard_dir or run.folder / "tensorboard")
        self._folder.mkdir(parents=True, exist_ok=True)
        owner = self._folder / "mtrain-run.json"
        if owner.exists():
            run.check_origin(str(self._folder), json.loads(owner.read_bytes())["origin"])
        else:
            atomic_io.atomic_write(owner, json.dumps({"origin": run.id.origin}).encode())
        self._last = max(map(_last_in_event_file, self._folder.glob("*tfevents*")), default=0)
        self._writer = Writer(str(self._folder))

    def last_step(self) -> int:
        """See `Tracker`."""
        return self._last

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=time_s)

    def flush(self) -> None:
        """See `Tracker`."""
        self._writer.flush()

    def close(self, ended: AlertKind | None) -> None:
        """See `Tracker`."""
        self._writer.close()


def _last_in_event_file(path: Path) -> int:
    """The last step in a file, which a killed process may have left truncated."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return max((event.step for event in LegacyEventFileLoader(str(path)).Load()), default=0)


class WandB(Tracker):
    """Weights & Biases, with WANDB_MODE and WANDB_API_KEY.

    Offline, W&B starts a new folder at each start and continues none: the last step is that of all folders of this id,
    which `wandb sync` sends as one run.
    """

    def open(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        import wandb

        folder = Path(run.settings.wandb_dir or run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.settings.project,
            entity=run.settings.entity,
            name=run.name,
            id=run.id.id,
            dir=str(folder),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, x_disable_stats=True),
        )
        run.check_origin("Weights & Biases", dict(self._run.config).get("mtrain_origin"))
        self._run.config.update({"mtrain_origin": run.id.origin, **run.config}, allow_val_change=True)
        if self._run.offline:
            files = folder.glob(f"wandb/offline-run-*-{run.id.id}/run-{run.id.id}.wandb")
            self._last = max(map(_last_in_offline_file, files), default=0)
        else:
            self._last = max(0, self._run.starting_step - 1)

    def last_step(self) -> int:
        """See `Tracker`."""
        return self._last

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """See `Tracker`."""
        self._run.log({**values, "_timestamp": time_s}, step=step)

    def event(self, alert: Alert) -> None:
        """See `Tracker`."""
        if alert.kind in ("crash", "hang", "spike"):
            self._run.alert(title=f"{alert.kind}", text=alert.text)

    def close(self, ended: AlertKind | None) -> None:
        """See `Tracker`; a crashed run is shown as one."""
        self._run.finish(exit_code=1 if ended == "crash" else 0)


def _last_in_offline_file(path: Path) -> int:
    from wandb.proto import wandb_internal_pb2

    last = 0
    for content in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        last = max(last, record.history.step.num)
    return last


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The whole records of a file of W&B: blocks of 32 KiB as in LevelDB's log, after a header of 7 bytes.

    A part of a record: a checksum (4 bytes), a length (2), a kind (1: whole, 2: first, 3: middle, 4: last), the data.
    """
    at, parts = 7, list[bytes]()
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if not kind or at + 7 + length > len(content):
            return
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts.clear()


class MLflow(Tracker):
    """A run of an MLflow server or store, found by a tag: MLflow chooses the ids of its runs itself."""

    def open(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the follower tries again, and says why
        import mlflow

        uri = run.settings.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{run.folder.absolute()}/mlflow.db")
        experiment = self._client.get_experiment_by_name(run.settings.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.settings.project)
        runs = self._client.search_runs([number], filter_string=f"tags.`mtrain.id` = '{run.id.id}'")
        tags = {"mtrain.id": run.id.id, "mtrain.origin": run.id.origin}
        theirs = runs[0] if runs else self._client.create_run(number, run_name=run.name, tags=tags)
        run.check_origin("MLflow", theirs.data.tags.get("mtrain.origin"))
        self._id, self._taken = theirs.info.run_id, list[Any]()
        self._client.update_run(self._id, status="RUNNING")
        if not runs:
            self._log_parameters(run.config)

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)[:500]) for name, value in config.items()]
        for begin in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[begin : begin + 100])

    def last_step(self) -> int:
        """See `Tracker`; that of the number that every line has, which is sent last."""
        return max((metric.step for metric in self._client.get_metric_history(self._id, _LAST_SENT)), default=0)

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        names = {re.sub(r"[^\w./ -]", "_", name): value for name, value in values.items()} | {_LAST_SENT: float(step)}
        metrics = [Metric(name, value, int(1e3 * time_s), step) for name, value in names.items()]
        if len(self._taken) + len(metrics) > 1000:  # MLflow's limit
            self.flush()
        self._taken += metrics

    def flush(self) -> None:
        """See `Tracker`."""
        for begin in range(0, len(self._taken), 1000):
            self._client.log_batch(self._id, metrics=self._taken[begin : begin + 1000])
        self._taken.clear()

    def close(self, ended: AlertKind | None) -> None:
        """See `Tracker`."""
        status = {"finish": "FINISHED", "stop": "KILLED", "crash": "FAILED"}.get(ended or "")
        if status:
            self._client.set_terminated(self._id, status)


_LAST_SENT = "step"


class Trackio(Tracker):
    """trackio, with TRACKIO_SPACE_ID, TRACKIO_SERVER_URL and TRACKIO_DIR."""

    def open(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        import trackio

        name = f"{run.name}-{run.id.id}"  # trackio knows a run by its name
        runs: Iterable[Any] = ()
        with suppress(ValueError):  # there is no such project yet
            runs = trackio.Api().runs(run.settings.project)
        for theirs in runs:
            if theirs.name == name:
                run.check_origin("trackio", (theirs.config or {}).get("mtrain_origin"))
        self._run = trackio.init(
            project=run.settings.project,
            name=name,
            resume="allow",
            config={"mtrain_origin": run.id.origin, **run.config},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def last_step(self) -> int:
        """See `Tracker`; no public name gives it for a server."""
        return int(self._run._next_step) - 1

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def close(self, ended: AlertKind | None) -> None:
        """See `Tracker`."""
        self._run.finish()


class Prometheus(Tracker):
    """A text file with the numbers of the last line, as the textfile collector of node_exporter reads it."""

    def open(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        self._path = Path(run.settings.prometheus_file or run.folder / "metrics.prom")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._labels = {"run": run.name, "id": run.id.id}
        self._values: dict[str, float] = {}
        self._changed = False

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """See `Tracker`."""
        self._values = {**values, "step": float(step), "time_s": time_s}
        self._changed = True

    def flush(self) -> None:
        """See `Tracker`."""
        if self._changed:
            self._write(running=True)

    def close(self, ended: AlertKind | None) -> None:
        """See `Tracker`."""
        self._write(running=ended is None)

    def _write(self, *, running: bool) -> None:
        self._changed = False
        atomic_io.atomic_write(self._path, prometheus_text({**self._values, "running": float(running)}, self._labels))


def prometheus_text(values: Mapping[str, float], labels: Mapping[str, str]) -> bytes:
    """Gauges in Prometheus's text format; what follows the first "/" of a name becomes a label."""
    samples: dict[str, list[str]] = {}
    for name, value in values.items():
        first, slash, rest = name.partition("/")
        gauge = "mtrain_" + re.sub(r"\W", "_", first, flags=re.ASCII)
        given = {**labels, **({"name": rest} if slash else {})}
        text = ",".join(f'{key}="{_escaped(text)}"' for key, text in given.items())
        samples.setdefault(gauge, []).append(f"{gauge}{{{text}}} {value!r}\n")
    return "".join(f"# TYPE {gauge} gauge\n{''.join(lines)}" for gauge, lines in samples.items()).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Webhook(Tracker):
    """A POST for each alert of `track.webhook_on`. The URL is often a secret: no message shows it."""

    keeps_position = True

    def open(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        self._address, self._run = webhook_address(run.settings), run

    def event(self, alert: Alert) -> None:
        """See `Tracker`."""
        if alert.kind not in self._run.settings.webhook_on:
            return
        request = urllib.request.Request(
            self._address,
            data=json.dumps(webhook_body(self._run, alert)).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "mtrain"},
        )
        with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S) as answer:
            answer.read(1)


URL_FORM = "http://HOST/... or https://HOST/..."


def url_fault(address: str) -> str | None:
    """Why an address cannot be a webhook's, without showing it: what follows the scheme is often a secret."""
    if not address.isascii() or re.search(r"[\s\x00-\x1f\x7f]", address):
        return "a space or another character that no URL has"
    scheme, separator, _ = address.partition("://")
    if not separator:
        return "no scheme"
    if scheme.lower() not in ("http", "https"):
        return f"the scheme {scheme[:20]!r}"
    try:
        parts = urllib.parse.urlsplit(address)
        if not parts.hostname:
            return "no host"
        return "the port 0" if parts.port == 0 else None
    except ValueError:  # brackets without an address in them, or a port that is no number up to 65535
        return "a host or a port that no URL has"


def webhook_body(run: TrackedRun, alert: Alert) -> dict[str, Any]:
    """The body that is posted: a message for Slack, otherwise the alert as JSON."""
    when = datetime.fromtimestamp(alert.time_s or time.time(), UTC).isoformat(timespec="seconds")
    if run.settings.webhook_form == "slack":
        return {"text": f"*{run.name}* {alert.text} ({os.uname().nodename}:{run.folder.absolute()}, {when})"}
    return {
        "event": alert.kind,
        "text": alert.text,
        "step": alert.step,
        "time": when,
        "run": {"name": run.name, "id": run.id.id, "folder": str(run.folder.absolute()), "host": os.uname().nodename},
        "facts": dict(alert.facts),
    }


class OpenTelemetry(Tracker):
    """Spans over OTLP and HTTP, with OTEL_EXPORTER_OTLP_ENDPOINT and the like; see spans.py."""

    keeps_position = wants_all = True

    def open(self, run: TrackedRun) -> None:
        """See `Tracker`."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        facts = {f"mtrain.{name}": value for name, value in (("run", run.name), ("id", run.id.id))}
        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "mtrain")}
        self._resource = Resource.create({**service, **facts, "mtrain.folder": str(run.folder.absolute())})
        self._exporter, self._origin, self._trace = OTLPSpanExporter(), run.id.origin, Trace()

    def read(self, event: Mapping[str, Any], alerts: Sequence[Alert], *, new: bool) -> None:
        """See `Tracker`."""
        spans = list(self._trace.event(event))
        for alert in alerts:
            spans += self._trace.alert(alert)
        if new:
            self._send(spans)

    def event(self, alert: Alert) -> None:
        """See `Tracker`; one that no line of events.jsonl says."""
        self._send(self._trace.alert(alert))

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """See `Tracker`."""
        if spans := [*self._trace.evaluation(step, values, time_s)]:
            self._send(spans)
            self.sent_step = step

    def close(self, ended: AlertKind | None) -> None:
        """See `Tracker`."""
        self._exporter.shutdown()

    def _send(self, spans: Iterable[Span]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        made = [self._made(span) for span in spans]
        if made and self._exporter.export(made) is not SpanExportResult.SUCCESS:
            raise ConnectionError(f"the collector took no spans; {TRACK_LOG} may say why")

    def _made(self, span: Span) -> Any:
        """A span of the library. Its tracer would choose the ids itself, and so send a span twice under two ids."""
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        def context(key: str) -> SpanContext:
            number = span_id(self._origin, key)
            return SpanContext(trace_id(self._origin), number, is_remote=False, trace_flags=TraceFlags.SAMPLED)

        return ReadableSpan(
            span.name,
            context=context(span.key),
            parent=context(span.parent) if span.parent else None,
            resource=self._resource,
            attributes=_attributes(span.facts),
            events=[
                Event(moment.name, attributes=_attributes(moment.facts), timestamp=int(1e9 * moment.time_s))
                for moment in span.moments
            ],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=int(1e9 * span.begin_s),
            end_time=int(1e9 * span.end_s),
        )


def _attributes(facts: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """What a span can have: numbers and texts; others as JSON."""
    plain = {name: value for name, value in facts.items() if value is not None and name not in ("event", "time_s")}
    return {
        f"mtrain.{name}": value if isinstance(value, str | int | float | bool) else json.dumps(value)
        for name, value in plain.items()
    }


TRACKERS: Mapping[str, Callable[[], Tracker]] = MappingProxyType(
    {
        "tensorboard": TensorBoard,
        "wandb": WandB,
        "mlflow": MLflow,
        "trackio": Trackio,
        "prometheus": Prometheus,
        "webhook": Webhook,
        "opentelemetry": OpenTelemetry,
    }
)
_MODULES = {name: name for name in ("tensorboard", "wandb", "mlflow", "trackio")} | {
    "opentelemetry": "opentelemetry.exporter.otlp.proto.http"
}


def address_problems(settings: TrackSection) -> Iterator[str]:
    """What is wrong with the addresses of [track], as far as their text tells."""
    if settings.webhook_url is not None and (fault := url_fault(settings.webhook_url)):
        yield f"track.webhook_url has {fault}; write {URL_FORM}, or leave it out and set {WEBHOOK_URL}"


def webhook_address(settings: TrackSection) -> str:
    """Where alerts are POSTed.

    Raises:
        UsageError: no usable URL is set.
    """
    address = settings.webhook_url or os.environ.get(WEBHOOK_URL)
    fault = url_fault(address) if address else f"neither track.webhook_url nor {WEBHOOK_URL} is set"
    if not address or fault:
        raise UsageError("the webhook has no usable URL", found=fault, expected=URL_FORM)
    return address


def missing_libraries(names: Iterable[str]) -> dict[str, str]:
    """A problem for each tracker whose library is not installed, by its name."""
    return {
        name: f"the library of tracker {name!r} is not installed; {install_command('track')}"
        for name in names
        if name in _MODULES and not _is_installed(_MODULES[name])
    }


def _is_installed(module: str) -> bool:
    with suppress(ModuleNotFoundError):  # of a package that it is in
        return module in sys.modules or find_spec(module) is not None
    return False
