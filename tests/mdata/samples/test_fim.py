"""Fill in the middle: by hand, against the slow twin, invariants for any draws, and in datasets."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import UsageError, _core
from mdata.samples.fim import FimSamples
from mdata.samples.rows import Gathered, RowOptions
from mdata.samples.sample_options import CHARACTER, TOKEN, Fim
from mdata.tokenizers.base.tokenizer_json import added_tokens
from mdata.tokenizers.types.byte import ByteTokenizer
from mdata.util.random_keys import derive_key
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples
from tests.helpers.open_by_keys import open_by_keys
from tests.mdata.tokenizers.visible import END, definition, token
from tests.reference import fim as twin
from tests.reference.masking import KeyedDraws

P, M, S, PAD, EOD, SPLIT = 250, 251, 252, 253, 256, 249
IDS = (P, M, S, PAD, EOD)


class Draws:
    """Draws that were written down: coins as "yes" or "no", places as numbers."""

    def __init__(self, *given):
        self.given = list(given)

    def real(self):
        return {"yes": 0.0, "no": 0.999}[self.given.pop(0)]

    def up_to(self, most):
        place = self.given.pop(0)
        assert 0 <= place <= most
        return place


class TwinDraws:
    """The twin's stream of one sample."""

    def __init__(self, key, number):
        self.stream = KeyedDraws(key, number)

    def real(self):
        return self.stream.random_sample()

    def up_to(self, most):
        return self.stream.randint(0, most + 1)


RULE = twin.Rule(prefix=P, middle=M, suffix=S, eod=EOD)


def by_tokens(text, *drawn, rule=RULE):
    draws = Draws(*drawn)
    out = twin.row(text, rule, parts=twin.Tokens(), draws=draws)
    assert not draws.given, "not all that was written down was drawn"
    return out


def test_documents_by_hand():
    text = [1, 2, 3, 4, EOD, EOD, 5, 6, EOD, 7, 8, 9]
    # The first as prefix, suffix, middle; then an empty one that loses its end; one left alone; the rest suffix first.
    drawn = ("yes", 3, 1, "no", "no", "yes", 2, 2, "yes")
    assert by_tokens(text, *drawn) == [P, 1, S, 4, M, 2, 3, EOD, 5, 6, EOD, P, S, 9, M, 7, 8]
    # What stands behind the last end is rearranged even where it is nothing.
    assert by_tokens([1, EOD], "no", "yes", 0, 0, "no") == [1, EOD, P, S, M]
    assert by_tokens([], "yes", 0, 0, "yes") == [P, S, M]


def test_fragments_by_hand():
    rule = twin.Rule(prefix=P, middle=M, suffix=S, eod=EOD, split=SPLIT)
    text = [1, 2, SPLIT, SPLIT, 3, SPLIT, EOD, 4, SPLIT, 5]
    drawn = ("yes", "yes", 1, 2, "no", "no", "yes", 0, 0, "no", "no")
    assert by_tokens(text, *drawn, rule=rule) == [P, 1, S, M, 2, SPLIT, 3, SPLIT, P, S, M, EOD, 4, SPLIT, 5]
    assert by_tokens([1, 2], "yes", 1, 2, "no", rule=rule) == [P, 1, S, M, 2], "no split token: the document's rate"


def test_characters_by_hand():
    parts = twin.Characters(ByteTokenizer(), dropped={EOD, P})
    text = [*"h\u00e9llo".encode(), P, *b"!"]
    rule = twin.Rule(prefix=P, middle=M, suffix=S, eod=EOD, untouched="#")
    out = twin.row(text, rule, parts=parts, draws=Draws("yes", 2, 5, "no"))
    assert out == [P, *"h\u00e9".encode(), S, *b"!", M, *b"llo"], "places count characters; special tokens are no text"
    assert twin.row(list(b"#no"), rule, parts=parts, draws=Draws("yes")) == list(b"#no")
    assert by_tokens([7, 1, 2], "yes", rule=twin.Rule(prefix=P, middle=M, suffix=S, eod=EOD, untouched=[7])) == [
        7,
        1,
        2,
    ]


class Given:
    """A kind of sample whose rows are given."""

    def __init__(self, rows, length):
        self.rows = rows
        self.options = RowOptions(sequence_length=length)
        self.num_samples = len(rows)

    def gather(self, samples, text, *, out_rows=None, threads=1):
        for place, number in zip(range(len(samples)) if out_rows is None else out_rows, samples, strict=True):
            text[place, : len(self.rows[number])] = self.rows[number]
        return Gathered(np.array([len(self.rows[number]) for number in samples], np.int64))


