"""Preprocess: equal to the reference, to a slow twin and to itself however the work is divided; no half-made files."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import BadInputError, ResourceError, UsageError
from mdata.preprocessing.corpus_writer import length_histogram
from mdata.preprocessing.encode import EncodeSpec, encode_documents
from mdata.preprocessing.partitions import Partitions
from mdata.progress import Silent
from mdata.sources.record_batch import Column, ReadSpec
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.examples import examples
from tests.helpers.manifests import assert_valid
from tests.helpers.processes import children_of
from tests.mdata.preprocessing.twin import documents_of, pair_of

GOLDEN = Path(__file__).parents[2] / "golden"
TOKENIZER = load_tokenizer(TokenizerSpec(type="HuggingFaceTokenizer", model=str(GOLDEN / "tokenizer")))


def options(folder: Path, **changes) -> mdata.PreprocessOptions:
    given = {
        "input": (str(GOLDEN / "corpus.jsonl"),),
        "output_prefix": str(folder / "out"),
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(GOLDEN / "tokenizer"),
    }
    return mdata.PreprocessOptions(**{**given, **changes})


def run(folder: Path, **changes) -> mdata.CorpusManifest:
    """Preprocess with one key; every manifest must fit the schema and pass a full verification."""
    result = mdata.preprocess(options(folder, **changes))
    ((path, manifest),) = zip(result.paths.values(), result.manifests.values(), strict=True)
    assert_valid(path)
    assert mdata.verify(path, full=True).problems == ()
    return manifest


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def pair(folder: Path, name: str = "out_text_document") -> tuple[bytes, bytes]:
    return (folder / f"{name}.bin").read_bytes(), (folder / f"{name}.idx").read_bytes()


@pytest.mark.parametrize("seconds", [-11_644_473_600, -1, 1 << 34])
def test_inputs_of_any_time(tmp_path, seconds):
    """A time before 1970 or after 2262 made a manifest that nothing could read."""
    source = tmp_path / "a.jsonl"
    source.write_bytes((GOLDEN / "corpus.jsonl").read_bytes())
    os.utime(source, (seconds, seconds))
    assert source.stat().st_mtime == seconds, "the file system has other times"
    first = run(tmp_path, input=(str(source),))
    assert run(tmp_path, input=(str(source),)) == first


@pytest.mark.parametrize("append_eod", [False, True])
def test_golden_files(tmp_path, append_eod):
    manifest = run(tmp_path, append_eod=append_eod)
    eod = TOKENIZER.eod if append_eod else None
    assert pair(tmp_path) == pair_of(documents_of(GOLDEN / "corpus.jsonl", TOKENIZER, eod=eod), code=8)
    hashes = json.loads((GOLDEN / "hashes.json").read_text())["with_eod" if append_eod else "plain"]
    found = {name: hashlib.sha256(data).hexdigest() for name, data in zip(("bin", "idx"), pair(tmp_path), strict=True)}
    assert {**found, "id": manifest.id} == hashes


def oracle_cases(folder: Path) -> list[dict]:
    cases = json.loads((folder / "oracle/preprocess/cases.json").read_text())["cases"]
    return [case for case in cases if "HuggingFaceTokenizer" in case["options"]]


def test_the_references_hugging_face_cases(tmp_path, oracles):
    cases = oracle_cases(oracles)
    assert len(cases) == 7
    for case in cases:
        words = case["options"]
        after = {word: words[i + 1] for i, word in enumerate(words[:-1])}
        bare = "--tokenizer-hf-no-include-special-tokens" in words
        folder = tmp_path / case["id"]
        run(
            folder,
            input=(str(oracles / after["--input"]),),
            output_prefix=str(folder / "d"),
            tokenizer_model=str(oracles / after["--tokenizer-model"]),
            tokenizer_options=(("include_special_tokens", False),) if bare else (),
            append_eod="--append-eod" in words,
            chunk_bytes=5000,
        )
        for output in case["outputs"]:
            data = (folder / Path(output["name"]).name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == output["sha256"], (case["id"], output["name"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder where the golden corpus was read as one chunk, and its manifest."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, append_eod=True)


@examples(20)
@given(chunk_bytes=st.integers(1, 700))
def test_unit_size_changes_nothing(tmp_path_factory, whole, loaded_once, chunk_bytes):
    """Only the manifest, which records the size of the chunks that inputs were hashed by, may differ."""
    folder = tmp_path_factory.mktemp("units")
    found = run(folder, append_eod=True, chunk_bytes=chunk_bytes)
    whole, expected = whole
    assert (found.id, pair(folder)) == (expected.id, pair(whole))
    assert (folder / "out_text_document.origins").read_bytes() == (whole / "out_text_document.origins").read_bytes()


@pytest.mark.parametrize("workers", [2, 7])
def test_workers_change_nothing(tmp_path, workers):
    for name, number in (("one", 1), ("many", workers)):
        run(tmp_path / name, append_eod=True, workers=number, chunk_bytes=40)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_compressed_input_gives_the_same_tokens(tmp_path):
    text = (GOLDEN / "corpus.jsonl").read_bytes()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(text[:99]) + gzip.compress(text[99:]))
    plain = run(tmp_path / "plain")
    packed = run(tmp_path / "packed", input=(str(tmp_path / "in.jsonl.gz"),), workers=2, chunk_bytes=64)
    assert pair(tmp_path / "plain") == pair(tmp_path / "packed")
    assert packed.id == plain.id and packed.provenance != plain.provenance


@given(
    documents=st.lists(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=4), max_size=6
    ),
    with_eod=st.booleans(),
)
@examples(60)
def test_documents_equal_the_slow_twin(tmp_path_factory, documents, with_eod):
    path = tmp_path_factory.mktemp("twin") / "x.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    eod = TOKENIZER.eod if with_eod else None
    expected = documents_of(path, TOKENIZER, eod=eod)
    sentences = [text for document in documents for text in document]
    column = Column(sentences, np.cumsum([len(document) for document in documents], dtype=int).tolist())
    found = encode_documents(column, TOKENIZER, spec=EncodeSpec(ReadSpec(), eod, "uint16"))
    ends = [0, *found.document_ends.tolist()]
    sequences = np.split(found.tokens, np.cumsum(found.lengths)[:-1]) if len(found.lengths) else []
    assert [[s.tolist() for s in sequences[a:b]] for a, b in itertools.pairwise(ends)] == expected
    assert found.text_bytes.tolist() == [sum(len(text.encode()) for text in document) for document in documents]


def test_manifest_says_what_was_made(tmp_path):
    manifest = run(tmp_path, append_eod=True)
    documents = documents_of(GOLDEN / "corpus.jsonl", TOKENIZER, eod=TOKENIZER.eod)
    (shard,) = manifest.shards
    sequences = [ids for document in documents for ids in document]
    assert (shard.documents, shard.sequences) == (10, len(sequences))
    assert shard.tokens == sum(map(len, sequences)) == shard.bytes // 2
    assert shard.largest_id == max(max(ids) for ids in sequences)
    assert manifest.provenance.records == 10
    bins = [0] * 65
    for document in documents:
        bins[sum(map(len, document)).bit_length()] += 1
    assert manifest.statistics.document_lengths == bins[: len(manifest.statistics.document_lengths)]
    assert sum(manifest.statistics.document_lengths) == 10
    assert manifest.tokenizer.fingerprint == TOKENIZER.fingerprint
    kept = tmp_path / manifest.tokenizer.folder
    assert (kept / "tokenizer.json").read_bytes() == (GOLDEN / "tokenizer" / "tokenizer.json").read_bytes()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_length_histogram_is_by_binary_digits(lengths):
    arrays = (np.array(lengths, np.int64), np.arange(1, len(lengths) + 1, dtype=np.int64))
    found = length_histogram(*arrays)
    expected = [0] * 65
    for length in lengths:
        expected[length.bit_length()] += 1
    assert found.tolist() == expected


def test_several_keys_each_give_a_corpus(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": "one", "b": ["two", "three"]}\n{"b": "", "a": "four"}\n')
    result = mdata.preprocess(options(tmp_path, input=(str(tmp_path / "x.jsonl"),), json_keys=("b", "a")))
    assert list(result.manifests) == ["b", "a"]
    for key in "ab":
        expected = pair_of(documents_of(tmp_path / "x.jsonl", TOKENIZER, key=key), code=8)
        assert pair(tmp_path, f"out_{key}_document") == expected


def test_token_type_follows_the_vocabulary_size(tmp_path):
    """Megatron's rule: uint16 below 65500 entries, int32 from there on."""
    for size, dtype in ((65499, "uint16"), (65500, "int32")):
        folder = tmp_path / str(size)
        folder.mkdir()
        words = {f"w{i}": i for i in range(size)}
        model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
        definition = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(definition))
        (folder / "x.jsonl").write_text('{"text": "w1 w65000 w2"}\n')
        manifest = run(folder, input=(str(folder / "x.jsonl"),), tokenizer_model=str(folder))
        assert manifest.dtype == dtype
        assert mdata.open_corpus(folder / "out_text_document.json").read(0, 3).tolist() == [1, 65000, 2]


