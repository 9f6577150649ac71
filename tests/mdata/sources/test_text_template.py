"""--text-template: the twin's text, and every mistake with its position."""

from __future__ import annotations

import json
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import UsageError
from mdata.sources.text_template import parse_template
from tests.helpers.examples import examples
from tests.mdata.sources.inputs import batch
from tests.reference.text_template import filled

NAMES = ("a", "b", "c.d")
LITERALS = st.text("xy \u00e9\n", max_size=3) | st.sampled_from(["{{", "}}", "\\n", "\\t", "\\\\"])
FIELDS = st.sampled_from([f"{{{name}{mark}}}" for name in NAMES for mark in ("", "?")])
TEMPLATES = st.tuples(st.lists(LITERALS | FIELDS, max_size=5), FIELDS, st.lists(LITERALS | FIELDS, max_size=3))
RECORDS = st.lists(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=3) | st.none()), max_size=5)


@examples(300)
@given(parts=TEMPLATES, records=RECORDS)
def test_texts_are_those_of_the_twin(parts, records):
    text = "".join([*parts[0], parts[1], *parts[2]])
    template = pickle.loads(pickle.dumps(parse_template(text)))
    found = batch("\n".join(map(json.dumps, records)).encode(), template=template)
    wanted = [filled(text, record) for record in records]
    assert found.columns[0].sentences == [one for one in wanted if one is not None]
    assert [bad.row for bad in found.bad_rows] == [row for row, one in enumerate(wanted, 1) if one is None]
    assert {bad.kind for bad in found.bad_rows} <= {"no-key", "bad-value"}


@pytest.mark.parametrize(
    ("text", "position"),
    [("", 1), ("plain", 6), ("a{b", 2), ("{a}}", 4), ("{}", 1), ("{?}", 1), ("\\x{a}", 1), ("{a}\\", 4)],
)
def test_a_mistake_is_named_with_its_position(text, position):
    with pytest.raises(UsageError, match=rf"--text-template cannot be understood at character {position}\n"):
        parse_template(text)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("7", "key 'a' of --text-template holds no text but int"), ("[]", "holds no text but list"),
     ("null", r"holds null \(as \{a\?\} it may be null\)"), ('"\\ud800"', "a lone surrogate")],
)  # fmt: skip
def test_what_is_no_text_is_a_bad_row(value, reason):
    (bad,) = batch(f'{{"a": {value}}}'.encode(), template=parse_template("{a}")).bad_rows
    assert re.search(reason, bad.reason)