class Bytes:
    """A corpus of bytes."""

    id, name = "corpus", "bytes"
    tokenizer_fingerprint = ByteTokenizer.fingerprint

    def load_tokenizer(self):
        return ByteTokenizer()


FIM = st.builds(
    Fim,
    rate=st.sampled_from([0.1, 0.5, 1.0]),
    spm_rate=st.sampled_from([0.0, 0.5, 1.0]),
    level=st.sampled_from([CHARACTER, TOKEN]),
    tokens=st.just(IDS),
    no_prefix=st.sampled_from([None, "a", "ab"]),
)
WITH_SPLITS = st.builds(
    lambda fim, rate: Fim(
        **{**fim.__dict__, "split_sample": SPLIT, "fragment_rate": rate},
    ),
    FIM,
    st.sampled_from([0.0, 0.5, 1.0]),
)
TOKENS = st.sampled_from([*b"abcde", 0xC3, 0xA9, 0xF0, EOD, EOD, SPLIT, P])


def expected(fim, ids, key, number):
    by_characters = fim.level == CHARACTER
    untouched = fim.no_prefix if by_characters else list((fim.no_prefix or "").encode())
    dropped = {EOD, P, M, S} | ({SPLIT} if fim.split_sample else set())
    rule = twin.Rule(
        prefix=P,
        middle=M,
        suffix=S,
        eod=EOD,
        split=fim.split_sample,
        untouched=untouched,
        rate=fim.rate,
        spm_rate=fim.spm_rate,
        fragment_rate=fim.fragment_rate,
    )
    parts = twin.Characters(ByteTokenizer(), dropped) if by_characters else twin.Tokens()
    return twin.row(ids, rule, parts=parts, draws=TwinDraws(key, number))


