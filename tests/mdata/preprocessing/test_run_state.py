"""The state: replaying the journal's records gives the state again, also when the last records are lost."""

from __future__ import annotations

import copy
import json

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mdata.preprocessing.run_state import InputState, JobState
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


def apply(state: JobState, event: tuple, *, number: int) -> None:
    kind, *values = event
    if kind == "open":
        state.open_input(f"in{len(state.inputs)}.jsonl", number, modified_ns=number * 10**9)
    elif kind == "close":
        state.close_input()
    elif kind == "refuse":
        state.count_bad_row(values[0])
    elif kind == "take":
        if not state.inputs or state.inputs[-1].hash is not None:
            state.open_input("next.jsonl", number, modified_ns=0)
        rows, records, special = values
        state.count_chunk(rows, blake3(str(number).encode()).digest(), records=records, special=[special, 0])


def facts(state: JobState) -> tuple:
    """All that a run may look at; what is not recorded yet is no part of it."""
    counts = (state.rows, state.records, state.bad, dict(state.skipped), state.special)
    return state.inputs, *counts, state.next_chunk


@examples(300)
@given(events=EVENTS, lose=st.integers(0, 4), then=EVENTS)
def test_a_replayed_state_is_the_one_that_was_recorded(events, lose, then):
    """Then both go on, records and all, and are replayed once more."""
    state, records, snapshots = JobState(2), [], []
    run(state, events, records, snapshots)
    kept = len(records) - min(lose, len(records))
    replayed = replay(records[:kept])
    expected = snapshots[kept - 1] if kept else JobState(2)
    assert facts(replayed) == facts(expected)
    again, other = list(records[:kept]), list(records[:kept])
    run(replayed, then, again, [])
    expected = copy.deepcopy(expected)
    expected.mark_recorded()
    run(expected, then, other, [])
    assert again == other and facts(replayed) == facts(expected)
    assert facts(replay(again)) == facts(replay(other))


def run(state: JobState, events: list[tuple], records: list[dict], snapshots: list[JobState]) -> None:
    for number, event in enumerate(events):
        apply(state, event, number=number)
        if event[0] in ("record", "lost"):
            record = json.loads(json.dumps(state.new_record()))
            if event[0] == "record":
                state.mark_recorded()
                records.append(record)
                snapshots.append(copy.deepcopy(state))


def replay(records: list[dict]) -> JobState:
    state = JobState(2)
    for record in records:
        state.replay(record)
    return state


@examples(100)
@given(counts=st.lists(st.integers(0, 5), max_size=5))
def test_the_hash_of_an_input_is_that_of_its_chunks_and_the_next_chunk_is_counted(counts):
    state = JobState(1)
    assert state.next_chunk == (0, 0)
    for number, count in enumerate(counts):
        state.open_input(str(number), 0, modified_ns=0)
        for chunk in range(count):
            assert state.next_chunk == (number, chunk)
            state.count_chunk(2, bytes([number, chunk]) * 16, records=1, special=[1])
        assert state.next_chunk == (number, count)
    state.close_input()
    state.close_input()
    assert state.next_chunk == (len(counts), 0)
    for number, (count, known) in enumerate(zip(counts, state.inputs, strict=True)):
        digests = [bytes([number, chunk]) * 16 for chunk in range(count)]
        assert known == InputState(str(number), 0, 0, rows=2 * count, hash=blake3(b"".join(digests)).hexdigest())
    assert (state.rows, state.records, state.special) == (2 * sum(counts), sum(counts), [sum(counts)])


def test_a_record_holds_what_is_new_only():
    state = JobState(1)
    state.open_input("a", 0, modified_ns=0)
    sizes = []
    for chunk in range(4):
        state.count_chunk(1, bytes([chunk]) * 32, records=1, special=[0])
        sizes.append(len(state.new_record()["digests"]))
        state.mark_recorded()
    assert sizes == [64] * 4
    state.open_input("b", 0, modified_ns=0)
    assert [known["path"] for known in state.new_record()["inputs"]] == ["a", "b"]
    state.mark_recorded()
    assert [known["path"] for known in state.new_record()["inputs"]] == ["b"]
