"""Split, sample and shuffle: the documents of the twin, each with its origin, and what is refused."""

from __future__ import annotations

import json
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from cli.mdata import main
from mdata.corpus.documents import DocumentReader
from mdata.errors import DamageError, UsageError
from mdata.order.permutation import Permutation
from mdata.preprocessing.preprocess_options import PreprocessOptions
from mdata.rewriting import subsets, taken_documents
from mdata.rewriting.merge import merge
from mdata.rewriting.shuffle import shuffle
from mdata.rewriting.subsets import sample, split
from mdata.util.random_keys import derive_key
from tests.helpers.corpora import write_pair
from tests.helpers.examples import SOAK, examples
from tests.helpers.failures import assert_what_is_visible_is_true, crash_at, durable_calls
from tests.mdata.preprocessing.test_parts import make_parts
from tests.reference.subsets import sample_of, split_of


def bare(folder, documents):
    """A pair of another program; tokens say their place."""
    folder.mkdir(exist_ok=True)
    lengths = [length for document in documents for length in document]
    write_pair(folder / "x", documents, tokens=np.arange(sum(lengths)))
    return folder / "x"


def contents(path):
    """Each document as its sequences, with its origin."""
    corpus = mdata.open_corpus(path)
    documents = DocumentReader(corpus)
    return [
        ([ids.tolist() for ids in corpus.document_sequences(n)], documents.origin(n))
        for n in range(corpus.num_documents)
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus of three shards, by reference, with origins of two files and rows left out."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, seed in (("a", 1), ("b", 2)):
        lines = [json.dumps({"text": f"{name}{n} " * (n * seed % 9)}) if n % 5 else "{}" for n in range(90)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    for number in (1, 2, 3):
        mdata.preprocess(
            PreprocessOptions(
                input=(str(folder / "a.jsonl"), str(folder / "b.jsonl")),
                output_prefix=str(folder / "c"),
                tokenizer_type="ByteTokenizer",
                shard=f"{number}/3",
                chunk_bytes=300,
                on_error="skip",
                workers=1,
            )
        )
    return merge(str(folder / "c"))[0].path


DOCUMENTS = st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=20).filter(any)
SHARES = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum)


@examples(15)
@given(documents=DOCUMENTS, shares=SHARES, batch=st.integers(1, 9))
def test_a_split_has_the_documents_of_the_twin(tmp_path_factory, documents, shares, batch):
    folder = tmp_path_factory.mktemp("s")
    whole = contents(bare(folder, documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken_documents, "_TOKENS_AT_ONCE", batch)
        patch.setattr(taken_documents, "_DOCUMENTS_AT_ONCE", batch)
        patch.setattr(subsets, "_BLOCK", batch)
        parts = split(folder / "x", str(folder / "y"), shares=[str(share) for share in shares])
    expected = split_of([sum(document) for document in documents], [Fraction(share) for share in shares])
    found = [contents(prefix) for prefix in parts]
    assert found == [[whole[number] for number in part] for part in expected]


@examples(15)
@given(documents=DOCUMENTS, seed=st.integers(0, 9), share=st.floats(0, 1), batch=st.integers(1, 9))
def test_a_sample_has_the_documents_of_the_twin(tmp_path_factory, documents, seed, share, batch):
    folder = tmp_path_factory.mktemp("s")
    path = bare(folder, documents)
    whole, sizes = contents(path), [sum(document) for document in documents]
    tokens = max(1, round(share * sum(sizes)))
    key = derive_key("sample-documents", seed, mdata.open_corpus(path).id)
    order = Permutation(len(sizes), key).forward(np.arange(len(sizes))).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken_documents, "_TOKENS_AT_ONCE", batch)
        patch.setattr(subsets, "_BLOCK", batch)
        prefix, _ = sample(path, str(folder / "y"), tokens=tokens, seed=seed)
    assert contents(prefix) == [whole[number] for number in sample_of(sizes, order, tokens=tokens)]


