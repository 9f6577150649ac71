"""Fields of chat records: what would be lost or trained otherwise is refused by name, the rest is ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jinja2
import pytest

from mdata.chat.jinja_template import JinjaTemplate
from mdata.chat.loss_spans import spans_of
from mdata.sources.conversation import METADATA_WORDS, BadConversation, conversation_of, flat_messages
from mdata.sources.jsonl import parse_lines
from mdata.sources.record_batch import Column, ReadSpec

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
FLAT = ["user", "Hi", "assistant", "Yes"]
# Writes what common templates write: a name, thoughts, tools, a switch, and whether a field exists.
USES_FIELDS = (
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% if enable_thinking %}<think>{% endif %}"
    "{% for m in messages %}{{ m.role }}{{ m.sender_id }}: {{ m.content }}{{ '!' if 'mood' in m }}{% endfor %}"
)
WRITES_ALL = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
IGNORES_ALL = "{% set note = messages %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def with_field(number: int, name: str, value: object) -> list[dict]:
    return [{**message, name: value} if i == number else message for i, message in enumerate(TALK)]


def template(source: str) -> JinjaTemplate:
    return JinjaTemplate("own", source, (("bos_token", "<s>"),)).checked()


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("number", "name", "value"),
    [
        (1, "tool_calls", [CALL]),
        (1, "toolCalls", [CALL]),
        (1, "function_call", {"name": "f", "arguments": "{}"}),
        (1, "reasoning_content", "r"),
        (1, "reasoning", "r"),
        (1, "thinking", "r"),
        (1, "thinking_blocks", [{"type": "thinking", "thinking": "r"}]),
        (1, "refusal", "No."),
        (1, "audio", {"id": "a"}),
        (0, "images", ["a.png"]),
        (0, "parts", [{"text": "t"}]),
        (0, "name", "Ada"),
        (0, "tools", [CALL]),
        (0, "documents", "text"),
    ],
)
def test_a_field_of_a_message_that_carries_text_is_named(number, name, value):
    role = TALK[number]["role"]
    with pytest.raises(BadConversation, match=rf"message {number + 1} \({role}\): its '{name}' would be lost"):
        flat_messages(with_field(number, name, value), "assistant")


@pytest.mark.parametrize("value", [None, "", " ", "[]", [], {}, [None, {"a": ""}]])
@pytest.mark.parametrize("name", ["tool_calls", "reasoning_content", "name", "audio"])
def test_a_field_that_holds_nothing_is_no_field(name, value):
    assert flat_messages(with_field(1, name, value), "assistant", record={name: value}) == FLAT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [CALL]),
        ("tools", json.dumps([CALL])),
        ("functions", [CALL["function"]]),
        ("documents", [{"title": "t", "text": "u"}]),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("images", ["a.png"]),
        ("system", "Be brief."),
        ("system_prompt", "Be brief."),
        ("files", ["a.pdf"]),
        ("file", {"id": "f"}),
        ("attachments", ["a.pdf"]),
        ("available_tools", [CALL]),
        ("toolDefinitions", {"f": CALL}),
        ("tool_calls", [CALL]),
        ("function_schemas", json.dumps([CALL])),
        ("instructions", "Be brief."),
        ("system_instruction", "Be brief."),
    ],
)
def test_a_field_of_the_record_that_carries_text_is_named(name, value):
    with pytest.raises(BadConversation, match=rf"the record's '{name}' would be lost"):
        flat_messages(TALK, "assistant", record={"id": 7, name: value})


def test_a_system_prompt_beside_a_conversation_that_has_one_is_not_used():
    talk = [{"role": "system", "content": "Be brief."}, *TALK]
    assert flat_messages(talk, "assistant", record={"system": "Be brief."}) == ["system", "Be brief.", *FLAT]


@pytest.mark.parametrize(
    ("train_on", "number", "name", "value", "trained"),
    [
        ("all", 1, "weight", 0, [True, False]),
        ("all", 1, "train", False, [True, False]),
        ("all", 1, "loss", False, [True, False]),
        ("assistant", 0, "train", True, [True, True]),
        ("last", 0, "weight", 1.0, [True, True]),
        ("all", 0, "weight", 0, [False, True]),
        ("all", 1, "should_train", False, [True, False]),
        ("all", 1, "compute_loss", False, [True, False]),
        ("all", 1, "train_on", False, [True, False]),
        ("all", 1, "ignore", True, [True, False]),
        ("all", 0, "no_loss", 1, [False, True]),
        ("all", 1, "turn_weight", 0, [True, False]),
    ],
)
def test_a_flag_decides_whether_a_message_is_trained_on(train_on, number, name, value, trained):
    turns, _ = conversation_of(flat_messages(with_field(number, name, value), train_on))
    assert [turn.trained for turn in turns] == trained
    assert [text for turn in turns for text in turn[:2]] == FLAT


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("weight", 0.5, "the loss mask holds only 0 and 1; make two corpora, and weigh them in a blend$"),
        ("weight", 2, "the loss mask holds only 0 and 1$"),
        ("loss", "false", "the loss mask holds only 0 and 1"),
        ("train_on", "assistant", "the loss mask holds only 0 and 1"),
        ("loss_mask", 1, "parts of a message"),
        ("mask", True, "parts of a message"),
        ("train_detail", [{"begin_offset": 0}], "parts of a message"),
        ("loss_weights", [0, 1], "parts of a message"),
        ("is_masked", True, "parts of a message"),
        ("assistant_masks", [0], "parts of a message"),
        ("completion_mask", [1], "parts of a message"),
        ("tokenWeights", [0, 1], "parts of a message"),
    ],
)
def test_a_loss_that_the_mask_cannot_hold_is_named(name, value, reason):
    with pytest.raises(BadConversation, match=rf"message 2: its '{name}' is .*, but .*{reason}"):
        flat_messages(with_field(1, name, value), "assistant")


def test_flags_that_contradict_or_leave_nothing_are_refused():
    with pytest.raises(BadConversation, match="message 2: its flags weight, train contradict"):
        flat_messages([TALK[0], {**TALK[1], "weight": 1, "train": False}], "assistant")
    with pytest.raises(BadConversation, match="no turn is left to train on by 'weight'"):
        flat_messages(with_field(1, "weight", 0), "assistant")
    assert flat_messages([TALK[0], {**TALK[1], "weight": None}], "assistant") == FLAT  # Arrow: a field of others


@pytest.mark.parametrize("name", ["attachments", "content_blocks", "tool_results", "files", "file", "labels", "", "x"])
def test_a_field_of_a_message_that_is_not_metadata_is_named(name):
    """The rule is by what is harmless, so no name has to be known."""
    with pytest.raises(BadConversation, match=f"'{name}' would be lost"):
        flat_messages(with_field(1, name, ["x"]), "assistant")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("end_turn", False),
        ("prefix", True),
        ("hidden", False),
        ("image_url", "u"),
        ("file_id", "f"),
        ("idea", "i"),
        ("loss_type", "none"),
        ("train_id", 0),
        ("weight_score", 0),
    ],
)
def test_a_flag_of_a_message_that_is_not_about_loss_is_named(name, value):
    with pytest.raises(BadConversation, match=f"'{name}' would be lost"):
        flat_messages(with_field(1, name, value), "assistant")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", "m-1"),
        ("messageId", "m-1"),
        ("MESSAGE_ID", "m-1"),
        ("tool_call_id", "call_1"),
        ("turn_identifier", 101002),
        ("createdAt", "2023-04-09"),
        ("hashed_ip", "a0b1"),
        ("language", "English"),
        ("toxic", False),
        ("review_count", 3),
        ("num-tokens-count", 3),
        ("metadata", {"text": "x"}),
        ("end_turn", True),
        ("ignore", False),
        ("no_loss", 0),
        ("text", "Yes"),
    ],
)
def test_metadata_and_what_is_done_anyway_are_ignored(name, value):
    assert flat_messages(with_field(1, name, value), "assistant") == FLAT


def test_the_page_lists_the_words_of_metadata():
    page = (Path(__file__).parents[3] / "docs" / "howto" / "chat.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"The last words of metadata: (.*?);", page, re.DOTALL)
    assert re.findall("`(.*?)`", sentence) == sorted(METADATA_WORDS)


def test_the_other_form_without_its_role_is_a_field():
    for message in (
        {"role": "user", "content": "Hi", "value": "Ho"},
        {"role": "user", "content": "Hi", "from": None, "value": "Ho"},
        {"from": "human", "value": "Hi", "content": "Ho"},
    ):
        with pytest.raises(BadConversation, match=r"'(value|content)' would be lost"):
            flat_messages([message, TALK[1]], "assistant")


@pytest.mark.parametrize("name", ["prompt", "response", "completion", "instruction", "input", "output", "history"])
def test_an_example_beside_the_conversation_is_lost_unless_a_message_contains_it(name):
    """As in UltraChat (prompt) and Magpie (instruction, response)."""
    for value in ("Hi", " Yes\n", "", []):
        assert flat_messages(TALK, "assistant", record={name: value, f"{name}_id": "Ho"}) == FLAT
    for value in ("Ho", ["Hi"], [{"role": "user", "content": "Hi"}]):
        with pytest.raises(BadConversation, match=f"the record's '{name}' would be lost"):
            flat_messages(TALK, "assistant", record={name: value})


def test_flags_that_say_what_is_done_anyway_are_accepted():
    """As in SlimOrca: null for the system, 0 for people, 1 for the model."""
    talk = [
        {"from": "system", "value": "s", "weight": None},
        {"from": "human", "value": "u", "weight": 0.0},
        {"from": "gpt", "value": "a", "weight": 1.0, "train": True},
    ]
    assert flat_messages(talk, "assistant") == ["system", "s", "user", "u", "assistant", "a"]
    assert flat_messages([talk[1], {**talk[2], "weight": 0, "train": False}, talk[2]], "last")[-1] == "a"  # as by role
    with pytest.raises(BadConversation, match="the record's 'mask' is 'User'"):
        flat_messages(talk, "assistant", record={"mask": "User"})
    others = (("sample_weight", 0.5), ("weights", [0, 1]))
    for name, value in (("weight", 0), ("ignore", True), ("no_loss", 1), ("train_on", False), *others):
        with pytest.raises(
            BadConversation, match=f"the record's '{name}' is .*, but only messages and --chat-train-on"
        ):
            flat_messages(talk, "assistant", record={name: value})
    assert flat_messages(talk, "assistant", record={"ignore": False, "train_on": True, "sample_weight": 1})[-1] == "a"
    harmless = {"tool_count": 2, "has_tools": True, "tool_ids": ["a"], "tool_choice": "auto"}
    assert flat_messages(talk, "assistant", record=harmless)[-1] == "a"


@pytest.mark.parametrize(
    ("source", "messages", "record", "is_whole"),
    [
        (USES_FIELDS, with_field(0, "sender_id", "Ada"), {}, True),
        (USES_FIELDS, with_field(0, "mood", ""), {}, True),
        (USES_FIELDS, TALK, {"chat_template_kwargs": {"enable_thinking": True}}, True),
        (USES_FIELDS, TALK, {"tools": []}, True),
        (WRITES_ALL, with_field(0, "id", 3), {}, True),
        (WRITES_ALL, with_field(0, "metadata", {"a": [1]}), {}, True),
        ("{{ messages[1].info.text }}{{ messages[0].content }}", with_field(1, "info", 3), {}, True),
        ("{% if messages[1].info %}{{ messages[1].info.a.b }}{% endif %}", with_field(1, "info", 3), {}, True),
        (
            "{% if messages[0].a_id and messages[0].b_id %}both{% endif %}",
            [{**TALK[0], "a_id": 1, "b_id": 2}, TALK[1]],
            {},
            True,
        ),
        # Without one of them the template writes the other; and one field of very many.
        (
            "{% for m in messages %}{{ m.a_id or m.b_id }}{% endfor %}",
            [{**TALK[0], "a_id": 1, "b_id": 1}, TALK[1]],
            {},
            True,
        ),
        (
            "{% for m in messages %}{{ m.content }}{{ m.last_id }}{% endfor %}",
            [{**TALK[0], **{f"{i}_id": i for i in range(30)}, "last_id": 1}, TALK[1]],
            {},
            True,
        ),
        (USES_FIELDS, with_field(0, "mood", None), {"tools": None, "enable_thinking": None}, False),
        (USES_FIELDS, with_field(0, "id", 3), {"enable_thinking": False, "source": "web", "messages2": 1}, False),
        (IGNORES_ALL, with_field(1, "id", 3), {"note": "n", "range": 5, "bos_token": "x"}, False),
    ],
)
def test_a_conversation_is_whole_where_a_field_changes_what_the_template_writes(source, messages, record, is_whole):
    flat = flat_messages(messages, "assistant", record=record, template=template(source))
    if not is_whole:
        assert flat == FLAT
        return
    turns, variables = conversation_of(flat)
    assert [turn.given() for turn in turns] == messages and [turn.content for turn in turns] == FLAT[1::2]
    assert variables == record.get("chat_template_kwargs", record)


def test_an_option_of_the_template_beside_the_conversation_is_named():
    """transformers would not see it; it has to be said that it is meant for the template."""
    with pytest.raises(BadConversation, match="'enable_thinking', which the chat template uses, is a field of the rec"):
        flat_messages(TALK, "assistant", record={"enable_thinking": True}, template=template(USES_FIELDS))


@pytest.mark.parametrize("arguments", ['{"a": "b"}', {"a": "b"}])
def test_arguments_are_objects_where_the_template_would_quote_a_string(arguments):
    """Most templates write `arguments | tojson`, which makes a quoted text of OpenAI's strings."""
    call = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    messages = [TALK[0], {"role": "assistant", "content": None, "tool_calls": call}]
    source = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments RULE }}{% endfor %}{% endfor %}"
    )
    for rule, text in (("| tojson", 'Hi{"a": "b"}'), ("if c.function.arguments is string else 'object'", None)):
        own = template(source.replace("RULE", rule))
        turns, _ = conversation_of(flat_messages(messages, "assistant", template=own))
        spans = spans_of(turns, own, train_on="assistant")
        given = arguments if isinstance(arguments, str) else "object"
        assert "".join(part for span in spans for part in span) == (text or f"Hi{given}")


