"""`mdata blend`: one table before anything is built, every way to name the data, and changes in mid-run."""

from __future__ import annotations

import json

import msgspec
import pytest

from cli.mdata import main
from mdata import load_manifest, open_blend
from mdata.manifest.io import save_manifest
from tests.helpers.corpora import write_pair
from tests.helpers.manifests import corpus_of_pairs, some_corpus


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """web/a, web/b, books/c: 1,000, 500 and 500 tokens."""
    for name, length, count in (("web/a", 10, 100), ("web/b", 10, 50), ("books/c", 5, 100)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_pair(tmp_path / f"{name}_text_document", [[length]] * count)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *words: str, code: int = 0) -> str:
    assert main(["blend", *words]) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_the_table_shows_shares_epochs_and_what_runs_out_first(corpora, capsys):
    out = run(capsys, "0.6", "web", "0.4", "books", "-o", "mix.json", "--tokens", "4e3", "--sequence-length", "8")
    assert out.splitlines()[:6] == [
        "component        share   achieved  tokens  documents  samples   read  epochs",
        "web: 2 corpora   0.6          0.6   1,500        150      300  2,400   1.622",
        "  a              0.6667       0.4   1,000        100      200  1,600   1.613",
        "  b              0.3333       0.2     500         50      100    800   1.639",
        "books: 1 corpus  0.4          0.4     500        100      200  1,600   3.279",
        "  c              1            0.4     500        100      200  1,600   3.279",
    ]
    assert "over 500 samples; it continues after that" in out
    assert "c runs out first: it has been read once after 152 samples of the blend" in out
    assert f"mix.json: blend {load_manifest(corpora / 'mix.json').id[:16]}" in out
    assert "\nc has been read once after 500 tokens of the blend\n" in run(capsys, "books", "--dry-run")


def test_what_the_table_lacks_is_said(corpora, capsys):
    out = run(capsys, "0.6", "web", "0.4", "books", "--dry-run", "--samples", "9", "--sequence-length", "8")
    assert "no corpus is read to its end in these 9 samples\nnothing was written" in out
    out = run(capsys, "0.6", "web", "0.4", "books", "--dry-run")
    assert "give --sequence-length S and --tokens N (or --samples N) for samples and epochs of each corpus\n" in out
    assert "give --sequence-length S for samples of each" in run(capsys, "web", "--dry-run", "--tokens", "50")
    assert "give --tokens N (or --samples N) for" in run(capsys, "web", "--dry-run", "--sequence-length", "8")


def test_dry_run_and_json(corpora, capsys):
    facts = json.loads(run(capsys, "web", "--dry-run", "--json", "--exhaustive", "--sequence-length", "8"))
    assert [part["epochs"] for part in facts["components"]] == [1.0, 1.0]
    assert facts["ends"] == facts["num_samples"] == sum(part["samples"] for part in facts["components"])
    assert facts["manifest"] is None and not list(corpora.glob("*.json"))


def test_phases_are_columns(corpora, capsys):
    (corpora / "mix.toml").write_text(
        '[[component]]\npath = "web"\nweight = 1\n[[component]]\npath = "books"\nweight = 1\nname = "novels"\n'
        "[[phase]]\nsamples = 100\n[[phase]]\nshares = { web = 1 }\n"
    )
    out = run(capsys, "mix.toml", "-o", "mix.json", "--samples", "200", "--sequence-length", "8")
    assert "phase 1  phase 2" in out.splitlines()[0]
    assert out.splitlines()[1].split()[-2:] == ["0.5", "1"]
    assert "phase 1 from 0, phase 2 from 100" in out


def test_megatrons_ways_to_name_data(corpora, capsys):
    a, c = "web/a_text_document", "books/c_text_document"
    (corpora / "words.txt").write_text(f"0.7 {a}\n0.3 {c}\n")
    (corpora / "lists.json").write_text(json.dumps({"train": ["0.7", a, "0.3", c], "valid": ["1", c], "test": f"{c}"}))
    ways = [
        ["0.7", a, "0.3", c],
        ["--data-args-path", "words.txt"],
        ["--per-split-data-args-path", "lists.json"],
        ["--train-data-path", "0.7", a, "0.3", c, "--valid-data-path", "1", c, "--test-data-path", c],
    ]
    ids = []
    for way in ways:
        if "-path" in way[0] and "words.txt" not in way:
            assert f"c: {c} is also training data" in run(capsys, *way, "-o", "mix.json", code=2)
        run(capsys, *way, "--allow-overlap", "-o", "mix.json")
        blend = open_blend(corpora / "mix.json")
        ids.append(blend.manifest.id)
        assert list(blend.valid_sets) == (["c"] if "--valid-data-path" in way or "lists.json" in way else [])
    assert len(set(ids)) == 1


