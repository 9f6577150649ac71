"""The `mdata` command: a table of its subcommands.

Each subcommand is a separate module, imported when it is called.
"""

from __future__ import annotations

import os

from .start import Command, start

TYPE_CHECKING = False  # see cli/start.py: nothing is imported before Ctrl-C is taken care of
if TYPE_CHECKING:
    from collections.abc import Sequence

_MAKE, _PARTS, _STORED = "make a corpus", "make a corpus in parts", "read from object storage"
_REWRITE, _BLEND, _LOOK = "divide and reorder a corpus", "mix corpora for training", "inspect data"
COMMANDS = (
    Command("train-tokenizer", "train a tokenizer on text", module=".train_tokenizer", group=_MAKE),
    Command("extract", "write the text of web pages and wikis", module=".extract", group=_MAKE),
    Command("clean", "repair and filter web text by rules", module=".clean", group=_MAKE),
    Command("dedup", "find documents that repeat earlier ones", module=".dedup", group=_MAKE),
    Command("decontaminate", "take the texts of test sets out of training text", module=".decontaminate", group=_MAKE),
    Command("filter", "keep the rows with the lowest or highest scores of a file", module=".filter", group=_MAKE),
    Command("scores", "statistics of scores of texts, such as their toxicity", module=".scores", group=_MAKE),
    Command("preprocess", "turn text into token files and their manifest", module=".preprocess", group=_MAKE),
    Command("adopt", "write a manifest for token files of another program", module=".adopt", group=_MAKE),
    Command(
        "tokenizers",
        "list the tokenizers and engines that work here, with their speed",
        module=".tokenizers",
        group=_MAKE,
    ),
    Command("launch", "run a command in parts: here, on Slurm or on Ray", module=".launch", group=_PARTS),
    Command("status", "show the progress of a launched job", module=".status", group=_PARTS),
    Command("tail", "print the last lines of a launched job's logs", module=".tail", group=_PARTS),
    Command("merge", "join the parts that preprocess --shard made", module=".merge", group=_PARTS),
    Command("fetch", "copy a corpus from object storage to a disk, checked", module=".fetch", group=_STORED),
    Command("stage", "fetch the blocks that a node will read from object storage", module=".stage", group=_STORED),
    Command("split", "divide the documents of a corpus into several corpora", module=".split", group=_REWRITE),
    Command("sample", "draw documents of a corpus at random, as a smaller corpus", module=".sample", group=_REWRITE),
    Command("shuffle", "write the documents of a corpus in random order", module=".shuffle", group=_REWRITE),
    Command("blend", "mix corpora by shares into one blend manifest", module=".blend", group=_BLEND),
    Command("build", "build the arrays that a run would build at its start", module=".build", group=_BLEND),
    Command(
        "report",
        "write an HTML report of a blend: shares, epochs, lengths, vocabulary",
        module=".report",
        group=_BLEND,
    ),
    Command("inspect", "show what is in a token file, manifest or blend", module=".inspect", group=_LOOK),
    Command("verify", "check token files against their manifest", module=".verify", group=_LOOK),
    Command("cat", "print documents of a corpus as text", module=".cat", group=_LOOK),
    Command(
        "trace",
        "find the documents of a training sample, and the samples of a document",
        module=".trace",
        group=_LOOK,
    ),
    Command("completion", "print a script that completes commands in a shell", module=".completion", group="shell"),
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
