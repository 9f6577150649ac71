"""Show the content of a corpus, a blend or a bare .bin/.idx pair, with its first documents as text.

Also shows how it was made: inputs, rows left out, special tokens in the texts. Reads only manifests, indexes, origins
and the first documents. Special tokens are shown as text.

Examples:
  mdata inspect web_text_document.json --documents 1
  mdata inspect mix.json --json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import mdata
from mdata.blend.blend import OpenBlend
from mdata.blend_planning.preview import blend_table
from mdata.corpus.documents import DocumentReader
from mdata.errors import counted
from mdata.manifest.types import Provenance

from .console import Console
from .text import add_allow_outside, natural, table

_TEXT_WIDTH = 300
_INPUTS_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a manifest, or the prefix of a .bin/.idx pair")
    add("--documents", type=natural, default=3, metavar="N", help="number of documents to show (default: 3)")
    add_allow_outside(parser)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Print the facts, then text."""
    path, allow_outside = Path(arguments.path), arguments.allow_outside
    if path.suffix == ".json" and isinstance(mdata.load_manifest(path), mdata.BlendManifest):
        blend = mdata.open_blend(path, tokenizer_unknown="ok", allow_outside=allow_outside)  # it is only looked at
        facts = _blend_facts(blend)
        console.result(_blend_text(facts), facts)
        return
    facts = corpus_facts(mdata.open_corpus(path, allow_outside=allow_outside), max(arguments.documents, 0))
    if facts["tokenizer_problem"]:
        console.note(f"mdata: {facts['tokenizer_problem']}")
    console.result(_corpus_text(facts), facts)


def corpus_facts(corpus: mdata.Corpus, num_documents: int) -> dict[str, Any]:
    """The facts about a corpus and its first documents, as JSON types."""
    tokenizer_facts, statistics = corpus.tokenizer, corpus.manifest.statistics
    tokenizer, problem = None, None
    try:
        tokenizer = corpus.load_tokenizer()
    except mdata.MdataError as error:  # the other facts can still be shown
        problem = str(error)
    return {
        "kind": "corpus",
        "path": str(corpus.path),
        "id": corpus.id,
        "verified": corpus.manifest.verified,
        "dtype": corpus.dtype.name,
        "level": corpus.manifest.level,
        "shards": len(corpus.manifest.shards),
        "documents": corpus.num_documents,
        "sequences": corpus.num_sequences,
        "tokens": corpus.num_tokens,
        "bin_bytes": sum(shard.bytes for shard in corpus.manifest.shards),
        "contiguous": corpus.contiguous,
        "largest_id": corpus.largest_id,
        "text_bytes": corpus.text_bytes,
        "lengths": statistics.document_lengths if statistics else None,
        "tokenizer": tokenizer_facts.type if tokenizer_facts else None,
        "fingerprint": tokenizer_facts.fingerprint if tokenizer_facts else None,
        "vocab_size": tokenizer_facts.vocab_size if tokenizer_facts else None,
        "eod": corpus.eod,
        "tokenizer_problem": problem,
        "provenance": _provenance(corpus.manifest.provenance),
        "first_documents": _first_documents(corpus, tokenizer, num_documents=num_documents),
    }


def _provenance(provenance: Provenance | None) -> dict[str, Any] | None:
    if provenance is None:
        return None
    return {
        "program": provenance.program,
        "options": provenance.options,
        "inputs": [{"path": file.path, "bytes": file.bytes, "rows": file.rows} for file in provenance.inputs],
        "records": provenance.records,
        "skipped": provenance.skipped,
        "filtered": provenance.filtered or 0,
        "special_in_text": provenance.special_in_text,
        "origins": provenance.origins.path if provenance.origins else None,
    }


def _first_documents(
    corpus: mdata.Corpus, tokenizer: mdata.Tokenizer | None, *, num_documents: int
) -> list[dict[str, Any]]:
    documents = DocumentReader(corpus)
    shown = []
    for number in range(min(num_documents, corpus.num_documents)):
        sequences = documents.corpus.document_sequences(number)
        ids = np.concatenate([np.empty(0, np.int64), *sequences])
        # A long document is cut by ids first: decoding megabytes to show a line would be slow.
        head = ids[:_TEXT_WIDTH].tolist()
        origin = documents.origin(number)
        shown.append(
            {
                "document": number,
                "origin": f"{origin.path}:{origin.row}" if origin else None,
                "sequences": len(sequences),
                "tokens": len(ids),
                "ids": head[:20],
                "text": tokenizer.decode(head)[:_TEXT_WIDTH] if tokenizer else None,
            }
        )
    return shown


