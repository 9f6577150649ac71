"""The `mtrain` command: a table of its subcommands.

Each subcommand is a separate module, imported when it is called.
"""

from __future__ import annotations

from cli.start import Command, start

TYPE_CHECKING = False  # see cli/start.py: nothing is imported before Ctrl-C is taken care of
if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = (
    Command("train", "train a model; run the same command again to continue", module="cli.mtrain_train"),
    Command("check", "print every problem of a run's configuration at once", module="cli.mtrain_check"),
    Command("config", "print every setting, or turn a run of Megatron-LM into a run.toml", module="cli.mtrain_config"),
    Command("plan", "print what follows from a configuration: sizes, memory, kernels", module="cli.mtrain_plan"),
    Command("generate", "continue prompts with a trained model", module="cli.mtrain_generate"),
    Command("convert", "convert models from and to Hugging Face, merge or reshard", module="cli.mtrain_convert"),
    Command("prove", "train twice, once interrupted, and compare every bit", module="cli.mtrain_prove"),
    Command("report", "write report.html of a run", module="cli.mtrain_report"),
    Command("inspect", "show what a checkpoint holds", module="cli.mtrain_inspect"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mtrain` and return its exit code (see cli/console.py)."""
    return start(
        "mtrain",
        COMMANDS,
        description="train and use language models with any parallel layout",
        argv=argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
