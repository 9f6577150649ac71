"""Commands that use a trained model of Megatron-LM as lines of `mtrain eval`, `finetune --task`, `serve` and `convert`.

Of tasks/main.py WIKITEXT103 and LAMBADA are scored; MNLI, QQP and RACE finetune a BERT, or with `--epochs 0` score one;
its other tasks are refused by name. Servers are tools/run_text_generation_server.py and its kind; converters are those
of tools/checkpoint, and that of transformers and accelerate. Arguments of the model are not needed, because the
checkpoint has them; arguments that nobody knows are refused, all at once.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType

from mdata.errors import counted
from trainer.migrate.arguments import Given, read_arguments
from trainer.migrate.expansion import Work
from trainer.migrate.flags import Flag, flag_table
from trainer.migrate.launcher import launched_ranks
from trainer.migrate.lexer import ShellError
from trainer.migrate.shell import read_commands

PROGRAM = "tasks/main.py"
TASKS: Mapping[str, str] = MappingProxyType({"WIKITEXT103": "wikitext103", "LAMBADA": "lambada"})
FINETUNED = ("MNLI", "QQP", "RACE")
_OWN = (
    Flag(name="--task", kind="text"),
    Flag(name="--valid-data", kind="texts"),
    Flag(name="--overlapping-eval", kind="int", default="32"),
    Flag(name="--strict-lambada", kind="switch"),
    Flag(name="--epochs", kind="int"),
    Flag(name="--pretrained-checkpoint", kind="text"),
    Flag(name="--keep-last", kind="switch"),
    Flag(name="--train-data", kind="texts"),
)


_SERVER = re.compile(r"run_\w*text_generation_server\w*\.py")
_OF_SERVERS = (
    Flag(name="--port", kind="int", default="5000"),
    *(Flag(name=name, kind="text") for name in ("--temperature", "--top_p", "--top_k", "--out-seq-length")),
    *(Flag(name=name, kind="int") for name in ("--max-tokens-to-oom", "--inference-max-requests", "--max-batch-size")),
)
_CONVERTERS = (("checkpoint", "util.py"), ("checkpoint", "convert.py"), ("tools", "checkpoint_util.py"))
_TARGETS = {"megatron": "mp_rank", "mcore": "torch_dist", "core": "torch_dist"}
_OF_CONVERTERS = (
    Flag(name="--loader", kind="text", default="megatron"),
    Flag(name="--saver", kind="text", default="megatron"),
    *(Flag(name=name, kind="text") for name in ("--load-dir", "--save-dir", "--tokenizer-model", "--checkpoint-type")),
    *(Flag(name=f"--target-{name}-parallel-size", kind="int") for name in ("tensor", "pipeline", "expert")),
    Flag(name="--true-vocab-size", kind="int"),
    Flag(name="--target-params-dtype", kind="text"),
    *(Flag(name=name, kind="switch") for name in ("--bf16", "--fp16", "--no-checking", "--use-distributed-optimizer")),
    *(
        Flag(name=name, kind="text")
        for name in (
            "--model-type", "--model-size", "--megatron-path", "--max-queue-size", "--vocab-file",
            "--position-embedding-type", "--loader-transformer-impl", "--saver-transformer-impl",
            "--make-vocab-size-divisible-by",
        )
    ),
)  # fmt: skip
_TRANSFORMERS = "checkpoint_reshaping_and_interoperability.py"
_OF_TRANSFORMERS = (
    Flag(name="--convert_checkpoint_from_megatron_to_transformers", kind="switch"),
    *(Flag(name=name, kind="text") for name in ("--load_path", "--save_path", "--max_shard_size", "--tokenizer_name")),
    *(Flag(name=f"--target_{name}_model_parallel_size", kind="int") for name in ("tensor", "pipeline")),
    Flag(name="--target_params_dtype", kind="text"),
    *(Flag(name=name, kind="switch") for name in ("--use_distributed_optimizer", "--print-checkpoint-structure")),
    *(
        Flag(name=name, kind="text")
        for name in (
            "--megatron-path", "--model_name", "--target_data_parallel_size", "--make_vocab_size_divisible_by"
        )
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """The line of mtrain, what the user has to know of it, and what is refused, one line each; program: theirs."""

    command: str
    notes: tuple[str, ...]
    refused: tuple[str, ...]
    program: str = PROGRAM


def find_evaluation(text: str, arguments: Sequence[str] = ()) -> Evaluation | None:
    """The line for a command line or script that uses a model; None: it has no such command, or several.

    Args:
        arguments: the script's own arguments, `$1` and on.
    """
    try:
        commands = list(read_commands(text, arguments, work=Work()))
    except (ShellError, RecursionError):
        return None  # the reader of training runs says why
    started = [
        (command, at, kind) for command in commands for at, word in enumerate(command) if (kind := _program(word))
    ]
    if len(started) != 1:
        return None
    command, at, kind = started[0]
    words, name = command[at + 1 :], PurePath(command[at]).name
    if kind == "eval":
        return _evaluation(words, launched_ranks(command[:at], text)[0])
    table = {flag.name: flag for flag in {"serve": _OF_SERVERS, "convert": _OF_CONVERTERS}.get(kind, _OF_TRANSFORMERS)}
    given = read_arguments(words, {**flag_table(), **table} if kind == "serve" else table, program=name)
    line = {"serve": _serve, "convert": _convert}.get(kind, _convert_by_transformers)(given)
    refused = [problem.replace("pretrain_gpt.py", name) for problem in given.problems] + list(line.refused)
    return Evaluation("" if refused else line.command, line.notes, tuple(refused), name)


def _program(word: str) -> str:
    """What a word of a command starts: "eval", "serve", "convert", "transformers"; "": something else."""
    path = PurePath(word)
    if path.parts[-2:] == ("tasks", "main.py"):
        return "eval"
    if path.parts[-2:] in _CONVERTERS:
        return "convert"
    return "serve" if _SERVER.fullmatch(path.name) else "transformers" if path.name == _TRANSFORMERS else ""


def _evaluation(words: Sequence[str], ranks: int | None) -> Evaluation:
    table = {**flag_table(), **{flag.name: flag for flag in _OWN}}
    given = read_arguments(words, table)
    problems = [problem.replace("pretrain_gpt.py", PROGRAM) for problem in given.problems]
    problems += list(_refused(given))
    return Evaluation("" if problems else _command(given, ranks), tuple(_notes(given)), tuple(problems))


def _serve(a: Given) -> Evaluation:
    refused = [] if a["--load"] else ["--load is missing: mtrain serve needs a trained model"]
    sizes = {"tp": a["--tensor-model-parallel-size"], "pp": a["--pipeline-model-parallel-size"]}
    words = ["mtrain", "serve", str(a["--load"])]
    words += [f"mesh.{axis}={size}" for axis, size in sizes.items() if size and size > 1]
    words += ["--host", "0.0.0.0", "--port", str(a["--port"])]
    limits = {"--max-request-tokens": a["--max-tokens-to-oom"]}
    limits["--max-batch"] = a["--inference-max-requests"] or a["--max-batch-size"]
    words += [word for name, value in limits.items() if value for word in (name, str(value))]
    words += [word for name in ("fp16", "bf16") if f"--{name}" in a for word in ("--dtype", name)]
    notes = ["Megatron-LM listens on all addresses; without --host it is localhost alone. --api-key asks for a key"]
    if "--vocab-file" in a or "--tokenizer-model" in a:
        words += ["--tokenizer", "tokenizer"]
        notes += _tokenizer_notes(a)
    if idle := [name for name in ("--temperature", "--top_p", "--top_k", "--out-seq-length") if name in a]:
        notes.append(f"{', '.join(idle)}: each request has its own; Megatron-LM ignores these as well")
    return Evaluation(shlex.join(words), tuple(notes), tuple(refused))


def _convert(a: Given) -> Evaluation:
    refused = [f"{name} is missing" for name in ("--load-dir", "--save-dir") if a[name] is None]
    if a["--checkpoint-type"] == "meta":
        refused.append("--checkpoint-type meta has no counterpart; mtrain convert reads the Hugging Face form")
    to = _TARGETS.get(str(a["--saver"]).removeprefix("saver_"), "")
    if not to:
        refused.append(f"--saver {a['--saver']} has no counterpart; mtrain convert has those of {', '.join(_TARGETS)}")
    sizes = {axis: a[f"--target-{axis}-parallel-size"] for axis in ("tensor", "pipeline", "expert")}
    if to == "mp_rank" and (sizes["expert"] or 1) > 1:
        refused.append("--target-expert-parallel-size needs --saver mcore; mp_rank has whole experts on each rank")
    dtype = next((name for name in ("bf16", "fp16") if f"--{name}" in a), a["--target-params-dtype"])
    more = ["--dtype", dtype] if dtype else []
    if a["--tokenizer-model"] not in (None, a["--load-dir"]):
        more += ["--tokenizer", str(a["--tokenizer-model"])]
    if a["--true-vocab-size"] is not None:
        more += ["--set", f"model.vocab_size={a['--true-vocab-size']}"]
    return _to_megatron(
        str(a["--load-dir"]), str(a["--save-dir"]), to, sizes["tensor"], sizes["pipeline"], more, refused
    )


def _convert_by_transformers(a: Given) -> Evaluation:
    refused = [f"{name} is missing" for name in ("--load_path", "--save_path") if a[name] is None]
    more = ["--dtype", str(a["--target_params_dtype"])] if a["--target_params_dtype"] else []
    notes = list[str]()
    if a["--tokenizer_name"]:
        more += ["--tokenizer", str(a["--tokenizer_name"])]
        notes.append("--tokenizer takes a folder; the names of the Hugging Face hub are not looked up")
    source, target = str(a["--load_path"]), str(a["--save_path"])
    if a["--convert_checkpoint_from_megatron_to_transformers"]:
        more += ["--max-shard-size", str(a["--max_shard_size"])] if a["--max_shard_size"] else []
        words = ["mtrain", "convert", source, target, "--to", "hf", *more]
        return Evaluation(shlex.join(words), tuple(notes), tuple(refused))
    tp, pp = (a[f"--target_{axis}_model_parallel_size"] for axis in ("tensor", "pipeline"))
    line = _to_megatron(source, target, "mp_rank", tp, pp, more, refused)
    return dataclasses.replace(line, notes=(*line.notes, *notes))


def _to_megatron(
    source: str, target: str, to: str, tp: int | None, pp: int | None, more: Sequence[str], refused: Sequence[str]
) -> Evaluation:
    words = ["mtrain", "convert", source, target, "--to", to, "--no-optimizer"]
    notes = ["mtrain reads checkpoints of any layout, so its own commands need no conversion"]
    if to == "mp_rank":
        words += [
            word for name, size in (("--tp", tp), ("--pp", pp)) if size and size > 1 for word in (name, str(size))
        ]
    elif tp or pp:
        notes.append("a torch_dist checkpoint fits any layout, so it has no target sizes")
    return Evaluation(shlex.join([*words, *more]), tuple(notes), tuple(refused))


def _refused(a: Given) -> Iterator[str]:
    task = a["--task"]
    if task is None:
        yield f"--task is missing; {PROGRAM} needs one of {', '.join((*TASKS, *FINETUNED))}"
    elif task not in (*TASKS, *FINETUNED):
        yield f"--task {task} has no counterpart; mtrain has {', '.join((*TASKS, *FINETUNED))}"
    if _finetunes(a):
        for name in ("--train-data", "--valid-data", "--micro-batch-size", "--lr"):
            if not a[name]:
                yield f"{name} is missing"
        if not (a["--pretrained-checkpoint"] or a["--load"]):
            yield "--pretrained-checkpoint is missing: mtrain finetune begins with a trained BERT"
        return
    for name in ("--epochs", "--pretrained-checkpoint", "--keep-last", "--train-data"):
        if name in a and task not in FINETUNED:
            yield f"{name} is for {', '.join(FINETUNED)}"
    files = a["--valid-data"] or ()
    if len(files) != 1 and task not in FINETUNED:
        yield f"--valid-data names {counted(len(files), 'file')}; mtrain eval scores one"
    elif not files:
        yield "--valid-data is missing"
    if a["--load"] is None:
        yield "--load is missing: mtrain eval scores a trained model"


def _finetunes(a: Given) -> bool:
    return a["--task"] in FINETUNED and a["--epochs"] != 0


def _finetuning(a: Given, ranks: int | None) -> str:
    """The line of `mtrain finetune`; a step has one microbatch of each data-parallel rank, as in Megatron-LM."""
    tp, pp = (a[f"--{name}-model-parallel-size"] or 1 for name in ("tensor", "pipeline"))
    micro, data_parallel = a["--micro-batch-size"], max(1, (ranks or 1) // (tp * pp))
    batch = a["--global-batch-size"] or micro * data_parallel
    words = ["mtrain", "finetune", a["--pretrained-checkpoint"] or a["--load"], ",".join(a["--train-data"])]
    words += [f"train.global_batch={batch}", f"train.micro_batch={micro}"]
    words += [f"mesh.{name}={size}" for name, size in (("tp", tp), ("pp", pp)) if size > 1]
    settings = {
        "--lr-warmup-fraction": "optimizer.warmup_fraction",
        "--weight-decay": "optimizer.weight_decay",
        "--clip-grad": "optimizer.clip_norm",
        "--hidden-dropout": "model.hidden_dropout",
        "--attention-dropout": "model.attention_dropout",
        "--seed": "run.seed",
    }
    words += [f"{key}={a[name]:.15g}" for name, key in settings.items() if name in a]
    words += ["--task", a["--task"].lower(), "--valid", ",".join(a["--valid-data"])]
    words += ["--epochs", str(a["--epochs"])] if a["--epochs"] else []
    words += ["--lr", f"{a['--lr']:.15g}"]
    words += ["--sequence-length", str(a["--seq-length"])] if "--seq-length" in a else []
    words += [word for name in ("fp16", "bf16") if f"--{name}" in a for word in ("--precision", name)]
    words += ["--gpus", str(ranks)] if ranks and ranks > 1 else []
    words += ["--tokenizer", "tokenizer"] if "--vocab-file" in a else []
    words += ["--folder", a["--save"]] if a["--save"] else []
    return shlex.join(words)


def _command(a: Given, ranks: int | None) -> str:
    if _finetunes(a):
        return _finetuning(a, ranks)
    return "\n".join(_evaluating(a, ranks, file) for file in a["--valid-data"])


def _evaluating(a: Given, ranks: int | None, file: str) -> str:
    task = TASKS.get(a["--task"]) or a["--task"].lower()
    words = ["mtrain", "eval", str(a["--load"]), "--task", task, "--data", file]
    if a["--task"] == "WIKITEXT103" and "--overlapping-eval" in a:
        words += ["--overlap", str(max(1, a["--overlapping-eval"]))]
    if a["--strict-lambada"] and a["--task"] == "LAMBADA":
        words.append("--strict")
    if "--seq-length" in a:
        words += ["--sequence-length", str(a["--seq-length"])]
    if "--micro-batch-size" in a:
        words += ["--batch-size", str(a["--micro-batch-size"])]
    words += [word for name in ("fp16", "bf16") if f"--{name}" in a for word in ("--dtype", name)]
    if "--vocab-file" in a or "--tokenizer-model" in a:
        words += ["--tokenizer", "tokenizer"]
    sizes = [("--tp", a["--tensor-model-parallel-size"]), ("--pp", a["--pipeline-model-parallel-size"])]
    words += [word for name, size in sizes if size and size > 1 for word in (name, str(size))]
    started = ["torchrun", "--nproc-per-node", str(ranks), "--no-python"] if ranks and ranks > 1 else []
    return shlex.join([*started, *words])


def _notes(a: Given) -> Iterator[str]:
    yield from _tokenizer_notes(a, vocabulary="vocab.txt" if a["--task"] in FINETUNED else "vocab.json")
    if _finetunes(a):
        yield "accuracy is that of every row, which tasks/main.py computes on one data-parallel rank alone"
        if "--keep-last" not in a:
            yield "the last rows of an epoch are read too, as with --keep-last"
    if "--overlapping-eval" in a and "--seq-length" in a and a["--overlapping-eval"] > a["--seq-length"]:
        yield "an overlap beyond the sequence leaves tokens out; mtrain eval refuses it"


def _tokenizer_notes(a: Given, *, vocabulary: str = "vocab.json") -> Iterator[str]:
    names = {"--vocab-file": vocabulary, "--merge-file": "merges.txt", "--tokenizer-model": "tokenizer.model"}
    files = [f"{a.texts[name].partition(' ')[2]} as {kept}" for name, kept in names.items() if name in a]
    if files:
        yield f"tokenizer is a folder with {' and '.join(files)}"
