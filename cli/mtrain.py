"""The `mtrain` command: a table of its subcommands. Each lives in a module of its own, imported when it is
called.
"""

from __future__ import annotations

from collections.abc import Sequence

from cli.start import Command, start

COMMANDS = (
    Command("train", "train a model; run it again to continue", "cli.mtrain_train"),
    Command("check", "print every problem of a run's configuration at once", "cli.mtrain_check"),
    Command("plan", "print the numbers that follow from a run's configuration", "cli.mtrain_plan"),
    Command("generate", "continue prompts with a trained model", "cli.mtrain_generate"),
    Command("report", "write report.html of a run", "cli.mtrain_report"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mtrain` and return its exit code (see cli/console.py)."""
    return start(
        "mtrain",
        COMMANDS,
        description="train and use language models over any layout of devices",
        argv=argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
