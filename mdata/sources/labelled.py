"""Texts with labels: the files of MNLI, QQP and RACE, and a user's own tsv or jsonl.

MNLI: columns 0 (index), 8 and 9 (sentences) and the last (gold label); a header of 10 columns is that of a test set,
without labels. QQP: id, two ids, two questions, is_duplicate; a header of 3 columns (id, questions) is that of a test
set. Neither has quoting: quotes are text. RACE: folders of *.txt, each line an article with questions, four options
each, and answers as letters; files are read in the order of their names, so that rows have the same numbers everywhere.
Own files have the named columns (a tsv needs a header) or keys `label`, `text` and perhaps `text_pair`, and `id`.

What the published files are known for is left out and counted: MNLI's "-" (no consensus among annotators), blank lines,
QQP's questions with tabs and newlines, and empty ones. Any other bad row is an error with file and row, or is counted
under `on_error = "skip"`. Megatron-LM's tasks stop at some of these without a message.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mdata.errors import BadInputError, UsageError, counted, os_errors_named
from mdata.progress import SILENT, Progress
from mdata.util.regular_files import refuse_wide_encoding

Task = Literal["mnli", "qqp", "race", "classify"]
TASKS: tuple[Task, ...] = ("mnli", "qqp", "race", "classify")
LABELS: Mapping[str, tuple[str, ...]] = {
    "mnli": ("contradiction", "entailment", "neutral"),
    "qqp": ("not_duplicate", "duplicate"),
}
LEVEL: Literal["labelled"] = "labelled"  # of their corpora
NUM_CHOICES = 4  # options of a question of RACE
_MNLI_TEST, _QQP_TEST, _QQP_TRAIN = 10, 3, 6  # columns
_NO_CONSENSUS = "-"
_SHOWN = 5
_LABEL_KEYS, _TEXT_KEYS = ("label", "gold_label"), ("text", "sentence", "text_a", "sentence1", "premise", "question1")
_PAIR_KEYS, _ID_KEYS = ("text_pair", "text_b", "sentence2", "hypothesis", "question2"), ("id", "uid", "index", "idx")


class RowName(NamedTuple):
    """The name of a row in its file, and its label; None: unknown."""

    uid: str
    label: int | None


def label_ids(name: RowName) -> list[int]:
    """The first sequence of a row: 0 or the label + 1, then the hexadecimal digits of its name.

    Small numbers, so that the ids of each vocabulary have room for them.
    """
    return [0 if name.label is None else name.label + 1, *(int(digit, 16) for digit in name.uid.encode().hex())]


def row_name(ids: Sequence[int]) -> RowName:
    """What `label_ids` wrote."""
    label, *digits = ids
    uid = bytes.fromhex("".join(f"{digit:x}" for digit in digits)).decode("utf-8", "replace")
    return RowName(uid, label - 1 if label else None)


class LabelledRow(NamedTuple):
    """A row of a file.

    Args:
        row: its line, from 1. uid: its name in predictions.
        label: the number of its class, or of the right choice; None: unknown, as in test sets.
        texts: one or two; of RACE the article, then each question with one of its options.
    """

    file: int
    row: int
    uid: str
    label: int | None
    texts: tuple[str, ...]


class BadLabelledRow(Exception):
    """A row that cannot be read.

    Args:
        kind: of the fault, under which it is counted. reason: for the user.
        known: the published files have such rows, so it is no error.
    """

    def __init__(self, kind: str, reason: str, *, known: bool = False) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.known = kind, reason, known


@dataclass
class LabelledFile:
    """The rows of one data set.

    Attributes:
        name: of the set, from its path. files: that were read. labels: the names of classes; (): choices.
        skipped: fault -> how many rows were left out for it. columns: those of other names, as given.
    """

    name: str
    files: tuple[Path, ...]
    labels: tuple[str, ...]
    rows: list[LabelledRow] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    columns: dict[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> int | None:
        """Texts of a row of which one is right; None: rows have classes."""
        return None if self.labels else NUM_CHOICES


def clean_text(text: str) -> str:
    """Megatron-LM's: newlines and runs of blanks become one blank, and a full stop joins the word before it."""
    text = re.sub(r"\s+", " ", text.replace("\n", " "))
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text


