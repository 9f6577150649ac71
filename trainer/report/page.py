"""report.html of a run: one file without scripts or links, for a browser without a network.

It shows the loss and the n-gram baselines in nats per token, perplexity and bits per byte, scores of tasks, throughput,
learning rate, how much was read of each corpus, document lengths, samples of text that the model read and wrote, the
schedule of a pipeline, what each rank holds, and the configuration; and beside each curve where the run was resumed,
changed or spiked. `write_comparison` lays several runs over each other. data.py reads, plots.py draws, this file writes
the page.
"""

from __future__ import annotations

import bisect
import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from mdata import UsageError
from mdata.errors import counted
from mdata.reporting.curves import COLOURS
from mdata.reporting.html_tables import Cell, table
from mdata.reporting.report_style import page
from mdata.reporting.svg import escape
from mdata.util import atomic_io
from trainer.config.parse import value_text
from trainer.pipeline.render import render_svg
from trainer.plan.stages import PipelineLayout
from trainer.report import plots
from trainer.report.data import Corpora, ReportedRun, ValidCorpus, loss_unit, read_corpora, read_run, valid_curve
from trainer.run.resume import changed_settings

BASELINES = (  # field of Baselines, name on the page, whether it is drawn
    ("unigram_entropy", "unigram entropy", True),
    ("unigram_add_one", "add-one unigram", False),
    ("bigram_add_one", "add-one bigram", True),
    ("bigram_witten_bell", "Witten-Bell bigram", True),
)
OPTIMIZER = (  # key of metrics.jsonl, name on the page, whether it is drawn if it never changed
    ("grad_norm", "gradient norm", True),
    ("lr", "learning rate", True),
    ("weight_decay", "weight decay", False),
    ("loss_scale", "loss scale", False),
)
EXPERT_LINES = 50  # last lines of metrics over which loads of experts are averaged


# Styles of a run's page in addition to a blend's.
_STYLE = """
body { max-width: 84rem; } td.good { color: inherit; font-weight: 600; } td.bad { color: var(--quiet); }
text.over { paint-order: stroke; stroke: var(--page); stroke-width: 4px; }
@media (max-width: 600px) { body { margin: 1rem auto; padding: 0 .7rem; } svg text { font-size: 19px; } }
.row > * { flex: 1 1 28rem; max-width: 42rem; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 6px; white-space: pre-wrap; font-size: 13px;
  overflow-wrap: anywhere; max-height: 17rem; overflow-y: auto; } pre b { font-weight: 700; }
mark { background: none; color: inherit; text-decoration: underline; }
"""


def write_report(run_folder: str | Path) -> tuple[Path, list[str]]:
    """Write report.html in a run folder from its current files; the run may still be active.

    Returns:
        The page's path, and a line for each validation corpus: its loss and the baselines.

    Raises:
        UsageError: not a run folder, or no step has been measured. DamageError: a file of the run cannot be read.
    """
    run = read_run(Path(run_folder))
    corpora = read_corpora(run)
    path = run.folder / "report.html"
    atomic_io.atomic_write(path, render(run, corpora).encode(errors="replace"))
    return path, [_line(corpus, loss_unit(run)) for corpus in corpora.valid if corpus.curve]


def write_comparison(run_folders: Sequence[str | Path], path: Path) -> None:
    """Write a page with the curves of several runs over each other; their data is not opened.

    Raises:
        UsageError: not a run folder, no measured step, or too many runs. DamageError: a file cannot be read.
    """
    if len(run_folders) > COLOURS:
        raise UsageError(f"{len(run_folders)} runs on one page", expected=f"at most {COLOURS}")
    page = render_comparison([read_run(Path(folder)) for folder in run_folders])
    atomic_io.atomic_write(path, page.encode(errors="replace"))


