"""Every input format gives the same pair as JSON lines with the same texts, byte for byte; also in parts, after a stop,
filtered, and with a template.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mdata
from mdata.corpus.documents import DocumentReader
from mdata.errors import BadInputError, StoppedError, UsageError
from mdata.preprocessing.estimate import estimate
from mdata.rewriting.merge import merge
from tests.mdata.preprocessing.test_parts import StopsAfter, make_parts
from tests.mdata.sources.test_warc import record

pytestmark = pytest.mark.usefixtures("loaded_once")
ROWS = [
    {
        "title": f"title {number}" if number % 4 else None,
        "text": f"text {number} caf\u00e9 " * (number % 9),
        "n": number,
    }
    for number in range(400)
]
MADE = {
    "where": "n >= 30 and not (n < 300 and title is null)",
    "text_template": "{title?}\\n{text}",
}


def write_jsonl(folder):
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_packed(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))


def write_parquet(folder):
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=37)


def write_arrow(folder, name="a.arrow", rows=ROWS, *, stream=False):
    table = pa.Table.from_pylist(rows)
    maker = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(folder / name), "wb") as sink, maker(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=31)


def write_feather(folder):
    import pyarrow.feather

    pyarrow.feather.write_feather(pa.Table.from_pylist(ROWS), folder / "a.feather", chunksize=23)


def write_saved_dataset(folder):
    names = [f"data-0000{number}-of-00004.arrow" for number in range(4)]
    for number, name in enumerate(names):
        write_arrow(folder, name, ROWS[number * 100 : (number + 1) * 100], stream=True)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


FORMS = {
    "packed": write_packed,
    "parquet": write_parquet,
    "arrow": write_arrow,
    "feather": write_feather,
    "saved": write_saved_dataset,
}


def write_wet(folder):
    members = [record("warcinfo", "application/warc-fields", b"software: x\r\n")]
    members += [record("conversion", "text/plain", row["text"].encode(), **{"X-Number": row["n"]}) for row in ROWS]
    (folder / "a.warc.wet.gz").write_bytes(b"".join(map(gzip.compress, members)))


def job(folder, name, **more):
    return mdata.PreprocessOptions(
        input=(str(folder / name),),
        output_prefix=str(folder / f"out/{name}"),
        tokenizer_type="ByteTokenizer",
        workers=1,
        chunk_bytes=900,
        append_eod=True,
        **more,
    )


@pytest.fixture(params=[{}, MADE], ids=["plain", "made"])
def more(request):
    return request.param


@pytest.fixture
def whole(tmp_path, more):
    """One run of lines of JSON; its options."""
    (tmp_path / "jsonl").mkdir()
    write_jsonl(tmp_path / "jsonl")
    options = job(tmp_path, "jsonl", **more)
    mdata.preprocess(options)
    return options


def pair(options):
    return [Path(f"{options.output_prefix}_text_document{ending}") for ending in (".bin", ".idx")]


def assert_same(options, other):
    for one, two in zip(pair(options), pair(other), strict=True):
        assert one.read_bytes() == two.read_bytes(), two


def origins(options):
    documents = DocumentReader(mdata.open_corpus(options.output_prefix + "_text_document.json"))
    return [documents.origin(number)[1] for number in range(documents.corpus.num_documents)]


@pytest.mark.parametrize("form", FORMS)
def test_the_pair_is_that_of_lines_of_json(tmp_path, whole, more, form):
    (tmp_path / form).mkdir()
    FORMS[form](tmp_path / form)
    options = job(tmp_path, form, **more)
    (manifest,) = mdata.preprocess(options).manifests.values()
    assert_same(whole, options)
    (known,) = mdata.preprocess(whole).manifests.values()
    assert manifest.provenance.filtered == known.provenance.filtered
    assert manifest.id == known.id and not manifest.provenance.skipped
    if form != "saved":
        assert origins(options) == origins(whole)
    assert mdata.preprocess(options).finished_before
    # In parts, merged as a copy: the same files.
    parts = replace(options, output_prefix=str(tmp_path / "parts/c"))
    make_parts(parts, 3)
    merge(parts.output_prefix, copy=True)
    assert_same(whole, parts)
    # Stopped on the way and continued.
    stopped = replace(options, output_prefix=str(tmp_path / "stopped/c"), checkpoint_s=0)
    with pytest.raises(StoppedError):
        mdata.preprocess(stopped, StopsAfter(4))
    assert mdata.preprocess(stopped).resumed
    assert_same(whole, stopped)
    told = estimate(options)
    rows = sum(file.rows for file in known.provenance.inputs)
    # Of a stream only the beginning is sampled.
    assert (told.documents > 0) == (not more or form == "saved") and (told.filtered_rows > 0) == bool(more)
    assert rows == 400


def test_a_wet_file_gives_the_texts_of_its_records(tmp_path):
    for name, writer in (("jsonl", write_jsonl), ("wet", write_wet)):
        (tmp_path / name).mkdir()
        writer(tmp_path / name)
    mdata.preprocess(job(tmp_path, "jsonl"))
    options = job(tmp_path, "wet")
    (manifest,) = mdata.preprocess(options).manifests.values()
    assert_same(job(tmp_path, "jsonl"), options)
    # The first record of the file is no text.
    assert manifest.provenance.filtered == 1 and origins(options) == list(range(2, 402))
    parts = replace(options, output_prefix=str(tmp_path / "parts/c"))
    make_parts(parts, 2)
    merge(parts.output_prefix, copy=True)
    assert_same(options, parts)
    kept = replace(options, output_prefix=str(tmp_path / "kept/c"), where="X-Number = '7'")
    (manifest,) = mdata.preprocess(kept).manifests.values()
    assert manifest.shards[0].documents == 1 and manifest.provenance.filtered == 400


@pytest.mark.parametrize("form", ["jsonl", "arrow"])
def test_bad_rows_are_named_and_filtered_ones_are_none(tmp_path, form):
    (tmp_path / form).mkdir()
    {"jsonl": write_jsonl, "arrow": write_arrow}[form](tmp_path / form)
    strict = job(tmp_path, form, text_template="{title}{text}", where="n < 10")
    with pytest.raises(BadInputError, match=r":1: key 'title' of --text-template holds null"):
        mdata.preprocess(strict)
    (manifest,) = mdata.preprocess(replace(strict, on_error="skip", max_errors="3")).manifests.values()
    assert manifest.provenance.skipped == {"bad-value": 3} and manifest.provenance.filtered == 390
    assert manifest.shards[0].documents == 7


def test_a_filter_and_a_template_are_part_of_the_job(tmp_path, whole):
    for other in ({"where": "n < 10"}, {"text_template": "{text}!"}):
        with pytest.raises(UsageError, match=r"other results already exist(.|\n)*(where|text_template) was"):
            mdata.preprocess(replace(whole, **other))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"where": "n <"}, "--where cannot be understood at character 4"),
     ({"text_template": "x"}, "--text-template cannot be understood at character 2"),
     ({"text_template": "{a}", "json_keys": ("a", "b")}, "json_keys names 2 results"),
     ({"text_template": "{a}", "chat": True}, "conversations are not made by a template")],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_read(tmp_path, options, reason):
    with pytest.raises(UsageError, match=reason):
        mdata.preprocess(job(tmp_path, "nothing", **options))


def test_plain_text_has_no_columns(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for name in ("where", "text_template"):
        options = job(tmp_path, "a.txt", **{name: {"where": "a = 1", "text_template": "{a}"}[name]})
        with pytest.raises(UsageError, match=f"is plain text, which has no columns(.|\n)*--{name.replace('_', '-')}"):
            mdata.preprocess(options)
