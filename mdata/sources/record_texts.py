"""Applies a filter and a template to records of any format, given a function from a column's name to its value.

Errors of a filter or a template about a value become kinds of bad rows here; a record that is filtered out is not a bad
row.
"""

from __future__ import annotations

from mdata.sources.record_batch import BadRecord, ReadSpec
from mdata.sources.row_filter import LookUp, WrongType
from mdata.sources.text_template import TextTemplate


def is_kept(look_up: LookUp, spec: ReadSpec) -> bool:
    """Whether a record passes the filter.

    Raises:
        BadRecord: a value does not have the type that the filter compares it with.
    """
    if spec.where is None:
        return True
    try:
        return spec.where.keeps(look_up)
    except WrongType as error:
        raise BadRecord("bad-value", str(error)) from error


def filled_text(template: TextTemplate, look_up: LookUp) -> str:
    """The text of a record.

    Raises:
        BadRecord: a column is missing or null and not optional, or not a text.
    """
    texts: list[str] = []
    for part in template.parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        try:
            value = look_up(part.name)
        except LookupError as error:
            if not part.optional:
                problem = f"no key {part.name!r}, which --text-template needs (as {{{part.name}?}} it may be missing)"
                raise BadRecord("no-key", problem) from error
            continue
        if value is None and part.optional:
            continue
        if not isinstance(value, str):
            hint = f" (as {{{part.name}?}} it may be null)" if value is None else ""
            shown = "null" if value is None else f"no text but {type(value).__name__}"
            raise BadRecord("bad-value", f"key {part.name!r} of --text-template holds {shown}{hint}")
        texts.append(value)
    text = "".join(texts)
    if not is_unicode(text):
        raise BadRecord("surrogate", "the text of --text-template holds a lone surrogate, which is not text")
    return text


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