@examples(8)
@given(documents=DOCUMENTS, seed=st.integers(0, 9), bucket=st.integers(1, 300), batch=st.integers(1, 9))
def test_a_shuffle_is_the_permutation_whatever_the_buckets(tmp_path_factory, documents, seed, bucket, batch):
    folder = tmp_path_factory.mktemp("s")
    path = bare(folder, documents)
    whole = contents(path)
    key = derive_key("shuffle-documents", seed, mdata.open_corpus(path).id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken_documents, "_TOKENS_AT_ONCE", batch)
        prefix, _ = shuffle(path, str(folder / "y"), seed=seed, bucket_bytes=bucket)
    order = Permutation(len(whole), key).forward(np.arange(len(whole))).tolist()
    assert contents(prefix) == [whole[number] for number in order]
    assert not list(folder.glob(".*"))


PIECES = ("", " ", "x", "\u00e9", "one\ntwo", "\ufeff", "word " * 20, "\U0001f642")


def random_job(random, folder):
    """Texts or conversations in several parts, merged: the results, of which the second is what was held out."""
    chat, lines = random.random() < 0.4, []
    for _ in range(random.choice((5, 40))):
        said = ["".join(random.choices(PIECES, k=random.randrange(6))) for _ in range(4)]
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        lines.append(json.dumps({"x": turns if chat else said[0]}))
    (folder / "in.jsonl").write_text("\n".join(lines))
    options = PreprocessOptions(
        input=str(folder / "in.jsonl"), output_prefix=str(folder / "c"), tokenizer_type="ByteTokenizer",
        json_keys=("x",), workers=1, chunk_bytes=random.choice((80, 400)), append_eod=random.random() < 0.5,
        holdout=random.choice(("0", "0.3")), **({"chat": True, "chat_template": "plain"} if chat else {}),
    )  # fmt: skip
    make_parts(options, random.choice((1, 2, 4)))
    return [result.path for result in merge(str(folder / "c"), copy=random.random() < 0.5)]


def random_operation(random, path, documents, prefix):
    """(what makes corpora of the documents of one, the documents of each of them by the twins)."""
    sizes = [sum(map(len, sequences)) for sequences, _ in documents]
    seed, corpus, operation = (
        random.randrange(5),
        mdata.open_corpus(path),
        random.choice(("split", "sample", "shuffle")),
    )

    def order(name):
        permutation = Permutation(max(1, len(sizes)), derive_key(name, seed, corpus.id))
        return permutation.forward(np.arange(len(sizes))).tolist()

    if operation == "split":
        shares = [*random.choices(("0", "0.1", "1/3", "2", "98"), k=random.randrange(4)), "1"]
        numbers = split_of(sizes, list(map(Fraction, shares)))
        return lambda: list(split(path, prefix, shares=shares)), [[documents[n] for n in part] for part in numbers]
    if operation == "sample" and sum(sizes):
        tokens = random.choice((random.randint(1, sum(sizes)), sum(sizes)))
        numbers = sample_of(sizes, order("sample-documents"), tokens=tokens)
        return lambda: [sample(path, prefix, tokens=tokens, seed=seed)[0]], [[documents[n] for n in numbers]]
    bucket = random.choice((50, 1000))
    numbers = order("shuffle-documents")
    return lambda: [shuffle(path, prefix, seed=seed, bucket_bytes=bucket)[0]], [[documents[n] for n in numbers]]


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(4 * SOAK))
def test_random_operations_one_after_another_are_the_twins_though_killed(tmp_path, seed):
    random = Random(seed)
    held = {path: contents(path) for path in random_job(random, tmp_path)}
    for step in range(5):
        path, documents = random.choice(list(held.items()))
        (folder := tmp_path / str(step)).mkdir()
        make, expected = random_operation(random, path, documents, str(folder / "y"))
        if random.random() < 0.4:
            crash_at(random.randrange(60), make, removals=True)
            assert_what_is_visible_is_true(folder)
        held |= dict(zip(make(), expected, strict=True))
    for path, documents in held.items():
        assert mdata.verify(path, full=True).problems == ()
        assert contents(path) == documents, path


