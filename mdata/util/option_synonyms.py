"""Words of Megatron-LM, Hugging Face and others for what we call otherwise: hints for whoever types them.

One table for both command lines, for the configuration of a run and for names of types. It only ever suggests; nothing
is accepted by it. Keys are in lower case, without dashes in front, words joined by dashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# The first of the names that exists where the word was typed is meant.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    # Command lines of preprocessing.
    "num-proc": ("--workers",),
    "num-workers": ("--workers", "data.prefetch"),
    "nproc": ("--workers", "--nproc"),
    "processes": ("--workers",),
    "jobs": ("--workers",),
    "threads": ("--workers",),
    "tasks": ("--workers",),
    "tokenizer": ("--tokenizer-model",),
    "tokenizer-name-or-path": ("--tokenizer-model",),
    "tokenizer-name": ("--tokenizer-model",),
    "model-name-or-path": ("--tokenizer-model",),
    "tokenizer-path": ("--tokenizer-model",),
    "tokenizer-file": ("--tokenizer-model",),
    "vocab-path": ("--vocab-file",),
    "merges-file": ("--merge-file",),
    "text-column": ("--json-keys",),
    "text-column-name": ("--json-keys",),
    "text-key": ("--json-keys",),
    "column": ("--json-keys",),
    "columns": ("--json-keys",),
    "content-key": ("--json-keys",),
    "data-path": ("--input", "data.blend"),
    "train-data-path": ("--input", "data.blend"),
    "dataset": ("--input", "data.blend"),
    "dataset-name": ("--input", "data.blend"),
    "data-files": ("--input",),
    "input-files": ("--input",),
    "input-dir": ("--input",),
    "glob-pattern": ("--include",),
    "ignore": ("--exclude",),
    "output": ("--output-prefix",),
    "output-path": ("--output-prefix",),
    "output-dir": ("--output-prefix", "run.folder"),
    "add-eos": ("--append-eod",),
    "append-eos": ("--append-eod",),
    "add-eos-token": ("--append-eod",),
    "eos-token": ("--append-eod",),
    "skip-errors": ("--on-error",),
    "ignore-errors": ("--on-error",),
    "max-line-length": ("--max-record-bytes",),
    "chat-format": ("--chat-template",),
    "shards": ("--partitions",),
    "num-shards": ("--partitions",),
    # The configuration of a run.
    "tp": ("mesh.tp",),
    "tp-size": ("mesh.tp",),
    "tensor-parallel-size": ("mesh.tp",),
    "tensor-model-parallel-size": ("mesh.tp",),
    "num-gpus": ("--nproc",),
    "gpus": ("--nproc",),
    "nproc-per-node": ("--nproc",),
    "learning-rate": ("optimizer.lr",),
    "lr": ("optimizer.lr",),
    "max-lr": ("optimizer.lr",),
    "min-learning-rate": ("optimizer.min_lr",),
    "lr-warmup-iters": ("optimizer.warmup_steps",),
    "lr-warmup-steps": ("optimizer.warmup_steps",),
    "warmup": ("optimizer.warmup_steps",),
    "num-warmup-steps": ("optimizer.warmup_steps",),
    "lr-decay-iters": ("optimizer.decay_steps",),
    "lr-warmup-samples": ("optimizer.warmup_samples",),
    "lr-warmup-fraction": ("optimizer.warmup_fraction",),
    "warmup-ratio": ("optimizer.warmup_fraction",),
    "lr-warmup-init": ("optimizer.init_lr",),
    "lr-decay-samples": ("optimizer.decay_samples",),
    "lr-decay-style": ("optimizer.schedule",),
    "lr-scheduler-type": ("optimizer.schedule",),
    "lr-wsd-decay-style": ("optimizer.wsd_decay",),
    "lr-wsd-decay-iters": ("optimizer.wsd_decay_steps",),
    "lr-wsd-decay-samples": ("optimizer.wsd_decay_samples",),
    "start-weight-decay": ("optimizer.weight_decay",),
    "end-weight-decay": ("optimizer.weight_decay_end",),
    "weight-decay-incr-style": ("optimizer.weight_decay_schedule",),
    "sgd-momentum": ("optimizer.momentum",),
    "train-samples": ("train.samples",),
    "adam-beta1": ("optimizer.beta1",),
    "adam-beta2": ("optimizer.beta2",),
    "adam-eps": ("optimizer.epsilon",),
    "adam-epsilon": ("optimizer.epsilon",),
    "eps": ("optimizer.epsilon",),
    "clip-grad": ("optimizer.clip_norm",),
    "max-grad-norm": ("optimizer.clip_norm",),
    "gradient-clip-val": ("optimizer.clip_norm",),
    "wd": ("optimizer.weight_decay",),
    "micro-batch-size": ("train.micro_batch",),
    "per-device-train-batch-size": ("train.micro_batch",),
    "batch-size": ("train.global_batch",),
    "train-batch-size": ("train.global_batch",),
    "global-batch-size": ("train.global_batch",),
    "rampup-batch-size": ("train.batch_ramp",),
    "seq-length": ("train.sequence_length", "--sequence-length"),
    "seq-len": ("train.sequence_length", "--sequence-length"),
    "max-length": ("train.sequence_length", "--sequence-length"),
    "max-seq-length": ("train.sequence_length", "--sequence-length"),
    "context-length": ("train.sequence_length", "--sequence-length"),
    "block-size": ("train.sequence_length", "--sequence-length"),
    "train-iters": ("train.steps",),
    "iterations": ("train.steps",),
    "max-steps": ("train.steps",),
    "total-steps": ("train.steps",),
    "log-every": ("train.log_interval",),
    "logging-steps": ("train.log_interval",),
    "eval-steps": ("train.eval_interval",),
    "eval-iters": ("train.eval_samples",),
    "save-interval": ("checkpoint.interval",),
    "save-steps": ("checkpoint.interval",),
    "save": ("run.folder",),
    "load": ("run.folder",),
    "save-total-limit": ("checkpoint.keep",),
    "bf16": ("precision.dtype",),
    "fp16": ("precision.dtype",),
    "params-dtype": ("precision.dtype",),
    "torch-dtype": ("precision.dtype",),
    "num-attention-heads": ("model.num_heads",),
    "n-head": ("model.num_heads",),
    "num-query-groups": ("model.num_kv_heads",),
    "num-key-value-heads": ("model.num_kv_heads",),
    "num-hidden-layers": ("model.num_layers",),
    "n-layer": ("model.num_layers",),
    "n-embd": ("model.hidden_size",),
    "d-model": ("model.hidden_size",),
    "intermediate-size": ("model.ffn_hidden_size",),
    "max-position-embeddings": ("model.max_position",),
    "rotary-base": ("model.rope_theta",),
    "position-embedding-type": ("model.position",),
    "normalization": ("model.norm",),
    "layernorm-epsilon": ("model.norm_epsilon",),
    "rms-norm-eps": ("model.norm_epsilon",),
    "init-method-std": ("model.init_std",),
    "initializer-range": ("model.init_std",),
    "untie-embeddings-and-output-weights": ("model.tie_embeddings",),
    "tie-word-embeddings": ("model.tie_embeddings",),
    # Types of tokenizers.
    "autotokenizer": ("HuggingFaceTokenizer",),
    "pretrainedtokenizerfast": ("HuggingFaceTokenizer",),
    "pretrainedfromhf": ("HuggingFaceTokenizer",),
    "hf": ("HuggingFaceTokenizer",),
    "huggingface": ("HuggingFaceTokenizer",),
    "gpt2": ("GPT2BPETokenizer",),
    "gpt2tokenizer": ("GPT2BPETokenizer",),
    "bpe": ("GPT2BPETokenizer",),
    "llamatokenizer": ("Llama2Tokenizer", "HuggingFaceTokenizer"),
    "sentencepiece": ("SentencePieceTokenizer",),
    "tiktoken": ("TikTokenizer",),
    "bert": ("BertWordPieceLowerCase",),
    "berttokenizer": ("BertWordPieceLowerCase",),
}


def normal(name: str) -> str:
    """A name without case, dashes in front, and with words joined by dashes."""
    return name.lstrip("-").replace("_", "-").lower()


def synonym(name: str, names: Iterable[str]) -> str | None:
    """What of these names a word means: the same in another spelling, or by the table."""
    known = list(names)
    spelled = {normal(one): one for one in reversed(known)}
    word = normal(name)
    # A key of a section is meant by its whole name as well: the last part of it is looked for.
    spelled |= {normal(one).rpartition(".")[2]: one for one in reversed(known) if "." in one and one != name}
    if word in spelled:
        return spelled[word]
    for one in SYNONYMS.get(word.rpartition(".")[2], ()):
        for possible in (one, one.rpartition(".")[2]):
            if possible in known:
                return possible
    return None


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name a user most likely meant, by meaning or by spelling, or None when nothing is near."""
    import difflib

    known = list(names)
    found = synonym(name, known) or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None)
    return None if found == name else found
