"""Conversations: what a record may hold, templates, spans by hand and against the twin."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.chat.jinja_template import JinjaTemplate
from mdata.chat.loss_spans import TemplateRefused, spans_of
from mdata.chat.templates import ROLES, ChatMl, Plain, check_spelling, choose_template
from mdata.preprocessing.encode_chat import ChatSpec, tokenize_chats
from mdata.sources.conversation import BadConversation, Message, conversation_of, flat_messages
from mdata.sources.record_batch import Column
from mdata.tokenizers.base.tokenizer import TextRefused
from mdata.tokenizers.types.byte import ByteTokenizer
from tests.helpers.examples import examples
from tests.reference import chat as twin

START, END = 300, 301
USER, GPT = Message("user", "Hi"), Message("assistant", "Yes")
SPELLED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("Hi", "not a list of messages"),
        ([], "without messages"),
        (["Hi"], "message 1 is not an object"),
        ([{"content": "Hi"}], "message 1 has no role"),
        ([{"role": 3, "content": "Hi"}], "message 1: its role is not a name: '3'"),
        ([{"role": "user\n<|im_start|>", "content": "Hi"}], "is not a name"),
        (
            [{"role": "user", "content": "Hi"}, {"role": "assistant"}],
            r"message 2 \(assistant\): its content is missing",
        ),
        ([{"role": "assistant", "content": None}], "its content is null"),
        ([{"from": "gpt", "value": [{"type": "text"}]}], "its value is a list"),
        ([{"role": "user", "content": "Hi"}], "no assistant turn"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_named(value, said):
    with pytest.raises(BadConversation, match=said):
        flat_messages(value, "last")


def test_both_forms_give_the_same():
    ours = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "id": "x"},
        {"role": "assistant", "content": ""},
    ]
    theirs = [{"from": "system", "value": "s"}, {"from": "human", "value": "u"}, {"from": "gpt", "value": ""}]
    assert flat_messages(ours, "all") == flat_messages(theirs, "all") == ["system", "s", "user", "u", "assistant", ""]
    assert flat_messages([{"role": "user", "content": "Hi"}], "all") == ["user", "Hi"]
    assert conversation_of(["user", "Hi"])[0] == [Message("user", "Hi")]


def test_spans_of_chatml_by_hand():
    template = ChatMl(START, END)
    assert spans_of([USER, GPT, USER], template, train_on="assistant") == [
        [START, "user\nHi", END, "\n", START, "assistant\n"],
        ["Yes", END],
        ["\n", START, "user\nHi", END, "\n"],
    ]
    assert spans_of([GPT, USER, GPT], template, train_on="last")[1::2] == [["Yes", END]]
    assert spans_of([USER, GPT], template, train_on="all")[1::2] == [["Hi", END], ["Yes", END]]
    assert spans_of([USER], template, train_on="last") == [[START, "user\nHi", END, "\n"]]


def test_spans_of_plain_by_hand():
    assert spans_of([USER, GPT, USER], Plain(9), train_on="assistant") == [
        ["User: Hi\n\nAssistant:"],
        [" Yes", 9],
        ["\n\nUser: Hi\n\n"],
    ]


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_template_of_jinja_gives_the_same_text_and_turns(train_on):
    messages = [Message("system", "a <b> 'c'"), USER, GPT, Message("user", " x\n"), Message("assistant", "")]
    ours = spans_of(messages, JinjaTemplate("own", SPELLED, ()).checked(), train_on=train_on)
    ids = {START: "<|im_start|>", END: "<|im_end|>"}
    chatml = spans_of(messages, ChatMl(START, END), train_on=train_on)
    texts = ["".join(part if isinstance(part, str) else ids[part] for part in span) for span in chatml]
    if train_on == "all":  # of others' turns all is trained on: the template tells no header
        assert "".join(part for span in ours for part in span) == "".join(texts)
    else:
        assert ["".join(span) for span in ours] == texts


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for m in messages %}{{ m.content if loop.last else 'old' }};{% endfor %}", "differently when more follow"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "fails"),
        ("{{ ''.__class__.__mro__ }}", "fails"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "fails"),
        ("", "writes nothing for the answer in message 2"),
        (
            "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}",
            "writes nothing for the answer",
        ),
    ],
)
def test_templates_of_jinja_that_do_not_go_by_turns_are_refused(source, told):
    with pytest.raises(TemplateRefused, match=told):
        spans_of([USER, GPT], JinjaTemplate("own", source, ()), train_on="assistant")


def test_a_conversation_that_would_take_hours_is_refused():
    template = JinjaTemplate("own", SPELLED, ())
    with pytest.raises(TemplateRefused, match=r"100,000 messages need 5,003,101,858 in .* limit is 2,000,000"):
        spans_of([USER, GPT] * 50_000, template, train_on="assistant")
    long = Message("assistant", "x" * 10_000_000)
    with pytest.raises(TemplateRefused, match="500 messages need"):
        spans_of([USER, long] * 250, template, train_on="assistant")
    assert len(spans_of([USER, GPT] * 20, template, train_on="assistant")) == 41


def test_a_template_that_rewrites_earlier_turns_can_train_on_the_last_one():
    source = (  # as Qwen3's, which removes the thoughts of earlier answers
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content if loop.last else m.content.split('>')[-1] }}\n"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    template, thinking = JinjaTemplate("own", source, ()), Message("assistant", "<hm>Yes")
    talk = [USER, thinking, USER, thinking]
    with pytest.raises(TemplateRefused, match="first 2 messages differently when more follow"):
        spans_of(talk, template, train_on="assistant")
    spans = [["u:Hi\na:Yes\nu:Hi\na:"], ["<hm>Yes"], ["\n"]]
    assert spans_of(talk, template, train_on="last") == spans
    flagged = [USER, thinking._replace(trained=False), USER, thinking]
    assert spans_of(flagged, template, train_on="assistant") == spans


REWRITES = (  # as templates with blocks that were made for training
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content if loop.last else m.content.split('>')[-1] }};{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def test_blocks_of_answers_prove_turns_that_are_rewritten():
    talk = [USER, Message("assistant", "<hm>Yes"), USER, Message("assistant", "<hm>No"), USER]
    template = JinjaTemplate("own", REWRITES, ())
    spans = [["u:Hi\na:"], ["Yes;"], ["\nu:Hi\na:"], ["No;"], ["\nu:Hi\n"]]
    assert spans_of(talk, template, train_on="assistant") == spans
    assert spans_of(talk[:4], template, train_on="assistant") == [*spans[:3], ["<hm>No;"], ["\n"]]
    skipped = [USER, talk[1]._replace(trained=False), *talk[2:]]
    assert spans_of(skipped, template, train_on="assistant") == [["u:Hi\na:Yes;\nu:Hi\na:"], *spans[3:]]
    # Without a block for each answer, for a turn of the user, or with a mark in the text, there is no proof.
    unmarked = REWRITES.replace("{% generation %}", "{% if loop.last %}{% generation %}{% endgeneration %}{% endif %}")
    for case, source, train_on in (
        (talk, unmarked.replace("{% endgeneration %}{% else", "{% else"), "assistant"),
        (talk, REWRITES, "all"),
        ([*talk[:4], Message("user", "\ufdd0")], REWRITES, "assistant"),
    ):
        with pytest.raises(TemplateRefused, match="differently when more follow"):
            spans_of(case, JinjaTemplate("own", source, ()), train_on=train_on)


@pytest.mark.parametrize("template", [ChatMl(START, END), Plain(9), JinjaTemplate("own", SPELLED, ())])
def test_flags_of_messages_decide_before_the_role(template):
    def trained(*flags: bool | None) -> list[bool]:
        talk = [message._replace(trained=flag) for message, flag in zip([USER, GPT, USER, GPT], flags, strict=True)]
        spans = spans_of(talk, template, train_on="assistant")
        texts = ["".join(map(str, span)) for span in spans[1::2]]
        return ["Yes" in text for text in texts]

    assert trained(None, None, None, None) == [True, True]
    assert trained(None, False, None, None) == [True]
    assert trained(True, None, None, False) == [False, True]  # the user's first turn, and the first answer


def test_what_jinja_cannot_parse_is_refused():
    with pytest.raises(UsageError, match="not valid Jinja"):
        JinjaTemplate("own", "{% for %}", ()).checked()


def test_what_templates_of_jinja_may_use():
    source = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}[{{ m.content | trim }}]{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endfor %}{{ {'a': '<'} | tojson }}"
    )
    template = JinjaTemplate(
        "own", source.replace("{{ {'a': '<'} | tojson }}", ""), (("bos_token", "<s>"), ("eos_token", "</s>"))
    )
    assert spans_of([USER, GPT], template, train_on="assistant") == [["<s>[Hi]"], ["Yes</s>"]]
    assert "today" not in str(
        spans_of([USER], JinjaTemplate("x", "{{ 'today' if strftime_now is defined }}", ()), train_on="last")
    )
    (spans,) = spans_of([USER], JinjaTemplate("own", "{{ {'a': '<'} | tojson }}", ()), train_on="last")
    assert spans == ['{"a": "<"}']
    again = pickle.loads(pickle.dumps(template))
    assert again.fingerprint == template.fingerprint != JinjaTemplate("own", source, ()).fingerprint


def test_the_date_is_given_or_there_is_none():
    def written(source, date):
        return str(spans_of([USER], JinjaTemplate("own", source, (), date).checked(), train_on="last"))

    source = "{{ strftime_now('%d %B %Y') if strftime_now is defined else 'never' }}{{ strftime_now is defined }}"
    assert written(source, "2026-11-27") == "[['27 November 2026True']]" and written(source, None) == "[['neverFalse']]"
    with pytest.raises(TemplateRefused, match="the chat template writes the date: give --chat-date YYYY-MM-DD"):
        written("{{ strftime_now('%d') }}", None)
    with pytest.raises(TemplateRefused, match="strftime_now with a width"):
        written("{{ strftime_now('%_999999999d') }}", "2026-11-27")
    for wrong in ("today", "2026-13-01", "27.11.2026"):
        with pytest.raises(UsageError, match=f"--chat-date {wrong} is no day"):
            JinjaTemplate("own", "x", (), wrong).checked()
    dates = (None, "2026-11-27", "2026-11-28")
    assert len({JinjaTemplate("own", "x", (), date).fingerprint for date in dates}) == 3


def test_a_prompt_with_which_the_answer_does_not_begin_is_named():
    source = "{% for m in messages %}{{ m.content }};{% endfor %}{{ '<think>' if add_generation_prompt }}"
    with pytest.raises(TemplateRefused, match=r"answer in message 2 adds '<think>', with which .* \('Yes;'\); a field"):
        spans_of([USER, GPT], JinjaTemplate("own", source, ()), train_on="assistant")


class WithTokens(ByteTokenizer):
    """Bytes, and two tokens that no text spells; a folder's configuration."""

    def __init__(self, config=None):
        super().__init__()
        self.files = {"tokenizer_config.json": json.dumps(config).encode()} if config else {}

    def id_of(self, text):
        return {"<|im_start|>": START, "<|im_end|>": END}.get(text)


