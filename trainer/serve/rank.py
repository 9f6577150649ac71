"""One rank of a server: runs the engine on new and cancelled requests, which reach all ranks for the same step.

Rank 0 receives them from the server's process and passes them on with the number of the step at which they take effect;
apart from these, ranks exchange only chosen tokens and what the model's layers need. An idle rank waits for the next
arrival. When the server's process is gone, rank 0 reads the end of its pipe, and so do the others. A beam search takes
one step for each step of the engine, so that rows continue meanwhile; it has its own cache. A thread of each rank sends
heartbeats to the server's process, which thereby notices a rank that hangs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from mdata import UsageError
from trainer.checkpoint.location import location_of
from trainer.errors import LostRankError
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import find_placement
from trainer.parallel.world import join_world, leave_at_the_end
from trainer.run.heartbeats import stands
from trainer.run.watchdog import fingerprint
from trainer.serve.free_lists import FreeLists, freeze_loaded
from trainer.tasks.beam import Beam, Beams
from trainer.tasks.engine import DecodeEngine, Request, Token
from trainer.tasks.generate import BeamSearch
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling

SETTINGS = "serve.json"
BEAT_S = 1.0


class Search(NamedTuple):
    """A beam search; see `search_beams`. rules: for their bias and what may not follow a token."""

    id: str
    prompt: list[int]
    width: int
    max_tokens: int
    length_penalty: float
    ends: frozenset[int]
    rules: Sampling


class Cancel(NamedTuple):
    """Cancels a row or a search."""

    id: str


class Found(NamedTuple):
    """The results of a beam search, best first."""

    id: str
    beams: list[Beam]
    finish: str = "stop"


class RefusedRequest(NamedTuple):
    """The engine rejected a request."""

    id: str
    text: str
    finish: str = "refused"


class Ready(NamedTuple):
    """The model is loaded. capacity: tokens that a row can have. cache_tokens, cache_bytes: see `DecodeEngine`."""

    capacity: int
    cache_tokens: int = 0
    cache_bytes: int = 0


Event = Request | Search | Cancel
Reply = Token | Found | RefusedRequest


@dataclass
class EventPipes:
    """The pipes through which a rank gets its events.

    Args:
        server: to the server's process, on rank 0 only. others: rank 0's pipes to the other ranks. first: from rank 0,
            on the other ranks.
    """

    server: Connection | None = None
    others: Sequence[Connection] = ()
    first: Connection | None = None
    step: int = 0

    def events(self, *, wait: bool) -> list[Event] | None:
        """The events that apply from this step on; None: the server is gone.

        Args:
            wait: block until there is an event.
        """
        events = self._received(wait=wait)
        for other in self.others:
            other.send((self.step, events))
        self.step += 1
        return events

    def _received(self, *, wait: bool) -> list[Event] | None:
        try:
            if self.first is not None:
                step, events = self.first.recv()
                assert step == self.step, f"events of step {step} at step {self.step}"
                return events
            assert self.server is not None, "rank 0 has a pipe to the server"
            events = list[Event]()
            while self.server.poll(None if wait and not events else 0):
                events += self.server.recv()
            return events
        except (EOFError, ConnectionResetError):
            return None

    def reply(self, message: Any) -> None:
        """Send to the server's process, from rank 0 only."""
        if self.server is not None:
            self.server.send(message)


@dataclass
class _Searches:
    """The beam searches that are open."""

    model: Model
    open: dict[str, BeamSearch] = field(default_factory=dict)

    def add(self, search: Search) -> None:
        if len(search.prompt) + search.max_tokens > self.model.context:
            raise UsageError("context length + tokens_to_generate too large")
        beams = Beams(search.width, search.max_tokens, search.ends, search.length_penalty)
        self.open[search.id] = BeamSearch(self.model, search.prompt, beams, search.rules)

    def step(self) -> list[Found]:
        """Advance each search by one step."""
        finished = list[Found]()
        for id, search in list(self.open.items()):
            search.step()
            if search.beams.done:
                finished.append(Found(id, search.beams.results(search.beams.width)))
                del self.open[id]
        return finished


def serve_rank(engine: DecodeEngine, model: Model, link: EventPipes) -> None:
    """Serve until the server's process closes its end of the pipe."""
    searches, free_lists = _Searches(model), FreeLists()
    while True:
        events = link.events(wait=not engine.busy and not searches.open)
        if events is None:
            return
        replies = list[Reply]()
        for event in events:
            try:
                if isinstance(event, Cancel):
                    engine.cancel(event.id)
                    searches.open.pop(event.id, None)
                elif isinstance(event, Search):
                    searches.add(event)
                else:
                    engine.add(event)
            except UsageError as error:  # the same on all ranks
                replies.append(RefusedRequest(event.id, str(error)))
        if engine.busy:
            replies += engine.step()
        replies += searches.step()
        if replies or events:
            link.reply((replies, engine.load()._asdict()))
        free_lists.count(len(events))


def send_beats(connection: Connection, link: EventPipes, thread: int) -> None:
    """Send the position of a thread of this process every BEAT_S seconds, until the pipe is closed."""
    before, still = tuple[Any, ...](), 0
    with suppress(OSError):
        while True:
            frame = sys._current_frames().get(thread)
            now = (link.step, *fingerprint(frame))
            before, still = now, still + 1 if now == before else 0
            connection.send(replace(stands(frame, {}, still=0), still=still))
            del frame  # it keeps the tensors of its function
            time.sleep(BEAT_S)


def serve_here(folder: Path, *, rank: int) -> None:
    """Load the model and serve it, as a rank that `processes.py` started."""
    settings = json.loads((folder / SETTINGS).read_bytes())
    place = find_placement(os.environ)
    assert place is not None, "a rank is started with its place in the environment"
    server, *pipes = settings["pipes"][rank]
    link = EventPipes(
        server=None if server is None else Connection(server),
        others=[Connection(pipe, readable=False) for pipe in pipes] if rank == 0 else (),
        first=None if rank == 0 else Connection(pipes[0], writable=False),
    )
    beats = Connection(settings["beats"][rank], readable=False)
    threading.Thread(target=send_beats, args=(beats, link, threading.get_ident()), daemon=True).start()
    world = join_world(Mesh(place.world_size, settings["tp"], pp=settings["pp"]), placement=place)
    model = Model.load(
        location_of(settings["model"]),
        world=world,
        checkpoint=settings["checkpoint"],
        tokenizer=settings["tokenizer"],
        settings=settings["set"],
        dtype=settings["dtype"],
        weights=settings["weights"],
    )
    engine = DecodeEngine(model, max_batch=settings["max_batch"], cache_tokens=settings["cache_tokens"])
    if world.device.type == "cuda":  # on a CPU there is little to prepare, and prompts of a large model take minutes
        engine.warm_up()
    freeze_loaded()
    link.reply(Ready(engine.capacity, engine.cache_tokens, engine.cache_bytes))
    try:
        serve_rank(engine, model, link)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise LostRankError("another process of the server is gone") from error
    leave_at_the_end(lambda _: None)
