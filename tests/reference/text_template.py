"""Twin of mdata/sources/text_template.py: character by character, on a record whose columns are all texts or null.

A record without a text is None here; the fast code says why.
"""

from __future__ import annotations

from collections.abc import Mapping


def filled(template: str, record: Mapping[str, str | None]) -> str | None:
    """Return the text, or None if a required column is missing or null."""
    text = ""
    at = 0
    while at < len(template):
        pair = template[at : at + 2]
        if pair in ("\\n", "\\t", "\\\\", "{{", "}}"):
            text += {"\\n": "\n", "\\t": "\t", "\\\\": "\\", "{{": "{", "}}": "}"}[pair]
            at += 2
        elif template[at] == "{":
            name = template[at + 1 : template.index("}", at)]
            value = record.get(name.rstrip("?") if name.endswith("?") else name)
            if value is None and not name.endswith("?"):
                return None
            text += value or ""
            at += len(name) + 2
        else:
            text += template[at]
            at += 1
    return text