def test_which_template_is_taken(tmp_path):
    assert choose_template(None, WithTokens()) == ChatMl(START, END)
    assert choose_template("plain", ByteTokenizer()) == Plain(256)
    config = {
        "chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}],
        "eos_token": {"content": "E"},
    }
    assert choose_template(None, WithTokens(config)) == JinjaTemplate("tokenizer", "d", (("eos_token", "E"),))
    assert choose_template("chatml", WithTokens(config)) == ChatMl(START, END)
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert choose_template("tokenizer", WithTokens(config), model=str(tmp_path)).source == "beside"
    (tmp_path / "own.jinja").write_text(SPELLED)
    assert choose_template(str(tmp_path / "own.jinja"), WithTokens()).name == "own.jinja"
    for source in ("", "[1, 2]", '{"messages": []}'):  # a file of data in its place
        (tmp_path / "own.jinja").write_text(source)
        with pytest.raises(UsageError, match=r"own\.jinja is not a chat template\n  found: it does not use"):
            choose_template(str(tmp_path / "own.jinja"), WithTokens())
    with pytest.raises(UsageError, match="has no chat template of its own"):
        choose_template("tokenizer", WithTokens())
    with pytest.raises(UsageError, match=r"no token .*im_start.* and no .*im_end"):
        choose_template(None, ByteTokenizer())
    with pytest.raises(UsageError, match="reading the chat template"):
        choose_template(str(tmp_path / "none.jinja"), WithTokens())


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}", []),
        ("{% for m in messages %}<|endofdocument|>{{ m.content }}{% endfor %}", ["<|endofdocument|>"]),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", ["<|endofdocument|>"]),
        ("{% for m in messages %}{{ '<|' ~ 'endof' ~ 'document|>' }}{% endfor %}", ["<|endofdocument|>"]),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}<|endofdocument|>",
         ["<|endofdocument|>"]),
    ],
)  # fmt: skip
def test_only_a_template_that_writes_control_tokens_needs_a_tokenizer_that_reads_them(source, written):
    template = JinjaTemplate("own", source, (("eos_token", "<|endofdocument|>"), ("bos_token", "x")))
    assert template.spelled_tokens(["<|other|>", "<|endofdocument|>"]) == written
    if not written:
        check_spelling(template, ByteTokenizer())
        return
    with pytest.raises(UsageError, match=", which ByteTokenizer encodes as plain text") as caught:
        check_spelling(template, ByteTokenizer())
    assert "found: <|endofdocument|>" in str(caught.value)
    assert "try: --chat-template plain, which ends answers with the end-of-document token, or a Jinja file" in str(
        caught.value
    )


