"""Option names of Megatron-LM, Hugging Face and others that have another name here: hints for users who type them.

One table for both command lines, for the configuration of a run and for tokenizer types. It only suggests; none of
these names is accepted. Keys are in lower case, without leading dashes, with words joined by dashes. A second table
has the options that were renamed in 0.1: their old names are accepted until 0.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

# Other projects' names -> our names; the first of ours that exists where the name was typed is suggested.
_WORDS: tuple[tuple[str, str], ...] = (
    # Command lines of preprocessing.
    ("--workers", "num-proc processes jobs threads tasks"),
    ("--workers data.prefetch", "num-workers"),
    ("--workers --nproc", "nproc"),
    (
        "--tokenizer-model",
        "tokenizer tokenizer-name-or-path tokenizer-name model-name-or-path tokenizer-path tokenizer-file",
    ),
    ("--vocab-file", "vocab-path"),
    ("--merge-file", "merges-file"),
    ("--json-keys", "text-column text-column-name text-key column columns content-key"),
    ("--input data.blend", "data-path train-data-path dataset dataset-name"),
    ("--input", "data-files input-files input-dir input-path input-folder"),
    ("--bands", "num-buckets"),
    ("--rows", "hashes-per-bucket"),
    ("--steps", "filters"),
    ("--include", "glob-pattern"),
    ("--exclude", "ignore"),
    ("--output-prefix --output", "output output-path output-file out"),
    ("--output-prefix --output run.folder", "output-dir output-folder"),
    ("--append-eod", "add-eos append-eos add-eos-token eos-token"),
    ("--on-error", "skip-errors ignore-errors"),
    ("--max-record-bytes", "max-line-length"),
    ("--chat-template", "chat-format"),
    ("--partitions", "shards num-shards"),
    # The configuration of a run.
    ("mesh.tp --tp --nproc", "tp tp-size tensor-parallel-size tensor-model-parallel-size"),
    ("mesh.pp --pp", "pp pp-size pipeline-parallel-size pipeline-model-parallel-size"),
    ("mesh.cp", "cp cp-size context-parallel-size"),
    ("mesh.ep", "ep ep-size expert-parallel-size expert-model-parallel-size"),
    ("--nproc --ranks", "num-gpus gpus nproc-per-node"),
    ("--ranks --nproc", "world-size"),
    ("optimizer.lr", "learning-rate lr max-lr"),
    ("optimizer.min_lr", "min-learning-rate"),
    ("optimizer.warmup_steps", "lr-warmup-iters lr-warmup-steps warmup num-warmup-steps"),
    ("optimizer.decay_steps", "lr-decay-iters"),
    ("optimizer.warmup_samples", "lr-warmup-samples"),
    ("optimizer.warmup_fraction", "lr-warmup-fraction warmup-ratio"),
    ("optimizer.init_lr", "lr-warmup-init"),
    ("optimizer.decay_samples", "lr-decay-samples"),
    ("optimizer.schedule", "lr-decay-style lr-scheduler-type"),
    ("optimizer.wsd_decay", "lr-wsd-decay-style"),
    ("optimizer.wsd_decay_steps", "lr-wsd-decay-iters"),
    ("optimizer.wsd_decay_samples", "lr-wsd-decay-samples"),
    ("optimizer.weight_decay", "start-weight-decay wd"),
    ("optimizer.weight_decay_end", "end-weight-decay"),
    ("optimizer.weight_decay_schedule", "weight-decay-incr-style"),
    ("optimizer.momentum", "sgd-momentum"),
    ("train.samples", "train-samples"),
    ("optimizer.beta1", "adam-beta1"),
    ("optimizer.beta2", "adam-beta2"),
    ("optimizer.epsilon", "adam-eps adam-epsilon eps"),
    ("optimizer.clip_norm", "clip-grad max-grad-norm gradient-clip-val"),
    ("train.micro_batch", "micro-batch-size per-device-train-batch-size"),
    ("train.global_batch", "batch-size train-batch-size global-batch-size"),
    ("train.batch_ramp", "rampup-batch-size"),
    (
        "train.sequence_length --sequence-length",
        "seq-length seq-len max-length max-seq-length context-length block-size",
    ),
    ("train.steps", "train-iters iterations max-steps total-steps"),
    ("run.log_interval", "log-interval log-every logging-steps"),
    ("train.eval_interval", "eval-steps"),
    ("train.eval_samples", "eval-iters"),
    ("checkpoint.interval", "save-interval save-steps"),
    ("run.folder", "save"),
    ("checkpoint.keep", "save-total-limit"),
    ("precision.dtype", "bf16 fp16 params-dtype torch-dtype"),
    ("model.num_heads", "num-attention-heads n-head"),
    ("model.num_kv_heads", "num-query-groups num-key-value-heads"),
    ("model.num_layers", "num-hidden-layers n-layer"),
    ("model.hidden_size", "n-embd d-model"),
    ("model.ffn_hidden_size", "intermediate-size"),
    ("model.max_position", "max-position-embeddings"),
    ("model.rope_theta", "rotary-base"),
    ("model.position", "position-embedding-type"),
    ("model.norm", "normalization"),
    ("model.norm_epsilon", "layernorm-epsilon rms-norm-eps"),
    ("model.init_std", "init-method-std initializer-range"),
    ("model.tie_embeddings", "untie-embeddings-and-output-weights tie-word-embeddings"),
    # Types of tokenizers.
    ("HuggingFaceTokenizer", "autotokenizer pretrainedtokenizerfast pretrainedfromhf hf huggingface"),
    ("GPT2BPETokenizer", "gpt2 gpt2tokenizer bpe"),
    ("Llama2Tokenizer HuggingFaceTokenizer", "llamatokenizer"),
    ("SentencePieceTokenizer", "sentencepiece"),
    ("TikTokenizer", "tiktoken"),
    ("BertWordPieceLowerCase", "bert berttokenizer"),
)
# Options of programs that continue from a checkpoint only when they are asked to.
RESUME_WORDS = frozenset(
    ["resume", "auto-resume", "resume-from", "resume-from-checkpoint", "continue", "ckpt-path", "load", "load-path"]
)
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    word: tuple(names.split()) for names, words in _WORDS for word in words.split()
}

# Options before 0.1: command -> old name -> new name. Hidden from help, and accepted until 0.2 with a line on stderr.
RENAMED_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "mdata fetch": {"--folder": "--output"},
    "mdata sample": {"--output-prefix": "--output"},
    "mdata shuffle": {"--output-prefix": "--output"},
    "mdata split": {"--output-prefix": "--output"},
    "mdata stage": {"--ranks": "--dp-ranks"},
    "mdata trace": {"--rank": "--dp-rank"},
    "mtrain plan": {"--nproc": "--ranks"},
    "mtrain prove": {"--folder": "--output"},
}


def renamed_options(command: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's words with old names of options replaced, and a line for each that names the new one.

    Args:
        command: the program and its subcommand, such as "mdata fetch".
        words: the command line after that.
    """
    renamed = RENAMED_OPTIONS.get(command, {})
    current, lines = list(words), []
    for i, word in enumerate(takewhile("--".__ne__, words)):
        name, equals, value = word.partition("=")
        if name in renamed:
            current[i] = f"{renamed[name]}{equals}{value}"
            lines.append(f"{command} {name} is now {renamed[name]}; the old name works until 0.2")
    return current, lines


