"""The long part of a run: pieces in, documents appended in their order, a journal record now and then.

A record follows an fsync of every file in the making. Between two records nothing is promised: a run that
continues cuts the files back to the last one. What is unusual: an exception may arrive anywhere (Ctrl-C,
SIGTERM), so a flag says whether files and counts speak of the same row; only then may a last record be
written on the way out. Appending happens in a thread of its own (mdata/util/background.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from mdata.errors import MdataError, UsageError
from mdata.manifest.sidecars import manifest_path
from mdata.preprocessing.bad_rows import ProblemPolicy
from mdata.preprocessing.corpus_writer import Sink
from mdata.preprocessing.encode import EncodedPiece, select
from mdata.preprocessing.finished import is_finished
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.placement import placing_record, remove_lasting, remove_partials
from mdata.preprocessing.plan import Job, printable_path
from mdata.preprocessing.resume import TakenUp
from mdata.preprocessing.worker_pool import Pool, Result
from mdata.sources.chunk import Piece, piece_digest, pieces
from mdata.sources.input_files import STDIN, check_unchanged
from mdata.util import atomic_io
from mdata.util.background import BackgroundWorker

# An fsync may be slow on shared storage: at most a tenth of the time goes there, but a record is never
# older than this.
_LONGEST_INTERVAL_S = 25.0
_LEAST_RESULTS_AHEAD = 2


class Filling:
    """Everything that a run has open. A context manager: leaving it by an error keeps what can be continued.

    Args:
        job: what is to be done.
        journal: where progress is recorded.
        taken: where to begin.

    Attributes:
        sinks: name -> sink; None for a corpus that an earlier run finished.
    """

    def __init__(self, job: Job, journal: Journal, *, taken: TakenUp) -> None:
        self.job = job
        self.ledger = taken.ledger
        self.sinks: dict[str, Sink | None] = {}
        self._journal = journal
        self._recorded = taken.resumed
        self._consistent = True
        self._filled = False
        self._due = 0.0
        self._seconds = {"read": 0.0, "parse": 0.0, "encode": 0.0, "write": 0.0}
        if job.options.quarantine:
            taken.placing.take_back_quarantine(Path(job.options.quarantine))
        self.policy = ProblemPolicy(job.options, job.progress, kept=taken.quarantine)
        try:
            for route in range(job.routes.num_routes):
                for key in job.options.json_keys:
                    name = job.routes.name(key, route)
                    self.sinks[name] = self._open(name, route, taken=taken)
            # Before the journal speaks of them, the files in the making have names that a loss of power leaves.
            for folder in sorted({sink.prefix.parent for sink in self.sinks.values() if sink} | self.policy.folders()):
                atomic_io.sync_folder(folder)
        except BaseException:
            self._close(keep=taken.resumed)
            raise

    def fill(self, pool: Pool) -> None:
        """Tokenize everything that was not yet taken.

        Raises:
            BadInputError: a row that cannot be taken, under the policy in force.
            UsageError: an input that changed. ResourceError: disk, memory or a worker was lost.
        """
        job = self.job
        done = sum(state.size_bytes for state in self.ledger.inputs if state.hash)
        # Standard input has no size.
        total = None if any(file.path == STDIN for file in job.files) else job.input_bytes
        job.progress.begin("tokenizing", total, unit="B", done=done)
        self._due = time.monotonic() + job.options.checkpoint_s
        # After a slow piece many come at once, and who hands out work should not wait until they are written.
        with BackgroundWorker(self._append, limit=max(_LEAST_RESULTS_AHEAD, pool.num_processes)) as writer:
            for result in pool.encode(self._wanted(), job.tokenizer, spec=job.spec):
                writer.put(result)
        self._open_inputs(len(job.files))
        check_unchanged(job.files[-1])
        self.ledger.close_last()
        self.policy.check_share(self.ledger.bad, self.ledger.rows)
        self._checkpoint()
        self._filled = True
        job.progress.end()

    def begin_placing(self) -> None:
        """Say in the journal which files get final names now; then no older manifest speaks of such names any more.

        The quarantine, which belongs to all results, stands after the old manifests and before the new ones: once
        they are there, nobody looks for what is missing.
        """
        job = self.job
        prefixes = [sink.prefix for sink in self.sinks.values() if sink]
        self._journal.append(placing_record(prefixes, job.options.quarantine))
        merged = job.prefixes().keys() - self.sinks.keys()
        done = {name for name, sink in self.sinks.items() if sink is None}
        done |= {name for name in merged if is_finished(job, self.ledger, name=name)}
        for name in job.prefixes().keys() - done:
            remove_lasting(manifest_path(job.prefixes()[name]))
        self.policy.place()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close(keep=False)
            return
        if self._consistent and not self._filled and self.ledger.rows:
            with suppress(MdataError, OSError):
                self._checkpoint()
        if self._recorded:
            self.job.progress.note(f"rows kept: {self.ledger.rows:,}; the same command continues after them")
        self._close(keep=self._recorded)

    def _open(self, name: str, route: int, *, taken: TakenUp) -> Sink | None:
        prefix = self.job.prefixes()[name]
        if taken.resumed and is_finished(self.job, self.ledger, name=name):
            remove_partials(prefix)
            return None
        taken.placing.take_back(prefix)
        held_out = route == self.job.routes.partitions
        step = 1 if held_out else self.job.routes.step
        return Sink(prefix, self.job.spec.dtype, step=step, resume=taken.sinks.get(name))

    def _close(self, *, keep: bool) -> None:
        for sink in self.sinks.values():
            if sink:
                sink.close(keep=keep)
        self.policy.close(keep=keep)

    def _wanted(self) -> Iterator[Piece]:
        """The pieces that were not taken; those of a stream that were are compared on the way past them."""
        job = self.job
        first_file, first_piece = self.ledger.next_piece
        again = bool(first_piece) and job.files[first_file].streamed
        start = (first_file, 0 if again else first_piece)
        passed = 0 if again else first_piece
        with closing(pieces(job.files, job.options.piece_bytes, spec=job.spec.read, start=start)) as found:
            for piece in found:
                if piece.file_number == first_file and piece.number < first_piece:
                    assert piece.data is not None, "a stream carries its data"
                    if piece_digest(piece.data) != self.ledger.inputs[first_file].digests[piece.number]:
                        raise _not_the_same(piece, job)
                    passed += 1
                    continue
                if passed < first_piece:
                    raise _not_the_same(piece, job)
                yield piece
        if passed < first_piece:
            path = printable_path(job.files[first_file].path)
            raise UsageError(
                f"{path} is shorter than what was read of it before", fix=_RESTART.format(job.beside("journal"))
            )

    def _append(self, result: Result) -> None:
        """What is done with one result, in the writing thread."""
        begun = time.perf_counter()
        self._take(result.piece, result.encoded)
        result.release()
        if time.monotonic() >= self._due:
            self._checkpoint()
            self._due = self._next_due(time.perf_counter() - begun)
        self._tell(result.piece, result.encoded.seconds, time.perf_counter() - begun)

    def _take(self, piece: Piece, encoded: EncodedPiece) -> None:
        """Append one piece's documents to their sinks, and count them."""
        self._open_inputs(piece.file_number + 1)
        ledger, job = self.ledger, self.job
        rows_before = ledger.inputs[-1].rows
        path = ledger.inputs[-1].path
        if encoded.problems and job.options.on_error == "stop":
            self.policy.take(encoded.problems[0], path, rows_before=rows_before, bad_before=ledger.bad)
        self._consistent = False
        for problem in encoded.problems:
            self.policy.take(problem, path, rows_before=rows_before, bad_before=ledger.bad)
            ledger.refuse(problem.kind)
        routes = job.routes.of(ledger.rows + encoded.kept - 1, encoded.held)
        for route in range(job.routes.num_routes):
            chosen = routes == route
            every = bool(chosen.all())
            if not every and not chosen.any():
                continue
            rows = rows_before + (encoded.kept if every else encoded.kept[chosen])
            for key, part in zip(job.options.json_keys, encoded.parts, strict=True):
                sink = self.sinks[job.routes.name(key, route)]
                assert sink is not None, "a corpus was finished before all was taken"
                sink.take(part if every else select(part, chosen), piece.file_number, rows=rows)
        special = [part.special_in_text for part in encoded.parts]
        ledger.take(encoded.rows, encoded.digest, records=len(encoded.kept), special=special)
        self._consistent = True

    def _open_inputs(self, count: int) -> None:
        """Begin the files up to number `count`, empty ones included; those before the last are read."""
        while len(self.ledger.inputs) < count:
            if self.ledger.inputs:
                check_unchanged(self.job.files[len(self.ledger.inputs) - 1])
            file = self.job.files[len(self.ledger.inputs)]
            self.ledger.open_input(printable_path(file.path), file.size_bytes, modified_ns=file.modified_ns)

    def _next_due(self, spent_s: float) -> float:
        """When the next record is due, if one took this long."""
        wanted = self.job.options.checkpoint_s
        return time.monotonic() + (max(wanted, min(10 * spent_s, _LONGEST_INTERVAL_S)) if wanted else 0)

    def _checkpoint(self) -> None:
        if self._filled or any(sink is None for sink in self.sinks.values()):
            return
        sinks = {name: sink.checkpoint() for name, sink in self.sinks.items() if sink}
        record = {
            "kind": "state",
            "sinks": sinks,
            "quarantine": self.policy.checkpoint(),
            **self.ledger.journaled(),
        }
        self._journal.append(record)
        self.ledger.mark_journaled()
        self._recorded = self._journal.worth_keeping = True

    def _totals(self) -> dict[str, float]:
        tokens = sum(sink.num_tokens for sink in self.sinks.values() if sink)
        return {"tokens": tokens, "documents": self.ledger.records, "skipped": self.ledger.bad}

    def _tell(self, piece: Piece, work_s: tuple[float, float, float], write_s: float) -> None:
        for name, spent in zip(self._seconds, (*work_s, write_s), strict=True):
            self._seconds[name] += spent
        self.job.progress.advance(piece.file_bytes, **self._totals())
        self.job.progress.stages(**self._seconds)


_RESTART = "give the same input as before, or remove {} to start anew"


def _not_the_same(piece: Piece, job: Job) -> UsageError:
    path = printable_path(piece.source.path)
    return UsageError(
        f"{path} is not what was read of it before (piece {piece.number})", fix=_RESTART.format(job.beside("journal"))
    )