def test_the_advice_about_control_tokens_can_be_followed():
    class KeepsText(WithTokens):
        options = {"special_in_text": "plain"}

        def __init__(self):
            self.files, self.special_ids, self.eod = {}, {"<|end|>": 302}, None

    template = JinjaTemplate("own", "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", ())
    with pytest.raises(UsageError) as caught:
        check_spelling(template, KeepsText())
    advice = str(caught.value).split("try: ")[1]
    assert advice.startswith("mdata preprocess --special-tokens-in-text special, or --chat-template chatml")
    assert "plain, which" not in advice  # it names no end of a document
    with pytest.raises(UsageError, match="has none\n  try: use a tokenizer that has one"):
        choose_template("plain", KeepsText())
    with pytest.raises(UsageError, match="try: a tokenizer that has them or --chat-template plain"):
        choose_template("chatml", ByteTokenizer())


class WithFile(WithTokens):
    """The same with any bytes in the place of its configuration."""

    def __init__(self, content: bytes):
        super().__init__()
        self.files = {"tokenizer_config.json": content}


@pytest.mark.parametrize("content", [b"[" * 30_000, b"9" * 5000, b"\xff", b"{"])
def test_a_configuration_that_cannot_be_read_is_named(content):
    with pytest.raises(UsageError, match=r"tokenizer_config\.json cannot be read"):
        choose_template(None, WithFile(content))