def test_empty_input_gives_an_empty_corpus(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"")
    manifest = run(tmp_path, input=(str(tmp_path / "x.jsonl"),))
    assert (manifest.shards[0].tokens, manifest.shards[0].largest_id) == (0, None)


def test_a_moved_folder_stays_valid(tmp_path):
    run(tmp_path / "here", append_eod=True)
    (tmp_path / "far" / "away").mkdir(parents=True)
    shutil.move(tmp_path / "here", tmp_path / "far" / "away")
    path = tmp_path / "far" / "away" / "here" / "out_text_document.json"
    assert mdata.verify(path, full=True).problems == ()
    assert mdata.open_corpus(path).load_tokenizer().fingerprint == TOKENIZER.fingerprint


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_record_has_its_row_in_the_file_and_nothing_looks_finished(tmp_path, workers):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(90)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:70], '{"text": 7}', *lines[70:]]))
    (tmp_path / "first.jsonl").write_text("\n".join(lines))
    inputs = (str(tmp_path / "first.jsonl"), str(tmp_path / "in.jsonl"))
    with pytest.raises(BadInputError, match=r"/in\.jsonl:71: key 'text' holds a number") as caught:
        mdata.preprocess(options(tmp_path / "out", input=inputs, workers=workers, chunk_bytes=100))
    assert "Traceback" not in str(caught.value)
    left = contents(tmp_path / "out")
    assert left and all(name.startswith(".") and "lock" not in name for name in left)


