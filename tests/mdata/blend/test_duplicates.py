"""One corpus that several entries name: the sum of their shares, one cursor, and unchanged shares of the others."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import UsageError
from mdata.blend.blend import OpenBlend
from mdata.blend.compose import plan_blend
from mdata.blend_planning.make_blend import save_blend
from mdata.manifest.blend_schedule import schedules_of
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples
from tests.helpers.manifests import assert_valid

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """web/a, web/b, web/c of 300, 100 and 200 tokens; again/ holds other corpora of the same sizes."""
    folder = tmp_path_factory.mktemp("merging")
    for place, extra in (("web", 0), ("again", 1)):
        (folder / place).mkdir()
        for name, tokens in zip(NAMES, (300, 100, 200), strict=True):
            write_pair(folder / place / f"{name}_text_document", [[tokens - extra, extra]])
    return folder


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def planned(folder, entries, **tables) -> OpenBlend:
    return plan_blend({"component": entries, "merge_same": True, **tables}, folder)


def asked(blend) -> list[dict[str, tuple[str, Fraction]]]:
    """Of each phase: name -> what is asked of the component, weights as parts of 1."""
    found = []
    for phase in schedules_of(blend.manifest)[-1].phases:
        whole = sum((share.amount for share in phase.shares if share.unit == "weight"), Fraction(0)) or 1
        pairs = zip(blend.names, phase.shares, strict=True)
        found.append({n: (a.unit, a.amount / (whole if a.unit == "weight" else 1)) for n, a in pairs})
    return found


ENTRIES = st.fixed_dictionaries(
    {
        "path": st.sampled_from(["web", *(f"web/{name}_text_document" for name in NAMES)]),
        "weight": st.integers(1, 9).map(str),
    },
    optional={"group": st.sampled_from(["x", "y"])},
)


@examples(60)
@given(st.lists(ENTRIES, min_size=1, max_size=5), st.dictionaries(st.sampled_from(["x", "y"]), st.integers(1, 9)))
def test_shares_are_the_sums_of_those_of_different_corpora(folder, entries, groups):
    """Slow twin: every entry in a blend of its own, its shares put together by hand."""
    groups = {name: share for name, share in groups.items() if any(e.get("group") == name for e in entries)}
    tokens = {"a": 300, "b": 100, "c": 200}
    expected = dict.fromkeys(tokens, Fraction(0))
    of_group = {g: sum(int(e["weight"]) for e in entries if e.get("group") == g) for g in groups}
    for entry in entries:
        group, names = entry.get("group"), [n for n in tokens if entry["path"] in ("web", f"web/{n}_text_document")]
        whole = Fraction(int(entry["weight"]))
        whole = whole * groups[group] / of_group[group] if group in groups else whole
        for name in names:
            expected[name] += whole * tokens[name] / sum(tokens[n] for n in names)
    total = sum(expected.values())
    names = [e["path"] + e.get("group", "") for e in entries]
    blend = planned(folder, [{**e, "name": f"{n}{i}"} for i, (n, e) in enumerate(zip(names, entries, strict=True))],
                    **({"group": groups} if groups else {}))  # fmt: skip
    parts = {corpus.name: asked(blend)[0][name][1] for name, corpus in zip(blend.names, blend.corpora, strict=True)}
    assert parts == {name: share / total for name, share in expected.items() if share}
    assert len({corpus.id for corpus in blend.corpora}) == len(blend.corpora)


def test_a_folder_and_one_of_its_corpora(folder):
    blend = planned(folder, [{"path": "web", "weight": "0.6"}, {"path": "web/c_text_document", "weight": "0.4"}])
    assert asked(blend) == [
        {"a": ("weight", Fraction(3, 10)), "b": ("weight", Fraction(1, 10)), "c": ("weight", Fraction(6, 10))}
    ]
    assert [(part.share, part.group) for part in blend.manifest.components] == [
        ("300", "web"),
        ("100", "web"),
        ("0.6", None),
    ]
    assert blend.manifest.groups["web"].share == "0.4"
    assert blend.manifest.notes == {"merged": {"c": "0.2 + 0.4"}}
    save_blend(blend, folder / "mix.json")
    assert_valid(folder / "mix.json")


def test_nothing_comes_again_before_all_was_read(folder):
    blend = planned(
        folder, [{"path": f"web/{n}_text_document", "weight": w} for n, w in (("a", 2), ("b", 1), ("a", 1))]
    )
    save_blend(blend, folder / "pass.json")
    data = mdata.open_dataset(folder / "pass.json", sequence_length=8)
    assert blend.names == ("a", "b")
    components, inside = data.locate(np.arange(100))
    mine = inside[components == 0]
    assert len(mine) == 75
    assert mine.tolist() == list(range(75))
    texts = [
        tuple(data[k]["tokens"])
        for k in np.flatnonzero(components == 0)[: data.components[0].samples.samples_per_epoch]
    ]
    assert len(set(texts)) == len(texts) > 30
    assert (data.selection.inverse(components, inside) == np.arange(100)).all()


def test_other_units_phases_caps_and_everything_once(folder):
    a, b = ({"path": f"web/{n}_text_document"} for n in "ab")
    blend = planned(
        folder, [a | {"epochs": "1.5", "max_epochs": 4}, b | {"epochs": 1}, a | {"epochs": 1, "max_epochs": 3}]
    )
    assert asked(blend) == [{"a": ("epochs", Fraction(5, 2)), "b": ("epochs", Fraction(1))}]
    assert [part.cap for part in blend.manifest.components] == ["3", None]
    blend = planned(folder, [a, {"path": "web"}], exhaustive=True)
    assert [(part.name, part.share) for part in blend.manifest.components] == [("a", "1"), ("b", "1"), ("c", "1")]
    blend = planned(
        folder,
        [a | {"weight": "1/3", "name": "x"}, b | {"weight": 1}, a | {"weight": "1/3", "name": "y"}],
        phase=[{"samples": 10}, {"shares": {"x": 1, "b": 3}}],
    )
    assert [{name: part for name, (_, part) in phase.items()} for phase in asked(blend)] == [
        {"x": Fraction(2, 5), "b": Fraction(3, 5)},
        {"x": Fraction(1, 4), "b": Fraction(3, 4)},
    ]


@pytest.mark.parametrize(
    ("entries", "tables", "text"),
    [
        (["1 a weight", "1 a epochs"], {"samples": 9}, "a has shares in epochs and in weight; only shares in one unit"),
        (
            ["1 web weight", "1 a weight"],
            {"phase": [{"shares": {"web": 1, "a": 1}}]},
            "a is named both inside a group and",
        ),
        (["1 a weight", "1 a weight"], {"merge_same": False}, "a_text_document are the same corpus(.|\n)*--merge-same"),
        (["1 a weight"], {"merge_same": 1}, "merge_same is 1; expected true or false"),
    ],
)
def test_what_cannot_be_merged(folder, entries, tables, text):
    words = [entry.split() for entry in entries]
    made = [{"path": "web" if n == "web" else f"web/{n}_text_document", unit: share} for share, n, unit in words]
    with pytest.raises(UsageError, match=text):
        planned(folder, made, **tables)
