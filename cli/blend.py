"""Mix corpora by shares.

Give the blend in Megatron's syntax (WEIGHT CORPUS WEIGHT CORPUS ..., or corpora alone, which are weighted by their
tokens), or as a .toml file (amounts, groups, caps, phases: see the how-to on blends) or a .csv file. A corpus is a
manifest, a prefix of .bin/.idx, a folder, a pattern, or another blend.

Examples:
  mdata blend 0.7 web_text_document.json 0.3 code_text_document.json -o mix.json
  mdata blend web_text_document.json code_text_document.json --alpha 0.5 --tokens 1e9 --dry-run
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mdata
from mdata.blend.compose import plan_blend
from mdata.blend.spec import BlendSpec, read_spec, spec_of_mapping, spec_of_splits
from mdata.blend_planning.make_blend import save_blend
from mdata.blend_planning.preview import BlendPreview, BlendRow
from mdata.blend_planning.redistribute import redistribute_blend
from mdata.errors import counted, os_errors_named
from mdata.order.data_split import split_edges
from mdata.util.config_text import parse_json
from mdata.util.regular_files import regular_file

from .blend_change import add_change_arguments, changed, refuse_without_from
from .console import Console
from .text import add_allow_outside, add_tokenizer_unknown, add_training, table

_FOR_WORDS = ("alpha", "exhaustive", "merge_same")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The blend, the training that it is for, and the output."""
    add = parser.add_argument
    add("words", nargs="*", metavar="WORD", help="weights and corpora, or one .toml or .csv file")
    add("-o", "--output", metavar="MIX.json", help="the blend manifest")
    add_tokenizer_unknown(parser)
    add_allow_outside(parser)
    add("--dry-run", action="store_true", help="show the table and write nothing")
    add_training(parser, "the training that the table describes")
    mix = parser.add_argument_group("shares and duplicates")
    mix.add_argument("--alpha", metavar="A", help="weight corpora without a share by tokens^A: 1 by tokens, 0 equally")
    mix.add_argument("--exhaustive", action="store_true", help="read every corpus once, then end the blend")
    mix.add_argument(
        "--redistribute", action="store_true", help="redistribute tokens capped by max_epochs to the other corpora"
    )
    mix.add_argument(
        "--merge-same", action="store_true", help="merge corpora that are named twice, adding their shares"
    )
    overlap = "include held-out parts of folders; accept the same documents in two corpora"
    mix.add_argument("--allow-overlap", action="store_true", help=overlap)
    theirs = parser.add_argument_group("Megatron's lists per split, instead of WORDs")
    for split, content in (("train", "the blend"), ("valid", "validation sets"), ("test", "test sets")):
        theirs.add_argument(f"--{split}-data-path", nargs="+", metavar="WORD", help=f"weights and corpora of {content}")
    theirs.add_argument("--per-split-data-args-path", metavar="FILE.json", help="a file with train, valid and test")
    theirs.add_argument("--data-args-path", metavar="FILE", help="a file with weights and corpora")
    add_change_arguments(parser)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Plan the blend, show it, and write it."""
    if arguments.output is None and not arguments.dry_run:
        raise mdata.UsageError("no output file is given", expected="-o MIX.json, or --dry-run")
    if arguments.samples is not None and (arguments.tokens is not None or arguments.sequence_length is None):
        raise mdata.UsageError("--samples needs --sequence-length and excludes --tokens")
    split_edges(arguments.split_shares)
    folder = Path(arguments.output).parent if arguments.output else Path.cwd()
    if arguments.from_blend is not None:
        blend, lines, facts = changed(arguments, folder, spec=_spec(arguments))
    else:
        refuse_without_from(arguments)
        spec = _spec(arguments)
        if spec is None:
            raise mdata.UsageError("no data is given", expected="a prefix, or pairs of weight and prefix")
        blend, lines, facts = plan_blend(spec, folder, allow_outside=arguments.allow_outside), [], {}
    if arguments.redistribute:
        blend = redistribute_blend(blend, **_run(arguments))
    preview = mdata.preview_blend(blend, **_run(arguments))
    if not arguments.dry_run:
        blend = save_blend(blend, Path(arguments.output))
    where = "nothing was written" if arguments.dry_run else arguments.output
    merged = blend.manifest.notes.get("merged", {})
    lines = [*(f"{name}: entries with the shares {shares} were merged" for name, shares in merged.items()), *lines]
    lines = [*(f"{path} was left out: {why}" for path, why in blend.left_out.items()), *lines]
    text = "\n".join([*_text(preview), *lines, f"{where}: blend {blend.manifest.id[:16]}"])
    console.result(
        text,
        {
            **_facts(preview),
            **facts,
            "merged": merged,
            "left_out": blend.left_out,
            "manifest": arguments.output,
            "id": blend.manifest.id,
        },
    )


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    lengths = {name: getattr(arguments, name) for name in ("sequence_length", "samples", "tokens")}
    return {**lengths, "split": arguments.split_shares}


def _spec(arguments: argparse.Namespace) -> BlendSpec | None:
    """The given description of the blend; None if there is none."""
    lists = {split: getattr(arguments, f"{split}_data_path") for split in ("train", "valid", "test")}
    sources = [
        ("WORD", bool(arguments.words)),
        (next((f"--{split}-data-path" for split, words in lists.items() if words), ""), any(lists.values())),
        ("--per-split-data-args-path", arguments.per_split_data_args_path is not None),
        ("--data-args-path", arguments.data_args_path is not None),
    ]
    named = [name for name, is_given in sources if is_given]
    if len(named) > 1:
        raise mdata.UsageError("the corpora are given twice", found=" and ".join(named), expected="one of them")
    if not named:
        flags = [f"--{flag.replace('_', '-')}" for flag in _FOR_WORDS if getattr(arguments, flag)]
        if flags:
            raise mdata.UsageError(f"{' and '.join(flags)} given without corpora", fix="give the corpora as WORDs")
        return None
    if named[0] == "WORD":
        spec = read_spec(arguments.words)
    elif named[0] == "--data-args-path":
        spec = read_spec(_file(arguments.data_args_path).split())
    elif any(lists.values()):
        spec = spec_of_splits({split: words for split, words in lists.items() if words})
    else:
        spec = spec_of_splits(_json(arguments.per_split_data_args_path))
    changes: dict[str, Any] = {}
    if arguments.alpha is not None:
        changes["alpha"] = spec_of_mapping({"component": [{"path": "-"}], "alpha": arguments.alpha}, "--alpha").alpha
    changes |= {flag: True for flag in (*_FOR_WORDS[1:], "allow_overlap") if getattr(arguments, flag)}
    if arguments.tokenizer_unknown == "ok":
        changes["tokenizer_unknown"] = "ok"
    arguments.redistribute = arguments.redistribute or spec.redistribute
    return replace(spec, redistribute=False, **changes)


def _file(path: str) -> str:
    with os_errors_named("reading the list of corpora"):
        return regular_file(path).read_text(encoding="utf-8", errors="surrogateescape")


def _json(path: str) -> dict[str, Any]:
    try:
        value = parse_json(_file(path))
    except ValueError as error:
        raise mdata.UsageError(f"{path} is not JSON", found=str(error)) from error
    if not isinstance(value, dict):
        raise mdata.UsageError(f"{path} has no lists per split", expected='{"train": [...], "valid": [...], ...}')
    return value


def _text(preview: BlendPreview) -> list[str]:
    """The table: groups as subtotals above their members; phases as further columns; what runs out first."""
    in_samples = None not in (preview.sequence_length, preview.num_samples)
    header = ["component", "share", "achieved", "tokens", "documents"]
    header += ["samples"] if in_samples else []
    header += ["read", "epochs"] if preview.num_samples is not None else []
    header += [f"phase {i + 1}" for i in range(len(preview.starts))] if len(preview.starts) > 1 else []
    lines = []
    for row in _with_groups(preview):
        cells: list[object] = [row.name, row.share, row.achieved, row.tokens, row.documents]
        cells += [row.samples] if in_samples else []
        cells += [row.read_tokens, row.epochs] if preview.num_samples is not None else []
        cells += list(row.phases) if len(preview.starts) > 1 else []
        lines.append(cells)
    return [table(header, lines), *_notes(preview)]


def _with_groups(preview: BlendPreview) -> list[BlendRow]:
    groups = {group.name: group for group in preview.groups}
    rows: list[BlendRow] = []
    listed: set[str] = set()
    for row in preview.rows:
        if row.group is None:
            rows.append(row)
        elif row.group not in listed:
            listed.add(row.group)
            members = [member for member in preview.rows if member.group == row.group]
            rows.append(replace(groups[row.group], name=f"{row.group}: {counted(len(members), 'corpus', 'corpora')}"))
            rows += [replace(member, name=f"  {member.name}") for member in members]
    return rows


def _notes(preview: BlendPreview) -> list[str]:
    unit = "tokens" if preview.sequence_length is None else "samples"
    lines = []
    if len(preview.starts) > 1:
        starts = ", ".join(f"phase {i + 1} from {start:,}" for i, start in enumerate(preview.starts))
        lines.append(f"phases begin at these {unit}: {starts}")
    if preview.num_samples is not None:
        ends = "it ends there" if preview.blend.num_samples == preview.num_samples else "it continues after that"
        lines.append(f"over {preview.num_samples:,} {unit}; {ends}")
    once = [(row.once_at, row.name) for row in preview.rows if row.once_at is not None]
    if once:
        first, name = min(once)
        how = "runs out first: it has been read once" if len(preview.rows) > 1 else "has been read once"
        lines.append(f"{name} {how} after {first:,} {unit} of the blend")
    elif preview.num_samples is not None:
        lines.append(f"no corpus is read to its end in these {preview.num_samples:,} {unit}")
    nothing = [row.name for row in preview.rows if row.samples == 0]
    if nothing:
        lines.append(f"not read at all in this training: {', '.join(nothing[:8])}{' ...' if len(nothing) > 8 else ''}")
    return [*lines, *_not_shown(preview)]


def _not_shown(preview: BlendPreview) -> list[str]:
    """The options that would add columns to the table."""
    if preview.num_samples is None:
        length = "" if preview.sequence_length is not None else "--sequence-length S and "
        return [f"give {length}--tokens N (or --samples N) for samples and epochs of each corpus"]
    return [] if preview.sequence_length is not None else ["give --sequence-length S for samples of each corpus"]


def _facts(preview: BlendPreview) -> dict[str, Any]:
    return {
        "components": [asdict(row) for row in preview.rows],
        "groups": [asdict(row) for row in preview.groups],
        "sequence_length": preview.sequence_length,
        "num_samples": preview.num_samples,
        "ends": preview.blend.num_samples,
        "phase_starts": list(preview.starts),
    }
