"""Turn documents of a corpus back into text, with special tokens shown: all documents, or some by number or origin.

A single document is written unchanged; before each of several, a line gives its number and origin. A document of
several sequences (sentences) has one line for each. With --json: one object per line. On a terminal, control characters
in a text are shown as \\u001b, so that texts cannot control it; in pipes and files they are unchanged.

Examples:
  mdata cat web_text_document.json --documents 0:10,42
  mdata cat web_text_document.json --origin web.jsonl:17
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import mdata
from mdata.corpus.documents import DocumentReader, select
from mdata.errors import counted

from .console import Console
from .text import add_allow_outside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add = parser.add_argument
    add("path", metavar="CORPUS", help="a manifest, or the prefix of a .bin/.idx pair")
    add("--documents", metavar="N,A:B", help="numbers and ranges, such as 0:10,42 (default: all)")
    add("--origin", action="append", metavar="FILE:ROW", help="the document of an input's row, from 1; may be repeated")
    add("--ids", action="store_true", help="token ids instead of text")
    add_allow_outside(parser)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Write document after document."""
    corpus = mdata.open_corpus(arguments.path, allow_outside=arguments.allow_outside)
    documents = DocumentReader(corpus)
    if documents.missing is not None:
        console.note(f"mdata: {documents.missing} is missing, so origins are unknown")
    tokenizer = None if arguments.ids else corpus.load_tokenizer()
    if tokenizer is None and not arguments.ids:
        raise mdata.UsageError(
            f"{corpus.name}: its tokenizer is unknown", fix="--ids, or mdata adopt with its tokenizer"
        )
    numbers, alone = _chosen(arguments, documents)
    for number in numbers:
        sequences = [ids.tolist() for ids in documents.corpus.document_sequences(number)]
        texts = None if tokenizer is None else [tokenizer.decode(ids) for ids in sequences]
        if console.json:
            console.write(json.dumps(_facts(number, documents, sequences, texts=texts), ensure_ascii=False) + "\n")
            continue
        lines = texts if texts is not None else [" ".join(map(str, ids)) for ids in sequences]
        head = "" if alone else _head(number, documents, sum(map(len, sequences)))
        console.write(head)
        console.write("".join(f"{line}\n" for line in lines), raw=True)


def _chosen(arguments: argparse.Namespace, documents: DocumentReader) -> tuple[Iterable[int], bool]:
    """The numbers in the requested order, and whether there is only one."""
    total = documents.corpus.num_documents
    if arguments.documents is None and not arguments.origin:
        return range(total), total == 1
    by_origin = [number for place in arguments.origin or () for number in documents.from_origin(place)]
    if arguments.documents is None:
        return by_origin, len(by_origin) == 1
    words = arguments.documents.strip().removeprefix("-")
    return chain(by_origin, select(arguments.documents, total)), words.isdecimal() and not by_origin


def _head(number: int, documents: DocumentReader, num_tokens: int) -> str:
    origin = documents.origin(number)
    place = f", {origin.path}:{origin.row}" if origin else ""
    return f"==> document {number}{place}, {counted(num_tokens, 'token')} <==\n"


def _facts(
    number: int, documents: DocumentReader, sequences: list[list[int]], *, texts: list[str] | None
) -> dict[str, Any]:
    origin = documents.origin(number)
    return {
        "document": number,
        "file": origin.path if origin else None,
        "row": origin.row if origin else None,
        "tokens": sum(map(len, sequences)),
        **({"ids": sequences} if texts is None else {"sequences": texts}),
    }
