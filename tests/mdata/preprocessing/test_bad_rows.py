"""Bad rows: stop, skip, quarantine, and the allowed number; the same rows with any number of workers."""

from __future__ import annotations

import base64
import io
import json
import random
import tarfile
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import BadInputError, DamageError, UsageError
from mdata.cleaning.clean import CleanRules, clean
from mdata.cleaning.decontaminate import DecontaminateRules, load_item_sets
from mdata.cleaning.text_job import TextJobOptions
from mdata.errors import counted
from mdata.indexed.append_file import SyncPoint
from mdata.preprocessing.bad_rows import BadRowPolicy
from mdata.sources.record_batch import BadRow
from mdata.tokenizer_training.train import train_tokenizer
from tests.helpers.examples import examples
from tests.helpers.notes import Notes
from tests.mdata.preprocessing.test_preprocess import options


class Stopping(Notes):
    def __init__(self, stop_at: int) -> None:
        super().__init__()
        self._left = stop_at

    def stages(self, **seconds: float) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def job(folder, rows, **changes) -> mdata.PreprocessOptions:
    """Small chunks of these lines, a record of the journal after each."""
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_bytes(b"\n".join(rows))
    given_options = {"tokenizer_type": "ByteTokenizer", "tokenizer_model": None, "workers": 1, "chunk_bytes": 60}
    return options(
        folder, input=(str(folder / "in.jsonl"),), checkpoint_s=0, **{**given_options, "on_error": "skip", **changes}
    )


def lines(count: int, *, bad: dict[int, bytes]) -> list[bytes]:
    """Rows from 1, some of them bad."""
    return [bad.get(row, json.dumps({"text": f"row {row}"}).encode()) for row in range(1, count + 1)]


PROBLEM = BadRow(3, "bad-value", "holds a number", "'{}'", b'{"text": 3}')


@examples(50)
@given(kinds=st.lists(st.booleans(), max_size=30), limit=st.integers(0, 8))
def test_one_row_more_than_may_be_stops(tmp_path_factory, kinds, limit):
    """Rows are good or bad; the run stops at bad row number `limit` + 1, which it names."""
    given_options = options(tmp_path_factory.getbasetemp(), on_error="skip", max_errors=str(limit))
    policy, bad = BadRowPolicy(given_options, Notes()), 0
    for row, is_bad in enumerate(kinds, 1):
        if not is_bad:
            continue
        bad_row = BadRow(row, "blank", "empty", "''")
        if bad == limit:
            with pytest.raises(BadInputError, match=rf"x:{row + 5}: empty(.|\n)*found: {counted(bad + 1, 'bad row')}"):
                policy.handle(bad_row, "x", rows_before=5, bad_before=bad)
            return
        policy.handle(bad_row, "x", rows_before=5, bad_before=bad)
        bad += 1
    assert bad == sum(kinds) <= limit


@examples(100)
@given(bad=st.integers(0, 50), more=st.integers(0, 1000), share=st.decimals(0, 100, places=2))
def test_a_share_is_exact_and_looked_at_in_the_end(tmp_path_factory, bad, more, share):
    rows = bad + more
    policy = BadRowPolicy(options(tmp_path_factory.getbasetemp(), on_error="skip", max_errors=f"{share}%"), Notes())
    for number in range(min(bad, 3)):
        policy.handle(PROBLEM, "x", rows_before=0, bad_before=number)
    if rows and Fraction(bad, rows) > Fraction(str(share)) / 100:
        with pytest.raises(BadInputError, match=f"{bad} of {rows} rows"):
            policy.check_share(bad, rows)
    else:
        policy.check_share(bad, rows)


def test_stop_names_the_first_and_only_a_few_skipped_rows_are_shown(tmp_path):
    with pytest.raises(BadInputError, match="x:13: holds a number"):
        BadRowPolicy(options(tmp_path), Notes()).handle(PROBLEM, "x", rows_before=10, bad_before=0)
    notes = Notes()
    policy = BadRowPolicy(options(tmp_path, on_error="skip"), notes)
    for number in range(20):
        policy.handle(PROBLEM, "x", rows_before=number, bad_before=number)
    assert notes.lines[0] == "skipped x:3: holds a number" and len(notes.lines) == 6
    assert "counted but not shown" in notes.lines[-1]