def render_comparison(runs: Sequence[ReportedRun]) -> str:
    """The whole page; each run has one colour in all drawings."""
    names = [_title(run) for run in runs]
    axes = [axis_of(run, ()) for run in runs]
    # Runs with other batches have other steps at the same tokens; then tokens alone are shown.
    sizes = {(run.config.train.global_batch, run.config.train.sequence_length) for run in runs}
    longest = max(axes, key=lambda axis: axis.steps[-1][0])
    axis = plots.Axis(steps=longest.steps if len(sizes) == 1 else ())

    def panel(title: str, curves: Sequence[Sequence[tuple[float, float]]], quantity: str, *, loss: bool) -> str:
        shown = [(name, curve, number) for number, (name, curve) in enumerate(zip(names, curves, strict=True)) if curve]
        if not shown:
            return ""
        drawing = plots.several(title, shown, quantity=quantity, axis=axis, perplexity=loss)
        return f"<div><h3>{escape(title)}</h3>{drawing}</div>"

    sets = dict.fromkeys(name for run in runs for line in run.metrics for name in line.get("valid") or {})
    units = sorted({loss_unit(run) for run in runs})
    unit, of_tokens = " or ".join(units), units == [plots.OF_TOKENS]
    losses = [panel("training loss", [_curve(run, "loss", run.scale) for run in runs], unit, loss=of_tokens)]
    for name in sets:
        curves = [[(x * run.scale, y) for x, y in valid_curve(run, name)] for run in runs]
        losses.append(panel(f"validation loss of {name}", curves, unit, loss=of_tokens))
    scored = [task_curves(run) for run in runs]
    tasks = [
        panel(
            name,
            [[(x * run.scale, y) for x, y in of.get(name, [])] for run, of in zip(runs, scored, strict=True)],
            name.partition(" (")[0].split()[-1],
            loss=False,
        )
        for name in dict.fromkeys(name for of in scored for name in of)
    ]
    others = [
        panel(name, [_curve(run, key, run.scale) for run in runs], name, loss=False)
        for key, name in (
            ("grad_norm", "gradient norm"),
            ("lr", "learning rate"),
            ("tokens_per_s", "tokens per second"),
        )
    ]
    parts = [
        f"<h1>{escape(' and '.join(names) if len(names) < 3 else f'{len(names)} runs')}</h1>",
        _comparison_table(runs, names),
        f'<h2>Loss</h2><div class="row">{"".join(losses)}</div>',
        f'<h2>Tasks</h2><div class="row">{"".join(tasks)}</div>' if tasks else "",
        f'<h2>Optimizer and speed</h2><div class="row">{"".join(others)}</div>',
        _different_settings(runs, names),
    ]
    return page(f"{len(runs)} runs: report", parts, style=_STYLE)


def _comparison_table(runs: Sequence[ReportedRun], names: Sequence[str]) -> str:
    rows = []
    with_perplexity = any(loss_unit(run) == plots.OF_TOKENS for run in runs)
    for run, name in zip(runs, names, strict=True):
        curve, rates = _curve(run, "loss", 1), _curve(run, "tokens_per_s", 1)
        loss = curve[-1][1] if curve else None
        evaluated: dict[str, float | None] = next(
            (line["valid"] for line in reversed(run.metrics) if line.get("valid")), {}
        )
        valid = [loss for loss in evaluated.values() if loss is not None]
        perplexity = None
        if loss is not None and loss_unit(run) == plots.OF_TOKENS:
            perplexity = f"{math.exp(min(loss, 700.0)):.4g}"
        rows.append(
            [
                Cell(name),
                Cell(run.metrics[-1]["step"]),
                Cell(run.consumed * run.config.train.sequence_length),
                Cell(None if loss is None else f"{loss:.4f}", "number"),
                *([Cell(perplexity, "number")] if with_perplexity else []),
                Cell(f"{sum(valid) / len(valid):.4f}" if valid else None, "number"),
                Cell(f"{_median(rates):,.0f}" if rates else None, "number"),
                Cell(sum(event.get("event") == "spike" for event in run.events)),
            ]
        )
    last = ["valid", "tokens/s", "spikes"]
    return table(["run", "steps", "tokens", "loss", *(["perplexity"] if with_perplexity else []), *last], rows)