def read_labelled(
    path: str | Path,
    task: Task,
    *,
    labels: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
    on_error: str = "stop",
    to_train: bool = False,
    progress: Progress = SILENT,
) -> LabelledFile:
    """All rows of a file, or of a folder of RACE.

    Args:
        labels: of task "classify": the names of its classes; (): the values that occur in this file, in order.
        columns: of task "classify": "label", "text", "text_pair" or "id" -> the name of its column or key.
        on_error: "stop", or "skip": bad rows are left out and counted.
        to_train: whether a row without a label is a bad row; in validation and test sets it is predicted.
        progress: receives a note on what was left out.

    Raises:
        BadInputError: a bad row; names file and row. UsageError: no such file, or none of this form.
    """
    path = Path(path)
    files = _files(path, task)
    read = LabelledFile(
        set_name(path, folder=path.is_dir()),
        files,
        () if task == "race" else tuple(labels) or LABELS.get(task, ()),
        columns=dict(columns or {}),
    )
    if task == "classify" and not read.labels:
        read.labels = labels_in(files, columns)
    for number, file in enumerate(files):
        parse = _parser(file, task, read.labels, columns or {})
        for row, line in _lines(file):
            try:
                made = [_text(parsed) for parsed in parse(line, row)]
                if to_train and any(label is None for _, label, _ in made):
                    raise BadLabelledRow("without a label", "a row to train on without a label")
            except BadLabelledRow as refused:
                if not refused.known and on_error == "stop":
                    raise BadInputError(
                        f"{file}:{row}: {refused.reason}",
                        fix="correct the row, or skip it (--on-error skip)",
                    ) from refused
                read.skipped[refused.kind] += 1
                if sum(read.skipped.values()) <= _SHOWN:
                    progress.note(f"skipped {file}:{row}: {refused.reason}")
                continue
            for uid, label, texts in made:
                name = str(len(read.rows)) if uid is None else uid
                read.rows.append(LabelledRow(number, row, name, label, texts))
    if read.skipped:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(read.skipped.items()))
        progress.note(f"{path}: {counted(len(read.rows), 'row')}; left out: {counts}")
    return read


class Sources(NamedTuple):
    """The files, or folders of RACE, of a task."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()


def sources_in(path: Path, task: Task) -> Sources:
    """What a folder as it was published holds; anything else is training data itself.

    Of MNLI and QQP: train.tsv, dev*.tsv, test*.tsv. Of RACE: train, dev and test, with middle and high in them.
    """
    if task == "race" and (path / "train").is_dir():
        return Sources(*(_race_folders(path / split) for split in ("train", "dev", "test")))
    if task in ("mnli", "qqp") and (path / "train.tsv").is_file():
        return Sources((path / "train.tsv",), *(tuple(sorted(path.glob(f"{s}*.tsv"))) for s in ("dev", "test")))
    return Sources((path,))


def _race_folders(path: Path) -> tuple[Path, ...]:
    if any(path.glob("*.txt")):
        return (path,)
    return tuple(sorted(inside for inside in path.glob("*") if any(inside.glob("*.txt"))))


def set_name(path: Path, *, folder: bool) -> str:
    """The name of a set in tables and files: that of the file, or of a folder with that of the folder above it."""
    return "-".join(path.parts[-2:]) if folder else path.stem


Parsed = tuple[str | None, int | None, tuple[str, ...]]
"""(name, or None for its number; label; texts)."""


def _files(path: Path, task: Task) -> tuple[Path, ...]:
    with os_errors_named(f"reading {path}"):
        if not path.exists():
            raise UsageError(f"there is no {path}", expected=f"a file of task {task}")
        if not path.is_dir():
            return (path,)
        files = tuple(sorted(path.glob("*.txt"))) if task == "race" else ()
    if not files:
        expected = "*.txt with articles in it" if task == "race" else f"a file: task {task} has no folders"
        raise UsageError(f"{path} is a folder without data", expected=expected)
    return files


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line, without a byte order mark; newlines of other kinds than \\n are text."""
    with os_errors_named(f"reading {file}"), file.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            if number == 1:
                refuse_wide_encoding(file, raw)
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise BadInputError(f"{file}:{number}: not UTF-8", found=str(error)) from error


