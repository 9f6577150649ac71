r"""Builds a text from several columns of a record: --text-template "{title}\n{body}".

`{name}` is the text of a column, `{name?}` one that may be null or missing and is then empty; `{{` and `}}` are braces,
and `\n`, `\t` and `\\` what they are in most languages, because a shell passes them on as two characters. Columns are
texts; nothing is converted.

Slow twin: tests/reference/text_template.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

from mdata.errors import UsageError

_ESCAPES = MappingProxyType({"\\n": "\n", "\\t": "\t", "\\\\": "\\", "{{": "{", "}}": "}"})
_PART = re.compile(r"\\[nt\\]|\{\{|\}\}|(?P<field>\{[^{}]*\})|(?P<bad>[\\{}])|[^\\{}]+")


@dataclass(frozen=True)
class Field:
    """A column of a template; `optional`: it may be null or missing."""

    name: str
    optional: bool


@dataclass(frozen=True)
class TextTemplate:
    """A template: its text, and its parts (texts and columns)."""

    text: str
    parts: tuple[str | Field, ...]

    @property
    def fields(self) -> dict[str, bool]:
        """The columns, each once, and whether each may be missing everywhere in the template."""
        fields: dict[str, bool] = {}
        for part in self.parts:
            if isinstance(part, Field):
                fields[part.name] = fields.get(part.name, True) and part.optional
        return fields


def parse_template(text: str) -> TextTemplate:
    """Parse a template.

    Raises:
        UsageError: names the position (from 1) of the error.
    """
    parts: list[str | Field] = []
    for match in _PART.finditer(text):
        if match["bad"]:
            _refuse(text, match.start(), r"{name}, {name?}, {{, }}, \n, \t or \\")
        if match["field"]:
            name = match["field"][1:-1]
            if not name.removesuffix("?").strip():
                _refuse(text, match.start(), "the name of a column in braces")
            parts.append(Field(name.removesuffix("?"), name.endswith("?")))
        else:
            parts.append(_ESCAPES.get(match[0], match[0]))
    if not any(isinstance(part, Field) for part in parts):
        _refuse(text, len(text), "at least one column, such as {text}")
    return TextTemplate(text, tuple(parts))


def _refuse(text: str, at: int, expected: str) -> NoReturn:
    here = f"{text[at : at + 20]!r}" if at < len(text) else "the end"
    raise UsageError(
        f"--text-template cannot be understood at character {at + 1}",
        found=f"{here} in {text[:200]}",
        expected=expected,
    )