@examples(60)
@given(kept=st.lists(st.one_of(st.binary(max_size=20), st.text(max_size=9).map(repr).map(str.encode), st.none())))
def test_quarantine_gives_every_line_back(tmp_path_factory, kept):
    """UTF-8 as text, other bytes in base 64; each entry is one line of JSON, whatever the row held."""
    folder = tmp_path_factory.mktemp("q")
    path = folder / "bad.jsonl"
    policy = BadRowPolicy(options(folder, on_error="quarantine", quarantine=str(path)), Notes())
    surely = SyncPoint(0, "")
    for number, line in enumerate(kept):
        bad_row = BadRow(1, "not-json", "because", "''", line)
        policy.handle(bad_row, "a\u2028b", rows_before=number, bad_before=number)
        surely = policy.quarantine.sync()
    assert not path.exists()
    policy.quarantine.commit()
    policy.close(keep=False)
    data = path.read_bytes()
    assert len(data) == surely.size and data.count(b"\n") == len(kept)
    for number, (line, written) in enumerate(zip(kept, data.decode().split("\n"), strict=False)):
        entry = json.loads(written)
        assert (entry["file"], entry["row"], entry["kind"]) == ("a\u2028b", number + 1, "not-json")
        assert set(entry) & {"line", "line_base64"} == (set() if line is None else {_how(line)})
        if line is not None:
            found = entry.get("line", "").encode() or base64.b64decode(entry.get("line_base64", ""))
            assert found == line


def _how(line: bytes) -> str:
    try:
        line.decode()
    except UnicodeDecodeError:
        return "line_base64"
    return "line"


def test_quarantine_goes_on_where_the_journal_says(tmp_path):
    path = tmp_path / "bad.jsonl"
    given_options = options(tmp_path, on_error="quarantine", quarantine=str(path))
    first = BadRowPolicy(given_options, Notes())
    first.handle(PROBLEM, "x", rows_before=0, bad_before=0)
    kept = first.quarantine.sync()
    first.handle(PROBLEM, "lost", rows_before=0, bad_before=1)
    first.close(keep=True)
    second = BadRowPolicy(given_options, Notes(), resume=kept)
    second.handle(PROBLEM, "y", rows_before=0, bad_before=1)
    second.quarantine.commit()
    second.close(keep=False)
    assert [json.loads(line)["file"] for line in path.read_text().splitlines()] == ["x", "y"]
    with pytest.raises(DamageError, match=r"bad\.jsonl"):
        BadRowPolicy(given_options, Notes(), resume=kept)  # a finished file of that name is not the one in the making


@pytest.mark.parametrize("limit", [None, "0", "2", "7"])
def test_the_row_that_stops_is_the_same_for_any_workers(tmp_path, limit):
    generator = random.Random(3)
    bad = {row: generator.choice([b"", b"{", b'{"a": 1}', b"\xff", b'{"text": 4}']) for row in range(7, 300, 9)}
    said = set()
    for workers in (1, 2):
        policy = {"on_error": "stop"} if limit is None else {"max_errors": limit}
        with pytest.raises(BadInputError) as caught:
            mdata.preprocess(job(tmp_path / "x", lines(300, bad=bad), workers=workers, **policy))
        said.add(str(caught.value))
    stops_at = 7 + 9 * int(limit or 0)
    assert len(said) == 1 and f"in.jsonl:{stops_at}: " in said.pop()


@pytest.mark.parametrize("workers", [1, 2])
def test_skipped_and_kept_rows_are_counted_and_the_others_are_taken(tmp_path, workers):
    bad = {3: b"{", 4: b"", 40: b"\xff\xfe", 77: b'{"text": 1}', 99: b'{"a": 1}'}
    rows = lines(100, bad=bad)
    found = {}
    for policy in ("skip", "quarantine"):
        kept = str(tmp_path / "bad.jsonl") if policy == "quarantine" else None
        result = mdata.preprocess(job(tmp_path / policy, rows, on_error=policy, quarantine=kept, workers=workers))
        manifest = result.manifests["text"]
        counted = {"not-json": 1, "blank": 1, "not-utf8": 1, "bad-value": 1, "no-key": 1}
        assert manifest.provenance.skipped == counted and manifest.provenance.inputs[0].rows == 100
        assert manifest.shards[0].documents == manifest.provenance.records == 95
        found[policy] = (tmp_path / policy / "out_text_document.bin").read_bytes()
    good = [row for number, row in enumerate(rows, 1) if number not in bad]
    mdata.preprocess(job(tmp_path / "good", good))
    assert found["skip"] == found["quarantine"] == (tmp_path / "good" / "out_text_document.bin").read_bytes()
    entries = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in entries] == sorted(bad)
    assert [entry.get("line", "").encode() or base64.b64decode(entry.get("line_base64", "")) for entry in entries] == [
        bad[row] for row in sorted(bad)
    ]