def _parser(
    file: Path, task: Task, labels: tuple[str, ...], columns: Mapping[str, str]
) -> Callable[[str, int], Iterator[Parsed]]:
    """What reads a line of this file."""
    if task == "race":
        return lambda line, _: _race(line)
    if task == "classify":
        return _own_parser(file, labels, columns)
    header = next((line for _, line in _lines(file)), "").split("\t")
    read = _mnli if task == "mnli" else _qqp
    least = _MNLI_TEST if task == "mnli" else _QQP_TEST
    if len(header) < least:
        raise UsageError(
            f"{file} is not a file of task {task}",
            found=f"a header of {counted(len(header), 'column')}",
            expected=f"at least {least}, separated by tabs",
        )
    return lambda line, row: iter(()) if row == 1 else iter([read(line, len(header))])


def _mnli(line: str, width: int) -> Parsed:
    cells = _cells(line.rstrip())
    if len(cells) < _MNLI_TEST:
        raise BadLabelledRow("of another width", f"{counted(len(cells), 'column')} instead of at least {_MNLI_TEST}")
    first, second, gold = (clean_text(cells[place].strip()) for place in (8, 9, -1))
    if width == _MNLI_TEST:
        label = None
    elif gold == _NO_CONSENSUS:
        raise BadLabelledRow("without a consensus", 'the label is "-": the annotators did not agree', known=True)
    else:
        label = _number_of(gold, LABELS["mnli"])
    _filled(first, second)
    return cells[0].strip(), label, (first, second)


def _qqp(line: str, width: int) -> Parsed:
    is_test = width == _QQP_TEST
    cells, columns = _cells(line), _QQP_TEST if is_test else _QQP_TRAIN
    if len(cells) != columns:
        reason = f"{counted(len(cells), 'column')} instead of {columns}: a tab or newline in a question"
        raise BadLabelledRow("of another width", reason, known=not is_test)
    first, second = (clean_text(cell.strip()) for cell in (cells[1:3] if is_test else cells[3:5]))
    if not first or not second:
        raise BadLabelledRow("with an empty text", "a question is empty", known=not is_test)
    if is_test:
        return cells[0].strip(), None, (first, second)
    if not (gold := cells[5].strip()):
        raise BadLabelledRow("without a label", "is_duplicate is empty", known=True)
    return cells[0].strip(), _number_of(gold, ("0", "1")), (first, second)


def _race(line: str) -> Iterator[Parsed]:
    if not line.strip():
        raise BadLabelledRow("blank", "a blank line", known=True)
    record = _json(line)
    article, questions, options, answers = (record.get(key) for key in ("article", "questions", "options", "answers"))
    lists = [part for part in (questions, options, answers) if isinstance(part, list)]
    if not isinstance(article, str) or len(lists) < 3:
        raise BadLabelledRow("of another form", "no article with lists of questions, options and answers")
    if len({*map(len, lists)}) > 1:
        counts = [*map(len, lists)]
        raise BadLabelledRow(
            "of another form",
            f"{counted(counts[0], 'question')}, {counted(counts[1], 'option')} and {counted(counts[2], 'answer')}",
        )
    context = clean_text(article)
    made: list[Parsed] = []
    for number, (question, choices, answer) in enumerate(zip(*lists, strict=True), 1):
        if not isinstance(choices, list) or len(choices) != NUM_CHOICES:
            found = counted(len(choices), "option") if isinstance(choices, list) else "no list of options"
            raise BadLabelledRow("of another form", f"question {number} has {found} instead of {NUM_CHOICES}")
        if not all(isinstance(text, str) for text in (question, *choices, answer)) or answer not in tuple("ABCD"):
            raise BadLabelledRow("with an unknown label", f"question {number} has the answer {answer!r}, not A to D")
        texts = (question.replace("_", choice) if "_" in question else f"{question} {choice}" for choice in choices)
        made.append((None, "ABCD".index(answer), (context, *map(clean_text, texts))))
    yield from made