def _different_settings(runs: Sequence[ReportedRun], names: Sequence[str]) -> str:
    """The settings in which the runs differ."""
    first, *others = (run.config for run in runs)
    changed = dict.fromkeys(key for other in others for key in changed_settings(first, other))
    keys = [key for key in changed if key != "run.folder"]
    if not keys:
        return "<h2>Settings</h2><p>The runs have the same settings.</p>"
    rows = [
        [
            Cell(key),
            *(Cell(value_text(getattr(getattr(run.config, (at := key.partition("."))[0]), at[2]))) for run in runs),
        ]
        for key in keys
    ]
    return f"<h2>Settings that differ</h2>{table(['setting', *names], rows)}"


def render(run: ReportedRun, corpora: Corpora) -> str:
    """The whole page."""
    axis = axis_of(run, corpora.mixtures)
    parts = [
        _head(run),
        _notes(corpora.notes),
        _losses(run, corpora, axis),
        f'<div class="row">{_loss_table(run, corpora.valid)}{_test_losses(run)}{_throughput(run, axis)}</div>',
        _tasks(run, axis),
        _answers(run),
        _rewards(run, axis),
        _optimizer(run, axis),
        _experts(run, axis),
        _read(corpora),
        _texts(run, corpora),
        _pipeline(run),
        _ranks(run),
        f"<h2>Configuration</h2><details><summary>config.toml</summary><pre>{_text(run.config_text)}</pre></details>",
    ]
    return page(f"{_title(run)}: report", parts, style=_STYLE)


def axis_of(run: ReportedRun, mixtures: Sequence[int]) -> plots.Axis:
    """The axis of a run's drawings: tokens, steps, and what happened."""
    scale = run.scale
    steps = [(line["consumed_samples"] * scale, line["step"]) for line in run.metrics]
    marks = [(sample * scale, "M", f"mixture changed at sample {sample:,}") for sample in mixtures]
    at, logged_steps, ranks = {step: x for x, step in steps}, [step for _, step in steps], None
    for event in run.events:
        kind, step = event.get("event"), event.get("step")
        if not isinstance(step, int) or kind not in ("start", "spike"):
            continue
        near = logged_steps[min(bisect.bisect_left(logged_steps, step), len(logged_steps) - 1)]
        changed = event.get("changed") or {}
        layout = [name for name in changed if name.startswith("mesh.")]
        other = ranks is not None and event.get("world_size") != ranks and kind == "start"
        ranks = event.get("world_size", ranks)
        if kind == "spike":
            letter, hint = "S", f"spike at step {step:,}"
        elif "data.blend" in changed:
            letter, hint = "M", f"another blend from step {step + 1:,} on"
        elif layout or other:
            letter, hint = "L", f"{', '.join(layout) or f'{ranks} ranks'} from step {step + 1:,} on"
        elif event.get("rolled_back"):
            letter, hint = "B", f"rolled back to step {step:,}"
        elif step:
            letter, hint = "R", f"resumed after step {step:,}"
        else:
            continue
        marks.append((at[near], letter, hint))
    return plots.Axis(steps=steps, marks=sorted(marks))


def _title(run: ReportedRun) -> str:
    """The last two names of the run folder's path, because "run" alone says little."""
    return "/".join(run.folder.resolve().parts[-2:])


def _line(corpus: ValidCorpus, unit: str) -> str:
    lines = ", ".join(f"{name} {value:.3f}" for name, value, _ in _baselines(corpus))
    return f"{corpus.name}: {corpus.curve[-1][1]:.3f} {unit}" + (f" ({lines})" if lines else "")


def _head(run: ReportedRun) -> str:
    model, mesh, last = run.config.model, run.config.mesh, run.metrics[-1]
    seconds = float(last.get("time_s") or 0) - float(run.metrics[0].get("time_s") or 0)
    facts = [
        f"{run.plan.get('num_parameters', 0):,} parameters",
        f"{counted(model.num_layers, 'layer')} of hidden size {model.hidden_size}",
        counted(model.num_heads, "attention head"),
        f"{counted(run.plan.get('world_size', 0), 'rank')} (tensor parallel {mesh.tp}, context parallel {mesh.cp}"
        + (", sequence parallel)" if mesh.sequence_parallel else ")"),
        run.config.precision.dtype,
        f"step {last['step']:,} of {run.plan.get('steps') or run.config.train.steps or 0:,}",
        f"{run.consumed * run.config.train.sequence_length:,} tokens read",
        run.goodput or f"{seconds:,.0f} s from the first to the last line of metrics",
    ]
    return f'<h1>{escape(_title(run))}</h1><p class="lead">{escape("; ".join(facts))}</p>'


