"""No text is read twice: held-out parts, parts beside their whole in folders, and evaluation separate from training."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import mdata
from mdata import UsageError
from mdata.blend.blend import OpenBlend
from mdata.blend.compose import plan_blend
from mdata.blend.spec import BlendSpec, read_spec
from mdata.blend_planning.change import BlendEdits, change_blend
from mdata.corpus.documents import DocumentReader
from mdata.dataset.eval_sets import evaluation_sets
from mdata.manifest.lineage import lineage_of, shared_input
from mdata.rewriting.shuffle import shuffle
from mdata.rewriting.subsets import sample, split
from tests.helpers.notes import Notes


def rows(word: str, count: int = 40) -> str:
    return "".join(
        json.dumps({"text": f"{word} {number}", "b": f"{number} of {word}"}) + "\n" for number in range(count)
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Runs over inputs `one` and `two`, each in a folder of its own."""
    root = tmp_path_factory.mktemp("made")
    for word in ("one", "two"):
        (root / f"{word}.jsonl").write_text(rows(word))
    run(root, "plain")
    run(root, "split", holdout="0.25")
    run(root, "more", holdout="0.5")
    run(root, "parts", partitions=3)
    run(root, "runs", partitions=3, keep_sequential_samples=True)
    run(root, "halves", partitions=2, holdout="0.25")
    run(root, "other", input="two", holdout="0.25", partitions=2)
    run(root, "both", input=("one", "two"))
    run(root, "key", json_keys=("b",))
    run(root, "keys", json_keys=("b", "text"), holdout="0.25")
    for number in (1, 2):
        run(root, "job", input=("one", "two"), shard=f"{number}/2")
    return root


@pytest.fixture(scope="module")
def rewritten(made, tmp_path_factory) -> Path:
    """Parts of the runs over `one`: of jobs, splits of splits, samples and shuffles."""
    root = tmp_path_factory.mktemp("rewritten")

    def whole(folder: Path, part: str = "") -> Path:
        return folder / f"x{part}_text_document"

    sources = {
        "plain": whole(made / "plain"),
        "holdout": whole(made / "split", "_holdout"),
        "train": whole(made / "split"),
        "part": whole(made / "parts", "_0"),
        "first_run": whole(made / "runs", "_0"),
        "shard": made / "job" / "x-00001-of-00002_text_document",
    }
    for name, source in sources.items():
        for shares in (("4", "1"), ("1", "1")):
            split(source, str(root / f"{name}-{shares[0]}"), shares=shares)
        shuffle(source, str(root / f"{name}-shuffled"), seed=1)
    split(root / "plain-4_1_document", str(root / "again"), shares=("1", "1"))
    split(root / "plain-shuffled_document", str(root / "later"), shares=("4", "1"))
    shuffle(root / "plain-4_1_document", str(root / "mixed"), seed=1)
    sample(root / "plain-4_1_document", str(root / "some"), tokens=40, seed=1)
    shuffle(root / "again_1_document", str(root / "again-mixed"), seed=1)
    return root


def run(root: Path, name: str, input: str | tuple[str, ...] = "one", **changes) -> None:
    inputs = (input,) if isinstance(input, str) else input
    options = mdata.PreprocessOptions(
        input=tuple(str(root / f"{word}.jsonl") for word in inputs),
        output_prefix=str(root / name / "x"),
        tokenizer_type="ByteTokenizer",
        workers=1,
        **changes,
    )
    mdata.preprocess(options)


def named(folder: Path, *names: str) -> list[str]:
    return [str(folder / f"x{name}_text_document.json") for name in names]


def paths_of(blend: OpenBlend) -> set[str]:
    return {corpus.path.stem.removesuffix("_text_document") for corpus in blend.corpora}


def documents(path: Path) -> set[tuple[str, int, str]]:
    """What a corpus holds, by the files and rows that its origins name."""
    corpus = mdata.open_corpus(path)
    found = DocumentReader(corpus)
    origins = [found.origin(number) for number in range(corpus.num_documents)]
    key = path.stem.split("_")[-2]
    return {(Path(origin.path).name, origin.row, key) for origin in origins if origin}


def test_what_lineage_says_is_what_origins_say(made, rewritten):
    """Over every pair of corpora of all runs: where it says that no document is in both, none is."""
    paths = [*sorted(made.rglob("*.json")), *sorted(rewritten.rglob("*.json"))]
    held = {path: documents(path) for path in paths}
    lineages = {path: lineage_of(mdata.open_corpus(path).manifest) for path in paths}
    assert len(paths) > 20 and None not in lineages.values()
    said = {True: 0, False: 0}
    for one, other in itertools.combinations(paths, 2):
        shared = shared_input(lineages[one], lineages[other])
        said[shared is None] += 1
        assert shared == shared_input(lineages[other], lineages[one])
        if held[one] & held[other]:
            assert shared is not None, (one, other)
    assert min(said.values()) > 50