def normal(name: str) -> str:
    """A name in lower case, without leading dashes, with words joined by dashes."""
    return name.lstrip("-").replace("_", "-").lower()


def asks_to_resume(name: str) -> bool:
    """Whether a word, or the last part of a key, asks other programs to continue from a checkpoint."""
    return normal(name).rpartition(".")[2] in RESUME_WORDS


def synonym(name: str, names: Iterable[str]) -> str | None:
    """Which of these names a word means: by another spelling, or by the table."""
    candidates = list(names)
    spelled = {normal(candidate): candidate for candidate in reversed(candidates)}
    word = normal(name)
    # A key may be given with its section: only the last part is looked up.
    spelled |= {
        normal(candidate).rpartition(".")[2]: candidate
        for candidate in reversed(candidates)
        if "." in candidate and candidate != name
    }
    if word in spelled:
        return spelled[word]
    for candidate in SYNONYMS.get(word.rpartition(".")[2], ()):
        for possible in (candidate, candidate.rpartition(".")[2]):
            if possible in candidates:
                return possible
    return None


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that a user most likely meant, by meaning or by spelling; None if nothing is close."""
    import difflib

    candidates = list(names)
    bare = {candidate.lstrip("-"): candidate for candidate in reversed(candidates)}  # dashes resemble dashes
    word = name.lstrip("-")
    if len(word) <= 2:  # "tp" is no half of "stop"
        bare = {short: candidate for short, candidate in bare.items() if len(short) <= 3}
    close = difflib.get_close_matches(word, bare, n=1, cutoff=0.6)
    match = synonym(name, candidates) or (bare[close[0]] if close else None)
    return None if match == name else match
