"""Flags of Megatron-LM that begin with another folder's weights: from its command line to the losses of a run."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from cli.mtrain import main
from tests.helpers.runs import make_corpora, write_jsonl
from trainer.run.metrics import read_metrics

COMMAND = (
    "torchrun --nproc-per-node=1 pretrain_gpt.py --num-layers 2 --hidden-size 32 --ffn-hidden-size 88"
    " --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --untie-embeddings-and-output-weights"
    " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0.0"
    " --hidden-dropout 0.0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --micro-batch-size 2"
    " --global-batch-size 4 --lr 1e-2 --lr-decay-style cosine --lr-decay-iters 10 --lr-warmup-iters 2"
    " --data-path a_text_document --split 100,0,0 --train-iters 6 --save-interval 3 --log-interval 1"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, and its third step as a checkpoint of Megatron-Core with the optimizer's state."""
    folder = tmp_path_factory.mktemp("made")
    make_corpora(folder, {"a": write_jsonl(folder / "a.jsonl", 1)})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("--save first") == 0
        words = ["--to", "torch_dist", "--checkpoint", "step-3", "--optimizer-form", "adam", "--quiet"]
        assert main(["convert", "first", "theirs", *words]) == 0
    return folder


def train(flags: str) -> int:
    """Write the run of Megatron's command with these flags, and train it."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        code = main(["config", "--from-megatron", f"{COMMAND} {flags}"])
    Path("run.toml").write_text(written.getvalue())
    return code or main(["train", "run.toml", "--nproc", "1", "--quiet"])


def steps_of(folder: Path) -> dict[int, tuple[float, float, int]]:
    """Step -> loss, learning rate, samples read."""
    lines = [line for line in read_metrics(folder) if "loss" in line]
    return {line["step"]: (line["loss"], line["lr"], line["consumed_samples"]) for line in lines}


@pytest.mark.parametrize(
    ("flags", "first_step", "as_before"),
    [
        ("--load theirs --finetune", 1, False),
        ("--load theirs --finetune --no-load-optim --no-load-rng", 1, False),
        ("--pretrained-checkpoint theirs", 1, False),
        ("--load theirs --no-load-optim", 4, False),
        ("--load theirs --no-load-rng", 4, True),
        ("--load theirs", 4, True),
    ],
)
def test_what_continues(flags, first_step, as_before, made, tmp_path, monkeypatch):
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    assert train(f"{flags} --save second") == 0
    first, second = steps_of(made / "first"), steps_of(tmp_path / "second")
    assert [*second] == [*range(first_step, 7)]
    if as_before:  # the rest of the other run, to the bit
        assert second == {step: values for step, values in first.items() if step > 3}
        return
    # The third step's weights: on the first samples they do better than new ones, or they read where the other stopped.
    (loss, rate, samples), before = second[first_step], first[first_step]
    assert samples == before[2] and (loss < before[0] if first_step == 1 else loss == before[0])
    assert rate == first[1][1], "the schedule begins anew"
    assert second[first_step + 1][0] != first[first_step + 1][0]
