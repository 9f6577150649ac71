"""Training a tokenizer on text with the `tokenizers` and `sentencepiece` libraries, and writing it as a folder.

The result depends only on the input and the options. The files are those that Megatron's options name, and
`TrainedTokenizer.specs` names them for preprocess. Training holds its text in memory, so it uses a sample
(text_sample.py), in a separate process (trainers.py). An output folder with another tokenizer is not changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

from mdata.errors import UsageError, counted, explain_os_error, os_errors_named
from mdata.progress import SILENT, Progress
from mdata.sources.folder_files import PathFilter
from mdata.sources.input_files import find_inputs
from mdata.sources.record_batch import ReadSpec
from mdata.tokenizer_training.text_sample import Sample, take_sample
from mdata.tokenizer_training.train_options import (
    DEFAULT_SAMPLE_BYTES,
    TrainOptions,
    check_options,
    sentencepiece_options,
)
from mdata.tokenizer_training.trainers import BERT_TOKENS, Kind, Task, bert_engine, train_in_process
from mdata.tokenizers.base.tokenizer import Tokenizer, TokenizerSpec
from mdata.tokenizers.base.tokenizer_folder import lock_path, write_folder
from mdata.tokenizers.registry import load_tokenizer
from mdata.util import file_lock

_OUR_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")


@dataclass(frozen=True)
class TrainedTokenizer:
    """A trained tokenizer, and its specs for preprocess.

    Attributes:
        folder: where the files are.
        entries: of the vocabulary; may be fewer than `vocab_size` for a small text.
        tokenizer: as preprocess loads it.
        specs: ways in which preprocess can load it, the best first.
        sampled_bytes, input_bytes: of decompressed input.
        there_before: the same files existed already.
    """

    folder: Path
    entries: int
    tokenizer: Tokenizer
    specs: tuple[TokenizerSpec, ...]
    sampled_bytes: int
    input_bytes: int
    there_before: bool


def train_tokenizer(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    kind: Kind = "byte-bpe",
    options: TrainOptions | None = None,
    progress: Progress = SILENT,
) -> TrainedTokenizer:
    """Train a tokenizer on a seeded sample of an input and write the files that Megatron's options name.

    Args:
        inputs: files, folders, patterns, "-", as for `preprocess`.
        output: the folder.
        vocab_size: entries, including special ones and single bytes.
        kind: byte-bpe, wordpiece, sentencepiece-bpe or sentencepiece-unigram.
        options: see TrainOptions.
        progress: receives the bytes read, and notes.

    Raises:
        UsageError: no input, options that do not apply to the kind, a vocabulary that is too small for the mandatory
            entries, or another tokenizer in the output folder.
        BadInputError: a bad row; names file and row.
        ResourceError: the disk is full, or the training process died.
    """
    options = options or TrainOptions()
    check_options(kind, vocab_size, options=options)
    output = Path(output)
    _check_output(output, options, progress)
    chosen = PathFilter(options.include, options.exclude)
    files = find_inputs(inputs, format=options.input_format, filter=chosen, progress=progress).files
    if options.text_documents != "file" and not any(file.format == "text" for file in files):
        progress.note("without effect here: --text-documents (needs plain text in the input)")
    spec = ReadSpec(
        json_keys=options.json_keys,
        text_documents=options.text_documents,
        max_record_bytes=options.max_record_bytes,
    )
    wanted = options.sample_bytes or DEFAULT_SAMPLE_BYTES[kind]
    sample = take_sample(files, spec, sample_bytes=wanted, seed=options.seed, progress=progress)
    if sample.sampled_bytes < sample.input_bytes:
        share = sample.sampled_bytes / sample.input_bytes
        progress.note(
            f"training on {sample.sampled_bytes:,} of {sample.input_bytes:,} bytes ({share:.2%}), seed {options.seed}"
        )
    task = _task(kind, vocab_size, options=options, sample=sample, progress=progress)
    made = train_in_process(task, _not_empty(sample.texts(options.on_error, progress)), progress=progress)
    there = _write(output, made, options)
    specs = _specs(kind, output, options)
    tokenizer = load_tokenizer(specs[-1] if kind == "byte-bpe" else specs[0])
    return TrainedTokenizer(output, _entries(made), tokenizer, specs, sample.sampled_bytes, sample.input_bytes, there)


def _check_output(output: Path, options: TrainOptions, progress: Progress) -> None:
    there = [name for name in _OUR_FILES if (output / name).exists()]
    if not there:  # what is there may be the same tokenizer, which is not written again
        nearest = next(path for path in (output, *output.parents) if os.path.lexists(path))
        try:
            TemporaryFile(dir=nearest).close()
        except OSError as error:
            raise explain_os_error(
                OSError(error.errno, "", str(nearest)), f"writing the tokenizer to {output}"
            ) from error
    if there and not options.overwrite:
        progress.note(f"{output} already contains {there[0]}; --overwrite replaces it")


def _task(kind: Kind, vocab_size: int, *, options: TrainOptions, sample: Sample, progress: Progress) -> Task:
    task = Task(kind=kind, vocab_size=vocab_size, special_tokens=options.special_tokens)
    if kind == "wordpiece":
        characters = _characters(vocab_size, options, sample, progress)
        return replace(task, lower_case=options.lower_case, characters=characters)
    return task if kind == "byte-bpe" else replace(task, sentencepiece=sentencepiece_options(options))


def _characters(vocab_size: int, options: TrainOptions, sample: Sample, progress: Progress) -> str:
    """The most frequent characters that cover the requested share of the text; each takes two entries, c and ##c."""
    normalizer = bert_engine({}, lower_case=options.lower_case).normalizer
    counts: Counter[str] = Counter()
    for text in _not_empty(sample.texts("skip", progress, doing="counting characters")):
        counts.update(normalizer.normalize_str(text))
    counts = Counter({character: times for character, times in counts.items() if not character.isspace()})
    most = (vocab_size - len(BERT_TOKENS) - len(options.special_tokens)) // 2
    wanted = (options.character_coverage or 0.9995) * counts.total()
    covering: list[str] = []
    covered = 0
    for character, times in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= wanted:
            break
        covering.append(character)
        covered += times
    if len(covering) > most:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small for the characters of this text",
            found=f"{len(covering):,} characters, each alone and with ##",
            expected=f"at least {counted(2 * len(covering) + vocab_size - 2 * most, 'entry', 'entries')}",
            fix="a larger vocab_size, or a smaller character_coverage",
        )
    return "".join(covering)