def test_a_change_in_mid_run(corpora, capsys):
    run(capsys, "1", "web", "1", "books", "-o", "old.json")
    words = ["--from", "old.json", "--at-sample", "40", "--sequence-length", "8", "--samples", "200", "-o", "new.json"]
    out = run(capsys, *words, "--remove", "web", "--set", "c=2")
    assert "the change at sample 40 of blend" in out and "never read" in out
    assert open_blend("new.json").continues == (open_blend("old.json").manifest.id, 40)
    assert "never read  read again from" in out
    short = [*words[:-4], *words[-2:]]
    out = run(capsys, *short, "--set", "c=2")
    assert "share  achieved  tokens  documents  phase 1" in out and "read again from" in out
    out = run(capsys, *short, "--samples", "50", "--set", "c=2")
    assert "documents  samples  read  epochs" in out and "never read\n" in out
    for length in (["--samples", "40"], ["--tokens", "300"]):
        err = run(capsys, *short, *length, "--set", "c=2", code=2)
        assert "the change comes after the end of the training" in err and "found: --at-sample 40 of" in err
    facts = json.loads(run(capsys, *words, "--json", "1", "web/a_text_document"))
    assert facts["at_sample"] == 40 and [row["part_after"] for row in facts["change"]] == [1, 0, 0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["web"], "no output file is given"),
        (["--dry-run"], "no data is given"),
        (["web", "--train-data-path", "web", "--dry-run"], "corpora are given twice"),
        (["web", "--tokens", "1.5", "--dry-run"], "'1.5' is not an integer"),
        (["web", "--tokens", "1e99999999", "--dry-run"], "'1e99999999' is not an integer from 1 to 2^62"),
        (["1e999", "web", "--dry-run"], "a share has too many digits, or too large an exponent: '1e999'"),
        (["web", "--samples", "5", "--dry-run"], "--samples needs --sequence-length"),
        (["web", "--alpha", "x", "--dry-run"], "alpha is 'x'"),
        (["web", "--alpha", "1e99", "--dry-run"], "alpha is 1e99\n  expected: at most 10"),
        (["--per-split-data-args-path", "none.json", "--dry-run"], "none.json: No such file"),
        (["--from", "old.json", "--dry-run"], "--from needs --at-sample and --sequence-length"),
        (["--from", "old.json", "--at-sample", "3", "--sequence-length", "8", "--set", "x", "--dry-run"], "NAME=VALUE"),
        (["web", "--add", "1", "books", "--at-sample", "3", "--dry-run"], "--at-sample and --add without --from"),
        (["web", "0.7", "books", "0.3", "--dry-run"], "write each weight before its prefix"),
        (["web", "--sequence-length", "5000", "--dry-run"], "the blend has 2 problems"),
        (["web", "--split-shares", "x", "--sequence-length", "8", "--dry-run"], "cannot be used\n  found: 'x'\n"),
        (["1", "web/a_text_document", "--alpha", "0.5", "--dry-run"], "alpha has nothing to divide"),
    ],
)
def test_what_cannot_be(corpora, capsys, words, text):
    assert text in run(capsys, *words, code=2)


def test_inspect_tells_phases_groups_and_changes(corpora, capsys):
    (corpora / "mix.toml").write_text(
        '[[component]]\npath = "web"\nweight = 1\nmax_epochs = 9\n[[component]]\npath = "books"\nweight = 1\n'
        "[[phase]]\nsamples = 100\n[[phase]]\ntokens = 80\nramp = true\nshares = { web = 1 }\n[[phase]]\n"
        '[valid]\nkept = "books"\n'
    )
    run(capsys, "mix.toml", "-o", "mix.json", "--sequence-length", "8", "--allow-overlap")
    words = ["--from", "mix.json", "--at-sample", "120", "--sequence-length", "8", "-o", "new.json"]
    run(capsys, *words, "books")
    assert main(["inspect", "mix.json"]) == 0
    out = capsys.readouterr().out
    assert "phase 1: 100 samples\nphase 2: a ramp of 80 tokens\nphase 3: as long as" in out
    assert "max_epochs" in out and "validation sets: kept" in out
    assert main(["inspect", "new.json"]) == 0
    assert f"continues blend {open_blend('mix.json').manifest.id[:16]} at sample 120" in capsys.readouterr().out


