import json

import pytest

from mdata import BadInputError, UsageError
from mdata.sources.labelled import LABELS, clean_text, read_labelled

MNLI = "index\ta\tb\tc\td\te\tf\tg\tsentence1\tsentence2\tlabel1\tgold_label"
TEST = "index\ta\tb\tc\td\te\tf\tg\tsentence1\tsentence2"


def mnli(*rows, header=MNLI):
    lines = [f"{i}\t" + "x\t" * 7 + "\t".join(row) for i, row in enumerate(rows)]
    return "\n".join([header, *lines]) + "\n"


def written(folder, text, name="dev.tsv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mnli_reads_the_last_column_and_leaves_out_what_has_no_consensus(tmp_path):
    path = written(tmp_path, mnli(("A .  x", 'b "', "neutral", "neutral"), ("A", "b", "neutral", "-")) + "\n")
    read = read_labelled(path, "mnli")
    assert [(row.row, row.uid, row.label, row.texts) for row in read.rows] == [(2, "0", 2, ("A. x", 'b "'))]
    assert read.skipped == {"without a consensus": 1, "blank": 1}
    assert (read.name, read.labels) == ("dev", LABELS["mnli"])


def test_a_test_set_has_no_labels(tmp_path):
    path = written(tmp_path, mnli(("A", "b"), header=TEST))
    assert [row.label for row in read_labelled(path, "mnli").rows] == [None]


@pytest.mark.parametrize(
    "row, reason",
    [
        (("A", " ", "neutral", "neutral"), "a sentence is empty"),
        (("A", "b", "neutral", "maybe"), "the label is 'maybe', not one of contradiction, entailment, neutral"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path, row, reason):
    path = written(tmp_path, mnli(("A", "b", "x", "neutral"), row))
    with pytest.raises(BadInputError) as caught:
        read_labelled(path, "mnli")
    assert f"{path}:3: {reason}" in str(caught.value)
    read = read_labelled(path, "mnli", on_error="skip")
    assert (len(read.rows), sum(read.skipped.values())) == (1, 1)


def test_qqp_leaves_out_questions_with_tabs_and_newlines(tmp_path):
    rows = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "5\t1\t2\ta\tb\t1", "6\t1\t2\ta\tb\tc\t1"]
    rows += ["7\t1\t2\ta", "b\tc\t0", "8\t1\t2\t\tb\t0", "9\t1\t2\ta\tb\t"]
    read = read_labelled(written(tmp_path, "\n".join(rows)), "qqp")
    assert [(row.uid, row.label) for row in read.rows] == [("5", 1)]
    assert read.skipped == {"of another width": 3, "with an empty text": 1, "without a label": 1}
    with pytest.raises(BadInputError, match=r"dev\.tsv:2: the label is '2'"):
        read_labelled(written(tmp_path, f"{rows[0]}\n5\t1\t2\ta\tb\t2"), "qqp")


def test_race_reads_files_by_name_and_fills_every_blank(tmp_path):
    def article(**keys):
        return json.dumps({"article": "x . y", "questions": ["a _ b _", "why?"], "options": [list("pqrs")] * 2} | keys)

    written(tmp_path, article(answers=["B", "D"]), "b.txt")
    written(tmp_path, article(answers=["A", "C"]), "a.txt")
    read = read_labelled(tmp_path, "race")
    assert [(row.uid, row.label) for row in read.rows] == [("0", 0), ("1", 2), ("2", 1), ("3", 3)]
    assert read.rows[0].texts == ("x. y", "a p b p", "a q b q", "a r b r", "a s b s")
    assert read.rows[1].texts[1] == "why? p"
    written(tmp_path, article(answers=["E", "D"]), "b.txt")
    with pytest.raises(BadInputError, match=r"b\.txt:1: question 1 has the answer 'E', not A to D"):
        read_labelled(tmp_path, "race")


def test_own_rows_as_tsv_and_jsonl(tmp_path):
    tsv = written(tmp_path, "uid\tsentence\tlabel\nx1\tgood\tyes\nx2\tbad\tno\nx3\tso so\t\n")
    read = read_labelled(tsv, "classify")
    assert read.labels == ("no", "yes")
    assert [(row.uid, row.label, row.texts) for row in read.rows] == [
        ("x1", 1, ("good",)),
        ("x2", 0, ("bad",)),
        ("x3", None, ("so so",)),
    ]
    records = [{"text": "a", "text_pair": "b", "label": 10}, {"text": "c", "text_pair": "d", "label": 9}]
    path = written(tmp_path, "\n".join(map(json.dumps, records)), "own.jsonl")
    read = read_labelled(path, "classify")
    assert (read.labels, [row.label for row in read.rows]) == (("9", "10"), [1, 0])
    assert [row.texts for row in read.rows] == [("a", "b"), ("c", "d")]
    read = read_labelled(path, "classify", labels=("10",), columns={"text": "text_pair"}, on_error="skip")
    assert ([row.texts[0] for row in read.rows], read.skipped) == (["b"], {"with an unknown label": 1})
    with pytest.raises(UsageError, match="has no labels"):
        read_labelled(path, "classify", columns={"label": "gold"})


@pytest.mark.parametrize(
    "record", [{"text": "\ud800"}, {"text": "a", "id": "\udfff"}, {"text": 3}, {"text": "a", "text_pair": []}]
)
def test_what_json_can_say_and_no_text_is(tmp_path, record):
    path = written(
        tmp_path, json.dumps({"label": 1, "text": "a"}) + "\n" + json.dumps({"label": 1, **record}), "own.jsonl"
    )
    with pytest.raises(BadInputError, match=r"own\.jsonl:2: "):
        read_labelled(path, "classify")
    assert len(read_labelled(path, "classify", on_error="skip").rows) == 1


@pytest.mark.parametrize("text", ['{"label": "good", "text": "fine"}\r\n', "label\ttext\r\ngood\tfine\r\n"])
def test_files_of_windows_are_read_as_others(tmp_path, text):
    (tmp_path / "own").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (row,) = read_labelled(tmp_path / "own", "classify").rows
    assert row.texts == ("fine",)


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a file of task mnli"):
        read_labelled(written(tmp_path, "a\tb\n"), "mnli")
    with pytest.raises(UsageError, match="is a folder without data"):
        read_labelled(tmp_path, "race")
    with pytest.raises(UsageError, match="neither jsonl nor tsv"):
        read_labelled(written(tmp_path, "one column\n"), "classify")
    with pytest.raises(UsageError, match=r"(?s)neither jsonl nor tsv.*an empty file"):
        read_labelled(written(tmp_path, ""), "classify")
    (tmp_path / "latin.tsv").write_bytes(b"text\tlabel\n\xff\t1\n")
    with pytest.raises(BadInputError, match=r"latin\.tsv:2: not UTF-8"):
        read_labelled(tmp_path / "latin.tsv", "classify")
    (tmp_path / "wide.tsv").write_bytes("text\tlabel\na\t1\n".encode("utf-16-le"))
    with pytest.raises(UsageError, match=r"wide\.tsv is UTF-16LE text"):
        read_labelled(tmp_path / "wide.tsv", "classify")


def test_a_full_stop_joins_the_word_before_it():
    assert clean_text(" a  b . c . . d\n") == " a b. c.. d "
