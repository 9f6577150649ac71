"""The ledger: what the journal keeps of it, replayed, is the ledger; also when the last records are lost."""

from __future__ import annotations

import copy
import json

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mdata.preprocessing.run_state import InputState, Ledger
from tests.helpers.examples import examples

TAKE = st.tuples(st.just("take"), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))
EVENTS = st.lists(
    st.one_of(
        TAKE,
        TAKE,
        st.tuples(st.just("refuse"), st.sampled_from(["blank", "not-json", "no-key"])),
        st.tuples(st.just("open")),
        st.tuples(st.just("close")),
        st.tuples(st.just("record")),
        st.tuples(st.just("record")),
        st.tuples(st.just("lost")),  # a record that could not be written: nothing is marked
    ),
    max_size=40,
)


def apply(ledger: Ledger, event: tuple, *, number: int) -> None:
    kind, *values = event
    if kind == "open":
        ledger.open_input(f"in{len(ledger.inputs)}.jsonl", number, modified_ns=number * 10**9)
    elif kind == "close":
        ledger.close_last()
    elif kind == "refuse":
        ledger.refuse(values[0])
    elif kind == "take":
        if not ledger.inputs or ledger.inputs[-1].hash is not None:
            ledger.open_input("next.jsonl", number, modified_ns=0)
        rows, records, special = values
        ledger.take(rows, blake3(str(number).encode()).digest(), records=records, special=[special, 0])


def facts(ledger: Ledger) -> tuple:
    """All that a run may look at; what is not recorded yet is no part of it."""
    counts = (ledger.rows, ledger.records, ledger.bad, dict(ledger.skipped), ledger.special)
    return ledger.inputs, *counts, ledger.next_piece


@examples(300)
@given(events=EVENTS, lose=st.integers(0, 4), then=EVENTS)
def test_a_replayed_ledger_is_the_one_that_was_recorded(events, lose, then):
    """Then both go on, records and all, and are replayed once more."""
    ledger, records, snapshots = Ledger(2), [], []
    run(ledger, events, records, snapshots)
    kept = len(records) - min(lose, len(records))
    replayed = replay(records[:kept])
    expected = snapshots[kept - 1] if kept else Ledger(2)
    assert facts(replayed) == facts(expected)
    again, other = list(records[:kept]), list(records[:kept])
    run(replayed, then, again, [])
    expected = copy.deepcopy(expected)
    expected.mark_journaled()
    run(expected, then, other, [])
    assert again == other and facts(replayed) == facts(expected)
    assert facts(replay(again)) == facts(replay(other))


def run(ledger: Ledger, events: list[tuple], records: list[dict], snapshots: list[Ledger]) -> None:
    for number, event in enumerate(events):
        apply(ledger, event, number=number)
        if event[0] in ("record", "lost"):
            record = json.loads(json.dumps(ledger.journaled()))
            if event[0] == "record":
                ledger.mark_journaled()
                records.append(record)
                snapshots.append(copy.deepcopy(ledger))


def replay(records: list[dict]) -> Ledger:
    ledger = Ledger(2)
    for record in records:
        ledger.replay(record)
    return ledger


@examples(100)
@given(counts=st.lists(st.integers(0, 5), max_size=5))
def test_the_hash_of_an_input_is_that_of_its_pieces_and_the_next_piece_is_counted(counts):
    ledger = Ledger(1)
    assert ledger.next_piece == (0, 0)
    for number, count in enumerate(counts):
        ledger.open_input(str(number), 0, modified_ns=0)
        for piece in range(count):
            assert ledger.next_piece == (number, piece)
            ledger.take(2, bytes([number, piece]) * 16, records=1, special=[1])
        assert ledger.next_piece == (number, count)
    ledger.close_last()
    ledger.close_last()
    assert ledger.next_piece == (len(counts), 0)
    for number, (count, state) in enumerate(zip(counts, ledger.inputs, strict=True)):
        digests = [bytes([number, piece]) * 16 for piece in range(count)]
        assert state == InputState(str(number), 0, 0, rows=2 * count, hash=blake3(b"".join(digests)).hexdigest())
    assert (ledger.rows, ledger.records, ledger.special) == (2 * sum(counts), sum(counts), [sum(counts)])


def test_a_record_holds_what_is_new_only():
    ledger = Ledger(1)
    ledger.open_input("a", 0, modified_ns=0)
    sizes = []
    for piece in range(4):
        ledger.take(1, bytes([piece]) * 32, records=1, special=[0])
        sizes.append(len(ledger.journaled()["digests"]))
        ledger.mark_journaled()
    assert sizes == [64] * 4
    ledger.open_input("b", 0, modified_ns=0)
    assert [known["path"] for known in ledger.journaled()["inputs"]] == ["a", "b"]
    ledger.mark_journaled()
    assert [known["path"] for known in ledger.journaled()["inputs"]] == ["b"]
