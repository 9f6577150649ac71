"""Describes the settings of a run from their fields: type and range, default, and comment.

The comments are read from the source of `sections.py`. `describe` gives all of them in order; `default_toml` is a
configuration with every key and its comment. A key without a default is required, or may be left out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from typing import Any

from trainer.config.parse import expected_value, inline_toml, listed_values, own_fields, section_types

_HEADER = "Every setting of a run. A line without # is required; the others show the defaults."


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConfigKey:
    """A setting.

    Args:
        name: section.key.
        default: None if there is none.
        required: whether the user has to set it.
        not_set: what applies if it is not set; None if it has a default or is required.
        expected: its type and range, as text.
        comment: its description.
        choices: its values, if they can be listed.
    """

    name: str
    default: Any
    required: bool
    not_set: str | None
    expected: str
    comment: str
    choices: tuple[str, ...]


@functools.cache  # inspect parses the whole module for each section
def describe() -> tuple[ConfigKey, ...]:
    """Every setting, section by section."""
    return tuple(key for name, section in section_types().items() for key in _section_keys(name, section))


def section_texts() -> dict[str, str]:
    """The description of each section, in one line."""
    return {name: " ".join((section.__doc__ or "").split()) for name, section in section_types().items()}


def default_toml() -> str:
    """A configuration with every setting, its default and its comment."""
    texts, lines = section_texts(), [f"# {_HEADER}"]
    for key in describe():
        section, _, name = key.name.rpartition(".")
        if section in texts:
            lines += ["", f"# {texts.pop(section)}", f"[{section}]"]
        not_set = f"; not set: {key.not_set}" if key.not_set not in (None, "not set") else ""
        lines.append(f"# {key.comment[:1].upper()}{key.comment[1:]}: {key.expected}{not_set}.")
        value = "..." if key.default is None else inline_toml(key.default)
        lines.append(f"{'' if key.required else '# '}{name} = {value}")
    return "\n".join(lines)


def _section_keys(name: str, section: type) -> list[ConfigKey]:
    source = inspect.getsource(section)
    keys = []
    for field in own_fields(section):
        missing = field.default is dataclasses.MISSING
        comment, _, otherwise = _comment(source, field.name).partition("; not set: ")
        keys.append(
            ConfigKey(
                name=f"{name}.{field.name}",
                default=None if missing else field.default,
                required=missing,
                not_set=None if missing or field.default is not None else otherwise or "not set",
                expected=expected_value(f"{name}.{field.name}"),
                comment=comment,
                choices=listed_values(f"{name}.{field.name}"),
            )
        )
    return keys


def _comment(source: str, name: str) -> str:
    """The comment of a field, which may be on a later line of the field."""
    field = re.search(rf"^    {name}: .*?(?=^    [a-z]\w*: |\Z)", source, re.MULTILINE | re.DOTALL)
    assert field, f"{name} is a field of its section"
    comments = re.findall(r"#\s*(.*)", field.group())
    return " ".join(comments)
