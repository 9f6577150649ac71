"""A small model with random weights, whose tokens are bytes, and servers of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch

from tests.helpers.serving import running
from tests.trainer.convert.hf_models import save
from trainer.serve.openai_api import Served
from trainer.tasks.engine import Load, Request, Token
from trainer.tasks.loaded_model import Model

pytest.importorskip("transformers")


@dataclass
class EndlessEngine:
    """Rows get one token, and no other before they are cancelled."""

    rows: dict[str, int] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    capacity = 256

    def add(self, request: Request) -> None:
        self.rows[request.id] = 0

    def cancel(self, id: str) -> None:
        self.rows.pop(id, None)
        self.cancelled.append(id)

    @property
    def busy(self) -> bool:
        return bool(self.rows)

    def load(self):
        return Load(len(self.rows), 0, 0, 0)

    def step(self) -> list[Token]:
        tokens = [Token(id, 65, -1.0, [], None) for id, count in self.rows.items() if not count]
        self.rows = dict.fromkeys(self.rows, 1)
        time.sleep(0.005)
        return tokens


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Model:
    torch.set_num_threads(1)
    return Model.load(str(save("llama2", tmp_path_factory.mktemp("served") / "tiny")))


@pytest.fixture(scope="session")
def served(model) -> Served:
    from mdata.chat.prompt import answer_ends
    from mdata.chat.templates import choose_template

    template = choose_template("plain", model.tokenizer)
    return Served(model=model, template=template, turn_ends=answer_ends(template, model.tokenizer), created=1)


@pytest.fixture(scope="module")
def server(served):
    with running(served) as server:
        yield server


@pytest.fixture
def endless(served):
    """A server whose answers do not end, with room for two."""
    with running(served, engine=EndlessEngine(), rows=2) as server:
        yield server
