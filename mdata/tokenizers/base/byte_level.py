"""Byte-level vocabularies: their alphabet, and the patterns that split texts into words before it is applied.

GPT-2 writes bytes as printable characters: printable Latin-1 characters represent their own byte, the other bytes take
U+0100, U+0101 ... in order. The patterns are those for which engines were compared: on every code point in many
contexts, and on random texts, with a vocabulary whose merges reveal every split
(tests/mdata/tokenizers/engines/test_libraries.py). A tokenizer with another pattern uses the exact engine. Steps that
split one after the other are written as the one pattern of the same language, or as its name.
"""

from __future__ import annotations

from types import MappingProxyType

END_OF_TEXT = "<|endoftext|>"

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

# The character of each byte, in the order of the bytes.
ALPHABET = tuple(chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)) for byte in range(256))
_BYTE_OF = MappingProxyType({ord(symbol): byte for byte, symbol in enumerate(ALPHABET)})


def to_bytes(token: str) -> bytes:
    """The bytes of a vocabulary entry, which is spelled in ALPHABET."""
    return token.translate(_BYTE_OF).encode("latin-1")


def from_bytes(content: bytes) -> str:
    """These bytes as a vocabulary entry."""
    return "".join(ALPHABET[byte] for byte in content)


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
# Megatron's TikTokenizer; the second is also Mistral NeMo's.
TIK_V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
TIK_V2 = (
    rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN3_5 = QWEN2.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# Each digit, then GPT-2's words: StarCoder, SmolLM. White space in front of a digit is whole.
DIGITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# DeepSeek-V3's steps: numbers, then Chinese and Japanese, then words.
DEEPSEEK_V3 = "DeepSeek-V3"
DEEPSEEK_V3_STEPS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)

_GPT2_FOR_TIKTOKEN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# The pattern in a tokenizer.json -> the pattern for tiktoken: the same language, possessive where possible.
FOR_TIKTOKEN = MappingProxyType(
    {
        GPT2: _GPT2_FOR_TIKTOKEN,
        GPT2_SHORT: _GPT2_FOR_TIKTOKEN,
        CL100K: CL100K,
        LLAMA3: LLAMA3,
        QWEN2: QWEN2,
        O200K: O200K,
        TIK_V2: TIK_V2,
        QWEN3_5: QWEN3_5,
        DIGITS: (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s"),
    }
)
PATTERNS = (*FOR_TIKTOKEN, DEEPSEEK_V3)
# gigatoken 0.10 takes cl100k's pattern for another one, which splits "\n\xa0" differently, and refuses the digits'.
NOT_FOR_GIGATOKEN = frozenset({CL100K, DIGITS})