def test_contents_that_are_no_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    takes_parts = template(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
    )
    messages = [{"role": "user", "content": parts}, TALK[1]]
    turns, _ = conversation_of(flat_messages(messages, "assistant", template=takes_parts))
    assert turns[0].content == "ab" and turns[0].given()["content"] == parts
    assert spans_of(turns, takes_parts, train_on="assistant")[0] == ["[a][b];"]
    writes_all = template("{% for m in messages %}{{ m.content }};{% endfor %}")
    with pytest.raises(BadConversation, match="message 1: its content is a list, which the chat template cannot write"):
        flat_messages(messages, "assistant", template=writes_all)
    with pytest.raises(BadConversation, match=r"message 1 \(user\): its content has a part that is not text: 'image'"):
        image = [{"type": "image", "url": "x"}]
        flat_messages([{"role": "user", "content": image}, TALK[1]], "assistant", template=takes_parts)
    with pytest.raises(BadConversation, match=r"message 1 \(user\): its content is a list, not a string"):
        flat_messages(messages, "assistant")
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    named = template("{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].id if m.tool_calls }};{% endfor %}")
    turns, _ = conversation_of(flat_messages([TALK[0], call], "assistant", template=named))
    assert spans_of(turns, named, train_on="assistant") == [[f"{TALK[0]['content']};"], [f"{CALL['id']};"]]
    with pytest.raises(BadConversation, match=r"message 2 \(assistant\): its content is null, not a string"):
        flat_messages([TALK[0], {"role": "assistant", "content": None}], "assistant", template=takes_parts)


