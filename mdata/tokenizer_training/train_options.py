"""The options of `mdata train-tokenizer` besides input, output, kind and size, and which kind takes which.

Nothing here reads a file: `check_options` refuses options that are wrong for any input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from mdata.errors import UsageError
from mdata.sources.input_files import Format
from mdata.tokenizer_training.trainers import BERT_TOKENS, Kind
from mdata.util.option_synonyms import nearest

SMALLEST_VOCABULARY = 257
# Trainers allocate memory for all entries before they read text; no vocabulary in use has a tenth of these.
_LARGEST_VOCABULARY = 1 << 24
DEFAULT_SAMPLE_BYTES = MappingProxyType(
    # sentencepiece holds all sentences, and unigram takes about twenty times their size.
    {"byte-bpe": 1 << 30, "wordpiece": 1 << 30, "sentencepiece-bpe": 256 << 20, "sentencepiece-unigram": 64 << 20}
)
_SENTENCEPIECE = ("preset", "byte_fallback", "split_digits", "pad", "user_symbols", "normalization")
_OPTIONS_OF = MappingProxyType(
    {
        "byte-bpe": ("special_tokens",),
        "wordpiece": ("special_tokens", "lower_case", "character_coverage"),
        "sentencepiece-bpe": ("special_tokens", "character_coverage", *_SENTENCEPIECE),
        "sentencepiece-unigram": ("special_tokens", "character_coverage", *_SENTENCEPIECE),
    }
)
_PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama2": {
            "byte_fallback": True,
            "split_digits": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
            "character_coverage": 0.99995,
        }
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options besides input, output, kind and size.

    Args:
        json_keys, input_format, text_documents, max_record_bytes, include, exclude: as for `preprocess`.
        on_error: a bad row stops the work, or is skipped and counted.
        sample_bytes: how much decompressed input to train on; None: 1 GiB (sentencepiece-bpe 256 MiB, -unigram 64 MiB).
        seed: of the sample.
        special_tokens: additional ones, after those of the kind.
        lower_case: wordpiece: for BertWordPieceLowerCase.
        character_coverage: this share of the characters get an entry; the others are unknown.
        preset: sentencepiece: "llama2" for the form of Llama 2's model.
        byte_fallback: sentencepiece: characters without an entry become their bytes.
        split_digits: sentencepiece: every digit is a piece.
        pad: sentencepiece: a piece <pad>, id 3.
        user_symbols: sentencepiece: pieces that are never split.
        normalization: sentencepiece: nmt_nfkc (default), nfkc, nmt_nfkc_cf, nfkc_cf or identity.
        overwrite: replace another tokenizer in the output folder.
    """

    json_keys: tuple[str, ...] = ("text",)
    input_format: Literal["auto"] | Format = "auto"
    text_documents: Literal["file", "paragraph"] = "file"
    max_record_bytes: int = 64 << 20
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    on_error: Literal["stop", "skip"] = "stop"
    sample_bytes: int | None = None
    seed: int = 1234
    special_tokens: tuple[str, ...] = ()
    lower_case: bool = False
    character_coverage: float | None = None
    preset: Literal["llama2"] | None = None
    byte_fallback: bool = False
    split_digits: bool = False
    pad: bool = False
    user_symbols: tuple[str, ...] = ()
    normalization: str | None = None
    overwrite: bool = False


def check_options(kind: str, vocab_size: int, *, options: TrainOptions) -> None:
    """Refuse options that cannot work, before anything is read.

    Raises:
        UsageError: names the option and its value.
    """
    if kind not in get_args(Kind):
        close = nearest(kind, get_args(Kind))
        raise UsageError(f"kind={kind!r}", expected=", ".join(get_args(Kind)), fix=f"{close}?" if close else None)
    for name in ("special_tokens", "lower_case", "character_coverage", *_SENTENCEPIECE):
        if getattr(options, name) != getattr(TrainOptions(), name) and name not in _OPTIONS_OF[kind]:
            kinds = [other for other in get_args(Kind) if name in _OPTIONS_OF[other]]
            raise UsageError(f"{name} has no meaning for {kind}", expected=f"kind {' or '.join(kinds)}")
    fixed = len(options.special_tokens)
    fixed += {"byte-bpe": SMALLEST_VOCABULARY, "wordpiece": len(BERT_TOKENS)}.get(kind, 3 + options.pad)
    if options.byte_fallback or options.preset == "llama2":
        fixed += 256
    if vocab_size < fixed:
        least = "the 256 bytes and <|endoftext|>" if kind == "byte-bpe" else "special tokens and bytes alone"
        raise UsageError(f"a vocabulary of {vocab_size} is too small", expected=f"at least {fixed}: {least}")
    if vocab_size > _LARGEST_VOCABULARY:
        raise UsageError(f"a vocabulary of {vocab_size} is too large", expected=f"at most {_LARGEST_VOCABULARY}")
    if options.sample_bytes is not None and options.sample_bytes < 1:
        raise UsageError(f"sample_bytes={options.sample_bytes}", expected="at least 1")
    if options.character_coverage is not None and not 0.5 <= options.character_coverage <= 1:
        raise UsageError(f"character_coverage={options.character_coverage}", expected="0.5 to 1, such as 0.9995")
    if options.preset is not None and options.preset not in _PRESETS:
        raise UsageError(f"preset={options.preset!r}", expected=" or ".join(_PRESETS))
    repeated = [t for t, times in Counter((*options.special_tokens, *options.user_symbols)).items() if times > 1]
    if repeated or not all((*options.special_tokens, *options.user_symbols, "x")):
        raise UsageError("special tokens and symbols must be different and not empty", found=", ".join(repeated))


def sentencepiece_options(options: TrainOptions) -> dict[str, Any]:
    """The options with the names of sentencepiece's trainer."""
    arguments: dict[str, Any] = {"user_defined_symbols": list(options.user_symbols), "pad_id": 3 if options.pad else -1}
    arguments |= _PRESETS[options.preset] if options.preset else {}
    arguments |= {name: True for name in ("byte_fallback", "split_digits") if getattr(options, name)}
    if options.character_coverage is not None:
        arguments["character_coverage"] = options.character_coverage
    if options.normalization is not None:
        arguments["normalization_rule_name"] = options.normalization
    return arguments
