"""Displayed shares: as the user wrote them, and short if computed."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest

import mdata
from mdata import UsageError
from mdata.blend.share_texts import share_texts, shown_wholes
from mdata.blend_planning.change import BlendEdits, change_blend
from tests.helpers.corpora import write_pair

S = 8


@pytest.fixture(autouse=True)
def corpora(tmp_path, monkeypatch):
    """web/a, web/b, c: 1,000, 430 and 250 tokens."""
    (tmp_path / "web").mkdir()
    for name, count in (("web/a", 100), ("web/b", 43), ("c", 25)):
        write_pair(tmp_path / f"{name}_text_document", [[10]] * count)
    monkeypatch.chdir(tmp_path)
    return tmp_path


NOT_ALL = {"asked": [{"samples": None, "shares": ["1", "1", "1"], "set_by": ["user"]}]}
WEB, C = {"path": "web"}, {"path": "c_text_document"}


def shown(*entries, **tables):
    """Shares of the components, and of the groups."""
    blend = mdata.make_blend({"component": list(entries), **tables}, "mix.json")
    return share_texts(blend.manifest, [corpus.num_tokens for corpus in blend.corpora])


@pytest.mark.parametrize(
    ("entries", "tables", "components", "groups"),
    [
        ([WEB | {"weight": "0.60"}, C | {"weight": "2/5"}], {}, ["0.6993", "0.3007", "2/5"], {"web": "0.60"}),
        ([WEB, C], {}, ["0.5952", "0.256", "0.1488"], {"web": None}),
        ([WEB, C], {"alpha": "0.5"}, ["0.4639", "0.3042", "0.2319"], {"web": None}),
        ([WEB | {"weight": 1}, C | {"weight": 1}], {"alpha": "0.5"}, ["0.604", "0.396", "1"], {"web": "1"}),
        ([WEB | {"tokens": 700}, C | {"tokens": "1e9"}], {}, ["0.6993", "0.3007", "1e9 tokens"], {"web": "700 tokens"}),
        ([WEB | {"tokens": 700, "group": "x"}, C | {"tokens": 30_000_000_000}], {},
         ["489.5 tokens", "210.5 tokens", "30000000000 tokens"], {"x": None}),
        ([WEB | {"tokens": 10**9, "group": "x"}], {}, ["699300699 tokens", "300699301 tokens"], {"x": None}),
        ([C | {"weight": "0.142857143"}, WEB | {"weight": "0.857142857"}], {},
         ["0.142857143", "0.6993", "0.3007"], {"web": "0.857142857"}),
        ([C | {"weight": "1234567/7654321"}, WEB | {"weight": 1}], {}, ["0.1613", "0.6993", "0.3007"], {"web": "1"}),
        ([C | {"epochs": "3/2"}], {}, ["3/2 epochs"], {}),
        ([WEB | {"weight": 1}, C | {"weight": 3}], {"phase": [{"samples": 9}, {"shares": {"web": 1}}]},
         ["0.6993", "0.3007", "3 > 0"], {"web": "1"}),
    ],
)  # fmt: skip
def test_shares(entries, tables, components, groups):
    assert shown(*entries, **tables) == (components, groups)


def test_a_redistributed_blend_shows_what_was_asked_for():
    entries = [WEB | {"weight": 3}, C | {"weight": 1, "max_epochs": 1}]
    before = shown(*entries)
    blend = mdata.make_blend({"component": entries, "redistribute": True}, "mix.json", sequence_length=S, samples=150)
    assert blend.manifest.phases[0].units == ["samples"] * 3
    tokens = [corpus.num_tokens for corpus in blend.corpora]
    assert share_texts(blend.manifest, tokens) == before == (["0.6993", "0.3007", "1"], {"web": "3"})
    changed = change_blend(
        blend, 50, folder=blend.folder, sequence_length=S, edits=BlendEdits(shares={"a": "1"}, remove=["c"])
    )
    assert share_texts(changed.manifest, tokens)[0][0] == "1"  # the note speaks of the mixture before
    for note in ({"asked": 3}, {}, {"asked": []}, {"asked": [{"samples": None, "shares": ["1"]}]}, NOT_ALL):
        free = msgspec.structs.replace(blend.manifest, notes={"redistributed": note})
        assert share_texts(free, tokens)[0][0].endswith(" samples")


def test_numbers_that_a_user_wrote_stay_and_tokens_beside_parts_of_one_are_refused():
    assert shown(WEB | {"weight": 123456789}, C | {"weight": 987654321})[0][2] == "987654321"
    old = mdata.make_blend({"component": [WEB, C]}, "mix.json")
    write_pair(old.folder / "d", [[7]] * 30)
    edits = BlendEdits(add=[("210", "d")])
    with pytest.raises(UsageError, match="the weight 210 is above 1, but the shares of this blend are fractions of 1"):
        change_blend(old, 10, folder=old.folder, sequence_length=S, edits=edits)


def test_weights_of_a_change_stand_beside_those_that_are_shown():
    """0.5 beside parts of 1 is a third of all; beside 1,680 tokens it would be nothing."""
    old = mdata.make_blend({"component": [WEB, C]}, "mix.json")
    assert shown_wholes(old.manifest, [1000, 430, 250]) == [1680]
    write_pair(old.folder / "d", [[7]] * 30)
    edits = BlendEdits(add=[("0.5", "d")])
    new = change_blend(old, 10, folder=old.folder, sequence_length=S, edits=edits)
    assert [Fraction(weight, sum(new.weights)) for weight in new.weights][-1] == Fraction(1, 3)
    assert share_texts(new.manifest, [1000, 430, 250, 210])[0] == ["25/42", "43/168", "25/168", "0.5"]
