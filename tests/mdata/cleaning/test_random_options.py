"""`clean` with random steps, thresholds and options against a slow twin that goes text by text, row by row."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mdata.cleaning import rules, text_job
from mdata.cleaning.clean import Cleaner, CleanRules, clean
from mdata.cleaning.text_job import TextJobOptions
from mdata.dedup.row_set import RowSet
from tests.helpers.examples import examples
from tests.mdata.cleaning.test_rules import PIECES
from tests.reference import text_rules as twin

pytestmark = pytest.mark.skipif(twin.EDITION != "14.0.0", reason="the twins ask Python, whose Unicode is another one")

# The limits of a step in the order in which they are tried, each with the measure of the twin that it bounds.
LIMITS = {
    "length": [("min_characters", 0), ("max_characters", 0), ("min_words", 1), ("max_words", 1)],
    "gopher": [
        ("min_words", 0), ("max_words", 0), ("min_mean_length", 1), ("max_mean_length", 1), ("max_hashes", 2),
        ("max_ellipses", 3), ("max_bullet_lines", 4), ("max_ellipsis_lines", 5), ("min_alpha", 6),
        ("min_stop_words", 7),
    ],
    "gopher-repetition": [(name, number) for number, name in enumerate((
        "max_paragraphs", "max_paragraph_characters", "max_lines", "max_line_characters", "max_top_2", "max_top_3",
        "max_top_4", "max_all_5", "max_all_6", "max_all_7", "max_all_8", "max_all_9", "max_all_10",
    ))],
    "fineweb": [("min_stopped_lines", 1), ("max_short_lines", 2), ("max_repeated", 3), ("max_newlines", 4)],
}  # fmt: skip
COUNTS = ("characters", "words", "length")  # numbers of this kind; others are shares
TYPES = {
    "length": rules.LengthRules,
    "gopher": rules.GopherRules,
    "gopher-repetition": rules.RepetitionRules,
    "fineweb": rules.FineWebRules,
}
CHANGING = ("punctuation", "c4", "collapse")
ORDER = ("punctuation", "length", "gopher", "gopher-repetition", "c4", "paragraphs", "fineweb", "collapse")
TEXTS = st.lists(st.sampled_from([*PIECES, "\u201cfive\u201d", "One two three. "]), max_size=25).map("".join)
BAD = (b"{", b"\xff", b"", b"[]")


@st.composite
def limits(draw: Any, step: str) -> Any:
    """Rules of a step: some thresholds off, the others where they part the texts; no minimum above its maximum."""
    found: dict[str, Any] = {}
    for name, _ in LIMITS[step]:
        is_count = any(name.endswith(word) for word in COUNTS) and (step == "length" or not name.startswith("max_p"))
        value = draw(st.sampled_from((-1, -1, 0, 1, 3, 9, 30)) if is_count else st.sampled_from((-1, -1, 0, 0.1, 0.5)))
        least = found.get(name.replace("max_", "min_", 1), -1) if name.startswith("max_") else -1
        found[name] = max(value, least) if value >= 0 else -1
    if step == "length" and max(found.values()) < 0:
        found["min_words"] = 1
    if step == "fineweb":
        found["short_line"] = draw(st.sampled_from((0, 5, 30)))
    return TYPES[step](**found)


@st.composite
def all_rules(draw: Any) -> CleanRules:
    steps = tuple(draw(st.lists(st.sampled_from(ORDER), min_size=1, max_size=5, unique=True)))
    made: dict[str, Any] = {step.replace("-", "_"): draw(limits(step)) for step in steps if step in LIMITS}
    if "c4" in steps:
        made["c4"] = rules.C4Rules(min_sentences=draw(st.sampled_from((-1, 0, 1, 5))))
    if "paragraphs" in steps:
        made["paragraphs"] = rules.ParagraphRules(min_characters=draw(st.sampled_from((-1, 0, 5, 200))))
    return CleanRules(steps=steps, **made)


@st.composite
def rows(draw: Any) -> list[bytes]:
    """Lines of JSON; a text that is ASCII is also written in other ways. Some rows are bad."""
    lines = []
    for number, text in enumerate(draw(st.lists(TEXTS, min_size=1, max_size=30))):
        row = json.dumps({"text": text, "n": number}, ensure_ascii=draw(st.booleans())).encode()
        lines.append(draw(st.sampled_from((row, row, row, row.replace(b": ", b":  "), draw(st.sampled_from(BAD))))))
    return [*lines, b'{"text": "last", "n": 99}']


def slowly_cleaned(text: str, clean_rules: CleanRules) -> tuple[str, str]:
    """(the text after all steps, why it is removed or "")."""
    for step in (step for step in ORDER if step in clean_rules.steps):
        reason = ""
        if step == "punctuation":
            text = Cleaner(CleanRules(steps=(step,))).clean([text], [])[0][0]
        elif step == "collapse":
            text = twin.collapsed(text)
        elif step == "c4":
            reason, text = twin.c4(text, clean_rules.c4.min_sentences)
        elif step == "paragraphs":
            too_short = twin.third_longest(text) < clean_rules.paragraphs.min_characters
            reason = "paragraphs-min-characters" if too_short else ""
        else:
            reason = _first_missed(step, _measures(step, text, clean_rules), clean_rules.of(step))
        if reason:
            return text, reason
    return text, ""


def _measures(step: str, text: str, clean_rules: CleanRules) -> Sequence[float]:
    words = twin.words_of(text)
    if step == "length":
        return [len(text), sum(not twin.is_symbol(word) for word in words)]
    if step == "gopher":
        return twin.gopher(text, words, list(rules.STOP_WORDS))
    if step == "gopher-repetition":
        return twin.repetition(text, words) if text else []
    return twin.fineweb(text, words, clean_rules.fineweb.short_line)


def _first_missed(step: str, measures: Sequence[float], of_step: Any) -> str:
    if not measures or (step == "fineweb" and not measures[0]):
        return f"{step}-empty"
    for name, column in LIMITS[step]:
        bound, value = getattr(of_step, name), measures[column]
        if bound >= 0 and (value < bound if name.startswith("min_") else value > bound):
            return f"{step}-{name.replace('_', '-')}"
    return ""


def _content(folder: Path, compression: str) -> bytes:
    (path,) = folder.glob("a.jsonl*")
    data = path.read_bytes()
    if compression == "zstd":
        return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    return gzip.decompress(data) if compression == "gzip" else data


@examples(20)
@given(
    clean_rules=all_rules(),
    lines=rows(),
    compression=st.sampled_from(["none", "gzip", "zstd"]),
    least=st.sampled_from([None, 3, 50]),
    block=st.sampled_from([1, 300, 1 << 20]),
    workers=st.sampled_from([1, 1, 1, 3]),
)
def test_the_output_is_what_the_twin_says(clean_rules, lines, compression, least, block, workers):
    """Also: each row is counted once, in its order; and rows that only had to pass do so again."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_job, "BLOCK_BYTES", block)
        folder = Path(name)
        (source := folder / "a.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        out, removed, quarantine = folder / "out", folder / "removed.jsonl", folder / "bad.jsonl"
        given = {
            "input": source, "compression": compression, "where": None if least is None else f"n >= {least}",
            "on_error": "quarantine", "quarantine": str(quarantine), "removed": str(removed),
        }  # fmt: skip
        options = TextJobOptions(output=out, workers=workers, **given)
        result = clean(options, clean_rules)

        wanted, reasons, changed, bad = [], [], 0, []
        for row, line in enumerate(lines, 1):
            if line in BAD:
                bad.append(row)
                continue
            record = json.loads(line)
            if least is not None and record["n"] < least:
                continue
            text, reason = slowly_cleaned(record["text"], clean_rules)
            if reason:
                reasons.append({"file": str(source), "row": row, "reason": reason, "text": record["text"]})
                continue
            changed += text != record["text"]
            after = json.dumps({**record, "text": text}, ensure_ascii=False, separators=(",", ":")).encode()
            wanted.append(line if text == record["text"] else after)
        assert _content(out, compression).splitlines() == wanted
        assert [json.loads(line) for line in removed.read_bytes().splitlines()] == reasons
        assert [json.loads(line)["row"] for line in quarantine.read_bytes().splitlines()] == bad
        assert result.removed == Counter(entry["reason"] for entry in reasons)
        assert (result.rows, result.kept, result.changed, result.bad) == (len(lines), len(wanted), changed, len(bad))
        assert result.kept + sum(result.removed.values()) + result.bad + result.filtered == result.rows

        if not set(clean_rules.steps) & {*CHANGING}:
            kept = next(out.glob("a.jsonl*"))
            again = clean(TextJobOptions(input=kept, output=folder / "again", workers=1), clean_rules)
            assert (again.kept, again.removed) == (len(wanted), {})
            marked = TextJobOptions(input=source, output=folder / "rows", workers=1, rows_only=True, on_error="skip")
            clean(marked, clean_rules)
            fallen = {entry["row"] for entry in reasons}
            (flags,) = RowSet.open(folder / "rows").removed
            if least is None:
                assert {row for row, flag in enumerate(flags, 1) if flag} == fallen
