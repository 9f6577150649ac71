"""Parses the words of a command line with the table of arguments, like Megatron-LM's parser.

All problems are reported, not only the first. As in Megatron-LM, if an argument is given twice the last one counts, and
abbreviated names are not accepted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mdata.util.option_synonyms import nearest
from trainer.migrate.expansion import unknown
from trainer.migrate.flags import Flag

PROGRAM = "pretrain_gpt.py"
# Megatron-LM's programs that are converted -> the family of their models.
PROGRAMS: Mapping[str, str] = MappingProxyType(
    {
        PROGRAM: "gpt",
        "pretrain_bert.py": "bert",
        "pretrain_t5.py": "t5",
        "pretrain_mamba.py": "mamba",
        "pretrain_hybrid.py": "mamba",
    }
)

_NAMED = 10  # unknown words that are named, with a suggestion; further ones are only counted


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a run.

    Args:
        values: the value of every mapped argument, or Megatron's default; None: no value.
        texts: the given arguments as written, by their (first) name.
        problems: wrong words, one line each.
        incomplete: an unknown value stands for further arguments.
        program: that reads them.
    """

    values: Mapping[str, Any]
    texts: Mapping[str, str]
    problems: tuple[str, ...]
    incomplete: bool = False
    program: str = PROGRAM

    @property
    def family(self) -> str:
        """The family of the models that the program trains."""
        return PROGRAMS[self.program]

    @property
    def continues_text(self) -> bool:
        """Whether its samples are text to be continued; otherwise their kind has the name of the family."""
        return self.family in ("gpt", "mamba")

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.texts


def read_arguments(words: Sequence[str], table: Mapping[str, Flag], *, program: str = PROGRAM) -> Given:
    """Read the words after the name of a program."""
    values = {name: _default(flag) for name, flag in table.items() if not flag.same_as}
    texts: dict[str, str] = {}
    problems: dict[str, str] = {}  # by name, one for each
    unknown_words = 0
    lists: list[str] = []  # unknown values that stand for arguments
    at = 0
    while at < len(words):
        name, equals, joined = words[at].partition("=")
        end = at + 1
        if not equals:
            while end < len(words) and not words[end].startswith("--"):
                end += 1
        values_of_flag = [joined] if equals else list(words[at + 1 : end])
        at = end
        flag = table.get(name)
        if unknown(name) == name:
            lists.append(name)
            continue
        most = {"switch": 0, "texts": len(values_of_flag), "any": len(values_of_flag)}.get(flag.kind, 1) if flag else 0
        if not equals and values_of_flag[most:] and all(unknown(word) == word for word in values_of_flag[most:]):
            lists += values_of_flag[most:]
            values_of_flag = values_of_flag[:most]
        if flag is None:
            unknown_words += 1
            if unknown_words <= _NAMED:
                problems[name] = _unknown_word(name, table, program)
            continue
        value, problem = _value(flag, values_of_flag)
        if problem:
            problems.setdefault(name, f"{name} {problem}")
        else:
            first = flag.same_as or name
            values[first], texts[first] = value, " ".join([name, *values_of_flag])
    if unknown_words > _NAMED:
        problems[""] = f"{unknown_words - _NAMED} more are not arguments of {program}; the first {_NAMED} are listed"
    for name in lists:
        problems[name] = f"{name} stands for arguments that are not known here; write them out"
    return Given(values, texts, tuple(problems.values()), incomplete=bool(lists), program=program)


def _default(flag: Flag) -> Any:
    if flag.kind == "switch":
        return False
    return None if flag.default is None else _value(flag, [flag.default])[0]


def _unknown_word(name: str, table: Mapping[str, Flag], program: str) -> str:
    if not name.startswith("--"):
        return f"{name[:80]!r} is where an argument is expected; arguments begin with --"
    near = nearest(name, list(table))
    return f"{name[:80]} is not an argument of {program}" + (f"; did you mean {near}?" if near else "")


def _value(flag: Flag, words: list[str]) -> tuple[Any, str | None]:
    """(value, problem) from the words after an argument."""
    if flag.kind == "any":
        return " ".join(words), None
    if flag.kind == "switch":
        return True, f"takes no value, but {words[0]!r} follows it" if words else None
    if flag.kind == "texts":
        words = [part for word in words for part in word.split()]
    elif len(words) != 1:
        return None, f"takes one value, but {len(words)} follow it"
    if flag.use != "mapped":
        return " ".join(words), None
    if flag.kind == "token" and words:
        return words[0], None
    if not words or any(unknown(word) for word in words):
        missing = next((placeholder for word in words if (placeholder := unknown(word))), "nothing follows it")
        remedy = "write it out"
        if missing.startswith("<argument_"):
            remedy = "give the script's arguments after its name, in the same quotes"
        return None, f"has a value that cannot be resolved here: {missing}; {remedy}"
    try:
        if flag.kind == "int":
            return int(words[0]), None
        if flag.kind == "float" and math.isfinite(number := float(words[0])):
            return number, None
    except ValueError:
        number = math.nan
    if flag.kind in ("int", "float"):
        return None, f"is {words[0][:40]!r}; expected {'an integer' if flag.kind == 'int' else 'a number'}"
    return (tuple(words) if flag.kind == "texts" else words[0]), None
