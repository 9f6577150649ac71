"""Training with the `tokenizers` and `sentencepiece` libraries: texts in, the files of a tokenizer out.

Each result depends only on the texts and the options. For this, sentencepiece runs with one thread (its result depends
on their number), and WordPiece gets all characters, alone and with "##", as its first entries, because the library
numbers the characters that it finds in the order of a hash table and breaks ties by number. The module is also a
program, which mdata/tokenizer_training/trainer_process.py starts: options and texts on stdin, files on stdout.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, Literal

Kind = Literal["byte-bpe", "wordpiece", "sentencepiece-bpe", "sentencepiece-unigram"]

END_OF_TEXT = "<|endoftext|>"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Without a limit a run of one letter, or of base64, becomes a token of hundreds of bytes.
_LONGEST_TOKEN_BYTES = 64
_LONGEST_SENTENCE = 2048  # sentencepiece silently skips longer ones, so they are split
# sentencepiece skips sentences with these characters, which it uses itself.
_REPLACED = {0: " ", 0x2581: " ", 0x2585: " "}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task; see TrainOptions. `characters` get entries in WordPiece."""

    kind: Kind
    vocab_size: int
    special_tokens: tuple[str, ...] = ()
    lower_case: bool = False
    characters: str = ""
    sentencepiece: Mapping[str, Any] | None = None


def train(task: Task, texts: Iterator[str]) -> dict[str, bytes]:
    """Train; returns the files by name.

    Raises:
        RuntimeError: sentencepiece refused, with its reason.
    """
    if task.kind == "byte-bpe":
        return _byte_bpe(task, texts)
    return _wordpiece(task, texts) if task.kind == "wordpiece" else _sentencepiece(task, texts)


def _byte_bpe(task: Task, texts: Iterator[str]) -> dict[str, bytes]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=task.vocab_size,
        special_tokens=[END_OF_TEXT, *task.special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=_LONGEST_TOKEN_BYTES,
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    text = str(engine.to_str(pretty=True)) + "\n"
    model = json.loads(text)["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    config = {
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": text.encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "vocab.json": (json.dumps(model["vocab"], ensure_ascii=False) + "\n").encode(),
        "merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *merges]).encode(),
    }


def bert_engine(vocabulary: dict[str, int], *, lower_case: bool) -> Any:
    """A WordPiece tokenizer of the `tokenizers` library in BERT's form, without a post-processor."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    engine = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    engine.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()
    return engine


def _wordpiece(task: Task, texts: Iterator[str]) -> dict[str, bytes]:
    from tokenizers import AddedToken, processors, trainers

    engine = bert_engine({}, lower_case=task.lower_case)
    named = [*BERT_TOKENS, *task.special_tokens]
    characters = sorted(task.characters)
    trainer = trainers.WordPieceTrainer(
        vocab_size=task.vocab_size,
        special_tokens=[*named, *characters, *(f"##{character}" for character in characters)],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        min_frequency=2,
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    vocabulary = engine.get_vocab()
    entries = sorted(vocabulary, key=vocabulary.__getitem__)
    whole = bert_engine({entry: id for id, entry in enumerate(entries)}, lower_case=task.lower_case)
    whole.add_special_tokens([AddedToken(token, normalized=False) for token in named])
    whole.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, entries.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    roles = zip(("pad", "unk", "cls", "sep", "mask"), BERT_TOKENS, strict=True)
    config = {"do_lower_case": task.lower_case, "tokenizer_class": "BertTokenizer"}
    config |= {f"{role}_token": token for role, token in roles}
    return {
        "vocab.txt": "".join(f"{entry}\n" for entry in entries).encode(),
        "tokenizer.json": (str(whole.to_str(pretty=True)) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
    }


def _sentencepiece(task: Task, texts: Iterator[str]) -> dict[str, bytes]:
    import sentencepiece

    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_sentences(texts),
        model_writer=model,
        model_type=task.kind.removeprefix("sentencepiece-"),
        vocab_size=task.vocab_size,
        control_symbols=list(task.special_tokens),
        num_threads=1,
        max_sentence_length=4 * _LONGEST_SENTENCE,
        hard_vocab_limit=False,
        minloglevel=2,
        **(task.sentencepiece or {}),
    )
    return {"tokenizer.model": model.getvalue()}


def _sentences(texts: Iterator[str]) -> Iterator[str]:
    """The texts as lines, as sentencepiece reads files; long lines are split, at blanks if possible."""
    for text in texts:
        for line in text.translate(_REPLACED).split("\n"):
            at = 0
            while len(line) - at > _LONGEST_SENTENCE:
                blank = line.rfind(" ", at + 1, at + _LONGEST_SENTENCE)
                yield line[at : blank if blank > 0 else at + _LONGEST_SENTENCE]
                # A sentence begins as if preceded by a blank.
                at = blank + 1 if blank > 0 else at + _LONGEST_SENTENCE
            if at < len(line):
                yield line[at:]


def received(stream: BinaryIO) -> Iterator[Any]:
    """The unpickled objects until the stream ends; a truncated one is dropped."""
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(stream)


def main() -> None:
    """Read a task and texts from stdin, and train. The answer is the files by name, or an error."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library must not get in between
    messages = received(sys.stdin.buffer)
    try:
        made: dict[str, bytes] | str = train(next(messages), messages)
    except RuntimeError as error:
        made = str(error)
    pickle.dump(made, answer)
    answer.close()


if __name__ == "__main__":
    main()
