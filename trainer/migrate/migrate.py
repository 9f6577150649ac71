"""Converts a run of Megatron-LM to our configuration: every argument is mapped, not needed, or refused by name.

`migrate` is a pure function of the words; `as_toml` writes the result, with a comment for every argument. The sections
are consulted at run time for whether this version has a setting, and accepts that value: an argument whose key does not
exist is refused, and is mapped as soon as the key exists.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.describe import describe
from trainer.config.parse import inline_toml, is_old_not_set, key_names, setting_problem
from trainer.migrate.arguments import PROGRAM, Given, read_arguments
from trainer.migrate.flags import Flag, flag_table
from trainer.migrate.rules_model import PATTERNS, model_rules
from trainer.migrate.rules_run import run_rules
from trainer.migrate.settings import Refusal, Setting

_NOT_SET = "this value turns it off, as without it"
_MIXERS = ("mamba_stack_spec", "hybrid_stack_spec")  # the layers of pretrain_mamba.py, as --spec names them
_NO_EFFECT = "no effect with the other arguments, in Megatron-LM or here"


@dataclasses.dataclass(frozen=True, slots=True)
class Migration:
    """The result for all arguments.

    Args:
        settings: our settings, each key once.
        mapped: (arguments as given, "key = value") of each setting that an argument decided.
        not_needed: (argument as given, reason).
        refused: one line each; if there are any, the settings must not be used.
    """

    settings: tuple[Setting, ...]
    mapped: tuple[tuple[str, str], ...]
    not_needed: tuple[tuple[str, str], ...]
    refused: tuple[str, ...]

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The settings as parsed TOML; a sub-section is a table "data.bert"."""
        result: dict[str, dict[str, Any]] = {}
        order = {name: place for place, name in enumerate(key_names())}
        for setting in sorted(self.settings, key=lambda item: order.get(item.key, len(order))):
            section, _, key = setting.key.rpartition(".")
            result.setdefault(section, {})[key] = setting.value
        return result


def migrate(words: Sequence[str], world_size: int | None, *, program: str = PROGRAM) -> Migration:
    """Map the words after the name of a program.

    Args:
        words: arguments of core 0.12 to 0.16 and of the versions around them.
        world_size: the number of ranks; None: unknown.
        program: one of `PROGRAMS`.
    """
    table = flag_table()
    arguments = read_arguments(words, table, program=program)
    refused = list(arguments.problems) + [
        f"{text}: {table[name].note}"
        for name, text in arguments.texts.items()
        if table[name].use == "refused" and not _is_default(table[name], arguments)
    ]
    mapped_or_refused = _found(arguments, table, world_size)
    wrong = {problem.split(" ")[0] for problem in arguments.problems}
    if wrong.intersection(PATTERNS):  # which would say it
        wrong.add("--num-layers")
    refusals = [item for item in mapped_or_refused if isinstance(item, Refusal) and item.flag not in wrong]
    if arguments.incomplete:  # what is missing may be among the unknown arguments
        refusals = [item for item in refusals if item.flag in arguments]
    refused += [f"{arguments.texts.get(item.flag, item.flag)}: {item.reason}" for item in refusals]
    settings = [item for item in mapped_or_refused if isinstance(item, Setting)]
    usable, spared = [], []
    for setting in settings:
        by = " ".join(arguments.texts[name] for name in setting.flags if name in arguments)
        if not (problem := setting_problem(setting.key, setting.value) or _mock_problem(setting)):
            if is_old_not_set(setting.key, setting.value):  # the key is left out
                spared += [(by, _NOT_SET)] if by else []
                continue
            usable.append(setting)
        elif setting.neutral != setting.value:
            refused.append(f"{by or _by_default(setting)}: not supported by this version: {problem}")
        elif by:
            spared.append((by, "this version does nothing else"))
    decided = {name for setting in settings for name in setting.flags}
    idle = [name for name in arguments.texts if table[name].use == "mapped" and name not in decided]
    idle = [name for name in idle if not any(name in line for line in refused)]
    mapped = [
        (
            " ".join(arguments.texts[name] for name in setting.flags if name in arguments),
            f"{setting.key} = {_toml(setting.value)}",
        )
        for setting in usable
        if any(name in arguments for name in setting.flags)
    ]
    spared += [(text, table[name].note) for name, text in arguments.texts.items() if table[name].use == "not needed"]
    spared += [
        (text, "this value changes nothing")
        for name, text in arguments.texts.items()
        if _is_default(table[name], arguments)
    ]
    spared += [(arguments.texts[name], _NO_EFFECT) for name in idle]
    return Migration(tuple(usable), tuple(mapped), tuple(spared), tuple(refused))