def _not_empty(texts: Iterator[str]) -> Iterator[str]:
    """The texts; an error if all are empty."""
    empty = True
    for text in texts:
        empty = empty and not text.strip()
        yield text
    if empty:
        raise UsageError("there is no text to train on", fix="check the input and its keys (--json-keys)")


def _write(output: Path, made: Mapping[str, bytes], options: TrainOptions) -> bool:
    """Write the files; returns whether the same files existed."""
    with os_errors_named(f"writing the tokenizer to {output}"):
        there = {name: (output / name).read_bytes() for name in _OUR_FILES if (output / name).is_file()}
        if there == made:
            file_lock.remove_left(lock_path(output))
            return True
        foreign = sorted(set(there) - set(made))
        if foreign or (not options.overwrite and any(there[name] != made[name] for name in there)):
            changed = foreign or [name for name in there if there[name] != made[name]]
            raise UsageError(
                f"{output} holds another tokenizer",
                found=", ".join(changed),
                fix="another folder" + ("" if foreign else ", or --overwrite"),
            )
        write_folder(output, made)
    return False


def _specs(kind: Kind, output: Path, options: TrainOptions) -> tuple[TokenizerSpec, ...]:
    folder = TokenizerSpec(type="HuggingFaceTokenizer", model=str(output))
    more = (("special_tokens", list(options.special_tokens)),) if options.special_tokens else ()
    if kind == "byte-bpe":
        vocabulary, merges = str(output / "vocab.json"), str(output / "merges.txt")
        gpt2 = TokenizerSpec(type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges, options=more)
        return gpt2, folder
    if kind == "wordpiece":
        vocabulary = str(output / "vocab.txt")
        if options.lower_case:
            return TokenizerSpec(type="BertWordPieceLowerCase", vocab_file=vocabulary, options=more), folder
        return TokenizerSpec(type="BertWordPieceCase", vocab_file=vocabulary), folder
    types = ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"]
    types = types[::-1] if options.preset == "llama2" else types
    return tuple(TokenizerSpec(type=type, model=str(output / "tokenizer.model")) for type in types)


def _entries(made: Mapping[str, bytes]) -> int:
    if "vocab.json" in made:
        import orjson

        return len(orjson.loads(made["vocab.json"]))
    if "vocab.txt" in made:
        return made["vocab.txt"].count(b"\n")
    import sentencepiece

    return int(sentencepiece.SentencePieceProcessor(model_proto=made["tokenizer.model"]).GetPieceSize())
