"""A conversation as the ids that a model continues with its answer, and the ids that end the answer.

What a tokenizer adds to every text by itself (a begin-of-text or an end-of-document token) is left out, because a
template writes what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from mdata.chat.loss_spans import Template, TemplateRefused
from mdata.sources.conversation import ASSISTANT, Message
from mdata.tokenizers.base.tokenizer import Tokenizer


def answer_prompt(template: Template, tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]) -> list[int]:
    """The ids up to where the assistant's next message begins.

    Args:
        messages: one or more, each a role and a content.

    Raises:
        TemplateRefused: the template refuses this conversation.
        TextRefused: the tokenizer refuses a text.
    """
    probe = tokenizer.encode_batch(["a"])[0].tolist()
    begins = len(probe) > 1 and tokenizer.bos is not None and probe[0] == tokenizer.bos
    ends = len(probe) > 1 and tokenizer.eod is not None and probe[-1] == tokenizer.eod
    ids: list[int] = []
    for part in (part for span in template.prompt([Message(*message) for message in messages]) for part in span):
        if isinstance(part, int):
            ids.append(part)
        elif part:
            encoded = tokenizer.encode_batch([part])[0].tolist()
            ids += encoded[int(begins) : len(encoded) - int(ends)]
    return ids


def answer_ends(template: Template, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids with which the template ends an answer; empty where it ends by text alone."""
    try:
        *_, turn = template.turns([Message("user", "a"), Message(ASSISTANT, "b")])
    except TemplateRefused:  # for example, it needs a system message
        return frozenset()
    last = turn.said[-1] if turn.said else None
    if isinstance(last, str):
        last = tokenizer.special_ids.get(last.rpartition("b")[2].strip())
    return frozenset() if last is None else frozenset((last,))
