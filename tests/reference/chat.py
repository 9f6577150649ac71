"""Twin of encode_chat.py and loss_spans.py: each token of a conversation beside its bit of loss.

A template is a function from a message to three lists of parts (text or id): before, content, after. Bits become spans
only at the end, so nothing here depends on alternating spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

Part = str | int
Write = Callable[[str, str], tuple[list[Part], list[Part], list[Part]]]
Token = tuple[int, bool]


def tokens(
    messages: Sequence[tuple[str, str]],
    write: Write,
    *,
    encode: Callable[[str], list[int]],
    train_on: str,
    eod: int | None,
) -> list[Token]:
    """(id, whether it is trained on) of a whole conversation."""
    assistants = [i for i, (role, _) in enumerate(messages) if role == "assistant"]
    chosen = {"all": list(range(len(messages))), "assistant": assistants, "last": assistants[-1:]}[train_on]
    parts: list[tuple[Part, bool]] = []
    for i, message in enumerate(messages):
        before, said, behind = write(*message)
        parts += [(part, False) for part in before] + [(part, i in chosen) for part in said]
        parts += [(part, False) for part in behind]
    if eod is not None:
        parts.append((eod, False))
    found: list[Token] = []
    # Adjacent texts of the same kind are one text for the tokenizer.
    for (is_text, trained), run in groupby(parts, key=lambda one: (isinstance(one[0], str), one[1])):
        values = [part for part, _ in run]
        ids = encode("".join(map(str, values))) if is_text else [int(id) for id in values]
        found += [(id, trained) for id in ids]
    return found


def lengths(found: Sequence[Token]) -> list[int]:
    """Tokens of the spans: context, trained, context ...; the first may be empty."""
    runs = [(trained, len(list(run))) for trained, run in groupby(found, key=lambda token: token[1])]
    return [*([0] if runs and runs[0][0] else []), *(length for _, length in runs)]


def loss(row: Sequence[tuple[int, bool]]) -> list[int]:
    """Bits of the labels of a row of (document, whether it is trained on) for each token."""
    return [int(label[1] and label[0] == token[0]) for token, label in pairwise(row)]
