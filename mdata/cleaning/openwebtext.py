"""What Megatron-LM's tools/openwebtext did to texts, with its quirks, for `--compat openwebtext`.

`cleaned` is its cleanup: ftfy, English by langdetect (with seed 0 here; without a seed its answers are random), and at
least 128 tokens of GPT-2, counted where a text has fewer than 1,024 characters. `fixed_by_tasks` is its second tool,
which applies only the first matching task, so general_cleaning never follows ftfy_fix_text. If langdetect finds no
language, the first tool dropped the row silently; here the reason is "openwebtext-error".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mdata import _core
from mdata.cleaning.languages import Identify
from mdata.cleaning.text_repair import fixed

TASKS = ("remove_512", "remove_256_javascript", "remove_512_non_english", "ftfy_fix_text", "general_cleaning")
LEAST_TOKENS = 128  # the end-of-document token included
_LONG_ENOUGH = 8 * LEAST_TOKENS  # characters


def cleaned(
    texts: list[str], identify: Identify, count_tokens: Callable[[list[str]], list[int]]
) -> tuple[list[str], list[str]]:
    """(fixed texts, why each is removed)."""
    texts = fixed(texts)
    languages = [identify(text)[0] for text in texts]
    short = [number for number, text in enumerate(texts) if len(text) < _LONG_ENOUGH and languages[number] == "en"]
    counts = dict(zip(short, count_tokens([texts[number] for number in short]), strict=True))
    reasons = []
    for number, language in enumerate(languages):
        small = counts.get(number, LEAST_TOKENS) + 1 < LEAST_TOKENS
        other = "openwebtext-non-english" if language else "openwebtext-error"
        reasons.append(other if language != "en" else "openwebtext-small" if small else "")
    return texts, reasons


def fixed_by_tasks(texts: list[str], tasks: Sequence[str], identify: Identify) -> tuple[list[str], list[str]]:
    """(texts after the first matching task, why each is removed)."""
    reasons = [_removed_by(text, tasks, identify) for text in texts]
    staying = [text for text, reason in zip(texts, reasons, strict=True) if not reason]
    if "ftfy_fix_text" in tasks:
        staying = fixed(staying)
    elif "general_cleaning" in tasks:
        staying = _core.collapsed(staying)
    following = iter(staying)
    return [text if reason else next(following) for text, reason in zip(texts, reasons, strict=True)], reasons


def _removed_by(text: str, tasks: Sequence[str], identify: Identify) -> str:
    if "remove_512" in tasks and len(text) < 512:
        return "openwebtext-remove_512"
    if "remove_256_javascript" in tasks and len(text) < 256 and "javascript" in text.lower():
        return "openwebtext-remove_256_javascript"
    if "remove_512_non_english" in tasks and len(text) < 512:
        language = identify(text)[0]
        if language != "en":
            return "openwebtext-remove_512_non_english" if language else "openwebtext-error"
    return ""
