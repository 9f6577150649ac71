"""Lines of tasks/main.py, servers and converters as lines of mtrain, which its parsers take; and what is refused."""

from __future__ import annotations

import shlex

import pytest

from cli import mtrain_convert, mtrain_eval, mtrain_finetune, mtrain_serve
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
def test_the_lines_of_the_readme(task, more, start, expected, tmp_path, capsys):
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


# The first two are in the form of the README's and examples/run_text_generation_server_345M.sh.
LINES = {
    "torchrun $ARGS tools/run_text_generation_server.py --tensor-model-parallel-size 1 --num-layers 24 --load C --fp16 "
    "--seq-length 1024 --out-seq-length 1024 --temperature 1.0 --vocab-file V --merge-file M --top_p 0.9 --seed 42": (
        "mtrain serve C --host 0.0.0.0 --port 5000 --dtype fp16 --tokenizer tokenizer"
    ),
    "python tools/checkpoint_util.py \\\n --model-type GPT --load-dir a_tp4_pp4 --save-dir a_tp2_pp2 \\\n "
    "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2": (
        "mtrain convert a_tp4_pp4 a_tp2_pp2 --to mp_rank --no-optimizer --tp 2 --pp 2"
    ),
    "python tools/run_text_generation_server.py --load C --tensor-model-parallel-size 2 --pipeline-model-parallel-size "
    "2 --port 5001 --max-tokens-to-oom 9000 --inference-max-requests 4": (
        "mtrain serve C mesh.tp=2 mesh.pp=2 --host 0.0.0.0 --port 5001 --max-request-tokens 9000 --max-batch 4"
    ),
    "python tools/checkpoint/convert.py --bf16 --model-type GPT --loader llama_mistral --saver core --load-dir L "
    "--target-tensor-parallel-size 4 --checkpoint-type hf --save-dir out --tokenizer-model L --model-size llama3": (
        "mtrain convert L out --to torch_dist --no-optimizer --dtype bf16"
    ),
    "python tools/checkpoint/util.py --model-type GPT --load-dir a --save-dir b --tokenizer-model t "
    "--true-vocab-size 99": ("mtrain convert a b --to mp_rank --no-optimizer --tokenizer t --set model.vocab_size=99"),
    "python checkpoint_reshaping_and_interoperability.py --convert_checkpoint_from_megatron_to_transformers "
    "--load_path a --save_path b --max_shard_size 200MB --tokenizer_name t --print-checkpoint-structure": (
        "mtrain convert a b --to hf --tokenizer t --max-shard-size 200MB"
    ),
    "python checkpoint_reshaping_and_interoperability.py --load_path a --save_path b --target_params_dtype fp16 "
    "--target_tensor_model_parallel_size 2 --target_data_parallel_size 4": (
        "mtrain convert a b --to mp_rank --no-optimizer --tp 2 --dtype fp16"
    ),
}