def _corpus_text(facts: dict[str, Any]) -> str:
    apart = ("first_documents", "kind", "provenance", "lengths", "tokenizer_problem")
    shown = {name: value for name, value in facts.items() if name not in apart}
    shown["lengths"] = _lengths_text(facts["lengths"])
    width = max(map(len, shown))
    lines = [f"{name:<{width}}  {_plain(value)}" for name, value in shown.items()]
    lines += ["", *_provenance_lines(facts["provenance"])]
    for document in facts["first_documents"]:
        place = f" from {document['origin']}" if document["origin"] else ""
        parts = f" in {counted(document['sequences'], 'sequence')}" if document["sequences"] > 1 else ""
        lines += ["", f"document {document['document']}{place}: {counted(document['tokens'], 'token')}{parts}"]
        text = document["text"]
        lines.append(repr(text) if text is not None else f"ids {document['ids']} (no tokenizer is known)")
    return "\n".join(lines)


def _lengths_text(bins: list[int] | None) -> str | None:
    """ "2 of 0, 5 of 4-7 tokens": documents by length."""
    if bins is None:
        return None
    spans = ["0", "1", *(f"{2 ** (k - 1):,}-{2**k - 1:,}" for k in range(2, len(bins)))]
    parts = [f"{count:,} of {span}" for count, span in zip(bins, spans, strict=False) if count]
    noun = "token" if parts and parts[-1].endswith(" of 1") else "tokens"
    return f"{', '.join(parts)} {noun}" if parts else "no documents"


def _provenance_lines(provenance: dict[str, Any] | None) -> list[str]:
    if provenance is None:
        return ["written by another program, or without a manifest: inputs unknown"]
    inputs = provenance["inputs"]
    rows, size = sum(file["rows"] for file in inputs), sum(file["bytes"] for file in inputs)
    count = counted(len(inputs), "input")
    lines = [f"made by {provenance['program']} from {count}: {counted(rows, 'row')}, {size:,} bytes"]
    lines += [
        f"  {file['path']}: {counted(file['rows'], 'row')}, {file['bytes']:,} bytes" for file in inputs[:_INPUTS_SHOWN]
    ]
    lines += [f"  and {len(inputs) - _INPUTS_SHOWN:,} more"] if len(inputs) > _INPUTS_SHOWN else []
    skipped = ", ".join(f"{count:,} {kind}" for kind, count in provenance["skipped"].items() if count)
    lines.append(f"rows left out: {skipped or 'none'}")
    lines.append(f"special tokens in the texts: {_plain(provenance['special_in_text'])}")
    lines.append(f"options: {', '.join(f'{name}={value}' for name, value in provenance['options'].items())}")
    return lines


def _plain(value: object) -> str:
    if value is None:
        return "not known"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _blend_facts(blend: OpenBlend) -> dict[str, Any]:
    from msgspec import to_builtins

    rows = blend_table(blend)
    parts = zip(rows, blend.weights, blend.manifest.components, strict=True)
    parent, at_sample = blend.continues or (blend.manifest.parent, None)
    return {
        "kind": "blend",
        "id": blend.manifest.id,
        "algorithm": blend.manifest.algorithm,
        "parent": parent,
        "at_sample": at_sample,
        "components": [
            {
                "name": row.name,
                "path": part.path,
                "id": part.id,
                "share": row.share,
                "group": part.group,
                "max_epochs": part.cap,
                "weight": weight,
                "tokens": row.tokens,
                "documents": row.documents,
            }
            for row, weight, part in parts
        ],
        "phases": to_builtins(blend.manifest.phases),
        "valid": {name: str(path) for name, (path, _) in blend.valid_sets.items()},
        "test": {name: str(path) for name, (path, _) in blend.test_sets.items()},
    }


def _blend_text(facts: dict[str, Any]) -> str:
    columns = ["name", "share", "group", "max_epochs", "weight", "tokens", "documents", "path"]
    shown = [name for name in columns if any(part[name] is not None for part in facts["components"])]
    lines = [f"blend {facts['id']} ({facts['algorithm']})"]
    lines.append(table(shown, [[part[name] for name in shown] for part in facts["components"]]))
    for number, phase in enumerate(facts["phases"], 1):
        ends = counted(phase["samples"], "sample") if phase["samples"] is not None else None
        ends = counted(phase["tokens"], "token") if "tokens" in phase else ends
        lines.append(
            f"phase {number}: {'a ramp of ' if phase.get('ramp') else ''}{ends or 'as long as its amounts last'}"
        )
    if facts["at_sample"] is not None:
        lines.append(f"continues blend {facts['parent'][:16]} at sample {facts['at_sample']:,}")
    if facts["valid"]:
        lines.append(f"validation sets: {', '.join(facts['valid'])}")
    return "\n".join(lines)
