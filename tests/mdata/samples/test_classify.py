import numpy as np
import pytest

import mdata
from mdata import UsageError
from mdata.rewriting.labelled import write_labelled
from mdata.samples.classify import pair
from mdata.sources.labelled import RowName, label_ids, read_labelled, row_name
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join([*WORDS, *(f"[unused{i}]" for i in range(20))]))
    return load_tokenizer(TokenizerSpec(type="BertWordPieceLowerCase", vocab_file=str(path)))


def corpus(folder, tokenizer, text, task="classify", name="rows.tsv"):
    path = folder / name
    path.write_text(text)
    read = read_labelled(path, task)
    return write_labelled({folder / "rows": [read]}, tokenizer, task=task)[folder / "rows"]


def test_a_row_that_is_too_long_loses_its_end():
    assert pair([5, 6], [7], length=8, cls=CLS, sep=SEP) == ([2, 5, 6, 3, 7, 3], [0, 0, 0, 0, 1, 1])
    assert pair([5, 6], [7, 8, 9], length=7, cls=CLS, sep=SEP) == ([2, 5, 6, 3, 7, 8, 3], [0, 0, 0, 0, 1, 1, 1])
    assert pair([5, 6, 7, 8], [9], length=5, cls=CLS, sep=SEP) == ([2, 5, 6, 7, 3], [0, 0, 0, 0, 1])
    assert pair([5, 6], None, length=4, cls=CLS, sep=SEP) == ([2, 5, 6, 3], [0, 0, 0, 0])


@pytest.mark.parametrize("name", [RowName("", 0), RowName("é-17", 40), RowName("7", None)])
def test_the_first_sequence_keeps_name_and_label(name):
    assert row_name(label_ids(name)) == name
    assert max(label_ids(name)[1:], default=0) < 16


def test_rows_once_in_each_epoch_in_another_order(tmp_path, tokenizer):
    manifest = corpus(tmp_path, tokenizer, "text\ttext_pair\tlabel\n" + "".join(f"a\t{c}\t{c}\n" for c in "bcde"))
    assert (manifest.level, manifest.provenance.options["labels"]) == ("labelled", ["b", "c", "d", "e"])
    opened = mdata.open_dataset(tmp_path / "rows.json", sequence_length=8, kind="classify")
    epochs = [opened.read(range(4 * e, 4 * e + 4))["labels"].tolist() for e in range(3)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs) and len({*map(tuple, epochs)}) > 1
    whole = mdata.open_dataset(tmp_path / "rows.json", sequence_length=8, kind="classify", split="whole")
    row = whole[2]
    assert row["text"].tolist() == [CLS, 5, SEP, 8, SEP, 0, 0, 0]
    assert row["types"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert (int(row["labels"]), int(row["loss_mask"]), row["padding_mask"].sum()) == (2, 1, 5)
    assert whole.components[0].samples.names([1, 3]) == [RowName("1", 1), RowName("3", 3)]
    (piece,) = [p for p in whole.components[0].samples.pieces(1) if p.length == 1 and p.sequence == 4]
    assert whole.components[0].samples.samples_of(piece.sequence, first=0, stop=9) == [1]
    assert opened.data_id != whole.data_id


def test_what_is_there_is_not_written_again(tmp_path, tokenizer):
    text = "text\tlabel\na b\tx\nc\ty\n"
    first = corpus(tmp_path, tokenizer, text)
    assert corpus(tmp_path, tokenizer, text).id == first.id
    with pytest.raises(UsageError, match="made of other rows"):
        corpus(tmp_path, tokenizer, text + "d\ty\n")


def test_choices_have_a_row_each_and_the_context_behind_it(tmp_path, tokenizer):
    text = '{"article": "h g", "questions": ["a _"], "options": [["b", "c", "d", "e f"]], "answers": ["D"]}'
    folder = tmp_path / "race"
    folder.mkdir()
    (folder / "a.txt").write_text(text)
    write_labelled({tmp_path / "rows": [read_labelled(folder, "race")]}, tokenizer, task="race", most_choice=2)
    four = mdata.Classify(choices=4)
    whole = mdata.open_dataset(tmp_path / "rows.json", sequence_length=7, kind=four, split="whole")
    assert whole[0]["text"].tolist() == [[CLS, 5, last, SEP, 12, 11, SEP] for last in (6, 7, 8, 9)]
    assert int(whole[0]["labels"]) == 3
    parts = whole.read([0, 0]).split(2)
    assert all(np.array_equal(part["text"][0], whole[0]["text"]) for part in parts)
    with pytest.raises(UsageError, match="rows of another kind"):
        mdata.open_dataset(tmp_path / "rows.json", sequence_length=7, kind="classify")


def test_texts_and_labels_are_not_mistaken_for_each_other(tmp_path, tokenizer):
    corpus(tmp_path, tokenizer, "text\tlabel\na b\tx\nc\ty\n")
    with pytest.raises(UsageError, match="labelled rows"):
        mdata.open_dataset(tmp_path / "rows.json", sequence_length=8, kind="bert")
    with pytest.raises(UsageError, match="no samples of kind 'classify'"):
        mdata.open_dataset(tmp_path / "rows.json", sequence_length=8, kind="classify", order="megatron")
