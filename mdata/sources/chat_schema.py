"""From a record to its conversation, by a named schema: which fields hold the turns.

`messages`: a key holds the list of messages. `alpaca`: instruction, input, output, and optionally system and history.
`dolly`: instruction, context, response. `pairs`: chosen and rejected, two conversations of which people prefer the
first: lists of messages, or texts that answer the field prompt, which may also be a list of messages that both
continue. A pair becomes one text of JSON, so that it is one document whatever is done with the corpus.

Only the turns in which the two conversations of a pair differ, and those after them, are trained on: what they have in
common is their prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import orjson

from mdata.errors import counted
from mdata.sources.conversation import ASSISTANT, BadConversation, WritesMessages, flat_messages

ChatSchema = Literal["messages", "alpaca", "dolly", "pairs"]
# The key of each schema, by which a corpus is named.
SCHEMA_KEYS: Mapping[ChatSchema, str] = MappingProxyType(
    {"messages": "messages", "alpaca": "instruction", "dolly": "instruction", "pairs": "chosen"}
)
REJECTED, PROMPT = "rejected", "prompt"
# Fields of a question's context and of its answer.
_INSTRUCTIONS = MappingProxyType({"alpaca": ("input", "output"), "dolly": ("context", "response")})
_Fields = Mapping[str, Any]


def flat_record(
    value: Any, record: _Fields, *, schema: ChatSchema, train_on: str, template: WritesMessages | None
) -> list[str]:
    """The texts of a record's conversation; see `flat_messages`. Of pairs one text: see `pair_of`.

    Args:
        value: of the schema's key. record: the fields beside it.

    Raises:
        BadConversation: the record has no usable conversation.
    """
    if schema == "messages":
        return flat_messages(value, train_on, record=record, template=template)
    if schema == "pairs":
        return _flat_pair(value, record, train_on=train_on, template=template)
    messages, used = _asked(value, record, schema=schema)
    return flat_messages(messages, train_on, record=_without(record, used), template=template)


def pair_of(flat: Sequence[str]) -> list[list[str]]:
    """The two conversations of a pair, as `flat_messages` gives them: chosen, rejected."""
    sides: list[list[str]] = orjson.loads(flat[0])
    return sides


def _asked(instruction: Any, record: _Fields, *, schema: ChatSchema) -> tuple[list[dict[str, str]], Sequence[str]]:
    """(the messages of an instruction and its answer, the fields that they were made of)."""
    context_name, answer_name = _INSTRUCTIONS[schema]
    context, answer = record.get(context_name), record.get(answer_name)
    for name, text in ((SCHEMA_KEYS[schema], instruction), (context_name, context or ""), (answer_name, answer)):
        _check_text(name, text)
    question = f"{instruction}\n{context}" if context else instruction
    if schema != "alpaca":
        return [_said("user", question), _said(ASSISTANT, answer)], (context_name, answer_name)
    system, history = record.get("system") or "", record.get("history") or []
    _check_text("system", system)
    messages = [_said("system", system)] if system else []
    for exchange in history if isinstance(history, list) else [history]:
        if not isinstance(exchange, list) or len(exchange) != 2 or not all(isinstance(text, str) for text in exchange):
            raise BadConversation("its 'history' is not a list of [question, answer]")
        messages += [_said("user", exchange[0]), _said(ASSISTANT, exchange[1])]
    messages += [_said("user", question), _said(ASSISTANT, answer)]
    return messages, (context_name, answer_name, "system", "history")


def _flat_pair(chosen: Any, record: _Fields, *, train_on: str, template: WritesMessages | None) -> list[str]:
    if record.get(REJECTED) is None:
        raise BadConversation(f"a pair without {REJECTED!r}")
    prompt = record.get(PROMPT)
    sides = [_side(name, side, prompt) for name, side in (("chosen", chosen), (REJECTED, record[REJECTED]))]
    is_made = isinstance(prompt, list) or sides[0][:1] == [_said("user", prompt)]
    beside = _without(record, (REJECTED, PROMPT) if is_made else (REJECTED,))
    common = _num_common(*sides)
    if common == max(map(len, sides)):
        raise BadConversation("its two conversations are the same")
    flats = []
    for name, side in zip(("chosen", REJECTED), sides, strict=True):
        try:
            if train_on != "all" and not any(_is_answer(message) for message in side[common:]):
                raise BadConversation(f"it has no assistant turn after the {counted(common, 'message')} that both have")
            flats.append(flat_messages(side, train_on, record=beside, template=template, context=common))
        except BadConversation as error:
            raise BadConversation(f"{name!r}: {error}") from error
    return [orjson.dumps(flats).decode()]


def _side(name: str, side: Any, prompt: Any) -> list[Any]:
    """The messages of one conversation of a pair."""
    before: list[Any] = []
    if isinstance(prompt, str):
        before = [_said("user", prompt)]
    elif isinstance(prompt, list):
        before = prompt
    elif prompt is not None:
        raise BadConversation(f"its {PROMPT!r} is neither a text nor a list of messages")
    if isinstance(side, str):
        if not before:
            raise BadConversation(f"{name!r} is a text, and there is no {PROMPT!r} that it answers")
        return [*before, _said(ASSISTANT, side)]
    messages = [side] if isinstance(side, Mapping) else side
    if not isinstance(messages, list) or not messages:
        raise BadConversation(f"{name!r} is not a list of messages")
    if isinstance(prompt, str) and not _is_answer(messages[0]):
        return messages  # one of them has to contain it: `flat_messages` sees to that
    return messages if messages[: len(before)] == before else [*before, *messages]


def _num_common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many messages both begin with."""
    pairs = zip(chosen, rejected, strict=False)
    return next(
        (number for number, (first, other) in enumerate(pairs) if first != other), min(len(chosen), len(rejected))
    )


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and (message.get("role") or message.get("from")) not in (
        None, "user", "human", "system", "tool",
    )  # fmt: skip


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise BadConversation(f"its {name!r} is {'missing or null' if value is None else 'not a string'}")


def _without(record: _Fields, names: Sequence[str]) -> _Fields:
    return {name: value for name, value in record.items() if name not in names}