def _own_parser(
    file: Path, labels: tuple[str, ...], columns: Mapping[str, str]
) -> Callable[[str, int], Iterator[Parsed]]:
    records = _own_records(file)

    def read(line: str, row: int) -> Iterator[Parsed]:
        record = records(line, row)
        if record is None:
            return
        values = {name: _value(record, name, columns) for name in ("label", "text", "text_pair", "id")}
        if not isinstance(values["text"], str) or not values["text"].strip():
            raise BadLabelledRow("with an empty text", f"no text under {_named('text', columns)}")
        pair, gold = values["text_pair"], values["label"]
        if pair is not None and not isinstance(pair, str):
            raise BadLabelledRow("of another form", f"{_named('text_pair', columns)} is not a text")
        label = None if gold is None or gold == "" else _number_of(label_text(gold), labels)
        texts = tuple(text.strip() for text in (values["text"], pair) if text is not None)
        yield None if values["id"] is None else str(values["id"]), label, texts

    return read


def _own_records(file: Path) -> Callable[[str, int], dict[str, Any] | None]:
    """What makes a record of a line: a header names the columns of a tsv."""
    first = next((line for _, line in _lines(file)), "")
    if first.lstrip().startswith("{"):

        def of_json(line: str, row: int) -> dict[str, Any]:
            if not line.strip():
                raise BadLabelledRow("blank", "a blank line", known=True)
            return _json(line)

        return of_json
    names = [name.strip() for name in first.split("\t")]
    if len(names) < 2:
        raise UsageError(
            f"{file} is neither jsonl nor tsv",
            found=f"a first line {first[:60]!r}" if first else "an empty file",
            expected="a record as JSON in each line, or columns separated by tabs under a header",
        )

    def of_tsv(line: str, row: int) -> dict[str, Any] | None:
        if row == 1:
            return None
        cells = _cells(line)
        if len(cells) != len(names):
            raise BadLabelledRow(
                "of another width", f"{counted(len(cells), 'column')}, and the header has {len(names)}"
            )
        return dict(zip(names, cells, strict=True))

    return of_tsv


def labels_in(files: Sequence[Path], columns: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The labels that occur in own files: numbers in their order, other names by the alphabet.

    Raises:
        UsageError: there are none.
    """
    columns, labels = columns or {}, set[str]()
    for file in files:
        records = _own_records(file)
        for row, line in _lines(file):
            try:
                record = records(line, row)
            except BadLabelledRow:
                continue  # reading the rows says so
            gold = None if record is None else _value(record, "label", columns)
            labels |= set() if gold is None or gold == "" else {label_text(gold)}
    if not labels:
        where, expected = ", ".join(map(str, files)), f"{_named('label', columns)} in the rows"
        raise UsageError(f"{where} has no labels", expected=expected, fix="--columns label=NAME")
    return tuple(sorted(labels, key=lambda text: (not text.lstrip("-").isdigit(), len(text) * text.isdigit(), text)))


def label_text(value: Any) -> str:
    """The name of a class, which JSON may hold as a number or a truth value."""
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value).strip()


def _value(record: Mapping[str, Any], name: str, columns: Mapping[str, str]) -> Any:
    keys = {"label": _LABEL_KEYS, "text": _TEXT_KEYS, "text_pair": _PAIR_KEYS, "id": _ID_KEYS}[name]
    keys = (columns[name],) if name in columns else keys
    return next((record[key] for key in keys if key in record), None)


def _named(name: str, columns: Mapping[str, str]) -> str:
    return repr(columns.get(name, name))


def _cells(line: str) -> list[str]:
    if not line.strip():
        raise BadLabelledRow("blank", "a blank line", known=True)
    return line.split("\t")


def _number_of(text: str, labels: Sequence[str]) -> int:
    if text not in labels:
        raise BadLabelledRow(
            "with an unknown label", f"the label is {text[:60]!r}, not one of {', '.join(labels[:20])}"
        )
    return labels.index(text)


def _text(parsed: Parsed) -> Parsed:
    """What was parsed, if it is text: JSON can name halves of characters."""
    try:
        "".join((parsed[0] or "", *parsed[2])).encode()
    except UnicodeEncodeError as error:
        raise BadLabelledRow("not UTF-8", f"not a text: {error.reason}") from error
    return parsed


def _filled(*texts: str) -> None:
    if not all(texts):
        raise BadLabelledRow("with an empty text", "a sentence is empty")


def _json(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLabelledRow("not JSON", f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadLabelledRow("not JSON", f"{type(record).__name__} instead of a JSON object")
    return record