@pytest.mark.parametrize(
    "value",
    [[{"name": [], "template": "x"}], [{"name": {}, "template": "x"}], [{"template": "x"}], [[], None, 1], {}, 1, [],
     [{"name": "default", "template": 1}]],
)  # fmt: skip
def test_a_configuration_that_names_no_template_has_none(value):
    assert choose_template(None, WithTokens({"chat_template": value, "eos_token": [1]})) == ChatMl(START, END)


def test_templates_of_which_none_is_the_default_are_named():
    tokenizer = WithTokens({"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "y"}]})
    for choice in (None, "tokenizer"):
        with pytest.raises(UsageError, match=r"none is called default\n  found: 'tool_use', 'rag'"):
            choose_template(choice, tokenizer)
    assert choose_template("chatml", tokenizer) == ChatMl(START, END)


def test_a_template_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xff{{ 1 }}")
    for choice, model in ((str(path), None), ("tokenizer", str(tmp_path))):
        with pytest.raises(UsageError, match=r"chat_template\.jinja is not a chat template\n  found: .*0xff"):
            choose_template(choice, WithTokens(), model=model)


def test_without_jinja2_one_line_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(UsageError, match="pip install jinja2"):
        JinjaTemplate("own", "never compiled before", ()).checked()


def test_a_golden_conversation():
    """Every token and every bit written out."""
    column = Column([*USER[:2], *GPT[:2], *USER[:2], "assistant", "", "user", "x", "assistant", "ok"], [8, 12])
    found = tokenize_chats(column, WithTokens(), chat=ChatSpec(ChatMl(START, END), "assistant"), eod=256)
    tokens = [
        (START, 0), *((byte, 0) for byte in b"user\nHi"), (END, 0), (10, 0),
        (START, 0), *((byte, 0) for byte in b"assistant\n"), *((byte, 1) for byte in b"Yes"), (END, 1), (10, 0),
        (START, 0), *((byte, 0) for byte in b"user\nHi"), (END, 0), (10, 0),
        (START, 0), *((byte, 0) for byte in b"assistant\n"), (END, 1), (10, 0), (256, 0),
        (START, 0), *((byte, 0) for byte in b"user\nx"), (END, 0), (10, 0),
        (START, 0), *((byte, 0) for byte in b"assistant\n"), *((byte, 1) for byte in b"ok"), (END, 1),
        (10, 0), (256, 0),
    ]  # fmt: skip
    assert found.ids.tolist() == [id for id, _ in tokens]
    assert found.ends.tolist() == [5, 8]
    bits = [spans % 2 for document in (5, 3) for spans in range(document)]
    assert [bit for bit, length in zip(bits, found.lengths.tolist(), strict=True) for _ in range(length)] == [
        bit for _, bit in tokens
    ]


MESSAGES = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), st.text("ab\u00e9\n<|", max_size=6)),
    min_size=1,
    max_size=7,
)