@pytest.mark.parametrize(("one", "other"), [
    ("plain-4_1", "plain-4_2"),
    ("mixed", "plain-4_2"),
    ("some", "plain-4_2"),
    ("again_1", "again_2"),
    ("again_2", "plain-4_2"),
    ("again-mixed", "plain-4_2"),
    ("again-mixed", "again_2"),
    ("later_1", "later_2"),
    ("holdout-4_1", "train-1_2"),
    ("part-1_1", "part-1_2"),
    ("shard-4_1", "shard-4_2"),
])  # fmt: skip
def test_what_was_made_from_different_parts_stands_side_by_side(rewritten, made, one, other):
    """Further splits, samples and shuffles of a part stay within it."""
    words = [str(rewritten / f"{name}_document.json") for name in (one, other)]
    assert len(plan_blend(words, made).corpora) == 2


@pytest.mark.parametrize(("one", "other"), [
    ("plain-4_2", "plain-1_1"),
    ("plain-4_1", "plain-1_2"),
    ("holdout-4_1", "holdout-1_2"),
    ("part-4_1", "part-1_2"),
    ("first_run-4_1", "shard-1_2"),
    ("later_1", "plain-4_2"),
    ("mixed", "plain-4_1"),
])  # fmt: skip
def test_parts_of_different_divisions_are_refused(rewritten, made, one, other):
    words = [str(rewritten / f"{name}_document.json") for name in (one, other)]
    with pytest.raises(UsageError, match=r"both contain documents of .*one\.jsonl"):
        plan_blend(words, made)


def test_a_file_and_its_paragraphs_are_different_documents(tmp_path):
    """Of one text: neither parts nor what was held out is the same."""
    (tmp_path / "one.txt").write_text("".join(f"line {number}\n\n" for number in range(40)))
    (tmp_path / "two.txt").write_text("another\n")
    for name in ("file", "paragraph"):
        options = mdata.PreprocessOptions(
            input=(str(tmp_path / "one.txt"), str(tmp_path / "two.txt")),
            output_prefix=str(tmp_path / name / "x"),
            tokenizer_type="ByteTokenizer",
            input_format="text",
            text_documents=name,
            partitions=2,
            holdout="0.5",
            workers=1,
        )
        mdata.preprocess(options)
    for one, other in (("_0", "_1"), ("_holdout", "_0"), ("_0", "_holdout")):
        with pytest.raises(UsageError, match="both contain documents"):
            plan_blend([*named(tmp_path / "file", one), *named(tmp_path / "paragraph", other)], tmp_path)


def test_nothing_is_said_of_what_preprocess_did_not_make(made, tmp_path):
    for ending in (".bin", ".idx"):
        shutil.copy((made / "split/x_holdout_text_document").with_suffix(ending), tmp_path)
    assert lineage_of(mdata.open_corpus(tmp_path / "x_holdout_text_document").manifest) is None
    assert paths_of(mdata.open_blend(tmp_path)) == {"x_holdout"}


@pytest.mark.parametrize(("folder", "taken", "left"), [
    ("plain", {"x"}, 0),
    ("split", {"x"}, 1),
    ("parts", {"x"}, 3),
    ("runs", {"x"}, 3),
    ("halves", {"x"}, 3),
    ("other", {"x"}, 3),
])  # fmt: skip
def test_a_folder_is_trained_on_once_and_without_what_was_held_out(made, folder, taken, left):
    blend = plan_blend([str(made / folder)], made)
    assert paths_of(blend) == taken and len(blend.left_out) == left
    for path, why in blend.left_out.items():
        assert (made / path).is_file()
        assert ("held-out part (--holdout 0.25)" in why) if "holdout" in path else ("x_text_document.json" in why)


def test_what_is_left_out_is_in_the_manifest_and_said(made):
    mix = mdata.make_blend(["0.5", str(made / "split"), "0.5", str(made / "key")], made / "mix.json")
    assert list(mix.manifest.notes["left_out"]) == ["split/x_holdout_text_document.json"]
    assert [part.path for part in mix.manifest.components] == ["split/x_text_document.json", "key/x_b_document.json"]
    notes = Notes()
    mdata.open_dataset(made / "split", sequence_length=4, progress=notes)
    why = "the held-out part (--holdout 0.25) of text"
    assert notes.lines == [f"split/x_holdout_text_document.json is left out: {why}"]


def test_parts_without_their_whole_are_taken(made, tmp_path):
    shutil.copytree(made / "parts", tmp_path / "parts")
    for path in (tmp_path / "parts").glob("x_text*"):
        path.unlink()
    blend = plan_blend([str(tmp_path / "parts")], tmp_path)
    assert paths_of(blend) == {"x_0", "x_1", "x_2"} and blend.left_out == {}


@pytest.mark.parametrize(("one", "other"), [
    (("parts", "_0"), ("parts", "")),
    (("parts", "_0"), ("plain", "")),
    (("parts", "_0"), ("runs", "_1")),
    (("parts", "_2"), ("halves", "_0")),
    (("parts", "_1"), ("both", "")),
    (("plain", ""), ("both", "")),
    (("split", ""), ("plain", "")),
    (("split", "_holdout"), ("plain", "")),
    (("more", ""), ("split", "")),
])  # fmt: skip
def test_corpora_with_documents_in_common_are_refused_by_name(made, one, other):
    """Also what an earlier run with another number of parts, or another share held out, left behind."""
    words = [name for folder, part in (one, other) for name in named(made / folder, part)]
    with pytest.raises(UsageError, match=r"both contain documents of .*one\.jsonl") as refused:
        plan_blend(words, made)
    assert all(word in str(refused.value) for word in words)
    mixed = plan_blend(replace(read_spec(words), allow_overlap=True), made)
    assert len(mixed.corpora) == 2


