"""Show where a training sample comes from, or which samples and steps read a document.

PATH is a run folder of `mtrain train`, or data together with the options by which it is read. Samples, tokens and
documents are counted from 0, steps from 1 as in metrics.jsonl. With --json: one object per line.

Examples:
  mdata trace runs/first --step 400 --dp-rank 3
  mdata trace mix.json --sequence-length 4096 --global-batch 512 --origin web.jsonl:17 --until-step 10
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from types import MappingProxyType

import numpy as np

import mdata
from mdata.corpus.documents import parse_origin
from mdata.errors import counted
from mdata.tracing.cyclic_steps import CyclicSteps
from mdata.tracing.run_steps import Steps

from .console import Console
from .text import natural
from .trace_text import Shown, reader_table, sample_facts, sample_text, step_table
from .traced_data import add_data_arguments, open_tracer

# Options that count for some ways to trace only.
_OF_WAYS = MappingProxyType(
    {
        "component": ("document", "origin"),
        "dp_rank": ("step",),
        "until_step": ("document", "origin"),
        "until_sample": ("document", "origin"),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to trace, how much to show, and how to read data without a run folder."""
    parser.add_argument("path", metavar="PATH", help="a run folder, or a blend, corpus or prefix")
    target = parser.add_argument_group("what to trace (one of these)")
    target.add_argument("--step", type=int, metavar="N", help="all samples of a step, from 1")
    target.add_argument("--sample", type=int, metavar="N", help="one sample of the training")
    target.add_argument(
        "--token", type=int, metavar="N", help="one token of the training: token N mod S of sample N div S"
    )
    target.add_argument("--document", type=int, metavar="N", help="a document of a corpus: the samples that read it")
    target.add_argument("--origin", metavar="FILE:ROW", help="the same, for the document of an input's row")
    shown = parser.add_argument_group("what to show")
    shown.add_argument("--component", metavar="NAME", help="the corpus of the document, if there are several")
    shown.add_argument("--dp-rank", type=int, metavar="R", help="with --step: only rows of this data-parallel rank")
    shown.add_argument("--until-step", type=int, metavar="N", help="with a document: only steps up to this one")
    shown.add_argument("--until-sample", type=int, metavar="N", help="with a document: only samples below this one")
    shown.add_argument(
        "--rows",
        type=natural,
        default=20,
        metavar="N",
        help="samples to show (default: 20); with --step, 0 shows only counts",
    )
    shown.add_argument("--text", action="store_true", help="show decoded text, with special tokens")
    shown.add_argument("--tokens", action="store_true", help="show token ids")
    shown.add_argument(
        "--length", type=natural, default=200, metavar="N", help="characters or ids to show (default: 200; 0: all)"
    )
    add_data_arguments(parser)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Open the data, then trace one way or the other."""
    ways = ("step", "sample", "token", "document", "origin")
    asked = [way for way in ways if getattr(arguments, way) is not None]
    if len(asked) != 1:
        raise mdata.UsageError(
            f"mdata trace takes one of {', '.join('--' + way for way in ways)}",
            found=", ".join("--" + way for way in asked) or "none of them",
        )
    for name, of in _OF_WAYS.items():
        if getattr(arguments, name) is not None and asked[0] not in of:
            raise mdata.UsageError(
                f"--{name.replace('_', '-')} does not apply to --{asked[0]}",
                expected=f"it with {' or '.join('--' + way for way in of)}",
                fix="leave it out",
            )
    if arguments.origin is not None:
        parse_origin(arguments.origin)  # report a mistake once, before anything is opened
    tracer = open_tracer(arguments, console)
    shown = Shown(arguments.text, arguments.tokens, arguments.length or None)
    if arguments.step is not None:
        _step(tracer, arguments, console, shown=shown)
    elif asked[0] in ("sample", "token"):
        _sample(tracer, arguments, console, shown=shown)
    else:
        _document(tracer, arguments, console, shown=shown)


def _sample(tracer: mdata.Tracer, arguments: argparse.Namespace, console: Console, *, shown: Shown) -> None:
    place = None
    if arguments.token is None:
        traced = tracer.sample(arguments.sample)
    else:
        traced, place = tracer.token(arguments.token)
        if not tracer.exact:
            console.note("mdata: these samples rearrange or mask tokens; all tokens that a sample reads are shown")
            place = None
    _note_missing(tracer, [traced.component], console)
    if console.json:
        facts = sample_facts(tracer, traced, shown=shown)
        if arguments.token is not None:
            facts = {
                "token": arguments.token,
                "in_sample": arguments.token % tracer.dataset.options.sequence_length,
            } | facts
        console.write(json.dumps(facts, ensure_ascii=False) + "\n")
        return
    console.write(sample_text(tracer, traced, shown=shown, place=place))


def _step(tracer: mdata.Tracer, arguments: argparse.Namespace, console: Console, *, shown: Shown) -> None:
    samples = tracer.step(arguments.step, dp_rank=arguments.dp_rank)
    counts = tracer.counts(samples)
    rows = tracer.rows(arguments.step, dp_rank=arguments.dp_rank)[: arguments.rows]
    traced = [tracer.row(arguments.step, row) for row in rows.tolist()]
    _note_missing(tracer, sorted({sample.component for sample in traced}), console)
    if not console.json:
        console.write(
            step_table(tracer, arguments.step, samples=samples, counts=counts, traced=traced, rank=arguments.dp_rank)
        )
        if shown.text or shown.tokens:
            console.write("".join("\n" + sample_text(tracer, sample, shown=shown) for sample in traced))
        return
    first, last = int(np.min(samples)), int(np.max(samples))
    head = {"step": arguments.step, "rank": arguments.dp_rank, "samples": len(samples), "first": first, "last": last}
    console.write(json.dumps({**head, "components": counts}, ensure_ascii=False) + "\n")
    for sample in traced:
        console.write(json.dumps(sample_facts(tracer, sample, shown=shown), ensure_ascii=False) + "\n")
    if 0 < len(traced) < len(samples):  # --rows 0 asks for counts alone
        console.note(f"mdata: {len(traced)} of {len(samples)} samples of step {arguments.step} shown (--rows: more)")


def _document(tracer: mdata.Tracer, arguments: argparse.Namespace, console: Console, *, shown: Shown) -> None:
    places = list(_documents(tracer, arguments))
    _note_missing(tracer, sorted({component for component, _ in places}), console)
    until, rows = arguments.until_sample, max(arguments.rows, 1)
    if arguments.until_step is not None and tracer.steps is None:
        raise mdata.UsageError("--until-step: steps are not known", fix="a run folder, or --global-batch")
    if arguments.until_step is not None and isinstance(tracer.steps, Steps) and tracer.steps.consecutive:
        end = sum(tracer.steps.bounds(arguments.until_step))
        until = end if until is None else min(until, end)
    bounded = until is not None or arguments.until_step is not None or _bounded(tracer)
    for component, number in places:
        # One more than is shown tells whether there are more.
        readers = tracer.readers(component, number, until=until, until_step=arguments.until_step)
        readers_read = list(islice(readers, rows + 1))
        shown_readers, more = readers_read[:rows], len(readers_read) > rows
        if console.json:
            for reader in shown_readers:
                facts = {"document": number, **sample_facts(tracer, reader, shown=shown)}
                console.write(json.dumps(facts, ensure_ascii=False) + "\n")
            if more:
                console.note(f"mdata: more than {counted(rows, 'sample')} read document {number} (--rows shows more)")
            continue
        console.write(
            reader_table(
                tracer, component, document=number, readers=shown_readers, more=more, bounded=bounded, shown=shown
            )
        )


def _bounded(tracer: mdata.Tracer) -> bool:
    """Whether the training has an end of its own."""
    if isinstance(tracer.steps, CyclicSteps):
        return tracer.steps.total is not None
    return tracer.num_samples is not None


def _documents(tracer: mdata.Tracer, arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(component, document) of the requested documents; an origin is searched in all components if none is named."""
    if arguments.origin is None or arguments.component is not None or len(tracer.dataset.components) == 1:
        component = tracer.component(arguments.component)
        documents = tracer.documents(component)
        numbers = [arguments.document] if arguments.origin is None else documents.from_origin(arguments.origin)
        yield from ((component, number) for number in numbers)
        return
    places, refused = [], ""
    for component in range(len(tracer.dataset.components)):
        try:
            places += [(component, number) for number in tracer.documents(component).from_origin(arguments.origin)]
        except mdata.UsageError as error:
            refused = refused or str(error).splitlines()[0]
    if not places:
        raise mdata.UsageError(
            f"no component has a document of {arguments.origin}", found=refused, fix="--component NAME shows why"
        )
    yield from places


def _note_missing(tracer: mdata.Tracer, components: list[int], console: Console) -> None:
    for component in components:
        missing = tracer.documents(component).missing
        if missing is not None:
            console.note(f"mdata: {missing} is missing, so files and rows are not known")