@examples(300)
@given(
    st.lists(MESSAGES, min_size=1, max_size=3),
    st.sampled_from(["assistant", "last", "all"]),
    st.booleans(),
    st.booleans(),
)
def test_spans_are_the_twins(conversations, train_on, chatml, with_eod):
    template = ChatMl(START, END) if chatml else Plain(7)
    eod = 256 if with_eod else None
    texts = [text for messages in conversations for message in messages for text in message]
    ends = [2 * sum(map(len, conversations[: i + 1])) for i in range(len(conversations))]
    found = tokenize_chats(Column(texts, ends), ByteTokenizer(), chat=ChatSpec(template, train_on), eod=eod)

    def write(role, content):
        return next(iter(template.turns([Message(role, content)])))

    wanted = [
        twin.tokens(one, write, encode=lambda text: list(text.encode()), train_on=train_on, eod=eod)
        for one in conversations
    ]
    assert found.ids.tolist() == [id for one in wanted for id, _ in one]
    assert found.lengths.tolist() == [length for one in wanted for length in twin.lengths(one)]
    assert found.ends.tolist() == [sum(len(twin.lengths(one)) for one in wanted[: i + 1]) for i in range(len(wanted))]
    assert found.special == 0


@pytest.mark.parametrize(("template", "name"), [(ChatMl(START, END), "chatml"), (Plain(9), "plain")])
@pytest.mark.parametrize("role", ["usr", "User", "asistant", "narrator"])
def test_a_role_that_a_template_of_ours_does_not_have_is_refused(template, name, role):
    reason = rf"message 2: role '{role}' is unknown to the chat template {name}, which has system, .* function; a Jinja"
    with pytest.raises(TemplateRefused, match=reason):
        spans_of([USER, Message(role, "x"), GPT], template, train_on="assistant")
    for known in ROLES:
        assert "x" in str(spans_of([Message(known, "x"), GPT], template, train_on="all"))


BRANCHES = (
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}{% elif m['role'] in ['assistant', 'model'] %}"
    "A{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


