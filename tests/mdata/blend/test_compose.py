"""From a spec to a manifest: folders, patterns, nested blends, groups, phases, named sets."""

from __future__ import annotations

import errno
import os
from fractions import Fraction
from pathlib import Path

import pytest

import mdata
from mdata import UsageError
from mdata.blend.compose import corpora_at
from mdata.manifest.blend_schedule import schedules_of
from mdata.mixing.shares import by_tokens
from tests.helpers.corpora import write_pair
from tests.helpers.manifests import assert_valid, corpus_of_pairs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """web/a (30 tokens), web/deep/b (10), books/c (20), code/d (40: two shards under one manifest)."""
    for name, lengths in (
        ("web/a", [30]),
        ("web/deep/b", [4, 6]),
        ("books/c", [20]),
        ("code/d0", [15]),
        ("code/d1", [25]),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_pair(tmp_path / f"{name}_text_document", [lengths])
    corpus_of_pairs(tmp_path / "code" / "d.json", ["d0_text_document", "d1_text_document"])
    (tmp_path / "web" / "notes.json").write_text("{}")
    (tmp_path / "web" / ".hidden.idx").write_text("no")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shares_of(blend) -> dict[str, str]:
    """The shares of the components in the last phase, groups divided."""
    phase = schedules_of(blend.manifest)[-1].phases[-1]
    whole = sum(share.amount for share in phase.shares if share.unit == "weight")
    parts = [str(a.amount / whole) if a.unit == "weight" and whole else f"{a.amount} {a.unit}" for a in phase.shares]
    return dict(zip(blend.names, parts, strict=True))


def made(*entries, **tables):
    return mdata.make_blend({"component": list(entries), **tables}, "mix.json")


def test_a_folder_is_all_corpora_below_it_sorted(folder):
    blend = mdata.make_blend(["."], "mix.json")
    assert blend.names == ("c", "d", "a", "b")
    assert blend.weights == (2, 4, 3, 1)
    assert [corpus.num_tokens for corpus in mdata.open_blend("mix.json").corpora] == [20, 40, 30, 10]
    again = mdata.make_blend(["."], "again.json")  # a blend that lies there is no corpus
    assert again.manifest.id == blend.manifest.id


def test_a_corpus_whose_name_is_also_a_pattern(folder):
    """Among others, by each of its names; a pattern with brackets still finds what it matches."""
    write_pair(folder / "web" / "e[1]", [[5]])
    for name in ("web/e[1]", "web/e[1].idx"):
        assert mdata.make_blend(["1", name, "1", "books/c_text_document"], "mix.json").names == ("e[1]", "c")
        assert mdata.open_blend(name).corpora[0].num_tokens == 5
    assert mdata.make_blend(["books/[bc]_text_document.idx"], "again.json").names == ("c",)


def test_a_folder_to_which_links_lead_is_read_once(folder):
    """Two links that lead back made 2^40 paths of every corpus, and the search had no end; one made 40."""
    (folder / "alias").symlink_to("web", target_is_directory=True)
    for name in ("back", "again"):
        (folder / "web" / name).symlink_to(folder / "web", target_is_directory=True)
        for words in (["web"], ["[aw]*[sb]"], ["alias"]):
            blend = mdata.make_blend(words, "mix.json")
            assert blend.names == ("a", "b")
    assert not any("back" in part.path or "alias" in part.path for part in blend.manifest.components)


def test_a_folder_that_cannot_be_listed_is_named(folder, monkeypatch):
    real = os.scandir

    def scandir(path):
        if Path(path).name == "shut":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    (folder / "shut").mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UsageError, match="shut: Permission denied"):
        corpora_at(str(folder))


def test_what_one_entry_names_shares_its_share(folder):
    blend = made({"path": "web", "weight": "0.6"}, {"path": "*/c*", "weight": "0.4"})
    assert shares_of(blend) == {"a": "9/20", "b": "3/20", "c": "2/5"}
    assert [part.group for part in blend.manifest.components] == ["web", "web", "c"]
    assert shares_of(mdata.make_blend(["3", "web", "2", "books/c_text_document"], "words.json")) == shares_of(blend)
    assert_valid(folder / "mix.json")
    assert mdata.open_blend("mix.json").manifest == blend.manifest


def test_epochs_of_a_folder_are_those_of_each_and_tokens_are_divided(folder):
    blend = made({"path": "web", "epochs": 2, "max_epochs": 3}, {"path": "books", "tokens": "1e2"})
    assert shares_of(blend) == {"a": "2 epochs", "b": "2 epochs", "c": "100 tokens"}
    assert [part.cap for part in blend.manifest.components] == ["3", "3", None]
    assert blend.phased([30, 10, 20], 1).num_samples == 180
    assert shares_of(made({"path": "web", "tokens": "4e3"})) == {"a": "3000 tokens", "b": "1000 tokens"}


