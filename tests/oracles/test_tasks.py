"""The comparison with oracle/tasks: what is equal, and that it can fail."""

from __future__ import annotations

import functools
import json
import shutil

import pytest

from tests.oracles.frame import answers
from tests.oracles.tasks import KINDS, compare, main

QUICK = ("filters", "rules", "decay", "limits", "server", "detokenizers", "lambada", "readers", "pairs", "heads")


run = functools.partial(answers, compare)


def test_quick_kinds_are_equal(oracles):
    equal, lines, reasons = run(oracles / "oracle/tasks", *QUICK)
    assert equal, "\n".join((*lines, *reasons))
    assert not reasons and lines[-1].endswith("cases equal") and len(lines) == len(QUICK) + 1


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["draws", "greedy", "batches", "stops", "beams", "openai", "wikitext"])
def test_a_kind_is_equal(kind, oracles):
    equal, _, reasons = run(oracles / "oracle/tasks", kind)
    assert equal, reasons


def test_the_harness_gives_the_numbers_of_its_own_class(oracles):
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    equal, _, reasons = run(oracles / "oracle/tasks", "lm_eval")
    assert equal, reasons


def test_what_cannot_be_compared_is_a_failure(tmp_path, capsys):
    assert run(tmp_path) == (False, ["0 of 0 cases equal"], []), "an empty folder"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/new.json").write_text("[]")
    (tmp_path / "tasks/lambada.json").write_text("{")
    (tmp_path / "tasks/detoxify.json").write_text("[1, 2]")
    strings = [{"text": "a , b", "wiki": "a, b", "ptb": "a , b"}, {"text": "a , b", "wiki": "a,b", "ptb": "a , b"}]
    table = {"strings": [*strings, {}], "choice_by_path": []}
    (tmp_path / "tasks/wikitext_detokenizer.json").write_text(json.dumps(table))
    equal, lines, reasons = run(tmp_path)
    assert not equal
    assert lines == [
        "detokenizers: 1 of 3 cases equal",
        "lambada: 0 of 1 cases equal",
        "detoxify: 0 of 1 cases equal",
        "new: 0 of 1 cases equal",
        "1 of 6 cases equal",
    ]
    assert "unknown kind" in reasons[-1] and "cannot be read" in reasons[1]
    assert main([str(tmp_path), "--kind", "nothing"]) == 1
    assert capsys.readouterr().out == "0 of 0 cases equal\n"
    assert main([str(tmp_path / "none")]) == 1
    shutil.rmtree(tmp_path / "tasks")
    assert main([str(tmp_path)]) == 1 and set(QUICK) < set(KINDS)