def _pipeline(run: ReportedRun) -> str:
    """The actions of each pipeline rank in a step; empty if there is only one."""
    stored, count = run.plan.get("pipeline"), run.plan.get("num_microbatches", 0)
    if not stored or run.plan.get("pp", 1) == 1:
        return ""
    layout = msgspec.convert(stored, PipelineLayout)
    shown = min(count, 2 * layout.num_ranks)
    text = (
        f"Schedule {layout.schedule}, {count} microbatch{'es' if count > 1 else ''} a step: estimated bubble "
        f"{layout.timeline(count).bubble:.1%}. The drawing shows a step of {shown}."
    )
    drawing = render_svg(layout.timeline(shown))
    return f'<div><h2>Pipeline</h2><p class="lead">{escape(text)}</p>{drawing}</div>'


def _notes(notes: Iterable[str]) -> str:
    return "".join(f"<p>{escape(note)}</p>" for note in notes)


def _losses(run: ReportedRun, corpora: Corpora, axis: plots.Axis) -> str:
    """A panel for each validation corpus."""
    valid = corpora.valid
    train = _curve(run, "loss", run.scale)
    shown = valid or [ValidCorpus(name="training", curve=[], bits_per_byte=None, baselines=None)]
    panels = []
    for corpus in shown:
        curve = [(samples * run.scale, loss) for samples, loss in corpus.curve]
        lines = [(name, value) for name, value, drawn in _baselines(corpus) if drawn]
        drawing = plots.loss_panel(corpus.name, train, valid=curve, lines=lines, axis=axis, quantity=loss_unit(run))
        panels.append(f"<div><h3>{escape(corpus.name)}</h3>{drawing}</div>")
    panels.append(_component_losses(run, [corpus.name for corpus in corpora.read], axis))
    return f'<h2>Loss</h2>{_legend_of_marks(axis)}<div class="row">{"".join(panels)}</div>'


def _legend_of_marks(axis: plots.Axis) -> str:
    """What the letters above the drawings mean, and what happened where; empty without marks."""
    if not axis.marks:
        return ""
    letters = [f"{letter} {name}" for letter, name in plots.MARKS.items() if any(m[1] == letter for m in axis.marks)]
    items = "".join(f"<li>{escape(f'{letter}: {hint}')}</li>" for _, letter, hint in axis.marks)
    listed = f"<details><summary>{counted(len(axis.marks), 'mark')}</summary><ul>{items}</ul></details>"
    return f'<p class="lead">Dashed lines: {escape(", ".join(letters))}.</p>{listed}'


def _component_losses(run: ReportedRun, names: Sequence[str], axis: plots.Axis) -> str:
    """The training loss of each component; if there are many, of those measured most often."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in run.metrics:
        for name, loss in (line.get("train") or {}).items():
            if loss is not None:
                curves.setdefault(name, []).append((line["consumed_samples"] * run.scale, float(loss)))
    if not curves:
        return ""
    most = sorted(curves.items(), key=lambda item: -len(item[1]))[:COLOURS]
    left = len(curves) - len(most)
    note = (
        f'<p class="lead">the {len(most)} corpora read most often; {left} more are in metrics.jsonl</p>' if left else ""
    )
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*names, *curves]))}
    drawing = plots.several(
        "Training loss by corpus",
        [(name, curve, numbers[name]) for name, curve in most],
        quantity=(unit := loss_unit(run)),
        axis=axis,
        description=f"{counted(sum(len(curve) for _, curve in most), 'measurement')} of {len(most)} corpora",
        perplexity=unit == plots.OF_TOKENS,
    )
    return f"<div><h3>training, by corpus</h3>{note}{drawing}</div>"


def _loss_table(run: ReportedRun, valid: Sequence[ValidCorpus]) -> str:
    """Per corpus the model's last loss and the baselines, in both units, marked if the model is below."""
    if loss_unit(run) != plots.OF_TOKENS or not any(corpus.curve or corpus.baselines for corpus in valid):
        return ""
    units = "nats per token", "perplexity", "bits per byte"
    header = ["last validation", *(f"{c.name}: {unit}" for c in valid for unit in units)]
    final = [corpus.curve[-1][1] if corpus.curve else None for corpus in valid]
    rows = [[Cell("the model"), *_pairs(valid, final, None)]]
    for field, name, _ in BASELINES:
        values = [getattr(c.baselines, field) if c.baselines else None for c in valid]
        if any(value is not None for value in values):
            rows.append([Cell(name), *_pairs(valid, values, final)])
    note = '<p class="lead">Bold: the loss of the model is lower. Grey: it is not.</p>'
    return f"<div><h2>Compared with n-grams</h2>{note}{table(header, rows)}</div>"


