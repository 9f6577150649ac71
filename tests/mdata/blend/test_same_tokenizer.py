"""A corpus without a recorded tokenizer beside one with: refused by name at every entry point, unless allowed."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import mdata
from mdata import UsageError
from mdata.blend.compose import plan_blend
from mdata.blend.spec import spec_of_mapping
from mdata.blend_planning.change import BlendEdits, change_blend
from mdata.blend_planning.make_blend import save_blend
from mdata.dataset.eval_sets import evaluation_sets
from mdata.dataset.prebuild import build
from mdata.manifest.io import save_manifest
from tests.helpers.corpora import write_pair
from tests.helpers.manifests import assert_valid, corpus_of_pairs, some_corpus

KNOWN, FOREIGN, OTHER = "web/known.json", "web/foreign", "other"
WORDS = ["0.5", KNOWN, "0.5", FOREIGN]


@pytest.fixture(autouse=True)
def corpora(tmp_path, monkeypatch):
    """web: known, whose manifest names a tokenizer, and foreign, a bare pair; other, a bare pair."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web").mkdir()
    for number, name in enumerate(("web/known", FOREIGN, OTHER)):
        write_pair(tmp_path / name, [[5 + number]] * 20)
    corpus_of_pairs(tmp_path / KNOWN, ["known"], tokenizer=some_corpus().tokenizer)
    return tmp_path


def component(path, **facts):
    return {"path": path, "weight": 1, **facts}


def nested(folder, allowed):
    mdata.make_blend(["1", FOREIGN, "1", OTHER], "inner.json")
    return plan_blend(["1", KNOWN, "1", "inner.json"], folder, tokenizer_unknown=allowed)


def of_manifest(_folder, allowed):
    """A manifest that was written before there was such a question: it says nothing of it."""
    made = mdata.make_blend(WORDS, "mix.json", tokenizer_unknown="ok")
    save_manifest(msgspec.structs.replace(made.manifest, tokenizer_unknown=msgspec.UNSET), Path("mix.json"))
    return mdata.open_blend("mix.json", tokenizer_unknown=allowed)


def edited(folder, allowed):
    old = mdata.make_blend(["1", KNOWN], "old.json")
    edits = BlendEdits(add=[("1", FOREIGN)], tokenizer_unknown=allowed)
    return change_blend(old, 3, folder=folder, sequence_length=8, edits=edits)


def replaced(folder, allowed):
    old = mdata.make_blend(["1", KNOWN], "old.json")
    spec = spec_of_mapping({"component": [component(FOREIGN)], "tokenizer_unknown": allowed})
    return change_blend(old, 3, folder=folder, sequence_length=8, spec=spec)


def evaluated(_folder, allowed):
    train = mdata.open_dataset(KNOWN, sequence_length=8, tokenizer_unknown=allowed)
    return evaluation_sets(train, "valid", paths=[FOREIGN])


def evaluated_otherwise(_folder, allowed):
    train = mdata.open_dataset(FOREIGN, sequence_length=8, tokenizer_unknown=allowed)
    return evaluation_sets(train, "valid", paths=[KNOWN])


WAYS = {
    "words": lambda folder, allowed: mdata.make_blend(WORDS, "mix.json", tokenizer_unknown=allowed),
    "words without weights": lambda folder, allowed: mdata.open_blend([KNOWN, FOREIGN], tokenizer_unknown=allowed),
    "a string": lambda folder, allow: mdata.open_dataset(" ".join(WORDS), sequence_length=8, tokenizer_unknown=allow),
    "a folder": lambda folder, allowed: mdata.open_dataset("web", sequence_length=8, tokenizer_unknown=allowed),
    "a folder as a component": lambda folder, allowed: plan_blend(
        {"component": [component("web")], "tokenizer_unknown": allowed}, folder
    ),
    "a pattern": lambda folder, allowed: plan_blend(["web/*"], folder, tokenizer_unknown=allowed),
    "a nested blend": nested,
    "a manifest": of_manifest,
    "an edit": edited,
    "a whole new mixture": replaced,
    "a validation set": evaluated,
    "a validation set that is known": evaluated_otherwise,
    "arrays built offline": lambda folder, allowed: build(
        WORDS, mdata.DatasetOptions(sequence_length=8, tokenizer_unknown=allowed)
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_refuses_by_name_and_can_be_allowed(corpora, way):
    with pytest.raises(UsageError) as caught:
        WAYS[way](corpora, "refuse")
    text = str(caught.value)
    assert "foreign" in text and "no tokenizer recorded" in text
    assert "mdata adopt" in text and "--tokenizer-unknown ok" in text and "data.tokenizer_unknown" in text
    assert WAYS[way](corpora, "ok") is not None
    with pytest.raises(UsageError, match=r"tokenizer_unknown.*(yes|'yes')"):
        WAYS[way](corpora, "yes")


def test_corpora_that_all_do_not_say_are_read_together(corpora):
    assert mdata.open_blend(["0.5", FOREIGN, "0.5", OTHER]).weights == (1, 1)
    train = mdata.open_dataset(FOREIGN, sequence_length=8)
    assert list(evaluation_sets(train, "valid", paths=[OTHER])) == ["other"]


def test_a_manifest_says_that_it_was_allowed_and_changes_of_it_inherit_that(corpora):
    mdata.make_blend(WORDS, "mix.json", tokenizer_unknown="ok")
    assert_valid(corpora / "mix.json")
    assert json.loads((corpora / "mix.json").read_text())["tokenizer_unknown"] == "ok"
    train = mdata.open_dataset("mix.json", sequence_length=8)
    assert list(evaluation_sets(train, "valid", paths=[OTHER])) == ["other"]
    old = mdata.open_blend("mix.json")
    new = change_blend(old, 3, folder=corpora, sequence_length=8, edits=BlendEdits(shares={"known": "0.25"}))
    assert mdata.open_blend(save_blend(new, corpora / "new.json").folder / "new.json").corpora
    asked = change_blend(old, 3, folder=corpora, sequence_length=8, spec=["0.5", KNOWN, "0.5", OTHER])
    assert asked.tokenizer_unknown == "ok"


def test_it_is_no_part_of_what_decides_the_order(corpora):
    corpus_of_pairs(corpora / "web" / "foreign.json", ["foreign"], tokenizer=some_corpus().tokenizer)
    words = ["0.5", KNOWN, "0.5", "web/foreign.json"]
    blends = [plan_blend(words, corpora, tokenizer_unknown=allowed) for allowed in ("refuse", "ok")]
    assert len({blend.manifest.id for blend in blends}) == 1
    path, allowed = " ".join(words), ("refuse", "ok")
    ids = {mdata.open_dataset(path, sequence_length=8, tokenizer_unknown=value).data_id for value in allowed}
    assert len(ids) == 1
