"""Origins: every document's file and row is recovered, however the writing was interrupted, and detectable damage of a
sidecar is reported.
"""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mdata.corpus import origins
from mdata.corpus.origins import HEADER_BYTES, RUN_BYTES, OriginsState, OriginsWriter, open_origins
from mdata.errors import DamageError, MdataError, UsageError
from tests.helpers.examples import examples
from tests.reference.preprocess import places_of, runs_of

# Pieces: a file, and rows that rise in it. The file may stay the same or go on to any later one.
PIECES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(1, 4), max_size=6)),
    max_size=8,
)


def pieces_of(drawn):
    """(file, rows) of each piece: files go on by the drawn number, rows rise by the drawn distances."""
    file, row, found = 0, 0, []
    for ahead, distances in drawn:
        file, row = file + ahead, 0 if ahead else row
        rows = (row + np.cumsum(distances)).tolist() if distances else []
        row = rows[-1] if rows else row
        found.append((file, rows))
    return found


def rows_of(rows):
    return np.array(rows, np.int64)


def write(path, pieces, step=1):
    writer = OriginsWriter(path, step)
    for file, rows in pieces:
        writer.append(file, rows_of(rows))
    digest = writer.commit()
    writer.discard()
    return digest


@examples(100)
@given(drawn=PIECES, step=st.integers(1, 4), cuts=st.data())
def test_a_plain_list_comes_back_whatever_was_cut(tmp_path_factory, drawn, step, cuts):
    """Before each piece the run may be cut: what came after the last checkpoint is written again."""
    path = tmp_path_factory.mktemp("o") / "x.origins"
    pieces = pieces_of(drawn)
    writer, state, at = OriginsWriter(path, step), None, 0
    number = 0
    while number < len(pieces):
        event = cuts.draw(st.sampled_from(["go", "checkpoint", "killed"])) if len(pieces) < 7 else "go"
        if event == "checkpoint":
            state, at = writer.checkpoint(), number
        elif event == "killed" and state is not None:
            writer.close()
            writer, number, state = OriginsWriter(path, step, resume=OriginsState(*state)), at, None
            assert writer.state.documents == sum(len(rows) for _, rows in pieces[:at])
            continue
        writer.append(pieces[number][0], rows_of(pieces[number][1]))
        number += 1
    assert not path.exists()
    digest = writer.commit()
    writer.discard()
    assert digest == blake3(path.read_bytes()).hexdigest()
    places = [(file, row) for file, rows in pieces for row in rows]
    found = open_origins(path)
    assert found.step == step
    assert [tuple(run) for run in found.runs.tolist()] == runs_of(places, step)
    assert [found.of_document(number) for number in range(len(places))] == places
    assert places_of(runs_of(places, step), step, documents=len(places)) == places
    for number, place in enumerate(places):
        assert found.documents_of(*place) == [number]
    assert path.stat().st_size == HEADER_BYTES + RUN_BYTES * len(runs_of(places, step))


@examples(30)
@given(parts=st.lists(PIECES, min_size=1, max_size=3), step=st.integers(1, 3))
def test_joined_sidecars_say_what_each_said(tmp_path_factory, parts, step):
    folder = tmp_path_factory.mktemp("j")
    joined, expected = OriginsWriter(folder / "all", step), []
    for number, drawn in enumerate(parts):
        pieces = pieces_of(drawn)
        write(folder / str(number), pieces, step)
        places = [(file, row) for file, rows in pieces for row in rows]
        joined.append_runs(open_origins(folder / str(number)).runs, len(places))
        expected += places
    joined.append(9, rows_of([5]))
    joined.commit()
    joined.discard()
    found = open_origins(folder / "all")
    assert [found.of_document(number) for number in range(len(expected) + 1)] == [*expected, (9, 5)]
    assert [tuple(run) for run in found.runs.tolist()] == runs_of([*expected, (9, 5)], step)


def test_many_runs_are_joined_and_checked_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(origins, "_RUNS_AT_ONCE", 3)
    rows = [1, 3, 5, 7, 9, 11, 13]
    write(tmp_path / "a", [(0, rows)])
    runs = open_origins(tmp_path / "a").runs
    joined = OriginsWriter(tmp_path / "b", 1)
    joined.append_runs(runs, 7)
    joined.append_runs(runs, 7)
    joined.commit()
    joined.discard()
    found = open_origins(tmp_path / "b")
    assert [found.of_document(number) for number in range(14)] == [(0, row) for row in rows * 2]
    data = bytearray((tmp_path / "b").read_bytes())
    for run in range(14):
        broken = data.copy()
        broken[HEADER_BYTES + RUN_BYTES * run : HEADER_BYTES + RUN_BYTES * run + 8] = (run + 1).to_bytes(8, "little")
        (tmp_path / "c").write_bytes(broken)
        if run == 13:
            continue  # the last run may begin later: that is no fault which can be seen
        with pytest.raises(DamageError, match="do not start at document 0 and increase"):
            open_origins(tmp_path / "c")


