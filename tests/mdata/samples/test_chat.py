"""Chat samples: a row checked by hand, the twin over random conversations, datasets, a torch DataLoader."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from itertools import pairwise
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import mdata
from mdata import UsageError
from mdata.chat.templates import Plain
from mdata.dataset.mock_data import MockDataset
from mdata.loader.loader import BatchPlan
from mdata.samples.chat import ChatSamples
from mdata.samples.masked import SentenceText
from mdata.samples.packed import PackingRule
from mdata.samples.rows import RowOptions
from mdata.sources.conversation import Message
from tests.helpers.corpora import FileStream, write_pair
from tests.helpers.examples import SOAK, examples
from tests.helpers.failures import crash_at
from tests.helpers.open_by_keys import open_by_keys
from tests.mdata.sources.inputs import ENDINGS, packed
from tests.reference import chat as twin
from tests.reference.gpt_samples import Native, packed_sample


def make_corpus(folder, name, conversations, **options) -> None:
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in one]}) for one in conversations]
    (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = {"tokenizer_type": "ByteTokenizer", "json_keys": ("messages",), "chat_template": "plain", "workers": 1}
    given |= {"input": (str(folder / f"{name}.jsonl"),), "output_prefix": str(folder / name), "chat": True}
    mdata.preprocess(mdata.PreprocessOptions(**{**given, **options}))


def test_a_golden_row(tmp_path):
    """Two conversations in one row; every token, bit and position by hand."""
    make_corpus(
        tmp_path, "x", [[("user", "a"), ("assistant", "bc"), ("user", "d")], [("user", "e"), ("assistant", "")]]
    )
    data = mdata.open_dataset(tmp_path / "x_messages_chat.json", sequence_length=64, split="whole", kind=mdata.Chat())
    row = data[0]
    # The longer conversation comes first. "Assistant:" is context, what it says and the end of it are trained on.
    text = [
        *b"User: a\n\nAssistant:",
        *b" bc",
        256,
        *b"\n\nUser: d\n\n",
        *b"User: e\n\nAssistant:",
        *b" ",
        256,
        *b"\n\n",
    ]
    bits = [0] * 19 + [1] * 4 + [0] * 11 + [0] * 19 + [1] * 2 + [0] * 2
    assert len(text) == len(bits) == 57
    assert row["tokens"].tolist() == [*text, *[0] * 7]
    assert row["labels"].tolist() == [*text[1:], *[0] * 8]
    assert row["loss_mask"].tolist() == [*bits[1:], *[0] * 8]
    assert row["position_ids"].tolist() == [*range(34), *range(30)]
    assert row["cu_seqlens"].tolist()[:3] == [0, 34, 64] and int(row["max_seqlen"]) == 34


CONVERSATIONS = st.lists(st.lists(st.integers(0, 6), max_size=6), min_size=1, max_size=12)


@examples(200)
@given(CONVERSATIONS, st.integers(1, 14), st.booleans(), st.sampled_from(["cut", "drop"]), st.booleans())
def test_loss_is_the_twins(tmp_path_factory, conversations, length, extra, longer, shuffle):
    prefix = tmp_path_factory.mktemp("c") / "x"
    write_pair(prefix, conversations)  # each token is its place in the corpus
    rule = PackingRule(sequence_length=length, extra_token=extra, longer=longer)
    kept = [sum(one) for one in conversations if longer == "cut" or sum(one) <= rule.row_length]
    assume(any(size >= min(2, rule.row_length) for size in kept))
    options = RowOptions(sequence_length=length, document_masks=True, mask_document_ends=True)
    bounds = 0, len(conversations)
    samples = ChatSamples(FileStream(prefix), bounds, options=options, rule=rule, seed=3, shuffle=shuffle)
    make, arguments = samples.__reduce__()
    samples = make(*arguments)
    of_token = [
        (document, number % 2 == 1)
        for document, spans in enumerate(conversations)
        for number, span in enumerate(spans)
        for _ in range(span)
    ]
    counted = 0
    for k in range(samples.samples_per_epoch):
        text = np.full((1, length + 1), -1, np.int64)
        count = int(samples.gather(np.array([k]), text).counts[0])
        row = [of_token[token] for token in text[0, :count].tolist()]
        wanted = twin.loss(row)
        assert samples.sample(k)["loss_mask"].tolist() == [*wanted, *[0] * length][:length]
        counted += sum(wanted)
    if extra:
        starts = np.cumsum([0, *map(sum, conversations)])
        dropped = [longer == "drop" and sum(one) > rule.row_length for one in conversations]
        every = [
            of_token[place][1]
            for document in range(len(conversations))
            for place in range(starts[document] + 1, starts[document + 1])
            if not dropped[document]
        ]
        assert counted == sum(every), "each trained label but a conversation's first token counts once"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    random = np.random.default_rng(4)
    for name, size in (("a", 60), ("b", 90)):
        found = []
        for _ in range(size):
            turns = int(random.integers(1, 4))
            found.append([(("user", "assistant")[i % 2], "x" * int(random.integers(0, 60))) for i in range(2 * turns)])
        make_corpus(folder, name, found, append_eod=True)
    mdata.make_blend(
        ["0.6", str(folder / "a_messages_chat.json"), "0.4", str(folder / "b_messages_chat.json")], folder / "mix.json"
    )
    return folder


def opened(folder, name="mix.json", **options) -> mdata.Dataset:
    return open_by_keys(folder / name, **{"sequence_length": 128, "kind": "chat", **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"longer": "drop"},
        {"split": "valid", "split_shares": "50,50"},
        {"name": "a_messages_chat", "extra_token": False},
    ],
    ids=str,
)
def test_in_a_dataset(folder, options):
    data = opened(folder, **options)
    samples = np.random.default_rng(1).permutation(min(20, data.num_samples or 20))
    rows, single = data.read(samples), [data[int(k)] for k in samples]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert np.array_equal(getattr(rows, name), np.stack([row[name] for row in single])), name
    assert 0.1 < rows.loss_mask.mean() < 0.9
    assert (rows.labels[rows.loss_mask > 0] != 0).all()
    again = pickle.loads(pickle.dumps(data)).read(samples)
    assert np.array_equal(again.loss_mask, rows.loss_mask) and np.array_equal(again.text, rows.text)
    starts = {i * 128 + start for i, row in enumerate(single) for start in row["cu_seqlens"].tolist()}
    assert rows.cu_seqlens.tolist() == sorted(starts)


def test_a_torch_data_loader(folder):
    torch_data = pytest.importorskip("torch.utils.data")
    data = opened(folder, num_samples=24)
    loaders = [torch_data.DataLoader(data, batch_size=4, num_workers=n) for n in (0, 2)]
    one, two = ([{name: value.tolist() for name, value in batch.items()} for batch in loader] for loader in loaders)
    assert one == two and len(one) == 6
    assert one[1]["loss_mask"] == data.read([4, 5, 6, 7]).loss_mask.tolist()
    batches = next(iter(mdata.Loader(data, BatchPlan(global_batch=4, micro_batch=4))))
    assert batches[0].loss_mask.sum() > 0 and batches[0].rows.cu_seqlens is not None


def test_other_corpora_and_orders_are_refused(folder, tmp_path):
    write_pair(tmp_path / "x_text_sentence", [[3, 4]] * 9)
    with pytest.raises(UsageError, match="does not hold conversations"):
        opened(tmp_path, "x_text_sentence")
    with pytest.raises(UsageError, match="is not divided into sentences"):
        SentenceText(mdata.open_corpus(folder / "a_messages_chat"))
    with pytest.raises(UsageError, match="megatron order has no samples of kind 'chat'"):
        opened(folder, "a_messages_chat", order="megatron")
    write_pair(tmp_path / "x_messages_chat", [[3, 4]] * 9)
    assert opened(tmp_path, "x_messages_chat", sequence_length=6)[0]["loss_mask"].tolist() == [0, 0, 1, 1, 1, 1]


def pair(number: int, chosen: str, rejected: str) -> dict:
    said = [
        [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": x}] for x in (chosen, rejected)
    ]
    return {"chosen": said[0], "rejected": said[1]}


def make_pairs(folder, pairs, name="p", **options):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    given = {"tokenizer_type": "ByteTokenizer", "json_keys": ("chosen",), "chat_template": "plain", "workers": 1}
    given |= {"input": (str(folder / f"{name}.jsonl"),), "output_prefix": str(folder / name), "chat": True}
    mdata.preprocess(mdata.PreprocessOptions(**{**given, "chat_schema": "pairs", **options}))
    return folder / f"{name}_chosen_pairs.json"


def test_a_golden_pair(tmp_path):
    """Both conversations in one row, apart, with loss on what they do not share; the longer pair is left out."""
    path = make_pairs(tmp_path, [pair(0, "x" * 60, "y"), pair(1, "abc", "d")])
    data = mdata.open_dataset(path, sequence_length=64, split="whole", kind=mdata.Pairs())
    assert len(data) == 1 and data.pairs_left_out == 1
    with pytest.raises(
        UsageError, match=r"no pair can be packed\n  found: 2 pairs for(.|\n)*try: a longer sequence length$"
    ):
        mdata.open_dataset(path, sequence_length=4, split="whole", kind=mdata.Pairs())
    row = data[0]
    head = b"User: q1\n\nAssistant:"
    text = [*head, *b" abc", 256, *b"\n\n", *head, *b" d", 256, *b"\n\n"]
    bits = [*[0] * 20, *[1] * 5, 0, 0, *[0] * 20, *[1] * 3, 0, 0]
    assert row["tokens"].tolist() == [*text, *[0] * (64 - len(text))]
    assert row["loss_mask"].tolist() == [*bits[1:], *[0] * (65 - len(bits))]
    assert row["cu_seqlens"].tolist()[:3] == [0, 27, 64]
    assert data.read([0]).conversations.tolist() == [0, 1]


def test_rows_of_pairs_say_their_conversations(tmp_path):
    """In any order, in parts of a batch, of a blend, and in another process; the trace finds the documents."""
    one = make_pairs(tmp_path, [pair(n, "a" * (n % 7), "b" * (n % 5 + 1)) for n in range(40)])
    two = make_pairs(tmp_path, [pair(n + 40, "a", "b" * (n % 5)) for n in range(40) if n % 5 != 1], "q")
    data = mdata.open_dataset(f"1.0 {one} 2.0 {two}", sequence_length=150, kind=mdata.Pairs(), seed=3)
    data = pickle.loads(pickle.dumps(data))
    assert data.conversation_counts == [80, 64] and data.pairs_left_out == 0
    numbers = np.array([7, 2, 30, 11])
    rows = data.read(numbers)
    parts = rows.split(2)
    assert rows.conversations.tolist() == [n for part in parts for n in part.conversations.tolist()]
    for part, samples in zip(parts, np.split(numbers, 2), strict=True):
        text, row_of = part.tokens.ravel(), np.repeat(np.arange(2), 150)
        components, _ = data.locate(samples)
        for number, start, stop in zip(part.conversations, part.cu_seqlens[:-1], part.cu_seqlens[1:], strict=True):
            opened = data.components[components[row_of[start]]]
            first, count = (int(array[number]) for array in (opened.samples._first, opened.samples._count))
            inside = min(count, stop - start)
            assert text[start : start + inside].tolist() == opened.corpus.read(first, inside).tolist()
            answer = bytes((text[start:stop] % 256).tolist()).split(b"Assistant:")[1]
            assert b"ba"[int(number) % 2] not in answer  # a: chosen, b: rejected
    (component,), (inside,) = data.locate([7])
    opened = data.components[component]
    pieces = opened.samples.pieces(int(inside))
    documents = {opened.corpus.document_of(piece.sequence) for piece in pieces}
    assert len(documents) * 2 == len(data.read([7]).conversations)
    assert inside in opened.samples.samples_of(pieces[-1].sequence, first=0, stop=50)


def test_pairs_and_conversations_are_not_taken_for_each_other(tmp_path):
    path = make_pairs(tmp_path, [pair(1, "abc", "d")])
    make_corpus(tmp_path, "x", [[("user", "a"), ("assistant", "b")]])
    with pytest.raises(UsageError, match="a corpus of level pairs"):
        mdata.open_dataset(path, sequence_length=64, kind=mdata.Chat())
    with pytest.raises(UsageError, match="does not hold pairs of conversations"):
        mdata.open_dataset(tmp_path / "x_messages_chat.json", sequence_length=64, kind=mdata.Pairs())
    with pytest.raises(UsageError, match="are not cut"):
        mdata.Pairs(longer="cut")
    with pytest.raises(UsageError, match="mock data has no pairs"):
        MockDataset(vocab_size=9, sequence_length=8, seed=1, kind=mdata.Pairs())


PIECES = ("", " ", "a", "b c", '"', "\r\n", "\u00e9", "\u2028", "\U0001f642", "x" * 20)


def random_conversation(random):
    """Turns of any role; in some the answer is empty, in some there is none."""
    roles = ["system"] * (random.random() < 0.3)
    for _ in range(random.randint(1, 3)):
        roles += ["user", *random.choice((["assistant"], ["tool", "assistant"], ["assistant", "assistant"], []))]
    return [{"role": role, "content": "".join(random.choices(PIECES, k=random.randrange(5)))} for role in roles]


def write_file(random, folder, number, rows):
    """One file, in any format and compression that conversations may have."""
    form = random.choice(("jsonl", "jsonl", "tar", "parquet", "arrow"))
    lines = "\n".join(json.dumps(row, ensure_ascii=random.random() < 0.5) for row in rows).encode()
    path = folder / f"{number}.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=random.choice((1, 3, 100)))
    elif form == "arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=random.choice((1, 4, 100)))
    else:
        if form == "tar":
            made, member = io.BytesIO(), tarfile.TarInfo("a.jsonl")
            member.size = len(lines)
            with tarfile.open(fileobj=made, mode="w") as tar:
                tar.addfile(member, io.BytesIO(lines))
            lines = made.getvalue()
        compression = random.choice(list(ENDINGS))
        path = path.with_name(path.name + ENDINGS[compression])
        path.write_bytes(packed(lines, compression, random.randrange(len(lines))))


def check_loaded(random, data, *, size, steps):
    """Steps that several loaders read, each from where the one before stopped, with any ranks and microbatches."""
    done, state, read = 0, None, dict[int, set[int]]()
    while done < steps:
        dp_size, until = random.choice([n for n in (1, 2, 3) if size % n == 0]), random.randint(done + 1, steps)
        micro_batch = random.choice([n for n in (1, 2) if size % (n * dp_size) == 0])
        states = []
        for rank in range(dp_size):
            loader = mdata.Loader(data, BatchPlan(size, micro_batch, rank, dp_size), prefetch=random.choice((1, 3)))
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            batches = iter(loader)
            for step in range(done, until):
                for batch in next(batches):
                    read.setdefault(step, set()).update(batch.samples.tolist())
                    rows = data.read(batch.samples)
                    for name in ("tokens", "labels", "loss_mask", "position_ids"):
                        assert np.array_equal(getattr(batch.rows, name), getattr(rows, name)), name
            states.append(loader.state_dict())
            batches.close()
        assert states == states[:1] * dp_size
        done, state = until, states[0]
    assert read == {step: set(range(step * size, (step + 1) * size)) for step in range(steps)}


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(5 * SOAK))
def test_random_conversations_from_files_to_batches_are_the_twins(tmp_path, seed):
    random, tokens = Random(seed), list[list[twin.Token]]()
    train_on, eod = random.choice(("assistant", "all", "last")), random.choice((None, 256))
    (tmp_path / "in").mkdir()
    for number in range(random.choice((1, 3))):
        talks = [random_conversation(random) for _ in range(random.choice((1, 15)) if number else 15)]
        write_file(random, tmp_path / "in", number, [{"messages": talk, "id": n} for n, talk in enumerate(talks)])
        for talk in talks:
            if train_on == "all" or any(turn["role"] == "assistant" for turn in talk):
                tokens.append(
                    twin.tokens(
                        [(turn["role"], turn["content"]) for turn in talk],
                        lambda role, content: next(iter(Plain(256).turns([Message(role, content)]))),
                        encode=lambda text: list(text.encode()),
                        train_on=train_on,
                        eod=eod,
                    )
                )
    facts = {
        "input": str(tmp_path / "in"), "output_prefix": str(tmp_path / "x"), "tokenizer_type": "ByteTokenizer",
        "json_keys": ("messages",), "chat": True, "chat_template": "plain", "chat_train_on": train_on,
        "append_eod": eod is not None, "on_error": "skip", "chunk_bytes": random.choice((40, 1000)), "checkpoint_s": 0,
    }  # fmt: skip
    if random.random() < 0.3:
        crash_at(random.randrange(40), lambda: mdata.preprocess(mdata.PreprocessOptions(**facts, workers=1)))
    mdata.preprocess(mdata.PreprocessOptions(**facts, workers=random.choice((1, 1, 2))))
    corpus = mdata.open_corpus(tmp_path / "x_messages_chat.json")
    documents = [corpus.document(number).tolist() for number in range(corpus.num_documents)]
    assert documents == [[id for id, _ in one] for one in tokens]

    length, extra, longer = (
        random.choice((5, 17, 64, 200)),
        random.random() < 0.7,
        random.choice(("cut", "cut", "drop")),
    )
    try:
        data = opened(
            tmp_path, "x_messages_chat.json", sequence_length=length, extra_token=extra, longer=longer, seed=7
        )
    except UsageError as error:
        assert "no document can be packed" in str(error) and min(map(len, tokens)) > length + extra and longer == "drop"
        return
    flat = [(0, False), *(token for one in tokens for token in one)]  # places from 1; 0 is padding
    ends = np.cumsum([1, *map(len, tokens)]).tolist()
    places = [list(range(first, last)) for first, last in pairwise(ends)]
    rule = RowOptions(sequence_length=length, document_masks=True, mask_document_ends=True)
    how = {"longer": longer, "options": rule, "order": Native(7, corpus.id, int(extra)), "window": 1 << 20}
    for k in random.sample(range(100), 10):
        sample, (wanted, _) = data[k], packed_sample(k, places, **how)
        for name in ("tokens", "labels"):
            assert sample[name].tolist() == [flat[place][0] for place in wanted[name]]
        trained = [flat[place][1] for place in wanted["labels"]]
        assert sample["loss_mask"].tolist() == [a * b for a, b in zip(wanted["loss_mask"], trained, strict=True)]
        for name in ("position_ids", "cu_seqlens"):
            assert sample[name].tolist() == wanted[name]
    check_loaded(random, data, size=random.choice((1, 4, 6)), steps=5)