def test_a_bad_row_of_an_archive_is_told_with_its_member(tmp_path):
    """By each command that reads archives, and in the quarantine file."""
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, content in {"d/a.jsonl": b'{"text": "1"}\n{"text": 2}\n', "d/b.txt": b"\xff"}.items():
            (member := tarfile.TarInfo(name)).size = len(content)
            tar.addfile(member, io.BytesIO(content))
    archive = (str(tmp_path / "x.tar"),)
    given_options = options(tmp_path, input=archive, tokenizer_type="ByteTokenizer", tokenizer_model=None, workers=1)
    told = r"x\.tar:2 \(member d/a\.jsonl, line 2\): "
    with pytest.raises(BadInputError, match=told):
        mdata.preprocess(given_options)
    with pytest.raises(BadInputError, match=told):
        clean(TextJobOptions(input=archive, output=tmp_path / "clean"), CleanRules(steps=("fix",)))
    with pytest.raises(BadInputError, match=told):
        load_item_sets(DecontaminateRules(against=archive))
    with pytest.raises(BadInputError, match=told):
        train_tokenizer(archive, tmp_path / "tokenizer", vocab_size=300)
    mdata.preprocess(replace(given_options, on_error="quarantine", quarantine=str(tmp_path / "bad.jsonl")))
    entries = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [entry["member"] for entry in entries] == ["d/a.jsonl, line 2", "d/b.txt"]


def test_rows_may_be_passed_over_by_a_run_that_continues_one_which_stopped(tmp_path):
    """What the message of a bad row advises does not throw away what was done."""
    rows = lines(60, bad={50: b"{"})
    mdata.preprocess(job(tmp_path / "whole", rows))
    for policy, kept in (("skip", None), ("quarantine", str(tmp_path / "q" / "bad.jsonl"))):
        folder = tmp_path / policy
        (tmp_path / "q").mkdir(exist_ok=True)
        with pytest.raises(BadInputError, match="jsonl:50: "):
            mdata.preprocess(job(folder, rows, on_error="stop"))
        assert mdata.preprocess(job(folder, rows, on_error=policy, quarantine=kept)).resumed
        expected = (tmp_path / "whole" / "out_text_document.bin").read_bytes()
        assert (folder / "out_text_document.bin").read_bytes() == expected
    assert [path.name for path in (tmp_path / "q").iterdir()] == ["bad.jsonl"]


def test_a_larger_share_may_be_allowed_afterwards(tmp_path):
    rows = lines(60, bad={10: b"{", 50: b"{"})
    with pytest.raises(BadInputError, match="2 of 60 rows"):
        mdata.preprocess(job(tmp_path, rows, max_errors="1%"))
    assert not list(tmp_path.glob("out*"))
    assert mdata.preprocess(job(tmp_path, rows, max_errors="5%")).resumed
    assert mdata.preprocess(job(tmp_path, rows, max_errors="6%")).finished_before


def test_another_policy_after_bad_rows_begins_anew(tmp_path):
    """Rows that were skipped are in no quarantine, so it would not be whole; and an older file is not taken for it."""
    rows = lines(60, bad={3: b"{", 50: b"{"})
    (tmp_path / "b.jsonl").write_text("something else, and longer than a few entries of the quarantine\n" * 20)
    a, b = ({"on_error": "quarantine", "quarantine": str(tmp_path / name)} for name in ("a.jsonl", "b.jsonl"))
    for first, then in (({}, a), (a, b), (a, {}), (a, {"on_error": "stop"})):
        folder = tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            mdata.preprocess(job(folder, rows, overwrite=True, **first), Stopping(stop_at=5))
        notes = Notes()
        try:
            assert not mdata.preprocess(job(folder, rows, overwrite=True, **then), notes).resumed
            assert mdata.preprocess(job(folder, rows, **then)).finished_before
        except BadInputError:
            assert then == {"on_error": "stop"}
        assert any("1 bad row was found under on_error" in line for line in notes.lines)
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        for path in folder.iterdir():
            path.unlink() if path.is_file() else [file.unlink() for file in path.iterdir()]
    assert [json.loads(line)["row"] for line in (tmp_path / "b.jsonl").read_text().splitlines()] == [3, 50]


