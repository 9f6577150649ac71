"""Training with the `tokenizers` and `sentencepiece` libraries: texts in, the files of a tokenizer out.

It runs in a separate process, because the libraries ignore Ctrl-C for minutes and may use all memory: this module is
also that program. The process gets options and texts over a pipe, so reading, sampling and errors of the input stay
with the caller, and sends the files back. It ends when the caller stops for any reason. Its memory is limited only by
the size of the sample.

Each result depends only on the texts and the options. For this, sentencepiece runs with one thread (its result depends
on their number), and WordPiece gets all characters, alone and with "##", as its first entries, because the library
numbers the characters that it finds in the order of a hash table and breaks ties by number.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mdata.errors import MdataError, ResourceError, UsageError, os_errors_named
from mdata.progress import SILENT, Progress


def train_in_process(task: Task, texts: Iterator[str], *, progress: Progress = SILENT) -> dict[str, bytes]:
    """Train in a process; returns the files of the tokenizer.

    Raises:
        UsageError: the library cannot train on these texts, with its reason.
        ResourceError: the process died.
        MdataError: an error from reading the texts.
    """
    words = [sys.executable, "-P", "-m", "mdata.tokenizer_training.trainers"]
    # The child must find the same mdata, however this process found it (-P: not a user's mdata.py), and not get our
    # Ctrl-C.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    with tempfile.TemporaryFile() as errors:
        with os_errors_named("starting the training process"):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            child = subprocess.Popen(words, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]
        try:
            with suppress(BrokenPipeError):  # it ended early and sent the reason
                _feed(child.stdin, task, texts)
            progress.begin("training", None, unit="s")
            answer = next(received(child.stdout), None)
            child.wait()
            progress.end()
        finally:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                with suppress(BrokenPipeError):
                    stream.close()
        if answer is None:
            raise _death(child.returncode, errors)
    if isinstance(answer, str):
        raise refusal(answer)
    return dict(answer)


def refusal(reason: str) -> UsageError:
    """The error for a reason that sentencepiece gives."""
    return UsageError(
        "sentencepiece cannot train on these texts",
        found=reason.strip().splitlines()[0][:300],
        fix="more text, another vocab_size, or a smaller character_coverage",
    )


def _feed(stream: BinaryIO, task: Task, texts: Iterator[str]) -> None:
    for message in chain([task], texts):
        pickle.dump(message, stream)
    stream.close()


def _death(code: int, errors: BinaryIO) -> MdataError:
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    reason = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if said:
        reason += f": {said[-1][:300]}"
    return ResourceError("the training process died", found=reason, fix="a smaller sample, or more memory")


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
    tokenizer = bert_engine({entry: id for id, entry in enumerate(entries)}, lower_case=task.lower_case)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in named])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, entries.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    roles = zip(("pad", "unk", "cls", "sep", "mask"), BERT_TOKENS, strict=True)
    config = {"do_lower_case": task.lower_case, "tokenizer_class": "BertTokenizer"}
    config |= {f"{role}_token": token for role, token in roles}
    return {
        "vocab.txt": "".join(f"{entry}\n" for entry in entries).encode(),
        "tokenizer.json": (str(tokenizer.to_str(pretty=True)) + "\n").encode(),
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
