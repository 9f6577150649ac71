"""Finds the command of a script that starts a program of Megatron-LM, and the number of ranks it starts.

Understands torchrun, torch.distributed.launch, srun and mpirun, and `sh -c "..."` after them. A number of ranks that
depends on an unknown value is None.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import PurePath
from types import MappingProxyType

from mdata import UsageError
from trainer.migrate.arguments import PROGRAM, PROGRAMS
from trainer.migrate.expansion import Work
from trainer.migrate.lexer import ShellError
from trainer.migrate.settings import is_count
from trainer.migrate.shell import read_commands

# Megatron-LM's other programs, and what mtrain lacks for them.
_OTHERS = MappingProxyType(
    {
        "pretrain_vlm.py": "an encoder of images",
        "pretrain_ict.py": "two encoders for retrieval",
        "pretrain_retro.py": "attention to retrieved text (RETRO)",
        "pretrain_vision_classify.py": "an encoder of images",
        "train_rl.py": "reinforcement learning",
    }
)
# What does the work of its scripts that train nothing.
_INSTEAD = MappingProxyType(
    {
        "finetune_gpt.py": "mtrain finetune MODEL DATA",
        "generate_samples_gpt.py": "mtrain generate MODEL --input FILE, or --num-samples N",
        "merge_datasets.py": "mdata merge",
        "preprocess_data.py": "mdata preprocess, which takes its options",
        "text_generation_cli.py": "mtrain client HOST",
    }
)
_EVERY = ", ".join(PROGRAMS)
_PER_NODE = ("--nproc-per-node", "--nproc_per_node", "--ntasks-per-node")
_NODES = ("--nnodes", "--nodes", "-N")
_RANKS = ("--ntasks", "-n", "-np", "--np", "--n")
_PLACES = ("-H", "-host", "--host", "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-N", "-npernode",
           "--npernode", "-ppn", "--map-by")  # fmt: skip
# Launchers whose options are not read.
_OTHER_LAUNCHERS = frozenset({"accelerate", "aprun", "deepspeed", "flux", "horovodrun", "jsrun", "pdsh"})
# Programs that may be given the script as a file.
_NO_LAUNCH = frozenset({"cat", "chmod", "cp", "diff", "echo", "grep", "head", "ln", "ls", "mv", "printf", "rm", "sed"})
_SHELLS = frozenset({"sh", "bash"})


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Arguments of a program, and the numbers of ranks and of machines; None: unknown."""

    arguments: tuple[str, ...]
    world_size: int | None
    nodes: int | None = 1
    program: str = PROGRAM


def find_launch(text: str, arguments: Sequence[str] = ()) -> Launch:
    """The only command of a bash text that starts one of `PROGRAMS`.

    Args:
        text: a command line or a script.
        arguments: the script's own arguments, `$1` and on.

    Raises:
        UsageError: the text cannot be read, has no such command, or several.
    """
    work = Work()
    try:
        commands = [part for command in read_commands(text, arguments, work=work) for part in _inner(command, work)]
    except (ShellError, RecursionError) as error:
        fix = f"give the command itself: mtrain config --from-megatron '{PROGRAM} --num-layers ...'"
        raise UsageError("the script cannot be read", found=str(error), fix=fix) from error
    launches = [command for command in commands if any(map(_is_script, command))]
    launches = [command for command in launches if command[0] not in _NO_LAUNCH] or launches
    if len(launches) != 1:
        others = [word for command in commands for word in command if word.endswith(".py")]
        other = next((name for word in others if (name := PurePath(word).name) in _OTHERS), None)
        if not launches and other:
            fix = f"mtrain trains the models of {_EVERY}"
            raise UsageError(f"{other} cannot be converted", found=f"mtrain lacks {_OTHERS[other]}", fix=fix)
        instead = next((name for word in others if (name := PurePath(word).name) in _INSTEAD), None)
        if not launches and instead:
            fix = f"use {_INSTEAD[instead]}"
            raise UsageError(f"{instead} has no run.toml", expected=f"one of {_EVERY}", fix=fix)
        commands_text = f"{len(launches)} such commands" if launches else ", ".join(others[:3]) or "no Python script"
        sourced = [" ".join(command[:2]) for command in commands if command[0] in (".", "source")]
        if not launches and sourced:
            commands_text += f", and `{sourced[0]}`, a file that is not read"
        elif not launches and (named := next((name for name in PROGRAMS if name in text), None)):
            commands_text += f", and {named} in a text or a here-document, which are not read"
        fix = "give one of them" if launches else "give the command that starts the program, or its script's file"
        raise UsageError(f"expected one command that starts one of {_EVERY}", found=commands_text, fix=fix)
    at = next(place for place, word in enumerate(launches[0]) if _is_script(word))
    ranks, nodes = launched_ranks(launches[0][:at], text)
    return Launch(tuple(launches[0][at + 1 :]), ranks, nodes, PurePath(launches[0][at]).name)


def launched_ranks(words: Sequence[str], text: str) -> tuple[int | None, int | None]:
    """The numbers of ranks and of machines that a launcher's words start; None: unknown.

    Args:
        text: the script, for its #SBATCH lines.
    """
    batch = re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE)
    return _sizes(words, " ".join(batch).split())


def _inner(command: list[str], work: Work) -> list[list[str]]:
    """A command, or those of its `sh -c`, each preceded by the launcher's words."""
    for at in range(1, len(command) - 1):
        if (
            command[at] in ("-c", "-lc")
            and PurePath(command[at - 1]).name in _SHELLS
            and (any(name in command[at + 1] for name in PROGRAMS))
        ):
            return [command[: at - 1] + inner for inner in read_commands(command[at + 1], work=work)]
    return [command]


def _is_script(word: str) -> bool:
    return PurePath(word).name in PROGRAMS


def _sizes(words: Sequence[str], batch: Sequence[str]) -> tuple[int | None, int | None]:
    """The numbers of ranks and of machines."""
    launcher = next((word for word in words if PurePath(word).name in ("srun", "mpirun", "mpiexec")), None)
    torch = any(PurePath(word).name == "torchrun" or word.startswith("torch.distributed.") for word in words)
    if not torch and any(PurePath(word).name in _OTHER_LAUNCHERS for word in words):
        return None, None
    if not launcher and not torch:
        return 1, 1
    said = [*(batch if launcher else ()), *words]
    if not torch and PurePath(str(launcher)).name != "srun":
        placed = any(word.partition("=")[0] in _PLACES for word in words)
        return _whole(_number(words, _RANKS, "")), None if placed else 1
    nodes = _whole(_number(said, _NODES, "1"))
    ranks = _number(said, _RANKS, "" if not torch else "1")
    if not torch and not any(_number(said, names, "") for names in (_RANKS, _NODES, _PER_NODE)):
        return None, None  # as sbatch was told
    if torch or ranks == "":
        per_node = _whole(_number(said, _PER_NODE, "1"))
        return per_node * nodes if per_node and nodes else None, nodes
    return _whole(ranks), nodes


def _whole(text: str) -> int | None:
    return int(text) if is_count(text) else None


def _number(words: Sequence[str], names: Sequence[str], default: str) -> str:
    value = default
    for at, word in enumerate(words):
        name, equals, joined = word.partition("=")
        if word[:2] in names and re.match(r"[0-9<]", word[2:]):  # -n8
            value = word[2:]
        elif name in names:
            value = joined if equals else "".join(words[at + 1 : at + 2])
    return value
