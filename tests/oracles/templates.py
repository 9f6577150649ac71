"""`python -m tests.oracles.templates FOLDER`: compare a folder of chat templates with apply_chat_template.

FOLDER holds Jinja files, in folders or not. Each writes some conversations (CONVERSATIONS), trained on all answers and
on the last. Compared are the text, and the spans that are trained on: from transformers' text of the messages before an
answer, with the prompt that asks for it, to its text up to the answer; where the template rewrites earlier turns, its
{% generation %} blocks. A conversation for which transformers fails, of which the template leaves out a field, or whose
answers cannot be told apart by either rule has to be refused, and a case is equal only if it is.

transformers' clock is stopped at DAY, which ours gets as the date. Needs transformers.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from mdata.chat.jinja_template import JinjaTemplate
from mdata.chat.loss_spans import TemplateRefused, spans_of
from mdata.errors import UsageError
from mdata.sources.conversation import BadConversation, conversation_of, flat_messages
from tests.oracles.frame import Case, Program, unreadable

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
DAY = "2026-11-27"
REFUSED = "refused, as it must be"
LONGEST_TOLD = 160  # characters of a difference


def _function(name: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind, "description": f"the {key}"} for key, kind in properties.items()},
        "required": list(properties),
    }
    about = "Rain <now> & 'later'"
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [_function("weather", city="string"), _function("clock", zone="string", seconds="boolean")]
CALLS = [_call(1, "weather", {"city": "K\u00f6ln"}), _call(2, "clock", {"zone": "CET", "seconds": True})]
SYSTEM = {"role": "system", "content": "Be brief."}
USER, AGAIN = {"role": "user", "content": "Rain in K\u00f6ln?"}, {"role": "user", "content": " And now? "}
YES, NO = {"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "No."}
RESULTS = [
    {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"rain": true}'},
    {"role": "tool", "name": "clock", "tool_call_id": "call00002", "content": "12:00:01"},
]


def _calling(*calls: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **fields}


def _text_call() -> dict[str, Any]:
    return _call(1, "weather", json.dumps(CALLS[0]["function"]["arguments"], ensure_ascii=False))


# name -> messages, fields of the record
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one answer": ([USER, YES], {}),
    "system, two answers": ([SYSTEM, USER, YES, AGAIN, NO], {}),
    "tools, no call": ([SYSTEM, USER, YES], {"tools": TOOLS}),
    "a call": ([SYSTEM, USER, _calling(CALLS[0]), RESULTS[0], YES, AGAIN, NO], {"tools": TOOLS}),
    "a call last": ([USER, _calling(CALLS[0])], {"tools": TOOLS}),
    "two calls": ([USER, _calling(*CALLS), *RESULTS, YES], {"tools": TOOLS}),
    "two rounds of calls": (
        [USER, _calling(CALLS[0]), RESULTS[0], _calling(CALLS[1]), RESULTS[1], YES],
        {"tools": TOOLS},
    ),
    "text and a call": ([USER, {**_calling(CALLS[0]), "content": "Let me see."}, RESULTS[0], YES], {"tools": TOOLS}),
    "a call without content": ([USER, _calling(CALLS[0], content=None), RESULTS[0], YES], {"tools": TOOLS}),
    "arguments as text": ([USER, _calling(_text_call()), RESULTS[0], YES], {"tools": TOOLS}),
    "reasoning": ([USER, {**YES, "reasoning_content": "It is grey."}], {}),
    "reasoning by another name": ([USER, {**YES, "reasoning": "It is grey."}], {}),
    "reasoning in two answers": (
        [SYSTEM, USER, {**YES, "reasoning_content": "Grey."}, AGAIN, {**NO, "reasoning_content": "Blue."}],
        {},
    ),
    "reasoning and a call": (
        [USER, _calling(CALLS[0], reasoning_content="Ask."), RESULTS[0], {**YES, "reasoning_content": "Told."}],
        {"tools": TOOLS},
    ),
    "parts of text": (
        [{**USER, "content": [{"type": "text", "text": "Rain "}, {"type": "text", "text": "now?"}]}, YES],
        {},
    ),
    "documents": ([USER, YES], {"documents": [{"title": "Rain", "text": "It falls.", "contents": "It falls."}]}),
    "without thoughts": ([USER, YES], {"chat_template_kwargs": {"enable_thinking": False}}),
}
FIELDS_OF_CALLS = ("tool_calls", "reasoning_content", "reasoning")


class Refuse(Exception):
    """A conversation that has to be refused; the message says why."""


class Expected(NamedTuple):
    """What transformers writes: text, and its parts that are trained on."""

    text: str
    trained: list[str]


class Reference:
    """transformers' rendering of one template."""

    def __init__(self, source: str) -> None:
        self.source = source

    def rendered(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], prompt: bool = False) -> str:
        """The text of apply_chat_template; Refuse: it fails."""
        return self._run(messages, record, prompt)[0]

    def blocks(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], answers: int) -> list[str]:
        """The texts of its {% generation %} blocks; if there are more than answers, those that touch are one."""
        text, spans = self._run(messages, record, False, return_assistant_tokens_mask=True)
        if len(spans) != answers:
            edges = sorted(edge for edge, times in Counter(itertools.chain(*spans)).items() if times == 1)
            spans = list(zip(edges[::2], edges[1::2], strict=True))
        return [text[start:end] for start, end in spans]

    def _run(
        self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], prompt: bool, **options: Any
    ) -> tuple[str, Any]:
        from transformers.utils import chat_template_utils as utils

        given = {**{name: record[name] for name in ("tools", "documents") if name in record}, **SPECIAL}
        given |= record.get("chat_template_kwargs", {})
        try:
            with mock.patch.object(utils, "datetime", _stopped_clock()):
                conversation = utils._normalize_chat_messages(list(messages))
                texts, spans = utils.render_jinja_template(
                    [conversation], chat_template=self.source, add_generation_prompt=prompt, **given, **options
                )
        except Exception as error:  # a template may raise anything
            raise Refuse(f"transformers fails: {error}") from None
        return texts[0], spans[0] if spans else []

    def expected(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], train_on: str) -> Expected:
        """Text and trained parts; Refuse: why it has none."""
        text = self.rendered(messages, record)
        self._check_fields(messages, record, text)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = answers if train_on == "assistant" else answers[-1:]
        try:
            return Expected(text, self._by_prefix(messages, record, text, chosen))
        except Refuse as refusal:
            blocks = self.blocks(messages, record, len(answers))
            if len(blocks) != len(answers) or not all(block.strip() for block in blocks):
                raise refusal from None
            return Expected(text, blocks if train_on == "assistant" else blocks[-1:])

    def _by_prefix(
        self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], text: str, chosen: Sequence[int]
    ) -> list[str]:
        parts, last = [], 0
        for number in chosen:
            before = self.rendered(messages[:number], record, prompt=True)
            whole = self.rendered(messages[: number + 1], record)
            if not (text.startswith(before) and text.startswith(whole) and last <= len(before) <= len(whole)):
                raise Refuse("earlier turns are rewritten")
            last = len(whole)
            parts.append(text[len(before) : last].rstrip())
            if not parts[-1]:
                raise Refuse("nothing is written for an answer")
        return parts

    def _check_fields(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], text: str) -> None:
        """A field without which the text is the same is lost."""
        for name in {name for message in messages for name in message} & set(FIELDS_OF_CALLS):
            bare = [{key: value for key, value in message.items() if key != name} for message in messages]
            if self._same(bare, record, text):
                raise Refuse(f"{name} is not written")
        for name in record:
            if name == "chat_template_kwargs":
                if not self._variables.issuperset(record[name]):
                    raise Refuse("an option that the template does not have")
            elif self._same(messages, {key: value for key, value in record.items() if key != name}, text):
                raise Refuse(f"{name} are not written")
        for number, message in enumerate(messages):
            if message["role"] not in ("user", "assistant") and f"'{message['role']}'" not in self.source:
                others = [*messages[:number], {**message, "content": "other"}, *messages[number + 1 :]]
                if self._same(others, record, text):
                    raise Refuse(f"message {number + 1} is not written")
            if isinstance(message["content"], list) and str(message["content"]) in text:
                raise Refuse("a list is written as Python does")

    @functools.cached_property
    def _variables(self) -> set[str]:
        from jinja2 import meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return meta.find_undeclared_variables(_compile_jinja_template(self.source).environment.parse(self.source))

    def _same(self, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], text: str) -> bool:
        try:
            return self.rendered(messages, record) == text
        except Refuse:
            return False