@pytest.mark.parametrize("rows", [[], [4], [1, 2, 3, 9, 10, 30]])
def test_every_cut_is_refused_or_ends_between_runs(tmp_path, rows):
    write(tmp_path / "x", [(0, rows)])
    data = (tmp_path / "x").read_bytes()
    for size in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        if size >= HEADER_BYTES and (size - HEADER_BYTES) % RUN_BYTES == 0:
            assert len(open_origins(tmp_path / "cut").runs) == (size - HEADER_BYTES) // RUN_BYTES
            continue
        with pytest.raises(DamageError, match=r"is not an origins sidecar|is truncated or altered"):
            open_origins(tmp_path / "cut")


def test_every_flipped_bit_is_refused_or_leaves_a_possible_sidecar(tmp_path):
    write(tmp_path / "x", [(0, [1, 2, 3, 9, 10, 30]), (2, [7])])
    data = (tmp_path / "x").read_bytes()
    runs = open_origins(tmp_path / "x").runs.copy()
    refused = 0
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "flipped").write_bytes(flipped)
        try:
            found = open_origins(tmp_path / "flipped")
        except (DamageError, UsageError):
            refused += 1
            continue
        assert bit // 8 >= 16, "magic and version"
        assert found.step >= 1 and (found.runs[:, 2] >= 1).all() and (found.runs[:, 1] >= 0).all()
        assert found.runs[0, 0] == 0 and (np.diff(found.runs[:, 0]) > 0).all()
        assert found.step != 1 or (found.runs != runs).sum() == 1
    assert refused > len(data) * 8 / 4


def test_numbers_that_rise_only_by_overflow_are_refused(tmp_path):
    top = 2**63 - 1
    runs = np.array([[0, 0, 1], [top, 0, 2], [-5, 0, 3]], "<i8")
    (tmp_path / "x").write_bytes(b"MDORIGIN" + np.array([1, 1], "<i8").tobytes() + runs.tobytes())
    with pytest.raises(DamageError, match="rise"):
        open_origins(tmp_path / "x")


def test_a_sidecar_without_a_run_names_no_document(tmp_path):
    """What a cut after the header leaves; nothing says how many runs there should be."""
    (tmp_path / "x").write_bytes(b"MDORIGIN" + np.array([1, 1], "<i8").tobytes())
    found = open_origins(tmp_path / "x")
    assert found.documents_of(0, 1) == []
    with pytest.raises(DamageError, match="it has no origin for document 0"):
        found.of_document(0)


def test_a_document_past_the_largest_number_is_not_named(tmp_path):
    """The sum of an altered run's first document and of the rows between would overflow, to a small number."""
    far, between = 2**62, 2**62 + 2**61
    runs = np.array([[0, 0, 5], [far, 1, 1]], "<i8")
    (tmp_path / "x").write_bytes(b"MDORIGIN" + np.array([1, 1], "<i8").tobytes() + runs.tobytes())
    found = open_origins(tmp_path / "x")
    assert found.documents_of(1, 1 + between) == []
    assert found.documents_of(1, 1 + 7) == [far + 7]
    assert found.documents_of(0, 6) == [1]


@examples(100)
@given(data=st.binary(max_size=120), begun=st.sampled_from([b"", b"MDORIGIN", b"MDORIGIN\1\0\0\0\0\0\0\0"]))
def test_any_bytes_open_or_are_refused_in_words(tmp_path_factory, data, begun):
    path = tmp_path_factory.mktemp("any") / "x"
    path.write_bytes(begun + data)
    try:
        open_origins(path)
    except MdataError as error:
        assert 1 <= len(str(error).splitlines()) <= 4


@pytest.mark.parametrize(("name", "kind"), [("nowhere", UsageError), (".", MdataError)])
def test_what_cannot_be_read_is_the_users_to_mend(tmp_path, name, kind):
    with pytest.raises(kind, match=str(tmp_path / name)):
        open_origins(tmp_path / name)
