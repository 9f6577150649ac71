"""A corpus manifest names files beside it: pairs and tokenizers elsewhere are opened only if the user allows it."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

import mdata
from cli.mdata import main
from mdata.blend.compose import plan_blend
from mdata.dataset.prebuild import build
from mdata.manifest.io import load_manifest, save_manifest
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys

GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = ["One sentence, ", "and another.", "last " * 40]
LEADS_OUT = "outside its folder"


def forged(source: Path, target: Path, **changes: str) -> Path:
    """A manifest of the same corpus at another place, whose shard's prefix or tokenizer's folder is another."""
    known = load_manifest(source)
    shard = msgspec.structs.replace(known.shards[0], path=changes.get("shard", known.shards[0].path))
    tokenizer = msgspec.structs.replace(known.tokenizer, folder=changes.get("folder", known.tokenizer.folder))
    target.parent.mkdir(exist_ok=True)
    save_manifest(msgspec.structs.replace(known, shards=[shard], tokenizer=tokenizer), target)
    return target


@pytest.fixture
def honest(tmp_path) -> Path:
    """A corpus with its tokenizer, the private one of somebody."""
    (tmp_path / "private").mkdir()
    tokenizer = load_tokenizer("HuggingFaceTokenizer", GOLDEN / "tokenizer")
    tokens, lengths = tokenizer.encode_batch(TEXTS)
    write_pair(tmp_path / "private" / "x", [[length] for length in lengths.tolist()], tokens=np.array(tokens), code=8)
    return mdata.adopt(tmp_path / "private" / "x", tokenizer, full=True).path


@pytest.fixture
def elsewhere(honest, tmp_path) -> Path:
    """A manifest from a stranger, which names that private corpus."""
    folder = load_manifest(honest).tokenizer.folder
    made = forged(honest, tmp_path / "work" / "y.json", shard="../private/x", folder=f"../private/{folder}")
    shutil.copy(f"{honest.parent}/x.blake3", made.parent)
    return made


def read(path, **how):
    return open_by_keys(path, sequence_length=8, **how)[0]["tokens"].tolist()


DOORS = {
    "open_corpus": mdata.open_corpus,
    "open_blend": mdata.open_blend,
    "words": lambda path, **how: mdata.open_blend(["1", str(path)], **how),
    "plan_blend": lambda path, **how: plan_blend([str(path)], Path.cwd(), **how),
    "make_blend": lambda path, **how: mdata.make_blend([str(path)], path.with_name("mix.json"), **how),
    "open": read,
    "report": lambda path, **how: mdata.report(path, path.with_name("x.html"), **how),
    "build": lambda path, **how: build(path, mdata.DatasetOptions(sequence_length=8, kind=mdata.Packed(), **how)),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_asks_for_leave(elsewhere, door):
    with pytest.raises(mdata.UsageError, match=f"{LEADS_OUT}[\\s\\S]*--allow-outside"):
        DOORS[door](elsewhere)
    DOORS[door](elsewhere, allow_outside=True)


@pytest.mark.parametrize("name", ["../private/x", "./../private/x", "way/x", "way/../private/x"])
def test_every_form_of_a_name_that_leads_out(honest, tmp_path, name):
    made = forged(honest, tmp_path / "work" / "y.json", shard=name)
    (made.parent / "way").symlink_to("../private")
    with pytest.raises(mdata.UsageError, match=LEADS_OUT):
        mdata.open_corpus(made)
    assert mdata.open_corpus(made, allow_outside=True).num_documents == len(TEXTS)


def test_leave_goes_with_the_corpus(elsewhere, honest):
    corpus = pickle.loads(pickle.dumps(mdata.open_corpus(elsewhere, allow_outside=True)))
    assert corpus.allow_outside and corpus.load_tokenizer() is not None
    assert corpus.document_sequences(0)[0].tolist() == mdata.open_corpus(honest).document_sequences(0)[0].tolist()
    assert read(elsewhere, allow_outside=True) == read(honest)


def test_leave_is_no_part_of_the_data_id(honest):
    ids = {mdata.open_dataset(honest, sequence_length=8, allow_outside=allow).data_id for allow in (False, True)}
    assert len(ids) == 1


@pytest.mark.parametrize("full", [False, True])
def test_verify_tells_it_as_a_problem_and_reads_nothing_there(elsewhere, full):
    found = mdata.verify(elsewhere, full=full)
    assert [LEADS_OUT in str(problem) for problem in found.problems] == [True] and not found.bin_bytes
    found = mdata.verify(elsewhere, full=full, allow_outside=True)
    assert found.problems == () and bool(found.bin_bytes) == full


def test_a_tokenizers_folder(honest):
    folder = load_manifest(honest).tokenizer.folder
    (honest.parent.parent / "private-2").mkdir()
    shutil.move(honest.parent / folder, honest.parent.parent / "private-2" / folder)
    made = forged(honest, honest, folder=f"../private-2/{folder}")
    corpus = mdata.open_corpus(made)
    for ask in (corpus.tokenizer_files, corpus.load_tokenizer):
        with pytest.raises(mdata.UsageError, match=LEADS_OUT):
            ask()
    assert mdata.open_corpus(made, allow_outside=True).load_tokenizer() is not None


def test_a_link_among_a_tokenizers_files_shows_nothing_of_its_target(honest, tmp_path):
    """A run copies these files into its folder."""
    (tmp_path / "secret").write_text("secret")
    corpus = mdata.open_corpus(honest)
    (honest.parent / corpus.tokenizer.folder / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(mdata.UsageError, match=LEADS_OUT):
        corpus.tokenizer_files()


def test_a_blend_names_corpora_anywhere(honest, elsewhere):
    path = elsewhere.with_name("mix.json")
    mdata.make_blend(["1", str(honest)], path)
    assert mdata.open_blend(path).names and mdata.verify(path).problems == ()
    mdata.make_blend(["1", str(elsewhere)], path, allow_outside=True)
    with pytest.raises(mdata.UsageError, match=LEADS_OUT):
        mdata.open_blend(path)
    assert mdata.open_blend(path, allow_outside=True).allow_outside


def test_a_pair_of_links_is_adopted_and_read(honest, tmp_path):
    """Large files often lie on another disk, with links to them where one works."""
    (tmp_path / "links").mkdir()
    corpus = mdata.open_corpus(honest)
    whole = corpus.read(0, corpus.num_tokens).tolist()
    for ending in (".bin", ".idx"):
        (tmp_path / "links" / f"x{ending}").symlink_to(honest.with_suffix(ending))
    made = mdata.adopt(tmp_path / "links" / "x", None)
    for path in (made.path, tmp_path / "links" / "x"):
        corpus = mdata.open_corpus(path)
        assert corpus.read(0, corpus.num_tokens).tolist() == whole


WORDS = {
    "inspect": [],
    "verify": [],
    "cat": [],
    "report": ["-o", "page.html"],
    "build": ["--sequence-length", "8", "--kind", "packed"],
    "blend": ["--dry-run"],
    "trace": ["--sequence-length", "8", "--sample", "0"],
}


@pytest.mark.parametrize("command", WORDS)
def test_every_command_asks_for_leave(elsewhere, command, capsys, monkeypatch):
    monkeypatch.chdir(elsewhere.parent)
    words = [command, str(elsewhere), *WORDS[command]]
    assert main(words) == 2
    assert LEADS_OUT in capsys.readouterr().err
    assert main([*words, "--allow-outside"]) == 0
