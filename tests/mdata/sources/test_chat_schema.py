"""Schemas of chat records: alpaca, dolly, and pairs of a chosen and a rejected conversation."""

from __future__ import annotations

import pytest

from mdata.chat.loss_spans import spans_of
from mdata.chat.templates import Plain
from mdata.sources.chat_schema import SCHEMA_KEYS, flat_record, pair_of
from mdata.sources.conversation import BadConversation, conversation_of


def user(text):
    return {"role": "user", "content": text}


def gpt(text):
    return {"role": "assistant", "content": text}


def flat(schema, train_on="assistant", **record):
    value = record.pop(SCHEMA_KEYS[schema])
    return flat_record(value, record, schema=schema, train_on=train_on, template=Plain(9))


def trained(side, train_on="assistant"):
    """The texts of one side that are trained on."""
    turns, _ = conversation_of(side)
    return [span[0].strip() for span in spans_of(turns, Plain(9), train_on=train_on)[1::2]]


def test_instructions_become_two_turns():
    asked = ["user", "Add.\n1, 2", "assistant", "3"]
    assert flat("alpaca", instruction="Add.", input="1, 2", output="3", text="### Add") == asked
    assert flat("dolly", instruction="Add.", context="1, 2", response="3", category="math") == asked
    assert flat("alpaca", instruction="Hi", input="", output="") == ["user", "Hi", "assistant", ""]
    assert flat("dolly", instruction="Hi", context=None, response="Yes") == ["user", "Hi", "assistant", "Yes"]
    more = {"system": "Be brief.", "history": [["a", "b"]]}
    before = ["system", "Be brief.", "user", "a", "assistant", "b"]
    assert flat("alpaca", instruction="Hi", output="Yes", **more) == [*before, "user", "Hi", "assistant", "Yes"]


@pytest.mark.parametrize(
    ("schema", "record", "reason"),
    [
        ("alpaca", {"instruction": "a"}, "'output' is missing"),
        ("alpaca", {"instruction": None, "output": "b"}, "'instruction' is missing"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["c"]}, "'history' is not a list of"),
        ("dolly", {"instruction": "a", "context": 1, "response": "b"}, "'context' is not a string"),
        ("dolly", {"instruction": "a", "response": "b", "tools": [1]}, "the record's 'tools' would be lost"),
        ("pairs", {"chosen": "a"}, "without 'rejected'"),
        ("pairs", {"chosen": "a", "rejected": "b"}, "no 'prompt' that it answers"),
        ("pairs", {"chosen": [], "rejected": "b", "prompt": "c"}, "'chosen' is not a list of messages"),
        ("pairs", {"chosen": "a", "rejected": "b", "prompt": 3}, "neither a text nor a list"),
        ("pairs", {"chosen": "a", "rejected": "a", "prompt": "c"}, "are the same"),
        ("pairs", {"chosen": [user("a"), gpt("b")], "rejected": [user("a")]}, "'rejected': it has no assistant turn"),
        (
            "pairs",
            {"chosen": [user("a"), gpt("b")], "rejected": [user("a"), gpt("c")], "prompt": "d"},
            "'prompt' would",
        ),
        ("pairs", {"chosen": [user("a"), {**gpt("b"), "weight": 0}], "rejected": [user("a"), gpt("c")]}, "by 'weight'"),
    ],
)
def test_what_is_no_conversation_is_named(schema, record, reason):
    with pytest.raises(BadConversation, match=reason):
        flat(schema, **record)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
        {"prompt": "Hi", "chosen": [gpt("Yes")], "rejected": [gpt("No")]},
        {"prompt": [user("Hi")], "chosen": [gpt("Yes")], "rejected": [gpt("No")]},
        {"prompt": [user("Hi")], "chosen": gpt("Yes"), "rejected": gpt("No")},
        {"prompt": "Hi", "chosen": [user("Hi"), gpt("Yes")], "rejected": [user("Hi"), gpt("No")]},
        {"prompt": [user("Hi")], "chosen": [user("Hi"), gpt("Yes")], "rejected": [user("Hi"), gpt("No")]},
        {"chosen": [user("Hi"), gpt("Yes")], "rejected": [user("Hi"), gpt("No")], "score_chosen": 9.0},
    ],
)
def test_forms_of_a_pair(record):
    sides = pair_of(flat("pairs", **record))
    turns = [[turn[:2] for turn in conversation_of(side)[0]] for side in sides]
    assert turns == [[("user", "Hi"), ("assistant", answer)] for answer in ("Yes", "No")]
    assert [trained(side) for side in sides] == [["Yes"], ["No"]]


def test_only_what_follows_the_common_turns_is_trained_on():
    common = [user("a"), gpt("b"), user("c")]
    chosen, rejected = [*common, gpt("d"), user("e"), gpt("f")], [*common, gpt("g")]
    sides = pair_of(flat("pairs", chosen=chosen, rejected=rejected))
    assert [trained(side) for side in sides] == [["d", "f"], ["g"]]
    sides = pair_of(flat("pairs", "last", chosen=chosen, rejected=rejected))
    assert [trained(side, "last") for side in sides] == [["f"], ["g"]]
    sides = pair_of(flat("pairs", "all", chosen=chosen, rejected=rejected))
    assert [trained(side, "all") for side in sides] == [["d", "e", "f"], ["g"]]
