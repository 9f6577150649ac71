"""Ranks that hang are found by their beats: pipes in one process, one look in place of each tenth of a second."""

from __future__ import annotations

import threading
from multiprocessing import Pipe

from trainer.run.heartbeats import Heartbeat
from trainer.serve import rank
from trainer.serve.processes import POLL_S, SILENT_S, STILL_S, Beats
from trainer.serve.rank import EventPipes, send_beats

SILENT, STILL = round(SILENT_S / POLL_S), round(STILL_S / POLL_S)


def two_ranks():
    pairs = [Pipe(duplex=False) for _ in range(2)]
    return Beats([reader for reader, _ in pairs]), [writer for _, writer in pairs]


def test_a_rank_without_beats_is_named():
    beats, writers = two_ranks()
    for number in range(2 * SILENT):
        writers[0].send(Heartbeat(where="in step"))
        if number == SILENT // 2:
            writers[1].send(Heartbeat(where="in decode", still=number))
        problem = beats.look(busy=False)
        assert bool(problem) == (number >= SILENT // 2 + SILENT)
    assert problem == "rank 1 did not respond for 8 s; rank 1 was last in decode"


def test_ranks_that_all_stand_still_are_named_while_sequences_are_open():
    beats, writers = two_ranks()

    def look(*still, busy=True):
        for writer, count in zip(writers, still, strict=True):
            writer.send(Heartbeat(where="in step", still=count))
        return beats.look(busy=busy)

    assert not any(look(500, 500, busy=False) for _ in range(STILL)), "an idle server waits"
    assert not any(look(500, count % 2) for count in range(2 * STILL + 1)), "a rank moves"
    assert [bool(look(1, 1)) for _ in range(STILL + 1)] == [False] * (STILL - 1) + [True] * 2
    assert beats.problem == "no rank moved for 60 s; ranks 0, 1 in step"


def test_a_rank_that_has_ended_is_no_fault_of_beats():
    beats, writers = two_ranks()
    writers[1].close()
    assert beats.look(busy=True) == ""


def test_beats_say_where_a_thread_is_and_whether_it_moves(monkeypatch):
    monkeypatch.setattr(rank, "BEAT_S", 0.01)
    reader, writer = Pipe(duplex=False)
    link, leave = EventPipes(), threading.Event()
    stands = threading.Thread(target=leave.wait)
    stands.start()
    beating = threading.Thread(target=send_beats, args=(writer, link, stands.ident))
    beating.start()
    assert [reader.recv().still for _ in range(5)] in ([0, 1, 2, 3, 4], [0, 0, 1, 2, 3])
    link.step += 1
    while reader.recv().still:
        pass
    leave.set()
    stands.join()
    reader.close()
    beating.join(30)
    assert not beating.is_alive(), "nobody listens"
