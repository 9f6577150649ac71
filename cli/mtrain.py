"""The `mtrain` command: a table of its subcommands.

Each subcommand is a separate module, imported when it is called.
"""

from __future__ import annotations

from .start import Command, start

TYPE_CHECKING = False  # see cli/start.py: nothing is imported before Ctrl-C is taken care of
if TYPE_CHECKING:
    from collections.abc import Sequence

_BEFORE, _RUN, _MODEL = "before a run", "run", "use a model"
COMMANDS = (
    Command("init", "write a run.toml from a few answers", module=".mtrain_init", group=_BEFORE),
    Command(
        "config",
        "print every setting, or turn a run of Megatron-LM into a run.toml",
        module=".mtrain_config",
        group=_BEFORE,
    ),
    Command(
        "plan",
        "print what follows from a configuration: sizes, memory, kernels",
        module=".mtrain_plan",
        group=_BEFORE,
    ),
    Command("check", "print every problem of a run's configuration at once", module=".mtrain_check", group=_BEFORE),
    Command("train", "train a model; run the same command again to continue", module=".mtrain_train", group=_RUN),
    Command(
        "finetune",
        "train a model further on conversations or texts: writes a run.toml and runs it",
        module=".mtrain_finetune",
        group=_RUN,
    ),
    Command("launch", "start a run in the background, here or on a cluster", module=".mtrain_launch", group=_RUN),
    Command("status", "show the state of a run", module=".mtrain_status", group=_RUN),
    Command("tail", "print the last lines of a run's log", module=".mtrain_tail", group=_RUN),
    Command("stop", "ask a run to save and end", module=".mtrain_stop", group=_RUN),
    Command("skip", "leave samples out of a run", module=".mtrain_skip", group=_RUN),
    Command("prove", "train twice, once interrupted, and compare every bit", module=".mtrain_prove", group=_RUN),
    Command("track", "send a run to trackers: TensorBoard, W&B, MLflow, ...", module=".mtrain_track", group=_RUN),
    Command("report", "write report.html of a run", module=".mtrain_report", group=_RUN),
    Command("generate", "continue prompts with a trained model", module=".mtrain_generate", group=_MODEL),
    Command("serve", "serve a model over HTTP, as OpenAI and Megatron do", module=".mtrain_serve", group=_MODEL),
    Command("chat", "talk with a model in this terminal", module=".mtrain_chat", group=_MODEL),
    Command("client", "talk with a server in this terminal", module=".mtrain_client", group=_MODEL),
    Command("eval", "score a model: WikiText, LAMBADA, perplexity, harness tasks", module=".mtrain_eval", group=_MODEL),
    Command("logits", "write the logits of given texts", module=".mtrain_logits", group=_MODEL),
    Command(
        "convert", "convert models from and to Hugging Face, merge or reshard", module=".mtrain_convert", group=_MODEL
    ),
    Command("inspect", "show what a checkpoint holds", module=".mtrain_inspect", group=_MODEL),
    Command("completion", "print a script that completes commands in a shell", module=".completion", group="shell"),
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
