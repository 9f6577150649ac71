"""The patterns that cut texts into words, for which engines were compared.

Compared means: every code point in much company, and random texts, with a vocabulary whose merges make each cut visible
(tests/mdata/tokenizers/engines/test_libraries.py). Left: as a tokenizer.json writes it, and what tiktoken is given: the
same language, where possible without going back into runs. A pattern that is not here is left to the exact engine.
"""

from __future__ import annotations

from types import MappingProxyType

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_SHORT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
LLAMA3 = CL100K.replace(r"\s*[\r\n]|", r"\s*[\r\n]+|")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_ENDING}|{_WORD}{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Megatron's TikTokenizer; the second is Mistral NeMo's too.
TIK_V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
TIK_V2 = (
    rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2_FOR_TIKTOKEN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

FOR_TIKTOKEN = MappingProxyType(
    {
        GPT2: _GPT2_FOR_TIKTOKEN,
        GPT2_SHORT: _GPT2_FOR_TIKTOKEN,
        CL100K: CL100K,
        LLAMA3: LLAMA3,
        QWEN2: QWEN2,
        O200K: O200K,
        TIK_V2: TIK_V2,
    }
)
# gigatoken 0.10 takes this one for cl100k's, and cuts "\n\xa0" otherwise than the pattern says.
NOT_FOR_GIGATOKEN = frozenset({CL100K})