def _test_losses(run: ReportedRun) -> str:
    """The test sets' losses, which exist after the last step."""
    losses = run.metrics[-1].get("test") or {}
    texts = {name: "not a number" if loss is None else f"{loss:.3f}" for name, loss in losses.items()}
    rows = [[Cell(name), _number(text)] for name, text in texts.items()]
    return f"<div><h2>Test sets</h2>{table(['at the end', loss_unit(run)], rows)}</div>" if rows else ""


def _pairs(
    valid: Sequence[ValidCorpus], values: Sequence[float | None], model: Sequence[float | None] | None
) -> list[Cell]:
    """Cells with each corpus' loss, perplexity and bits per byte; with the model's losses, judged by them."""
    cells = []
    for i, (corpus, value) in enumerate(zip(valid, values, strict=True)):
        ours = model[i] if model else None
        kind = "number" if value is None or ours is None else "good" if ours < value else "bad"
        bits = None if value is None or corpus.bits_per_byte is None else value * corpus.bits_per_byte
        perplexity = None if value is None else math.exp(min(value, 700.0))
        texts = [(value, ".3f"), (perplexity, ".4g"), (bits, ".3f")]
        cells += [Cell("" if number is None else f"{number:{form}}", kind) for number, form in texts]
    return cells


def _throughput(run: ReportedRun, axis: plots.Axis) -> str:
    rates = _curve(run, "tokens_per_s", run.scale)
    if not rates:
        return ""
    sentence = f"{_median(rates):,.0f} tokens per second in the median line of metrics"
    if waits := _curve(run, "data_wait", 1):
        sentence += f", {100 * _median(waits):.2f} % of the time waiting for data"
    if rates_of_gpu := _curve(run, "tflops", 1):
        sentence += f", {_median(rates_of_gpu):,.4g} TFLOP/s of each rank"
    if shares := _curve(run, "mfu", 1):
        sentence += f", {100 * _median(shares):.1f} % of the devices' peak (MFU)"
    if held := [memory for _, memory in _curve(run, "memory_bytes", 1)]:
        sentence += f"; at most {max(held) / 2**30:,.2f} GiB held by rank 0"
    drawing = plots.over_tokens("Throughput", rates, quantity="tokens per second", axis=axis)
    return f'<div><h2>Throughput</h2><p class="lead">{sentence}</p>{drawing}</div>'