def test_origins_are_kept_over_shards(made, tmp_path):
    whole = contents(made)
    assert len({origin.path for _, origin in whole}) == 2
    parts = split(made, str(tmp_path / "c"), shares=["2", "1", "0.5"], names=["train", "valid", "test"])
    assert [prefix.name for prefix in parts] == ["c_train_document", "c_valid_document", "c_test_document"]
    assert [one for prefix in parts for one in contents(prefix)] == whole
    drawn, _ = sample(made, str(tmp_path / "few"), tokens=500)
    more, _ = sample(made, str(tmp_path / "more"), tokens=900)
    shuffled, manifest = shuffle(made, str(tmp_path / "mixed"), bucket_bytes=400)
    key = [json.dumps(one) for one in whole]
    assert sorted(json.dumps(one) for one in contents(shuffled)) == sorted(key) and contents(shuffled) != whole
    few = [json.dumps(one) for one in contents(drawn)]
    assert set(few) < {json.dumps(one) for one in contents(more)} < set(key) and few == [
        one for one in key if one in few
    ]
    for prefix in (*parts, drawn, shuffled):
        assert not mdata.verify(prefix, full=True).problems
    assert manifest.provenance.options["shuffle_seed"] == 0
    assert sum(manifest.statistics.document_lengths) == len(whole)


def test_the_order_does_not_depend_on_anything_but_corpus_and_seed(made, tmp_path):
    bins = []
    for number, seed in enumerate((3, 3, 4)):
        prefix, _ = shuffle(made, str(tmp_path / str(number)), seed=seed, bucket_bytes=100 + 900 * number)
        bins.append(prefix.with_suffix(".bin").read_bytes())
    assert bins[0] == bins[1] != bins[2]


def test_parts_of_a_split_may_train_and_evaluate_but_not_beside_their_whole(made, tmp_path):
    train, valid = split(made, str(tmp_path / "c"), shares=["9", "1"], names=["train", "valid"])
    mdata.make_blend([str(train), str(valid)], tmp_path / "both.json")
    with pytest.raises(UsageError, match="both contain documents of"):
        mdata.make_blend([str(made), str(valid)], tmp_path / "wrong.json")


@pytest.mark.parametrize(
    "command",
    [
        lambda path, out: shuffle(path, out),
        lambda path, out: sample(path, out, tokens=9),
        lambda path, out: split(path, out, shares=["1"], names=["s"]),
    ],
    ids=["shuffle", "sample", "split"],
)
def test_origins_that_changed_are_not_carried_into_the_result(made, tmp_path, command):
    for file in made.parent.glob("c*text_document*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    sidecar = tmp_path / "c_text_document.origins"
    content = bytearray(sidecar.read_bytes())
    content[40] += 1  # the row of the first run
    sidecar.write_bytes(content)
    with pytest.raises(DamageError, match=r"c_text_document\.origins: its content was changed"):
        command(tmp_path / made.name, str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("command", [lambda p, o: shuffle(p, o), lambda p, o: split(p, o, shares=["1"], names=["s"])])
def test_one_that_fails_anywhere_leaves_nothing(made, tmp_path, monkeypatch, command):
    with durable_calls(monkeypatch) as calls:
        command(made, str(tmp_path / "whole"))
    for number in range(len(calls.seen)):
        folder = tmp_path / str(number)
        with durable_calls(monkeypatch, number), pytest.raises(mdata.MdataError):
            command(made, str(folder / "x"))
        # After its manifest only the folder's sync is left, and the corpus is whole.
        for path in folder.glob("*.json"):
            assert not mdata.verify(path, full=True).problems
        assert list(folder.glob("*.json")) or not [one for one in folder.iterdir() if one.suffix in (".bin", ".idx")]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, o: split(p, o, shares=["0", "0"]), "not all zero"),
        (lambda p, o: split(p, o, shares=["x"]), "numbers of 0 or more, such as"),
        (lambda p, o: split(p, o, shares=["1e99999999", "1"]), "numbers of 0 or more, such as"),
        (lambda p, o: split(p, o, shares=["1", "1"], names=["a"]), "2 different names"),
        (lambda p, o: split(p, o, shares=["1", "1"], names=["a", "a"]), "2 different names"),
        (lambda p, o: sample(p, o, tokens=10**9), "tokens=1000000000"),
        (lambda p, o: sample(bare(p.parent / "empty", [[0], []]), o, tokens=1), "empty/x has no tokens"),
        (lambda p, o: shuffle(p.with_name("nothing"), o), "neither a manifest nor"),
    ],
)
def test_what_cannot_be_done_is_named(made, tmp_path, call, message):
    with pytest.raises(UsageError, match=message):
        call(made, str(tmp_path / "x"))
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(made, tmp_path):
    shuffle(made, str(tmp_path / "x"))
    before = {path: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.glob("x*")}
    for command, reason in (
        (lambda: shuffle(made, str(tmp_path / "x"), seed=1), "shuffle_seed was 0, is 1"),
        (lambda: sample(made, str(tmp_path / "x"), tokens=9), "sample_of was None"),
    ):
        with pytest.raises(UsageError, match=f"already exists and is not this(.|\n)*{reason}") as caught:
            command()
        assert "remove" not in str(caught.value)
    (tmp_path / "y_document.bin").write_bytes(b"of another program")
    with pytest.raises(UsageError, match=r"y_document\.bin already exists(.|\n)*it has no manifest"):
        shuffle(made, str(tmp_path / "y"))
    assert before == {path: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.glob("x*")}
    assert sorted(path.name for path in tmp_path.iterdir() if path not in before) == ["y_document.bin"]


