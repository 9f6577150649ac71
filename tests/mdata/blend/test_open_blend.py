"""Blends: shares are stored as given, corpora named relatively, invalid mixtures refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import mdata
from mdata import DamageError, UsageError
from mdata.blend.compose import plan_blend
from mdata.blend_planning.change import BlendEdits, change_blend
from mdata.blend_planning.preview import blend_table
from mdata.manifest.io import save_manifest
from tests.helpers.corpora import write_pair
from tests.helpers.manifests import assert_valid, corpus_of_pairs, some_corpus


@pytest.fixture
def corpora(tmp_path):
    """Three bare corpora of 5, 6 and 7 tokens, in folders of their own."""
    for number, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        write_pair(tmp_path / name / f"{name}_text_document", [[5 + number]])
    return tmp_path


def words(folder, *parts: str) -> list[str]:
    return [str(folder / p / f"{p}_text_document") if p.isalpha() else p for p in parts]


def test_a_blend_is_saved_and_opened(corpora):
    made = mdata.make_blend(words(corpora, "0.70", "a", "3e-1", "b"), corpora / "mix.json")
    assert_valid(corpora / "mix.json")
    assert [(p.name, p.share, p.path) for p in made.manifest.components] == [
        ("a", "0.70", "a/a_text_document"),
        ("b", "3e-1", "b/b_text_document"),
    ]
    opened = mdata.open_blend(corpora / "mix.json")
    assert opened.manifest == made.manifest
    assert opened.weights == (7, 3)


@pytest.mark.parametrize("path", ["a/a_text_document", "a/a_text_document.idx", "b/b.json"])
@pytest.mark.parametrize("tokenizer_unknown", ["refuse", "ok"])
def test_one_corpus_is_the_blend_that_is_composed_of_it(corpora, path, tokenizer_unknown):
    shutil.copy(corpora / "b" / "b_text_document.idx", corpora / "b" / "b.idx")
    shutil.copy(corpora / "b" / "b_text_document.bin", corpora / "b" / "b.bin")
    mdata.adopt(corpora / "b" / "b", None)
    one = corpora / path
    composed = plan_blend([str(one)], one.parent, tokenizer_unknown=tokenizer_unknown)
    opened = mdata.open_blend(one, tokenizer_unknown=tokenizer_unknown)
    assert (opened.manifest, opened.folder) == (composed.manifest, composed.folder)
    assert opened.corpora[0].id == composed.corpora[0].id


def test_one_corpus_needs_no_module_that_composes_blends(corpora):
    prefix = corpora / "a" / "a_text_document"
    code = f"import sys, mdata; mdata.open_dataset({str(prefix)!r}, sequence_length=2); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "mdata.blend.open_blend" in loaded
    assert not {"mdata.blend.compose", "mdata.blend.spec", "mdata.blend.duplicates", "mdata.blend.overlap"} & {*loaded}


def test_a_corpus_without_tokens_is_refused(tmp_path):
    write_pair(tmp_path / "empty", [])
    with pytest.raises(UsageError, match="empty has no tokens"):
        mdata.open_blend(tmp_path / "empty")


def test_the_same_mixture_has_the_same_id_however_it_is_named(corpora, monkeypatch):
    made = mdata.make_blend(words(corpora, "0.7", "a", "0.3", "b"), corpora / "mix.json")
    monkeypatch.chdir(corpora / "a")
    spoken = mdata.open_blend("7 a_text_document 3 ../b/b_text_document.idx")
    assert spoken.manifest.id == made.manifest.id
    assert mdata.open_blend("3 a_text_document 7 ../b/b_text_document").manifest.id != made.manifest.id


def test_a_blend_is_made_of_words_in_one_string(corpora, monkeypatch):
    monkeypatch.chdir(corpora)
    made = mdata.make_blend("0.7 a/a_text_document 0.3 b/b_text_document", "mix.json")
    assert mdata.open_blend("mix.json").manifest.id == made.manifest.id
    assert mdata.open_blend("7 a/a_text_document 3 b/b_text_document").manifest.id == made.manifest.id


def test_words_may_be_numbers_and_paths(corpora, monkeypatch):
    monkeypatch.chdir(corpora)
    made = mdata.make_blend(words(corpora, "0.7", "a", "0.3", "b"), "mix.json")
    a, b = Path("a/a_text_document"), "b/b_text_document"
    assert mdata.make_blend([0.7, a, 0.3, b], "numbers.json").manifest.id == made.manifest.id
    assert mdata.open_blend([7, a, 3, b]).manifest.id == made.manifest.id
    for wrong in (5, [None, a]):
        with pytest.raises(UsageError, match=r"is not a list of words|is neither a weight nor a corpus"):
            mdata.make_blend(wrong, "no.json")


@pytest.mark.parametrize("name", ["two words", "two words.json"])
def test_a_path_with_a_blank_is_no_two_words(corpora, monkeypatch, name):
    monkeypatch.chdir(corpora)
    write_pair(corpora / "two words", [[3]])
    mdata.adopt("two words", None)
    for way in (name, corpora / name):
        assert mdata.open_blend(way).corpora[0].num_tokens == 3
        assert mdata.make_blend(way, "mix.json").corpora[0].num_tokens == 3
    with pytest.raises(UsageError, match="no words: neither a manifest"):
        mdata.make_blend(corpora / "no words", "mix.json")


def test_words_in_one_string_may_be_longer_than_a_name(corpora, monkeypatch):
    monkeypatch.chdir(corpora)
    for number in range(200):
        write_pair(corpora / f"pair_{number:025}", [[1 + number]])
    spoken = mdata.open_blend(" ".join(f"pair_{number:025}" for number in range(200)))
    assert len(spoken.corpora) == 200


def test_corpora_alone_count_by_their_tokens(corpora):
    made = mdata.make_blend(words(corpora, "a", "b", "c"), corpora / "mix.json")
    assert [part.share for part in made.manifest.components] == ["5", "6", "7"]
    one = mdata.open_blend(corpora / "a" / "a_text_document")
    assert one.weights == (1,)


def test_a_moved_folder_stays_valid(corpora, tmp_path_factory):
    mdata.make_blend(words(corpora, "1", "a", "2", "b"), corpora / "mix.json")
    target = tmp_path_factory.mktemp("elsewhere") / "moved"
    shutil.move(corpora, target)
    assert [corpus.num_tokens for corpus in mdata.open_blend(target / "mix.json").corpora] == [5, 6]


def test_a_folder_reached_by_a_link_gives_paths_that_work(corpora, tmp_path_factory):
    link = tmp_path_factory.mktemp("links") / "deep"
    link.symlink_to(corpora / "c")
    mdata.make_blend(words(corpora, "1", "a", "2", "b"), link / "mix.json")
    for path in (link / "mix.json", corpora / "c" / "mix.json"):
        assert len(mdata.open_blend(path).corpora) == 2


def test_table(corpora):
    blend = mdata.make_blend(words(corpora, "0.7", "a", "0.3", "b"), corpora / "mix.json")
    rows = mdata.preview_blend(blend, tokens=1000).rows
    assert [(row.name, row.share, row.achieved, row.tokens, row.documents) for row in rows] == [
        ("a", "0.7", 0.7, 5, 1),
        ("b", "0.3", 0.3, 6, 1),
    ]
    assert [row.epochs for row in rows] == pytest.approx([140, 50])
    assert [row.epochs for row in blend_table(blend)] == [None, None]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((), "no data is given"),
        (("0.5", "a", "b", "c"), "weights and prefixes are mixed"),
        (("0", "a", "1", "b"), "the share of a is not a positive number"),
        (("-1", "a", "1", "b"), "the share of a is not a positive number"),
        (("1", "a", "1", "a"), "are the same corpus"),
        (("1", "z", "1", "a"), r"z_text_document: neither a manifest nor a \.bin/\.idx pair"),
        (("1." + 31 * "0", "a", "1", "b"), "the share of a cannot be stored exactly: .*; write at most 30 digits"),
        (("1e100", "a", "1", "b"), "the share of a cannot be stored exactly: .* an exponent of at most two digits"),
        (("1e-3", "a", "1e30", "b"), "the share of a is too small"),
    ],
)
def test_mixtures_that_make_no_sense(corpora, parts, text):
    with pytest.raises(UsageError, match=text):
        mdata.make_blend(words(corpora, *parts), corpora / "m.json")
    assert not (corpora / "m.json").exists()


def test_a_limit_that_a_manifest_cannot_hold_is_refused(corpora):
    """It was written, and the manifest could not be read."""
    spec = {"component": [{"path": str(corpora / "a"), "name": "a", "max_epochs": "1e300"}]}
    with pytest.raises(UsageError, match="max_epochs of a cannot be stored exactly: '1e300'"):
        mdata.make_blend(spec, corpora / "m.json")


@pytest.mark.parametrize("adopted", [False, True])
def test_pairs_whose_idx_are_alike_are_told_apart_by_adopting_them_whole(corpora, adopted):
    for name in ("x", "y"):
        write_pair(corpora / name, [[5, 6]])
    (corpora / "y.bin").write_bytes((corpora / "x.bin").read_bytes()[::-1])  # other tokens, the same lengths
    if adopted:
        for name in ("x", "y"):
            mdata.adopt(corpora / name, None)
    paths = [str(corpora / f"{name}{'.json' if adopted else ''}") for name in ("x", "y")]
    with pytest.raises(UsageError, match=r"where only the \.idx are alike.*: mdata adopt --full each pair first"):
        plan_blend(["1", paths[0], "1", paths[1]], corpora)
    merged = {"component": [{"path": path, "weight": 1} for path in paths], "merge_same": True}
    with pytest.raises(UsageError, match="tokens may differ; run mdata adopt --full on each"):
        plan_blend(merged, corpora)
    for name in ("x", "y"):
        mdata.adopt(corpora / name, None, full=True)
    whole = plan_blend(["1", str(corpora / "x.json"), "1", str(corpora / "y.json")], corpora)
    assert len(whole.manifest.components) == 2


def test_a_bare_pair_and_its_copy_with_a_manifest_are_one_corpus(corpora):
    for name in ("x", "y", "z"):
        write_pair(corpora / name, [[5, 6]])
    (corpora / "z.bin").write_bytes((corpora / "x.bin").read_bytes()[::-1])
    mdata.adopt(corpora / "y", None, full=True)
    assert mdata.open_corpus(corpora / "x").id != mdata.open_corpus(corpora / "y").id
    for pair in (("x", "y"), ("y", "x"), ("y", "z")):  # z may be y: nobody has read its tokens
        entries = [{"path": str(corpora / name), "weight": 1} for name in pair]
        with pytest.raises(
            UsageError, match=r"are the same corpus \(the same \.idx, and a \.bin of the same size(.|\n)*adopt --full"
        ):
            plan_blend({"component": entries}, corpora)
        with pytest.raises(UsageError, match="tokens may differ; run mdata adopt --full on each"):
            plan_blend({"component": entries, "merge_same": True}, corpora)
    old = plan_blend([str(corpora / "y")], corpora)
    for new in ({"spec": ["1", str(corpora / "x")]}, {"edits": BlendEdits(add=[("1", str(corpora / "x"))])}):
        with pytest.raises(
            UsageError, match=r"x has the same \.idx and size of \.bin as y (.|\n)*try: .*y\.json, as the blend names"
        ):
            change_blend(old, 3, folder=corpora, sequence_length=4, **new)
    mdata.adopt(corpora / "z", None, full=True)
    assert len(plan_blend(["1", str(corpora / "y"), "1", str(corpora / "z")], corpora).manifest.components) == 2
    # The same files by two names are one corpus without doubt, and can be merged.
    (corpora / "y.json").rename(corpora / "other.json")
    entries = [{"path": str(corpora / name), "weight": 1} for name in ("y", "other.json")]
    assert plan_blend({"component": entries, "merge_same": True}, corpora).weights == (1,)


def test_an_empty_path_is_refused(corpora, monkeypatch):
    monkeypatch.chdir(corpora)
    with pytest.raises(UsageError, match="'' is not a corpus"):
        plan_blend([""], corpora)


def test_output_must_be_json(corpora):
    with pytest.raises(UsageError, match=r"try: .*mix\.json"):
        mdata.make_blend(words(corpora, "a"), corpora / "mix")


def with_tokenizer(folder, name: str, fingerprint: str) -> None:
    tokenizer = msgspec.structs.replace(some_corpus().tokenizer, fingerprint=fingerprint)
    path = folder / name / f"{name}_text_document.json"
    corpus_of_pairs(path, [f"{name}_text_document"], tokenizer=tokenizer)


def test_two_tokenizers_are_refused_with_both_fingerprints(corpora):
    with_tokenizer(corpora, "a", "12" * 32)
    with_tokenizer(corpora, "b", "34" * 32)
    with pytest.raises(UsageError) as caught:
        mdata.make_blend(words(corpora, "1", "a", "1", "b"), corpora / "other.json")
    for word in ("different tokenizers", "12" * 32, "34" * 32, "a_text_document.json", "b_text_document.json"):
        assert word in str(caught.value)


def test_a_replaced_corpus_is_damage(corpora):
    mdata.make_blend(words(corpora, "1", "a", "1", "b"), corpora / "mix.json")
    write_pair(corpora / "a" / "a_text_document", [[9]])
    with pytest.raises(DamageError, match="component a is not the corpus that was blended"):
        mdata.open_blend(corpora / "mix.json")


def test_a_blend_does_not_take_the_place_of_a_corpus(corpora, tmp_path):
    beside = corpora / "a" / "a_text_document.json"
    with pytest.raises(UsageError, match="is the manifest of a corpus"):
        mdata.make_blend(words(corpora, "1", "a"), beside)
    assert not beside.exists()
    other = tmp_path / "other.json"
    save_manifest(some_corpus(), other)
    before = other.read_bytes()
    with pytest.raises(UsageError, match="is the manifest of a corpus"):
        mdata.make_blend(words(corpora, "1", "a"), other)
    assert other.read_bytes() == before
    mdata.make_blend(words(corpora, "1", "a"), tmp_path / "mix.json")
    mdata.make_blend(words(corpora, "1", "b"), tmp_path / "mix.json")  # a blend may be made anew


def test_a_dot_in_the_name_of_a_pair_is_part_of_the_manifest_it_would_have(tmp_path):
    write_pair(tmp_path / "web.v1", [[5]])
    with pytest.raises(UsageError, match="is the manifest of a corpus"):
        mdata.make_blend(["1", str(tmp_path / "web.v1")], tmp_path / "web.v1.json")
    mdata.make_blend(["1", str(tmp_path / "web.v1")], tmp_path / "web.json")
    assert mdata.open_corpus(tmp_path / "web.v1").num_tokens == 5


@pytest.mark.parametrize("gone", [".json", ".bin", ".idx"])
def test_what_is_gone_is_named_with_its_blend_and_component(tmp_path, gone):
    for name, size in (("a", 5), ("b", 6)):
        (tmp_path / name).mkdir()
        write_pair(tmp_path / name / f"{name}_text_document", [[size]])
        corpus_of_pairs(tmp_path / name / f"{name}_text_document.json", [f"{name}_text_document"])
    mix = tmp_path / "mix.json"
    mdata.make_blend([str(tmp_path / name / f"{name}_text_document.json") for name in "ab"], mix)
    (tmp_path / f"b/b_text_document{gone}").unlink()
    verified = [str(problem) for problem in mdata.verify(mix).problems]
    assert verified
    messages = set(verified)
    for act in (
        lambda: mdata.open_blend(mix),
        lambda: mdata.open_dataset(mix, sequence_length=1),
        lambda: mdata.make_blend([str(mix), str(tmp_path / "a/a_text_document")], tmp_path / "outer.json"),
    ):
        with pytest.raises(UsageError) as caught:
            act()
        messages.add(str(caught.value))
    for message in messages:
        assert f"{mix}: component b: " in message and f"b_text_document{gone}" in message
