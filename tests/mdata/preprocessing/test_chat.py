"""`mdata preprocess --chat`: files of conversations, bad records by position, the same bytes however it is run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mdata
from mdata import BadInputError, UsageError
from mdata.chat.templates import Plain
from mdata.preprocessing.estimate import estimate
from mdata.progress import Silent
from mdata.sources.conversation import Message
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.failures import crash_at, durable_calls
from tests.helpers.manifests import assert_valid
from tests.helpers.notes import Notes
from tests.oracles.templates import CONVERSATIONS, TOOLS
from tests.reference import chat as twin

GOLDEN = Path(__file__).parents[2] / "golden"
OWN = (
    "{% for m in messages %}{{ '<|endoftext|>' + m.role + ': ' + m.content + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|endoftext|>assistant: ' }}{% endif %}"
)


GPT = {"role": "assistant", "content": "Yes"}
LONG = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a" * 250}]}


def conversation(random) -> list[dict]:
    turns = int(random.integers(1, 5))
    words = ["alpha", "beta", "gamma <|endoftext|>", "d\u00e9lta", ""]
    said = [" ".join(random.choice(words, int(random.integers(1, 6)))) for _ in range(2 * turns)]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """300 conversations in two files."""
    folder = tmp_path_factory.mktemp("chats")
    random = np.random.default_rng(2)
    found = [conversation(random) for _ in range(300)]
    for name, part in (("a", found[:100]), ("b", found[100:])):
        lines = [json.dumps({"messages": one, "id": i}) + "\n" for i, one in enumerate(part)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder, found


def run(source, prefix, notes: Notes | None = None, **changes) -> tuple[mdata.CorpusManifest, mdata.Corpus]:
    given = {
        "input": (str(source),),
        "output_prefix": str(prefix),
        "tokenizer_type": "ByteTokenizer",
        "json_keys": ("messages",),
        "chat": True,
        "chat_template": "plain",
        "workers": 1,
    }
    result = mdata.preprocess(mdata.PreprocessOptions(**{**given, **changes}), notes or Silent())
    path = next(iter(result.paths.values()))
    assert_valid(path)
    assert mdata.verify(path, full=True).problems == ()
    return next(iter(result.manifests.values())), mdata.open_corpus(path)


def spans(corpus, document: int) -> list[list[int]]:
    reader = corpus.readers[0]
    first, last = reader.boundaries[document : document + 2].tolist()
    return [reader.sequence(i).tolist() for i in range(first, last)]


def test_files_of_conversations(records, tmp_path):
    folder, found = records
    manifest, corpus = run(folder, tmp_path / "out", append_eod=True)
    assert corpus.path.name == "out_messages_chat.json" and corpus.name == "out_messages"
    assert (manifest.level, corpus.num_documents) == ("chat", 300)
    assert manifest.provenance.options["chat_template"]["name"] == "plain"
    assert manifest.statistics.text_bytes == sum(len(m["content"].encode()) for one in found for m in one)

    def write(role, content):
        return next(iter(Plain(256).turns([Message(role, content)])))

    for number, one in enumerate(found):
        messages = [(m["role"], m["content"]) for m in one]
        wanted = twin.tokens(messages, write, encode=lambda text: list(text.encode()), train_on="assistant", eod=256)
        assert corpus.document(number).tolist() == [id for id, _ in wanted]
        bits = [i % 2 for i, span in enumerate(spans(corpus, number)) for _ in span]
        assert bits == [bit for _, bit in wanted]


def test_the_bytes_do_not_depend_on_how_it_is_run(records, tmp_path):
    folder, _ = records
    one, _ = run(folder, tmp_path / "one", chunk_bytes=5000, holdout="0.2")
    many, _ = run(folder, tmp_path / "many", chunk_bytes=5000, holdout="0.2", workers=3)
    assert one.id == many.id
    names = [path.name.removeprefix("one") for path in sorted(tmp_path.iterdir()) if path.name.startswith("one")]
    assert any("holdout" in name for name in names)
    for name in names:
        if not name.endswith(".json"):
            assert (tmp_path / f"one{name}").read_bytes() == (tmp_path / f"many{name}").read_bytes(), name
    again = mdata.preprocess(
        mdata.PreprocessOptions(
            input=(str(folder),), output_prefix=str(tmp_path / "one"), tokenizer_type="ByteTokenizer", chat=True,
            json_keys=("messages",), chat_template="plain", chunk_bytes=5000, holdout="0.2", workers=1,
        )
    )  # fmt: skip
    assert again.finished_before
    other, _ = run(folder, tmp_path / "one", chunk_bytes=5000, holdout="0.2", chat_train_on="last", overwrite=True)
    assert other.id != one.id


def test_a_crash_at_any_call_loses_nothing(records, tmp_path, monkeypatch):
    folder, _ = records
    (tmp_path / "in.jsonl").write_bytes(b"".join((folder / "a.jsonl").read_bytes().splitlines(keepends=True)[:12]))

    def job(name: str) -> mdata.PreprocessOptions:
        return mdata.PreprocessOptions(
            input=(str(tmp_path / "in.jsonl"),), output_prefix=str(tmp_path / name / "x"),
            tokenizer_type="ByteTokenizer", chat=True, chat_template="plain", json_keys=("messages",),
            workers=1, chunk_bytes=400, checkpoint_s=0.0,
        )  # fmt: skip

    with durable_calls(monkeypatch) as calls:
        mdata.preprocess(job("whole"))
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir() if path.suffix != ".json"}
    for n in range(5, len(calls.seen), 17):
        assert crash_at(n, lambda n=n: mdata.preprocess(job(f"cut{n}")))
        mdata.preprocess(job(f"cut{n}"))
        found = {path.name: path.read_bytes() for path in (tmp_path / f"cut{n}").iterdir() if path.suffix != ".json"}
        assert found == wanted, n


def test_bad_records_are_named(tmp_path):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = [
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "assistant", "content": ["a"]}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "\ud800"}]},
    ]
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in [good, bad[0], good]))
    with pytest.raises(BadInputError, match=r"x.jsonl:2: key 'messages': message 1 has no role"):
        run(source, tmp_path / "x")
    source.write_text("".join(json.dumps(one) + "\n" for one in [good, *bad, good, {"text": "a"}]))
    manifest, corpus = run(source, tmp_path / "y", on_error="skip")
    assert manifest.provenance.skipped == {"bad-chat": 3, "no-key": 1, "surrogate": 1}
    assert corpus.num_documents == 2
    assert corpus.document(1).tolist() == corpus.document(0).tolist()
    template = tmp_path / "refusing.jinja"
    template.write_text(
        "{{ raise_exception('too short') if messages and messages[0].role == 'assistant'"
        " else messages | map(attribute='content') | join }}"
    )
    source.write_text(json.dumps(good) + "\n" + json.dumps({"messages": good["messages"][1:]}) + "\n")
    with pytest.raises(BadInputError, match=r"x.jsonl:2: the chat template fails: too short"):
        run(source, tmp_path / "z", chat_template=str(template), tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(GOLDEN / "tokenizer"), )  # fmt: skip


@pytest.mark.parametrize(
    ("records", "changes", "counts"),
    [
        ([{"messages": []}, {"messages": [{"role": "assistant", "content": ["a"]}]}], {"on_error": "skip"}, (0, 2, 0)),
        ([{"messages": []}], {"on_error": "quarantine"}, (0, 1, 0)),
        ([LONG, LONG, LONG], {"chunk_bytes": 100}, (3, 0, 0)),
        ([{**LONG, "lang": "de"}], {"where": "lang = 'en'"}, (0, 0, 1)),
        ([], {}, (0, 0, 0)),
    ],
)
@pytest.mark.parametrize("other", [[], [LONG]], ids=["alone", "beside a good file"])
def test_a_chunk_without_a_usable_conversation_is_empty(tmp_path, records, changes, counts, other):
    lines = [json.dumps(record) + "\n" for record in records] or ["\n"]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    changes = {**changes, "quarantine": str(tmp_path / "bad")} if changes.get("on_error") == "quarantine" else changes
    inputs = [str(tmp_path / "a.jsonl")]
    if other:
        (tmp_path / "b.jsonl").write_text(json.dumps({**other[0], "lang": "en"}) + "\n")
        inputs.append(str(tmp_path / "b.jsonl"))
    documents, bad, filtered = counts
    manifest, corpus = run("", tmp_path / "out", input=tuple(inputs), **changes)
    assert corpus.num_documents == documents + len(other)
    assert sum(manifest.provenance.skipped.values()) == bad
    assert (manifest.provenance.filtered or 0) == filtered


def test_a_field_that_would_be_lost_is_a_bad_record(tmp_path):
    source = tmp_path / "x.jsonl"
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    source.write_text(json.dumps({"messages": [LONG["messages"][0], call]}) + "\n")
    with pytest.raises(BadInputError, match=r"x.jsonl:1: .*message 2 \(assistant\): its 'tool_calls' would be lost"):
        run(source, tmp_path / "out")
    # Other fields matter if this template writes them.
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ m.mood_id }};{% endfor %}")
    moody = [LONG["messages"][0], {"role": "assistant", "content": "b", "mood_id": "good"}]
    source.write_text(json.dumps(LONG) + "\n" + json.dumps({"messages": moody}) + "\n")
    assert run(source, tmp_path / "plain")[1].num_documents == 2
    model = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(GOLDEN / "tokenizer")}
    _, corpus = run(source, tmp_path / "own", chat_template=str(template), **model)
    tokenizer = load_tokenizer(TokenizerSpec(type="HuggingFaceTokenizer", model=str(GOLDEN / "tokenizer")))
    ids = np.concatenate([np.asarray(span) for span in spans(corpus, 1)])
    assert tokenizer.decode(ids.tolist()) == f"{moody[0]['content']};bgood;"


def as_columns(folder: Path, rows: list[dict], kind: str, schema: pa.Schema | None = None) -> Path:
    """The rows in a file of structs."""
    table, path = pa.Table.from_pylist(rows, schema), folder / f"x.{kind}"
    if kind.startswith("parquet"):
        pq.write_table(table, path, row_group_size=70, use_dictionary=kind == "parquet")
    else:
        maker = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with maker(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    return path


KINDS = ("parquet", "parquet-plain", "arrow", "stream")


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_structs_give_the_bytes_of_lines(records, tmp_path, kind):
    _, found = records
    rows = [
        {"messages": one, "meta": {"id": i, "at": 1.5}, "tags": ["a"], "tools": None} for i, one in enumerate(found)
    ]
    rows[7]["messages"] = [{"role": "user", "content": "x", "name": "Ada"}, *rows[7]["messages"]]
    rows[9]["messages"] = None
    rows[11]["tools"] = [{"name": "f"}]
    rows[13]["messages"] = [{"role": "user", "content": None}]
    lines = tmp_path / "x.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = []
    for source in (lines, as_columns(tmp_path, rows, kind)):
        notes, prefix = Notes(), tmp_path / source.suffix[1:] / "out"
        where = "meta.id < 250"
        manifest, _ = run(source, prefix, notes=notes, where=where, on_error="skip", chunk_bytes=2000)
        assert [f"{source}:{row}: " in " ".join(notes.lines) for row in (8, 10, 12, 14)] == [True] * 4
        pair = [prefix.with_name(f"out_messages_chat.{ending}").read_bytes() for ending in ("bin", "idx")]
        results.append((pair, manifest.provenance.skipped, manifest.shards[0].documents))
    assert results[0] == results[1] and results[0][1:] == ({"bad-chat": 4}, 246)
    parts = [
        run(lines.with_suffix(f".{kind}"), tmp_path / "parts/out", shard=f"{k}/3", where="meta.id < 7")[0]
        for k in (1, 2, 3)
    ]
    assert sum(part.shards[0].documents for part in parts) == 7


CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}"
)


def test_fields_that_are_null_in_a_struct_are_none_of_a_call(tmp_path):
    """A struct has the fields of all rows, so a call would get the arguments of others, as null."""

    def asks(**arguments):
        call = {"function": {"name": "f", "arguments": arguments}}
        return {"messages": [LONG["messages"][0], {"role": "assistant", "tool_calls": [call]}]}

    rows, template = [asks(city="Oslo"), asks(at=1.5)], tmp_path / "own.jinja"
    template.write_text(CALLS)
    lines = tmp_path / "x.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (lines, as_columns(tmp_path, rows, "parquet"))
    texts = []
    for source in sources:
        _, corpus = run(source, tmp_path / source.suffix[1:] / "out", chat_template=str(template))
        texts.append([bytes(corpus.document(number).tolist()) for number in (0, 1)])
    assert texts[0] == texts[1] and b"null" not in b"".join(texts[1])


def _large(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _large(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.large_list(_large(kind.value_type))
    return pa.large_string() if pa.types.is_string(kind) else kind


@pytest.mark.parametrize("kind", [*KINDS, "parquet-large"])
def test_tools_calls_and_reasoning_of_structs_are_those_of_lines(tmp_path, kind):
    """Conversations of all forms share their columns, so most fields are null in most rows."""
    left_out = ("arguments as text", "parts of text", "documents", "without thoughts")  # of another type in the column
    talks = {name: talk for name, talk in CONVERSATIONS.items() if name not in left_out}
    rows = [{"messages": messages, "tools": record.get("tools")} for messages, record in talks.values()]
    template, lines = tmp_path / "own.jinja", tmp_path / "x.jsonl"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.name }}{{ m.reasoning_content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }};{{ tools | tojson if loop.first and tools }}{% endfor %}"
    )
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    schema = pa.Table.from_pylist(rows).schema
    if kind == "parquet-large":
        schema = pa.schema([pa.field(field.name, _large(field.type)) for field in schema])
    results = []
    for source in (lines, as_columns(tmp_path, rows, kind, schema)):
        _, corpus = run(source, tmp_path / source.suffix[1:] / "out", chat_template=str(template))
        results.append([bytes(corpus.document(number).tolist()) for number in range(len(rows))])
    assert results[0] == results[1] and b"null" not in b"".join(results[1])
    asked = results[1][list(talks).index("two calls")].decode()
    assert '"arguments": {"city": "K\u00f6ln"}' in asked and '{"zone": "CET", "seconds": true}' in asked
    assert all(json.dumps(tool, ensure_ascii=False) in asked for tool in TOOLS)


def test_a_conversation_with_further_fields_that_the_template_refuses_is_a_bad_row(tmp_path):
    template, source = tmp_path / "own.jinja", tmp_path / "x.jsonl"
    template.write_text(CALLS.replace("{% for", "{{ raise_exception('no tools') if messages[-1].tool_calls }}{% for"))
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    source.write_text("".join(json.dumps({"messages": [LONG["messages"][0], last]}) + "\n" for last in (call, GPT)))
    manifest, _ = run(source, tmp_path / "out", chat_template=str(template), on_error="skip")
    assert manifest.provenance.skipped == {"bad-text": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_structs_that_cannot_be_used_are_named(tmp_path, kind):
    """Bytes that are not UTF-8, a dictionary that expands, and a row that is too long, which is not decoded."""
    message = pa.struct([("role", pa.dictionary(pa.int32(), pa.string())), ("content", pa.binary())])
    schema = pa.schema([("messages", pa.list_(message)), ("data", pa.binary())])
    talk = [{"role": "user", "content": b"Hi"}, {"role": "assistant", "content": b"Yes"}]
    rows = [
        {"messages": talk, "data": b"\xff"},
        {"messages": [talk[0], {"role": "assistant", "content": b"\xff"}], "data": None},
        {"messages": [talk[0], {"role": "assistant", "content": b"a" * 300}] * 4, "data": None},
        {"messages": talk, "data": b"x" * 300},
    ]
    source, notes = as_columns(tmp_path, rows, kind, schema), Notes()
    manifest, _ = run(source, tmp_path / "out", on_error="skip", max_record_bytes=1000, notes=notes)
    assert manifest.shards[0].documents == 2
    assert manifest.provenance.skipped == {"surrogate": 1, "too-long": 1}
    assert all(f"{source}:{row}: " in " ".join(notes.lines) for row in (2, 3))


def test_columns_that_hold_no_conversations_are_refused(tmp_path):
    for number, value in enumerate(("text", ["a"], {"role": "user"}, json.dumps(LONG["messages"]))):
        (tmp_path / str(number)).mkdir()
        source = as_columns(tmp_path / str(number), [{"messages": value}], "parquet")
        with pytest.raises(UsageError, match=r"column 'messages' holds .*\n  expected: lists of structs"):
            run(source, tmp_path / "out")
    with pytest.raises(UsageError, match="no column 'talk'"):
        run(source, tmp_path / "out", json_keys=("talk",))


def test_the_template_of_a_tokenizer(records, tmp_path):
    folder, found = records
    model = tmp_path / "tokenizer"
    model.mkdir()
    (model / "tokenizer.json").write_bytes((GOLDEN / "tokenizer" / "tokenizer.json").read_bytes())
    config = json.loads((GOLDEN / "tokenizer" / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": OWN}))
    options = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model), "chat_template": None}
    manifest, corpus = run(folder, tmp_path / "own", **options)
    assert manifest.provenance.options["chat_template"]["name"] == "tokenizer"
    spelled = sum(m["content"].count("<|endoftext|>") for one in found for m in one)
    assert manifest.provenance.special_in_text == spelled > 0
    tokenizer = load_tokenizer(TokenizerSpec(type="HuggingFaceTokenizer", model=str(model)))
    eod = tokenizer.special_ids["<|endoftext|>"]
    for number in range(20):
        whole = "".join(f"<|endoftext|>{m['role']}: {m['content']}<|endoftext|>" for m in found[number])
        assert tokenizer.decode(corpus.document(number).tolist()) == whole
        trained = spans(corpus, number)[1::2]
        assert [tokenizer.decode(one) for one in trained] == [
            f"{m['content']}<|endoftext|>" for m in found[number][1::2]
        ]
        assert all(one[-1] == eod for one in trained)
    plain = {**options, "tokenizer_options": (("special_in_text", "plain"),)}
    with pytest.raises(UsageError, match="writes control tokens as text"):
        run(folder, tmp_path / "plain", **plain)


def test_a_record_with_an_unknown_role_is_a_bad_record(tmp_path):
    talks = [{"messages": [{"role": role, "content": "u"}, LONG["messages"][1]]} for role in ("user", "usr")]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    with pytest.raises(BadInputError, match=r"x\.jsonl:2: message 1: role 'usr' is unknown to the chat template plain"):
        run(tmp_path / "x.jsonl", tmp_path / "out")
    manifest, _ = run(tmp_path / "x.jsonl", tmp_path / "out", on_error="skip")
    assert manifest.provenance.skipped == {"bad-text": 1} and manifest.shards[0].documents == 1


def test_a_template_without_control_tokens_works_with_bytes(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(LONG) + "\n")
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
                        "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    _, corpus = run(tmp_path / "x.jsonl", tmp_path / "out", chat_template=str(template))
    assert [bytes(span).decode() for span in spans(corpus, 0)] == ["user: u\nassistant: ", "a" * 250, "\n"]


def test_what_goes_with_no_conversation_is_refused(records, tmp_path):
    folder, _ = records
    for changes, said in (
        ({"chat_train_on": "user"}, "chat_train_on=user"),
        ({"split_sentences": True}, "not split into sentences"),
        ({"input_format": "text"}, "is text"),
        ({"chat_template": "chatml"}, "no token"),
        ({"chat_template": None}, "no token"),
        ({"tokenizer_type": "NullTokenizer", "tokenizer_options": (("vocab_size", 9),)}, "cannot tokenize parts"),
    ):
        with pytest.raises((UsageError, BadInputError), match=said):
            run(folder / "a.jsonl", tmp_path / "x", **changes)


def test_an_estimate_of_conversations(records):
    folder, _ = records
    options = mdata.PreprocessOptions(
        input=(str(folder),), output_prefix="x", tokenizer_type="ByteTokenizer", chat=True, json_keys=("messages",),
        chat_template="plain", workers=1,
    )  # fmt: skip
    assert estimate(options).documents == 300