def task_curves(run: ReportedRun) -> dict[str, list[tuple[float, float]]]:
    """(consumed samples, number) of each task that scored the run: while it trained, then its checkpoints.

    A classifier's accuracy of each set is one of them.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in run.metrics:
        accuracy = {f"accuracy {name}": share for name, share in (line.get("accuracy") or {}).items()}
        for name, number in {**accuracy, **(line.get("tasks") or {})}.items():
            if number is not None:
                curves.setdefault(name, []).append((line["consumed_samples"], number))
    steps, samples = zip(*((line["step"], line["consumed_samples"]) for line in run.metrics), strict=True)
    for name, numbers in run.evaluations.items():
        finite = [(step, number) for step, number in sorted(numbers.items()) if math.isfinite(number)]
        if finite:
            points = [(float(np.interp(step, steps, samples)), number) for step, number in finite]
            curves.setdefault(name, []).extend(points)
    return curves


def _tasks(run: ReportedRun, axis: plots.Axis) -> str:
    """A panel for each number of a task; empty if none scored the run."""
    panels = []
    for name, curve in task_curves(run).items():
        points = [(samples * run.scale, number) for samples, number in curve]
        drawing = plots.over_tokens(name, points, quantity=name.partition(" (")[0].split()[-1], axis=axis)
        panels.append(f"<div><h3>{escape(name)}: {points[-1][1]:.4g}</h3>{drawing}</div>")
    return f'<h2>Tasks</h2><div class="row">{"".join(panels)}</div>' if panels else ""


def _answers(run: ReportedRun) -> str:
    """What the model said to each prompt of the configuration, at up to ten steps; empty without prompts."""
    steps: dict[str, list[tuple[int, str]]] = {}
    for line in run.metrics:
        for answer in line.get("answers") or ():
            steps.setdefault(answer["prompt"], []).append((line["step"], answer["answer"]))
    parts = []
    for prompt, answers in steps.items():
        last = len(answers) - 1
        shown = [answers[place] for place in sorted({round(last * n / 9) for n in range(10)})]
        rows = "".join(f"<tr><td>{step:,}</td><td>{escape(text)}</td></tr>" for step, text in shown)
        header = "<tr><th>step</th><th>answer</th></tr>"
        parts.append(f"<h3>{escape(prompt)}</h3><table>{header}{rows}</table>")
    return f"<h2>Answers</h2>{''.join(parts)}" if parts else ""


def _rewards(run: ReportedRun, axis: plots.Axis) -> str:
    """What DPO says of chosen and rejected conversations; empty for other losses."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in run.metrics:
        for name, value in (line.get("named_losses") or {}).items():
            if name.startswith("reward_") and value is not None:
                samples = line["consumed_samples"] * run.scale
                curves.setdefault(name.removeprefix("reward_"), []).append((samples, float(value)))
    accuracy = curves.pop("accuracy", [])
    if not curves:
        return ""
    shown = [(name, curve, number) for number, (name, curve) in enumerate(curves.items())]
    rewards = plots.several("Rewards", shown, quantity="beta x log ratio", axis=axis, perplexity=False)
    share = plots.over_tokens("Accuracy", accuracy, quantity="accuracy", axis=axis)
    panels = f"<div><h3>rewards</h3>{rewards}</div><div><h3>margin above 0</h3>{share}</div>"
    return f'<h2>Preferences</h2><div class="row">{panels}</div>'


def _optimizer(run: ReportedRun, axis: plots.Axis) -> str:
    """Settings of the updates over time; a scale or weight decay that never changed is text, not a plot."""
    sentences, panels = [], []
    for key, name, always in OPTIMIZER:
        curve = _curve(run, key, run.scale)
        if not curve:
            continue
        sentences.append(f"{name} {curve[-1][1]:.4g}")
        if always or len({value for _, value in curve}) > 1:
            panels.append(f"<div><h3>{name}</h3>{plots.over_tokens(name, curve, quantity=name, axis=axis)}</div>")
    if not sentences:
        return ""
    lead = f"at the last line of metrics: {', '.join(sentences)}"
    return f'<h2>Optimizer</h2><p class="lead">{lead}</p><div class="row">{"".join(panels)}</div>'