def test_a_corpus_without_origins_is_not_taken_for_another_sample_split_or_shuffle(tmp_path):
    """It has no options that say how it was made, only a note."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = bare(tmp_path / "one", [[1], [2], [3], [4]])
    two = bare(tmp_path / "two", [[4], [3], [2], [1]])
    sample(one, str(tmp_path / "a"), tokens=6, seed=1)
    split(one, str(tmp_path / "b"), shares=["1", "1"], names=["x", "y"])
    shuffle(one, str(tmp_path / "c"), seed=1)
    before = {path: path.read_bytes() for path in tmp_path.glob("*_document.*")}
    for command, reason in (
        (lambda: sample(one, str(tmp_path / "a"), tokens=6, seed=2), "sample_seed was 1, is 2"),
        (lambda: sample(one, str(tmp_path / "a"), tokens=4, seed=1), "sample_tokens was 6, is 4"),
        (lambda: sample(two, str(tmp_path / "a"), tokens=6, seed=1), "sample_of was"),
        (lambda: split(one, str(tmp_path / "b"), shares=["1", "3"], names=["x", "y"]), "split_of was"),
        (lambda: shuffle(one, str(tmp_path / "c"), seed=2), "shuffle_seed was 1, is 2"),
    ):
        with pytest.raises(UsageError, match=f"already exists and is not this(.|\n)*{reason}"):
            command()
    sample(one, str(tmp_path / "a"), tokens=6, seed=1)
    assert {path: path.read_bytes() for path in tmp_path.glob("*_document.*")} == before


def test_the_command_line(made, tmp_path, capsys):
    assert main(["split", str(made), "--output", str(tmp_path / "s"), "--shares", "3", "1", "--json"]) == 0
    assert [row["documents"] > 0 for row in json.loads(capsys.readouterr().out)["corpora"]] == [True, True]
    assert main(["sample", str(made), "--output", str(tmp_path / "d"), "--tokens", "1e2"]) == 0
    assert main(["shuffle", str(made), "--output", str(tmp_path / "m"), "--seed", "5"]) == 0
    assert "m_document.json" in capsys.readouterr().out
    assert main(["shuffle", str(made), "--output-prefix", str(tmp_path / "m"), "--seed", "5"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert told == ["mdata shuffle --output-prefix is now --output; the old name works until 0.2"]
    assert main(["shuffle", "--help"]) == 0
    assert "--output-prefix" not in capsys.readouterr().out


def test_an_address_is_no_place_for_results(tmp_path, monkeypatch):
    """A disk would take it as folders "s3:" and "b", which a real address then seems to name."""
    monkeypatch.chdir(tmp_path)
    whole = bare(tmp_path, [[1, 2], [3]])
    for prefix in ("s3://b/x", "s3:/b/x"):
        with pytest.raises(UsageError, match="begins like an address in object storage"):
            split(whole, prefix, shares=["1", "1"])
        with pytest.raises(UsageError, match="begins like an address in object storage"):
            mdata.make_blend([str(whole)], f"{prefix}.json")
    assert not list(tmp_path.glob("s3*"))