def test_a_finished_result_without_bad_rows_is_the_same_under_any_policy(tmp_path):
    given_options = job(tmp_path, lines(20, bad={}), on_error="stop")
    mdata.preprocess(given_options)
    assert mdata.preprocess(job(tmp_path, lines(20, bad={}), on_error="skip", max_errors="3")).finished_before
    (tmp_path / "bad").mkdir()
    mdata.preprocess(job(tmp_path / "bad", lines(20, bad={4: b""})))
    with pytest.raises(UsageError, match="on_error was skip, is stop"):
        mdata.preprocess(job(tmp_path / "bad", lines(20, bad={4: b""}), on_error="stop"))
    with pytest.raises(BadInputError, match="jsonl:4: "):
        mdata.preprocess(job(tmp_path / "bad", lines(20, bad={4: b""}), on_error="stop", overwrite=True))
    (tmp_path / "bad" / "moved.jsonl").write_text("")
    moved = replace(job(tmp_path / "bad", [], on_error="stop"), input=(str(tmp_path / "bad" / "moved.jsonl"),))
    with pytest.raises(UsageError, match=r"the input was .*, is .*moved\.jsonl"):  # which says more than on_error
        mdata.preprocess(moved)


def test_the_input_is_no_place_for_bad_rows(tmp_path):
    rows = lines(3, bad={2: b"{"})
    path = tmp_path / "in.jsonl"
    with pytest.raises(UsageError, match=r"in\.jsonl is one of the inputs"):
        mdata.preprocess(job(tmp_path, rows, on_error="quarantine", quarantine=str(path)))
    assert path.read_bytes() == b"\n".join(rows)


@pytest.mark.parametrize(("input", "name", "more", "refused"), [
    ("in", "in/bad.jsonl", {}, True),
    ("in", "in/below/bad.JSONL", {}, True),
    ("in", "in/bad.rows", {}, False),
    ("in", "in/.bad.jsonl", {}, False),
    ("in", "in/bad.jsonl", {"exclude": ("bad*",)}, False),
    ("in", "in/bad.jsonl", {"include": ("a*",)}, False),
    ("in", "in/bad.txt", {"input_format": "jsonl"}, False),
    ("in/*", "in/bad.jsonl", {}, True),
    ("in/*", "in/below/bad.jsonl", {}, False),
    ("in/**/*.jsonl", "in/bad.jsonl", {}, True),
    ("in/a*", "in/bad.jsonl", {}, False),
    ("in/a.jsonl", "in/bad.jsonl", {}, False),
])  # fmt: skip
def test_the_next_run_does_not_read_the_bad_rows(tmp_path, input, name, more, refused):
    """It would be refused, or would count them again."""
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\n".join(lines(3, bad={2: b"{"})))
    given = job(tmp_path, lines(1, bad={}), on_error="quarantine", quarantine=str(tmp_path / name), **more)
    asked = replace(given, input=(tmp_path / input,))
    if not refused:
        assert mdata.preprocess(asked) and mdata.preprocess(asked).finished_before
        return
    with pytest.raises(UsageError, match="would be an input of the next run"):
        mdata.preprocess(asked)
    assert not list((tmp_path / "out").glob("*")) and not (tmp_path / name).exists()


@pytest.mark.parametrize("limit", ["1.5", "101%", "100.5%", "-1", "x", "%", ".%", "1e3"])
def test_a_limit_is_whole_rows_or_a_share(tmp_path, limit):
    with pytest.raises(UsageError, match="a number of rows of at most 18 digits, or a share"):
        mdata.preprocess(job(tmp_path, lines(1, bad={}), on_error="skip", max_errors=limit))