def test_speakers_of_sharegpt_are_known_by_what_they_do():
    talk = [{"from": "human", "value": "a"}, {"from": "tool", "value": "b"}, {"from": "model", "value": "c"}]
    assert flat_messages(talk, "last") == ["user", "a", "tool", "b", "assistant", "c"]
    for speaker in ("function", "function_call", "observation", "narrator", "Human"):
        with pytest.raises(BadConversation, match=rf"message 2: unknown speaker '{speaker}' in 'from'; known"):
            flat_messages([talk[0], {"from": speaker, "value": "x"}, talk[2]], "all")


def test_a_turn_of_the_model_by_another_name_is_not_left_untrained():
    talk = [*TALK, {"role": "user", "content": "b"}, {"role": "model", "content": "c"}]
    with pytest.raises(BadConversation, match="message 4: role 'model' would not be trained on"):
        flat_messages(talk, "assistant")
    assert flat_messages(talk, "all")[-2:] == ["model", "c"]
    with pytest.raises(BadConversation, match="message 2: role 'Bot' would not be trained on"):
        flat_messages([TALK[0], {"role": "Bot", "content": "c"}], "assistant")
    with pytest.raises(BadConversation, match=r"no assistant turn to train on \(roles: user, narrator\)"):
        flat_messages([TALK[0], {"role": "narrator", "content": "c"}], "assistant")


