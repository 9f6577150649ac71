"""Collects the data of a report: everything that is read from a run folder and its corpora.

`read_run` reads the files of the run folder; `read_corpora` opens the data and counts how much the run read of it;
`baselines_of` fits the n-gram baselines on exactly those tokens, and stores them in baselines.json with the number of
samples that they belong to. No drawing here. If a corpus has been moved, a note replaces its part.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import mdata
from mdata import MdataError, UsageError
from mdata.blend_planning.preview import blend_table
from mdata.dataset.eval_sets import evaluated_samples
from mdata.dataset.mock_data import MOCK
from mdata.dataset.run_paths import StartedIn, data_path
from mdata.tracing.run_folder import find_record
from mdata.util import atomic_io
from mdata.util.regular_files import regular_file
from trainer.config.parse import load_config
from trainer.config.sections import DataSection, RunConfig
from trainer.plan.stages import PipelineLayout
from trainer.report.baselines import Baselines, count_pairs, evaluate
from trainer.run.data import RunData, open_data
from trainer.run.metrics import METRICS, RANKS, last_metrics, parse_line, read_events, read_metrics, tally_of
from trainer.run.spike_detector import MIXTURE_CHANGE
from trainer.tasks.in_training import read_evaluations

WHOLE_BYTES = 8 << 20  # of metrics.jsonl, up to which all lines are read
BLOCKS, BLOCK_BYTES = 500, 1 << 13  # of a longer one, evenly spaced
MOST_EVALUATIONS = 200  # of a longer one, evenly spaced
MOST_TOKENS = 200_000_000  # training tokens up to which baselines are counted: about two minutes
SHOWN_ROWS = 3


class _Plan(msgspec.Struct):
    """The fields of plan.json that a report uses. Types of this and the next are checked when a run is read."""

    num_parameters: int = 0
    num_samples: int | None = None
    world_size: int | str = "?"
    vocab_size: int = 0
    steps: int = 0
    pp: int = 1
    num_microbatches: int = 0
    pipeline: PipelineLayout | None = None


class _Rank(msgspec.Struct):
    """The fields of a rank in ranks.json."""

    rank: int | str = "?"
    tp: int = 0
    pp: int = 0
    dp: int = 0
    split_parameters: int = 0
    copied_parameters: int = 0


class _Step(msgspec.Struct):
    """The fields of a line of metrics.jsonl, in which a number that is not finite is null."""

    step: int
    consumed_samples: int
    time_s: float | None = None
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    weight_decay: float | None = None
    loss_scale: float | None = None
    tokens_per_s: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    memory_bytes: float | None = None
    train: dict[str, float | None] | None = None
    valid: dict[str, float | None] | None = None
    test: dict[str, float | None] | None = None
    tasks: dict[str, float | None] | None = None
    accuracy: dict[str, float | None] | None = None
    named_losses: dict[str, float | None] | None = None
    experts: dict[str, dict[str, float | list[int] | None]] | None = None


class _Generated(msgspec.Struct):
    """The fields of a line of generated.jsonl."""

    prompt: str
    text: str
    step: int | None = None


class _Stored(msgspec.Struct):
    """baselines.json: baselines by validation corpus, and the state of the run that they belong to."""

    facts: dict[str, Any] = {}
    valid: dict[str, Baselines] = {}


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """The files of a run folder.

    Attributes:
        metrics: lines of metrics.jsonl in order, at least one. generated: lines of generated.jsonl, if any.
        evaluations: of `mtrain eval --all-checkpoints`: numbers by name and step.
        goodput: of all starts, for people; empty where events.jsonl tells of none.
    """

    folder: Path
    config: RunConfig
    config_text: str
    plan: dict[str, Any]
    ranks: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    generated: list[dict[str, Any]]
    evaluations: dict[str, dict[int, float]]
    goodput: str = ""

    @property
    def scale(self) -> float:
        """Million tokens of a sample."""
        return self.config.train.sequence_length / 1e6

    @property
    def consumed(self) -> int:
        """Samples trained on, by the last line of metrics; at most the samples of the plan."""
        reported, planned = int(self.metrics[-1]["consumed_samples"]), self.plan.get("num_samples")
        return reported if planned is None else min(reported, planned)


@dataclass(frozen=True, kw_only=True)
class CorpusRead:
    """How much a run read of one corpus of its blend.

    Attributes:
        share: requested, 0 to 1. samples, tokens: read. epochs: how often the corpus was read.
        lengths: documents by length, [0] without tokens, [k] of 2^(k-1) to 2^k - 1; empty if unknown.
    """

    name: str
    share: float
    samples: int
    tokens: int
    corpus_tokens: int
    epochs: float
    lengths: list[int]


@dataclass(frozen=True, kw_only=True)
class ValidCorpus:
    """One validation corpus: its curve as (consumed samples, nats per token), and its baselines.

    Attributes:
        bits_per_byte: one nat per token in bits per byte of text; None if the text's size is unknown.
    """

    name: str
    curve: list[tuple[int, float]]
    bits_per_byte: float | None
    baselines: Baselines | None


@dataclass(frozen=True, kw_only=True)
class Corpora:
    """The data's part of a report; empty, with a note, if the data could not be opened.

    Attributes:
        mixtures: first samples of the mixtures after the first.
    """

    read: list[CorpusRead] = dataclasses.field(default_factory=list)
    valid: list[ValidCorpus] = dataclasses.field(default_factory=list)
    rows: list[str] = dataclasses.field(default_factory=list)
    special: list[str] = dataclasses.field(default_factory=list)
    mixtures: list[int] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def read_run(folder: Path) -> ReportedRun:
    """The run folder's files.

    Raises:
        UsageError: not a run folder, or nothing has been measured yet. DamageError: one of its files is not readable.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is a file, not a folder" if folder.exists() else f"there is no folder {folder}",
            fix="give a run folder, which run.folder names",
        )
    is_long = (folder / METRICS).is_file() and (folder / METRICS).stat().st_size > WHOLE_BYTES
    metrics = read_metrics(folder) if not is_long else []
    if not metrics and not is_long:
        raise UsageError(
            f"there is nothing to report in {folder}: no line in metrics.jsonl",
            expected="a run folder with at least one finished step",
            fix="run mtrain train first, or give the folder that run.folder names",
        )
    events = read_events(folder)
    config = load_config(folder / "config.toml")
    plan = _checked(_json(folder / "plan.json", {}), _Plan, folder / "plan.json")
    config = dataclasses.replace(config, data=_placed(config.data, folder, find_record(folder).started_in))
    if is_long:
        scored = config.evaluate.interval if config.evaluate.tasks or config.evaluate.prompts else None
        metrics = spread_metrics(folder, eval_intervals=[config.train.eval_interval, scored])
        goodput = f"goodput {share:.1%}" if (share := metrics[-1].get("goodput")) else ""
    else:
        tally = tally_of(folder, config.train.sequence_length, background=config.checkpoint.background)
        goodput = tally.goodput().text()
    return ReportedRun(
        goodput=goodput if events else "",
        folder=folder,
        config=config,
        config_text=(folder / "config.toml").read_text(encoding="utf-8"),
        plan=plan,
        ranks=_checked(_json(folder / RANKS, []), list[_Rank], folder / RANKS),
        metrics=_checked(metrics, list[_Step], folder / METRICS),
        events=events,
        generated=_checked(_json_lines(folder / "generated.jsonl"), list[_Generated], folder / "generated.jsonl"),
        evaluations=read_evaluations(folder),
    )


