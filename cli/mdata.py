"""The `mdata` command: a table of its subcommands.

Each subcommand is a separate module, imported when it is called.
"""

from __future__ import annotations

import os

from cli.start import Command, start

TYPE_CHECKING = False  # see cli/start.py: nothing is imported before Ctrl-C is taken care of
if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = (
    Command("train-tokenizer", "train a tokenizer on text", module="cli.train_tokenizer"),
    Command("preprocess", "turn text into token files and their manifest", module="cli.preprocess"),
    Command("merge", "join the parts that preprocess --shard made", module="cli.merge"),
    Command("launch", "run preprocess in parts: here, on Slurm or on Ray", module="cli.launch"),
    Command("status", "show how far a launched job is", module="cli.status"),
    Command("tail", "print the last lines of a launched job's logs", module="cli.tail"),
    Command("fetch", "copy a corpus from object storage to a disk, checked", module="cli.fetch"),
    Command("stage", "fetch the blocks that a node will read from object storage", module="cli.stage"),
    Command("split", "divide the documents of a corpus into several corpora", module="cli.split"),
    Command("sample", "draw documents of a corpus at random, as a smaller corpus", module="cli.sample"),
    Command("shuffle", "write the documents of a corpus in random order", module="cli.shuffle"),
    Command("blend", "mix corpora by shares into one blend manifest", module="cli.blend"),
    Command("build", "build offline the arrays that a run would build at its start", module="cli.build"),
    Command("report", "write an HTML report of a blend: shares, epochs, lengths, vocabulary", module="cli.report"),
    Command("inspect", "show what is in a token file, manifest or blend", module="cli.inspect"),
    Command("verify", "check token files against their manifest", module="cli.verify"),
    Command("cat", "print documents of a corpus as text", module="cli.cat"),
    Command("trace", "find the documents of a training sample, and the samples of a document", module="cli.trace"),
    Command("adopt", "write a manifest for token files of another program", module="cli.adopt"),
    Command("tokenizers", "list the tokenizers and engines that work here, with their speed", module="cli.tokenizers"),
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