@functools.lru_cache(maxsize=1)
def _stopped_clock() -> Any:
    return mock.Mock(now=lambda: datetime.datetime.fromisoformat(DAY))


def expected_of(reference: Reference, name: str, train_on: str) -> Expected | Refuse:
    """What transformers makes of a conversation. Arguments as text are objects where the template would quote them."""
    messages, record = CONVERSATIONS[name]
    if name == "arguments as text":
        try:
            quoted = json.dumps(_text_call()["function"]["arguments"], ensure_ascii=False)[1:-1]
            if quoted in reference.rendered(messages, record):
                messages = [USER, _calling(CALLS[0]), RESULTS[0], YES]
        except Refuse:
            pass
    try:
        return reference.expected(messages, record, train_on)
    except Refuse as refusal:
        return refusal


def ours_of(template: JinjaTemplate, name: str, train_on: str) -> Expected:
    """Our text and trained spans.

    Raises:
        BadConversation, TemplateRefused: it is refused.
    """
    messages, record = CONVERSATIONS[name]
    flat = flat_messages(messages, train_on, record=record, template=template)
    read, variables = conversation_of(flat)
    parts = ["".join(map(str, span)) for span in spans_of(read, template, train_on=train_on, variables=variables)]
    return Expected("".join(parts), parts[1::2])