def test_nested_blends_multiply(folder):
    mdata.make_blend(["3", "web/a_text_document", "1", "books/c_text_document"], "inner.json")
    blend = made({"path": "inner.json", "weight": "0.8"}, {"path": "code/d.json", "weight": "0.2"})
    assert shares_of(blend) == {"a": "3/5", "c": "1/5", "d": "1/5"}
    mdata.make_blend(["1", "mix.json", "1", "web/deep"], "outer.json")
    assert shares_of(mdata.open_blend("outer.json")) == {"a": "3/10", "c": "1/10", "d": "1/10", "b": "1/2"}
    counted = mdata.make_blend(["inner.json", "code/d.json"], "by-tokens.json")  # 50 tokens in the shares 3 : 1, and 40
    assert shares_of(counted) == {"a": "5/12", "c": "5/36", "d": "4/9"}


def test_a_nested_blend_with_more_than_weights_is_refused(folder):
    made({"path": "web", "epochs": 2})
    with pytest.raises(UsageError, match=r"mix\.json cannot be part of another blend"):
        mdata.make_blend(["mix.json", "books"], "outer.json")


def test_groups_with_a_share(folder):
    blend = made(
        {"path": "web/a_text_document", "weight": 1, "group": "text"},
        {"path": "books", "weight": 3, "group": "text"},
        {"path": "code/d.json", "weight": 40, "group": "other"},
        group={"text": 60},
    )
    assert shares_of(blend) == {"a": "3/20", "c": "9/20", "d": "2/5"}
    assert [(row.name, row.share) for row in mdata.preview_blend(blend).groups] == [("text", "60"), ("other", None)]
    inside = made({"path": "web", "group": "text"}, {"path": "books", "group": "text"}, group={"text": {"tokens": 600}})
    assert shares_of(inside) == {"a": "300 tokens", "b": "100 tokens", "c": "200 tokens"}
    label = made({"path": "web", "weight": 4, "group": "x"}, {"path": "books", "weight": 6, "group": "x"})
    assert shares_of(label) == {"a": "3/10", "b": "1/10", "c": "3/5"}


def test_temperature(folder):
    alike = made({"path": "."}, alpha="0")
    assert set(shares_of(alike).values()) == {"1/4"}
    half = made({"path": "."}, alpha="0.5")
    shares = [Fraction(part.share) for part in half.manifest.components]
    assert [float(share**2) for share in shares] == pytest.approx([20, 40, 30, 10], rel=1e-15)
    assert half.manifest.notes == {"alpha": "0.5"}
    made({"path": "web", "weight": 1}, {"path": "books", "weight": 1}, alpha="0.5")  # inside of web


@pytest.mark.parametrize("share", [{"weight": 1}, {"epochs": 1}])
def test_a_temperature_that_says_nothing_is_refused(folder, share):
    entries = [
        {"path": "books/c_text_document", **share},
        {"path": "web" if "epochs" in share else "code/d.json", **share},
    ]
    with pytest.raises(
        UsageError, match=r"alpha has nothing to divide(.|\n)*found: alpha 0\.5(.|\n)*leave the shares out"
    ):
        made(*entries, alpha="0.5")


def test_powers_are_the_same_on_every_machine():
    power = by_tokens(123_456_789_012_345, "0.7")
    assert power == "7312409160.72742283"
    assert abs(Fraction(power) ** 10 / 123_456_789_012_345**7 - 1) < Fraction(1, 10**16)
    assert by_tokens(10**15, None) == "1000000000000000"
    assert by_tokens(10**14, "0.5") == "10000000"


def test_exhaustive_is_every_corpus_once(folder):
    blend = made({"path": "."}, exhaustive=True)
    assert set(shares_of(blend).values()) == {"1 epochs"}
    assert blend.phased([20, 40, 30, 10], 1).counts(100) == (20, 40, 30, 10)


def test_phases_by_name(folder):
    blend = made(
        {"path": "web", "weight": 6},
        {"path": "books", "weight": 4, "name": "novels"},
        phase=[
            {"samples": 10},
            {"tokens": 80, "shares": {"novels": {"samples": 3}, "web": 1}},
            {"shares": {"novels": 1}},
        ],
    )
    assert_valid(folder / "mix.json")
    (schedule,) = schedules_of(blend.manifest)
    amounts = [[(str(share.amount), share.unit) for share in phase.shares] for phase in schedule.phases]
    assert amounts[0] == [("9/2", "weight"), ("3/2", "weight"), ("4", "weight")]
    assert amounts[1] == [("3/4", "weight"), ("1/4", "weight"), ("3", "samples")]
    assert amounts[2] == [("0", "weight"), ("0", "weight"), ("1", "weight")]
    assert blend.phased([30, 10, 20], 8).counts(20) == (10, 3, 7)


def test_named_sets(folder):
    mdata.make_blend(["web"], "inner.json")
    tables = {
        "valid": {"prose": "books/c_text_document", "all": "inner.json", "w": "web"},
        "test": {"t": "code/d.json"},
    }
    with pytest.raises(UsageError, match=r"t: code/d\.json is also training data"):
        made({"path": "code/d.json"}, **tables)
    blend = made({"path": "code/d.json"}, **tables, allow_overlap=True)
    assert_valid(folder / "mix.json")
    assert {name: str(path) for name, (path, _) in blend.valid_sets.items()} == {
        "prose": "books/c_text_document",
        "all": "inner.json",
        "a": "web/a_text_document",
        "b": "web/deep/b_text_document",
    }
    plain = mdata.make_blend(["code/d.json"], "plain.json")
    assert blend.manifest.id == plain.manifest.id
    assert [one.name for one in blend.manifest.test] == ["t"]