def _start_lines(migration: Migration, world_size: int | None, nodes: int | None) -> list[str]:
    least = math.prod(migration.tables.get("mesh", {}).get(axis, 1) for axis in ("tp", "pp", "cp"))
    if world_size is not None and world_size % least:
        few = f"The command has {world_size} ranks, but tp x pp x cp needs a multiple of {least}."
        return [few, *_start_lines(migration, None, None)]
    if nodes == 1:
        ranks = "RANKS" if world_size is None else str(world_size)
        return [f"Start it with: mtrain train run.toml --nproc {ranks}"]
    per_node = "RANKS" if world_size is None or nodes is None else str(world_size // nodes)
    machines = "MACHINES" if nodes is None else str(nodes)
    return [
        f"Start it on each machine with: torchrun --nnodes {machines} --nproc-per-node {per_node}",
        "  --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 --no-python mtrain train run.toml",
        "or under Slurm with: srun mtrain train run.toml",
    ]


def as_toml(
    migration: Migration,
    *,
    title: str,
    world_size: int | None,
    nodes: int | None = 1,
    end: str = "Settings marked (default) are Megatron-LM's defaults, or what it always does.",
) -> str:
    """The configuration with its comments: what was mapped to what, what is not needed and why.

    Args:
        migration: without anything refused.
        title: the source, for the first line.
        end: the last line of the comments.
        world_size, nodes: ranks and machines, for the line that says how to start; None: unknown.
    """
    lines = [f"From {title}", *_start_lines(migration, world_size, nodes), "", "Mapped:"]
    lines += [f"  {text} -> {setting}" for text, setting in migration.mapped]
    lines += ["", "Not needed:"] if migration.not_needed else []
    for reason in dict.fromkeys(reason for _, reason in migration.not_needed):
        texts = "; ".join(text for text, why in migration.not_needed if why == reason)
        lines.append(f"  {texts}: {reason}")
    lines += ["", end]
    body = [_comment(line) for line in lines]
    asked = {setting.partition(" = ")[0] for _, setting in migration.mapped}
    notes = {item.key: item.note for item in migration.settings}
    for section, table in migration.tables.items():
        body += ["", f"[{section}]"]
        for key, value in table.items():
            name = f"{section}.{key}"
            remarks = [*(["(default)"] if name not in asked else []), *([notes[name]] if notes[name] else [])]
            if value is None:
                body.append(f"# {key} is not set: {notes[name]}")
            else:
                body.append(f"{key} = {_toml(value)}" + (f"  # {' '.join(remarks)}" if remarks else ""))
    return "\n".join(body) + "\n"


def _mock_problem(setting: Setting) -> str | None:
    """Mock data is a value of a key that accepts any text, so the key's description decides whether it is supported."""
    if (setting.key, setting.value) != ("data.blend", "mock"):
        return None
    says = next(key.comment for key in describe() if key.name == setting.key)
    return None if "mock" in says else "data.blend has no mock data"


def _found(arguments: Given, table: Mapping[str, Flag], world_size: int | None) -> list[Setting | Refusal]:
    """Settings and refusals: copied values, then those of the rules, which take precedence."""
    by_key: dict[object, Setting | Refusal] = {}
    ruled = [*model_rules(arguments), *run_rules(arguments, world_size)]
    keys = {item.key for item in ruled if isinstance(item, Setting)}
    neutral = {"model.attention_dropout": 0.0, "model.hidden_dropout": 0.0}
    for flag in table.values():
        if flag.copied and not flag.same_as and arguments[flag.name] is not None:
            value = arguments[flag.name]
            by_key[flag.key] = Setting(flag.key, value, (flag.name,), neutral.get(flag.key))
        elif flag.copied and not flag.same_as and flag.default is None and flag.key not in keys:
            by_key[flag.name] = Refusal(flag.name, "missing; a run needs it")
    for item in ruled:
        by_key[item.key if isinstance(item, Setting) else (item.flag, item.reason)] = item
    return list(by_key.values())


def _is_default(flag: Flag, arguments: Given) -> bool:
    if flag.name == "--spec" and arguments.family == "mamba" and arguments.texts[flag.name].endswith(_MIXERS):
        return True
    return flag.use == "refused" and flag.kind != "switch" and _same(arguments.texts[flag.name], flag)


def _same(text: str, flag: Flag) -> bool:
    """Whether the given text is the default."""
    value, default = text.partition(" ")[2], flag.default or ""
    try:
        return float(value) == float(default)
    except ValueError:
        return value == default


def _by_default(setting: Setting) -> str:
    return f"{setting.flags[0]} (Megatron-LM's default)" if setting.flags else "what Megatron-LM always does"


def _toml(value: object) -> str:
    return "(not set)" if value is None else inline_toml(value)


def _comment(line: str) -> str:
    return ("# " + "".join(mark if mark.isprintable() else "?" for mark in line)).rstrip()
