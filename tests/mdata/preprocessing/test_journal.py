"""The journal: synced records survive any truncation and any flipped bit, and nothing after damage is used."""

from __future__ import annotations

import json
import multiprocessing

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import ResourceError, UsageError
from mdata.preprocessing.journal import Journal, read_records
from mdata.util import atomic_io, file_lock
from tests.helpers.examples import examples
from tests.helpers.failures import durable_calls
from tests.mdata.preprocessing.test_bad_rows import Stopping
from tests.mdata.preprocessing.test_preprocess import contents, options

VALUES = st.one_of(st.none(), st.integers(), st.booleans(), st.text(max_size=8), st.lists(st.integers(), max_size=3))
RECORD = st.dictionaries(st.text(max_size=5), VALUES, max_size=3).map(lambda record: {**record, "kind": "x"})
RECORDS = st.lists(RECORD, max_size=5)


def write(path, records):
    journal = Journal(path)
    for record in records:
        journal.append(record)
    journal.close()
    return path.read_bytes()


def records_of(path):
    journal = Journal(path)
    journal.close()
    return journal.records


@examples(60)
@given(records=RECORDS)
def test_records_come_back_and_each_is_one_line(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("j") / "journal"
    data = write(path, records)
    assert records_of(path) == read_records(path)[0] == records
    written = data.split(b"\n")[:-1]
    assert [json.loads(line[17:]) for line in written] == records
    assert path.read_bytes() == data


@examples(60)
@given(records=RECORDS, more=RECORDS, cut=st.floats(0, 1), flip=st.booleans())
def test_what_lies_before_a_cut_or_a_flipped_bit_survives_alone(tmp_path_factory, records, more, cut, flip):
    """And a journal that was damaged is written on as if it had ended there."""
    path = tmp_path_factory.mktemp("j") / "journal"
    data = bytearray(write(path, records))
    place = min(int(cut * len(data)), len(data) - 1)
    whole = data[: max(place, 0)].count(b"\n")
    if flip and data:
        data[place] ^= 1 << place % 8
    else:
        del data[place:]
    path.write_bytes(data)
    assert read_records(path)[0] == records[:whole]
    assert write(path, more).count(b"\n") == whole + len(more)
    assert records_of(path) == records[:whole] + more


@pytest.mark.parametrize(
    "text", [b"{", b"3", b"null", b"[1]", b"{}", b'{"kind":3}', b'{"kind":"\xff"}', b"[" * 5000, b"9" * 5000]
)
def test_a_line_that_is_no_record_ends_the_journal_whatever_its_hash(tmp_path, text):
    whole = write(tmp_path / "journal", [{"kind": "job"}])
    line = blake3(text).hexdigest()[:16].encode() + b" " + text + b"\n"
    (tmp_path / "journal").write_bytes(whole + line + whole)
    assert read_records(tmp_path / "journal")[0] == [{"kind": "job"}]
    assert write(tmp_path / "journal", [{"kind": "state"}]).startswith(whole)
    assert records_of(tmp_path / "journal") == [{"kind": "job"}, {"kind": "state"}]


def test_every_flipped_bit_is_seen(tmp_path):
    records = [{"kind": "job"}, {"kind": "state", "rows": 7}]
    data = write(tmp_path / "journal", records)
    first = data.index(b"\n") + 1
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "journal").write_bytes(flipped)
        assert records_of(tmp_path / "journal") == records[: bit // 8 >= first], bit


def test_a_record_is_on_the_device_when_append_returns(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal")
    with durable_calls(monkeypatch) as calls:
        journal.append({"kind": "a", "n": 1})
    assert [name for name, _ in calls.seen] == ["write", "sync"]
    journal.close()


def test_a_record_that_could_not_be_written_hides_none_after_it(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal")
    journal.append({"kind": "a", "n": 1})
    real = atomic_io.write
    for fail_at in (0, 1):  # half a line is written before either
        with monkeypatch.context() as patch:
            patch.setattr(atomic_io, "write", lambda fd, data: real(fd, data[:5]))
            with durable_calls(patch, fail_at + 1), pytest.raises(ResourceError, match=r"writing .*journal"):
                journal.append({"kind": "lost", "n": 1})
    journal.append({"kind": "b", "n": 2})
    journal.close()
    assert records_of(tmp_path / "journal") == [{"kind": "a", "n": 1}, {"kind": "b", "n": 2}]


def test_restart_and_remove(tmp_path):
    write(tmp_path / "journal", [{"kind": "a", "n": 1}])
    journal = Journal(tmp_path / "journal")
    assert journal.records == [{"kind": "a", "n": 1}]
    journal.restart()
    assert journal.records == []
    journal.append({"kind": "b", "n": 2})
    assert read_records(tmp_path / "journal")[0] == [{"kind": "b", "n": 2}]
    journal.remove()
    journal.close()
    assert list(tmp_path.iterdir()) == []


def job(folder, words, **changes) -> mdata.PreprocessOptions:
    """A corpus of two keys whose texts begin with a word."""
    folder.mkdir(exist_ok=True)
    rows = [json.dumps({"text": f"{words} {row}", "b": f"other {row}"}).encode() for row in range(60)]
    (folder / f"{words}.jsonl").write_bytes(b"\n".join(rows))
    given_options = {"tokenizer_type": "ByteTokenizer", "tokenizer_model": None, "workers": 1, "chunk_bytes": 100}
    source = (str(folder / f"{words}.jsonl"),)
    return options(folder / "out", input=source, checkpoint_s=0, **{**given_options, **changes})


@pytest.mark.parametrize("ends", ["killed", "finished"])
def test_a_run_of_other_keys_onto_the_same_files_ends_the_one_before(tmp_path, ends):
    """It takes over their files in the making, which the first run's journal still speaks of."""
    mdata.preprocess(job(tmp_path / "whole", "one"))
    with pytest.raises(KeyboardInterrupt):
        mdata.preprocess(job(tmp_path, "one"), Stopping(stop_at=3))
    notes = Stopping(stop_at=20 if ends == "killed" else 0)
    try:
        mdata.preprocess(job(tmp_path, "another", json_keys=("text", "b")), notes)
    except KeyboardInterrupt:
        assert ends == "killed"
    assert notes.lines[0] == "an earlier, unfinished run of the keys text with the same files is discarded"
    result = mdata.preprocess(job(tmp_path, "one", overwrite=ends == "finished"))
    assert not result.resumed
    assert mdata.verify(result.paths["text"], full=True).problems == ()
    expected = (tmp_path / "whole" / "out" / "out_text_document.bin").read_bytes()
    assert (tmp_path / "out" / "out_text_document.bin").read_bytes() == expected
    assert not [name for name in contents(tmp_path / "out") if name.endswith((".journal", ".lock"))]


def test_a_run_of_another_prefix_onto_the_same_files_ends_the_one_before(tmp_path):
    """Part 0 of `out` is what `out_0` writes: neither name of the two journals begins with the other's."""
    with pytest.raises(KeyboardInterrupt):
        mdata.preprocess(job(tmp_path, "one", partitions=2), Stopping(stop_at=3))
    other = job(tmp_path, "another", output_prefix=str(tmp_path / "out" / "out_0"))
    with pytest.raises(KeyboardInterrupt):
        mdata.preprocess(other, Stopping(stop_at=8))
    result = mdata.preprocess(job(tmp_path, "one", partitions=2))
    mdata.preprocess(job(tmp_path / "whole", "one", partitions=2))
    assert not result.resumed
    for name in ("out_0_text_document.bin", "out_text_document.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / "out" / name).read_bytes()


def test_files_in_the_making_that_another_run_wrote_are_not_continued(tmp_path):
    """Though they are long enough: the journal knows how they end."""
    with pytest.raises(KeyboardInterrupt):
        mdata.preprocess(job(tmp_path, "one"), Stopping(stop_at=3))
    journal = (tmp_path / "out" / ".out_text.journal").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        mdata.preprocess(job(tmp_path, "two"), Stopping(stop_at=8))
    (tmp_path / "out" / ".out_text.journal").write_bytes(journal)
    mdata.preprocess(job(tmp_path, "one"))
    mdata.preprocess(job(tmp_path / "whole", "one"))
    assert contents(tmp_path / "out") == {
        name: data.replace(str(tmp_path / "whole").encode(), str(tmp_path).encode())
        for name, data in contents(tmp_path / "whole" / "out").items()
        if not name.endswith(".json")
    } | {name: data for name, data in contents(tmp_path / "out").items() if name.endswith(".json")}


def test_runs_of_other_keys_onto_other_files_are_left_alone(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        mdata.preprocess(job(tmp_path, "one"), Stopping(stop_at=3))
    mdata.preprocess(job(tmp_path, "one", json_keys=("b",)))
    assert mdata.preprocess(job(tmp_path, "one")).resumed


def _hold(path, ready, go) -> None:
    with file_lock.hold(path):
        ready.set()
        go.wait(60)


def test_a_run_of_other_keys_that_is_at_work_is_named(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        mdata.preprocess(job(tmp_path, "one"), Stopping(stop_at=3))
    before = contents(tmp_path / "out")
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(tmp_path / "out" / ".out_text.lock", ready, go))
    child.start()
    try:
        assert ready.wait(60)
        with pytest.raises(UsageError, match=rf"another run is writing there\n  found: process {child.pid} on"):
            mdata.preprocess(job(tmp_path, "one", json_keys=("text", "b")))
    finally:
        go.set()
        child.join()
    left = contents(tmp_path / "out")
    assert {name: left[name] for name in before} == before
    assert (tmp_path / "out" / ".out_text.journal").stat().st_size > 0
    assert mdata.preprocess(job(tmp_path, "one")).resumed


def test_results_that_would_overwrite_each_other_are_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a", "0_text": "b", "holdout_text": "c"}\n')
    for keys, changes in ((("text", "0_text"), {"partitions": 2}), (("text", "holdout_text"), {"holdout": "0.5"})):
        with pytest.raises(UsageError, match=r"would both be .*_text_document"):
            mdata.preprocess(options(tmp_path / "o", input=(str(tmp_path / "x.jsonl"),), json_keys=keys, **changes))
    assert not list((tmp_path / "o").glob("*"))