@pytest.mark.parametrize(
    ("entries", "tables", "text"),
    [
        ([{"path": "web", "weight": 1}, {"path": "books"}], {}, "books has no share, but other entries have one"),
        ([{"path": "web"}, {"path": "books", "group": "x"}], {"group": {"x": 3}}, "web has no share"),
        ([{"path": "web", "weight": 1}], {"group": {"x": 3}}, "the group x has a share but no members"),
        ([{"path": "web", "weight": 1}], {"exhaustive": True}, "exhaustive reads every corpus once"),
        ([{"path": "web", "weight": 1}, {"path": "web/deep", "weight": 1}], {}, "are the same corpus"),
        ([{"path": "web", "weight": 1}, {"path": "books/c_text_document", "weight": 1, "name": "web"}],
         {"phase": [{"shares": {"web": 1}}]}, "web a share, but web is both a component and a group"),
        ([{"path": "web", "weight": 1}], {"phase": [{"shares": {"wed": 1}}]},
         "wed a share, but the blend has no such .* mean web"),
        ([{"path": "web", "weight": 1}], {"phase": [{"shares": {"a": 1}}]},
         "gives a a share, but the blend has no such component"),
        ([{"path": "web", "weight": 1}, {"path": "books", "epochs": 1}], {},
         r"need the length of the phase(.|\n)*try: samples = N or tokens = N in a \.toml file"),
        ([{"path": "code/d.json"}], {"phase": [{"shares": {"d": 0}, "samples": 5}, {"shares": {"d": 1}}]},
         "phase 1: no component has a share"),
        ([{"path": "code/d.json"}], {"phase": [{"shares": {"d": 1}, "ramp": True, "samples": 5}]},
         "neither may have amounts"),
        ([{"path": "code/d.json"}], {"phase": [{"shares": {"d": 1}, "samples": 5}, {"shares": {"d": 1}, "ramp": True}]},
         "phase 2: a ramp needs a length"),
        ([{"path": "web", "epochs": 1, "group": "x"}], {"group": {"x": 1}}, "has a share in epochs"),
        ([{"path": "web", "weight": 1}], {"valid": {"x": "none"}}, "none: neither a manifest nor"),
        ([{"path": "nothing/*", "weight": 1}, {"path": "no", "weight": 1}], {}, r"nothing/\*: no corpus was found"),
    ],
)  # fmt: skip
def test_specs_that_make_no_sense(folder, entries, tables, text):
    with pytest.raises(UsageError, match=text):
        made(*entries, **tables)
    assert not (folder / "mix.json").exists()


def test_all_missing_corpora_at_once(folder):
    with pytest.raises(UsageError) as caught:
        mdata.make_blend(["1", "no", "1", "web", "1", "never"], "mix.json")
    assert "2 problems" in str(caught.value) and "no: neither" in str(caught.value) and "never: " in str(caught.value)


def test_all_bad_shares_and_doubles_at_once(folder):
    with pytest.raises(UsageError) as caught:
        mdata.make_blend(["0", "web/a_text_document", "1." + 31 * "0", "books", "-1", "code/d.json"], "mix.json")
    for problem in ("3 problems", "share of a is not a positive number", "c cannot be stored exactly", "share of d"):
        assert problem in str(caught.value).replace("group books", "c")
    with pytest.raises(
        UsageError, match=r"2 problems:\n.*a_text_document are the same.*\n.*b_text_document are the same"
    ):
        mdata.make_blend(["1", "web", "1", "web"], "mix.json")


def test_empty_corpora_in_a_folder_are_passed_by(folder):
    write_pair(folder / "web" / "empty_text_document", [[]])
    assert mdata.make_blend(["web"], "mix.json").names == ("a", "b")
    for words in (["web/empty_text_document"], ["0.5", "web/empty_text_document", "0.5", "web/a_text_document"]):
        with pytest.raises(UsageError, match="empty has no tokens; leave it out"):
            mdata.make_blend(words, "mix.json")


def test_specs_from_files(folder):
    (folder / "mix.toml").write_text('[[component]]\npath = "web"\nepochs = 2\n')
    (folder / "mix.csv").write_text("path,epochs\nweb,2\n")
    ids = {mdata.make_blend(spec, "mix.json").manifest.id for spec in ("mix.toml", ["mix.csv"], folder / "mix.toml")}
    assert ids == {made({"path": "web", "epochs": "2.0"}).manifest.id}
    for words in (["mix.csv", "web"], ["1", "mix.toml", "1", "web"]):
        with pytest.raises(UsageError, match=r"mix\.\w+ describes a whole blend and cannot be combined with others"):
            mdata.make_blend(words, "mix.json")
    (folder / "bad.csv").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not UTF-8"):
        mdata.make_blend("bad.csv", "mix.json")