MESSAGE_FIELDS = {
    "tool_calls": ([CALL], [], None), "function_call": ({"name": "f", "arguments": "{}"}, {}), "tool_call_id": ("c1",),
    "reasoning_content": ("r", "", None), "reasoning": ("r",), "thinking": ("r",),
    "reasoning_details": ([{"text": "r"}],),
    "refusal": ("No", None), "audio": ({"id": "x"},), "images": (["x"], []), "name": ("Ada", ""), "channel": ("final",),
    "weight": (0, 1, None), "train": (False, True), "loss": (False, None), "step_loss_mask": (0, 1), "prefix": (True,),
    "citations": ([1], []), "tool_plan": ("p",), "recipient": ("f",),
    "mood": ("x", "", [[[1]]], {"tool_calls": [CALL]}),
    "id": ("3",), "type": ("message",), "metadata": ({"tool_calls": [CALL]},), "items": ("x",), "keys": ("y",),
    "": ("x",), "0": ("x",), "content_type": ("text",), "cache_control": ({"type": "ephemeral"},), "end_turn": (False,),
}  # fmt: skip
RECORD_FIELDS = {
    "tools": ([CALL], json.dumps([CALL]), "[]", [], None), "functions": ([{"name": "f"}],),
    "documents": ([{"text": "x"}],),
    "chat_template_kwargs": ({"enable_thinking": False}, {"enable_thinking": None}), "enable_thinking": (True, False),
    "system": ("Be brief.", ""), "system_prompt": ("Be brief.",), "images": (["x"],), "image": ("x.jpg",),
    "mask": ("User",),
    "loss_mask": ([0, 1],), "train": (False, True), "mood": ("x",), "bos_token": ("EVIL",), "range": ("x",),
    "loop": (1,),
    "raise_exception": ("x",), "add_generation_prompt": (True,), "message": ("x",), "namespace": ("x",), "id": (1,),
    "parallel_tool_calls": (True,), "tool_choice": ("auto",), "date_string": ("1 Jan",), "instruction": ("i",),
}  # fmt: skip
COMMON = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking is defined %}T{{ enable_thinking }}{% endif %}"
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>"
    "{% if message.name is defined %}{{ message.name }}{% endif %}{% if 'tool_calls' in message %}CALLS{% endif %}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.id }}{% endfor %};{% endfor %}"
)
TEMPLATES = (USES_FIELDS, WRITES_ALL, IGNORES_ALL, COMMON)


