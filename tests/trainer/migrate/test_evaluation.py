"""Lines of tasks/main.py as lines of mtrain eval, which its parser takes; and what is refused."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cli import mtrain_eval
from cli.console import command_parser
from cli.mtrain import COMMANDS, main
from trainer.migrate.evaluation import find_evaluation

# In the form of Megatron-LM's README.
SCRIPT = """
TASK="{task}"
VALID_DATA=data/{file}
VOCAB_FILE=gpt2-vocab.json
MERGE_FILE=gpt2-merges.txt
CHECKPOINT_PATH=checkpoints/gpt2_345m
COMMON_TASK_ARGS="--num-layers 24 \\
                  --hidden-size 1024 \\
                  --num-attention-heads 16 \\
                  --seq-length 1024 \\
                  --max-position-embeddings 1024 \\
                  --fp16 \\
                  --vocab-file $VOCAB_FILE"

{start} tasks/main.py \\
       --task $TASK {more} \\
       $COMMON_TASK_ARGS \\
       --valid-data $VALID_DATA \\
       --tokenizer-type GPT2BPETokenizer \\
       --merge-file $MERGE_FILE \\
       --load $CHECKPOINT_PATH \\
       --micro-batch-size 8 \\
       --log-interval 10 \\
       --no-load-optim \\
       --no-load-rng
"""
COMMON = "--sequence-length 1024 --batch-size 8 --dtype fp16 --tokenizer tokenizer"


@pytest.mark.parametrize(
    ("task", "more", "start", "expected"),
    [
        (
            "WIKITEXT103",
            "--overlapping-eval 64",
            "python",
            f"mtrain eval checkpoints/gpt2_345m --task wikitext103 --data data/x.txt --overlap 64 {COMMON}",
        ),
        (
            "LAMBADA",
            "--strict-lambada --tensor-model-parallel-size 2",
            "torchrun --nproc-per-node 4",
            "torchrun --nproc-per-node 4 --no-python mtrain eval checkpoints/gpt2_345m --task lambada "
            f"--data data/x.txt --strict {COMMON} --tp 2",
        ),
    ],
)
def test_the_lines_of_the_readme(
    task: str, more: str, start: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "eval.sh"
    path.write_text(SCRIPT.format(task=task, more=more, start=start, file="x.txt"))
    assert main(["config", "--from-megatron", str(path)]) == 0
    note, line = capsys.readouterr().out.splitlines()
    assert note == "# tokenizer is a folder with gpt2-vocab.json as vocab.json and gpt2-merges.txt as merges.txt"
    assert line == expected
    words = shlex.split(line)
    (command,) = (command for command in COMMANDS if command.name == "eval")
    parsed = command_parser("mtrain", command, mtrain_eval).parse_args(words[words.index("eval") + 1 :])
    assert parsed.task == task.lower() and parsed.data == "data/x.txt"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (
            "--task RACE --epochs 3 --valid-data a",
            ("--task RACE has no", "--epochs finetunes", "--load is"),
        ),
        ("--task LAMBADA --valid-data a b --load x", ("--valid-data names 2 files",)),
        (
            "--task LAMBADA --valid-data a --load x --strict-lamda",
            ("--strict-lamda is not an argument",),
        ),
        ("--valid-data a --load x", ("--task is missing",)),
    ],
)
def test_what_has_no_counterpart_is_refused_by_argument(
    words: str, refused: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--from-megatron", f"python tasks/main.py {words}"]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in refused)


def test_other_programs_are_no_evaluation() -> None:
    assert find_evaluation("python pretrain_gpt.py --num-layers 2") is None
    assert find_evaluation("python main.py --task LAMBADA") is None