def _difference(source: str, name: str, train_on: str, expected: Expected | Refuse) -> str:
    try:
        template = JinjaTemplate("own", source, tuple(SPECIAL.items()), DAY).checked()
        ours = ours_of(template, name, train_on)
    except (BadConversation, TemplateRefused, UsageError) as error:
        if isinstance(expected, Refuse):
            return "" if str(error) else "refused without a reason"
        return f"refused: {str(error)[:LONGEST_TOLD]}"
    if isinstance(expected, Refuse):
        return f"not refused, though {str(expected)[:LONGEST_TOLD]}"
    if ours.text != expected.text:
        at = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours.text, expected.text)) if a != b)
        near = slice(max(0, at - 20), at + 40)
        return f"the text differs at {at}: {ours.text[near]!r} instead of {expected.text[near]!r}"
    if ours.trained != expected.trained:
        return f"trained are {str(ours.trained)[:LONGEST_TOLD]} instead of {str(expected.trained)[:LONGEST_TOLD]}"
    return ""


def cases_of(root: Path) -> Iterator[Case]:
    """Each template with each conversation."""
    for path in sorted(root.rglob("*.jinja")):
        kind = str(path.relative_to(root))
        try:
            source = path.read_text(encoding="utf-8")
        except ValueError as error:
            yield Case(kind, "the file", functools.partial(unreadable, str(error)))
            continue
        reference = Reference(source)
        for name in CONVERSATIONS:
            for train_on in ("assistant", "last"):
                expected = expected_of(reference, name, train_on)
                compare = functools.partial(_difference, source, name, train_on, expected)
                note = REFUSED if isinstance(expected, Refuse) else ""
                yield Case(kind, f"{name}, {train_on}", compare, note=note)


PROGRAM = Program("templates", str(__doc__), (), cases_of)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