IDS = [[5, 0, 299], [], [7], [1] * 300]
PLACES = [{"ids": ids, "lang": "de" if number == 2 else "en", "in": {"ids": ids}} for number, ids in enumerate(IDS)]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_columns_of_token_ids_are_written_as_they_are(ending, tmp_path):
    path = tmp_path / f"x.{ending}"
    table = pyarrow.Table.from_pylist(PLACES)
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in PLACES))
    elif ending == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        pyarrow.feather.write_feather(table, path)
    eod = TOKENIZER.eod
    for key, where in (("ids", None), ("in.ids", "lang = 'en'")):
        manifest = run(
            tmp_path, input=path, json_keys=(key,), tokens=True, append_eod=True, where=where, overwrite=True
        )
        corpus = mdata.open_corpus(tmp_path / f"out_{key}_document.json")
        found = [corpus.document(number).tolist() for number in range(manifest.shards[0].documents)]
        assert found == [[*ids, eod] if ids else [] for ids in (IDS if where is None else [*IDS[:2], IDS[3]])]
    assert manifest.provenance.options["tokens"] is True and corpus.tokenizer_fingerprint == TOKENIZER.fingerprint


def test_bad_token_ids_spoil_no_others(tmp_path):
    values = [[1], "text", [1, "2"], [-1], [1.5], [True], [1 << 40], [TOKENIZER.vocab_size], None, [2]]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"ids": value}) + "\n" for value in values))
    manifest = run(tmp_path, input=tmp_path / "x.jsonl", json_keys=("ids",), tokens=True, on_error="skip")
    assert manifest.provenance.skipped == {"bad-text": 1, "bad-value": 7}
    assert (manifest.shards[0].documents, manifest.shards[0].tokens) == (2, 2)
    pyarrow.parquet.write_table(pyarrow.table({"ids": [[1.0]]}), tmp_path / "x.parquet")
    with pytest.raises(UsageError, match=r"column 'ids' holds list<.*double>\n  expected: lists of integers"):
        run(tmp_path / "o", input=tmp_path / "x.parquet", json_keys=("ids",), tokens=True)
    (tmp_path / "x.csv").write_text("ids\n1\n")
    with pytest.raises(UsageError, match=r"x\.csv is csv\n  expected: jsonl, parquet or Arrow, for lists of token ids"):
        run(tmp_path / "o", input=tmp_path / "x.csv", json_keys=("ids",), tokens=True)
    with pytest.raises(UsageError, match="chat needs text, but lists of token ids are read"):
        run(tmp_path, input=tmp_path / "x.jsonl", json_keys=("ids",), tokens=True, chat=True)