def aliased(message: dict) -> dict:
    """A message with its reasoning under the names that transformers gives it, in its order."""
    names = [name for name in ("reasoning_content", "thinking", "reasoning") if name in message]
    return {"thinking": message[names[0]], **message, "reasoning_content": message[names[0]]} if names else message


def fully_written(source: str, messages: list[dict], record: dict) -> str:
    """What transformers' apply_chat_template gives, with all fields but null: by jinja2 alone."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    known = {name: record[name] for name in ("tools", "documents") if record.get(name) is not None}
    known |= {name: json.loads(value) for name, value in known.items() if isinstance(value, str)}  # as TRL does
    told = [{name: value for name, value in message.items() if value is not None} for message in messages]
    told = [aliased(message) for message in told]
    options = {name: value for name, value in (record.get("chat_template_kwargs") or {}).items() if value is not None}
    variables = {"tools": None, "documents": None, **known, **options}
    return environment.from_string(source).render(**variables, messages=told, bos_token="<s>")


@pytest.mark.parametrize("source", TEMPLATES, ids=["fields", "all", "none", "common"])
def test_every_record_is_written_as_the_template_writes_it_or_refused(source):
    """No field, of a message or of the record, is lost without a word."""
    records = [
        (with_field(at, name, value), {})
        for name, values in MESSAGE_FIELDS.items()
        for value in values
        for at in (0, 1)
    ]
    records += [(TALK, {name: value}) for name, values in RECORD_FIELDS.items() for value in values]
    written = refused = 0
    for messages, fields in records:
        batch = chat_rows({"messages": messages, **fields}, source=source)
        if batch.bad_rows:
            refused += 1
            (name,) = {*fields, *messages[0], *messages[1]} - {"role", "content"}
            assert repr(name) in batch.bad_rows[0].reason
            continue
        written += 1
        (column,) = batch.columns
        turns, variables = conversation_of(column.sentences)
        text = "".join(
            part
            for span in spans_of(turns, template(source), train_on="assistant", variables=variables)
            for part in span
        )
        assert text == fully_written(source, messages, fields), (messages, fields)
    assert len(records) > 120 and written > 60 and refused > 15


def test_a_message_in_both_forms_says_one_thing():
    both = {"role": "user", "content": "Hi", "from": "human", "value": "Hi"}
    assert flat_messages([both, TALK[1]], "assistant") == FLAT
    assert flat_messages([{**both, "role": None, "content": None}, TALK[1]], "assistant") == FLAT
    with pytest.raises(BadConversation, match="message 1 has two roles or texts"):
        flat_messages([{**both, "value": "Ho"}, TALK[1]], "assistant")


def chat_rows(*records: object, key: str = "messages", source: str | None = None):
    spec = ReadSpec((key,), chat="assistant", chat_template=template(source) if source else None)
    return parse_lines(b"".join(json.dumps(record).encode() + b"\n" for record in records), spec)


def test_fields_beside_a_dotted_key_count_too():
    inner = {"messages": TALK, "source": "web"}
    good, bad = {"id": 1, "data": inner}, {"id": 1, "data": {**inner, "tools": [CALL]}}
    batch = chat_rows(good, bad, {**good, "tools": [CALL]}, key="data.messages")
    assert (
        batch.kept == [1]
        and [bad_row.reason for bad_row in batch.bad_rows]
        == [
            "key 'data.messages': the record's 'tools' would be lost, because only role and content are written;"
            " remove the field if that is intended"
        ]
        * 2
    )
    assert chat_rows(good, key="data.messages", source=USES_FIELDS).bad_rows == []


def test_a_field_that_is_nested_deeply_is_read_without_recursion():
    record = b'{"messages": %s, "tools": %s}\n' % (json.dumps(TALK).encode(), b"[" * 900 + b"]" * 900)
    assert parse_lines(record, ReadSpec(("messages",), chat="assistant")).columns[0].sentences == FLAT
    batch = parse_lines(record, ReadSpec(("messages",), chat="assistant", chat_template=template(USES_FIELDS)))
    assert [bad_row.kind for bad_row in batch.bad_rows] == ["bad-chat"]


@pytest.mark.parametrize(
    "record",
    [
        '{"messages": [{"role": DEEP, "content": "a"}]}',
        '{"messages": [{"role": "assistant", "content": "a", "weight": DEEP}]}',
        '{"messages": [{"role": "assistant", "content": "a", "x": DEEP}]}',
        '{"messages": [{"role": "assistant", "content": "a"}], "mask": DEEP}',
        '{"messages": [{"role": "assistant", "content": "a"}], "prompt": DEEP}',
        '{"messages": DEEP}',
    ],
)
def test_a_reason_does_not_write_a_value_that_is_nested_deeply(record):
    for deep in ("[" * 900 + "1" + "]" * 900, '{"a":' * 900 + "1" + "}" * 900):
        batch = parse_lines(record.replace("DEEP", deep).encode(), ReadSpec(("messages",), chat="assistant"))
        assert [bad_row.kind for bad_row in batch.bad_rows] == ["bad-chat"]


def test_names_of_strangers_are_cut_in_reasons():
    name = "x" * 10_000
    batch = chat_rows({name: 1}, {"messages": [{name: 1}]}, {"messages": with_field(1, name, 1)}, source=IGNORES_ALL)
    assert [bad_row.kind for bad_row in batch.bad_rows] == ["no-key", "bad-chat", "bad-chat"]
    assert all(len(bad_row.reason) < 250 for bad_row in batch.bad_rows)


@pytest.mark.parametrize("records", [[], [{"messages": []}], [{"messages": ["a"]}, {"text": "b"}]])
def test_a_chunk_without_a_conversation_has_an_empty_column(records):
    assert chat_rows(*records).columns == (Column([], []),)
