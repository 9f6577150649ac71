"""Options that are given and change nothing, because what they belong to is not asked for.

One table says what an option needs; `idle_options` looks the given ones up, without touching a file. An option counts
as given where its value is not the default. What Megatron's scripts pass by habit and mdata never uses is not here:
cli/preprocess_options.py takes those words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING

from mdata.sources.input_files import SourceFile
from mdata.tokenizers.registry import FILES_OF, WITHOUT_FILES

if TYPE_CHECKING:
    from mdata.preprocessing.preprocess_options import PreprocessOptions


@dataclass(frozen=True)
class Need:
    """What gives an option its effect, in words and as a test."""

    words: str
    met: Callable[[PreprocessOptions, Sequence[SourceFile]], bool]


def _file_of_type(field: str) -> Need:
    def met(options: PreprocessOptions, files: Sequence[SourceFile]) -> bool:
        # Of an unknown type nothing is known; the loader refuses it by name.
        return field in FILES_OF.get(options.tokenizer_type, (field,))

    return Need(f"a tokenizer type that reads it: {', '.join(t for t in FILES_OF if field in FILES_OF[t])}", met)


_SENTENCES = Need("--split-sentences", lambda options, files: options.split_sentences)
_CHAT = Need("--chat", lambda options, files: options.chat)
NEEDS: Mapping[str, Need] = MappingProxyType(
    {
        "lang": _SENTENCES,
        "keep_newlines": _SENTENCES,
        "nltk_data": _SENTENCES,
        "chat_template": _CHAT,
        "chat_train_on": _CHAT,
        "keep_sequential_samples": Need("--partitions above 1", lambda options, files: options.partitions > 1),
        "text_documents": Need(
            "plain text in the input", lambda options, files: any(f.format == "text" for f in files)
        ),
        "engine": Need(
            "a tokenizer that is read from files", lambda options, files: options.tokenizer_type not in WITHOUT_FILES
        ),
        **{field: _file_of_type(field) for field in ("tokenizer_model", "vocab_file", "merge_file")},
    }
)


def idle_options(options: PreprocessOptions, files: Sequence[SourceFile]) -> tuple[str, ...]:
    """The options that have no effect on this input, each as the command line has it and with what it needs."""
    usual = {field.name: field.default for field in fields(options)}
    given = (name for name in NEEDS if getattr(options, name) != usual[name])
    return tuple(
        f"--{name.replace('_', '-')} (needs {NEEDS[name].words})"
        for name in given
        if not NEEDS[name].met(options, files)
    )