def numbered(folder: Path, count: int = 40) -> tuple[Path, Path, list[list[int]]]:
    """Two files of `count` rows, in which row n has n % 7 + 1 words; the third row is bad. Also the words as tokens."""
    lines = [json.dumps({"text": " ".join(map(str, range(n % 7 + 1)))}) for n in range(2 * count)]
    lines[2] = "bad"
    (folder / "a.jsonl").write_text("\n".join(lines[:count]) + "\n")
    (folder / "b.jsonl").write_text("\n".join(lines[count:]))
    return folder / "a.jsonl", folder / "b.jsonl", [list(range(n % 7 + 1)) for n in range(2 * count)]


def stored(folder: Path) -> list[list[int]]:
    corpus = mdata.open_corpus(folder / "out_text_document.json")
    return [corpus.document(n).tolist() for n in range(corpus.manifest.shards[0].documents)]


@pytest.mark.parametrize(
    ("first", "limit", "rows", "workers"),
    [(3, None, 80, 1), (5, 20, 40, 2), (38, 4, 80, 1), (0, 0, 0, 1), (3, 1000, 80, 2), (99, 1, 80, 1), (41, 1, 80, 1)],
)
def test_skip_and_limit_count_rows_over_all_inputs(first, limit, rows, workers, tmp_path):
    a, b, words = numbered(tmp_path)
    null = {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "tokenizer_options": (("vocab_size", 9),)}
    # Two chunks for a file: what is behind the limit is not read, whatever the workers have begun.
    manifest = run(tmp_path, input=(a, b), skip=first, limit=limit, workers=workers, **null)
    assert stored(tmp_path) == words[first : None if limit is None else first + limit]
    assert sum(file.rows for file in manifest.provenance.inputs) == rows
    recorded = manifest.provenance.options
    assert (recorded.get("skip", 0), recorded.get("limit")) == (first, limit)


def test_a_bad_row_in_the_range_stops_the_run(tmp_path):
    a, _, _ = numbered(tmp_path)
    byte = {"tokenizer_type": "ByteTokenizer", "tokenizer_model": None}
    with pytest.raises(mdata.BadInputError, match=r"a\.jsonl:3: not JSON"):
        run(tmp_path, input=a, limit=3, **byte)
    run(tmp_path, input=a, limit=2, **byte)