def test_disjoint_corpora_stand_side_by_side(made):
    for words in (
        [*named(made / "parts", "_0", "_1", "_2")],
        [*named(made / "halves", "_0", "_1", "_holdout")],  # named by itself, a held-out part is trained on
        [*named(made / "parts", "_0"), *named(made / "other", "_0")],
        [*named(made / "plain", ""), str(made / "key/x_b_document.json")],
    ):
        assert len(plan_blend(words, made).corpora) == len(words)


def test_held_out_parts_alone_are_not_trained_on_by_a_pattern(made):
    pattern = str(made / "split" / "*holdout*")
    with pytest.raises(UsageError, match=r"every corpus in it is a held-out part(.|\n)*allow_overlap"):
        plan_blend([pattern], made)
    spec = BlendSpec(entries=read_spec([pattern]).entries, allow_overlap=True)
    assert paths_of(plan_blend(spec, made)) == {"x_holdout"}


# (trained on, measured on, whether that is refused)
SETS = [
    (("plain", ""), ("plain", ""), True),
    (("plain", ""), ("split", "_holdout"), True),
    (("split", ""), ("split", "_holdout"), False),
    (("more", ""), ("split", "_holdout"), False),
    (("split", ""), ("more", "_holdout"), True),
    (("split", "_holdout"), ("split", "_holdout"), True),
    (("parts", "_0"), ("parts", "_1"), False),
    (("parts", "_0"), ("parts", ""), True),
    (("parts", "_0"), ("runs", "_0"), True),
    (("both", ""), ("other", ""), True),
    (("split", ""), ("other", ""), False),
    (("halves", "_1"), ("halves", "_holdout"), False),
    (("keys", ""), ("split", "_holdout"), True),  # what was held out was decided over other keys
]


@pytest.mark.parametrize(("train", "valid", "refused"), SETS)
@pytest.mark.parametrize("split", ["valid", "test"])
def test_nothing_is_measured_on_what_is_trained_on(made, split, train, valid, refused):
    (trained,), (measured,) = (named(made / folder, part) for folder, part in (train, valid))
    tables = {"component": [{"path": trained}], split: {"set": measured}}
    data = mdata.open_dataset(trained, sequence_length=4)
    if refused:
        with pytest.raises(UsageError, match=r"set: (.|\n)*--holdout(.|\n)*--allow-overlap"):
            plan_blend(tables, made)
        with pytest.raises(UsageError, match=r"data\.allow_overlap = true"):
            evaluation_sets(data, split, paths=[measured])
    else:
        plan_blend(tables, made)
    assert plan_blend({**tables, "allow_overlap": True}, made)
    assert evaluation_sets(data, split, paths=[measured], allow_overlap=True)


def test_a_folder_is_measured_on_with_its_held_out_part(made):
    data = mdata.open_dataset(made / "other" / "x_text_document.json", sequence_length=4)
    (one,) = evaluation_sets(data, "valid", paths=[made / "key"]).values()
    with pytest.raises(UsageError, match="x_text_document"):
        evaluation_sets(data, "valid", paths=[made / "other"])
    held = evaluation_sets(data, "valid", paths=[str(made / "other" / "*holdout*")])
    assert len(held) == 1 and one.num_samples


def test_a_pair_that_nobody_read_is_compared_by_its_files(made, tmp_path):
    for ending in (".bin", ".idx"):
        shutil.copy((made / "plain/x_text_document").with_suffix(ending), (tmp_path / "copy").with_suffix(ending))
    with pytest.raises(UsageError, match=r"is also training data: .*x_text_document"):
        plan_blend({"component": [{"path": str(made / "plain")}], "valid": {"set": str(tmp_path / "copy")}}, made)


@pytest.mark.parametrize(("added", "refused"), [
    (("other", "_holdout"), None),
    (("other", ""), "evaluation sets contain"),
    (("halves", "_0"), "both contain documents"),
])  # fmt: skip
def test_what_a_change_adds_is_looked_at_too(made, added, refused):
    (train,), (valid,), (more,) = (
        named(made / folder, part) for folder, part in (("split", ""), ("other", "_1"), added)
    )
    old = plan_blend({"component": [{"path": train, "weight": 1}], "valid": {"set": valid}}, made)

    def change(**edits) -> OpenBlend:
        edits = BlendEdits(add=[("0.5", more)], **edits)
        return change_blend(old, 5, folder=made, sequence_length=4, edits=edits)

    if refused:
        with pytest.raises(UsageError, match=rf"{refused}(.|\n)*--allow-overlap"):
            change()
    else:
        assert len(change().corpora) == 2
    assert len(change(allow_overlap=True).corpora) == 2