@pytest.fixture
def known(corpora):
    """k: a corpus whose manifest names a tokenizer; those of web and books name none."""
    write_pair(corpora / "k", [[6]] * 40)
    corpus_of_pairs(corpora / "k.json", ["k"], tokenizer=some_corpus().tokenizer)
    return "k.json"


def test_a_corpus_of_no_known_tokenizer_is_refused_or_allowed(corpora, known, capsys):
    heard = run(capsys, "0.5", known, "0.5", "books", "-o", "mix.json", code=2)
    assert (
        "corpora do not record their tokenizer" in heard and "no tokenizer recorded for books/c_text_document" in heard
    )
    assert "try: mdata adopt books/c_text_document --tokenizer-type TYPE" in heard
    assert not (corpora / "mix.json").exists()
    run(capsys, "0.5", known, "0.5", "books", "-o", "mix.json", "--tokenizer-unknown", "ok")
    assert load_manifest(corpora / "mix.json").tokenizer_unknown == "ok"
    change = ["--from", "old.json", "--at-sample", "5", "--sequence-length", "8", "-o", "new.json"]
    run(capsys, known, "-o", "old.json")
    for edit in (["--add", "0.5", "books/c_text_document"], ["1", "books"]):
        assert "--tokenizer-unknown ok" in run(capsys, *change, *edit, code=2)
        run(capsys, *change, *edit, "--tokenizer-unknown", "ok")
        assert load_manifest(corpora / "new.json").tokenizer_unknown == "ok"
    assert main(["build", "0.5", known, "0.5", "books", "-S", "8", "--kind", "packed", "--cache", "kept"]) == 2
    assert "--tokenizer-unknown ok" in capsys.readouterr().err
    allowed = ["0.5", known, "0.5", "books/c_text_document", "--tokenizer-unknown", "ok"]
    assert main(["build", *allowed, "-S", "8", "--kind", "packed", "--cache", "kept"]) == 0


def test_what_is_only_looked_at_needs_no_leave(corpora, known, capsys):
    """A manifest that was written before there was such a question is shown, reported and traced."""
    run(capsys, "0.5", known, "0.5", "books/c_text_document", "-o", "mix.json", "--tokenizer-unknown", "ok")
    save_manifest(
        msgspec.structs.replace(load_manifest(corpora / "mix.json"), tokenizer_unknown=msgspec.UNSET),
        corpora / "mix.json",
    )
    assert main(["inspect", "mix.json"]) == 0
    assert main(["report", "mix.json", "-o", "page.html"]) == 0
    assert main(["trace", "mix.json", "--sequence-length", "8", "--sample", "3"]) == 0
    assert "k" in capsys.readouterr().out


def test_edits_count_alike_however_weights_were_spelt(corpora, capsys):
    parts = []
    for words in (["1.5", "web/a_text_document", "3.5", "web/b_text_document"],
                  ["1.5000001", "web/a_text_document", "3.5000001", "web/b_text_document"]):  # fmt: skip
        run(capsys, *words, "-o", "old.json")
        change = ["--from", "old.json", "--at-sample", "5", "--sequence-length", "8", "-o", "new.json", "--json"]
        facts = json.loads(run(capsys, *change, "--add", "0.5", "books/c_text_document"))
        parts.append([round(row["part_after"], 4) for row in facts["change"]])
        shown = [row["share"] for row in facts["components"]]
        assert shown == [words[0], words[2], "0.5"]
    assert parts == [[0.2727, 0.6364, 0.0909]] * 2


def test_megatrons_list_of_one_weighted_corpus_counts_by_its_tokens(corpora, capsys):
    run(capsys, "--train-data-path", "1.0", "web/a_text_document", "-o", "mix.json")
    (part,) = load_manifest(corpora / "mix.json").components
    assert (part.share, part.set_by) == ("1000", "tokens")
    run(capsys, "1.0", "web/a_text_document", "-o", "mix.json")
    (part,) = load_manifest(corpora / "mix.json").components
    assert (part.share, part.set_by) == ("1.0", "user")