@pytest.mark.parametrize("eod", [False, True])
def test_documents_outside_the_limits_of_tokens_are_left_out(eod, tmp_path):
    a, _, words = numbered(tmp_path)
    null = {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "tokenizer_options": (("vocab_size", 9),)}
    manifest = run(
        tmp_path, input=a, append_eod=eod, min_tokens=2, max_tokens=4, on_error="skip", **null
    )  # fmt: skip
    kept = [row for number, row in enumerate(words[:40]) if 2 <= len(row) <= 4 and number != 2]
    assert stored(tmp_path) == [[*row, 8] if eod else row for row in kept]
    assert manifest.provenance.filtered == 39 - len(kept)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_fault_of_the_input_stops_the_run(tmp_path, workers):
    """A damaged end that was read ahead, or a worker that was faster, does not hide an earlier bad row."""
    rows = [json.dumps({"text": f"document {i}", "n": i * 7919 % 10007}) for i in range(60_000)]
    rows[20_000] = '{"text": 7}'
    rows[40_000] = "not JSON"
    packed = gzip.compress("\n".join(rows).encode())
    (tmp_path / "x.jsonl.gz").write_bytes(packed[: len(packed) * 15 // 16])
    job = options(tmp_path / "out", input=(str(tmp_path / "x.jsonl.gz"),), workers=workers, chunk_bytes=30_000)
    with pytest.raises(BadInputError, match=r"x\.jsonl\.gz:20001: "):
        mdata.preprocess(job)


class KillOne(Silent):
    """Kills a worker when the first result is in; other children, such as the pool of ranks, are left alone."""

    def __init__(self) -> None:
        self.killed = False
        self.others = set(multiprocessing.active_children())

    def advance(self, amount, **totals) -> None:
        if not self.killed:
            self.killed = True
            (fork_server,) = (child for child in multiprocessing.active_children() if child not in self.others)
            os.kill(children_of(fork_server.pid)[0], signal.SIGKILL)


def test_a_dead_worker_is_named_and_the_run_continues(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "some words of text"}\n' * 20000)
    before = {child.pid for child in multiprocessing.active_children()}
    changes = {"input": (str(tmp_path / "x.jsonl"),), "chunk_bytes": 4000}
    job = options(tmp_path / "out", **changes, workers=2)
    with pytest.raises(
        ResourceError, match=r"a worker process died while it read .*x\.jsonl, chunk \d+ \(\d+ to \d+\)"
    ):
        mdata.preprocess(job, KillOne())
    assert {child.pid for child in multiprocessing.active_children()} <= before
    assert not list((tmp_path / "out").glob("out*"))
    assert mdata.preprocess(job).resumed
    run(tmp_path / "whole", **changes)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_signals_are_as_before(tmp_path):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    run(tmp_path, workers=2, chunk_bytes=100)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"limit": -1}, "limit=-1"),
        ({"skip": 1, "shard": "1/2"}, "cannot be combined with shard"),
        ({"min_tokens": 3, "max_tokens": 2}, "max_tokens=2 is below min_tokens=3"),
        ({"workers": 0}, "workers=0"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
        ({"json_keys": ()}, "json_keys is empty"),
        ({"json_keys": ("a", "a")}, "names a key twice: a a"),
        ({"json_keys": ("a/b",)}, "key 'a/b' cannot be part of a file name"),
        ({"output_prefix": "x/"}, "output prefix 'x/' has no name"),
        ({"limit": -1}, "limit=-1"),
        ({"skip": 1, "shard": "1/2"}, "cannot be combined with shard"),
        ({"min_tokens": 3, "max_tokens": 2}, "max_tokens=2 is below min_tokens=3"),
        ({"output_prefix": "x\ny"}, "has characters that cannot be printed"),
        ({"input": ("nowhere.jsonl",)}, "nowhere.jsonl: No such file"),
        ({"tokenizer_type": "GPT2BPETokenizr"}, "no tokenizer type 'GPT2BPETokenizr'"),
        ({"tokenizer_model": "nowhere"}, "no folder or file nowhere"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(tmp_path, changes, text):
    with pytest.raises(UsageError, match=text):
        mdata.preprocess(options(tmp_path, **changes))
    assert contents(tmp_path) == {}


def test_append_eod_needs_an_eod(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "tokenizer" / "tokenizer.json").read_bytes())
    with pytest.raises(UsageError, match="has no end-of-document token"):
        mdata.preprocess(options(tmp_path / "o", tokenizer_model=str(tmp_path), append_eod=True))


def test_result_names():
    given = options(Path("a"), output_prefix="d/x", json_keys=("body",))
    assert Partitions(1, None, False).prefixes(given) == {"body": Path("d/x_body_document")}
    assert Partitions(2, None, True).prefixes(given) == {
        "body/part0": Path("d/x_0_body_document"),
        "body/part1": Path("d/x_1_body_document"),
        "body/holdout": Path("d/x_holdout_body_document"),
        "body": Path("d/x_body_document"),
    }


ASK_WORKERS = """
import multiprocessing, sys
import mdata
from mdata.progress import Silent

class Ask(Silent):
    def advance(self, amount, **totals):
        (fork_server,) = multiprocessing.active_children()
        workers = []
        while len(workers) < 2:
            workers = open(f"/proc/{fork_server.pid}/task/{fork_server.pid}/children").read().split()
        for name, pid in zip(("fork server", "one", "two"), (fork_server.pid, *workers), strict=True):
            status = open(f"/proc/{pid}/status").read()
            blocked = int(status.split("SigBlk:")[1].split()[0], 16)
            print(name, bool(blocked & (1 << (2 - 1))))
        sys.stdout.flush()

if __name__ == "__main__":
    source, prefix, model = sys.argv[1:]
    options = dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model, workers=2, chunk_bytes=50)
    mdata.preprocess(mdata.PreprocessOptions(input=(source,), output_prefix=prefix, **options), Ask())
"""


def test_no_worker_hears_ctrl_c(tmp_path):
    """In a fresh process, because multiprocessing's tracker unblocks the signal when it starts for the first time."""
    (tmp_path / "ask.py").write_text(ASK_WORKERS)
    words = [str(GOLDEN / "corpus.jsonl"), str(tmp_path / "out"), str(GOLDEN / "tokenizer")]
    environment = {**os.environ, "PYTHONPATH": str(GOLDEN.parents[1])}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "ask.py"), *words], capture_output=True, text=True, env=environment, check=True
    )
    assert set(done.stdout.splitlines()) == {"fork server True", "one True", "two True"}
