"""What OpenWebText's tools did: which task decides, what falls, and quirks. The oracle compares whole corpora."""

from __future__ import annotations

import pytest

from mdata.cleaning import openwebtext
from mdata.cleaning.languages import load_identifier


def identify(text: str) -> tuple[str, float]:
    """English unless a text says otherwise."""
    return ("", 0.0) if not text.strip() else ("de", 1.0) if "der" in text else ("en", 1.0)


def count(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def test_cleanup_fixes_then_asks_for_english_and_128_tokens():
    pytest.importorskip("ftfy")
    texts = ["word " * 127, "word " * 126, "der " * 200, " ", "x" * 1024, "sch\u00c3\u00b6n " * 130]
    fixed, reasons = openwebtext.cleaned(texts, identify, count)
    small, other, error = (f"openwebtext-{name}" for name in ("small", "non-english", "error"))
    assert reasons == ["", small, other, error, "", ""] and fixed[-1] == "sch\u00f6n " * 130


def test_the_first_task_that_applies_decides():
    pytest.importorskip("ftfy")
    long = "sch\u00c3\u00b6n  " * 90
    texts = ["a" * 511, "JavaScript", "der Mann", " ", long]
    reasons = openwebtext.fixed_by_tasks(texts, openwebtext.TASKS, identify)[1]
    assert reasons == ["openwebtext-remove_512"] * 4 + [""]
    reasons = openwebtext.fixed_by_tasks(texts, openwebtext.TASKS[1:], identify)[1]
    names = ["remove_256_javascript", "remove_512_non_english", "error"]
    assert reasons == ["", *(f"openwebtext-{name}" for name in names), ""]
    both = openwebtext.fixed_by_tasks([long], ["ftfy_fix_text", "general_cleaning"], identify)[0]
    assert both == ["sch\u00f6n  " * 90], "general_cleaning never follows ftfy_fix_text"
    assert openwebtext.fixed_by_tasks([long], ["general_cleaning"], identify)[0] == ["sch\u00c3\u00b6n " * 90]


def test_langdetect_answers_the_same_each_time():
    pytest.importorskip("langdetect")
    ask = load_identifier("langdetect")[0]
    text = "Schoenes blue Haus und garden der the"
    assert len({ask(text) for _ in range(5)}) == 1