@pytest.mark.parametrize("content", ["lost", "Hi", "Yes"])  # also if another message has the same text
@pytest.mark.parametrize("role", ["usr", "tool", "system"])
def test_a_role_for_which_a_template_of_jinja_writes_nothing_is_refused(role, content):
    if (role, content) in {("system", "Hi"), ("system", "Yes")}:
        return  # taken to be written, so that no conversation with a system message costs another run
    talk = [Message("model", "M"), Message(role, content), USER, GPT]
    reason = f"message 2: role '{role}' is unknown .*, which writes nothing for it; it has user, assistant, model"
    with pytest.raises(TemplateRefused, match=reason):
        spans_of(talk, JinjaTemplate("own", BRANCHES, ()), train_on="last")
    parts = talk[1]._replace(fields={"role": role, "content": [{"type": "text", "text": content}]})
    with pytest.raises(TemplateRefused, match=reason):
        spans_of([talk[0], parts, *talk[2:]], JinjaTemplate("own", BRANCHES, ()), train_on="last")


def test_a_role_that_a_template_of_jinja_writes_or_leaves_out_knowingly_is_not_refused():
    talk = [Message("critic", "Hm"), Message("usr", " "), USER, GPT]
    assert spans_of(talk, JinjaTemplate("own", SPELLED, ()), train_on="last")[1] == ["Yes<|im_end|>"]
    trims = SPELLED.replace("m.content", "(m.content | upper | trim)")
    assert "HM" in spans_of(talk, JinjaTemplate("own", trims, ()), train_on="last")[0][0]
    knows = "{% if messages[0].role == 'critic' %}{% set messages = messages[1:] %}{% endif %}" + SPELLED
    assert "Hm" not in str(spans_of(talk, JinjaTemplate("own", knows, ()), train_on="last"))


def test_a_conversation_that_the_template_refuses_is_a_text_that_is_refused():
    template = JinjaTemplate("own", "{{ raise_exception('no') if messages | length > 2 else 'text' }}", ())
    with pytest.raises(TextRefused, match="text 1: the chat template fails: no"):
        tokenize_chats(Column([*USER[:2] * 4], [2, 8]), ByteTokenizer(), chat=ChatSpec(template, "all"), eod=None)


def test_special_tokens_in_what_people_say_are_counted():
    column = Column(["user", "a<|endofdocument|>b", "assistant", "<|endofdocument|>"], [4])
    spec = ChatSpec(
        JinjaTemplate("own", "{% for m in messages %}<|endofdocument|>{{ m.content }}{% endfor %}", ()), "all"
    )
    assert tokenize_chats(column, ByteTokenizer(), chat=spec, eod=None).special == 2


CALLS = (
    "{{ bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for doc in documents or [] %}[{{ doc.title }}: {{ doc.text }}]{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{{ message.reasoning_content }}</think>"
    "{% endif %}"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<|end|>{% endgeneration %}"
    "{% else %}{{ message.name }}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALLED = [
    {"role": "user", "name": "Ada", "content": "Rain in K\u00f6ln?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Ask.",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "K\u00f6ln"}}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"rain": true}'},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "It does."},
]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"tools": [TOOL]},
        {"documents": [{"title": "t", "text": "x"}], "chat_template_kwargs": {"enable_thinking": True}},
    ],
    ids=["bare", "tools", "documents"],
)
def test_the_text_and_the_trained_part_are_those_of_transformers(record):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = JinjaTemplate("own", CALLS, (("bos_token", "<s>"),))
    messages, variables = conversation_of(flat_messages(CALLED, "assistant", record=record, template=template))
    spans = spans_of(messages, template, train_on="assistant", variables=variables)
    options = {**record, **record.get("chat_template_kwargs", {})}
    options.pop("chat_template_kwargs", None)
    texts, places = utils.render_jinja_template(
        [CALLED], chat_template=CALLS, return_assistant_tokens_mask=True, bos_token="<s>", **options
    )
    parts = ["".join(map(str, span)) for span in spans]
    assert "".join(parts) == texts[0]
    assert parts[1::2] == [texts[0][start:stop] for start, stop in places[0]]