@examples(300)
@given(
    st.one_of(FIM, WITH_SPLITS),
    st.lists(st.lists(TOKENS, max_size=25), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_rows_are_the_twins(fim, rows, extra, data):
    length = max(1, max(map(len, rows)) - 1 + data.draw(st.integers(0, 6)))
    rows = [row[: length + extra] for row in rows]
    options = RowOptions(sequence_length=length, document_masks=True, eod=EOD)
    samples = FimSamples(Given(rows, length), Bytes(), fim=fim, options=options, seed=5, extra_token=extra)
    order = data.draw(st.permutations(range(len(rows))))
    places = np.array(order[::-1], np.int64) if data.draw(st.booleans()) else None
    text = np.full((len(rows), length + 1), -7, np.int64)
    gathered = samples.gather(np.array(order), text, out_rows=places)
    key = derive_key("fim sample v1", 5, "corpus")
    starts = np.split(gathered.cuts[1], gathered.cuts[0][:-1])
    for i, number in enumerate(order):
        wanted = expected(fim, rows[number], (key.low, key.high), number)
        row = text[i if places is None else places[i]].tolist()
        count = min(len(wanted), length + extra)
        assert gathered.counts[i] == count
        assert row == wanted[:count] + [PAD] * (length + 1 - count)
        assert starts[i].tolist() == [p for p in range(1, min(count, length)) if row[p - 1] == EOD]


@examples(200)
@given(st.one_of(FIM, WITH_SPLITS), st.lists(TOKENS.filter(lambda id: id not in (P, 0xC3, 0xA9, 0xF0)), max_size=60))
def test_nothing_is_lost_and_no_document_is_mixed(fim, text):
    if fim.split_sample is None:
        text = [id for id in text if id != SPLIT]  # no UTF-8
    samples = FimSamples(Given([text], 400), Bytes(), fim=fim, options=RowOptions(sequence_length=400, eod=EOD), seed=1)
    row = np.empty((1, 401), np.int64)
    count = int(samples.gather(np.zeros(1, np.int64), row).counts[0])
    before, after = twin.split_at(text, EOD), twin.split_at(row[0, :count].tolist(), EOD)
    before = [part for part in before[:-1] if part] + before[-1:]
    assert len(before) == len(after), "each end of a document but those of empty ones"
    for old, new in zip(before, after, strict=True):
        names = Counter(id for id in new if id in (P, M, S))
        assert names[P] == names[M] == names[S]
        kept = Counter(old) - Counter({SPLIT: old.count(SPLIT)})
        assert Counter(id for id in new if id not in (P, M, S, SPLIT)) == kept
        if fim.split_sample is None and names:
            assert put_together(new) == old


def put_together(ids):
    """The text of a document that was taken apart."""
    assert ids[0] == P
    if ids[1] == S and M in ids and ids.index(S) == 1:
        middle = ids.index(M)
        # Prefix and middle follow each other in suffix-first form; an empty prefix looks the same in both forms.
        return ids[middle + 1 :] + ids[2:middle] if middle else []
    suffix, middle = ids.index(S), ids.index(M)
    return ids[1:suffix] + ids[middle + 1 :] + ids[suffix + 1 : middle]


class Around:
    """A byte tokenizer that puts BOS (257) before every text, and SEP (258) behind it."""

    special_ids = {"<s>": 257, "[SEP]": 258}

    def encode_batch(self, texts):
        ids = [[257, *text.encode(), 258] for text in texts]
        return np.array([id for one in ids for id in one], np.int32), np.array([len(one) for one in ids])

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class WithBos(Bytes):
    """A corpus of that tokenizer."""

    tokenizer_fingerprint = "bos"

    def load_tokenizer(self):
        return Around()


AROUND_TEXTS = st.lists(st.sampled_from([*b"abcde", 257, 258, EOD, EOD, SPLIT]), max_size=40)


@examples(100)
@given(st.one_of(FIM, WITH_SPLITS), AROUND_TEXTS)
def test_a_rearranged_document_keeps_the_ids_around_it(fim, text):
    """BOS stays in front of the document, not of each part as in Megatron; it was dropped."""
    fim = Fim(**{**fim.__dict__, "level": CHARACTER})
    length = max(1, len(text)) + 3 * len(text) + 10
    samples = FimSamples(
        Given([text], length), WithBos(), fim=fim, options=RowOptions(sequence_length=length, eod=EOD), seed=5
    )
    assert samples.keeps_ids_around
    row = np.empty((1, length + 1), np.int64)
    count = int(samples.gather(np.zeros(1, np.int64), row).counts[0])
    key = derive_key("fim sample v1", 5, "corpus")
    rule = twin.Rule(
        prefix=P, middle=M, suffix=S, eod=EOD, split=fim.split_sample, untouched=fim.no_prefix,
        rate=fim.rate, spm_rate=fim.spm_rate, fragment_rate=fim.fragment_rate,
    )  # fmt: skip
    dropped = {EOD, P, M, S, 257, 258} | ({SPLIT} if fim.split_sample else set())
    parts = twin.Characters(Around(), dropped, frozenset({257, 258}))
    wanted = twin.row(text, rule, parts=parts, draws=TwinDraws((key.low, key.high), 0))
    assert row[0, :count].tolist() == wanted


def test_the_ids_around_a_document_by_hand():
    parts = twin.Characters(Around(), {EOD, P, M, S, 257, 258}, frozenset({257, 258}))
    text = [257, *b"abcd", 258, EOD, 257, *b"xy", 258]
    drawn = ("yes", 1, 2, "no", "yes", 2, 0, "yes")
    out = twin.row(text, RULE, parts=parts, draws=Draws(*drawn))
    first = [257, P, *b"a", S, *b"cd", M, *b"b", 258, EOD]
    assert out == [*first, 257, P, S, M, *b"xy", 258]


def test_draws_are_known():
    """Frozen: the key's purpose, and the order in which draws are asked for."""
    draws = _core.KeyedStream(1, 2, 3)
    assert [draws.up_to(most) for most in (0, 1, 10, 2**40)] == KNOWN_PLACES
    assert draws.real() == KNOWN_REAL
    text = [*b"known answers", EOD, *b"of a row"]
    for level, wanted in KNOWN_ROWS.items():
        fim = Fim(rate=0.9, tokens=IDS, level=level)
        samples = FimSamples(
            Given([text] * 3, 40), Bytes(), fim=fim, options=RowOptions(sequence_length=40, eod=EOD), seed=7
        )
        rows = np.empty((3, 41), np.int64)
        counts = samples.gather(np.arange(3), rows).counts
        found = [
            bytes(b"PMS_|"[IDS.index(id)] if id in IDS else id for id in row[:n])
            for row, n in zip(rows, counts, strict=True)
        ]
        assert found == wanted, level


KNOWN_PLACES, KNOWN_REAL = [0, 0, 7, 972647153861], 0.44065796474981356
_ROWS = [b"PSersMknown answ|of a row", b"PknownSrsM answe|PSwMof a ro", b"known answers|of a row"]
KNOWN_ROWS = {CHARACTER: _ROWS, TOKEN: _ROWS}  # a byte is a character here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Corpora a and b of bytes, made by `mdata preprocess --append-eod`, and a blend of both."""
    folder = tmp_path_factory.mktemp("fim")
    random = np.random.default_rng(3)
    words = ["alpha", "beta", "gamma", "d\u00e9lta", "def f(x):", "return"]
    for name, size in (("a", 40), ("b", 70)):
        texts = [" ".join(random.choice(words, int(random.integers(1, 9)))) for _ in range(size)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        options = {"input": (str(folder / f"{name}.jsonl"),), "output_prefix": str(folder / name), "workers": 1}
        mdata.preprocess(mdata.PreprocessOptions(**options, tokenizer_type="ByteTokenizer", append_eod=True))
    mdata.make_blend(
        ["0.7", str(folder / "a_text_document.json"), "0.3", str(folder / "b_text_document.json")], folder / "mix.json"
    )
    return folder


def opened(folder, name="mix.json", **options):
    return open_by_keys(folder / name, **{"sequence_length": 64, "fim_rate": 0.7, "fim_tokens": IDS[:4], **options})


KINDS = [
    {},
    {"document_masks": True, "fim_level": TOKEN},
    {"eod_mask_loss": True, "extra_token": False, "seed": 8},
    {"split": "valid", "split_shares": "50,50", "document_masks": True},
    {"name": "a_text_document", "order": "megatron", "num_samples": 60, "document_masks": True, "pad": 3},
    {"name": "b_text_document", "order": "megatron", "num_samples": 50, "fim_level": TOKEN, "reset_position_ids": True},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_in_a_dataset(folder, options):
    data = opened(folder, **options)
    samples = np.random.default_rng(1).permutation(min(40, data.num_samples or 40))
    rows = data.read(samples)
    single = [data[int(k)] for k in samples]
    again = [pickle.loads(pickle.dumps(data))[int(k)] for k in samples[:3]]
    for name in ("tokens", "labels", "loss_mask", *(["position_ids"] if "position_ids" in single[0] else [])):
        assert np.array_equal(getattr(rows, name), np.stack([row[name] for row in single])), name
    for one, other in itertools.product(range(3), ("tokens", "labels")):
        assert np.array_equal(single[one][other], again[one][other])
    plain = opened(folder, **{**options, "fim_rate": 0.0}).read(samples)
    # A row that begins with the end of a document loses it.
    changed = (plain.tokens != rows.tokens).any(axis=1) & (plain.tokens[:, 0] != EOD)
    assert changed.mean() > 0.5
    assert all((row["tokens"] == P).any() for row, other in zip(single, changed, strict=True) if other)
    if rows.cu_seqlens is not None:
        starts = {i * 64 + start for i, row in enumerate(single) for start in row["cu_seqlens"].tolist()}
        assert rows.cu_seqlens.tolist() == sorted(starts)
        behind = np.flatnonzero(rows.tokens.reshape(-1)[:-1] == EOD) + 1
        assert set(behind.tolist()) >= {start for start in starts if start % 64}
        assert ((rows.position_ids == 0).reshape(-1).nonzero()[0] == sorted(starts - {len(samples) * 64})).all()


def test_neither_order_nor_company_of_reads_changes_a_row(folder):
    data = opened(folder)
    alone = {k: data[k]["tokens"].tolist() for k in (5, 3, 17)}
    together = opened(folder).read([17, 5, 3]).tokens.tolist()
    assert together == [alone[17], alone[5], alone[3]]
    assert opened(folder, seed=2)[5]["tokens"].tolist() != alone[5]


def test_padding_has_no_loss(folder):
    data = opened(folder, "a_text_document.json", split="whole", fim_rate=1e-9)
    last = data[data.num_samples - 1]
    pad = last["tokens"] == PAD
    assert pad.any() and not last["loss_mask"][pad].any() and last["loss_mask"][: len(pad) - pad.sum() - 1].all()
    shortened = opened(folder, "a_text_document.json", split="whole")[data.num_samples - 1]
    assert not shortened["loss_mask"][shortened["labels"] == PAD].any()


def test_the_option_is_part_of_the_data_id(folder):
    ids = {
        opened(folder, **options).data_id
        for options in ({}, {"fim_rate": 0.0}, {"fim_level": TOKEN}, {"fim_spm_rate": 0.1}, {"fim_rate": 0.6})
    }
    assert len(ids) == 5
    assert "fim" not in opened(folder, fim_rate=0.0).identity
    assert "ids_around" not in opened(folder).identity["fim"]


def test_a_tokenizer_that_adds_bos(tmp_path):
    """As HuggingFaceTokenizer does by default for Llama's: with such ids the data id says that they are kept."""
    added = [token(id, name) for id, name in enumerate(("<s>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"), 5000)]
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": single}
    made = definition(added=tuple(added))
    ids = {entry.content: entry.id for entry in added_tokens(made)}
    template["special_tokens"] = {"<s>": {"id": "<s>", "ids": [ids["<s>"]], "tokens": ["<s>"]}}
    made["added_tokens"] = [{**entry, "id": ids[entry["content"]]} for entry in made["added_tokens"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps({**made, "post_processor": template}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "document number {n} of many"}}\n' for n in range(50)))
    options = {"input": (str(tmp_path / "in.jsonl"),), "output_prefix": str(tmp_path / "x"), "workers": 1}
    options |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path), "append_eod": True}
    mdata.preprocess(mdata.PreprocessOptions(**options))
    data = open_by_keys(tmp_path / "x_text_document", sequence_length=64, fim_rate=1.0)
    assert data.identity["fim"]["ids_around"] == "kept"
    tokens = np.concatenate([data[k]["tokens"] for k in range(8)])
    bos, prefix = (tokens == ids[name] for name in ("<s>", "<fim_prefix>"))
    # Every BOS is followed by a prefix mark, unless the row ends there; rows may begin inside a document, without BOS.
    assert bos.sum() > 8 and prefix.sum() >= bos.sum() - 8
    assert prefix[np.flatnonzero(bos[:-1]) + 1].mean() > 0.8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fim_rate": 1.5}, "fim_rate is not a share"),
        ({"fim_level": "word"}, "no fim_level 'word'"),
        ({"fim_tokens": (1, 2)}, "fim_tokens are prefix, middle and suffix"),
        ({"fim_tokens": ("<fim_prefix>", 2, 3)}, "no token for the prefix of fim_tokens"),
        ({"fim_tokens": (2, 2, 3)}, "two tokens of fill-in-the-middle have the same id"),
        ({"fim_split_sample": 3}, "go together"),
        ({"fim_split_sample": "<file>", "fim_fragment_rate": 0.5}, "no token for fim_split_sample"),
        ({"kind": "packed"}, "samples of kind 'packed' have no fim_"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(folder, options, said):
    with pytest.raises(UsageError, match=said):
        opened(folder, **options)


def test_a_bare_pair_has_no_tokenizer(tmp_path):
    write_pair(tmp_path / "x", [[9]] * 30)
    options = {"sequence_length": 8, "fim_rate": 0.5, "fim_tokens": (1, 2, 3)}
    with pytest.raises(UsageError, match="needs the id that ends a document"):
        open_by_keys(tmp_path / "x", fim_level=TOKEN, **options)
    with pytest.raises(UsageError, match="by characters needs the tokenizer"):
        open_by_keys(tmp_path / "x", eod=4, **options)
    assert open_by_keys(tmp_path / "x", fim_level=TOKEN, eod=4, **options).read([1]).tokens.shape == (1, 8)


def test_the_core_refuses_what_does_not_fit():
    rule = _core.FimRule([1, 2, 3, 4], None, [], 0.5, 0.5, 0.0)
    one = np.zeros(1, np.int64)
    text = np.zeros((2, 5), np.int64)
    for places, counts, limit, told in (
        ([2], [3], 5, "no such row"),
        ([-1], [3], 5, "no such row"),
        ([0], [6], 5, "more tokens"),
        ([0], [-1], 5, "more tokens"),
        ([0], [3], 6, "limit"),
        ([0, 1], [3], 5, "each sample"),
    ):
        with pytest.raises((ValueError, IndexError), match=told):
            _core.fim_rows(rule, (1, 2), one, text, np.array(places), np.array(counts), limit, 0)
    with pytest.raises(ValueError, match="prefix, middle, suffix"):
        _core.FimRule([1, 2, 3], None, [], 0.5, 0.5, 0.0)
