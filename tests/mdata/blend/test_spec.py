"""Blend descriptions: exact numbers, all problems at once."""

from __future__ import annotations

import pytest

from mdata import UsageError
from mdata.blend.data_path import BlendEntry
from mdata.blend.spec import (
    spec_of_csv,
    spec_of_mapping,
    spec_of_splits,
    spec_of_toml,
    spec_of_words,
)
from mdata.mixing.schedule import Phase
from mdata.mixing.shares import Share

TOML = """
alpha = 0.70
tokens = 1e9
redistribute = true
[[component]]
path = "a"
weight = 0.10
max_epochs = 2.5
group = "web"
[[component]]
path = "b*"
name = "bees"
epochs = "3/2"
[group]
web = { tokens = 1_000 }
[[phase]]
tokens = 5e8
shares = { web = 0.6, bees = { samples = 7 }, c = 0 }
[[phase]]
samples = 20
ramp = true
[valid]
books = "books.json"
"""


def test_toml_keeps_numbers_as_they_stand():
    spec = spec_of_toml(TOML, "mix.toml")
    assert spec.entries == (
        BlendEntry(path="a", share=Share("0.10"), max_epochs="2.5", group="web"),
        BlendEntry(path="b*", share=Share("3/2", "epochs"), name="bees"),
    )
    assert spec.groups == {"web": Share("1000", "tokens")}
    assert spec.phases == (
        Phase(tokens=5 * 10**8, by_name={"web": Share("0.6"), "bees": Share("7", "samples"), "c": Share("0")}),
        Phase(samples=20, ramp=True),
    )
    assert (spec.alpha, spec.tokens, spec.samples) == ("0.70", 10**9, None)
    assert (spec.redistribute, spec.exhaustive, spec.valid) == (True, False, {"books": "books.json"})
    assert [str(amount) for amount in (Share("2"), Share("2", "epochs"))] == ["2", "2 epochs"]


def test_a_mapping_is_the_same_and_floats_are_refused():
    assert spec_of_mapping({"component": [{"path": "a", "weight": 3}]}).entries[0].share == Share("3")
    with pytest.raises(UsageError, match=r'component 1: weight is 0\.1; .* write it as text, such as "0\.1"'):
        spec_of_mapping({"component": [{"path": "a", "weight": 0.1}]})


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["no [[component]] names a corpus"]),
        ("component = 3", ["component is not a list of tables"]),
        ("[[component]]\npth = 'x'", ["component 1: pth is not known; did you mean path?", "component 1 has no path"]),
        ("[[component]]\npath = 'x'\nweight = 1\nepochs = 2", ["found weight and epochs"]),
        (
            "[[component]]\npath = 3\nweight = -1",
            ["path is 3; expected a text", "weight is -1; expected a number"],
        ),
        ("[[component]]\npath = 'x'\n[group]\nweb = {}", ["group web needs exactly one of weight", "found none"]),
        (
            "[[component]]\npath = 'x'\n[[phase]]\nsamples = 1.5\nramp = 1",
            ["samples is 1.5; expected an integer", "ramp is 1"],
        ),
        ("alpha = 'x'\nexhaustive = 1\n[[component]]\npath = 'x'", ["alpha is 'x'", "exhaustive is 1; expected true"]),
        ("valid = 3\n[[component]]\npath = 'x'", ["valid is 3; expected a table"]),
        ("[[component]]\npath = 'x'\nweight = true", ["weight is True; expected a number"]),
        # Would take minutes and gigabytes as numbers.
        (
            "alpha = '1e99999999'\nsamples = '1e30'\n"
            "[[component]]\npath = 'x'\nmax_epochs = '1e99999999'\ntokens = '1e-9999999999'",
            [
                "alpha has too many digits, or too large an exponent: '1e99999999'; expected at most 30",
                "max_epochs has too many digits",
                "tokens has too many digits",
                "samples is 1e30; expected an integer of at most 2^62",
            ],
        ),
    ],
)
def test_all_problems_of_a_file_at_once(text, problems):
    with pytest.raises(UsageError) as caught:
        spec_of_toml(text, "mix.toml")
    assert "mix.toml" in str(caught.value)
    for problem in problems:
        assert problem in str(caught.value)


def test_what_is_no_toml():
    with pytest.raises(UsageError, match=r"mix\.toml is not a TOML file"):
        spec_of_toml("a = ", "mix.toml")


def test_csv():
    text = "path, share, epochs, group, max_epochs\na, 0.10, , web, 4\nb, , 2, ,\n\n"
    assert spec_of_csv(text, "x.csv").entries == (
        BlendEntry(path="a", share=Share("0.10"), group="web", max_epochs="4"),
        BlendEntry(path="b", share=Share("2", "epochs")),
    )
    with pytest.raises(UsageError) as caught:
        spec_of_csv("path,weight,speed\na,x,\nb,1,2,3,4\n", "x.csv")
    for problem in ("x.csv: line 2: weight is 'x'", "x.csv: line 3: more cells", "line 3: speed is not known"):
        assert problem in str(caught.value)
    with pytest.raises(UsageError, match="no row names a corpus"):
        spec_of_csv("path,weight\n", "x.csv")
    for text in ("\ufeffpath,weight\na,1\n", "path;weight\r\na;1\r\n"):  # as spreadsheets write it
        assert spec_of_csv(text, "x.csv").entries == (BlendEntry(path="a", share=Share("1")),)


def test_a_quote_that_is_not_closed_is_named_in_a_long_table():
    text = 'path,weight\n"a,1\n' + "b,2\n" * 40_000
    with pytest.raises(UsageError, match=r"x.csv: line \d+: field larger than field limit(.|\n)*close the quote"):
        spec_of_csv(text, "x.csv")


def test_words_and_lists_per_split():
    assert spec_of_words(["0.7", "a", "0.3", "b"]).entries[1] == BlendEntry(path="b", share=Share("0.3"))
    spec = spec_of_splits({"train": ["0.7", "a", "0.3", "b"], "valid": "1 c 2 d", "test": []})
    assert spec.entries == spec_of_words(["0.7", "a", "0.3", "b"]).entries
    assert (spec.valid, spec.test) == ({"c": "c", "d": "d"}, {})
    for lists in ({}, {"valid": ["a"]}, {"train": ["a"], "validation": ["b"]}):
        with pytest.raises(UsageError, match="lists per split cannot be used"):
            spec_of_splits(lists)
    assert spec_of_splits({"train": [0.7, "a", 0.3, "b"], "test": None}).entries == spec.entries  # as JSON has it
    for valid in (5, [None], {"a": 1}, False):
        with pytest.raises(UsageError, match=r'(of )?"valid" is n'):
            spec_of_splits({"train": ["a"], "valid": valid})
