"""The class for lm-evaluation-harness as its own command opens it; its numbers are compared in tests/oracles."""

from __future__ import annotations

import json

import pytest

from cli.mtrain import main
from mdata import UsageError
from tests.trainer.convert.hf_models import save

pytest.importorskip("transformers")
pytest.importorskip("lm_eval", reason="the extra eval is not installed")


TASK = """task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: DIR/colours.jsonl}, cache_dir: DIR/cache}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
"""


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_scores_are_those_of_the_first_rank(local_rank, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    folder = save("llama2", tmp_path / "tiny")
    (tmp_path / "colours.yaml").write_text(TASK.replace("DIR", str(tmp_path)))
    question = {"question": "The sky is", "choices": [" blue", " green"], "answer": 0}
    (tmp_path / "colours.jsonl").write_text(json.dumps(question) + "\n")
    assert main(["eval", str(folder), "--tasks", "colours", "--include-path", str(tmp_path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert (results != {}) == (local_rank == "0"), "the harness has none on other ranks"


def test_the_harness_command_opens_a_folder_and_refuses_ranks_that_are_not_there(tmp_path):
    from lm_eval.api.registry import get_model

    import trainer.tasks.harness  # noqa: F401

    folder = save("llama2", tmp_path / "tiny")
    model = get_model("mtrain").create_from_arg_string(f"model={folder},tp=1,max_length=32,weights=fp8")
    assert (model.max_length, model.model.weights, model.model.world.groups["tp"].size) == (32, "fp8", 1)
    with pytest.raises(UsageError, match="tp=2 and pp=1 cannot divide a model over 1 rank\n"):
        get_model("mtrain").create_from_arg_string(f"model={folder},tp=2")
