"""Copy a corpus from object storage to a folder on a disk, where training and all other commands can open it.

Every file is checked against the hashes in the manifest. After an interruption, the same command continues; if the copy
is complete, it checks the files. For credentials see docs/howto/storage.md.

Examples:
  mdata fetch s3://corpora/web_text_document.json --output corpora
  mdata fetch hf://datasets/owner/name --output name
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mdata.corpus.fetch import fetch

from .console import Console, Parser


def add_arguments(parser: Parser) -> None:
    """The corpus, and the folder of the copy."""
    parser.add_argument(
        "corpus", metavar="ADDRESS", help="its manifest, prefix or folder/ at s3://, gs:// or az://; a dataset at hf://"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder to copy to")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `fetch` and print the path of the manifest."""
    with console.progress() as progress:
        path = fetch(arguments.corpus, arguments.output, progress=progress)
    console.result(f"{path}: complete and verified against its manifest", {"manifest": str(path)})
