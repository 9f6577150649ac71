"""Finds options of a preprocess run that are given but have no effect, because something they need is missing.

A table of needs by option; nothing here reads a file, and a run only notes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

from mdata.preprocessing.preprocess_options import PreprocessOptions
from mdata.sources.input_files import SourceFile
from mdata.tokenizers.registry import FILES_OF, WITHOUT_FILES


@dataclass(frozen=True)
class Need:
    """What an option needs to have an effect: as text, and as a test."""

    text: str
    is_met: Callable[[PreprocessOptions, Sequence[SourceFile]], bool]


def _tokenizer_file(field: str) -> Need:
    def is_met(options: PreprocessOptions, files: Sequence[SourceFile]) -> bool:
        # An unknown type is not judged here; the loader refuses it by name.
        return field in FILES_OF.get(options.tokenizer_type, (field,))

    return Need(f"a tokenizer type that reads it: {', '.join(t for t in FILES_OF if field in FILES_OF[t])}", is_met)


_SENTENCES = Need("--split-sentences", lambda options, files: options.split_sentences)
_CHAT = Need("--chat", lambda options, files: options.chat)
_TEXT = Need("plain text in the input", lambda options, files: any(file.format == "text" for file in files))
_FILES = Need("a tokenizer read from files", lambda options, files: options.tokenizer_type not in WITHOUT_FILES)
NEEDS: Mapping[str, Need] = MappingProxyType(
    {
        "lang": _SENTENCES,
        "keep_newlines": _SENTENCES,
        "nltk_data": _SENTENCES,
        "chat_template": _CHAT,
        "chat_train_on": _CHAT,
        "keep_sequential_samples": Need("--partitions above 1", lambda options, files: options.partitions > 1),
        "text_documents": _TEXT,
        "engine": _FILES,
        **{field: _tokenizer_file(field) for field in ("tokenizer_model", "vocab_file", "merge_file")},
    }
)


def unused_options(options: PreprocessOptions, files: Sequence[SourceFile]) -> list[str]:
    """The options that differ from their defaults and have no effect on this input, with what they need."""
    defaults = {field.name: field.default for field in fields(options)}
    return [
        f"--{name.replace('_', '-')} (needs {need.text})"
        for name, need in NEEDS.items()
        if getattr(options, name) != defaults[name] and not need.is_met(options, files)
    ]
