"""Learning a byte-level BPE vocabulary from text, by the `tokenizers` library, and writing it as a folder.

The result is a function of the texts and the vocabulary size alone: the library counts words on several
threads, but breaks ties between equally frequent pairs by their ids. Token 0 is <|endoftext|>, which texts
may spell; 1 to 256 are the single bytes, so that every text has ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from mdata.errors import UsageError, os_errors_named
from mdata.progress import SILENT, Progress
from mdata.sources import find_files, read_records
from mdata.tokenizers.folder import write_folder
from mdata.tokenizers.protocol import Tokenizer
from mdata.tokenizers.registry import build_tokenizer

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
# Without a limit a run of one letter, or of base64, becomes a token of hundreds of bytes.
_LONGEST_TOKEN_BYTES = 64


def train_tokenizer(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    json_keys: Sequence[str] = ("text",),
    progress: Progress = SILENT,
) -> Tokenizer:
    """Learn a vocabulary and write it as a Hugging Face folder.

    Args:
        inputs: files, folders or patterns of jsonl, as for `preprocess`.
        output: the folder; tokenizer.json and tokenizer_config.json come into it.
        vocab_size: entries, <|endoftext|> and the 256 bytes included.
        json_keys: whose values are learnt from.

    Raises:
        UsageError: no input, or a vocabulary too small for the 256 bytes.
        BadInputError: a record that cannot be taken, by file and row.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small",
            expected=f"at least {SMALLEST_VOCABULARY}: the 256 bytes and {END_OF_TEXT}",
        )
    files = {
        "tokenizer.json": learn(_texts(inputs, json_keys, progress), vocab_size).encode(),
        "tokenizer_config.json": _config().encode(),
    }
    tokenizer = build_tokenizer("HuggingFaceTokenizer", files)
    with os_errors_named(f"writing the tokenizer to {output}"):
        write_folder(Path(output), files)
    return tokenizer


def learn(texts: Iterator[str], vocab_size: int) -> str:
    """The tokenizer.json of a vocabulary learnt from texts."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=_LONGEST_TOKEN_BYTES,
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return str(engine.to_str(pretty=True)) + "\n"


def _config() -> str:
    config = {
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return json.dumps(config, indent=2) + "\n"


def _texts(inputs: Sequence[str | Path], json_keys: Sequence[str], progress: Progress) -> Iterator[str]:
    files = find_files(inputs)
    progress.begin("reading text", sum(file.size_bytes for file in files), unit="B")
    for file in files:
        for record in read_records(file, json_keys):
            for sentences in record.texts:
                yield from sentences
        progress.advance(file.size_bytes)
    progress.end()