def _experts(run: ReportedRun, axis: plots.Axis) -> str:
    """How even the load of experts is, by layer; empty for models without experts."""
    lines = [line for line in run.metrics if line.get("experts")]
    if not lines:
        return ""
    last = lines[-EXPERT_LINES:]
    worst = [
        (line["consumed_samples"] * run.scale, max(float(layer.get("max", 0)) for layer in line["experts"].values()))
        for line in lines
    ]
    name = "busiest expert of all layers"
    drawing = plots.over_tokens(name, worst, quantity="load over the mean", axis=axis)
    names = ("max", "min", "entropy", "dropped")
    rows = []
    for layer in lines[-1]["experts"]:
        told = [line["experts"].get(layer, {}) for line in last]
        numbers = [[number for of in told if (number := of.get(key)) is not None] for key in names]
        cells = [_number(f"{sum(loads) / len(loads):.4g}" if loads else "-") for loads in numbers]
        rows.append([Cell(layer), *cells])
    header = ["layer", "busiest", "idlest", "entropy, nats", "share dropped"]
    lead = f"means of the last {len(last)} lines of metrics; loads are in multiples of an equal share"
    return (
        f'<h2>Experts</h2><p class="lead">{lead}</p><div class="row">'
        f"<div>{table(header, rows)}</div><div><h3>{name}</h3>{drawing}</div></div>"
    )


def _read(corpora: Corpora) -> str:
    if not corpora.read:
        return ""
    total = sum(corpus.samples for corpus in corpora.read) or 1
    rows = [
        [
            Cell(corpus.name),
            Cell(f"{100 * corpus.share:.1f} %"),
            Cell(f"{100 * corpus.samples / total:.2f} %"),
            *map(Cell, (corpus.samples, corpus.tokens, corpus.corpus_tokens)),
            _number(f"{corpus.epochs:.2f}"),
        ]
        for corpus in corpora.read
    ]
    header = ["corpus", "target share", "share read", "samples", "tokens read", "tokens in the corpus", "epochs"]
    corpora_read = [corpus for corpus in corpora.read if any(corpus.lengths)]
    lengths = f"<h2>Document lengths</h2>{plots.document_lengths(corpora_read)}" if corpora_read else ""
    return f'<div class="row"><div><h2>What was read</h2>{table(header, rows)}</div><div>{lengths}</div></div>'


def _texts(run: ReportedRun, corpora: Corpora) -> str:
    parts = []
    if corpora.rows:
        rows = "".join(f"<pre>{_marked(row, corpora.special)}</pre>" for row in corpora.rows)
        parts.append(f"<div><h2>First training rows</h2>{rows}</div>")
    if run.generated:
        texts = "".join(
            f"<pre><b>{_text(str(g.get('prompt', '')))}</b>{_marked(str(g.get('text', '')), corpora.special)}</pre>"
            for g in run.generated
        )
        step = run.generated[0].get("step")
        parts.append(f"<div><h2>Generated text{f' at step {step}' if step is not None else ''}</h2>{texts}</div>")
    return f'<div class="row">{"".join(parts)}</div>' if parts else ""


def _ranks(run: ReportedRun) -> str:
    if not run.ranks:
        return ""
    axes = [name for name in ("tp", "pp", "dp") if name in run.ranks[0]]
    fields = [*axes, "split_parameters", "copied_parameters"]
    rows = [[Cell(rank.get("rank", "?")), *(Cell(rank.get(name, 0)) for name in fields)] for rank in run.ranks]
    header = ["rank", *axes, "parameters split over tp", "parameters every tp rank has"]
    return f"<h2>What each rank holds</h2>{table(header, rows)}"


def _number(text: str) -> Cell:
    return Cell(text, kind="number")


def _curve(run: ReportedRun, key: str, scale: float) -> list[tuple[float, float]]:
    """(consumed samples x scale, value) of the lines that have the value."""
    lines = ((line["consumed_samples"] * scale, line.get(key)) for line in run.metrics)
    return [(x, float(y)) for x, y in lines if y is not None]


def _median(curve: Sequence[tuple[float, float]]) -> float:
    return sorted(y for _, y in curve)[len(curve) // 2]


def _baselines(corpus: ValidCorpus) -> list[tuple[str, float, bool]]:
    if corpus.baselines is None:
        return []
    return [(name, getattr(corpus.baselines, field), drawn) for field, name, drawn in BASELINES]


def _marked(text: str, special: Iterable[str]) -> str:
    """Text with highlighted special tokens."""
    shown = _text(text)
    for token in special:
        shown = shown.replace(_text(token), f"<mark>{_text(token)}</mark>")
    return shown


def _text(text: str) -> str:
    """A text with several lines."""
    return html.escape(text, quote=False)