def spread_metrics(folder: Path, *, eval_intervals: Iterable[int | None]) -> list[dict[str, Any]]:
    """Lines from all over metrics.jsonl, those of evaluations too, and the last ones; as long for any run.

    Raises:
        DamageError: as `read_metrics`.
    """
    path = folder / METRICS
    last = last_metrics(folder)
    lines = {line["step"]: line for line in last}
    with regular_file(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)

        def lines_at(offset: int) -> Iterator[dict[str, Any]]:
            """The whole lines of a block, or of more where one line is longer than that."""
            file.seek(offset)
            content = block = file.read(BLOCK_BYTES)
            while block and content.count(b"\n") < 2:
                content += (block := file.read(BLOCK_BYTES))
            return (parse_line(line, path) for line in content.split(b"\n")[1 if offset else 0 : -1] if line)

        for block in range(BLOCKS):
            lines |= {line["step"]: line for line in lines_at(block * size // BLOCKS)}
        evaluated = set[int]()
        for interval in filter(None, eval_intervals):
            steps = range(interval, last[-1]["step"] + 1, interval)
            evaluated |= {*steps[:: -(-len(steps) // MOST_EVALUATIONS) or 1]}
        for step in sorted(evaluated):
            low, high = 0, size
            while high - low > BLOCK_BYTES // 2:
                middle = (low + high) // 2
                first = next(lines_at(middle), None)
                low, high = (middle, high) if first is not None and first["step"] <= step else (low, middle)
            lines |= {line["step"]: line for line in lines_at(low) if line["step"] == step}
    return [lines[step] for step in sorted(lines)]


def _placed(data: DataSection, folder: Path, started_in: StartedIn) -> DataSection:
    """The section with its paths as they are now."""

    def placed(paths: Sequence[str]) -> tuple[str, ...]:
        return tuple(data_path(path, folder, started_in) for path in paths)

    cache = data.cache and data_path(data.cache, folder, started_in)
    (blend,) = placed([data.blend])
    return dataclasses.replace(data, blend=blend, valid=placed(data.valid), test=placed(data.test), cache=cache)


def read_corpora(run: ReportedRun) -> Corpora:
    """Open the run's data and count how much was read of it."""
    if run.config.data.blend == MOCK:
        return Corpora(notes=["The run was trained on mock data: random tokens, without a text or a tokenizer."])
    try:
        data = open_data(run.config)
    except MdataError as error:
        curves = [_valid_corpus(run, name, None, None) for name in _curve_names(run)]
        return Corpora(valid=curves, notes=[f"The data could not be opened: {error}"])
    baselines, notes = baselines_of(run, data)
    if (reported := int(run.metrics[-1]["consumed_samples"])) > run.consumed:
        text = f"metrics.jsonl says that {reported:,} samples were read, but the plan ends at {run.consumed:,}."
        notes = [text, *notes]
    names = list(dict.fromkeys([*data.valid, *_curve_names(run)]))
    rows, special = _decoded_rows(run, data.train)
    return Corpora(
        read=_corpora_read(run, data.train),
        valid=[_valid_corpus(run, name, data.valid.get(name), baselines.get(name)) for name in names],
        rows=rows,
        special=special,
        mixtures=[sample for sample in data.train.mixture_changes(MIXTURE_CHANGE)[1:] if sample < run.consumed],
        notes=notes,
    )


def loss_unit(run: ReportedRun) -> str:
    """The unit of the run's loss."""
    of_kind = {"pairs": "nats per pair", "classify": "nats per row"}
    return of_kind.get(run.config.data.kind, "nats per token")


def baselines_of(run: ReportedRun, data: RunData) -> tuple[dict[str, Baselines], list[str]]:
    """(baselines by validation corpus, why there are none), cached in baselines.json for this state of the run."""
    if not data.valid:
        return {}, ["The run has no validation corpus, so there is nothing to evaluate baselines on."]
    if isinstance(data.train.options.kind, mdata.Pairs):
        return {}, ["The loss of pairs is not one of tokens, so there are no n-grams to compare it with."]
    if isinstance(data.train.options.kind, mdata.Classify):
        return {}, ["Baselines are of models that predict tokens, and this one classifies rows."]
    tokens = run.consumed * run.config.train.sequence_length
    if tokens > MOST_TOKENS:
        return {}, [f"Baselines are not computed above {MOST_TOKENS:,} training tokens; this run has read {tokens:,}."]
    vocab_size = data.facts.vocab_size or int(run.plan.get("vocab_size", 0)) or (data.facts.largest_id or 0) + 1
    path = run.folder / "baselines.json"
    facts = {
        "consumed_samples": run.consumed,
        "data_id": data.train.data_id,
        "eval_samples": run.config.train.eval_samples,
        "vocab_size": vocab_size,
    }
    cached = _checked(_json(path, {}), _Stored, path)
    if cached.get("facts") == facts and set(cached.get("valid", ())) == set(data.valid):
        return {name: Baselines(**values) for name, values in cached["valid"].items()}, []
    counts = count_pairs(_rows(data.train, np.arange(run.consumed, dtype=np.int64)), vocab_size)
    stored = {
        name: evaluate(counts, _rows(valid, evaluated_samples(valid, run.config.train.eval_samples)))
        for name, valid in data.valid.items()
    }
    values = {name: dataclasses.asdict(baselines) for name, baselines in stored.items()}
    atomic_io.atomic_write(path, (json.dumps({"facts": facts, "valid": values}, indent=1) + "\n").encode())
    return stored, []


def _rows(dataset: mdata.Dataset, samples: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for k in samples.tolist():
        row = dataset[k]
        tokens = next(row[name] for name in ("tokens", "text_dec", "text") if name in row)  # the decoder's, of T5
        yield tokens, row["labels"], row["loss_mask"]


def _curve_names(run: ReportedRun) -> list[str]:
    """Validation corpora in the metrics, in the order of their first occurrence."""
    return list(dict.fromkeys(name for line in run.metrics for name in line.get("valid") or {}))


def _valid_corpus(
    run: ReportedRun, name: str, dataset: mdata.Dataset | None, baselines: Baselines | None
) -> ValidCorpus:
    return ValidCorpus(
        name=name,
        curve=valid_curve(run, name),
        bits_per_byte=None if dataset is None else _bits_per_byte(dataset),
        baselines=baselines,
    )


def valid_curve(run: ReportedRun, name: str) -> list[tuple[int, float]]:
    """(consumed samples, nats per token) of each evaluation of a validation corpus."""
    losses = [(line["consumed_samples"], (line.get("valid") or {}).get(name)) for line in run.metrics]
    return [(int(samples), float(loss)) for samples, loss in losses if loss is not None]


def _bits_per_byte(dataset: mdata.Dataset) -> float | None:
    """Bits per byte of text for one nat per token: tokens / bytes / ln 2, over the whole corpus.

    None: unknown, or only some of the tokens are predicted.
    """
    if not dataset.text_bytes or isinstance(dataset.options.kind, mdata.Bert | mdata.T5 | mdata.Pairs | mdata.Classify):
        return None
    return dataset.num_corpus_tokens / dataset.text_bytes / math.log(2)


def _corpora_read(run: ReportedRun, train: mdata.Dataset) -> list[CorpusRead]:
    samples = train.selection.counts(min(run.consumed, train.num_samples or run.consumed))
    length = run.config.train.sequence_length
    data = run.config.data
    place = data.cache, data.cache_size
    blend = mdata.open_blend(data.blend, tokenizer_unknown="ok", allow_outside=data.allow_outside, cache=place)
    asked = blend_table(blend)
    out = []
    for number, part, row in zip(samples, train.components, asked, strict=True):
        statistics = part.corpus.manifest.statistics
        out.append(
            CorpusRead(
                name=part.name,
                share=row.achieved,
                samples=number,
                tokens=number * length,
                corpus_tokens=part.num_tokens,
                epochs=part.samples.epochs(number),
                lengths=list(statistics.document_lengths) if statistics else [],
            )
        )
    return out


def _decoded_rows(run: ReportedRun, train: mdata.Dataset) -> tuple[list[str], list[str]]:
    """(text of the first training rows, the special tokens that may occur in it)."""
    tokenizer = train.components[0].corpus.load_tokenizer()
    if tokenizer is None:
        return [], []
    rows = [tokenizer.decode(_real_tokens(train[k]).tolist()) for k in range(min(SHOWN_ROWS, run.consumed))]
    return rows, list(tokenizer.special_ids)


def _real_tokens(row: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a model reads of a row; of a T5, its encoder. Samples of bert and t5 say where their padding is."""
    for text, mask in (("text", "padding_mask"), ("text_enc", "enc_mask")):
        if text in row:
            return row[text][row[mask] == 1]
    return row["tokens"]


def _checked(value: Any, form: Any, path: Path) -> Any:
    """The value, after checking that the fields that a report reads have the types that mtrain writes."""
    try:
        msgspec.convert(value, form)
    except (msgspec.ValidationError, OverflowError) as error:
        problem = f"{path} is not as mtrain wrote it"
        raise mdata.DamageError(problem, found=str(error), fix="restore the run's file, or remove it") from error
    return value


def _json(path: Path, default: Any) -> Any:
    """A JSON file of the run folder; `default` where it is missing."""
    try:
        text = regular_file(path).read_bytes()
    except FileNotFoundError:
        return default
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise mdata.DamageError(f"{path} is not JSON", found=str(error), fix="remove it, or train again") from error


def _json_lines(path: Path) -> list[dict[str, Any]]:
    text = regular_file(path).read_bytes() if path.exists() else b""
    try:  # of bytes: in a text, splitlines also ends lines at characters that JSON leaves as they are
        return [json.loads(line) for line in text.splitlines()]
    except (ValueError, RecursionError) as error:
        problem = f"{path} has a line that is not JSON"
        raise mdata.DamageError(problem, found=str(error), fix="remove that line") from error