@pytest.mark.parametrize("theirs", LINES)
def test_servers_and_converters(theirs, capsys):
    assert main(["config", "--from-megatron", theirs]) == 0
    *notes, line = capsys.readouterr().out.splitlines()
    assert line == LINES[theirs] and notes and all(note.startswith("# ") for note in notes)
    words = shlex.split(line)
    (command,) = (command for command in COMMANDS if command.name == words[1])
    module = {"serve": mtrain_serve, "convert": mtrain_convert}[words[1]]
    assert command_parser("mtrain", command, module).parse_args(words[2:])


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [
        ("tools/run_text_generation_server.py --prot 5", ("--load is missing", "--prot is not an argument")),
        (
            "tools/checkpoint/convert.py --saver hf_llava --load-dir a --checkpoint-type meta --foo 1",
            ("convert.py has 4 problems", "--foo is not an", "--save-dir is missing", "--saver hf_llava", "type meta"),
        ),
        (
            "tools/checkpoint/util.py --load-dir a --save-dir b --target-expert-parallel-size 2",
            ("--target-expert-parallel-size needs --saver mcore",),
        ),
        ("checkpoint_reshaping_and_interoperability.py --load_path a", ("--save_path is missing",)),
    ],
)
def test_servers_and_converters_without_counterpart_are_refused(theirs, refused, capsys):
    assert main(["config", "--from-megatron", f"python {theirs}"]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in refused), message


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (
            "--task RET-FINETUNE-NQ --epochs 3 --valid-data a",
            ("--task RET-FINETUNE-NQ has no", "--epochs is for MNLI, QQP, RACE", "--load is"),
        ),
        ("--task LAMBADA --valid-data a b --load x", ("--valid-data names 2 files",)),
        (
            "--task LAMBADA --valid-data a --load x --strict-lamda",
            ("--strict-lamda is not an argument",),
        ),
        ("--valid-data a --load x", ("--task is missing",)),
        (
            "--task RACE --epochs 3 --valid-data a",
            ("--train-data is missing", "--lr is missing", "--pretrained-checkpoint is missing"),
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_by_argument(words, refused, capsys):
    assert main(["config", "--from-megatron", f"python tasks/main.py {words}"]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in refused)


# In the form of examples/finetune_mnli_distributed.sh.
FINETUNE = """
python -m torch.distributed.launch --nproc_per_node 8 --nnodes 1 ./tasks/main.py \\
               --task MNLI --seed 1234 --train-data data/glue/MNLI/train.tsv \\
               --valid-data data/glue/MNLI/dev_matched.tsv data/glue/MNLI/dev_mismatched.tsv \\
               --tokenizer-type BertWordPieceLowerCase --vocab-file bert-vocab.txt \\
               --epochs {epochs} --pretrained-checkpoint checkpoints/bert_345m --load checkpoints/mnli \\
               --tensor-model-parallel-size 1 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \\
               --micro-batch-size 8 --lr 5.0e-5 --lr-decay-style linear --lr-warmup-fraction 0.065 \\
               --seq-length 512 --max-position-embeddings 512 --save-interval 500000 --save checkpoints/mnli \\
               --log-interval 10 --eval-interval 100 --eval-iters 50 --weight-decay 1.0e-1 --fp16
"""


def test_finetuning_a_bert(capsys, tmp_path):
    path = tmp_path / "finetune.sh"
    path.write_text(FINETUNE.format(epochs=5))
    assert main(["config", "--from-megatron", str(path)]) == 0
    *notes, line = capsys.readouterr().out.splitlines()
    assert notes[0] == "# tokenizer is a folder with bert-vocab.txt as vocab.txt" and len(notes) == 3
    assert line == (
        "mtrain finetune checkpoints/bert_345m data/glue/MNLI/train.tsv train.global_batch=64 train.micro_batch=8 "
        "optimizer.warmup_fraction=0.065 optimizer.weight_decay=0.1 run.seed=1234 --task mnli --valid "
        "data/glue/MNLI/dev_matched.tsv,data/glue/MNLI/dev_mismatched.tsv --epochs 5 --lr 5e-05 --sequence-length 512 "
        "--precision fp16 --gpus 8 --tokenizer tokenizer --folder checkpoints/mnli"
    )
    (command,) = (command for command in COMMANDS if command.name == "finetune")
    parsed = command_parser("mtrain", command, mtrain_finetune).parse_args(shlex.split(line)[2:])
    assert (parsed.task, parsed.gpus, len(parsed.overrides)) == ("mnli", 8, 5)
    path.write_text(FINETUNE.format(epochs=0))
    assert main(["config", "--from-megatron", str(path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) == 2 and all("mtrain eval checkpoints/mnli --task mnli --data" in line for line in lines)


def test_finetuning_keeps_every_digit(capsys, tmp_path):
    path = tmp_path / "finetune.sh"
    text = FINETUNE.format(epochs=5).replace("--seed 1234 ", "--seed 20230501 ")
    path.write_text(text.replace("--lr 5.0e-5", "--lr 3.1415926e-5"))
    assert main(["config", "--from-megatron", str(path)]) == 0
    assert " run.seed=20230501 " in (line := capsys.readouterr().out.splitlines()[-1])
    assert " --lr 3.1415926e-05 " in line


def test_other_programs_are_no_evaluation():
    assert find_evaluation("python pretrain_gpt.py --num-layers 2") is None
    assert find_evaluation("python main.py --task LAMBADA") is None
