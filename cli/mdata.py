"""The `mdata` command: a table of its subcommands. Each lives in a module of its own, imported when it is
called.
"""

from __future__ import annotations

from collections.abc import Sequence

from cli.start import Command, start

COMMANDS = (
    Command("train-tokenizer", "learn a byte-level BPE vocabulary from text", "cli.train_tokenizer"),
    Command("preprocess", "turn text into token files and their manifest", "cli.preprocess"),
    Command("blend", "mix corpora by shares into one blend manifest", "cli.blend"),
    Command("inspect", "show what a token file, manifest or blend holds", "cli.inspect"),
    Command("verify", "check token files against their manifest", "cli.verify"),
    Command("cat", "turn documents of a corpus back to text", "cli.cat"),
    Command("adopt", "give token files of another program a manifest", "cli.adopt"),
    Command("tokenizers", "list the tokenizers and engines that work here, with their speed", "cli.tokenizers"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mdata` and return its exit code (see cli/console.py)."""
    return start(
        "mdata",
        COMMANDS,
        description="from text to Megatron-format token files and blends of them",
        argv=argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
