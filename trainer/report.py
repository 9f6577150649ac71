"""report.html of a run: one file without scripts or links, for a browser without a network.

It shows the loss against the n-gram baselines in nats per token and bits per byte, throughput, what was
read of each corpus, document lengths, some of what the model read and wrote, what each rank holds, and the
configuration. report_data.py says what is true, report_plots.py draws, this file writes the page.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mdata.util import atomic_io
from trainer import report_plots
from trainer.report_data import Corpora, Run, ValidCorpus, read_corpora, read_run

BASELINES = (  # field of Baselines, name on the page, whether it is drawn
    ("unigram_entropy", "unigram entropy", True),
    ("unigram_add_one", "add-one unigram", False),
    ("bigram_add_one", "add-one bigram", True),
    ("bigram_witten_bell", "Witten-Bell bigram", True),
)


class Cell(NamedTuple):
    """A number in a table; good or bad where it is judged."""

    text: str
    good: bool | None = None


_STYLE = """
:root { --text: #1d2330; --quiet: #8a93a3; --grid: #dfe3e9; --page: #ffffff; --card: #f5f6f8; --special: #8a5a00;
  --series-0: #1f66d1; --series-1: #c2491d; --series-2: #20875a; --series-3: #8a4bbf; --series-4: #b08400;
  --series-5: #5b6675; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7ec; --quiet: #8b94a5; --grid: #333a46; --page: #14171c;
  --card: #1d2128; --special: #e5b454; --series-0: #6ea8fe; --series-1: #f08a5d; --series-2: #5cc596;
  --series-3: #c493f0; --series-4: #dfc05a; --series-5: #a8b2c1; } }
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 84rem; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
p.lead { color: var(--quiet); margin: 0 0 1rem; } svg { max-width: 100%; height: auto; display: block; }
svg text { font-family: system-ui, sans-serif !important; }
.row { display: flex; flex-wrap: wrap; gap: 1.5rem; } .row > * { flex: 1 1 28rem; min-width: 0; max-width: 42rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } th, td { padding: .25rem .9rem .25rem 0;
  text-align: right; border-bottom: 1px solid var(--grid); } th { color: var(--quiet); font-weight: 500; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } .scroll { overflow-x: auto; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: 6px; white-space: pre-wrap; font-size: 13px;
  overflow-wrap: anywhere; max-height: 17rem; overflow-y: auto; } mark { background: none; color: var(--special); }
pre b { color: var(--series-0); font-weight: 600; } .good { color: var(--series-2); } .bad { color: var(--series-1); }
details summary { cursor: pointer; color: var(--quiet); }
"""


def write_report(run_folder: str | Path) -> tuple[Path, list[str]]:
    """Write report.html in a run folder from what stands there now; the run may still be going on.

    Returns:
        The page's path, and a line for each validation corpus: its loss and the baselines.

    Raises:
        UsageError: not a run folder, or no step has been measured. DamageError: a file of the run cannot be read.
    """
    run = read_run(Path(run_folder))
    corpora = read_corpora(run)
    path = run.folder / "report.html"
    atomic_io.atomic_write(path, render(run, corpora).encode())
    return path, [_line(corpus) for corpus in corpora.valid if corpus.curve]


def render(run: Run, corpora: Corpora) -> str:
    """The whole page."""
    parts = [
        _head(run),
        _notes(corpora.notes),
        _losses(run, corpora.valid),
        f'<div class="row">{_loss_table(corpora.valid)}{_test_losses(run)}{_throughput(run)}</div>',
        _read(corpora),
        _texts(run, corpora),
        _ranks(run),
        f"<h2>Configuration</h2><details><summary>config.toml</summary><pre>{_text(run.config_text)}</pre></details>",
    ]
    title = _text(_title(run))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _title(run: Run) -> str:
    """The last two names of the run folder's path: "run" alone says little."""
    return "/".join(run.folder.resolve().parts[-2:])


def _line(corpus: ValidCorpus) -> str:
    lines = ", ".join(f"{name} {value:.3f}" for name, value, _ in _baselines(corpus))
    return f"{corpus.name}: {corpus.curve[-1][1]:.3f} nats per token" + (f" ({lines})" if lines else "")


def _head(run: Run) -> str:
    model, last = run.config.model, run.metrics[-1]
    seconds = float(last.get("time_s") or 0) - float(run.metrics[0].get("time_s") or 0)
    facts = [
        f"{run.plan.get('num_parameters', 0):,} parameters",
        f"{model.num_layers} layers of {model.hidden_size} features, {model.num_heads} heads",
        f"{run.plan.get('world_size', '?')} ranks (tensor parallel {run.config.mesh.tp}"
        + (", sequence parallel)" if run.config.mesh.sequence_parallel else ")"),
        run.config.precision.dtype,
        f"step {last['step']:,} of {run.config.train.steps:,}",
        f"{run.consumed * run.config.train.sequence_length:,} tokens read",
        f"{seconds:,.0f} s from the first to the last line of metrics",
    ]
    return f'<h1>{_text(_title(run))}</h1><p class="lead">{_text("; ".join(facts))}</p>'


def _notes(notes: Iterable[str]) -> str:
    return "".join(f"<p>{_text(note)}</p>" for note in notes)


def _losses(run: Run, valid: Sequence[ValidCorpus]) -> str:
    """A panel for each validation corpus."""
    scale = run.config.train.sequence_length / 1e6
    train = _curve(run, "loss", scale)
    shown = valid or [ValidCorpus(name="training", curve=[], bits_per_byte=None, baselines=None)]
    panels = []
    for corpus in shown:
        curve = [(samples * scale, loss) for samples, loss in corpus.curve]
        lines = [(name, value) for name, value, drawn in _baselines(corpus) if drawn]
        drawing = report_plots.loss_panel(corpus.name, train, valid=curve, lines=lines)
        panels.append(f"<div><h3>{_text(corpus.name)}</h3>{drawing}</div>")
    return f'<h2>Loss</h2><div class="row">{"".join(panels)}</div>'


def _loss_table(valid: Sequence[ValidCorpus]) -> str:
    """Per corpus the model's last loss and the baselines, in both units; a mark where the model is below."""
    if not any(corpus.curve or corpus.baselines for corpus in valid):
        return ""
    header = ["last validation", *(f"{c.name}: {what}" for c in valid for what in ("nats per token", "bits per byte"))]
    final = [corpus.curve[-1][1] if corpus.curve else None for corpus in valid]
    rows: list[list[str | Cell]] = [["the model", *_pairs(valid, final, None)]]
    for field, name, _ in BASELINES:
        values = [getattr(c.baselines, field) if c.baselines else None for c in valid]
        if any(value is not None for value in values):
            rows.append([name, *_pairs(valid, values, final)])
    note = '<p class="lead">Green: the model is below it. Red: it is not.</p>'
    return f"<div><h2>Against counting</h2>{note}{_table(header, rows)}</div>"


def _test_losses(run: Run) -> str:
    """The test sets' losses, which are there once the last step is done."""
    rows = [[name, f"{loss:.3f}"] for name, loss in (run.metrics[-1].get("test") or {}).items()]
    return f"<div><h2>Test sets</h2>{_table(['at the end', 'nats per token'], rows)}</div>" if rows else ""


def _pairs(
    valid: Sequence[ValidCorpus], values: Sequence[float | None], model: Sequence[float | None] | None
) -> list[Cell]:
    """Cells with nats per token and bits per byte of each corpus; with the model's losses, judged by them."""
    cells = []
    for i, (corpus, value) in enumerate(zip(valid, values, strict=True)):
        ours = model[i] if model else None
        below = None if value is None or ours is None else ours < value
        bits = None if value is None or corpus.bits_per_byte is None else value * corpus.bits_per_byte
        cells += [Cell("" if number is None else f"{number:.3f}", below) for number in (value, bits)]
    return cells


def _throughput(run: Run) -> str:
    rates = _curve(run, "tokens_per_s", run.config.train.sequence_length / 1e6)
    if not rates:
        return ""
    told = f"{_median(rates):,.0f} tokens per second in the median line of metrics"
    if waits := _curve(run, "data_wait", 1):
        told += f", {100 * _median(waits):.2f} % of the time waiting for data"
    return f'<div><h2>Throughput</h2><p class="lead">{told}</p>{report_plots.throughput(rates)}</div>'


def _read(corpora: Corpora) -> str:
    if not corpora.read:
        return ""
    got = sum(corpus.samples for corpus in corpora.read) or 1
    rows = [
        [
            corpus.name,
            f"{100 * corpus.share:.1f} %",
            f"{100 * corpus.samples / got:.2f} %",
            f"{corpus.samples:,}",
            f"{corpus.tokens:,}",
            f"{corpus.corpus_tokens:,}",
            f"{corpus.epochs:.2f}",
        ]
        for corpus in corpora.read
    ]
    header = ["corpus", "share asked", "share read", "samples", "tokens read", "tokens it has", "epochs"]
    known = [corpus for corpus in corpora.read if any(corpus.lengths)]
    lengths = f"<h2>Document lengths</h2>{report_plots.document_lengths(known)}" if known else ""
    return f'<div class="row"><div><h2>What was read</h2>{_table(header, rows)}</div><div>{lengths}</div></div>'


def _texts(run: Run, corpora: Corpora) -> str:
    parts = []
    if corpora.rows:
        rows = "".join(f"<pre>{_marked(row, corpora.special)}</pre>" for row in corpora.rows)
        parts.append(f"<div><h2>The first rows it was trained on</h2>{rows}</div>")
    if run.generated:
        texts = "".join(
            f"<pre><b>{_text(str(g.get('prompt', '')))}</b>{_marked(str(g.get('text', '')), corpora.special)}</pre>"
            for g in run.generated
        )
        step = run.generated[0].get("step")
        parts.append(f"<div><h2>What it wrote{f' at step {step}' if step is not None else ''}</h2>{texts}</div>")
    return f'<div class="row">{"".join(parts)}</div>' if parts else ""


def _ranks(run: Run) -> str:
    if not run.ranks:
        return ""
    axes = [name for name in ("tp", "pp", "dp") if name in run.ranks[0]]
    rows = [
        [
            str(rank.get("rank", "?")),
            *(str(rank[name]) for name in axes),
            f"{rank.get('split_parameters', 0):,}",
            f"{rank.get('copied_parameters', 0):,}",
        ]
        for rank in run.ranks
    ]
    header = ["rank", *axes, "parameters split over tp", "parameters every tp rank has"]
    return f"<h2>What each rank holds</h2>{_table(header, rows)}"


def _curve(run: Run, key: str, scale: float) -> list[tuple[float, float]]:
    """(consumed samples x scale, value) of the lines that have the value."""
    lines = ((line["consumed_samples"] * scale, line.get(key)) for line in run.metrics)
    return [(x, float(y)) for x, y in lines if y is not None]


def _median(curve: Sequence[tuple[float, float]]) -> float:
    return sorted(y for _, y in curve)[len(curve) // 2]


def _baselines(corpus: ValidCorpus) -> list[tuple[str, float, bool]]:
    if corpus.baselines is None:
        return []
    return [(name, getattr(corpus.baselines, field), drawn) for field, name, drawn in BASELINES]


def _table(header: Sequence[str], rows: Iterable[Sequence[str | Cell]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(cell: str | Cell) -> str:
    text, good = cell if isinstance(cell, Cell) else Cell(cell)
    mark = "" if good is None else ' class="good"' if good else ' class="bad"'
    return f"<td{mark}>{_text(text)}</td>"


def _marked(text: str, special: Iterable[str]) -> str:
    """Text with its special tokens set off."""
    shown = _text(text)
    for token in special:
        shown = shown.replace(_text(token), f"<mark>{_text(token)}</mark>")
    return shown


def _text(text: str) -> str:
    return html.escape(text, quote=False)
