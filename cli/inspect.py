"""Show what a corpus, a blend or a bare .bin/.idx pair holds, with its first documents as text.

Special tokens are shown as they are spelled. Reads manifests, indexes and the first documents only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mdata
from cli.console import Console
from cli.text import table

_TEXT_WIDTH = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Few flags."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a manifest, or the prefix of a .bin/.idx pair")
    add("--documents", type=int, default=3, metavar="N", help="how many documents to show; default 3")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Say what is known, then show text."""
    path = Path(arguments.path)
    if path.suffix == ".json" and isinstance(mdata.load_manifest(path), mdata.BlendManifest):
        blend = mdata.open_blend(path)
        facts = _blend_facts(blend)
        console.result(_blend_text(facts), facts)
        return
    facts = corpus_facts(mdata.open_corpus(path), max(arguments.documents, 0))
    console.result(_corpus_text(facts), facts)


def corpus_facts(corpus: mdata.Corpus, num_documents: int) -> dict[str, Any]:
    """What is known of a corpus and its first documents, as JSON types."""
    tokenizer = corpus.load_tokenizer()
    known = corpus.tokenizer
    documents = []
    for number in range(min(num_documents, corpus.num_documents)):
        ids = corpus.document(number)
        # A long document is cut by ids first: decoding megabytes to show a line would be slow.
        head = ids[:_TEXT_WIDTH].tolist()
        text = tokenizer.decode(head)[:_TEXT_WIDTH] if tokenizer else None
        documents.append({"document": number, "tokens": len(ids), "ids": head[:20], "text": text})
    return {
        "kind": "corpus",
        "path": str(corpus.path),
        "id": corpus.id,
        "verified": corpus.manifest.verified,
        "dtype": corpus.dtype.name,
        "shards": len(corpus.manifest.shards),
        "documents": corpus.num_documents,
        "sequences": corpus.num_sequences,
        "tokens": corpus.num_tokens,
        "contiguous": corpus.contiguous,
        "largest_id": corpus.largest_id,
        "text_bytes": corpus.text_bytes,
        "tokenizer": known.type if known else None,
        "fingerprint": known.fingerprint if known else None,
        "vocab_size": known.vocab_size if known else None,
        "eod": corpus.eod,
        "first_documents": documents,
    }


def _corpus_text(facts: dict[str, Any]) -> str:
    shown = {name: value for name, value in facts.items() if name not in ("first_documents", "kind")}
    width = max(map(len, shown))
    lines = [f"{name:<{width}}  {_plain(value)}" for name, value in shown.items()]
    for document in facts["first_documents"]:
        lines += ["", f"document {document['document']}: {document['tokens']:,} tokens"]
        text = document["text"]
        lines.append(repr(text) if text is not None else f"ids {document['ids']} (the tokenizer is not known)")
    return "\n".join(lines)


def _plain(value: object) -> str:
    if value is None:
        return "not known"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _blend_facts(blend: mdata.OpenBlend) -> dict[str, Any]:
    rows = mdata.blend_table(blend)
    parts = zip(rows, blend.weights, blend.manifest.components, strict=True)
    return {
        "kind": "blend",
        "id": blend.manifest.id,
        "algorithm": blend.manifest.algorithm,
        "parent": blend.manifest.parent,
        "components": [
            {
                "name": row.name,
                "path": part.path,
                "id": part.id,
                "share": row.share,
                "weight": weight,
                "tokens": row.tokens,
                "documents": row.documents,
            }
            for row, weight, part in parts
        ],
    }


def _blend_text(facts: dict[str, Any]) -> str:
    columns = ("name", "share", "weight", "tokens", "documents", "path")
    rows = [[part[name] for name in columns] for part in facts["components"]]
    return f"blend {facts['id']} ({facts['algorithm']})\n{table(columns, rows)}"
