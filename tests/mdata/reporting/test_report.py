"""The page is well formed, self-contained and correct: numbers, hostile names, empty corpora, many components."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

import mdata
from mdata import DamageError, UsageError
from mdata.manifest.types import TokenizerFacts
from mdata.reporting.report_data import read_report
from mdata.reporting.vocabulary_use import vocabulary_use
from tests.helpers.corpora import write_pair
from tests.helpers.manifests import corpus_of_pairs

OUTSIDE = re.compile(r"https?:|//|url\(|@import", re.IGNORECASE)
MARKS = """html head meta title style body h1 h2 h3 p ul li i small div table thead tbody tr th td code bdi details
    summary svg desc g path rect text"""
ATTRIBUTES = """lang charset name content class style title scope tabindex viewBox role aria-label x y width height d
    fill-opacity stroke-opacity text-anchor"""
ODD = ["<script>alert(1)</script>", 'a" onload="x', "&amp; & <b>", "tab\there\x1b[0m", "\u202eesrever", "x" * 200]


def parsed(path):
    """The page as a tree; whatever is wrong with it fails here."""
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>\n")
    tree = ElementTree.fromstring(page.split("\n", 1)[1])
    for element in tree.iter():
        assert element.tag in MARKS.split()
        assert set(element.attrib) <= set(ATTRIBUTES.split())
        assert element.tag != "style" or not OUTSIDE.search(element.text)
        assert not OUTSIDE.search(element.get("style", ""))
    return tree


def tables(tree):
    found = []
    for table in tree.iter("table"):
        rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
        found.append([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
    return found


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """Ten corpora; number i has 20 + 10 i documents of 1 to 60 tokens, ids below 50."""
    random = np.random.default_rng(5)
    for i in range(10):
        lengths = random.integers(1, 61, 20 + 10 * i).tolist()
        tokens = np.minimum(random.geometric(0.1, sum(lengths)), 49)
        write_pair(tmp_path / f"c{i}_text_document", [[n] for n in lengths], tokens=tokens, code=8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blended(count, **tables):
    entries = [{"path": f"c{i}_text_document", "weight": i + 1} for i in range(count)]
    return mdata.make_blend({"component": entries, **tables}, "mix.json")


def test_the_page_has_the_numbers_of_the_table_and_the_files(corpora):
    preview = mdata.preview_blend(blended(3), sequence_length=16, samples=500)
    made = mdata.report("mix.json", sequence_length=16, samples=500)
    assert made.path.name == "mix.report.html"
    rows = tables(parsed(made.path))[0]
    assert [row["component"] for row in rows] == ["c0", "c1", "c2"]
    for row, wanted in zip(rows, preview.rows, strict=True):
        assert row["samples"] == f"{wanted.samples:,}"
        assert row["epochs"] == f"{wanted.epochs:.4g}"
        assert row["tokens"] == f"{wanted.tokens:,}"
        assert row["achieved"] == f"{100 * wanted.achieved:.2f} %"
    assert made.facts["components"][1]["once_at"] == preview.rows[1].once_at
    assert json.loads(json.dumps(made.facts))["num_samples"] == 500


def test_the_vocabulary_is_that_of_what_is_read(corpora):
    blend = blended(3)
    words = vocabulary_use(blend.corpora, [0.5, 0.3, 0.2], full=True)
    read = [np.concatenate([corpus.document(i) for i in range(corpus.num_documents)]) for corpus in blend.corpora]
    parts = [np.bincount(ids, minlength=50) / len(ids) for ids in read]
    wanted = 0.5 * parts[0] + 0.3 * parts[1] + 0.2 * parts[2]
    assert words.mixture.distinct == np.count_nonzero(wanted)
    best = np.sort(wanted)[::-1]
    assert dict(words.mixture.coverage) == pytest.approx({k: best[:k].sum() for k, _ in words.mixture.coverage})
    assert [one.share for one in words.mixture.frequent] == pytest.approx(best[best > 0][:40].tolist())
    assert [one.id for one in words.parts[1].frequent] == np.argsort(-parts[1], kind="stable")[:8].tolist()
    assert words.full and words.unused is None and words.size is None


def test_ids_that_do_not_occur_are_listed(corpora):
    tokenizer = msgspec.structs.replace(
        TokenizerFacts(type="NullTokenizer", fingerprint="0" * 64, vocab_size=60, eod=59, special_ids={}, options={},
                         folder=None), vocab_size=48)  # fmt: skip
    corpus_of_pairs(corpora / "known.json", ["c3_text_document"], tokenizer=tokenizer)
    words = read_report("known.json").vocabulary
    ids = set(np.fromfile("c3_text_document.bin", "<u2").tolist())
    listed = {i for first, last, _ in words.unused_runs for i in range(first, last + 1)}
    assert listed == set(range(48)) - ids
    assert words.unused == len(listed)
    assert words.mixture.outside == sum(np.fromfile("c3_text_document.bin", "<u2") >= 48)
    assert words.problem, "the facts above are no tokenizer's"


def test_phases_and_ramps(corpora):
    blended(10, phase=[{"tokens": 4000}, {"tokens": 4000, "ramp": True, "shares": {"c1": 1}}, {"shares": {"c2": 1}}])
    made = mdata.report("mix.json", tokens=12_000)
    tree = parsed(made.path)
    assert len(list(tree.iter("svg"))) == 3 + 10 + 1
    assert "phase 2 (ramp)" in "".join(tree.itertext())
    assert tables(tree)[0][2]["phase 3"] == "100.00 %"
    assert made.facts["curves"]["ramps"] == [False, True, False]


def test_a_member_of_a_group_has_the_colour_of_the_legend_in_all_drawings(corpora):
    entries = [{"path": f"c{i}_text_document", "weight": i + 1, "group": "g" if i < 3 else "h"} for i in range(5)]
    mdata.make_blend({"component": entries}, "mix.json")
    tree = parsed(mdata.report("mix.json", sequence_length=16, samples=500).path)
    legend = {}
    for swatch in next(items for items in tree.iter("ul") if items.find("li/i") is not None).iter("i"):
        strength = swatch.get("style", "opacity:1.00").removeprefix("opacity:")
        legend[swatch.tail.strip()] = (swatch.get("class").removeprefix("swatch b"), strength)
    assert len(legend) == 5 and len(set(legend.values())) == 5
    assert {colour for colour, _ in legend.values()} == {"c0", "c1"}, "a colour a group, told apart by strength"
    (bars,) = (svg for svg in tree.iter("svg") if svg.get("aria-label").startswith("Epochs at the end"))
    (areas,) = (svg for svg in tree.iter("svg") if svg.get("aria-label").startswith("Shares over"))
    for drawing, shape in ((bars, "rect"), (areas, "path")):
        drawn = {
            element.find("title").text.split(":")[0]: (
                element.get("class").removeprefix("area "),
                element.get("fill-opacity", "1.00"),
            )
            for element in drawing.iter(shape)
            if element.get("class", "").startswith("area ")
        }
        assert drawn == legend


def test_names_and_texts_cannot_break_the_page(corpora):
    entries = [{"path": f"c{i}_text_document", "weight": 1, "name": name} for i, name in enumerate(ODD)]
    mdata.make_blend({"component": entries}, "<mix>&.json")
    made = mdata.report("<mix>&.json")
    tree = parsed(made.path)
    assert tree.find("body/h1").text == "<mix>&"
    assert not list(tree.iter("script")) and not list(tree.iter("b"))
    assert [row["component"] for row in tables(tree)[0]][:3] == ODD[:3]


def test_a_corpus_of_preprocess_tells_what_was_left_out(tmp_path):
    lines = ['{"text": "one <b> two\\u0000"}', "", '{"text": 3}', '{"text": "three"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = mdata.PreprocessOptions(
        input=(str(tmp_path / "in.jsonl"),),
        output_prefix=str(tmp_path / "x"),
        tokenizer_type="ByteTokenizer",
        on_error="skip",
        workers=1,
    )
    mdata.preprocess(options)
    tree = parsed(mdata.report(tmp_path / "x_text_document.json").path)
    left_out = tables(tree)[-1][0]
    assert left_out["component"] == "x"
    assert left_out["records taken"] == "2"
    assert int(left_out["left out"]) == sum(int(left_out[k]) for k in list(left_out)[3:-1]) == 2


def test_a_bare_pair_says_what_is_not_known(corpora):
    made = mdata.report("c4_text_document")
    assert made.path.name == "c4_text_document.report.html"
    text = "".join(parsed(made.path).itertext())
    assert "Its tokenizer is not known" in text and "Not known: no manifest says" in text
    assert "over training" not in text, "one corpus and no length: nothing to tell"
    assert list(tables(parsed(made.path))[0][0]) == ["component", "tokens", "documents"]
    row = tables(parsed(mdata.report("c4_text_document", tokens=10_000).path))[0][0]
    assert row["epochs"] == f"{10_000 / made.facts['components'][0]['tokens']:.4g}"


@pytest.mark.parametrize("documents", [[], [[]], [[0], [0]]])
def test_nothing_in_it(tmp_path, documents):
    write_pair(tmp_path / "x", documents)
    tree = parsed(mdata.report(tmp_path / "x").path)
    assert "has no token" in "".join(tree.itertext())


def test_a_training_that_cannot_be_told_of(corpora):
    blended(2, phase=[{"samples": 40}, {"shares": {"c1": 1}}])
    made = mdata.report("mix.json")
    assert "--sequence-length" in "".join(parsed(made.path).itertext())
    assert [row["achieved"] for row in tables(parsed(made.path))[0]] == ["0.00 %", "100.00 %"]
    with pytest.raises(UsageError, match="counts in samples"):
        mdata.report("mix.json", tokens=1000)


def test_a_length_that_is_not_given_is_said_to_be_ours(corpora):
    blend = blended(2)
    made = mdata.report("mix.json")
    assert made.data.assumed_length
    assert made.facts["num_samples"] == sum(corpus.num_tokens for corpus in blend.corpora)
    assert "assumed: the tokens of all corpora" in made.path.read_text()
    assert not mdata.report("mix.json", tokens=1000).data.assumed_length


def test_three_hundred_components_are_a_page_of_bounded_size(corpora):
    tokens = np.arange(600) % 50
    for i in range(300):
        write_pair(
            corpora / f"many{i:03}", [[2]] * (150 + i), tokens=np.resize(np.roll(tokens, i), 300 + 2 * i), code=8
        )
    entries = [{"path": f"many{i:03}", "weight": i + 1, "group": f"g{i % 9}"} for i in range(300)]
    phases = [
        {"tokens": 60_000},
        {"tokens": 60_000, "ramp": True, "shares": {f"many{i:03}": 301 - i for i in range(300)}},
    ]
    mdata.make_blend({"component": entries, "phase": phases}, "mix.json")
    made = mdata.report("mix.json")
    assert made.path.stat().st_size < 2_000_000
    rows = tables(parsed(made.path))[0]
    assert len(rows) == 300 + 9
    members = [row["component"] for row in rows]
    assert members[:3] == ["g0", "many000", "many009"]


def test_marks_of_epochs_that_stand_close_share_their_text(corpora):
    blended(2)
    for tokens, wanted in ((12_000, {"1 epoch", "4 epochs"}), (400_000, {"1 and 4 epochs"})):
        texts = [text.text for text in parsed(mdata.report("mix.json", tokens=tokens).path).iter("text")]
        assert {text for text in texts if re.search(r"\d epochs?$", text)} == wanted


def test_where_the_page_may_go(corpora):
    blended(2)
    before = (corpora / "mix.json").read_bytes()
    with pytest.raises(UsageError, match=r"mix.json does not end in .html"):
        mdata.report("mix.json", "mix.json")
    with pytest.raises(UsageError, match="no/where"):
        mdata.report("mix.json", "no/where/page.html")
    assert (corpora / "mix.json").read_bytes() == before
    write_pair(corpora / "c1_text_document", [[3]])
    with pytest.raises(DamageError, match="c1"):
        mdata.report("mix.json", "page.html")
    assert not (corpora / "page.html").exists()
