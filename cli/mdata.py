"""The `mdata` command: a table of its subcommands.

Each subcommand is a separate module, imported when it is called.
"""

from __future__ import annotations

import os

from .start import Command, start

TYPE_CHECKING = False  # see cli/start.py: nothing is imported before Ctrl-C is taken care of
if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = (
    Command("train-tokenizer", "train a tokenizer on text", module=".train_tokenizer"),
    Command("preprocess", "turn text into token files and their manifest", module=".preprocess"),
    Command("merge", "join the parts that preprocess --shard made", module=".merge"),
    Command("launch", "run preprocess in parts: here, on Slurm or on Ray", module=".launch"),
    Command("status", "show how far a launched job is", module=".status"),
    Command("tail", "print the last lines of a launched job's logs", module=".tail"),
    Command("fetch", "copy a corpus from object storage to a disk, checked", module=".fetch"),
    Command("stage", "fetch the blocks that a node will read from object storage", module=".stage"),
    Command("split", "divide the documents of a corpus into several corpora", module=".split"),
    Command("sample", "draw documents of a corpus at random, as a smaller corpus", module=".sample"),
    Command("shuffle", "write the documents of a corpus in random order", module=".shuffle"),
    Command("blend", "mix corpora by shares into one blend manifest", module=".blend"),
    Command("build", "build the arrays that a run would build at its start", module=".build"),
    Command("report", "write an HTML report of a blend: shares, epochs, lengths, vocabulary", module=".report"),
    Command("inspect", "show what is in a token file, manifest or blend", module=".inspect"),
    Command("verify", "check token files against their manifest", module=".verify"),
    Command("cat", "print documents of a corpus as text", module=".cat"),
    Command("trace", "find the documents of a training sample, and the samples of a document", module=".trace"),
    Command("adopt", "write a manifest for token files of another program", module=".adopt"),
    Command(
        "tokenizers",
        "list the tokenizers and engines that work here, with their speed",
        module=".tokenizers",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mdata` and return its exit code (see cli/console.py)."""
    # No command multiplies matrices, but for that purpose numpy starts a thread on each core when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return start(
        "mdata",
        COMMANDS,
        description="turn text into Megatron-format token files and blend them",
        argv=argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
