"""Print every setting with its default, explain one, or convert a run of Megatron-LM or Accelerate to TOML.

`--from-megatron` takes the command line of pretrain_gpt.py, bert, t5 or mamba, with torchrun or another launcher before
it, or the name of its bash script and the script's arguments. For tasks/main.py, run_text_generation_server.py and
converters of checkpoints it prints a line of `mtrain eval`, `finetune`, `serve` or `convert`. `--from-accelerate` takes
the file of `accelerate config` with the Megatron-LM plugin, and prints the sections that it decides. Nothing is run.
Exit code 2: some arguments are refused; all of them are listed.

Examples:
  mtrain config --key optimizer.lr
  mtrain config --from-megatron 'pretrain.sh 8' > run.toml
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdata import UsageError
from mdata.util.regular_files import regular_file

from .console import Console, Parser

if TYPE_CHECKING:
    from trainer.config.describe import ConfigKey

MOST_BYTES = 1 << 20  # of a script


def add_arguments(parser: Parser) -> None:
    """See `mtrain config --help`."""
    parser.no_option = "--from-megatron 'SCRIPT ARGUMENT ...', all in the same quotes"
    parser.add_argument(
        "--from-megatron",
        metavar="COMMAND",
        help="pretrain_gpt.py and its arguments in quotes, or a script's file: write the same run as TOML",
    )
    parser.add_argument(
        "--from-accelerate", type=Path, metavar="FILE", help="the configuration of Accelerate's Megatron-LM plugin"
    )
    parser.add_argument("--key", metavar="section.key", help="explain one setting, or those of one section")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Print the requested configuration or setting."""
    options = ("key", "from_megatron", "from_accelerate")
    given = [f"--{name.replace('_', '-')}" for name in options if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are given together", expected="one of them")
    if arguments.from_megatron is not None:
        _from_megatron(arguments.from_megatron, console)
    elif arguments.from_accelerate is not None:
        _from_accelerate(arguments.from_accelerate, console)
    elif arguments.key is not None:
        _explain(arguments.key, console)
    else:
        from trainer.config.describe import default_toml, describe

        console.result(default_toml(), {key.name: key.default for key in describe()})


def _explain(name: str, console: Console) -> None:
    from mdata.util.option_synonyms import nearest
    from trainer.config.describe import describe

    keys = [key for key in describe() if name in (key.name, *key.name.split(".")) or key.name.startswith(f"{name}.")]
    if not keys:
        every = [key.name for key in describe()]
        every += dict.fromkeys(key_name.rpartition(".")[0] for key_name in every)  # sections
        near = [key_name for key_name in every if name in key_name] or list(filter(None, [nearest(name, every)]))
        near = near or [key_name for key_name in every if nearest(name, [key_name.rpartition(".")[2]])]
        fix = f"did you mean {' or '.join(near[:3])}?" if near else "mtrain config lists every setting"
        raise UsageError(f"there is no setting {name!r}", fix=fix)
    lines = [line for key in keys for line in (f"{key.name}: {key.comment}", f"  {key.expected}{_default(key)}")]
    facts = {
        key.name: {
            "default": key.default,
            "required": key.required,
            "not_set": key.not_set,
            "comment": key.comment,
        }
        for key in keys
    }
    console.result("\n".join(lines), facts)


def _default(key: ConfigKey) -> str:
    if key.required:
        return ", required"
    value = str(key.default).lower() if isinstance(key.default, bool) else repr(key.default)
    return f"; default: {key.not_set or value}"


def _from_megatron(text: str, console: Console) -> None:
    from trainer.config.parse import problems_error
    from trainer.migrate.evaluation import find_evaluation
    from trainer.migrate.launcher import find_launch
    from trainer.migrate.migrate import as_toml, migrate

    script, words = _script(text)
    if (evaluation := find_evaluation(script, words[1:])) is not None:
        if evaluation.refused:
            raise problems_error(words[0] if words else evaluation.program, evaluation.refused)
        lines = [*(f"# {note}" for note in evaluation.notes), evaluation.command]
        console.result("\n".join(lines), {"command": evaluation.command, "notes": list(evaluation.notes)})
        return
    launch = find_launch(script, words[1:])
    title = words[0] if words else launch.program
    migration = migrate(launch.arguments, launch.world_size, program=launch.program)
    if migration.refused:
        raise problems_error(title, migration.refused, fix="correct these; nothing was written")
    facts = {"settings": migration.tables, "mapped": migration.mapped, "not_needed": migration.not_needed}
    console.result(
        as_toml(migration, title=f"Megatron-LM: {title}", world_size=launch.world_size, nodes=launch.nodes), facts
    )


def _from_accelerate(path: Path, console: Console) -> None:
    from mdata.errors import os_errors_named
    from trainer.config.parse import problems_error
    from trainer.migrate.accelerate import convert
    from trainer.migrate.migrate import as_toml

    with os_errors_named("reading the configuration of Accelerate"):
        text = _script_text(path)
    converted = convert(_yaml(text, path))
    migration = converted.migration
    if migration.refused:
        raise problems_error(str(path), migration.refused, fix="correct these; nothing was written")
    end = "Model, data, batch and learning rate are in your script: mtrain init writes these sections."
    toml = as_toml(
        migration,
        title=f"Accelerate's Megatron-LM plugin: {path}",
        world_size=converted.world_size,
        nodes=converted.nodes or 1,
        end=end,
    )
    facts = {"settings": migration.tables, "mapped": migration.mapped, "not_needed": migration.not_needed}
    console.result(toml, facts)


def _yaml(text: str, path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise UsageError("PyYAML is not installed, which reads this file", fix="pip install pyyaml") from error
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is not a YAML file", found=str(error).splitlines()[0]) from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a configuration of Accelerate", found=type(value).__name__)
    return value


def _script(text: str) -> tuple[str, list[str]]:
    """(bash, [file, its arguments]) from the given words; the list is empty for a command line."""
    import shlex

    from mdata.errors import explain_os_error

    try:
        words = shlex.split(text)
    except ValueError:  # an open quote: the bash reader reports it better
        return text, []
    if words[0].endswith(".py") or (len(words) > 1 and not words[0].endswith(".sh")):
        return text, []
    try:
        return _script_text(Path(words[0])), words
    except OSError as error:
        fix = "give a script's file, or the command line itself: 'pretrain_gpt.py --num-layers 24 ...'"
        explained = explain_os_error(error, "reading the script")
        if not isinstance(explained, UsageError):
            raise explained from error
        raise UsageError(f"cannot read the script {words[0]}", found=error.strerror, fix=fix) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{words[0]} is not a text file", found=str(error), fix="give a bash script") from error


def _script_text(path: Path) -> str:
    """The text of a script."""
    if (size := regular_file(path).stat().st_size) > MOST_BYTES:
        actual, expected = f"{size:,} bytes", f"at most {MOST_BYTES:,}"
        raise UsageError(f"cannot read the script {path}", found=actual, expected=expected, fix="give a bash script")
    return path.read_text(encoding="utf-8")
